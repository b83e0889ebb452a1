// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// What people made and what the lab made is told apart by managed fields, which
// say who wrote what: the lab's own parts write as system users. So this
// needs no list of the objects that controllers make, and holds for
// kinds that come later.

// importManager is the field manager of what ImportState writes. It is a
// person's: what was imported can be exported again.
const importManager = "kplab"

// labManager tells whether a field manager is a part of the lab.
func labManager(name string) bool { return strings.HasPrefix(name, "system:") }

// madeByLab tells whether only the lab's own parts have written an object,
// besides its status.
func madeByLab(u *unstructured.Unstructured) bool {
	entries := u.GetManagedFields()
	people := func(e metav1.ManagedFieldsEntry) bool { return !labManager(e.Manager) && e.Subresource != "status" }
	return len(entries) > 0 && !slices.ContainsFunc(entries, people)
}

// controlled tells whether a controller made an object for another one.
func controlled(u *unstructured.Unstructured) bool { return metav1.GetControllerOf(u) != nil }

// derived tells whether the lab makes an object by itself.
func derived(u *unstructured.Unstructured) bool {
	switch {
	case isKind(u, "", "Node"), isKind(u, "", "Event"), isKind(u, "events.k8s.io", "Event"), isKind(u, "coordination.k8s.io", "Lease"):
		return true // records of what is or was, not wishes
	case isKind(u, "", "ServiceAccount") && u.GetName() == "default" && len(u.GetManagedFields()) == 0:
		return true // an object without any field that has a manager
	}
	return controlled(u) || madeByLab(u) || thereFromStart(u)
}

// thereFromStart tells whether the API has an object from its first start on. It
// writes these without a manager, so that madeByLab cannot tell.
func thereFromStart(u *unstructured.Unstructured) bool {
	switch {
	case u.GetLabels()["kubernetes.io/bootstrapping"] != "" && u.GetAnnotations()["rbac.authorization.kubernetes.io/autoupdate"] == "true":
		return true // a role or binding of the bootstrap policy
	case isKind(u, "networking.k8s.io", "ServiceCIDR") && u.GetName() == "kubernetes":
		return true // the range of the settings
	case isKind(u, "scheduling.k8s.io", "PriorityClass") && strings.HasPrefix(u.GetName(), "system-"):
		return true // a class that nobody may change
	}
	return false
}

func isKind(u *unstructured.Unstructured, group, kind string) bool {
	gvk := u.GroupVersionKind()
	return gvk.Group == group && gvk.Kind == kind
}

// kubectlName names an object as kubectl does: "deployment.apps/web".
func kubectlName(u *unstructured.Unstructured) string {
	gk := u.GroupVersionKind().GroupKind()
	return strings.ToLower(gk.String()) + "/" + u.GetName()
}

// objectName is kubectlName with the namespace, where it is not the default one.
func objectName(u *unstructured.Unstructured) string {
	if ns := u.GetNamespace(); ns != "" && ns != metav1.NamespaceDefault {
		return kubectlName(u) + " in " + ns
	}
	return kubectlName(u)
}

func secretType(u *unstructured.Unstructured) string {
	t, _, _ := unstructured.NestedString(u.Object, "type")
	return t
}

// cleanObject drops what the server and the lab's controllers set, so that what
// is left can be applied to another lab. Addresses and ports stay: people wrote
// them down, or other things know them by now.
func cleanObject(u *unstructured.Unstructured) {
	people := dropLabFields(u)
	cleanMetadata(u)
	unstructured.RemoveNestedField(u.Object, "status")
	switch gvk := u.GroupVersionKind(); gvk.Group + "/" + gvk.Kind {
	case "/Namespace":
		// The label that the server sets stays: it gives the namespace a field, and
		// so a manager, wherever it is applied.
		unstructured.RemoveNestedField(u.Object, "spec", "finalizers")
	case "/Pod":
		cleanPod(u, people)
	case "batch/Job":
		cleanJob(u)
	case "/Secret":
		if secretType(u) == "kubernetes.io/service-account-token" {
			unstructured.RemoveNestedField(u.Object, "data")
			unstructured.RemoveNestedField(u.Object, "metadata", "annotations", "kubernetes.io/service-account.uid")
		}
	}
	dropEmpty(u.Object, "spec")
	dropEmpty(u.Object, "metadata", "annotations")
	dropEmpty(u.Object, "metadata", "labels")
}

