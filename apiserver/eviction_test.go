// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

// evictions has pods that run on a node which nobody simulates, and budgets whose
// status the test itself counts.
type evictions struct {
	*testServer
	wire
	t *testing.T
}

func newEvictions(t *testing.T) evictions {
	t.Helper()
	s, w := startWire(t)
	return evictions{s, w, t}
}

func (e evictions) run(name string, ready corev1.ConditionStatus) *corev1.Pod {
	e.t.Helper()
	pod := testPod(name)
	pod.Labels = map[string]string{"app": "web"}
	pod.Spec.NodeName = "node1"
	pods := e.testServer.client.CoreV1().Pods("default")
	made, err := pods.Create(e.t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	made.Status.Phase = corev1.PodRunning
	made.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready, LastTransitionTime: metav1.Now()}}
	if made, err = pods.UpdateStatus(e.t.Context(), made, metav1.UpdateOptions{}); err != nil {
		e.t.Fatal(err)
	}
	return made
}

func (e evictions) budget(name string, status policyv1.PodDisruptionBudgetStatus) {
	e.t.Helper()
	b := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: ptr.To(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
		},
	}
	budgets := e.testServer.client.PolicyV1().PodDisruptionBudgets("default")
	made, err := budgets.Create(e.t.Context(), b, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	made.Status = status
	if _, err := budgets.UpdateStatus(e.t.Context(), made, metav1.UpdateOptions{}); err != nil {
		e.t.Fatal(err)
	}
}

