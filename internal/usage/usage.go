// SPDX-License-Identifier: Apache-2.0

// Package usage measures what an object takes of a resource quota, in upstream's
// names: count/deployments.apps, pods, requests.cpu, services.nodeports and so on. The
// API's admission charges by it and the quota controller counts by it, so that both
// come to the same sum.
package usage

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/selection"
	resourcehelper "k8s.io/component-helpers/resource"
)

const (
	countPrefix    = "count/"
	requestsPrefix = "requests."
	classSuffix    = ".storageclass.storage.k8s.io/"
	hugePages      = "hugepages-"
)

// compute are the resources for which a quota has names of its own, with and without
// a prefix.
var compute = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage}

// CountName is the name under which a quota counts all objects of a resource.
func CountName(gr schema.GroupResource) corev1.ResourceName {
	return corev1.ResourceName(countPrefix + gr.String())
}

// legacy are the resources that a quota also counts under their bare names. Pods are
// not among them: a pod that has ended is an object, and no longer one of the pods.
func legacy(gr schema.GroupResource) bool {
	switch gr {
	case schema.GroupResource{Resource: "configmaps"}, schema.GroupResource{Resource: "persistentvolumeclaims"},
		schema.GroupResource{Resource: "replicationcontrollers"}, schema.GroupResource{Resource: "resourcequotas"},
		schema.GroupResource{Resource: "secrets"}, schema.GroupResource{Resource: "services"}:
		return true
	}
	return false
}

// Resource returns the resource whose objects a quota's name is about.
func Resource(name corev1.ResourceName) schema.GroupResource {
	if counted, ok := strings.CutPrefix(string(name), countPrefix); ok {
		return schema.ParseGroupResource(counted)
	}
	claims := schema.GroupResource{Resource: "persistentvolumeclaims"}
	switch {
	case legacy(schema.GroupResource{Resource: string(name)}):
		return schema.GroupResource{Resource: string(name)}
	case name == corev1.ResourceServicesNodePorts || name == corev1.ResourceServicesLoadBalancers:
		return schema.GroupResource{Resource: "services"}
	case name == corev1.ResourceRequestsStorage || strings.Contains(string(name), classSuffix):
		return claims
	case isPodResource(name):
		return schema.GroupResource{Resource: "pods"}
	}
	return schema.GroupResource{}
}

func isPodResource(name corev1.ResourceName) bool {
	bare := strings.TrimPrefix(strings.TrimPrefix(string(name), requestsPrefix), "limits.")
	switch {
	case name == corev1.ResourcePods, slices.Contains(compute, corev1.ResourceName(bare)):
		return true
	case strings.HasPrefix(strings.TrimPrefix(string(name), requestsPrefix), hugePages):
		return true
	}
	wanted, requests := strings.CutPrefix(string(name), requestsPrefix)
	return requests && isExtended(corev1.ResourceName(wanted))
}

// isExtended tells resources of devices from Kubernetes's own.
func isExtended(name corev1.ResourceName) bool {
	return strings.Contains(string(name), "/") && !strings.Contains(string(name), corev1.ResourceDefaultNamespacePrefix)
}

// Of returns what obj, an object of that resource, takes at that time. Objects of
// other types than pods, services and claims count as one, whatever they are.
func Of(gr schema.GroupResource, obj any, now time.Time) corev1.ResourceList {
	out := corev1.ResourceList{CountName(gr): number(1)}
	if legacy(gr) {
		out[corev1.ResourceName(gr.Resource)] = number(1)
	}
	switch o := obj.(type) {
	case *corev1.Pod:
		if lives(o, now) {
			maps.Copy(out, demand(resourcehelper.PodRequests(o, resourcehelper.PodResourcesOptions{}), resourcehelper.PodLimits(o, resourcehelper.PodResourcesOptions{})))
			out[corev1.ResourcePods] = number(1)
		}
	case *corev1.Service:
		maps.Copy(out, ofService(o))
	case *corev1.PersistentVolumeClaim:
		maps.Copy(out, ofClaim(o))
	}
	return out
}

func number(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.DecimalSI) }

// lives reports whether a pod takes anything: it has not ended, and was not to be gone
// by now.
func lives(pod *corev1.Pod, now time.Time) bool {
	if pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded {
		return false
	}
	if pod.DeletionTimestamp == nil || pod.DeletionGracePeriodSeconds == nil {
		return true
	}
	grace := time.Duration(*pod.DeletionGracePeriodSeconds) * time.Second
	return !now.After(pod.DeletionTimestamp.Add(grace))
}

// demand is what requests and limits are called in a quota.
func demand(requests, limits corev1.ResourceList) corev1.ResourceList {
	out := corev1.ResourceList{}
	for name, q := range requests {
		own := slices.Contains(compute, name) || strings.HasPrefix(string(name), hugePages)
		if own {
			out[name] = q
		}
		if own || isExtended(name) {
			out[requestsPrefix+name] = q
		}
	}
	for name, q := range limits {
		if slices.Contains(compute, name) {
			out["limits."+name] = q
		}
	}
	return out
}

func ofService(s *corev1.Service) corev1.ResourceList {
	ports, balancers := 0, 0
	switch s.Spec.Type {
	case corev1.ServiceTypeNodePort:
		ports = len(s.Spec.Ports)
	case corev1.ServiceTypeLoadBalancer:
		balancers, ports = 1, len(s.Spec.Ports)
		if asked := s.Spec.AllocateLoadBalancerNodePorts; asked != nil && !*asked {
			ports = 0
			for _, p := range s.Spec.Ports {
				if p.NodePort != 0 {
					ports++
				}
			}
		}
	}
	return corev1.ResourceList{
		corev1.ResourceServicesNodePorts: number(int64(ports)), corev1.ResourceServicesLoadBalancers: number(int64(balancers)),
	}
}