// dropLabFields removes the fields that only the lab's controllers wrote, and
// returns those that people wrote.
func dropLabFields(u *unstructured.Unstructured) *fieldpath.Set {
	people, lab := &fieldpath.Set{}, &fieldpath.Set{}
	for _, e := range u.GetManagedFields() {
		var set fieldpath.Set
		// An entry that cannot be read says nothing about who wrote what.
		if e.Subresource == "status" || e.FieldsV1 == nil || set.FromJSON(e.FieldsV1.GetRawReader()) != nil {
			continue
		}
		if labManager(e.Manager) {
			lab = lab.Union(&set)
		} else {
			people = people.Union(&set)
		}
	}
	lab.Difference(people).Leaves().Iterate(func(p fieldpath.Path) {
		if names, ok := namesOf(p); ok {
			unstructured.RemoveNestedField(u.Object, names...)
		}
	})
	return people
}

// namesOf is a path as the names of nested fields; ok is false when it leads
// through a list.
func namesOf(p fieldpath.Path) (names []string, ok bool) {
	for _, e := range p {
		if e.FieldName == nil {
			return nil, false
		}
		names = append(names, *e.FieldName)
	}
	return names, len(names) > 0
}

// cleanMetadata keeps the name, the namespace, and what people wrote into labels,
// annotations and finalizers.
func cleanMetadata(u *unstructured.Unstructured) {
	for _, field := range []string{
		"uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds",
		"managedFields", "selfLink", "generateName", "ownerReferences",
	} {
		unstructured.RemoveNestedField(u.Object, "metadata", field)
	}
	// It repeats the object; who applies the file writes it anew.
	unstructured.RemoveNestedField(u.Object, "metadata", "annotations", "kubectl.kubernetes.io/last-applied-configuration")
	finalizers := slices.DeleteFunc(u.GetFinalizers(), serverFinalizer)
	if len(finalizers) == 0 {
		unstructured.RemoveNestedField(u.Object, "metadata", "finalizers")
	} else {
		u.SetFinalizers(finalizers)
	}
}

// serverFinalizer tells whether the server or a stock controller sets a
// finalizer, each for its own object.
func serverFinalizer(name string) bool {
	switch name {
	case metav1.FinalizerDeleteDependents, metav1.FinalizerOrphanDependents, "service.kubernetes.io/load-balancer-cleanup",
		"kubernetes.io/pvc-protection", "kubernetes.io/pv-protection", "batch.kubernetes.io/job-tracking":
		return true
	}
	return false
}

// cleanPod drops what the scheduler and admission filled in, which leave no trace
// in managed fields. people are the fields that people wrote.
func cleanPod(u *unstructured.Unstructured, people *fieldpath.Set) {
	for _, field := range []string{"nodeName", "priority", "preemptionPolicy", "serviceAccount"} {
		if !people.Has(fieldpath.MakePathOrDie("spec", field)) {
			unstructured.RemoveNestedField(u.Object, "spec", field)
		}
	}
	// The token's volume has a name that is made up at admission.
	token := func(v any) bool {
		m, _ := v.(map[string]any)
		name, _ := m["name"].(string)
		return strings.HasPrefix(name, "kube-api-access-")
	}
	filterList(u.Object, token, "spec", "volumes")
	// A pod is not created with these.
	unstructured.RemoveNestedField(u.Object, "spec", "ephemeralContainers")
	for _, list := range []string{"containers", "initContainers"} {
		containers, _, _ := unstructured.NestedSlice(u.Object, "spec", list)
		for _, c := range containers {
			if m, ok := c.(map[string]any); ok {
				filterList(m, token, "volumeMounts")
			}
		}
		if len(containers) > 0 {
			// The path is that of a list that was just read.
			_ = unstructured.SetNestedSlice(u.Object, containers, "spec", list)
		}
	}
}

