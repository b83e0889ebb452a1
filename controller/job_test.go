// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/internal/nettest"
)

// ownClock gives the controllers of batch a clock that only the test moves.
func ownClock(b *bench) { b.clock = clocktesting.NewFakeClock(time.Now()) }

// soon waits for cond. It moves the clock by a hair each time: retries wait on it, too.
func (b *bench) soon(what string, cond func() error) {
	b.t.Helper()
	nettest.Eventually(b.t, patience, what, func() error {
		b.clock.Step(5 * time.Millisecond)
		return cond()
	})
}

func (b *bench) makeJob(name string, spec batchv1.JobSpec, restart ...corev1.RestartPolicy) *batchv1.Job {
	b.t.Helper()
	spec.Template.Spec.RestartPolicy = append(restart, corev1.RestartPolicyNever)[0]
	spec.Template.Spec.Containers = []corev1.Container{{Name: "c", Image: "busybox"}}
	made, err := b.client.BatchV1().Jobs("default").Create(b.t.Context(), &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return made
}

func (b *bench) job(name string) *batchv1.Job {
	b.t.Helper()
	job, err := b.client.BatchV1().Jobs("default").Get(b.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return job
}

func (b *bench) patchJob(name, patch string) {
	b.t.Helper()
	if _, err := b.client.BatchV1().Jobs("default").Patch(b.t.Context(), name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

// counts is what a Job's status counts, and the conditions that hold.
func counts(job *batchv1.Job) string {
	s := job.Status
	out := fmt.Sprintf("active %d ready %d terminating %d succeeded %d failed %d", s.Active, ptr.Deref(s.Ready, 0), ptr.Deref(s.Terminating, 0), s.Succeeded, s.Failed)
	if s.CompletedIndexes != "" {
		out += " done " + s.CompletedIndexes
	}
	if ptr.Deref(s.FailedIndexes, "") != "" {
		out += " lost " + *s.FailedIndexes
	}
	if u := s.UncountedTerminatedPods; u != nil && len(u.Succeeded)+len(u.Failed) > 0 {
		out += " uncounted"
	}
	for _, c := range s.Conditions {
		if c.Status == corev1.ConditionTrue {
			out += fmt.Sprintf(" %s=%s", c.Type, c.Reason)
		}
	}
	return out
}

// jobIs waits for counts to be want.
func (b *bench) jobIs(name, want string) *batchv1.Job {
	b.t.Helper()
	var job *batchv1.Job
	b.soon("job "+name+" being "+want, func() error {
		job = b.job(name)
		if got := counts(job); got != want {
			return fmt.Errorf("it is %s", got)
		}
		return nil
	})
	return job
}

// running waits for n pods of the Job that run and are not on their way out.
func (b *bench) running(job string, n int) []corev1.Pod {
	b.t.Helper()
	var up []corev1.Pod
	b.soon(fmt.Sprintf("%d pods of %s", n, job), func() error {
		up = nil
		for _, pod := range b.pods("default", "batch.kubernetes.io/job-name="+job) {
			if pod.DeletionTimestamp == nil && pod.Status.Phase == corev1.PodRunning {
				up = append(up, pod)
			}
		}
		if len(up) != n {
			return fmt.Errorf("%d run", len(up))
		}
		return nil
	})
	slices.SortFunc(up, func(a, b corev1.Pod) int { return strings.Compare(indexText(a), indexText(b)) })
	return up
}

func indexText(pod corev1.Pod) string { return pod.Annotations[batchv1.JobCompletionIndexAnnotation] }

// exit ends a pod's container with a code, now.
func (b *bench) exit(pod corev1.Pod, code int) {
	b.t.Helper()
	phase := corev1.PodSucceeded
	if code != 0 {
		phase = corev1.PodFailed
	}
	b.patchPodStatus(pod.Name, fmt.Sprintf(`{"status":{"phase":"%s","conditions":[{"type":"Ready","status":"False"}],"containerStatuses":[
		{"name":"c","image":"busybox","imageID":"","ready":false,"restartCount":0,"state":{"terminated":{"exitCode":%d,"finishedAt":"%s"}}}]}}`,
		phase, code, b.clock.Now().UTC().Format(time.RFC3339)))
}

// told waits for an event about an object.
func (b *bench) told(kind, name, reason, message string) {
	b.t.Helper()
	b.soon("event "+reason+" of "+name, func() error {
		events, err := b.client.CoreV1().Events("default").List(b.t.Context(), metav1.ListOptions{
			FieldSelector: "involvedObject.kind=" + kind + ",involvedObject.name=" + name + ",reason=" + reason,
		})
		if err != nil {
			return err
		}
		var got []string
		for _, e := range events.Items {
			if strings.HasPrefix(e.Message, message) {
				return nil
			}
			got = append(got, e.Message)
		}
		return fmt.Errorf("there are %q", got)
	})
}

// jobGone waits until the Job and its pods are gone.
func (b *bench) jobGone(name string) {
	b.t.Helper()
	b.soon("the end of "+name, func() error {
		if _, err := b.client.BatchV1().Jobs("default").Get(b.t.Context(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the job is there: %w", err)
		}
		if pods := b.pods("default", "job-name="+name); len(pods) > 0 {
			return fmt.Errorf("%d pods are there", len(pods))
		}
		return nil
	})
}

func finalizersOf(pods []corev1.Pod) int {
	n := 0
	for _, pod := range pods {
		n += len(pod.Finalizers)
	}
	return n
}

// TestJobRuns: as many pods as are wanted succeed, each is counted once, and the Job
// says how it went.
func TestJobRuns(t *testing.T) {
	b := newBench(t, ownClock)
	made := b.makeJob("pi", batchv1.JobSpec{Parallelism: ptr.To[int32](2), Completions: ptr.To[int32](3)})
	up := b.running("pi", 2)
	job := b.jobIs("pi", "active 2 ready 2 terminating 0 succeeded 0 failed 0")
	if job.Status.StartTime == nil || job.Status.CompletionTime != nil {
		t.Errorf("started %v, completed %v", job.Status.StartTime, job.Status.CompletionTime)
	}
	for _, label := range []string{"controller-uid", "batch.kubernetes.io/controller-uid"} {
		if up[0].Labels[label] != string(made.UID) {
			t.Errorf("label %s is %q", label, up[0].Labels[label])
		}
	}
	if up[0].Labels["job-name"] != "pi" || !strings.HasPrefix(up[0].Name, "pi-") || up[0].Spec.Hostname != "" || !slices.Equal(up[0].Finalizers, []string{batchv1.JobTrackingFinalizer}) {
		t.Errorf("pod %s, labels %v, finalizers %v", up[0].Name, up[0].Labels, up[0].Finalizers)
	}
	b.exit(up[0], 0)
	b.running("pi", 2)
	b.jobIs("pi", "active 2 ready 2 terminating 0 succeeded 1 failed 0")
	for _, pod := range b.running("pi", 2) {
		b.exit(pod, 0)
	}
	job = b.jobIs("pi", "active 0 ready 0 terminating 0 succeeded 3 failed 0 SuccessCriteriaMet=CompletionsReached Complete=CompletionsReached")
	if job.Status.CompletionTime == nil || job.Status.Conditions[1].Message != "Reached expected number of succeeded pods" {
		t.Errorf("status %+v", job.Status)
	}
	if n := finalizersOf(b.pods("default", "job-name=pi")); n != 0 {
		t.Errorf("%d finalizers are left", n)
	}
	b.told("Job", "pi", "SuccessfulCreate", "Created pod: pi-")
	b.told("Job", "pi", "Completed", "Job completed")
	// What becomes of the pods later is no news.
	if err := b.client.CoreV1().Pods("default").Delete(t.Context(), up[0].Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	b.jobIs("pi", "active 0 ready 0 terminating 0 succeeded 3 failed 0 SuccessCriteriaMet=CompletionsReached Complete=CompletionsReached")

	// A work queue: the first success says that there is nothing left to begin.
	b.makeJob("queue", batchv1.JobSpec{Parallelism: ptr.To[int32](3)})
	up = b.running("queue", 3)
	b.exit(up[0], 0)
	b.jobIs("queue", "active 2 ready 2 terminating 0 succeeded 1 failed 0")
	b.exit(up[1], 1)
	b.jobIs("queue", "active 1 ready 1 terminating 0 succeeded 1 failed 1")
	b.exit(up[2], 0)
	b.jobIs("queue", "active 0 ready 0 terminating 0 succeeded 2 failed 1 SuccessCriteriaMet=CompletionsReached Complete=CompletionsReached")

	// Another controller's.
	b.makeJob("theirs", batchv1.JobSpec{ManagedBy: ptr.To("example.com/other")})
	b.settle()
	if job := b.job("theirs"); job.Status.StartTime != nil || len(b.pods("default", "job-name=theirs")) > 0 {
		t.Errorf("somebody else's Job is %+v", job.Status)
	}
}

// TestJobFails: pauses between failures, and the limits at which a Job gives up.
func TestJobFails(t *testing.T) {
	b := newBench(t, ownClock)
	b.makeJob("bad", batchv1.JobSpec{BackoffLimit: ptr.To[int32](2), Parallelism: ptr.To[int32](1)})
	for i, pause := range []time.Duration{10 * time.Second, 20 * time.Second, 0} {
		b.exit(b.running("bad", 1)[0], 3)
		if pause == 0 {
			break
		}
		b.jobIs("bad", fmt.Sprintf("active 0 ready 0 terminating 0 succeeded 0 failed %d", i+1))
		b.clock.Step(pause - 2*time.Second)
		b.settle()
		b.running("bad", 0)
		b.clock.Step(4 * time.Second) // times in a status have no fractions
	}
	job := b.jobIs("bad", "active 0 ready 0 terminating 0 succeeded 0 failed 3 FailureTarget=BackoffLimitExceeded Failed=BackoffLimitExceeded")
	if job.Status.CompletionTime != nil || job.Status.Conditions[0].Message != "Job has reached the specified backoff limit" {
		t.Errorf("status %+v", job.Status)
	}
	b.told("Job", "bad", "BackoffLimitExceeded", "Job has reached the specified backoff limit")

	// The deadline ends what runs; those pods count as failed.
	b.makeJob("late", batchv1.JobSpec{ActiveDeadlineSeconds: ptr.To[int64](60), Parallelism: ptr.To[int32](2), Completions: ptr.To[int32](2)})
	b.running("late", 2)
	b.jobIs("late", "active 2 ready 2 terminating 0 succeeded 0 failed 0")
	b.clock.Step(61 * time.Second)
	b.jobIs("late", "active 0 ready 0 terminating 0 succeeded 0 failed 2 FailureTarget=DeadlineExceeded Failed=DeadlineExceeded")
	b.told("Job", "late", "DeadlineExceeded", "Job was active longer than specified deadline")
	b.running("late", 0)

	// Containers that restart count, too.
	b.makeJob("restarts", batchv1.JobSpec{BackoffLimit: ptr.To[int32](2)}, corev1.RestartPolicyOnFailure)
	b.patchPodStatus(b.running("restarts", 1)[0].Name, `{"status":{"containerStatuses":[{"name":"c","image":"busybox","imageID":"","ready":true,"restartCount":2}]}}`)
	b.jobIs("restarts", "active 0 ready 0 terminating 0 succeeded 0 failed 1 FailureTarget=BackoffLimitExceeded Failed=BackoffLimitExceeded")

	rule := func(action batchv1.PodFailurePolicyAction, code int32) batchv1.PodFailurePolicyRule {
		return batchv1.PodFailurePolicyRule{Action: action, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: []int32{code}}}
	}
	b.makeJob("policy", batchv1.JobSpec{BackoffLimit: ptr.To[int32](0), Parallelism: ptr.To[int32](2), Completions: ptr.To[int32](2), PodFailurePolicy: &batchv1.PodFailurePolicy{
		Rules: []batchv1.PodFailurePolicyRule{rule("Ignore", 42), rule("FailJob", 43)},
	}})
	b.exit(b.running("policy", 2)[0], 42)
	b.jobIs("policy", "active 1 ready 1 terminating 0 succeeded 0 failed 0")
	b.clock.Step(12 * time.Second)
	b.exit(b.running("policy", 2)[0], 43)
	job = b.jobIs("policy", "active 0 ready 0 terminating 0 succeeded 0 failed 2 FailureTarget=PodFailurePolicy Failed=PodFailurePolicy")
	if m := job.Status.Conditions[1].Message; !strings.HasPrefix(m, "Container c for pod default/policy-") || !strings.HasSuffix(m, " failed with exit code 43 matching FailJob rule at index 1") {
		t.Errorf("message %q", m)
	}
}

// TestIndexedJob: each pod knows its index, and an index is done once.
func TestIndexedJob(t *testing.T) {
	b := newBench(t, ownClock)
	indexed := ptr.To(batchv1.IndexedCompletion)
	b.makeJob("ix", batchv1.JobSpec{CompletionMode: indexed, Parallelism: ptr.To[int32](3), Completions: ptr.To[int32](5)})
	up := b.running("ix", 3)
	for i, pod := range up {
		n := strconv.Itoa(i)
		env := pod.Spec.Containers[0].Env
		if indexText(pod) != n || pod.Labels[batchv1.JobCompletionIndexAnnotation] != n || pod.Spec.Hostname != "ix-"+n || !strings.HasPrefix(pod.Name, "ix-"+n+"-") ||
			len(env) != 1 || env[0].Name != "JOB_COMPLETION_INDEX" {
			t.Errorf("pod %d is %s, host %s, annotations %v, variables %v", i, pod.Name, pod.Spec.Hostname, pod.Annotations, env)
		}
	}
	b.exit(up[0], 0)
	b.exit(up[2], 0)
	up = b.running("ix", 3)
	b.jobIs("ix", "active 3 ready 3 terminating 0 succeeded 2 failed 0 done 0,2")
	// Somebody deletes the pod of index 1: it counts as failed, and comes back.
	if err := b.client.CoreV1().Pods("default").Delete(t.Context(), up[0].Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.jobIs("ix", "active 2 ready 2 terminating 0 succeeded 2 failed 1 done 0,2")
	b.clock.Step(60 * time.Second)
	for i, pod := range b.running("ix", 3) {
		if want := []string{"1", "3", "4"}[i]; indexText(pod) != want {
			t.Errorf("index %s runs, not %s", indexText(pod), want)
		}
		b.exit(pod, 0)
	}
	b.jobIs("ix", "active 0 ready 0 terminating 0 succeeded 5 failed 1 done 0-4 SuccessCriteriaMet=CompletionsReached Complete=CompletionsReached")

	// A limit for each index: index 0 fails twice and is lost, the others go on.
	b.makeJob("limits", batchv1.JobSpec{CompletionMode: indexed, Parallelism: ptr.To[int32](2), Completions: ptr.To[int32](2), BackoffLimitPerIndex: ptr.To[int32](1)})
	up = b.running("limits", 2)
	b.exit(up[0], 1)
	b.running("limits", 1)
	b.clock.Step(12 * time.Second)
	up = b.running("limits", 2)
	if n := up[0].Annotations[batchv1.JobIndexFailureCountAnnotation]; indexText(up[0]) != "0" || n != "1" {
		t.Errorf("index %s runs after %s failures", indexText(up[0]), n)
	}
	b.exit(up[0], 1)
	b.jobIs("limits", "active 1 ready 1 terminating 0 succeeded 0 failed 2 lost 0")
	b.exit(up[1], 0)
	b.jobIs("limits", "active 0 ready 0 terminating 0 succeeded 1 failed 2 done 1 lost 0 FailureTarget=FailedIndexes Failed=FailedIndexes")

	b.makeJob("few", batchv1.JobSpec{CompletionMode: indexed, Parallelism: ptr.To[int32](3), Completions: ptr.To[int32](3), BackoffLimitPerIndex: ptr.To[int32](0), MaxFailedIndexes: ptr.To[int32](0)})
	b.exit(b.running("few", 3)[1], 1)
	b.jobIs("few", "active 0 ready 0 terminating 0 succeeded 0 failed 3 lost 1 FailureTarget=MaxFailedIndexesExceeded Failed=MaxFailedIndexesExceeded")

	// One index is enough.
	b.makeJob("leader", batchv1.JobSpec{CompletionMode: indexed, Parallelism: ptr.To[int32](3), Completions: ptr.To[int32](3), SuccessPolicy: &batchv1.SuccessPolicy{
		Rules: []batchv1.SuccessPolicyRule{{SucceededIndexes: ptr.To("0")}},
	}})
	b.exit(b.running("leader", 3)[0], 0)
	job := b.jobIs("leader", "active 0 ready 0 terminating 0 succeeded 1 failed 0 done 0 SuccessCriteriaMet=SuccessPolicy Complete=SuccessPolicy")
	if m := job.Status.Conditions[0].Message; m != "Matched rules at index 0" {
		t.Errorf("message %q", m)
	}
	b.running("leader", 0)

	// Grown and shrunk, with its parallelism.
	b.makeJob("elastic", batchv1.JobSpec{CompletionMode: indexed, Parallelism: ptr.To[int32](2), Completions: ptr.To[int32](2)})
	b.running("elastic", 2)
	b.patchJob("elastic", `{"spec":{"parallelism":3,"completions":3}}`)
	b.running("elastic", 3)
	b.patchJob("elastic", `{"spec":{"parallelism":1,"completions":1}}`)
	if up := b.running("elastic", 1); indexText(up[0]) != "0" {
		t.Errorf("index %s is left", indexText(up[0]))
	}
	b.jobIs("elastic", "active 1 ready 1 terminating 0 succeeded 0 failed 0")
}

// TestJobPauses: a suspended Job has no pods, and nothing of it counts as failed.
func TestJobPauses(t *testing.T) {
	b := newBench(t, ownClock)
	b.makeJob("s", batchv1.JobSpec{Suspend: ptr.To(true), Parallelism: ptr.To[int32](2), Completions: ptr.To[int32](2), ActiveDeadlineSeconds: ptr.To[int64](100)})
	if job := b.jobIs("s", "active 0 ready 0 terminating 0 succeeded 0 failed 0 Suspended=JobSuspended"); job.Status.StartTime != nil {
		t.Errorf("started %v", job.Status.StartTime)
	}
	b.told("Job", "s", "Suspended", "Job suspended")
	// Before it starts, the template may still say where.
	b.patchJob("s", `{"spec":{"template":{"spec":{"nodeSelector":{"kubernetes.io/hostname":"node2"}}}}}`)
	b.clock.Step(200 * time.Second)
	b.patchJob("s", `{"spec":{"suspend":false}}`)
	up := b.running("s", 2)
	job := b.jobIs("s", "active 2 ready 2 terminating 0 succeeded 0 failed 0")
	b.told("Job", "s", "Resumed", "Job resumed")
	if job.Status.StartTime == nil || b.clock.Since(job.Status.StartTime.Time) > 50*time.Second || up[0].Spec.NodeName != "node2" {
		t.Errorf("started %v on %s", job.Status.StartTime, up[0].Spec.NodeName)
	}
	b.exit(up[0], 0)
	b.jobIs("s", "active 1 ready 1 terminating 0 succeeded 1 failed 0")
	b.patchJob("s", `{"spec":{"suspend":true}}`)
	b.running("s", 0)
	if job := b.jobIs("s", "active 0 ready 0 terminating 0 succeeded 1 failed 0 Suspended=JobSuspended"); job.Status.StartTime != nil {
		t.Errorf("a suspended Job has started %v", job.Status.StartTime)
	}
	b.patchJob("s", `{"spec":{"suspend":false}}`)
	b.exit(b.running("s", 1)[0], 0)
	b.jobIs("s", "active 0 ready 0 terminating 0 succeeded 2 failed 0 SuccessCriteriaMet=CompletionsReached Complete=CompletionsReached")

	// Fewer at a time: what is taken away does not count as failed.
	b.makeJob("wide", batchv1.JobSpec{Parallelism: ptr.To[int32](3), Completions: ptr.To[int32](9)})
	b.running("wide", 3)
	b.patchJob("wide", `{"spec":{"parallelism":1}}`)
	b.running("wide", 1)
	b.jobIs("wide", "active 1 ready 1 terminating 0 succeeded 0 failed 0")
}

// TestJobReplacesPods: when a deleted pod counts, and when the next one comes.
func TestJobReplacesPods(t *testing.T) {
	b := newBench(t, ownClock)
	b.makeJob("now", batchv1.JobSpec{})
	b.makeJob("wait", batchv1.JobSpec{PodReplacementPolicy: ptr.To(batchv1.Failed)})
	now, wait := b.running("now", 1)[0], b.running("wait", 1)[0]
	// Their nodes do not answer any more.
	b.kubelet.frozen.Store(true)
	for _, pod := range []corev1.Pod{now, wait} {
		if err := b.client.CoreV1().Pods("default").Delete(t.Context(), pod.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	b.jobIs("now", "active 0 ready 0 terminating 1 succeeded 0 failed 1")
	b.jobIs("wait", "active 0 ready 0 terminating 1 succeeded 0 failed 0")
	b.clock.Step(60 * time.Second)
	b.running("now", 1)
	b.jobIs("now", "active 1 ready 1 terminating 1 succeeded 0 failed 1")
	b.settle()
	b.running("wait", 0)
	// One node comes back and says how its pod ended.
	b.exit(wait, 1)
	b.jobIs("wait", "active 0 ready 0 terminating 0 succeeded 0 failed 1")
	b.clock.Step(12 * time.Second)
	b.exit(b.running("wait", 1)[0], 0)
	b.jobIs("wait", "active 0 ready 0 terminating 0 succeeded 1 failed 1 SuccessCriteriaMet=CompletionsReached Complete=CompletionsReached")
	// A Job is not over while one of its pods is on its way out.
	b.exit(b.running("now", 1)[0], 0)
	b.jobIs("now", "active 0 ready 0 terminating 1 succeeded 1 failed 1 SuccessCriteriaMet=CompletionsReached")
	b.kubelet.frozen.Store(false)
	b.patchPodStatus(now.Name, `{"status":{"message":"look again"}}`)
	b.jobIs("now", "active 0 ready 0 terminating 0 succeeded 1 failed 1 SuccessCriteriaMet=CompletionsReached Complete=CompletionsReached")
}

// TestJobGoes: no finalizer outlives the Job, however it goes.
func TestJobGoes(t *testing.T) {
	b := newBench(t, ownClock)
	remove := func(name string, policy *metav1.DeletionPropagation) {
		t.Helper()
		if err := b.client.BatchV1().Jobs("default").Delete(t.Context(), name, metav1.DeleteOptions{PropagationPolicy: policy}); err != nil {
			t.Fatal(err)
		}
	}
	for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationBackground, metav1.DeletePropagationForeground} {
		name := strings.ToLower(string(policy))
		b.makeJob(name, batchv1.JobSpec{Parallelism: ptr.To[int32](2)})
		b.exit(b.running(name, 2)[0], 1)
		remove(name, &policy)
		b.jobGone(name)
	}
	// Without a word the pods stay, as ever with Jobs.
	b.makeJob("orphan", batchv1.JobSpec{Parallelism: ptr.To[int32](2)})
	b.running("orphan", 2)
	remove("orphan", nil)
	b.soon("the pods being free", func() error {
		if _, err := b.client.BatchV1().Jobs("default").Get(t.Context(), "orphan", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the job is there: %w", err)
		}
		pods := b.pods("default", "job-name=orphan")
		if n := finalizersOf(pods); len(pods) != 2 || n > 0 || len(pods[0].OwnerReferences)+len(pods[1].OwnerReferences) > 0 {
			return fmt.Errorf("%d pods with %d finalizers, the first owned by %v", len(pods), n, pods[0].OwnerReferences)
		}
		return nil
	})
	// A Job that selects by hand adopts them, finalizer and all.
	b.makeJob("heir", batchv1.JobSpec{
		Parallelism: ptr.To[int32](2), Completions: ptr.To[int32](2), ManualSelector: ptr.To(true),
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"job-name": "orphan"}},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"job-name": "orphan"}}},
	})
	b.jobIs("heir", "active 2 ready 2 terminating 0 succeeded 0 failed 0")
	pods := b.pods("default", "job-name=orphan")
	if len(pods) != 2 || finalizersOf(pods) != 2 || pods[0].OwnerReferences[0].Name != "heir" {
		t.Fatalf("%d pods, %d finalizers", len(pods), finalizersOf(pods))
	}
	// One that is labelled away is let go, and replaced.
	b.patchPod(pods[0].Name, `{"metadata":{"labels":{"job-name":"nobody"}}}`)
	b.jobIs("heir", "active 2 ready 2 terminating 0 succeeded 0 failed 0")
	b.soon("the pod being free", func() error {
		if away := b.pods("default", "job-name=nobody"); len(away) != 1 || finalizersOf(away) > 0 || len(away[0].OwnerReferences) > 0 {
			return fmt.Errorf("%d pods, %d finalizers", len(away), finalizersOf(away))
		}
		return nil
	})
	for _, pod := range b.pods("default", "job-name=orphan") {
		b.exit(pod, 0)
	}
	b.jobIs("heir", "active 0 ready 0 terminating 0 succeeded 2 failed 0 SuccessCriteriaMet=CompletionsReached Complete=CompletionsReached")

	// Some time after the end.
	b.makeJob("brief", batchv1.JobSpec{TTLSecondsAfterFinished: ptr.To[int32](30)})
	b.exit(b.running("brief", 1)[0], 0)
	b.jobIs("brief", "active 0 ready 0 terminating 0 succeeded 1 failed 0 SuccessCriteriaMet=CompletionsReached Complete=CompletionsReached")
	b.clock.Step(20 * time.Second)
	b.settle()
	b.job("brief")
	b.clock.Step(12 * time.Second)
	b.jobGone("brief")
}

// TestJobSurvivesRestart: what ended while nobody looked, or was half counted, is
// counted once.
func TestJobSurvivesRestart(t *testing.T) {
	b := newBench(t, ownClock)
	b.makeJob("j", batchv1.JobSpec{Parallelism: ptr.To[int32](3), Completions: ptr.To[int32](4)})
	up := b.running("j", 3)
	b.jobIs("j", "active 3 ready 3 terminating 0 succeeded 0 failed 0")
	b.halt()
	b.exit(up[0], 0)
	b.exit(up[1], 1)
	b.exit(up[2], 0)
	// The controller stopped after it had named the first two, and had let only the
	// first one go.
	job := b.job("j")
	job.Status.UncountedTerminatedPods = &batchv1.UncountedTerminatedPods{Succeeded: []types.UID{up[0].UID}, Failed: []types.UID{up[1].UID}}
	if _, err := b.client.BatchV1().Jobs("default").UpdateStatus(t.Context(), job, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.patchPod(up[0].Name, `{"metadata":{"finalizers":null}}`)
	b.start()
	b.jobIs("j", "active 2 ready 2 terminating 0 succeeded 2 failed 1")
	for _, pod := range b.running("j", 2) {
		b.exit(pod, 0)
	}
	b.jobIs("j", "active 0 ready 0 terminating 0 succeeded 4 failed 1 SuccessCriteriaMet=CompletionsReached Complete=CompletionsReached")
}
