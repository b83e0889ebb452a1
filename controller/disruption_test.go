// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/kplab/kplab/internal/nettest"
)

// budget makes a PodDisruptionBudget for app web. least or most is a number or a
// percentage, the other one "".
func (b *bench) budget(name, least, most string) {
	b.t.Helper()
	value := func(s string) *intstr.IntOrString {
		if s == "" {
			return nil
		}
		v := intstr.Parse(s)
		return &v
	}
	pdb := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: value(least), MaxUnavailable: value(most), Selector: webSelector()},
	}
	if _, err := b.client.PolicyV1().PodDisruptionBudgets("default").Create(b.t.Context(), pdb, metav1.CreateOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

// webBudgetIs waits until the status says: allowed, healthy of desired, expected pods,
// and the reason of the condition.
func (b *bench) webBudgetIs(want string) *policyv1.PodDisruptionBudget {
	b.t.Helper()
	var pdb *policyv1.PodDisruptionBudget
	nettest.Eventually(b.t, patience, "budget web "+want, func() error {
		var err error
		if pdb, err = b.client.PolicyV1().PodDisruptionBudgets("default").Get(b.t.Context(), "web", metav1.GetOptions{}); err != nil {
			return err
		}
		s, reason := pdb.Status, "none"
		if len(s.Conditions) > 0 {
			reason = s.Conditions[0].Reason
		}
		got := fmt.Sprintf("%d allowed, %d/%d healthy of %d, %s", s.DisruptionsAllowed, s.CurrentHealthy, s.DesiredHealthy, s.ExpectedPods, reason)
		if got != want || s.ObservedGeneration != pdb.Generation {
			return fmt.Errorf("%s, generation %d of %d", got, s.ObservedGeneration, pdb.Generation)
		}
		return nil
	})
	return pdb
}

func (b *bench) dropBudget(name string) {
	b.t.Helper()
	if err := b.client.PolicyV1().PodDisruptionBudgets("default").Delete(b.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

// event waits for an event about an object.
func (b *bench) event(name, reason, message string) {
	b.t.Helper()
	nettest.Eventually(b.t, patience, "event "+reason, func() error {
		list, err := b.client.CoreV1().Events("default").List(b.t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + name + ",reason=" + reason})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if strings.Contains(e.Message, message) {
				return nil
			}
		}
		return fmt.Errorf("%d events of that reason", len(list.Items))
	})
}

func (b *bench) evict(name string) error {
	return b.client.CoreV1().Pods("default").EvictV1(b.t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: name}})
}

// TestDisruptionBudgetsAreCounted for every kind of workload, in numbers and percents.
func TestDisruptionBudgetsAreCounted(t *testing.T) {
	b := newBench(t)
	b.budget("web", "1", "")
	b.webBudgetIs("0 allowed, 0/1 healthy of 0, InsufficientPods")
	b.event("web", "NoPods", "No matching pods found")
	b.create(deployment("web", 4))
	b.rolledOut("web")
	b.webBudgetIs("3 allowed, 4/1 healthy of 4, SufficientPods")
	b.settle()
	b.dropBudget("web")

	for _, x := range []struct{ least, most, want string }{
		{"50%", "", "2 allowed, 4/2 healthy of 4, SufficientPods"},
		{"51%", "", "1 allowed, 4/3 healthy of 4, SufficientPods"},
		{"", "1", "1 allowed, 4/3 healthy of 4, SufficientPods"},
		{"", "30%", "2 allowed, 4/2 healthy of 4, SufficientPods"},
		{"", "0", "0 allowed, 4/4 healthy of 4, InsufficientPods"},
		{"9", "", "0 allowed, 4/9 healthy of 4, InsufficientPods"},
	} {
		b.budget("web", x.least, x.most)
		b.webBudgetIs(x.want)
		b.dropBudget("web")
	}

	// Scaled down: half of two.
	b.budget("web", "", "50%")
	b.patch(`{"spec":{"replicas":2}}`)
	b.webBudgetIs("1 allowed, 2/1 healthy of 2, SufficientPods")

	// A pod without a controller beside them.
	lone := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "lone", Labels: map[string]string{"app": "web"}}, Spec: webTemplate("nginx").Spec}
	if _, err := b.client.CoreV1().Pods("default").Create(t.Context(), lone, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.webBudgetIs("2 allowed, 3/1 healthy of 2, SufficientPods")
	b.event("web", "UnmanagedPods", "were found to be unmanaged")

	// Two budgets for one pod.
	b.budget("too", "1", "")
	b.patchPod("lone", `{"metadata":{"annotations":{"a":"b"}}}`)
	b.event("lone", "MultiplePodDisruptionBudgets", `Pod "default"/"lone" matches multiple PodDisruptionBudgets.`)
	if err := b.evict("lone"); !apierrors.IsInternalError(err) && (err == nil || !strings.Contains(err.Error(), "more than one PodDisruptionBudget")) {
		t.Errorf("evicted with two budgets: %v", err)
	}
	b.settle()
}

