// SPDX-License-Identifier: Apache-2.0

package job

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func TestIndexes(t *testing.T) {
	for _, c := range []struct {
		text, want string
		count      int
	}{
		{"", "", 0},
		{"0", "0", 1},
		{"0,1", "0,1", 2},
		{"0-2,3", "0-3", 4},
		{"7,1-3", "1-3,7", 4},
		{"1,x,3-y,5", "1,5", 2},
		{"8,12,9-30", "8,9", 2}, // 10 completions
		{"5-3,-1", "", 0},
	} {
		got := parseIndexes(c.text, 10)
		if got.String() != c.want || got.count() != c.count {
			t.Errorf("%q: %q with %d, want %q with %d", c.text, got, got.count(), c.want, c.count)
		}
	}
	x := indexesOf(4, 0, 1, 2, 9)
	if x.String() != "0-2,4,9" || !x.has(1) || x.has(3) || !x.has(9) || x.has(10) {
		t.Errorf("set %s", x)
	}
	if got := fmt.Sprint(x.missing(3, 10), x.missing(9, 6), indexes(nil).missing(2, 2)); got != "[3 5 6] [3 5] [0 1]" {
		t.Errorf("missing %s", got)
	}
	if got := union(x, indexesOf(3, 11)); got.String() != "0-4,9,11" || x.String() != "0-2,4,9" {
		t.Errorf("union %s, and what went in is %s", got, x)
	}
	if n := common(x, parseIndexes("1-4,8-20", 99)); n != 4 {
		t.Errorf("%d in common", n)
	}
}

type podOption func(*corev1.Pod)

func makePod(name string, opts ...podOption) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: types.UID(name), Finalizers: []string{batchv1.JobTrackingFinalizer}, CreationTimestamp: metav1.NewTime(noon)},
		Spec:       corev1.PodSpec{NodeName: "n"},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, o := range opts {
		o(p)
	}
	return p
}

func phase(ph corev1.PodPhase) podOption { return func(p *corev1.Pod) { p.Status.Phase = ph } }

func exited(code int32, after time.Duration) podOption {
	return func(p *corev1.Pod) {
		p.Status.Phase = corev1.PodFailed
		if code == 0 {
			p.Status.Phase = corev1.PodSucceeded
		}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: code, FinishedAt: metav1.NewTime(noon.Add(after))},
		}}}
	}
}

func deleted(p *corev1.Pod) {
	p.DeletionTimestamp = ptr.To(metav1.NewTime(noon.Add(30 * time.Second)))
	p.DeletionGracePeriodSeconds = ptr.To[int64](30)
}

func unscheduled(p *corev1.Pod) { p.Spec.NodeName, p.Status.Phase = "", corev1.PodPending }

func released(p *corev1.Pod) { p.Finalizers = nil }

func at(index int) podOption {
	return func(p *corev1.Pod) {
		p.Annotations = with(p.Annotations, batchv1.JobCompletionIndexAnnotation, fmt.Sprint(index))
	}
}

func failuresBefore(n int) podOption {
	return func(p *corev1.Pod) {
		p.Annotations = with(p.Annotations, batchv1.JobIndexFailureCountAnnotation, fmt.Sprint(n))
	}
}

func TestFailures(t *testing.T) {
	one := failures{}.then(nil, []*corev1.Pod{makePod("a", exited(1, 0))})
	three := one.then(nil, []*corev1.Pod{makePod("c", exited(1, 9*time.Second)), makePod("b", exited(1, 5*time.Second))})
	if one.count != 1 || three.count != 3 || !three.last.Equal(noon.Add(9*time.Second)) {
		t.Fatalf("got %+v and %+v", one, three)
	}
	for n, want := range []time.Duration{0, 10 * time.Second, 20 * time.Second, 40 * time.Second, 80 * time.Second, 160 * time.Second, 320 * time.Second, 600 * time.Second, 600 * time.Second} {
		if got := (failures{count: n, last: noon}).wait(noon); got != want {
			t.Errorf("after %d failures %v, want %v", n, got, want)
		}
	}
	if got := one.wait(noon.Add(4 * time.Second)); got != 6*time.Second {
		t.Errorf("4s later %v", got)
	}
	if got := one.wait(noon.Add(time.Hour)); got != 0 {
		t.Errorf("an hour later %v", got)
	}
	after := three.then([]*corev1.Pod{makePod("ok", exited(0, 10*time.Second))}, []*corev1.Pod{makePod("d", exited(1, 7*time.Second)), makePod("e", exited(1, 12*time.Second))})
	if after.count != 1 || !after.last.Equal(noon.Add(12*time.Second)) {
		t.Errorf("a success forgives what was before it: %+v", after)
	}
	// Without containers that ended, the deletion tells when.
	if got := endOf(makePod("x", deleted)); !got.Equal(noon) {
		t.Errorf("a deleted pod ended at %v", got)
	}
}

