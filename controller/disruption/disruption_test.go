// SPDX-License-Identifier: Apache-2.0

package disruption

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	testclock "k8s.io/utils/clock/testing"
)

func readyPod(name string, conditions ...corev1.PodCondition) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Status:     corev1.PodStatus{Conditions: append(conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue})},
	}
}

// TestEvictedPodsCountAgain when their deletion does not come within two minutes.
func TestEvictedPodsCountAgain(t *testing.T) {
	now := time.Unix(10000, 0)
	events := record.NewFakeRecorder(10)
	c := &Controller{clock: testclock.NewFakePassiveClock(now), recorder: events}
	deleted := readyPod("deleted")
	deleted.DeletionTimestamp = &metav1.Time{Time: now}
	pods := []*corev1.Pod{readyPod("fresh"), readyPod("old"), readyPod("stays"), deleted}
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "b"}}
	budget.Status.DisruptedPods = map[string]metav1.Time{
		"fresh": metav1.NewTime(now.Add(-30 * time.Second)), "old": metav1.NewTime(now.Add(-2 * time.Minute)),
		"deleted": metav1.NewTime(now), "nobody": metav1.NewTime(now),
	}
	left, again := c.disrupted(budget, pods, now)
	if _, ok := left["fresh"]; !ok || len(left) != 1 {
		t.Errorf("left %v", left)
	}
	if want := now.Add(90 * time.Second); !again.Equal(want) {
		t.Errorf("again at %v, want %v", again, want)
	}
	if n := healthyPods(pods, left); n != 2 {
		t.Errorf("%d healthy, want old and stays", n)
	}
	if got := <-events.Events; got != "Warning NotDeleted Pod was expected by PDB ns/b to be deleted but it wasn't" {
		t.Errorf("event %q", got)
	}
}

// TestStaleConditions: a pod that lives on may say for two minutes that it is about to
// go; one whose kubelet says so, or that goes, for ever.
func TestStaleConditions(t *testing.T) {
	now := time.Unix(10000, 0)
	c := &Controller{clock: testclock.NewFakePassiveClock(now)}
	said := func(reason string, ago time.Duration) *corev1.Pod {
		return readyPod("p", corev1.PodCondition{
			Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: reason, LastTransitionTime: metav1.NewTime(now.Add(-ago)),
		})
	}
	going := said("EvictionByEvictionAPI", time.Hour)
	going.DeletionTimestamp = &metav1.Time{Time: now}
	for name, x := range map[string]struct {
		pod   *corev1.Pod
		stale bool
		wait  time.Duration
	}{
		"says nothing": {readyPod("p"), false, 0},
		"just said":    {said("EvictionByEvictionAPI", 20*time.Second), true, 100 * time.Second},
		"long said":    {said("EvictionByEvictionAPI", time.Hour), true, 0},
		"by a kubelet": {said(corev1.PodReasonTerminationByKubelet, time.Hour), false, 0},
		"goes":         {going, false, 0},
	} {
		if stale, wait := c.stale(x.pod); stale != x.stale || wait != x.wait {
			t.Errorf("%s: %v, %v", name, stale, wait)
		}
	}
}
