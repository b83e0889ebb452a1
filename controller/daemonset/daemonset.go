// SPDX-License-Identifier: Apache-2.0

// Package daemonset keeps one pod on each node that a DaemonSet wants, and reports how
// many there are.
//
// Each pod is bound to its node by a node affinity on the node's name, so that the
// scheduler still places it; the tolerations that upstream gives to daemons let it
// stay on a node in trouble. A rolling update replaces pods node by node, within
// maxUnavailable or maxSurge.
package daemonset

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

const (
	// workers is how many DaemonSets are worked on at the same time.
	workers = 2
	// burst is the most pods created or deleted in one sync; the rest waits for the
	// next one.
	burst = 250
)

var kind = appsv1.SchemeGroupVersion.WithKind("DaemonSet")

// Controller is the DaemonSet controller.
type Controller struct {
	loop     *loop.Loop[loop.Key]
	client   kubernetes.Interface
	clock    clock.PassiveClock
	recorder record.EventRecorder
	sets     appslisters.DaemonSetLister
	nodes    corelisters.NodeLister
	pods     *ownedpods.Pods
	history  *history.Keeper
}

// New makes the controller and subscribes it to DaemonSets, nodes, pods and revisions.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	sets, pods, nodes := d.Informers.Apps().V1().DaemonSets(), d.Informers.Core().V1().Pods(), d.Informers.Core().V1().Nodes()
	revisions := d.Informers.Apps().V1().ControllerRevisions()
	recorder := d.Recorder("daemonset-controller")
	c := &Controller{
		client:   d.Client,
		clock:    d.Clock,
		recorder: recorder,
		sets:     sets.Lister(),
		nodes:    nodes.Lister(),
		pods:     ownedpods.New(d, kind, recorder),
		history:  history.New(d),
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "daemonset", Workers: workers, Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "daemonsets", sets.Informer(), func(old, cur *appsv1.DaemonSet) {
		if cur == nil || (old != nil && old.UID != cur.UID) {
			c.pods.Forget(old.UID)
		}
		c.loop.Add(loop.KeyOf(cmp.Or(cur, old)))
	})
	loop.Watch(c.loop, "pods", pods.Informer(), func(old, cur *corev1.Pod) { c.pods.Handle(old, cur, c.loop.Add, c.onOrphan) })
	loop.Watch(c.loop, "nodes", nodes.Informer(), c.onNode)
	ownedpods.RetryWithRoom(d, c.loop)
	// Only read: what changes them is this controller, or kubectl together with the set.
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
	all, err := c.sets.DaemonSets(pod.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, set := range all {
		selector, err := metav1.LabelSelectorAsSelector(set.Spec.Selector)
		if err == nil && !selector.Empty() && selector.Matches(labels.Set(pod.Labels)) {
			c.loop.Add(loop.KeyOf(set))
		}
	}
}

// onNode wakes all sets when a node came, went, or changed in what decides whether it
// runs their pods. The heartbeats of a node's status do not.
func (c *Controller) onNode(old, cur *corev1.Node) {
	if old != nil && cur != nil && equality.Semantic.DeepEqual(old.Labels, cur.Labels) && equality.Semantic.DeepEqual(old.Spec, cur.Spec) {
		return
	}
	all, err := c.sets.List(labels.Everything())
	if err != nil {
		return
	}
	for _, set := range all {
		c.loop.Add(loop.KeyOf(set))
	}
}

// sync does the next step for one DaemonSet.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	cached, err := c.sets.DaemonSets(key.Namespace).Get(key.Name)
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
		return c.client.AppsV1().DaemonSets(set.Namespace).Get(ctx, set.Name, metav1.GetOptions{})
	}
	trusted := c.pods.Trusted(set.UID)
	pods, err := c.pods.Claim(ctx, set, selector, nil, live)
	if err != nil {
		return err
	}
	nodes, err := c.nodes.List(labels.Everything())
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
	p := newPlan(set, history.Hash(revisions.Update), nodes, pods, c.clock.Now())
	var act error
	if trusted && set.DeletionTimestamp == nil {
		act = c.act(ctx, set, p)
	}
	if err := errors.Join(c.writeStatus(ctx, set, p.status(revisions.Collisions)), act); err != nil {
		return err
	}
	if p.wait > 0 {
		c.loop.After(key, p.wait)
	}
	return c.history.Tidy(ctx, revisions, set.Spec.RevisionHistoryLimit, func(r *appsv1.ControllerRevision) bool { return p.runs(history.Hash(r)) })
}

// act makes and deletes pods: first every node gets its pod, then old ones go.
func (c *Controller) act(ctx context.Context, set *appsv1.DaemonSet, p *plan) error {
	missing, extra := p.place()
	for _, pod := range extra {
		if podstate.Finished(pod) {
			c.tellFinished(set, pod)
		}
	}
	if len(missing)+len(extra) == 0 && set.Spec.UpdateStrategy.Type == appsv1.RollingUpdateDaemonSetStrategyType {
		missing, extra = p.roll()
	}
	missing, extra = missing[:min(len(missing), burst)], extra[:min(len(extra), burst)]
	var errs []error
	if len(missing) > 0 {
		errs = append(errs, c.pods.Create(ctx, set, len(missing), func(i int) *corev1.Pod { return c.podFor(set, p.hash, missing[i]) }))
	}
	if len(extra) > 0 {
		errs = append(errs, c.pods.Delete(ctx, set, extra))
	}
	return errors.Join(errs...)
}

// tellFinished says in an event that a daemon has ended, which it should not.
func (c *Controller) tellFinished(set *appsv1.DaemonSet, pod *corev1.Pod) {
	if pod.Status.Phase == corev1.PodFailed {
		c.recorder.Eventf(set, corev1.EventTypeWarning, "FailedDaemonPod", "Found failed daemon pod %s/%s on node %s, will try to kill it", pod.Namespace, pod.Name, pod.Spec.NodeName)
		return
	}
	c.recorder.Eventf(set, corev1.EventTypeNormal, "SucceededDaemonPod", "Found succeeded daemon pod %s/%s on node %s, will try to delete it", pod.Namespace, pod.Name, pod.Spec.NodeName)
}

func (c *Controller) writeStatus(ctx context.Context, set *appsv1.DaemonSet, status appsv1.DaemonSetStatus) error {
	if equality.Semantic.DeepEqual(set.Status, status) {
		return nil
	}
	update := set.DeepCopy()
	update.Status = status
	_, err := c.client.AppsV1().DaemonSets(set.Namespace).UpdateStatus(ctx, update, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write the status of %s: %w", set.Name, err)
	}
	return nil
}

func minReady(set *appsv1.DaemonSet) time.Duration {
	return time.Duration(set.Spec.MinReadySeconds) * time.Second
}