func TestPodFailurePolicy(t *testing.T) {
	policy := &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{
		{Action: batchv1.PodFailurePolicyActionIgnore, OnPodConditions: []batchv1.PodFailurePolicyOnPodConditionsPattern{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}}},
		{Action: batchv1.PodFailurePolicyActionFailJob, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{ContainerName: ptr.To("c"), Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: []int32{3, 4}}},
		{Action: batchv1.PodFailurePolicyActionFailIndex, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{Operator: batchv1.PodFailurePolicyOnExitCodesOpNotIn, Values: []int32{5}}},
	}}
	disrupted := makePod("d", exited(3, 0), func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}}
	})
	other := makePod("o", exited(3, 0), func(p *corev1.Pod) { p.Status.ContainerStatuses[0].Name = "sidecar" })
	for _, c := range []struct {
		pod    *corev1.Pod
		action batchv1.PodFailurePolicyAction
		why    string
	}{
		{disrupted, "Ignore", "Pod ns/d has condition DisruptionTarget matching Ignore rule at index 0"},
		{makePod("a", exited(4, 0)), "FailJob", "Container c for pod ns/a failed with exit code 4 matching FailJob rule at index 1"},
		{other, "FailIndex", "Container sidecar for pod ns/o failed with exit code 3 matching FailIndex rule at index 2"},
		{makePod("b", exited(5, 0)), "Count", ""},
		{makePod("s", exited(0, 0)), "Count", ""},
	} {
		if r := judge(policy, c.pod); r.action != c.action || r.why != c.why || r.counts() != (c.action != "Ignore") {
			t.Errorf("%s: %+v", c.pod.Name, r)
		}
	}
	if r := judge(nil, disrupted); !r.counts() {
		t.Errorf("without a policy: %+v", r)
	}
}

func TestSucceedsEarly(t *testing.T) {
	policy := &batchv1.SuccessPolicy{Rules: []batchv1.SuccessPolicyRule{
		{SucceededIndexes: ptr.To("0-2")},
		{SucceededIndexes: ptr.To("4-9"), SucceededCount: ptr.To[int32](2)},
		{SucceededCount: ptr.To[int32](5)},
	}}
	for done, want := range map[string]string{
		"": "", "0,1": "", "0-2": "Matched rules at index 0", "0,4,9": "Matched rules at index 1",
		"0,1,3,10,11": "Matched rules at index 2",
	} {
		if got, met := succeedsEarly(policy, parseIndexes(done, 12), 12); got != want || met != (want != "") {
			t.Errorf("%q: %q %v", done, got, met)
		}
	}
}

type jobOption func(*batchv1.Job)

func makeJob(parallelism, completions int32, opts ...jobOption) *batchv1.Job {
	j := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: "j", Namespace: "ns", UID: "job"},
		Spec: batchv1.JobSpec{
			Parallelism: &parallelism, BackoffLimit: ptr.To[int32](6), CompletionMode: ptr.To(batchv1.NonIndexedCompletion),
			PodReplacementPolicy: ptr.To(batchv1.TerminatingOrFailed),
		},
		Status: batchv1.JobStatus{StartTime: ptr.To(metav1.NewTime(noon))},
	}
	if completions >= 0 {
		j.Spec.Completions = &completions
	}
	for _, o := range opts {
		o(j)
	}
	return j
}

func withIndexes(j *batchv1.Job) { j.Spec.CompletionMode = ptr.To(batchv1.IndexedCompletion) }

func limitPerIndex(n int32) jobOption {
	return func(j *batchv1.Job) {
		withIndexes(j)
		j.Spec.BackoffLimit, j.Spec.BackoffLimitPerIndex = ptr.To[int32](1<<31-1), &n
	}
}

// said is what a look decides, in one line.
func said(l *look) string {
	names := func(pods []*corev1.Pod) string {
		var out []string
		for _, p := range pods {
			out = append(out, p.Name)
		}
		slices.Sort(out)
		return strings.Join(out, " ")
	}
	if l.verdict != nil {
		return fmt.Sprintf("%s %s", l.verdict.Type, l.verdict.Reason)
	}
	if l.complete(int32(len(l.active))) {
		return "complete"
	}
	p := l.plan()
	out := fmt.Sprintf("remove[%s] create%v", names(p.remove), p.create)
	if p.wait > 0 {
		out += fmt.Sprintf(" wait %v", p.wait)
	}
	return out
}

