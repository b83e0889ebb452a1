// SPDX-License-Identifier: Apache-2.0

package job

import (
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/podstate"
)

// look is what a Job and its pods amount to at one moment. It is worked out from them
// alone, and changes neither.
type look struct {
	job  *batchv1.Job
	pods []*corev1.Pod
	now  time.Time

	active             []*corev1.Pod // neither ended nor on their way out
	ready, terminating int32
	// succeeded and failed are all that ever were: those in the status, those that
	// are being counted, and the new ones.
	succeeded, failed int32
	// before and done are the indexes that succeeded, by the status and by now; lost
	// are those that failed for good.
	before, done, lost indexes
	// awaited are failed pods, by index, that stay until the pod in their place is
	// made: it takes the count of failures over from them.
	awaited  map[int]*corev1.Pod
	failures failures
	// verdict is the condition that ends the Job, nil while it goes on.
	verdict *batchv1.JobCondition
	// deadline is the time left until activeDeadlineSeconds are over; 0 when there is
	// no such time.
	deadline time.Duration
}

func indexed(job *batchv1.Job) bool {
	return ptr.Deref(job.Spec.CompletionMode, "") == batchv1.IndexedCompletion
}

func perIndex(job *batchv1.Job) bool { return job.Spec.BackoffLimitPerIndex != nil }

func suspended(job *batchv1.Job) bool { return ptr.Deref(job.Spec.Suspend, false) }

func completions(job *batchv1.Job) int { return int(ptr.Deref(job.Spec.Completions, 0)) }

// replacesFailedOnly reports whether a pod on its way out is not replaced, and counts
// as nothing, before it has ended.
func replacesFailedOnly(job *batchv1.Job) bool {
	return job.Spec.PodFailurePolicy != nil || ptr.Deref(job.Spec.PodReplacementPolicy, "") == batchv1.Failed
}

// failed reports whether the pod counts as a failed one. A deleted pod does, because
// nobody may be left who says how it ended.
func failed(pod *corev1.Pod, job *batchv1.Job) bool {
	switch {
	case pod.Status.Phase == corev1.PodFailed:
		return true
	case pod.Status.Phase == corev1.PodSucceeded || pod.DeletionTimestamp == nil:
		return false
	case pod.Spec.NodeName == "":
		return true // no kubelet will ever end it
	}
	return !replacesFailedOnly(job)
}

// finished reports whether the Job has come to its end.
func finished(job *batchv1.Job) bool {
	return holds(job, batchv1.JobComplete) != nil || holds(job, batchv1.JobFailed) != nil
}

// holds returns the Job's condition of that type when it is true.
func holds(job *batchv1.Job, t batchv1.JobConditionType) *batchv1.JobCondition {
	for i := range job.Status.Conditions {
		if c := &job.Status.Conditions[i]; c.Type == t && c.Status == corev1.ConditionTrue {
			return c
		}
	}
	return nil
}

func condition(t batchv1.JobConditionType, status corev1.ConditionStatus, reason, message string, now time.Time) *batchv1.JobCondition {
	at := metav1.NewTime(now)
	return &batchv1.JobCondition{Type: t, Status: status, Reason: reason, Message: message, LastProbeTime: at, LastTransitionTime: at}
}

// newLook looks at a Job. past are the failures that were seen before.
func newLook(job *batchv1.Job, pods []*corev1.Pod, past failures, now time.Time) *look {
	l := &look{job: job, pods: pods, now: now}
	for _, pod := range pods {
		switch {
		case podstate.Active(pod):
			l.active = append(l.active, pod)
			if podstate.Ready(pod) {
				l.ready++
			}
		case !podstate.Finished(pod):
			l.terminating++
		}
	}
	l.count(past)
	if indexed(job) {
		l.countIndexes()
	}
	l.judge()
	return l
}