// TestDisruptionBudgetOfOtherKinds: StatefulSets, ReplicationControllers, and what has
// no scale.
func TestDisruptionBudgetOfOtherKinds(t *testing.T) {
	b := newBench(t)
	b.makeStatefulSet("nginx", 3)
	b.statefulSetDone()
	b.budget("web", "", "1")
	b.webBudgetIs("1 allowed, 3/2 healthy of 3, SufficientPods")
	if err := b.client.AppsV1().StatefulSets("default").Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.webBudgetIs("0 allowed, 0/0 healthy of 0, InsufficientPods")

	replicas, template := int32(2), webTemplate("nginx")
	rc := &corev1.ReplicationController{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       corev1.ReplicationControllerSpec{Replicas: &replicas, Selector: webSelector().MatchLabels, Template: &template},
	}
	if _, err := b.client.CoreV1().ReplicationControllers("default").Create(t.Context(), rc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.webBudgetIs("1 allowed, 2/1 healthy of 2, SufficientPods")
	// Without a policy its pods would be orphans, as upstream has it for this kind.
	background := metav1.DeletePropagationBackground
	if err := b.client.CoreV1().ReplicationControllers("default").Delete(t.Context(), "web", metav1.DeleteOptions{PropagationPolicy: &background}); err != nil {
		t.Fatal(err)
	}
	b.webBudgetIs("0 allowed, 0/0 healthy of 0, InsufficientPods")

	set := &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       appsv1.DaemonSetSpec{Selector: webSelector(), Template: webTemplate("nginx")},
	}
	if _, err := b.client.AppsV1().DaemonSets("default").Create(t.Context(), set, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	const why = "daemonsets.apps does not implement the scale subresource"
	b.event("web", "CalculateExpectedPodCountFailed", "Failed to calculate the number of expected pods: "+why)
	pdb := b.webBudgetIs("0 allowed, 0/0 healthy of 0, SyncFailed")
	if c := pdb.Status.Conditions[0]; c.Message != why || c.Status != metav1.ConditionFalse {
		t.Errorf("condition %+v", c)
	}
	// A number of pods needs no scale.
	b.dropBudget("web")
	b.budget("web", "1", "")
	b.webBudgetIs("1 allowed, 2/1 healthy of 2, SufficientPods")
	b.settle()
}

// TestEvictorsKeepTheBudget: while pods are made anew, evictors that never rest do not
// bring the healthy ones below the budget.
func TestEvictorsKeepTheBudget(t *testing.T) {
	b := newBench(t)
	b.create(deployment("web", 5))
	b.rolledOut("web")
	b.budget("web", "4", "")
	b.webBudgetIs("1 allowed, 5/4 healthy of 5, SufficientPods")
	var evicted, refused atomic.Int32
	var wg sync.WaitGroup
	end := time.Now().Add(3 * time.Second)
	for range 6 {
		wg.Go(func() {
			for time.Now().Before(end) {
				for _, pod := range b.pods("default", "app=web") {
					switch err := b.evict(pod.Name); {
					case err == nil:
						evicted.Add(1)
					case apierrors.HasStatusCause(err, policyv1.DisruptionBudgetCause):
						refused.Add(1)
					case !apierrors.IsNotFound(err) && !apierrors.IsConflict(err):
						t.Errorf("evict: %v", err)
					}
				}
			}
		})
	}
	low := 5
	for time.Now().Before(end) {
		ready := 0
		for _, pod := range b.pods("default", "app=web") {
			for _, c := range pod.Status.Conditions {
				if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue && pod.DeletionTimestamp == nil {
					ready++
				}
			}
		}
		low = min(low, ready)
	}
	wg.Wait()
	t.Logf("%d evicted, %d refused, never fewer than %d healthy", evicted.Load(), refused.Load(), low)
	if low < 4 || evicted.Load() < 2 || refused.Load() == 0 {
		t.Errorf("%d evicted, %d refused, %d healthy at worst", evicted.Load(), refused.Load(), low)
	}
	b.webBudgetIs("1 allowed, 5/4 healthy of 5, SufficientPods")
	b.settle()
}