func (e evictions) stored(budget string) policyv1.PodDisruptionBudgetStatus {
	e.t.Helper()
	b, err := e.testServer.client.PolicyV1().PodDisruptionBudgets("default").Get(e.t.Context(), budget, metav1.GetOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	return b.Status
}

func (e evictions) evict(name, rest string) answer {
	e.t.Helper()
	return e.post(podsPath+"/"+name+"/eviction", fmt.Sprintf(`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":%q}%s}`, name, rest))
}

func (e evictions) pod(name string) *corev1.Pod {
	e.t.Helper()
	pod, err := e.testServer.client.CoreV1().Pods("default").Get(e.t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		e.t.Fatal(err)
	}
	return pod
}

// budgetCause is what a refusal says of the budget.
func budgetCause(s metav1.Status) string {
	if s.Details == nil || len(s.Details.Causes) != 1 || s.Details.Causes[0].Type != policyv1.DisruptionBudgetCause {
		return fmt.Sprintf("no cause: %+v", s.Details)
	}
	return s.Details.Causes[0].Message
}

const overBudget = "Cannot evict pod as it would violate the pod's disruption budget."

// TestEvictionWithinBudget: one eviction is let through and written down, the next is
// told to wait, and what is asked wrongly costs nothing.
func TestEvictionWithinBudget(t *testing.T) {
	e := newEvictions(t)
	a := e.run("a", corev1.ConditionTrue)
	e.run("b", corev1.ConditionTrue)
	e.budget("web", policyv1.PodDisruptionBudgetStatus{ObservedGeneration: 1, CurrentHealthy: 2, DesiredHealthy: 1, ExpectedPods: 2, DisruptionsAllowed: 1})

	e.post(podsPath+"/a/eviction", `{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"b"}}`).
		status(t, 400, metav1.StatusReasonBadRequest, "name in URL does not match name in Eviction object")
	e.post(podsPath+"/a/eviction", `{"apiVersion":"policy/v1beta1","kind":"Eviction","metadata":{"name":"a"}}`).status(t, 400, metav1.StatusReasonBadRequest)
	e.evict("nobody", "").status(t, 404, metav1.StatusReasonNotFound, `pods "nobody" not found`)
	e.evict("a", `,"deleteOptions":{"dryRun":["All"]}`).want(t, 201)
	e.post(podsPath+"/a/eviction?dryRun=All", `{"metadata":{"name":"a"}}`).want(t, 201)
	if got := e.stored("web"); got.DisruptionsAllowed != 1 || e.pod("a").DeletionTimestamp != nil || len(e.pod("a").Status.Conditions) != 1 {
		t.Errorf("after dry runs: %+v", got)
	}

	m := e.evict("a", `,"deleteOptions":{"gracePeriodSeconds":7}`).want(t, 201).object(t)
	if text(m, "kind") != "Status" || text(m, "status") != "Success" || text(m, "code") != "201" {
		t.Errorf("answer %v", m)
	}
	gone := e.pod("a")
	if gone == nil || gone.DeletionTimestamp == nil || *gone.DeletionGracePeriodSeconds != 7 {
		t.Fatalf("the pod that was evicted: %+v", gone)
	}
	why := gone.Status.Conditions[len(gone.Status.Conditions)-1]
	if why.Type != corev1.DisruptionTarget || why.Status != corev1.ConditionTrue || why.Reason != "EvictionByEvictionAPI" || why.Message != "Eviction API: evicting" {
		t.Errorf("condition %+v", why)
	}
	got := e.stored("web")
	if _, noted := got.DisruptedPods["a"]; !noted || got.DisruptionsAllowed != 0 ||
		len(got.Conditions) != 1 || got.Conditions[0].Status != metav1.ConditionFalse || got.Conditions[0].Reason != policyv1.InsufficientPodsReason {
		t.Errorf("budget %+v", got)
	}

	refused := e.evict("b", "")
	s := refused.status(t, 429, metav1.StatusReasonTooManyRequests, overBudget)
	if got := budgetCause(s); got != "The disruption budget web needs 1 healthy pods and has 2 currently" {
		t.Errorf("cause %q", got)
	}
	if after := refused.header.Get("Retry-After"); after != "" {
		t.Errorf("Retry-After %q, and nobody can know", after)
	}
	// What is being deleted needs no budget; its conditions stay.
	e.evict("a", "").want(t, 201)
	if e.pod("b").DeletionTimestamp != nil {
		t.Error("b was evicted")
	}
	// The version that the caller saw is no more.
	e.evict("b", fmt.Sprintf(`,"deleteOptions":{"preconditions":{"uid":%q}}`, a.UID)).status(t, 429, metav1.StatusReasonTooManyRequests)
}

// TestEvictionOfPodsThatNeedNoBudget: ended and pending ones go at once; unready ones
// as the budget's policy says.
func TestEvictionOfPodsThatNeedNoBudget(t *testing.T) {
	e := newEvictions(t)
	pods := e.testServer.client.CoreV1().Pods("default")
	e.budget("web", policyv1.PodDisruptionBudgetStatus{ObservedGeneration: 1, CurrentHealthy: 0, DesiredHealthy: 1, ExpectedPods: 2})

	pending := testPod("pending")
	pending.Labels = map[string]string{"app": "web"}
	if _, err := pods.Create(t.Context(), pending, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	e.evict("pending", `,"deleteOptions":{"preconditions":{"resourceVersion":"1"}}`).status(t, 409, metav1.StatusReasonConflict)
	e.evict("pending", "").want(t, 201)
	ended := e.run("ended", corev1.ConditionFalse)
	ended.Status.Phase = corev1.PodFailed
	if _, err := pods.UpdateStatus(t.Context(), ended, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	e.evict("ended", "").want(t, 201)
	if e.pod("pending") != nil || e.pod("ended") != nil {
		t.Error("they are still there")
	}

	// Too few healthy ones, and the pod is unhealthy itself.
	e.run("sick", corev1.ConditionFalse)
	e.evict("sick", "").status(t, 429, metav1.StatusReasonTooManyRequests, overBudget)
	budgets := e.testServer.client.PolicyV1().PodDisruptionBudgets("default")
	b, err := budgets.Get(t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	b.Spec.UnhealthyPodEvictionPolicy = ptr.To(policyv1.AlwaysAllow)
	if b, err = budgets.Update(t.Context(), b, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	// A healthy one has to wait until the change is counted.
	e.run("well", corev1.ConditionTrue)
	early := e.evict("well", "")
	s := early.status(t, 429, metav1.StatusReasonTooManyRequests, overBudget)
	if early.header.Get("Retry-After") != "10" || budgetCause(s) != "The disruption budget web is still being processed by the server." {
		t.Errorf("Retry-After %q, cause %q", early.header.Get("Retry-After"), budgetCause(s))
	}
	e.evict("sick", "").want(t, 201)
	if e.pod("sick").DeletionTimestamp == nil {
		t.Error("the unhealthy pod was kept")
	}
	// By default an unhealthy pod may go while enough are healthy, at no cost.
	b.Spec.UnhealthyPodEvictionPolicy = nil
	if b, err = budgets.Update(t.Context(), b, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: b.Generation, CurrentHealthy: 1, DesiredHealthy: 1, ExpectedPods: 2}
	if _, err := budgets.UpdateStatus(t.Context(), b, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	e.run("sick2", corev1.ConditionFalse)
	e.evict("sick2", "").want(t, 201)
	e.evict("well", "").status(t, 429, metav1.StatusReasonTooManyRequests)
}

// TestEvictionWithSeveralBudgets is refused, whatever they allow.
func TestEvictionWithSeveralBudgets(t *testing.T) {
	e := newEvictions(t)
	e.run("a", corev1.ConditionTrue)
	for _, name := range []string{"one", "two"} {
		e.budget(name, policyv1.PodDisruptionBudgetStatus{ObservedGeneration: 1, CurrentHealthy: 9, DesiredHealthy: 1, ExpectedPods: 9, DisruptionsAllowed: 8})
	}
	m := e.evict("a", "").want(t, 500).object(t)
	if text(m, "message") != "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support." || text(m, "code") != "500" {
		t.Errorf("answer %v", m)
	}
	if e.pod("a").DeletionTimestamp != nil {
		t.Error("evicted all the same")
	}
}

// TestEvictionsAtOnce: many evictors, and never more evictions than allowed.
func TestEvictionsAtOnce(t *testing.T) {
	e := newEvictions(t)
	const pods, allowed = 40, 7
	for i := range pods {
		e.run(fmt.Sprintf("p%d", i), corev1.ConditionTrue)
	}
	e.budget("web", policyv1.PodDisruptionBudgetStatus{ObservedGeneration: 1, CurrentHealthy: pods, DesiredHealthy: pods - allowed, ExpectedPods: pods, DisruptionsAllowed: allowed})
	var done, refused atomic.Int32
	var wg sync.WaitGroup
	for i := range pods {
		wg.Go(func() {
			name := fmt.Sprintf("p%d", i)
			a, err := e.try("POST", podsPath+"/"+name+"/eviction", `{"metadata":{"name":"`+name+`"}}`)
			switch {
			case err != nil:
				t.Error(err)
			case a.code == 201:
				done.Add(1)
			case a.code == 429:
				refused.Add(1)
			default:
				t.Errorf("code %d: %s", a.code, a.short())
			}
		})
	}
	wg.Wait()
	leaving := 0
	for i := range pods {
		if p := e.pod(fmt.Sprintf("p%d", i)); p == nil || p.DeletionTimestamp != nil {
			leaving++
		}
	}
	if done.Load() != allowed || refused.Load() != pods-allowed || leaving != allowed {
		t.Errorf("%d evicted, %d refused, %d pods leave; the budget allows %d", done.Load(), refused.Load(), leaving, allowed)
	}
	if got := e.stored("web"); got.DisruptionsAllowed != 0 || len(got.DisruptedPods) != allowed {
		t.Errorf("budget %+v", got)
	}
}
