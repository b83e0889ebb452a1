// SPDX-License-Identifier: Apache-2.0

package job

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/ownedpods"
	"github.com/kplab/kplab/controller/podstate"
)

// maxUncounted bounds the pods that are named in the status at a time, and with them
// its size.
const maxUncounted = 500

// round is one step of one Job.
type round struct {
	c   *Controller
	ctx context.Context
	// job is what is stored; each write replaces it. status is what is to be stored.
	job    *batchv1.Job
	status batchv1.JobStatus
	look   *look
	// verdict is the condition that ends the Job, once it may.
	verdict *batchv1.JobCondition
	// active, ready and terminating are the pods after what the round did.
	active, ready, terminating int32
	// uncounted are the pods that still have the finalizer.
	uncounted map[types.UID]bool
	// cut says that pods are left for the next round, because the status is full.
	cut bool
	// wait is the time until the next round if nothing happens; 0 for none.
	wait time.Duration
}

func newRound(ctx context.Context, c *Controller, job *batchv1.Job, pods []*corev1.Pod) *round {
	l := newLook(job, pods, c.memory.of(job.UID), c.clock.Now())
	r := &round{
		c: c, ctx: ctx, job: job, status: *job.Status.DeepCopy(), look: l, verdict: l.verdict,
		active: int32(len(l.active)), ready: l.ready, terminating: l.terminating, uncounted: map[types.UID]bool{},
	}
	for _, pod := range pods {
		if tracked(pod) {
			r.uncounted[pod.UID] = true
		}
	}
	if r.status.UncountedTerminatedPods == nil {
		r.status.UncountedTerminatedPods = &batchv1.UncountedTerminatedPods{}
	}
	if r.status.StartTime == nil && !suspended(job) {
		r.status.StartTime = ptr.To(metav1.NewTime(l.now))
	}
	r.sooner(l.deadline)
	return r
}

// sooner plans another round after d; 0 and less plan none.
func (r *round) sooner(d time.Duration) {
	if d > 0 && (r.wait == 0 || d < r.wait) {
		r.wait = d
	}
}

// run makes and deletes pods, and counts.
func (r *round) run() error {
	var acted error
	var told string
	if r.verdict != nil {
		if acted = r.end(); acted != nil {
			r.verdict = nil // pods are left that would be counted wrongly
		}
	} else {
		managed := r.job.DeletionTimestamp == nil
		if managed {
			acted = r.manage()
		}
		switch {
		case r.look.complete(r.active):
			r.verdict = condition(batchv1.JobSuccessCriteriaMet, corev1.ConditionTrue, batchv1.JobReasonCompletionsReached, "Reached expected number of succeeded pods", r.look.now)
		case managed:
			told = r.suspension()
		}
	}
	if err := r.track(told); err != nil {
		return errors.Join(acted, err)
	}
	return acted
}

// end deletes the pods of a Job that is over. They keep their finalizer until they are
// counted.
func (r *round) end() error {
	if err := r.c.pods.Delete(r.ctx, r.job, r.look.active); err != nil {
		return err
	}
	r.leaving(r.look.active)
	return nil
}

// leaving takes note of active pods that were deleted.
func (r *round) leaving(pods []*corev1.Pod) {
	for _, pod := range pods {
		r.active--
		r.terminating++
		if podstate.Ready(pod) {
			r.ready--
		}
	}
}

// manage makes the pods that are missing or deletes those that are too many.
func (r *round) manage() error {
	p := r.look.plan()
	r.sooner(p.wait)
	switch {
	case len(p.remove) > 0:
		// Without the finalizer first: they are not to be counted.
		if err := r.release(p.remove); err != nil {
			return err
		}
		if err := r.c.pods.Delete(r.ctx, r.job, p.remove); err != nil {
			return err
		}
		r.leaving(p.remove)
	case len(p.create) > 0:
		err := r.c.pods.Create(r.ctx, r.job, len(p.create), func(i int) *corev1.Pod {
			index := p.create[i]
			return dress(r.c.pods.FromTemplate(r.job, &r.job.Spec.Template), r.job, index, r.look.awaited[index])
		})
		if err != nil {
			return err
		}
		r.active += int32(len(p.create))
	}
	return nil
}

