// SPDX-License-Identifier: Apache-2.0

// Package job runs pods until enough of them have succeeded.
//
// The rules are upstream's (KEP-2307 for the counting, KEP-2214 for Indexed Jobs,
// KEP-3329, 3850, 3939 and 3998 for the policies). No pod is counted twice or lost:
// each carries a finalizer, so that it cannot go before it was counted. What ended is
// first named in status.uncountedTerminatedPods, then loses its finalizer, then moves
// into the counters; a crash between two of these steps costs nothing.
//
// The files, in the order of a round: look.go works out what a Job and its pods amount
// to, plan.go which pods are missing or too many, round.go does it and counts. The
// first two ask nobody and change nothing.
package job

import (
	"context"
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	batchlisters "k8s.io/client-go/listers/batch/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/controller/expect"
	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/ownedpods"
	"github.com/kplab/kplab/internal/settle"
)

// workers is how many Jobs are worked on at the same time.
const workers = 4

// Controller is the Job controller.
type Controller struct {
	loop     *loop.Loop[key]
	client   kubernetes.Interface
	clock    clock.PassiveClock
	recorder record.EventRecorder
	jobs     batchlisters.JobLister
	podList  corelisters.PodLister
	pods     *ownedpods.Pods

	// What the caches must show before a Job is looked at again: finalizers taken off,
	// and the status written. ownedpods knows about pods made and deleted.
	finalizers *expect.Expectations
	written    *expect.Versions
	memory     *memory
}

// key is a Job, or a pod that may have lost its Job and still has the finalizer.
type key struct {
	loop.Key
	pod bool
}

// New makes the controller and subscribes it to Jobs and pods.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	jobs, pods := d.Informers.Batch().V1().Jobs(), d.Informers.Core().V1().Pods()
	recorder := d.Recorder("job-controller")
	c := &Controller{
		client:     d.Client,
		clock:      d.Clock,
		recorder:   recorder,
		jobs:       jobs.Lister(),
		podList:    pods.Lister(),
		pods:       ownedpods.New(d, batchv1.SchemeGroupVersion.WithKind("Job"), recorder),
		finalizers: expect.New(d.Clock),
		written:    expect.NewVersions(),
		memory:     newMemory(),
	}
	c.pods.Finalizers = []string{batchv1.JobTrackingFinalizer}
	c.loop = loop.New(loop.Options[key]{Name: "job", Workers: workers, Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "jobs", jobs.Informer(), c.onJob)
	loop.Watch(c.loop, "pods", pods.Informer(), c.onPod)
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	if err := c.pods.Check(); err != nil {
		return err
	}
	return c.loop.Run(ctx)
}

// onJob wakes the Job, and lets go of the pods of one that is gone or over.
func (c *Controller) onJob(old, cur *batchv1.Job) {
	if old != nil && (cur == nil || old.UID != cur.UID) {
		c.pods.Forget(old.UID)
		c.finalizers.Forget(old.UID)
		c.written.Forget(old.UID)
		c.memory.forget(old.UID)
		c.letGoLater(old.UID)
	}
	if cur == nil {
		return
	}
	if finished(cur) {
		// The controller takes all finalizers off before it says so; a pod that was
		// adopted or changed by hand at the last moment may still have one.
		c.letGoLater(cur.UID)
	}
	c.loop.Add(key{Key: loop.KeyOf(cur)})
}

// letGoLater looks at the pods that still wait to be counted for a Job that will not.
func (c *Controller) letGoLater(job types.UID) {
	pods, err := c.pods.Of(job)
	if err != nil {
		return // the index is missing, which Run reports
	}
	for _, pod := range pods {
		if tracked(pod) {
			c.loop.Add(key{Key: loop.KeyOf(pod), pod: true})
		}
	}
}

// onPod wakes the Jobs that the event concerns.
func (c *Controller) onPod(old, cur *corev1.Pod) {
	for _, pod := range []*corev1.Pod{old, cur} {
		if pod == nil || (cur != nil && tracked(cur)) {
			continue
		}
		if ref := metav1.GetControllerOf(pod); ref != nil {
			c.finalizers.Deleted(ref.UID, pod.UID)
		}
	}
	c.pods.Handle(old, cur, func(k loop.Key) { c.loop.Add(key{Key: k}) }, c.onOrphan)
	if cur != nil && tracked(cur) && c.seemsLeft(cur) {
		c.loop.Add(key{Key: loop.KeyOf(cur), pod: true})
	}
}

