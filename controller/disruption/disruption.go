// SPDX-License-Identifier: Apache-2.0

// Package disruption keeps the status of PodDisruptionBudgets: how many of the pods
// that a budget selects must stay, how many are healthy, and how many may be evicted
// now. The API server's eviction subresource spends what it allows.
//
// The two share status.disruptedPods: an eviction writes the pod's name there before
// it deletes the pod, so that the pod no longer counts here, and this controller takes
// the name off when the deletion is seen or has not come within two minutes.
package disruption

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	policylisters "k8s.io/client-go/listers/policy/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-helpers/apps/poddisruptionbudget"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/podstate"
	"github.com/kplab/kplab/internal/settle"
)

const (
	// deletionTimeout is how long an evicted pod may take until its deletion is seen;
	// after that it counts again.
	deletionTimeout = 2 * time.Minute
	// staleTimeout is how long a pod that lives on keeps the condition that says it is
	// about to be disrupted.
	staleTimeout = 2 * time.Minute
)

// task is what the loop works on: a budget, or with pod set the stale condition of a
// pod.
type task struct {
	pod bool
	loop.Key
}

// Controller is the disruption controller.
type Controller struct {
	loop     *loop.Loop[task]
	client   kubernetes.Interface
	clock    clock.PassiveClock
	recorder record.EventRecorder
	budgets  policylisters.PodDisruptionBudgetLister
	pods     corelisters.PodLister
	scales   scales
}

// New makes the controller and subscribes it to budgets, pods and the workloads whose
// replicas it counts.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	budgets, pods := d.Informers.Policy().V1().PodDisruptionBudgets(), d.Informers.Core().V1().Pods()
	c := &Controller{
		client:   d.Client,
		clock:    d.Clock,
		recorder: d.Recorder("controllermanager"),
		budgets:  budgets.Lister(),
		pods:     pods.Lister(),
	}
	c.loop = loop.New(loop.Options[task]{Name: "disruption", Sync: c.sync, Deps: d})
	c.scales = newScales(d, c.loop, c.onWorkload)
	loop.Watch(c.loop, "poddisruptionbudgets", budgets.Informer(), func(_, cur *policyv1.PodDisruptionBudget) {
		if cur != nil {
			c.loop.Add(task{Key: loop.KeyOf(cur)})
		}
	})
	loop.Watch(c.loop, "pods", pods.Informer(), c.onPod)
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error { return c.loop.Run(ctx) }

// onPod wakes the budgets that select the pod, or did.
func (c *Controller) onPod(old, cur *corev1.Pod) {
	if old != nil && cur != nil && old.ResourceVersion == cur.ResourceVersion {
		return
	}
	if cur != nil {
		c.wake(cur, true)
		if stale, wait := c.stale(cur); stale {
			c.loop.After(task{pod: true, Key: loop.KeyOf(cur)}, wait)
		}
	}
	if old != nil && (cur == nil || !labels.Equals(old.Labels, cur.Labels)) {
		c.wake(old, false)
	}
}