// suspension keeps the condition Suspended, and returns the reason of the event that
// is due when it changes. A suspended Job has no start; when it goes on, its time counts
// anew.
func (r *round) suspension() string {
	if suspended(r.job) {
		if r.set(batchv1.JobSuspended, corev1.ConditionTrue, "JobSuspended", "Job suspended") {
			r.status.StartTime = nil
			return "Suspended"
		}
	} else if r.set(batchv1.JobSuspended, corev1.ConditionFalse, "JobResumed", "Job resumed") {
		r.status.StartTime = ptr.To(metav1.NewTime(r.look.now))
		return "Resumed"
	}
	return ""
}

// set makes a condition hold and reports whether it is news. One that was never there
// is not false either.
func (r *round) set(t batchv1.JobConditionType, status corev1.ConditionStatus, reason, message string) bool {
	want := condition(t, status, reason, message, r.look.now)
	for i := range r.status.Conditions {
		have := &r.status.Conditions[i]
		if have.Type != t {
			continue
		}
		if have.Status == status && have.Reason == reason && have.Message == message {
			return false
		}
		*have = *want
		return true
	}
	if status == corev1.ConditionFalse {
		return false
	}
	r.status.Conditions = append(r.status.Conditions, *want)
	return true
}

// track counts the pods that ended, lets them go, and ends the Job when all is said.
// told is the reason of an event that is due with the first write.
func (r *round) track(told string) error {
	r.status.Active, r.status.Ready, r.status.Terminating = r.active, &r.ready, &r.terminating
	over := r.tally()
	if v := r.verdict; v != nil && v.Type != batchv1.JobFailed {
		r.set(v.Type, v.Status, v.Reason, v.Message)
	}
	if err := r.write(); err != nil {
		return err
	}
	r.c.memory.set(r.job.UID, r.look.failures)
	if told != "" {
		r.c.recorder.Event(r.job, corev1.EventTypeNormal, told, "Job "+strings.ToLower(told))
	}
	err := r.release(over)
	r.settle()
	if err != nil {
		return errors.Join(err, r.write())
	}
	ended := r.conclude()
	if err := r.write(); err != nil {
		return err
	}
	if ended != nil {
		r.announce(ended)
	}
	return nil
}

// tally names the pods that ended in the status, and returns all that may go.
func (r *round) tally() []*corev1.Pod {
	l, uncounted := r.look, r.status.UncountedTerminatedPods
	pods := slices.DeleteFunc(slices.Clone(l.pods), func(pod *corev1.Pod) bool { return !r.uncounted[pod.UID] })
	r.settle()
	if indexed(r.job) {
		slices.SortStableFunc(pods, func(a, b *corev1.Pod) int { return cmp.Compare(indexOf(a), indexOf(b)) })
		r.status.Succeeded, r.status.CompletedIndexes, r.status.FailedIndexes = int32(l.done.count()), l.done.String(), nil
		if perIndex(r.job) {
			r.status.FailedIndexes = ptr.To(l.lost.String())
		}
	}
	failedAll := r.verdict != nil && r.verdict.Type != batchv1.JobSuccessCriteriaMet
	var over []*corev1.Pod
	for _, pod := range pods {
		if !r.mayGo(pod) {
			continue
		}
		if len(uncounted.Succeeded)+len(uncounted.Failed) >= maxUncounted || len(over) >= maxUncounted {
			r.cut = true
			break
		}
		over = append(over, pod)
		lost := slices.Contains(uncounted.Failed, pod.UID)
		switch {
		case pod.Status.Phase == corev1.PodSucceeded && !lost:
			// An index is counted by the list of indexes.
			if !indexed(r.job) && !slices.Contains(uncounted.Succeeded, pod.UID) {
				uncounted.Succeeded = append(uncounted.Succeeded, pod.UID)
			}
		case failedAll || failed(pod, r.job):
			if !lost && l.validIndex(pod) && judge(r.job.Spec.PodFailurePolicy, pod).counts() {
				uncounted.Failed = append(uncounted.Failed, pod.UID)
			}
		}
	}
	return over
}

// mayGo reports whether nothing is to be learnt from the pod any more.
func (r *round) mayGo(pod *corev1.Pod) bool {
	switch {
	case r.job.DeletionTimestamp != nil, r.verdict != nil, pod.Status.Phase == corev1.PodSucceeded:
		return true
	case !failed(pod, r.job):
		return false
	}
	awaited := r.look.awaited[indexOf(pod)]
	return awaited == nil || awaited.UID != pod.UID
}