func ofClaim(c *corev1.PersistentVolumeClaim) corev1.ResourceList {
	out := corev1.ResourceList{}
	class := c.Annotations[corev1.BetaStorageClassAnnotation]
	if class == "" && c.Spec.StorageClassName != nil {
		class = *c.Spec.StorageClassName
	}
	of := func(name corev1.ResourceName) corev1.ResourceName {
		return corev1.ResourceName(class+classSuffix) + name
	}
	if class != "" {
		out[of(corev1.ResourcePersistentVolumeClaims)] = number(1)
	}
	if size, asked := c.Spec.Resources.Requests[corev1.ResourceStorage]; asked {
		size = size.DeepCopy()
		size.RoundUp(0) // whole bytes
		out[corev1.ResourceRequestsStorage] = size
		if class != "" {
			out[of(corev1.ResourceRequestsStorage)] = size
		}
	}
	return out
}

// Missing says which containers of a pod lack a request or a limit for what a quota
// with these names counts; "" when none does. Upstream demands it for processor and
// memory alone.
func Missing(pod *corev1.Pod, names []corev1.ResourceName) string {
	lacking := map[corev1.ResourceName][]string{}
	for _, containers := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range containers {
			has := demand(containers[i].Resources.Requests, containers[i].Resources.Limits)
			for _, name := range names {
				if _, ok := has[name]; !ok && mustBeSaid(name) {
					lacking[name] = append(lacking[name], containers[i].Name)
				}
			}
		}
	}
	if len(lacking) == 0 {
		return ""
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(lacking)) {
		slices.Sort(lacking[name])
		parts = append(parts, fmt.Sprintf("%s for: %s", name, strings.Join(lacking[name], ",")))
	}
	return "must specify " + strings.Join(parts, "; ")
}

func mustBeSaid(name corev1.ResourceName) bool {
	bare := strings.TrimPrefix(strings.TrimPrefix(string(name), requestsPrefix), "limits.")
	return bare == string(corev1.ResourceCPU) || bare == string(corev1.ResourceMemory)
}

// Scopes returns all that an object has to match to count for the quota.
func Scopes(q *corev1.ResourceQuota) []corev1.ScopedResourceSelectorRequirement {
	var out []corev1.ScopedResourceSelectorRequirement
	for _, scope := range q.Spec.Scopes {
		out = append(out, corev1.ScopedResourceSelectorRequirement{ScopeName: scope, Operator: corev1.ScopeSelectorOpExists})
	}
	if q.Spec.ScopeSelector != nil {
		out = append(out, q.Spec.ScopeSelector.MatchExpressions...)
	}
	return out
}

// InScope reports whether obj matches one requirement. Only pods match any.
func InScope(obj any, r corev1.ScopedResourceSelectorRequirement) (bool, error) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return false, nil
	}
	switch r.ScopeName {
	case corev1.ResourceQuotaScopeTerminating:
		return ends(pod), nil
	case corev1.ResourceQuotaScopeNotTerminating:
		return !ends(pod), nil
	case corev1.ResourceQuotaScopeBestEffort:
		return pod.Status.QOSClass == corev1.PodQOSBestEffort, nil
	case corev1.ResourceQuotaScopeNotBestEffort:
		return pod.Status.QOSClass != corev1.PodQOSBestEffort, nil
	case corev1.ResourceQuotaScopePriorityClass:
		return ofPriority(pod, r)
	case corev1.ResourceQuotaScopeCrossNamespacePodAffinity:
		return looksElsewhere(pod.Spec.Affinity), nil
	}
	return false, nil
}

func ends(pod *corev1.Pod) bool {
	return pod.Spec.ActiveDeadlineSeconds != nil && *pod.Spec.ActiveDeadlineSeconds >= 0
}

func ofPriority(pod *corev1.Pod, r corev1.ScopedResourceSelectorRequirement) (bool, error) {
	operators := map[corev1.ScopeSelectorOperator]selection.Operator{
		corev1.ScopeSelectorOpIn: selection.In, corev1.ScopeSelectorOpNotIn: selection.NotIn,
		corev1.ScopeSelectorOpExists: selection.Exists, corev1.ScopeSelectorOpDoesNotExist: selection.DoesNotExist,
	}
	need, err := labels.NewRequirement(string(r.ScopeName), operators[r.Operator], r.Values)
	if err != nil {
		return false, fmt.Errorf("failed to parse and convert selector: %w", err)
	}
	set := labels.Set{}
	if name := pod.Spec.PriorityClassName; name != "" {
		set[string(r.ScopeName)] = name
	}
	return need.Matches(set), nil
}

// looksElsewhere reports whether affinity names pods of other namespaces.
func looksElsewhere(a *corev1.Affinity) bool {
	if a == nil {
		return false
	}
	elsewhere := func(t corev1.PodAffinityTerm) bool { return len(t.Namespaces) > 0 || t.NamespaceSelector != nil }
	weighted := func(t corev1.WeightedPodAffinityTerm) bool { return elsewhere(t.PodAffinityTerm) }
	return a.PodAffinity != nil && (slices.ContainsFunc(a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution, elsewhere) ||
		slices.ContainsFunc(a.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution, weighted)) ||
		a.PodAntiAffinity != nil && (slices.ContainsFunc(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution, elsewhere) ||
			slices.ContainsFunc(a.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution, weighted))
}
