// SPDX-License-Identifier: Apache-2.0

// Package ttlafterfinished deletes Jobs some time after they have finished, with their
// pods, when spec.ttlSecondsAfterFinished asks for it (KEP-592).
package ttlafterfinished

import (
	"cmp"
	"context"
	"fmt"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	batchlisters "k8s.io/client-go/listers/batch/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/internal/settle"
)

// Controller is the TTL-after-finished controller.
type Controller struct {
	loop   *loop.Loop[loop.Key]
	client kubernetes.Interface
	clock  clock.PassiveClock
	jobs   batchlisters.JobLister
}

// New makes the controller and subscribes it to Jobs.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	jobs := d.Informers.Batch().V1().Jobs()
	c := &Controller{client: d.Client, clock: d.Clock, jobs: jobs.Lister()}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "ttlafterfinished", Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "jobs", jobs.Informer(), func(old, cur *batchv1.Job) {
		if _, has := expiry(cmp.Or(cur, old)); has {
			c.loop.Add(loop.KeyOf(cmp.Or(cur, old)))
		}
	})
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error { return c.loop.Run(ctx) }

// expiry is when the Job's time is over; false when it has none, or has not finished.
func expiry(job *batchv1.Job) (time.Time, bool) {
	if job.Spec.TTLSecondsAfterFinished == nil || job.DeletionTimestamp != nil {
		return time.Time{}, false
	}
	for _, c := range job.Status.Conditions {
		if (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) && c.Status == corev1.ConditionTrue && !c.LastTransitionTime.IsZero() {
			return c.LastTransitionTime.Add(time.Duration(*job.Spec.TTLSecondsAfterFinished) * time.Second), true
		}
	}
	return time.Time{}, false
}

// sync deletes one Job whose time is over, or comes back when it will be.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	job, err := c.jobs.Jobs(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	at, has := expiry(job)
	if !has {
		return nil
	}
	if left := at.Sub(c.clock.Now()); left > 0 {
		c.loop.After(key, left)
		return nil
	}
	// Of exactly this state: somebody may just have given it more time.
	err = c.client.BatchV1().Jobs(key.Namespace).Delete(ctx, key.Name, metav1.DeleteOptions{
		PropagationPolicy: ptr.To(metav1.DeletePropagationForeground),
		Preconditions:     &metav1.Preconditions{UID: &job.UID, ResourceVersion: &job.ResourceVersion},
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete Job %s, which finished long enough ago: %w", key.Name, err)
	}
	return nil
}