// count adds the pods that ended since the status was written.
func (l *look) count(past failures) {
	var uncounted batchv1.UncountedTerminatedPods
	if u := l.job.Status.UncountedTerminatedPods; u != nil {
		uncounted = *u
	}
	succeeded := l.fresh(uncounted.Succeeded, func(pod *corev1.Pod) bool { return pod.Status.Phase == corev1.PodSucceeded })
	lost := l.fresh(uncounted.Failed, func(pod *corev1.Pod) bool { return failed(pod, l.job) })
	l.failures = past.then(succeeded, lost)
	l.succeeded = l.job.Status.Succeeded + int32(len(uncounted.Succeeded)+len(succeeded))
	l.failed = l.job.Status.Failed + int32(len(uncounted.Failed))
	for _, pod := range lost {
		if judge(l.job.Spec.PodFailurePolicy, pod).counts() {
			l.failed++
		}
	}
}

// fresh returns the pods that fit and are not counted yet: they have the finalizer,
// are not among the uncounted, and an index that counts.
func (l *look) fresh(uncounted []types.UID, fits func(*corev1.Pod) bool) []*corev1.Pod {
	var out []*corev1.Pod
	for _, pod := range l.pods {
		if tracked(pod) && !slices.Contains(uncounted, pod.UID) && l.validIndex(pod) && fits(pod) {
			out = append(out, pod)
		}
	}
	return out
}

// validIndex reports whether the pod's index, in an Indexed Job, is one of the Job's.
func (l *look) validIndex(pod *corev1.Pod) bool {
	if !indexed(l.job) {
		return true
	}
	i := indexOf(pod)
	return i != noIndex && i < completions(l.job)
}

// countIndexes finds out which indexes are done and which are lost.
func (l *look) countIndexes() {
	n := completions(l.job)
	l.before = parseIndexes(l.job.Status.CompletedIndexes, n)
	var done, lost []int
	for _, pod := range l.pods {
		if !tracked(pod) || !l.validIndex(pod) {
			continue
		}
		if pod.Status.Phase == corev1.PodSucceeded {
			done = append(done, indexOf(pod))
		} else if perIndex(l.job) && l.losesIndex(pod) {
			lost = append(lost, indexOf(pod))
		}
	}
	l.done = union(l.before, indexesOf(done...))
	l.succeeded = int32(l.done.count())
	if perIndex(l.job) {
		l.lost = union(parseIndexes(ptr.Deref(l.job.Status.FailedIndexes, ""), n), indexesOf(lost...))
		l.await()
	}
}

// losesIndex reports whether the pod's failure is the one too many for its index.
func (l *look) losesIndex(pod *corev1.Pod) bool {
	if !failed(pod, l.job) {
		return false
	}
	r := judge(l.job.Spec.PodFailurePolicy, pod)
	counted, _ := failuresOf(pod)
	return r.action == batchv1.PodFailurePolicyActionFailIndex || r.counts() && counted >= int(*l.job.Spec.BackoffLimitPerIndex)
}

// await picks the failed pod of each index that is neither done, lost nor running: the
// one that knows of the most failures.
func (l *look) await() {
	running := indexesOfPods(l.active)
	l.awaited = map[int]*corev1.Pod{}
	for _, pod := range l.fresh(nil, func(pod *corev1.Pod) bool { return failed(pod, l.job) }) {
		i := indexOf(pod)
		if l.done.has(i) || l.lost.has(i) || running.has(i) {
			continue
		}
		if other := l.awaited[i]; other == nil || later(pod, other) {
			l.awaited[i] = pod
		}
	}
}

// later reports whether a is a later pod of the same index than b.
func later(a, b *corev1.Pod) bool {
	counted, ignored := failuresOf(a)
	otherCounted, otherIgnored := failuresOf(b)
	return counted+ignored >= otherCounted+otherIgnored && !endOf(a).Before(endOf(b))
}

func indexesOfPods(pods []*corev1.Pod) indexes {
	var list []int
	for _, pod := range pods {
		if i := indexOf(pod); i != noIndex {
			list = append(list, i)
		}
	}
	return indexesOf(list...)
}

