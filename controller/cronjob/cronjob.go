// SPDX-License-Identifier: Apache-2.0

// Package cronjob makes Jobs at the times of a schedule.
//
// As upstream, a start that was missed is made up for, once, unless
// startingDeadlineSeconds says that it is too late; the name of a Job is that of its
// minute, so that no start is made twice, whatever happens between the Job and the
// status. One difference: after a change of the schedule only times from the change on
// count, where upstream may start a Job for a time before.
package cronjob

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/robfig/cron/v3"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	batchlisters "k8s.io/client-go/listers/batch/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/expect"
	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/internal/settle"
)

// workers is how many CronJobs are worked on at the same time.
const workers = 2

// Controller is the CronJob controller.
type Controller struct {
	loop     *loop.Loop[loop.Key]
	client   kubernetes.Interface
	clock    clock.PassiveClock
	recorder record.EventRecorder
	crons    batchlisters.CronJobLister
	jobs     batchlisters.JobLister
	// written keeps a status from being decided on one from before it.
	written *expect.Versions

	mu sync.Mutex
	// changed is when the schedule of a CronJob was last changed, as far as this
	// process saw it.
	changed map[types.UID]time.Time
}

// New makes the controller and subscribes it to CronJobs and Jobs.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	crons, jobs := d.Informers.Batch().V1().CronJobs(), d.Informers.Batch().V1().Jobs()
	c := &Controller{
		client:   d.Client,
		clock:    d.Clock,
		recorder: d.Recorder("cronjob-controller"),
		crons:    crons.Lister(),
		jobs:     jobs.Lister(),
		written:  expect.NewVersions(),
		changed:  map[types.UID]time.Time{},
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "cronjob", Workers: workers, Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "cronjobs", crons.Informer(), c.onCronJob)
	loop.Watch(c.loop, "jobs", jobs.Informer(), c.onJob)
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error { return c.loop.Run(ctx) }

func (c *Controller) onCronJob(old, cur *batchv1.CronJob) {
	switch {
	case old == nil:
	case cur == nil || old.UID != cur.UID:
		c.written.Forget(old.UID)
		c.mu.Lock()
		delete(c.changed, old.UID)
		c.mu.Unlock()
	case old.Spec.Schedule != cur.Spec.Schedule || !ptr.Equal(old.Spec.TimeZone, cur.Spec.TimeZone):
		c.mu.Lock()
		c.changed[cur.UID] = c.clock.Now()
		c.mu.Unlock()
	}
	c.loop.Add(loop.KeyOf(cmp.Or(cur, old)))
}

// onJob wakes the CronJobs that own the Job, or did.
func (c *Controller) onJob(old, cur *batchv1.Job) {
	for _, job := range []*batchv1.Job{old, cur} {
		if job == nil {
			continue
		}
		if ref := metav1.GetControllerOf(job); ref != nil && ref.Kind == "CronJob" && ref.APIVersion == batchv1.SchemeGroupVersion.String() {
			c.loop.Add(loop.Key{Namespace: job.Namespace, Name: ref.Name})
		}
	}
}

// sync brings the status of one CronJob up to date and starts what is due.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	cached, err := c.crons.CronJobs(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil // its Jobs are the garbage collector's
	}
	if err != nil {
		return err
	}
	if !c.written.Current(cached) {
		return nil // the event of the last write brings us back
	}
	r := &round{c: c, ctx: ctx, cron: cached, status: *cached.Status.DeepCopy(), now: c.clock.Now()}
	if err := r.readJobs(); err != nil {
		return err
	}
	err = r.run()
	if r.next > 0 {
		c.loop.After(key, r.next)
	}
	if err = errors.Join(err, r.write()); apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// round is one look at a CronJob.
type round struct {
	c      *Controller
	ctx    context.Context
	cron   *batchv1.CronJob
	status batchv1.CronJobStatus
	jobs   []*batchv1.Job // of the CronJob, by name
	now    time.Time
	next   time.Duration // until the next start; 0 for none
}

// readJobs finds the Jobs of the CronJob.
func (r *round) readJobs() error {
	all, err := r.c.jobs.Jobs(r.cron.Namespace).List(labels.Everything())
	if err != nil {
		return err
	}
	for _, job := range all {
		if metav1.IsControlledBy(job, r.cron) {
			r.jobs = append(r.jobs, job)
		}
	}
	slices.SortFunc(r.jobs, func(a, b *batchv1.Job) int { return strings.Compare(a.Name, b.Name) })
	return nil
}

func (r *round) run() error {
	r.tidy()
	if err := r.observe(); err != nil {
		return err
	}
	if r.cron.DeletionTimestamp != nil {
		return nil
	}
	return r.start()
}

func (r *round) warn(reason, format string, args ...any) {
	r.c.recorder.Eventf(r.cron, corev1.EventTypeWarning, reason, format, args...)
}

