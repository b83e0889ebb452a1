// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"reflect"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/diff"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func podKind() Kind {
	return Kind{
		Resource: "pods", Singular: "pod", Kind: "Pod",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		WatchCache: true,
		ShortNames: []string{"po"}, Categories: []string{"all"},
		New: newObject[corev1.Pod], NewList: newObject[corev1.PodList],
		Default:          forObject(defaultPod),
		TracksGeneration: true,
		PrepareForCreate: onCreate(preparePod),
		PrepareForUpdate: onUpdate(func(_ context.Context, pod, old *corev1.Pod) {
			// What is bound to a pod's life may only change by its own ways:
			// the qos class with the resources, ephemeral containers by their
			// subresource.
			pod.Spec.EphemeralContainers = old.Spec.EphemeralContainers
		}),
		Validate: validates(validatePod),
		ValidateCreate: validates(func(pod *corev1.Pod) field.ErrorList {
			if len(pod.Spec.EphemeralContainers) == 0 {
				return nil
			}
			return field.ErrorList{field.Forbidden(field.NewPath("spec", "ephemeralContainers"), "cannot be set on create")}
		}),
		ValidateUpdate: validatesUpdate(validatePodUpdate),
		Warnings:       warns(podWarnings),
		Status: &StatusStrategy{
			Prepare: onUpdate(func(_ context.Context, pod, old *corev1.Pod) {
				pod.DeletionGracePeriodSeconds = old.DeletionGracePeriodSeconds
				if pod.Status.QOSClass == "" {
					pod.Status.QOSClass = old.Status.QOSClass
				}
			}),
			Validate: validatesUpdate(validatePodStatus),
		},
		Columns:     podColumns(),
		Row:         podRow,
		FieldLabels: []string{"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "spec.hostNetwork", "status.phase", "status.podIP", "status.podIPs", "status.nominatedNodeName"},
		FieldAliases: map[string]string{
			"spec.host": "spec.nodeName",
		},
		Fields:           fieldsOf(podFields),
		IndexedField:     "spec.nodeName",
		Graceful:         podGraceful,
		Subresources:     podSubresources,
		SubresourceTypes: podSubresourceTypes(),
		AddToScheme:      addPodOptions,
	}
}

func podFields(p *corev1.Pod) fields.Set {
	ip := p.Status.PodIP
	if len(p.Status.PodIPs) > 0 {
		ip = p.Status.PodIPs[0].IP
	}
	return fields.Set{
		"spec.nodeName":            p.Spec.NodeName,
		"spec.restartPolicy":       string(p.Spec.RestartPolicy),
		"spec.schedulerName":       p.Spec.SchedulerName,
		"spec.serviceAccountName":  p.Spec.ServiceAccountName,
		"spec.hostNetwork":         strconv.FormatBool(p.Spec.HostNetwork),
		"status.phase":             string(p.Status.Phase),
		"status.podIP":             ip,
		"status.podIPs":            ip,
		"status.nominatedNodeName": p.Status.NominatedNodeName,
	}
}

func preparePod(_ context.Context, pod *corev1.Pod) {
	pod.Status = corev1.PodStatus{Phase: corev1.PodPending, QOSClass: podQOS(pod)}
	if len(pod.Spec.SchedulingGates) > 0 {
		pod.Status.Conditions = []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonSchedulingGated,
			Message: "Scheduling is blocked due to non-empty scheduling gates",
		}}
	}
}

// podQOS is the quality of service class, from the requests and limits for
// processor and memory of all containers.
func podQOS(pod *corev1.Pod) corev1.PodQOSClass {
	guaranteed, none := true, true
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for _, c := range list {
			for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
				request, limit := c.Resources.Requests[name], c.Resources.Limits[name]
				if !request.IsZero() || !limit.IsZero() {
					none = false
				}
				if limit.IsZero() || request.Cmp(limit) != 0 {
					guaranteed = false
				}
			}
		}
	}
	switch {
	case none:
		return corev1.PodQOSBestEffort
	case guaranteed:
		return corev1.PodQOSGuaranteed
	default:
		return corev1.PodQOSBurstable
	}
}

