// SPDX-License-Identifier: Apache-2.0

package statefulset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/history"
	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/podstate"
)

// errWait ends a round: an event goes on with it.
var errWait = errors.New("the next event goes on")

// round is one sync of one set.
type round struct {
	c   *Controller
	ctx context.Context //nolint:containedctx // lives for one sync
	set *appsv1.StatefulSet

	revisions history.Revisions
	current   *appsv1.ControllerRevision // the one that the update comes from
	slots     []*corev1.Pod              // by ordinal, from the first one; nil where a pod is missing
	condemned []*corev1.Pod              // those that the set does not want any more, the highest ordinal first
	status    appsv1.StatefulSetStatus
	wait      time.Duration // until time alone makes a pod available
}

func newRound(ctx context.Context, c *Controller, set *appsv1.StatefulSet, pods []*corev1.Pod, revisions history.Revisions) *round {
	r := &round{c: c, ctx: ctx, set: set, revisions: revisions, slots: make([]*corev1.Pod, ptr.Deref(set.Spec.Replicas, 1))}
	for _, pod := range pods {
		ordinal, _ := ordinalOf(set, pod.Name)
		if i := ordinal - first(set); i >= 0 && i < len(r.slots) {
			r.slots[i] = pod
		} else {
			r.condemned = append(r.condemned, pod)
		}
	}
	slices.SortFunc(r.condemned, func(a, b *corev1.Pod) int {
		x, _ := ordinalOf(set, a.Name)
		y, _ := ordinalOf(set, b.Name)
		return y - x
	})
	r.current = revisions.Find(set.Status.CurrentRevision)
	if r.current == nil {
		r.current = revisions.Update
	}
	r.count()
	return r
}

// ordered reports whether the pods come and go one at a time.
func (r *round) ordered() bool { return r.set.Spec.PodManagementPolicy != appsv1.ParallelPodManagement }

// runs reports whether a pod of the set has that revision.
func (r *round) runs(revision string) bool {
	for _, list := range [][]*corev1.Pod{r.slots, r.condemned} {
		for _, pod := range list {
			if pod != nil && revisionOf(pod) == revision {
				return true
			}
		}
	}
	return false
}

func revisionOf(pod *corev1.Pod) string { return pod.Labels[appsv1.ControllerRevisionHashLabelKey] }

// count makes the status from what there is.
func (r *round) count() {
	had := &r.set.Status
	r.status = appsv1.StatefulSetStatus{
		ObservedGeneration: r.set.Generation, CollisionCount: r.revisions.Collisions,
		CurrentRevision: r.current.Name, UpdateRevision: r.revisions.Update.Name, Conditions: had.Conditions,
	}
	if r.status.CollisionCount == nil {
		r.status.CollisionCount = ptr.To[int32](0)
	}
	for _, list := range [][]*corev1.Pod{r.slots, r.condemned} {
		for _, pod := range list {
			if pod != nil {
				r.countPod(pod)
			}
		}
	}
	want := ptr.Deref(r.set.Spec.Replicas, 1)
	rolling := r.set.Spec.UpdateStrategy.Type == appsv1.RollingUpdateStatefulSetStrategyType
	if rolling && r.status.UpdatedReplicas == want && r.status.ReadyReplicas == want && r.status.Replicas == want {
		r.status.CurrentReplicas, r.status.CurrentRevision = r.status.UpdatedReplicas, r.status.UpdateRevision
	}
}

func (r *round) countPod(pod *corev1.Pod) {
	r.status.Replicas++
	if pod.Status.Phase == corev1.PodRunning && podstate.Ready(pod) {
		r.status.ReadyReplicas++
		if r.available(pod) {
			r.status.AvailableReplicas++
		}
	}
	if pod.DeletionTimestamp != nil {
		return
	}
	if revisionOf(pod) == r.current.Name {
		r.status.CurrentReplicas++
	}
	if revisionOf(pod) == r.revisions.Update.Name {
		r.status.UpdatedReplicas++
	}
}

// step does what is next. Waiting for an event is no error.
func (r *round) step() error {
	if r.set.DeletionTimestamp != nil {
		return nil
	}
	if err := r.fixClaimOwners(); err != nil {
		return err
	}
	for _, next := range []func() error{r.fill, r.shrink, r.roll} {
		if err := next(); err != nil {
			if errors.Is(err, errWait) {
				return nil
			}
			return err
		}
	}
	return nil
}

// fill makes the pods that are missing, in order.
func (r *round) fill() error {
	for i, pod := range r.slots {
		err := r.fillSlot(first(r.set)+i, pod)
		if err == nil {
			continue
		}
		if r.ordered() || !errors.Is(err, errWait) {
			return err
		}
	}
	return nil
}

// fillSlot makes the pod of one ordinal, or puts it right; errWait means that it is
// not there yet for those after it to follow.
func (r *round) fillSlot(ordinal int, pod *corev1.Pod) error {
	switch {
	case pod == nil:
		if err := r.create(ordinal); err != nil {
			return err
		}
		return errWait
	case podstate.Finished(pod) && pod.DeletionTimestamp == nil:
		r.c.recorder.Eventf(r.set, corev1.EventTypeWarning, "RecreatingFailedPod", "StatefulSet %s/%s is recreating failed Pod %s", r.set.Namespace, r.set.Name, pod.Name)
		if err := r.delete(pod); err != nil {
			return err
		}
		return errWait
	case pod.DeletionTimestamp != nil:
		return errWait // its place is free when it is gone
	}
	if err := r.makeClaims(ordinal); err != nil {
		return err
	}
	if err := r.identify(ordinal, pod); err != nil {
		return err
	}
	if !r.available(pod) {
		return errWait
	}
	return nil
}