// judge decides whether the Job ends now, other than by all completions.
func (l *look) judge() {
	job, spec := l.job, &l.job.Spec
	if c := holds(job, batchv1.JobSuccessCriteriaMet); c != nil {
		l.verdict = c
		return
	}
	if c := holds(job, batchv1.JobFailureTarget); c != nil {
		l.verdict = condition(batchv1.JobFailed, corev1.ConditionTrue, c.Reason, c.Message, l.now)
		return
	}
	failure := func(reason, message string) {
		l.verdict = condition(batchv1.JobFailureTarget, corev1.ConditionTrue, reason, message, l.now)
	}
	if why := l.policyFailure(); why != "" {
		failure(batchv1.JobReasonPodFailurePolicy, why)
		return
	}
	l.deadline = l.untilDeadline()
	switch n := completions(job); {
	case l.failed > ptr.Deref(spec.BackoffLimit, 0) || l.tooManyRestarts():
		failure(batchv1.JobReasonBackoffLimitExceeded, "Job has reached the specified backoff limit")
	case l.deadline < 0:
		failure(batchv1.JobReasonDeadlineExceeded, "Job was active longer than specified deadline")
	case spec.MaxFailedIndexes != nil && l.lost.count() > int(*spec.MaxFailedIndexes):
		failure(batchv1.JobReasonMaxFailedIndexesExceeded, "Job has exceeded the specified maximal number of failed indexes")
	case len(l.lost) > 0 && l.lost.count()+l.done.count() >= n:
		failure(batchv1.JobReasonFailedIndexes, "Job has failed indexes")
	default:
		if why, met := succeedsEarly(spec.SuccessPolicy, l.done, n); met {
			l.verdict = condition(batchv1.JobSuccessCriteriaMet, corev1.ConditionTrue, batchv1.JobReasonSuccessPolicy, why, l.now)
		}
	}
}

// policyFailure returns why the podFailurePolicy ends the Job; empty when it does not.
func (l *look) policyFailure() string {
	if l.job.Spec.PodFailurePolicy == nil {
		return ""
	}
	for _, pod := range l.pods {
		if !failed(pod, l.job) {
			continue
		}
		if r := judge(l.job.Spec.PodFailurePolicy, pod); r.action == batchv1.PodFailurePolicyActionFailJob {
			return r.why
		}
	}
	return ""
}

// tooManyRestarts applies backoffLimit to pods that restart their own containers.
func (l *look) tooManyRestarts() bool {
	if l.job.Spec.Template.Spec.RestartPolicy != corev1.RestartPolicyOnFailure {
		return false
	}
	var n int32
	for _, pod := range l.pods {
		if pod.Status.Phase != corev1.PodRunning && pod.Status.Phase != corev1.PodPending {
			continue
		}
		for _, list := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
			for i := range list {
				n += list[i].RestartCount
			}
		}
	}
	return n >= max(1, ptr.Deref(l.job.Spec.BackoffLimit, 0))
}

// untilDeadline is the time left for the Job; negative when it is over, 0 when there is
// no deadline.
func (l *look) untilDeadline() time.Duration {
	if l.job.Spec.ActiveDeadlineSeconds == nil || suspended(l.job) {
		return 0
	}
	start := l.now
	if t := l.job.Status.StartTime; t != nil {
		start = t.Time
	}
	left := time.Duration(*l.job.Spec.ActiveDeadlineSeconds)*time.Second - l.now.Sub(start)
	if left <= 0 {
		return -1
	}
	return left
}

// complete reports whether the Job has all the successes that it needs, when that many
// pods are still active. A Job without completions is done when a pod succeeded and
// the others have ended.
func (l *look) complete(active int32) bool {
	switch {
	case active > 0:
		return false
	case l.job.Spec.Completions == nil:
		return l.succeeded > 0
	}
	return l.succeeded >= *l.job.Spec.Completions
}