func TestLook(t *testing.T) {
	const x = noIndex
	onFailure := func(j *batchv1.Job) {
		j.Spec.Template.Spec.RestartPolicy, j.Spec.BackoffLimit = corev1.RestartPolicyOnFailure, ptr.To[int32](2)
	}
	restarted := func(n int32) podOption {
		return func(p *corev1.Pod) { p.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: n}} }
	}
	replaceFailed := func(j *batchv1.Job) { j.Spec.PodReplacementPolicy = ptr.To(batchv1.Failed) }
	deadline := func(s int64) jobOption { return func(j *batchv1.Job) { j.Spec.ActiveDeadlineSeconds = &s } }
	pods := func(p ...*corev1.Pod) []*corev1.Pod { return p }
	for _, c := range []struct {
		name string
		job  *batchv1.Job
		pods []*corev1.Pod
		want string
	}{
		{"nothing yet", makeJob(2, 3), nil, fmt.Sprintf("remove[] create[%d %d]", x, x)},
		{"no more than are needed", makeJob(5, 2), nil, fmt.Sprintf("remove[] create[%d %d]", x, x)},
		{"one succeeded", makeJob(2, 3), pods(makePod("a", exited(0, 0)), makePod("b")), fmt.Sprintf("remove[] create[%d]", x)},
		{"counted before", makeJob(2, 3, func(j *batchv1.Job) { j.Status.Succeeded = 2 }), pods(makePod("a", exited(0, 0), released), makePod("b")), "remove[] create[]"},
		{"named in the status", makeJob(2, 2, func(j *batchv1.Job) {
			j.Status.UncountedTerminatedPods = &batchv1.UncountedTerminatedPods{Succeeded: []types.UID{"a"}}
		}), pods(makePod("a", exited(0, 0)), makePod("b")), "remove[] create[]"},
		{"all done", makeJob(2, 2), pods(makePod("a", exited(0, 0)), makePod("b", exited(0, 0))), "complete"},
		{"too many", makeJob(1, 3), pods(makePod("a"), makePod("b", unscheduled), makePod("c", phase(corev1.PodPending))), "remove[b c] create[]"},
		{"suspended", makeJob(2, 3, func(j *batchv1.Job) { j.Spec.Suspend = ptr.To(true) }), pods(makePod("a"), makePod("b", exited(0, 0))), "remove[a] create[]"},
		{"work queue", makeJob(2, -1), pods(makePod("a")), fmt.Sprintf("remove[] create[%d]", x)},
		{"work queue that is empty", makeJob(2, -1), pods(makePod("a"), makePod("b", exited(0, 0))), "remove[] create[]"},
		{"work queue, all ended", makeJob(2, -1), pods(makePod("a", exited(1, 0)), makePod("b", exited(0, 0))), "complete"},
		{"a failure", makeJob(1, 1), pods(makePod("a", exited(1, 58*time.Second))), "remove[] create[] wait 8s"},
		{"a deleted pod is replaced, after a pause", makeJob(1, 1), pods(makePod("a", deleted)), fmt.Sprintf("remove[] create[%d]", x)},
		{"a deleted pod that is waited for", makeJob(1, 1, replaceFailed), pods(makePod("a", deleted)), "remove[] create[]"},
		{"a deleted pod that no kubelet ends", makeJob(1, 1, replaceFailed), pods(makePod("a", deleted, unscheduled)), "remove[] create[]"},
		{"too many failures", makeJob(1, 1, func(j *batchv1.Job) { j.Status.Failed = 6 }), pods(makePod("a", exited(1, 0))), "FailureTarget BackoffLimitExceeded"},
		{"restarts count", makeJob(2, 2, onFailure), pods(makePod("a", restarted(1)), makePod("b", restarted(1))), "FailureTarget BackoffLimitExceeded"},
		{"restarts below the limit", makeJob(1, 1, onFailure), pods(makePod("a", restarted(1))), "remove[] create[]"},
		{"in time", makeJob(1, 1, deadline(61)), pods(makePod("a")), "remove[] create[]"},
		{"too late", makeJob(1, 1, deadline(60)), pods(makePod("a")), "FailureTarget DeadlineExceeded"},
		{"failing already", makeJob(1, 1, func(j *batchv1.Job) {
			j.Status.Conditions = []batchv1.JobCondition{*condition(batchv1.JobFailureTarget, corev1.ConditionTrue, "Why", "", noon)}
		}), nil, "Failed Why"},

		{"indexes", makeJob(2, 4, withIndexes), nil, "remove[] create[0 1]"},
		{"indexes left", makeJob(3, 5, withIndexes, func(j *batchv1.Job) { j.Status.CompletedIndexes = "0,2" }), pods(makePod("a", at(1))), "remove[] create[3 4]"},
		{"an index twice, one too high, none", makeJob(4, 3, withIndexes), pods(makePod("a", at(1)), makePod("b", at(1), unscheduled), makePod("c", at(3)), makePod("d")), "remove[b c d] create[]"},
		{"an index done", makeJob(2, 2, withIndexes), pods(makePod("a", at(0), exited(0, 0)), makePod("b", at(1), exited(0, 0)), makePod("c", at(1), exited(0, 0))), "complete"},
		{"each index has its pause", makeJob(3, 3, limitPerIndex(1)), pods(makePod("a", at(0), exited(1, 0)), makePod("b", at(1), exited(1, 58*time.Second))), "remove[] create[0 2] wait 8s"},
		{"an index is lost", makeJob(2, 3, limitPerIndex(1)), pods(makePod("a", at(0), exited(1, 0), failuresBefore(1))), "remove[] create[1 2]"},
		{"all done or lost", makeJob(2, 2, limitPerIndex(0)), pods(makePod("a", at(0), exited(1, 0)), makePod("b", at(1), exited(0, 0))), "FailureTarget FailedIndexes"},
		{"too many lost", makeJob(2, 9, limitPerIndex(0), func(j *batchv1.Job) { j.Spec.MaxFailedIndexes, j.Status.FailedIndexes = ptr.To[int32](1), ptr.To("7") }),
			pods(makePod("a", at(0), exited(1, 0))), "FailureTarget MaxFailedIndexesExceeded"},
		{"policy for the Job", makeJob(2, 2, func(j *batchv1.Job) {
			j.Spec.PodFailurePolicy = &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{{Action: batchv1.PodFailurePolicyActionFailJob, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: []int32{7}}}}}
		}), pods(makePod("a", exited(7, 0)), makePod("b")), "FailureTarget PodFailurePolicy"},
		{"enough", makeJob(2, 4, withIndexes, func(j *batchv1.Job) {
			j.Spec.SuccessPolicy = &batchv1.SuccessPolicy{Rules: []batchv1.SuccessPolicyRule{{SucceededIndexes: ptr.To("0")}}}
		}), pods(makePod("a", at(0), exited(0, 0)), makePod("b", at(1))), "SuccessCriteriaMet SuccessPolicy"},
	} {
		if got := said(newLook(c.job, c.pods, failures{}, noon.Add(time.Minute))); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestDress(t *testing.T) {
	job := makeJob(1, 200, limitPerIndex(3), func(j *batchv1.Job) { j.Name = strings.Repeat("n", 57) })
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "x-"},
		Spec: corev1.PodSpec{
			InitContainers: []corev1.Container{{Name: "i"}},
			Containers:     []corev1.Container{{Name: "c", Env: []corev1.EnvVar{{Name: indexVariable, Value: "mine"}}}},
		},
	}
	dress(pod, job, 123, makePod("before", at(123), failuresBefore(2), exited(1, 0)))
	if !tracked(pod) || indexOf(pod) != 123 || pod.Labels[batchv1.JobCompletionIndexAnnotation] != "123" || pod.Spec.Hostname != job.Name+"-123" {
		t.Errorf("got %+v, host %s", pod.ObjectMeta, pod.Spec.Hostname)
	}
	if len(pod.GenerateName) != longestPrefix || !strings.HasSuffix(pod.GenerateName, "n-123-") {
		t.Errorf("name from %s", pod.GenerateName)
	}
	if n := pod.Annotations[batchv1.JobIndexFailureCountAnnotation]; n != "3" {
		t.Errorf("%s failures", n)
	}
	env := pod.Spec.InitContainers[0].Env
	if len(env) != 1 || env[0].ValueFrom.FieldRef.FieldPath != "metadata.labels['batch.kubernetes.io/job-completion-index']" || pod.Spec.Containers[0].Env[0].Value != "mine" {
		t.Errorf("variables %+v, %+v", env, pod.Spec.Containers[0].Env)
	}
	if plain := dress(&corev1.Pod{}, makeJob(1, 1), noIndex, nil); !tracked(plain) || len(plain.Annotations) > 0 {
		t.Errorf("got %+v", plain.ObjectMeta)
	}
}
