// SPDX-License-Identifier: Apache-2.0

// Package statefulset keeps pods that have a name of their own: web-0, web-1, ….
//
// Each pod keeps its name, its host name and its claims over its life and the next
// one's. They are made in order and taken away in the opposite order, one at a time,
// unless podManagementPolicy is Parallel. A rolling update goes from the highest
// ordinal down to the partition.
//
// Claims of volumeClaimTemplates are made; pods wait until somebody has made volumes
// for them.
package statefulset

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/controller/history"
	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/ownedpods"
	"github.com/kplab/kplab/controller/podstate"
	"github.com/kplab/kplab/internal/settle"
)

// workers is how many StatefulSets are worked on at the same time.
const workers = 4

var kind = appsv1.SchemeGroupVersion.WithKind("StatefulSet")

// Controller is the StatefulSet controller.
type Controller struct {
	loop     *loop.Loop[loop.Key]
	client   kubernetes.Interface
	clock    clock.PassiveClock
	recorder record.EventRecorder
	sets     appslisters.StatefulSetLister
	claims   corelisters.PersistentVolumeClaimLister
	pods     *ownedpods.Pods
	history  *history.Keeper
}

// New makes the controller and subscribes it to StatefulSets, their pods, claims and
// revisions.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	sets, pods := d.Informers.Apps().V1().StatefulSets(), d.Informers.Core().V1().Pods()
	claims, revisions := d.Informers.Core().V1().PersistentVolumeClaims(), d.Informers.Apps().V1().ControllerRevisions()
	recorder := d.Recorder("statefulset-controller")
	c := &Controller{
		client:   d.Client,
		clock:    d.Clock,
		recorder: recorder,
		sets:     sets.Lister(),
		claims:   claims.Lister(),
		pods:     ownedpods.New(d, kind, recorder),
		history:  history.New(d),
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "statefulset", Workers: workers, Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "statefulsets", sets.Informer(), func(old, cur *appsv1.StatefulSet) { c.loop.Add(loop.KeyOf(cmp.Or(cur, old))) })
	loop.Watch(c.loop, "pods", pods.Informer(), func(old, cur *corev1.Pod) { c.pods.Handle(old, cur, c.loop.Add, c.onOrphan) })
	// Both are only read: what changes them is this controller, or kubectl together
	// with the set.
	loop.Watch(c.loop, "persistentvolumeclaims", claims.Informer(), func(_, _ *corev1.PersistentVolumeClaim) {})
	ownedpods.RetryWithRoom(d, c.loop)
	loop.Watch(c.loop, "controllerrevisions", revisions.Informer(), func(_, _ *appsv1.ControllerRevision) {})
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

// onOrphan wakes the sets that may adopt pod.
func (c *Controller) onOrphan(pod *corev1.Pod) {
	all, err := c.sets.StatefulSets(pod.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, set := range all {
		if _, ok := ordinalOf(set, pod.Name); ok {
			c.loop.Add(loop.KeyOf(set))
		}
	}
}

// sync does the next step for one StatefulSet.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	cached, err := c.sets.StatefulSets(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil // its pods are the garbage collector's
	}
	if err != nil {
		return err
	}
	set := cached.DeepCopy()
	selector, err := metav1.LabelSelectorAsSelector(set.Spec.Selector)
	if err != nil || selector.Empty() {
		return nil // the API refuses such an object; nothing sensible to do
	}
	live := func() (metav1.Object, error) {
		return c.client.AppsV1().StatefulSets(set.Namespace).Get(ctx, set.Name, metav1.GetOptions{})
	}
	mine := func(pod *corev1.Pod) bool {
		_, ok := ordinalOf(set, pod.Name)
		return ok
	}
	pods, err := c.pods.Claim(ctx, set, selector, mine, live)
	if err != nil {
		return err
	}
	revisions, err := c.history.Sync(ctx, history.Parent{
		Object: set, Kind: kind, Selector: selector, Template: &set.Spec.Template, Collisions: set.Status.CollisionCount, Live: live,
	})
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil
	}
	if err != nil {
		return err
	}
	r := newRound(ctx, c, set, pods, revisions)
	err = r.step()
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil // the set is about to go the same way
	}
	if err := errors.Join(r.writeStatus(), err); err != nil {
		return err
	}
	if r.wait > 0 {
		c.loop.After(key, r.wait)
	}
	return c.history.Tidy(ctx, revisions, set.Spec.RevisionHistoryLimit, func(rev *appsv1.ControllerRevision) bool {
		return rev.Name == r.status.CurrentRevision || r.runs(rev.Name)
	})
}

// writeStatus stores the status of the round unless it is stored already.
func (r *round) writeStatus() error {
	if equality.Semantic.DeepEqual(r.set.Status, r.status) {
		return nil
	}
	update := r.set.DeepCopy()
	update.Status = r.status
	_, err := r.c.client.AppsV1().StatefulSets(update.Namespace).UpdateStatus(r.ctx, update, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write the status of %s: %w", r.set.Name, err)
	}
	return nil
}

// available reports whether pod runs and has been ready for long enough, and plans the
// next look when only time is missing.
func (r *round) available(pod *corev1.Pod) bool {
	if pod == nil || pod.Status.Phase != corev1.PodRunning || pod.DeletionTimestamp != nil {
		return false
	}
	ok, left := podstate.Available(pod, time.Duration(r.set.Spec.MinReadySeconds)*time.Second, r.c.clock.Now())
	if left > 0 && (r.wait == 0 || left < r.wait) {
		r.wait = left
	}
	return ok
}
