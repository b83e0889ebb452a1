// SPDX-License-Identifier: Apache-2.0

// Package replicaset keeps as many pods of a template alive as a ReplicaSet asks
// for, and reports in its status how many there are.
//
// The rules are upstream's: pods are adopted and released by selector, created in
// batches that double while they succeed, deleted in an order that hurts least, and
// never counted before the cache shows what this controller itself has done.
package replicaset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/ownedpods"
	"github.com/kplab/kplab/controller/podstate"
	"github.com/kplab/kplab/internal/settle"
)

const (
	// workers is how many ReplicaSets are worked on at the same time.
	workers = 4
	// burst is the most pods created or deleted in one sync; the rest waits for the
	// next one.
	burst = 500
)

// Controller is the ReplicaSet controller, and that of ReplicationControllers.
type Controller struct {
	loop   *loop.Loop[loop.Key]
	clock  clock.PassiveClock
	source Source
	pods   *ownedpods.Pods
}

// Source is where the sets come from and where their status goes: ReplicaSets, or
// what can be seen as such.
type Source interface {
	// Get and List read the cache. A set that is not really a ReplicaSet says in its
	// TypeMeta what it is.
	Get(key loop.Key) (*appsv1.ReplicaSet, error)
	List(namespace string) ([]*appsv1.ReplicaSet, error)
	// Live reads the API.
	Live(ctx context.Context, key loop.Key) (metav1.Object, error)
	// WriteStatus stores the status of set.
	WriteStatus(ctx context.Context, set *appsv1.ReplicaSet, status appsv1.ReplicaSetStatus) error
}

// New makes the controller and subscribes it to ReplicaSets and pods.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	sets := d.Informers.Apps().V1().ReplicaSets()
	c := NewFor(d, "replicaset", appsv1.SchemeGroupVersion.WithKind("ReplicaSet"), replicaSets{d.Client, sets.Lister()})
	loop.Watch(c.loop, "replicasets", sets.Informer(), OnSet[*appsv1.ReplicaSet](c))
	return c
}

// NewFor makes a controller of the same rules for sets of another kind. The caller
// subscribes it to them, with OnSet.
func NewFor(d loop.Deps, name string, kind schema.GroupVersionKind, source Source) *Controller {
	pods := d.Informers.Core().V1().Pods()
	c := &Controller{
		clock:  d.Clock,
		source: source,
		pods:   ownedpods.New(d, kind, d.Recorder(name+"-controller")),
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: name, Workers: workers, Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "pods", pods.Informer(), func(old, cur *corev1.Pod) { c.pods.Handle(old, cur, c.loop.Add, c.onOrphan) })
	ownedpods.RetryWithRoom(d, c.loop)
	return c
}

// Loop is the frame of the controller.
func (c *Controller) Loop() *loop.Loop[loop.Key] { return c.loop }

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

// OnSet returns the handler of events of c's sets.
func OnSet[T interface {
	comparable
	metav1.Object
}](c *Controller) func(old, cur T) {
	var none T
	return func(old, cur T) {
		if cur == none || (old != none && old.GetUID() != cur.GetUID()) {
			c.pods.Forget(old.GetUID())
		}
		if cur == none {
			cur = old
		}
		c.loop.Add(loop.KeyOf(cur))
	}
}

// onOrphan wakes the sets that may adopt pod.
func (c *Controller) onOrphan(pod *corev1.Pod) {
	all, err := c.source.List(pod.Namespace)
	if err != nil {
		return
	}
	for _, rs := range all {
		selector, err := metav1.LabelSelectorAsSelector(rs.Spec.Selector)
		if err == nil && !selector.Empty() && selector.Matches(labels.Set(pod.Labels)) {
			c.loop.Add(loop.KeyOf(rs))
		}
	}
}