// settle moves pods that have lost the finalizer from the list of the uncounted into
// the counters.
func (r *round) settle() {
	move := func(list []types.UID, counter *int32) []types.UID {
		var left []types.UID
		for _, uid := range list {
			if r.uncounted[uid] {
				left = append(left, uid)
			} else {
				*counter++
			}
		}
		return left
	}
	u := r.status.UncountedTerminatedPods
	u.Succeeded = move(u.Succeeded, &r.status.Succeeded)
	u.Failed = move(u.Failed, &r.status.Failed)
}

// release takes the finalizer off pods.
func (r *round) release(pods []*corev1.Pod) error {
	pods = slices.DeleteFunc(slices.Clone(pods), func(pod *corev1.Pod) bool { return !r.uncounted[pod.UID] })
	uids := make([]types.UID, len(pods))
	for i, pod := range pods {
		uids[i] = pod.UID
	}
	r.c.finalizers.Deletions(r.job.UID, uids...)
	failures := make([]error, len(pods))
	ownedpods.InParallel(len(pods), func(i int) error {
		failures[i] = r.c.takeFinalizer(r.ctx, pods[i], "")
		return nil
	})
	for i, uid := range uids {
		if failures[i] == nil {
			delete(r.uncounted, uid)
		} else {
			r.c.finalizers.Deleted(r.job.UID, uid) // no event will come
		}
	}
	return errors.Join(failures...)
}

// takeFinalizer takes the finalizer off a pod, of exactly that version unless it is
// empty. A pod that is gone is as good as one without.
func (c *Controller) takeFinalizer(ctx context.Context, pod *corev1.Pod, version string) error {
	meta := map[string]any{"uid": pod.UID, "$deleteFromPrimitiveList/finalizers": []string{batchv1.JobTrackingFinalizer}}
	if version != "" {
		meta["resourceVersion"] = version
	}
	patch, err := json.Marshal(map[string]any{"metadata": meta})
	if err != nil {
		return fmt.Errorf("encode a patch of pod %s: %w", pod.Name, err)
	}
	_, err = c.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("let pod %s go: %w", pod.Name, err)
	}
	return nil
}

// conclude adds the last condition once every pod is counted and gone. It returns the
// condition, or nil.
func (r *round) conclude() *batchv1.JobCondition {
	u := r.status.UncountedTerminatedPods
	if r.verdict == nil || r.cut || len(u.Succeeded)+len(u.Failed) > 0 || r.terminating > 0 {
		return nil
	}
	last := batchv1.JobFailed
	if r.verdict.Type == batchv1.JobSuccessCriteriaMet {
		last = batchv1.JobComplete
		r.status.CompletionTime = ptr.To(metav1.NewTime(r.look.now))
	}
	r.set(last, corev1.ConditionTrue, r.verdict.Reason, r.verdict.Message)
	return condition(last, corev1.ConditionTrue, r.verdict.Reason, r.verdict.Message, r.look.now)
}

// announce tells of the end.
func (r *round) announce(end *batchv1.JobCondition) {
	if end.Type == batchv1.JobFailed {
		r.c.recorder.Event(r.job, corev1.EventTypeWarning, end.Reason, end.Message)
		return
	}
	if n := r.job.Spec.Completions; n != nil && r.status.Succeeded > *n {
		r.c.recorder.Event(r.job, corev1.EventTypeWarning, "TooManySucceededPods", "Too many succeeded pods running after completion count reached")
	}
	r.c.recorder.Event(r.job, corev1.EventTypeNormal, "Completed", "Job completed")
}

// write stores the status unless it is stored already.
func (r *round) write() error {
	if equality.Semantic.DeepEqual(r.job.Status, r.status) {
		return nil
	}
	update := r.job.DeepCopy()
	update.Status = *r.status.DeepCopy()
	stored, err := r.c.client.BatchV1().Jobs(update.Namespace).UpdateStatus(r.ctx, update, metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("write the status of %s: %w", r.job.Name, err)
	}
	r.c.written.Wrote(stored)
	r.job, r.status = stored, *stored.Status.DeepCopy()
	return nil
}