// create makes the pod of an ordinal, after its claims.
func (r *round) create(ordinal int) error {
	if err := r.makeClaims(ordinal); err != nil {
		return err
	}
	revision := r.revisions.Update
	if r.keepsCurrent(ordinal) {
		revision = r.current
	}
	pod, err := r.podFor(ordinal, revision)
	if err != nil {
		return err
	}
	_, err = r.c.client.CoreV1().Pods(r.set.Namespace).Create(r.ctx, pod, metav1.CreateOptions{})
	switch {
	case apierrors.IsAlreadyExists(err):
		// The one that the cache does not show yet, or somebody else's.
		return loop.Stale("pod " + pod.Name + " exists already")
	case err != nil:
		r.event("create", "Pod "+pod.Name, err)
		return fmt.Errorf("create pod %s: %w", pod.Name, err)
	}
	r.event("create", "Pod "+pod.Name, nil)
	r.status.Replicas++
	if revision.Name == r.current.Name {
		r.status.CurrentReplicas++
	}
	if revision.Name == r.revisions.Update.Name {
		r.status.UpdatedReplicas++
	}
	return nil
}

// event tells of a write in upstream's words.
func (r *round) event(verb, what string, err error) {
	reason := map[string]string{"create": "Create", "delete": "Delete", "update": "Update"}[verb]
	if err != nil {
		r.c.recorder.Eventf(r.set, corev1.EventTypeWarning, "Failed"+reason, "%s %s in StatefulSet %s failed error: %v", verb, what, r.set.Name, err)
		return
	}
	success := "successful"
	if strings.HasPrefix(what, "Claim") {
		success = "success" // upstream's word for claims
	}
	r.c.recorder.Eventf(r.set, corev1.EventTypeNormal, "Successful"+reason, "%s %s in StatefulSet %s %s", verb, what, r.set.Name, success)
}

// keepsCurrent reports whether a new pod of that ordinal still gets the template from
// before the update.
func (r *round) keepsCurrent(ordinal int) bool {
	return r.set.Spec.UpdateStrategy.Type == appsv1.RollingUpdateStatefulSetStrategyType && ordinal < first(r.set)+r.partition()
}

func (r *round) partition() int {
	if u := r.set.Spec.UpdateStrategy.RollingUpdate; u != nil {
		return int(ptr.Deref(u.Partition, 0))
	}
	return 0
}

func (r *round) delete(pod *corev1.Pod) error {
	err := r.c.client.CoreV1().Pods(pod.Namespace).Delete(r.ctx, pod.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
	if err != nil {
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			return nil // gone already
		}
		r.event("delete", "Pod "+pod.Name, err)
		return fmt.Errorf("delete pod %s: %w", pod.Name, err)
	}
	r.event("delete", "Pod "+pod.Name, nil)
	return nil
}

// shrink deletes the pods that are too many, the highest ordinal first. In order, one
// goes when the one before has gone and all others are well.
func (r *round) shrink() error {
	unwell := r.firstUnwell()
	for _, pod := range r.condemned {
		if pod.DeletionTimestamp != nil {
			if r.ordered() {
				return errWait
			}
			continue
		}
		if r.ordered() && unwell != nil && unwell != pod {
			return errWait
		}
		if err := r.delete(pod); err != nil {
			return err
		}
		if r.ordered() {
			return errWait
		}
	}
	return nil
}

// firstUnwell is the pod with the lowest ordinal that is not available.
func (r *round) firstUnwell() *corev1.Pod {
	for _, pod := range r.slots {
		if pod != nil && !r.available(pod) {
			return pod
		}
	}
	for _, pod := range slices.Backward(r.condemned) {
		if !r.available(pod) {
			return pod
		}
	}
	return nil
}

// roll deletes pods of an old template, from the highest ordinal down to the
// partition, and never more than may be unavailable at a time. Those that do not work
// anyway cost nothing.
func (r *round) roll() error {
	if r.set.Spec.UpdateStrategy.Type != appsv1.RollingUpdateStatefulSetStrategyType {
		return nil
	}
	budget := r.maxUnavailable()
	for _, pod := range r.slots {
		if !r.available(pod) {
			budget--
		}
	}
	for i := len(r.slots) - 1; i >= r.partition(); i-- {
		pod := r.slots[i]
		if pod == nil || pod.DeletionTimestamp != nil || revisionOf(pod) == r.revisions.Update.Name {
			continue
		}
		if r.available(pod) {
			if budget <= 0 {
				return errWait
			}
			budget--
		}
		if err := r.delete(pod); err != nil {
			return err
		}
		if revisionOf(pod) == r.current.Name {
			r.status.CurrentReplicas--
		}
	}
	return nil
}

func (r *round) maxUnavailable() int {
	u := r.set.Spec.UpdateStrategy.RollingUpdate
	if u == nil || u.MaxUnavailable == nil {
		return 1
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(u.MaxUnavailable, len(r.slots), false)
	if err != nil {
		return 1
	}
	return max(n, 1)
}