// wake asks for a sync of the budgets that select the pod. tell says to the pod's
// owner when there are several: an eviction is refused then.
func (c *Controller) wake(pod *corev1.Pod, tell bool) {
	all, err := c.budgets.PodDisruptionBudgets(pod.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	var first *policyv1.PodDisruptionBudget
	several := false
	for _, budget := range all {
		selector, err := metav1.LabelSelectorAsSelector(budget.Spec.Selector)
		if err != nil || !selector.Matches(labels.Set(pod.Labels)) {
			continue
		}
		c.loop.Add(task{Key: loop.KeyOf(budget)})
		if first == nil {
			first = budget
		} else {
			several = true
		}
	}
	if several && tell {
		c.recorder.Eventf(pod, corev1.EventTypeWarning, "MultiplePodDisruptionBudgets",
			"Pod %q/%q matches multiple PodDisruptionBudgets.  Chose %q arbitrarily.", pod.Namespace, pod.Name, first.Name)
	}
}

// onWorkload wakes the budgets of a namespace in which a workload was scaled: none of
// its pods may change for it, when they cannot be made.
func (c *Controller) onWorkload(namespace string) {
	all, err := c.budgets.PodDisruptionBudgets(namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, budget := range all {
		c.loop.Add(task{Key: loop.KeyOf(budget)})
	}
}

func (c *Controller) sync(ctx context.Context, t task) error {
	if t.pod {
		return c.clearStale(ctx, t.Key)
	}
	budget, err := c.budgets.PodDisruptionBudgets(t.Namespace).Get(t.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	err = c.count(ctx, budget)
	if err == nil || apierrors.IsConflict(err) {
		return err
	}
	// What cannot be counted must not be disrupted.
	c.loop.Log().Warn("a budget cannot be counted; it allows nothing", "budget", t.Key, "err", err)
	refused := budget.DeepCopy()
	refused.Status.DisruptionsAllowed = 0
	meta.SetStatusCondition(&refused.Status.Conditions, metav1.Condition{
		Type: policyv1.DisruptionAllowedCondition, Status: metav1.ConditionFalse, Reason: policyv1.SyncFailedReason,
		Message: err.Error(), ObservedGeneration: refused.Status.ObservedGeneration,
	})
	return c.write(ctx, refused)
}

// count makes the status of one budget true.
func (c *Controller) count(ctx context.Context, budget *policyv1.PodDisruptionBudget) error {
	selector, err := metav1.LabelSelectorAsSelector(budget.Spec.Selector)
	var pods []*corev1.Pod
	if err == nil {
		pods, err = c.pods.Pods(budget.Namespace).List(selector)
	}
	if err != nil {
		c.recorder.Eventf(budget, corev1.EventTypeWarning, "NoPods", "Failed to get pods: %v", err)
		return err
	}
	if len(pods) == 0 {
		c.recorder.Event(budget, corev1.EventTypeNormal, "NoPods", "No matching pods found")
	}
	expected, desired, unmanaged, err := c.expected(ctx, budget, pods)
	if err != nil {
		c.recorder.Eventf(budget, corev1.EventTypeWarning, "CalculateExpectedPodCountFailed", "Failed to calculate the number of expected pods: %v", err)
		return err
	}
	if unmanaged {
		c.recorder.Eventf(budget, corev1.EventTypeWarning, "UnmanagedPods",
			"Pods selected by this PodDisruptionBudget (selector: %v) were found to be unmanaged. As a result, the status of the PDB cannot be calculated correctly, which may result in undefined behavior. To account for these pods please set \".spec.minAvailable\" field of the PDB to an integer value.", budget.Spec.Selector)
	}
	now := c.clock.Now()
	disrupted, again := c.disrupted(budget, pods, now)
	healthy := healthyPods(pods, disrupted)
	if err := c.writeCount(ctx, budget, healthy, desired, expected, disrupted); err != nil {
		return err
	}
	if !again.IsZero() {
		c.loop.After(task{Key: loop.KeyOf(budget)}, again.Sub(now))
	}
	return nil
}

// expected returns how many pods there should be and how many of them must stay.
// unmanaged says that pods without a controller were left out of the count.
func (c *Controller) expected(ctx context.Context, budget *policyv1.PodDisruptionBudget, pods []*corev1.Pod) (expected, desired int32, unmanaged bool, err error) {
	least, most := budget.Spec.MinAvailable, budget.Spec.MaxUnavailable
	switch {
	case most != nil:
		if expected, unmanaged, err = c.scales.sum(ctx, pods); err != nil {
			return 0, 0, false, err
		}
		n, err := intstr.GetScaledValueFromIntOrPercent(most, int(expected), true)
		if err != nil {
			return 0, 0, false, err
		}
		return expected, max(expected-int32(n), 0), unmanaged, nil
	case least == nil:
		return 0, 0, false, nil
	case least.Type == intstr.Int:
		return int32(len(pods)), least.IntVal, false, nil
	}
	if expected, unmanaged, err = c.scales.sum(ctx, pods); err != nil {
		return 0, 0, false, err
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(least, int(expected), true)
	return expected, int32(n), unmanaged, err
}

// disrupted returns the evicted pods whose deletion is not seen yet, and when the
// first of them counts again; zero for never.
func (c *Controller) disrupted(budget *policyv1.PodDisruptionBudget, pods []*corev1.Pod, now time.Time) (map[string]metav1.Time, time.Time) {
	out := map[string]metav1.Time{}
	var again time.Time
	for _, pod := range pods {
		since, found := budget.Status.DisruptedPods[pod.Name]
		if !found || pod.DeletionTimestamp != nil {
			continue
		}
		until := since.Add(deletionTimeout)
		if !until.After(now) {
			c.recorder.Eventf(pod, corev1.EventTypeWarning, "NotDeleted", "Pod was expected by PDB %s/%s to be deleted but it wasn't", budget.Namespace, budget.Name)
			continue
		}
		out[pod.Name] = since
		if again.IsZero() || until.Before(again) {
			again = until
		}
	}
	return out, again
}

// healthyPods counts the pods that are ready and meant to stay.
func healthyPods(pods []*corev1.Pod, disrupted map[string]metav1.Time) (n int32) {
	for _, pod := range pods {
		if _, leaves := disrupted[pod.Name]; !leaves && pod.DeletionTimestamp == nil && podstate.Ready(pod) {
			n++
		}
	}
	return n
}

// writeCount writes the status when it differs.
func (c *Controller) writeCount(ctx context.Context, budget *policyv1.PodDisruptionBudget, healthy, desired, expected int32, disrupted map[string]metav1.Time) error {
	allowed := max(healthy-desired, 0)
	if expected <= 0 {
		allowed = 0 // the first pods must not be evicted before they are counted
	}
	next := budget.DeepCopy()
	next.Status = policyv1.PodDisruptionBudgetStatus{
		ObservedGeneration: budget.Generation,
		CurrentHealthy:     healthy, DesiredHealthy: desired, ExpectedPods: expected,
		DisruptionsAllowed: allowed, DisruptedPods: disrupted, Conditions: next.Status.Conditions,
	}
	poddisruptionbudget.UpdateDisruptionAllowedCondition(next)
	if equality.Semantic.DeepEqual(budget.Status, next.Status) {
		return nil
	}
	return c.write(ctx, next)
}

// write stores the status; a conflict means that an eviction was faster.
func (c *Controller) write(ctx context.Context, budget *policyv1.PodDisruptionBudget) error {
	_, err := c.client.PolicyV1().PodDisruptionBudgets(budget.Namespace).UpdateStatus(ctx, budget, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write the status of the budget %s: %w", budget.Name, err)
	}
	return nil
}

// stale reports whether the pod says that it is about to be disrupted and is not
// being deleted; wait is how long it may still say so.
func (c *Controller) stale(pod *corev1.Pod) (stale bool, wait time.Duration) {
	said := podstate.Condition(pod, corev1.DisruptionTarget)
	// A kubelet may take its time after it said so.
	if said == nil || said.Status != corev1.ConditionTrue || said.Reason == corev1.PodReasonTerminationByKubelet || !podstate.Active(pod) {
		return false, 0
	}
	return true, max(staleTimeout-c.clock.Since(said.LastTransitionTime.Time), 0)
}

// clearStale takes a pod's word back when it was not deleted after all.
func (c *Controller) clearStale(ctx context.Context, key loop.Key) error {
	pod, err := c.pods.Pods(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	stale, wait := c.stale(pod)
	switch {
	case !stale:
		return nil
	case wait > 0:
		c.loop.After(task{pod: true, Key: key}, wait)
		return nil
	}
	update := pod.DeepCopy()
	said := podstate.Condition(update, corev1.DisruptionTarget)
	*said = corev1.PodCondition{
		Type: corev1.DisruptionTarget, Status: corev1.ConditionFalse, LastTransitionTime: metav1.NewTime(c.clock.Now()),
	}
	if _, err := c.client.CoreV1().Pods(key.Namespace).UpdateStatus(ctx, update, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("clear the condition of pod %s: %w", key.Name, err)
	}
	return nil
}
