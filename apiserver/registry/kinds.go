// SPDX-License-Identifier: Apache-2.0

package registry

// Kinds returns every kind that the API serves, in the order of the discovery
// documents. The function of each is in the file that bears its name.
func Kinds() []Kind {
	return []Kind{
		namespaceKind(),
		nodeKind(),
		podKind(),
		serviceKind(),
		endpointsKind(),
		endpointSliceKind(),
		deploymentKind(),
		replicaSetKind(),
		configMapKind(),
		secretKind(),
		serviceAccountKind(),
		eventKind(),
		leaseKind(),
		ingressKind(),
		ingressClassKind(),
		networkPolicyKind(),
		serviceCIDRKind(),
		roleKind(),
		clusterRoleKind(),
		roleBindingKind(),
		clusterRoleBindingKind(),
		storageClassKind(),
		csiDriverKind(),
		csiNodeKind(),
		volumeAttachmentKind(),
		csiStorageCapacityKind(),
		runtimeClassKind(),
		validatingWebhookConfigurationKind(),
		mutatingWebhookConfigurationKind(),
		validatingAdmissionPolicyKind(),
		validatingAdmissionPolicyBindingKind(),
		certificateSigningRequestKind(),
	}
}