// sync makes the pods and the status of one ReplicaSet true.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	rs, err := c.source.Get(key)
	if apierrors.IsNotFound(err) {
		return nil // its pods are the garbage collector's
	}
	if err != nil {
		return err
	}
	selector, err := metav1.LabelSelectorAsSelector(rs.Spec.Selector)
	if err != nil || selector.Empty() {
		return nil // the API refuses such an object; nothing sensible to do
	}
	trusted := c.pods.Trusted(rs.UID)
	pods, err := c.pods.Claim(ctx, rs, selector, podstate.Active, func() (metav1.Object, error) { return c.source.Live(ctx, key) })
	if err != nil {
		return err
	}
	var manageErr error
	if trusted && rs.DeletionTimestamp == nil {
		manageErr = c.manage(ctx, rs, pods)
	}
	status, wait := newStatus(rs, pods, manageErr, c.clock.Now())
	if !equality.Semantic.DeepEqual(rs.Status, status) {
		if err := c.source.WriteStatus(ctx, rs, status); err != nil && !apierrors.IsNotFound(err) {
			// The first of them decides how it is tried again, and this one is owed.
			return errors.Join(fmt.Errorf("write the status of %s: %w", rs.Name, err), manageErr)
		}
	}
	if manageErr == nil && wait > 0 {
		c.loop.After(key, wait)
	}
	return manageErr
}

// manage creates the pods that are missing or deletes those that are too many.
func (c *Controller) manage(ctx context.Context, rs *appsv1.ReplicaSet, pods []*corev1.Pod) error {
	missing := int(replicas(rs)) - len(pods)
	switch {
	case missing > 0:
		return c.pods.Create(ctx, rs, min(missing, burst), func(int) *corev1.Pod { return c.pods.FromTemplate(rs, &rs.Spec.Template) })
	case missing < 0:
		return c.pods.Delete(ctx, rs, leastNeeded(pods, c.onSameNode(rs, pods), min(-missing, burst)))
	}
	return nil
}

// onSameNode returns, by pod UID, how many active pods of the same Deployment run on
// the pod's node: a node with two of them loses one first.
func (c *Controller) onSameNode(rs *appsv1.ReplicaSet, pods []*corev1.Pod) map[types.UID]int {
	related := pods
	if ref := metav1.GetControllerOf(rs); ref != nil {
		related = nil
		all, err := c.source.List(rs.Namespace)
		if err != nil {
			return nil
		}
		for _, sibling := range all {
			if r := metav1.GetControllerOf(sibling); r != nil && r.UID == ref.UID {
				found, err := c.pods.Of(sibling.UID)
				if err != nil {
					return nil
				}
				related = append(related, found...)
			}
		}
	}
	perNode := map[string]int{}
	for _, pod := range related {
		if podstate.Active(pod) && pod.Spec.NodeName != "" {
			perNode[pod.Spec.NodeName]++
		}
	}
	ranks := make(map[types.UID]int, len(pods))
	for _, pod := range pods {
		ranks[pod.UID] = perNode[pod.Spec.NodeName]
	}
	return ranks
}

// leastNeeded returns the n pods whose loss matters least, in the order in which
// they should go. sameNode says how many related pods share each pod's node.
func leastNeeded(pods []*corev1.Pod, sameNode map[types.UID]int, n int) []*corev1.Pod {
	if n >= len(pods) {
		return pods
	}
	order := slices.Clone(pods)
	slices.SortFunc(order, func(a, b *corev1.Pod) int { return podstate.CompareNeed(a, b, sameNode) })
	return order[:n]
}

func replicas(rs *appsv1.ReplicaSet) int32 {
	if rs.Spec.Replicas == nil {
		return 1
	}
	return *rs.Spec.Replicas
}

func minReady(rs *appsv1.ReplicaSet) time.Duration {
	return time.Duration(rs.Spec.MinReadySeconds) * time.Second
}

// replicaSets are the sets of the API.
type replicaSets struct {
	client kubernetes.Interface
	lister appslisters.ReplicaSetLister
}

// Get implements Source.
func (s replicaSets) Get(key loop.Key) (*appsv1.ReplicaSet, error) {
	return s.lister.ReplicaSets(key.Namespace).Get(key.Name)
}

// List implements Source.
func (s replicaSets) List(namespace string) ([]*appsv1.ReplicaSet, error) {
	return s.lister.ReplicaSets(namespace).List(labels.Everything())
}

// Live implements Source.
func (s replicaSets) Live(ctx context.Context, key loop.Key) (metav1.Object, error) {
	return s.client.AppsV1().ReplicaSets(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
}

// WriteStatus implements Source.
func (s replicaSets) WriteStatus(ctx context.Context, set *appsv1.ReplicaSet, status appsv1.ReplicaSetStatus) error {
	update := set.DeepCopy()
	update.Status = status
	_, err := s.client.AppsV1().ReplicaSets(set.Namespace).UpdateStatus(ctx, update, metav1.UpdateOptions{})
	return err
}
