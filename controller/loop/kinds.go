// SPDX-License-Identifier: Apache-2.0

package loop

import (
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Kind is a kind of object that the API serves and that may own others or be owned.
type Kind struct {
	schema.GroupVersionResource
	Kind       string
	Namespaced bool
}

// Kinds is the list of them: the garbage collector and the deletion of namespaces
// watch these. A kind that the API gains is added here. Events are left out on
// purpose: nothing owns them, there are many, and they go with their namespace.
func Kinds() []Kind {
	core, apps := corev1.SchemeGroupVersion, appsv1.SchemeGroupVersion
	return []Kind{
		{core.WithResource("namespaces"), "Namespace", false},
		{core.WithResource("nodes"), "Node", false},
		{core.WithResource("pods"), "Pod", true},
		{core.WithResource("services"), "Service", true},
		{core.WithResource("endpoints"), "Endpoints", true},
		{core.WithResource("replicationcontrollers"), "ReplicationController", true},
		{core.WithResource("persistentvolumeclaims"), "PersistentVolumeClaim", true},
		{core.WithResource("configmaps"), "ConfigMap", true},
		{core.WithResource("secrets"), "Secret", true},
		{core.WithResource("serviceaccounts"), "ServiceAccount", true},
		{apps.WithResource("deployments"), "Deployment", true},
		{apps.WithResource("replicasets"), "ReplicaSet", true},
		{apps.WithResource("statefulsets"), "StatefulSet", true},
		{apps.WithResource("daemonsets"), "DaemonSet", true},
		{apps.WithResource("controllerrevisions"), "ControllerRevision", true},
		{policyv1.SchemeGroupVersion.WithResource("poddisruptionbudgets"), "PodDisruptionBudget", true},
		{batchv1.SchemeGroupVersion.WithResource("jobs"), "Job", true},
		{batchv1.SchemeGroupVersion.WithResource("cronjobs"), "CronJob", true},
		{discoveryv1.SchemeGroupVersion.WithResource("endpointslices"), "EndpointSlice", true},
		{coordinationv1.SchemeGroupVersion.WithResource("leases"), "Lease", true},
	}
}