func (r *round) tell(reason, format string, args ...any) {
	r.c.recorder.Eventf(r.cron, corev1.EventTypeNormal, reason, format, args...)
}

// end is how the Job finished; empty while it has not.
func end(job *batchv1.Job) batchv1.JobConditionType {
	for _, c := range job.Status.Conditions {
		if (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) && c.Status == corev1.ConditionTrue {
			return c.Type
		}
	}
	return ""
}

// tidy deletes the oldest finished Jobs beyond the limits of the history.
func (r *round) tidy() {
	for kind, limit := range map[batchv1.JobConditionType]*int32{
		batchv1.JobComplete: r.cron.Spec.SuccessfulJobsHistoryLimit, batchv1.JobFailed: r.cron.Spec.FailedJobsHistoryLimit,
	} {
		if limit == nil {
			continue
		}
		var ended []*batchv1.Job
		for _, job := range r.jobs {
			if end(job) == kind && job.DeletionTimestamp == nil {
				ended = append(ended, job)
			}
		}
		slices.SortStableFunc(ended, func(a, b *batchv1.Job) int { return compareStart(a.Status.StartTime, b.Status.StartTime) })
		for _, job := range ended[:max(0, len(ended)-int(*limit))] {
			_ = r.delete(job) // told in an event, and tried again with the next round
		}
	}
}

// compareStart orders by start; those without one come last.
func compareStart(a, b *metav1.Time) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return 1
	case b == nil:
		return -1
	}
	return a.Compare(b.Time)
}

// delete deletes a Job with its pods.
func (r *round) delete(job *batchv1.Job) error {
	err := r.c.client.BatchV1().Jobs(job.Namespace).Delete(r.ctx, job.Name, metav1.DeleteOptions{
		PropagationPolicy: ptr.To(metav1.DeletePropagationBackground),
		Preconditions:     metav1.NewUIDPreconditions(string(job.UID)),
	})
	if err != nil && !apierrors.IsNotFound(err) {
		r.warn("FailedDelete", "Deleted job: %v", err)
		return err
	}
	r.drop(job.UID)
	if err == nil {
		r.tell("SuccessfulDelete", "Deleted job %v", job.Name)
	}
	return nil
}

func (r *round) drop(uid types.UID) {
	r.status.Active = slices.DeleteFunc(r.status.Active, func(ref corev1.ObjectReference) bool { return ref.UID == uid })
}

func (r *round) isActive(uid types.UID) bool {
	return slices.ContainsFunc(r.status.Active, func(ref corev1.ObjectReference) bool { return ref.UID == uid })
}

// observe brings the list of active Jobs up to date.
func (r *round) observe() error {
	known := map[types.UID]bool{}
	for _, job := range r.jobs {
		known[job.UID] = true
		how, active := end(job), r.isActive(job.UID)
		switch {
		case how == "" && !active:
			r.warn("UnexpectedJob", "Saw a job that the controller did not create or forgot: %s", job.Name)
		case how != "" && active:
			r.drop(job.UID)
			r.tell("SawCompletedJob", "Saw completed job: %s, condition: %v", job.Name, how)
		}
		if t := job.Status.CompletionTime; how == batchv1.JobComplete && t != nil &&
			(r.status.LastSuccessfulTime == nil || t.After(r.status.LastSuccessfulTime.Time)) {
			r.status.LastSuccessfulTime = t.DeepCopy()
		}
	}
	for _, ref := range slices.Clone(r.status.Active) {
		if known[ref.UID] {
			continue
		}
		// The cache may only be behind: ask.
		live, err := r.c.client.BatchV1().Jobs(r.cron.Namespace).Get(r.ctx, ref.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err) || err == nil && live.UID != ref.UID:
			r.tell("MissingJob", "Active job went missing: %v", ref.Name)
			r.drop(ref.UID)
		case err != nil:
			return fmt.Errorf("read active job %s: %w", ref.Name, err)
		}
	}
	return nil
}