// cleanJob drops the selector that the server made from the Job's UID, and its
// labels; a Job with one of its own says so.
func cleanJob(u *unstructured.Unstructured) {
	if manual, _, _ := unstructured.NestedBool(u.Object, "spec", "manualSelector"); manual {
		return
	}
	unstructured.RemoveNestedField(u.Object, "spec", "selector")
	for _, label := range []string{"controller-uid", "job-name", "batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-name"} {
		unstructured.RemoveNestedField(u.Object, "metadata", "labels", label)
		unstructured.RemoveNestedField(u.Object, "spec", "template", "metadata", "labels", label)
	}
}

// filterList removes the elements of a list for which drop is true, and the list
// when nothing is left.
func filterList(obj map[string]any, drop func(any) bool, path ...string) {
	list, found, err := unstructured.NestedSlice(obj, path...)
	if !found || err != nil {
		return
	}
	if list = slices.DeleteFunc(list, drop); len(list) == 0 {
		unstructured.RemoveNestedField(obj, path...)
		return
	}
	// As above: the list was just read there.
	_ = unstructured.SetNestedSlice(obj, list, path...)
}

func dropEmpty(obj map[string]any, path ...string) {
	if m, found, err := unstructured.NestedMap(obj, path...); found && err == nil && len(m) == 0 {
		unstructured.RemoveNestedField(obj, path...)
	}
}

// compareForImport orders objects so that each finds what it needs: namespaces
// first, then definitions of kinds, then what pods and Services refer to,
// what makes pods after that, and what may refuse others last.
func compareForImport(a, b *unstructured.Unstructured) int {
	return cmp.Or(
		cmp.Compare(rank(a), rank(b)),
		cmp.Compare(a.GroupVersionKind().Group, b.GroupVersionKind().Group),
		cmp.Compare(a.GetKind(), b.GetKind()),
		cmp.Compare(a.GetNamespace(), b.GetNamespace()),
		cmp.Compare(a.GetName(), b.GetName()),
	)
}

// Ranks between which kinds without an entry in rank lie: objects without a
// namespace early, others late.
const (
	rankClusterScoped = 20
	rankNamespaced    = 60
)

func rank(u *unstructured.Unstructured) int {
	switch gvk := u.GroupVersionKind(); gvk.Group + "/" + gvk.Kind {
	case "/Namespace":
		return 0
	case "apiextensions.k8s.io/CustomResourceDefinition":
		return 10
	case "/ServiceAccount":
		return 30
	case "/Secret", "/ConfigMap", "/LimitRange", "/ResourceQuota", "/PersistentVolumeClaim",
		"rbac.authorization.k8s.io/Role", "rbac.authorization.k8s.io/RoleBinding":
		return 40
	case "/Service":
		return 50
	case "/Endpoints", "discovery.k8s.io/EndpointSlice":
		return 55
	case "/Pod", "/ReplicationController", "apps/ReplicaSet", "apps/Deployment", "apps/StatefulSet", "apps/DaemonSet", "batch/Job", "batch/CronJob":
		return 70
	case "admissionregistration.k8s.io/MutatingWebhookConfiguration", "admissionregistration.k8s.io/ValidatingWebhookConfiguration",
		"admissionregistration.k8s.io/ValidatingAdmissionPolicyBinding", "admissionregistration.k8s.io/MutatingAdmissionPolicyBinding":
		return 90
	}
	if u.GetNamespace() == "" {
		return rankClusterScoped
	}
	return rankNamespaced
}
