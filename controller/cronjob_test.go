// SPDX-License-Identifier: Apache-2.0

package controller_test

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

func (b *bench) makeCronJob(name string, spec batchv1.CronJobSpec) *batchv1.CronJob {
	b.t.Helper()
	spec.JobTemplate.Labels = map[string]string{"cron": name}
	spec.JobTemplate.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "busybox"}}}
	made, err := b.client.BatchV1().CronJobs("default").Create(b.t.Context(), &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return made
}

func (b *bench) patchCronJob(name, patch string) {
	b.t.Helper()
	if _, err := b.client.BatchV1().CronJobs("default").Patch(b.t.Context(), name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

// starts is the CronJob's Jobs by the minute of their start, counted from first, with a
// mark for how each ended; and how many are active.
func (b *bench) starts(name string, first time.Time) string {
	b.t.Helper()
	jobs, err := b.client.BatchV1().Jobs("default").List(b.t.Context(), metav1.ListOptions{LabelSelector: "cron=" + name})
	if err != nil {
		b.t.Fatal(err)
	}
	var out []string
	for _, job := range jobs.Items {
		at, err := time.Parse(time.RFC3339, job.Annotations[batchv1.CronJobScheduledTimestampAnnotation])
		if err != nil || job.Name != fmt.Sprintf("%s-%d", name, at.Unix()/60) {
			b.t.Fatalf("job %s with annotations %v", job.Name, job.Annotations)
		}
		mark := ""
		for _, c := range job.Status.Conditions {
			if c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed {
				mark = string(c.Type)[:1]
			}
		}
		out = append(out, fmt.Sprintf("%d%s", int(at.Sub(first)/time.Minute), mark))
	}
	slices.Sort(out)
	cron, err := b.client.BatchV1().CronJobs("default").Get(b.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return fmt.Sprintf("%s active %d", strings.Join(out, " "), len(cron.Status.Active))
}

func (b *bench) startsAre(name string, first time.Time, want string) {
	b.t.Helper()
	b.soon("jobs of "+name+" being "+want, func() error {
		if got := b.starts(name, first); got != want {
			return fmt.Errorf("they are %s", got)
		}
		return nil
	})
}

// minute sets the clock to n minutes and a second after first.
func (b *bench) minute(first time.Time, n int) {
	b.clock.SetTime(first.Add(time.Duration(n)*time.Minute + time.Second))
}

// end ends the pod of the CronJob's Job of a minute.
func (b *bench) end(cron string, first time.Time, minute, code int) {
	b.t.Helper()
	job := fmt.Sprintf("%s-%d", cron, first.Add(time.Duration(minute)*time.Minute).Unix()/60)
	b.exit(b.running(job, 1)[0], code)
	b.soon("the end of "+job, func() error {
		for _, c := range b.job(job).Status.Conditions {
			if c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed {
				return nil
			}
		}
		return fmt.Errorf("it runs")
	})
}

// TestCronJob: Jobs at their minutes, by policy, with a history.
func TestCronJob(t *testing.T) {
	b := newBench(t, ownClock)
	every := batchv1.CronJobSpec{Schedule: "* * * * *", FailedJobsHistoryLimit: ptr.To[int32](1), SuccessfulJobsHistoryLimit: ptr.To[int32](2)}
	every.JobTemplate.Spec.BackoffLimit = ptr.To[int32](0)
	made := b.makeCronJob("allow", every)
	spec := every
	spec.ConcurrencyPolicy = batchv1.ForbidConcurrent
	b.makeCronJob("forbid", spec)
	spec.ConcurrencyPolicy = batchv1.ReplaceConcurrent
	// The first minute that all three have before them.
	first := b.makeCronJob("replace", spec).CreationTimestamp.Truncate(time.Minute).Add(time.Minute)
	b.settle()
	b.startsAre("allow", first, " active 0")
	b.minute(first, 0)
	for _, name := range []string{"allow", "forbid", "replace"} {
		b.startsAre(name, first, "0 active 1")
	}
	job := b.job(fmt.Sprintf("allow-%d", first.Unix()/60))
	if !metav1.IsControlledBy(job, made) || !*job.OwnerReferences[0].BlockOwnerDeletion {
		t.Errorf("owned by %v", job.OwnerReferences)
	}
	b.told("CronJob", "allow", "SuccessfulCreate", "Created job "+job.Name)
	cron, err := b.client.BatchV1().CronJobs("default").Get(t.Context(), "allow", metav1.GetOptions{})
	if err != nil || !cron.Status.LastScheduleTime.Time.Equal(first) || cron.Status.Active[0].UID != job.UID || cron.Status.Active[0].Kind != "Job" {
		t.Fatalf("%v, status %+v", err, cron.Status)
	}
	b.minute(first, 1)
	b.startsAre("allow", first, "0 1 active 2")
	b.startsAre("replace", first, "1 active 1")
	b.startsAre("forbid", first, "0 active 1")
	b.told("CronJob", "forbid", "JobAlreadyActive", "Not starting job because prior execution is running and concurrency policy is Forbid")
	b.told("CronJob", "replace", "SuccessfulDelete", "Deleted job replace-")
	// The one that waited starts as soon as it may, and the start it missed counts.
	b.end("forbid", first, 0, 0)
	b.startsAre("forbid", first, "0C 1 active 1")
	b.told("CronJob", "forbid", "SawCompletedJob", fmt.Sprintf("Saw completed job: forbid-%d, condition: Complete", first.Unix()/60))

	b.end("allow", first, 0, 0)
	b.end("allow", first, 1, 1)
	b.startsAre("allow", first, "0C 1F active 0")
	for n := 2; n < 5; n++ {
		b.minute(first, n)
		b.startsAre("allow", first, map[int]string{2: "0C 1F 2 active 1", 3: "0C 1F 2C 3 active 1", 4: "0C 2C 3F 4 active 1"}[n])
		b.end("allow", first, n, n%2)
	}
	// The oldest of each kind have gone.
	b.startsAre("allow", first, "2C 3F 4C active 0")
	cron, err = b.client.BatchV1().CronJobs("default").Get(t.Context(), "allow", metav1.GetOptions{})
	if err != nil || cron.Status.LastSuccessfulTime == nil || cron.Status.LastSuccessfulTime.Before(&metav1.Time{Time: first.Add(4 * time.Minute)}) {
		t.Errorf("%v, last success %v", err, cron.Status.LastSuccessfulTime)
	}

	// Suspended: nothing starts; afterwards the last start that was missed is made up for.
	b.patchCronJob("allow", `{"spec":{"suspend":true}}`)
	b.settle()
	b.minute(first, 7)
	b.settle()
	b.startsAre("allow", first, "2C 3F 4C active 0")
	b.patchCronJob("allow", `{"spec":{"suspend":false}}`)
	b.startsAre("allow", first, "2C 3F 4C 7 active 1")
	// A Job that somebody deletes is missed.
	if err := b.client.BatchV1().Jobs("default").Delete(t.Context(), fmt.Sprintf("allow-%d", first.Unix()/60+7), metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}); err != nil {
		t.Fatal(err)
	}
	b.startsAre("allow", first, "2C 3F 4C active 0")
	b.told("CronJob", "allow", "MissingJob", "Active job went missing: allow-")

	// All of it goes with the CronJob.
	if err := b.client.BatchV1().CronJobs("default").Delete(t.Context(), "allow", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.soon("the jobs going", func() error {
		jobs, err := b.client.BatchV1().Jobs("default").List(t.Context(), metav1.ListOptions{LabelSelector: "cron=allow"})
		if err == nil && len(jobs.Items) > 0 {
			err = fmt.Errorf("%d are there", len(jobs.Items))
		}
		return err
	})
}

// TestCronJobMisses: what is done about starts that nobody made.
func TestCronJobMisses(t *testing.T) {
	b := newBench(t, ownClock)
	made := b.makeCronJob("plain", batchv1.CronJobSpec{Schedule: "* * * * *"})
	first := made.CreationTimestamp.Truncate(time.Minute).Add(time.Minute)
	b.makeCronJob("strict", batchv1.CronJobSpec{Schedule: "0 */6 * * *", StartingDeadlineSeconds: ptr.To[int64](100)})
	b.makeCronJob("zoned", batchv1.CronJobSpec{Schedule: "0 3 * * *", TimeZone: ptr.To("Asia/Kathmandu")})
	b.makeCronJob("never", batchv1.CronJobSpec{Schedule: "0 0 31 2 *"})
	b.told("CronJob", "never", "InvalidSchedule", "invalid schedule: 0 0 31 2 * : time difference between two schedules is less than 1 second")
	b.settle()
	b.halt()
	// Two evenings on: a quarter past nine, the zone's three o'clock, has come whenever
	// this runs.
	day := first.Truncate(24 * time.Hour).Add(48*time.Hour + 18*time.Hour)
	b.clock.SetTime(day.Add(3*time.Minute + time.Second))
	b.start()
	// The last of very many.
	late := int(day.Sub(first)/time.Minute) + 3
	b.startsAre("plain", first, fmt.Sprintf("%d active 1", late))
	b.told("CronJob", "plain", "TooManyMissedTimes", "too many missed start times")
	// Three minutes are too late for this one.
	b.told("CronJob", "strict", "MissSchedule", "Missed scheduled time to start a job: "+day.UTC().Format(time.RFC1123Z))
	b.startsAre("strict", first, " active 0")
	// Three o'clock there is a quarter past nine in the evening here.
	var at time.Time
	b.soon("the job of the other zone", func() error {
		jobs, err := b.client.BatchV1().Jobs("default").List(t.Context(), metav1.ListOptions{LabelSelector: "cron=zoned"})
		if err == nil && len(jobs.Items) != 1 {
			err = fmt.Errorf("%d jobs", len(jobs.Items))
		}
		if err != nil {
			return err
		}
		stamp := jobs.Items[0].Annotations[batchv1.CronJobScheduledTimestampAnnotation]
		if !strings.HasSuffix(stamp, "T03:00:00+05:45") {
			t.Errorf("scheduled for %s", stamp)
		}
		at, err = time.Parse(time.RFC3339, stamp)
		return err
	})
	if got := at.UTC().Format("15:04"); got != "21:15" {
		t.Errorf("started for %s", got)
	}
	// A changed schedule counts from the change on: half past has gone.
	b.patchCronJob("strict", fmt.Sprintf(`{"spec":{"schedule":"%d * * * *"}}`, 2))
	b.settle()
	b.startsAre("strict", first, " active 0")
	b.clock.SetTime(day.Add(62*time.Minute + time.Second))
	b.startsAre("strict", first, fmt.Sprintf("%d active 1", late+59))
}
