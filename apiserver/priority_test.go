// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// TestPriorityClasses: two are there from the start; a pod gets what its class says,
// or the default class; there is one default.
func TestPriorityClasses(t *testing.T) {
	s, w := startWire(t)
	ctx := t.Context()
	classes, pods := s.client.SchedulingV1().PriorityClasses(), s.client.CoreV1().Pods("default")

	found, err := classes.List(ctx, metav1.ListOptions{})
	if err != nil || len(found.Items) != 2 {
		t.Fatalf("%v, %d classes", err, len(found.Items))
	}
	for i, want := range []schedulingv1.PriorityClass{
		{Value: 2000000000, Description: "Used for system critical pods that must run in the cluster, but can be moved to another node if necessary."},
		{Value: 2000001000, Description: "Used for system critical pods that must not be moved from their current node."},
	} {
		if c := found.Items[i]; c.Value != want.Value || c.Description != want.Description || c.UID == "" || ptr.Deref(c.PreemptionPolicy, "") != corev1.PreemptLowerPriority {
			t.Errorf("class %+v", c)
		}
	}

	create := func(name, class string, change func(*corev1.Pod)) (*corev1.Pod, error) {
		pod := testPod(name)
		pod.Spec.PriorityClassName = class
		if change != nil {
			change(pod)
		}
		return pods.Create(ctx, pod, metav1.CreateOptions{})
	}
	check := func(name, class string, wantClass string, priority int32, policy corev1.PreemptionPolicy) {
		t.Helper()
		pod, err := create(name, class, nil)
		if err != nil {
			t.Error(err)
			return
		}
		if pod.Spec.PriorityClassName != wantClass || *pod.Spec.Priority != priority || *pod.Spec.PreemptionPolicy != policy {
			t.Errorf("%s: %q %d %s", name, pod.Spec.PriorityClassName, *pod.Spec.Priority, *pod.Spec.PreemptionPolicy)
		}
	}
	add := func(name string, value int32, change func(*schedulingv1.PriorityClass)) error {
		c := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value}
		if change != nil {
			change(c)
		}
		_, err := classes.Create(ctx, c, metav1.CreateOptions{})
		return err
	}
	isDefault := func(c *schedulingv1.PriorityClass) { c.GlobalDefault = true }

	check("none", "", "", 0, corev1.PreemptLowerPriority)
	check("critical", "system-node-critical", "system-node-critical", 2000001000, corev1.PreemptLowerPriority)
	_, err = create("unknown", "gold", nil)
	wantError(t, "an unknown class", err, apierrors.IsForbidden, `pods "unknown" is forbidden: no PriorityClass with name gold was found`)
	if err := add("gold", 1000, func(c *schedulingv1.PriorityClass) { c.PreemptionPolicy = ptr.To(corev1.PreemptNever) }); err != nil {
		t.Fatal(err)
	}
	check("golden", "gold", "gold", 1000, corev1.PreemptNever)
	_, err = create("cheat", "gold", func(p *corev1.Pod) { p.Spec.Priority = ptr.To[int32](5) })
	wantError(t, "a priority of one's own", err, apierrors.IsForbidden,
		"the integer value of priority (5) must not be provided in pod spec; priority admission controller computed 1000 from the given PriorityClass name")
	_, err = create("cheat", "gold", func(p *corev1.Pod) { p.Spec.PreemptionPolicy = ptr.To(corev1.PreemptLowerPriority) })
	wantError(t, "a policy of one's own", err, apierrors.IsForbidden,
		"the string value of PreemptionPolicy (PreemptLowerPriority) must not be provided in pod spec; priority admission controller computed Never from the given PriorityClass name")

	if err := add("plain", 10, isDefault); err != nil {
		t.Fatal(err)
	}
	check("by-default", "", "plain", 10, corev1.PreemptLowerPriority)
	wantError(t, "a second default", add("second", 5, isDefault), apierrors.IsForbidden, "PriorityClass plain is already marked as default. Only one default can exist")
	path := "/apis/scheduling.k8s.io/v1/priorityclasses/"
	merge := []string{"Content-Type", "application/merge-patch+json"}
	w.send("PATCH", path+"gold", `{"globalDefault":true}`, merge...).status(t, 403, metav1.StatusReasonForbidden, "already marked as default")
	w.send("PATCH", path+"plain", `{"description":"as it was","globalDefault":true}`, merge...).want(t, 200)
	w.send("PATCH", path+"gold", `{"value":7}`, merge...).status(t, 422, metav1.StatusReasonInvalid, "may not be changed in an update")

	wantError(t, "too high", add("high", 1000000001, nil), apierrors.IsInvalid, "maximum allowed value of a user defined priority is 1000000000")
	wantError(t, "a reserved name", add("system-mine", 1, nil), apierrors.IsInvalid,
		"priority class names with 'system-' prefix are reserved for system use only. error: system-mine is not a known system priority class")

	// A replaced pod that leaves out what was resolved keeps it; what is said stays.
	w.send("PATCH", podsPath+"/golden", `{"spec":{"priority":null,"preemptionPolicy":null}}`, merge...).want(t, 200, `"priority":1000`)
	w.send("PATCH", podsPath+"/golden", `{"spec":{"priority":3}}`, merge...).status(t, 422, metav1.StatusReasonInvalid)
	w.send("PATCH", podsPath+"/golden", `{"spec":{"priorityClassName":"plain"}}`, merge...).status(t, 422, metav1.StatusReasonInvalid)
}