// seemsLeft reports whether, by the caches, no Job is going to count the pod.
func (c *Controller) seemsLeft(pod *corev1.Pod) bool {
	ref := metav1.GetControllerOf(pod)
	if ref == nil {
		return true
	}
	if !isJob(ref) {
		return false
	}
	job, err := c.jobs.Jobs(pod.Namespace).Get(ref.Name)
	return err != nil || job.UID != ref.UID || finished(job)
}

func isJob(ref *metav1.OwnerReference) bool {
	return ref.Kind == "Job" && ref.APIVersion == batchv1.SchemeGroupVersion.String()
}

// onOrphan wakes the Jobs that may adopt pod.
func (c *Controller) onOrphan(pod *corev1.Pod) {
	all, err := c.jobs.Jobs(pod.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, job := range all {
		selector, err := metav1.LabelSelectorAsSelector(job.Spec.Selector)
		if err == nil && !selector.Empty() && selector.Matches(labels.Set(pod.Labels)) {
			c.loop.Add(key{Key: loop.KeyOf(job)})
		}
	}
}

// elsewhere reports whether another controller was asked to manage the Job.
func elsewhere(job *batchv1.Job) bool {
	return job.Spec.ManagedBy != nil && *job.Spec.ManagedBy != batchv1.JobControllerName
}

// sync brings one Job a step further, or takes the finalizer off a pod that lost its
// Job.
func (c *Controller) sync(ctx context.Context, k key) error {
	if k.pod {
		return c.letGo(ctx, k.Key)
	}
	job, err := c.jobs.Jobs(k.Namespace).Get(k.Name)
	if apierrors.IsNotFound(err) {
		return nil // its pods are the garbage collector's
	}
	if err != nil {
		return err
	}
	if elsewhere(job) {
		return nil
	}
	if finished(job) {
		c.memory.forget(job.UID)
		return nil
	}
	// Ask before the pods are read: what comes in between makes the caches newer than
	// the answer, never older.
	if !c.written.Current(job) || !c.pods.Trusted(job.UID) || !c.finalizers.Satisfied(job.UID) {
		return nil // the event that is missing brings us back
	}
	selector, err := metav1.LabelSelectorAsSelector(job.Spec.Selector)
	if err != nil || selector.Empty() {
		return nil // the API refuses such an object; nothing sensible to do
	}
	pods, err := c.pods.Claim(ctx, job, selector, nil, func() (metav1.Object, error) {
		return c.client.BatchV1().Jobs(job.Namespace).Get(ctx, job.Name, metav1.GetOptions{})
	})
	if err != nil {
		return err
	}
	if slices.ContainsFunc(pods, func(pod *corev1.Pod) bool { return !metav1.IsControlledBy(pod, job) }) {
		return nil // adopted just now; the cache does not show it as ours, nor its finalizer
	}
	r := newRound(ctx, c, job, pods)
	err = r.run()
	if r.wait > 0 {
		c.loop.After(k, r.wait)
	}
	if apierrors.IsNotFound(err) {
		return nil // the Job went meanwhile
	}
	return err
}

// letGo takes the finalizer off a pod that no Job is going to count.
func (c *Controller) letGo(ctx context.Context, k loop.Key) error {
	pod, err := c.podList.Pods(k.Namespace).Get(k.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if !tracked(pod) {
		return nil
	}
	if left, err := c.isLeft(ctx, pod); err != nil || !left {
		return err
	}
	// With the version: a Job may be adopting the pod at this moment.
	return c.takeFinalizer(ctx, pod, pod.ResourceVersion)
}

// isLeft is seemsLeft, asked of the API: the caches of Jobs and of pods are not in step.
func (c *Controller) isLeft(ctx context.Context, pod *corev1.Pod) (bool, error) {
	ref := metav1.GetControllerOf(pod)
	switch {
	case ref == nil:
		return true, nil
	case !isJob(ref):
		return false, nil
	}
	job, err := c.client.BatchV1().Jobs(pod.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("read the Job of pod %s: %w", pod.Name, err)
	}
	return job.UID != ref.UID || finished(job) && !elsewhere(job), nil
}