// start makes the Job that is due, and finds out when the next one is.
func (r *round) start() error {
	spec := &r.cron.Spec
	zone, err := time.LoadLocation(ptr.Deref(spec.TimeZone, ""))
	if err != nil {
		r.warn("UnknownTimeZone", "invalid timeZone: %q: %s", *spec.TimeZone, err)
		return nil
	}
	if ptr.Deref(spec.Suspend, false) {
		return nil
	}
	if strings.Contains(spec.Schedule, "TZ") {
		r.warn("UnsupportedSchedule", "CRON_TZ or TZ used in schedule %q is not officially supported, see https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/ for more details", spec.Schedule)
	}
	schedule, err := parse(r.cron)
	if err != nil {
		r.warn("UnparseableSchedule", "unparseable schedule: %q : %s", spec.Schedule, err)
		return nil
	}
	since := r.since()
	d, err := dueAt(schedule, since, r.now)
	if err != nil {
		r.warn("InvalidSchedule", "invalid schedule: %s : %s", spec.Schedule, err)
		return nil
	}
	r.next = d.next.Sub(r.now)
	if d.last.IsZero() {
		return nil
	}
	if s := spec.StartingDeadlineSeconds; s != nil && d.last.Add(time.Duration(*s)*time.Second).Before(r.now) {
		r.warn("MissSchedule", "Missed scheduled time to start a job: %s", d.last.UTC().Format(time.RFC1123Z))
		return nil
	}
	if d.many && r.manySince(schedule, since) {
		r.warn("TooManyMissedTimes", "too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew")
	}
	name := fmt.Sprintf("%s-%d", r.cron.Name, d.last.Unix()/60)
	if slices.ContainsFunc(r.status.Active, func(ref corev1.ObjectReference) bool { return ref.Name == name }) {
		return nil // made, and only lastScheduleTime was lost
	}
	if len(r.status.Active) > 0 {
		switch spec.ConcurrencyPolicy {
		case batchv1.ForbidConcurrent:
			r.tell("JobAlreadyActive", "Not starting job because prior execution is running and concurrency policy is Forbid")
			return nil
		case batchv1.ReplaceConcurrent:
			if err := r.replace(); err != nil {
				return err
			}
		}
	}
	return r.create(name, d.last, zone)
}

// manySince reports whether many starts were missed of those that were still wanted.
func (r *round) manySince(schedule cron.Schedule, since time.Time) bool {
	s := r.cron.Spec.StartingDeadlineSeconds
	if s == nil {
		return true
	}
	if wanted := r.now.Add(-time.Duration(*s) * time.Second); wanted.After(since) {
		since = wanted
	}
	d, err := dueAt(schedule, since, r.now)
	return err == nil && d.many
}

// since is the time after which starts count.
func (r *round) since() time.Time {
	since := r.cron.CreationTimestamp.Time
	if t := r.status.LastScheduleTime; t != nil {
		since = t.Time
	}
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if t := r.c.changed[r.cron.UID]; t.After(since) {
		since = t
	}
	return since
}

// replace deletes the Jobs that still run.
func (r *round) replace() error {
	for _, ref := range slices.Clone(r.status.Active) {
		job, err := r.c.client.BatchV1().Jobs(r.cron.Namespace).Get(r.ctx, ref.Name, metav1.GetOptions{})
		if err != nil {
			r.warn("FailedGet", "Get job: %v", err)
			return fmt.Errorf("read job %s, to replace it: %w", ref.Name, err)
		}
		if err := r.delete(job); err != nil {
			return fmt.Errorf("replace job %s: %w", ref.Name, err)
		}
	}
	return nil
}

// create makes the Job of a scheduled time and takes note of it.
func (r *round) create(name string, at time.Time, zone *time.Location) error {
	template := r.cron.Spec.JobTemplate.DeepCopy()
	annotations := template.Annotations
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[batchv1.CronJobScheduledTimestampAnnotation] = at.In(zone).Format(time.RFC3339)
	jobs := r.c.client.BatchV1().Jobs(r.cron.Namespace)
	job, err := jobs.Create(r.ctx, &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: r.cron.Namespace, Labels: template.Labels, Annotations: annotations,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(r.cron, batchv1.SchemeGroupVersion.WithKind("CronJob"))},
		},
		Spec: template.Spec,
	}, metav1.CreateOptions{})
	switch {
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil // the CronJob is about to go the same way
	case apierrors.IsAlreadyExists(err):
		// Ours, from before a crash, or somebody else's: then this start is theirs.
		if job, err = jobs.Get(r.ctx, name, metav1.GetOptions{}); err != nil {
			return fmt.Errorf("read job %s, which exists already: %w", name, err)
		}
		if !metav1.IsControlledBy(job, r.cron) || r.isActive(job.UID) || end(job) != "" {
			return nil
		}
	case err != nil:
		r.warn("FailedCreate", "Error creating job: %v", err)
		return fmt.Errorf("create job %s: %w", name, err)
	default:
		r.tell("SuccessfulCreate", "Created job %v", job.Name)
	}
	r.status.Active = append(r.status.Active, corev1.ObjectReference{
		Kind: "Job", APIVersion: batchv1.SchemeGroupVersion.String(),
		Namespace: job.Namespace, Name: job.Name, UID: job.UID, ResourceVersion: job.ResourceVersion,
	})
	r.status.LastScheduleTime = ptr.To(metav1.NewTime(at))
	return nil
}

// write stores the status unless it is stored already.
func (r *round) write() error {
	if equality.Semantic.DeepEqual(r.cron.Status, r.status) {
		return nil
	}
	update := r.cron.DeepCopy()
	update.Status = r.status
	stored, err := r.c.client.BatchV1().CronJobs(update.Namespace).UpdateStatus(r.ctx, update, metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("write the status of %s: %w", r.cron.Name, err)
	}
	r.c.written.Wrote(stored)
	return nil
}