// validatePodUpdate allows the few changes that a running pod can follow.
func validatePodUpdate(pod, old *corev1.Pod) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	if len(pod.Spec.Containers) != len(old.Spec.Containers) {
		return append(errs, field.Forbidden(spec.Child("containers"), "pod updates may not add or remove containers"))
	}
	if len(pod.Spec.InitContainers) != len(old.Spec.InitContainers) {
		return append(errs, field.Forbidden(spec.Child("initContainers"), "pod updates may not add or remove containers"))
	}
	if was := old.Spec.ActiveDeadlineSeconds; was != nil {
		now := pod.Spec.ActiveDeadlineSeconds
		if now == nil || *now > *was {
			errs = append(errs, field.Invalid(spec.Child("activeDeadlineSeconds"), now, "must be less than or equal to previous value"))
		}
	}
	errs = append(errs, validateAddedTolerations(pod.Spec.Tolerations, old.Spec.Tolerations, spec.Child("tolerations"))...)
	for i, g := range pod.Spec.SchedulingGates {
		if !containsGate(old.Spec.SchedulingGates, g) {
			errs = append(errs, field.Forbidden(spec.Child("schedulingGates").Index(i), fmt.Sprintf("only deletion is allowed, but found new scheduling gate '%s'", g.Name)))
		}
	}
	// With what may change put back to what it was, the two must be equal.
	munged := pod.Spec.DeepCopy()
	for i := range munged.Containers {
		munged.Containers[i].Image = old.Spec.Containers[i].Image
	}
	for i := range munged.InitContainers {
		munged.InitContainers[i].Image = old.Spec.InitContainers[i].Image
	}
	munged.ActiveDeadlineSeconds = old.Spec.ActiveDeadlineSeconds
	munged.Tolerations = old.Spec.Tolerations
	munged.SchedulingGates = old.Spec.SchedulingGates
	munged.EphemeralContainers = old.Spec.EphemeralContainers
	if g := old.Spec.TerminationGracePeriodSeconds; g != nil && *g < 0 {
		munged.TerminationGracePeriodSeconds = g
	}
	if len(old.Spec.SchedulingGates) > 0 {
		// A pod that is not scheduled yet may be moved.
		munged.NodeSelector = old.Spec.NodeSelector
		munged.Affinity = old.Spec.Affinity
	}
	if !equality.Semantic.DeepEqual(*munged, old.Spec) {
		errs = append(errs, field.Forbidden(spec, fmt.Sprintf("pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)\n%v", diff.Diff(old.Spec, *munged))))
	}
	return errs
}

func containsGate(gates []corev1.PodSchedulingGate, g corev1.PodSchedulingGate) bool {
	for _, have := range gates {
		if have == g {
			return true
		}
	}
	return false
}

func validateAddedTolerations(now, was []corev1.Toleration, p *field.Path) field.ErrorList {
	for _, t := range was {
		found := false
		for _, n := range now {
			// Only the time may change.
			n.TolerationSeconds, t.TolerationSeconds = nil, nil
			found = found || reflect.DeepEqual(n, t)
		}
		if !found {
			return field.ErrorList{field.Forbidden(p, "existing toleration can not be modified except its tolerationSeconds")}
		}
	}
	return nil
}

func validatePodStatus(pod, old *corev1.Pod) field.ErrorList {
	p := field.NewPath("status")
	var errs field.ErrorList
	if pod.Spec.NodeName != old.Spec.NodeName && old.Spec.NodeName != "" {
		errs = append(errs, field.Forbidden(p.Child("nodeName"), "may not be changed directly"))
	}
	if pod.Status.Phase != "" {
		errs = append(errs, oneOf(pod.Status.Phase, p.Child("phase"), corev1.PodPending, corev1.PodRunning, corev1.PodSucceeded, corev1.PodFailed, corev1.PodUnknown)...)
	}
	if len(pod.Status.PodIPs) > 0 && pod.Status.PodIP != "" && pod.Status.PodIPs[0].IP != pod.Status.PodIP {
		errs = append(errs, field.Invalid(p.Child("podIPs").Index(0).Child("ip"), pod.Status.PodIPs[0].IP, "must be the same as status.podIP"))
	}
	return errs
}

// podGraceful decides how long a deleted pod lingers: as long as it asks for
// when a node runs it, not at all when none does or it has ended.
func podGraceful(_ context.Context, obj runtime.Object, options *metav1.DeleteOptions) bool {
	if options == nil {
		return false
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return false
	}
	var period int64
	switch {
	case options.GracePeriodSeconds != nil:
		period = *options.GracePeriodSeconds
	case pod.Spec.TerminationGracePeriodSeconds != nil:
		period = *pod.Spec.TerminationGracePeriodSeconds
	default:
		period = corev1.DefaultTerminationGracePeriodSeconds
	}
	if pod.Spec.NodeName == "" || pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded {
		period = 0
	}
	if period < 0 {
		period = 1
	}
	options.GracePeriodSeconds = &period
	return true
}
