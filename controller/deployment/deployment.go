// SPDX-License-Identifier: Apache-2.0

package deployment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/owner"
	"github.com/kplab/kplab/internal/settle"
)

// workers is how many Deployments are worked on at the same time.
const workers = 4

var (
	kind           = appsv1.SchemeGroupVersion.WithKind("Deployment")
	replicaSetKind = appsv1.SchemeGroupVersion.WithKind("ReplicaSet")
)

// Controller is the Deployment controller.
type Controller struct {
	loop        *loop.Loop[loop.Key]
	client      kubernetes.Interface
	clock       clock.PassiveClock
	recorder    record.EventRecorder
	deployments appslisters.DeploymentLister
	sets        appslisters.ReplicaSetLister
	pods        corelisters.PodLister
}

// New makes the controller and subscribes it to Deployments, ReplicaSets and pods.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	deployments, sets := d.Informers.Apps().V1().Deployments(), d.Informers.Apps().V1().ReplicaSets()
	pods := d.Informers.Core().V1().Pods()
	c := &Controller{
		client:      d.Client,
		clock:       d.Clock,
		recorder:    d.Recorder("deployment-controller"),
		deployments: deployments.Lister(),
		sets:        sets.Lister(),
		pods:        pods.Lister(),
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "deployment", Workers: workers, Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "deployments", deployments.Informer(), func(old, cur *appsv1.Deployment) {
		c.loop.Add(loop.KeyOf(cmp.Or(cur, old)))
	})
	loop.Watch(c.loop, "replicasets", sets.Informer(), c.onSet)
	loop.Watch(c.loop, "pods", pods.Informer(), c.onPod)
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error { return c.loop.Run(ctx) }

func (c *Controller) onSet(old, cur *appsv1.ReplicaSet) {
	orphan := false
	for _, rs := range []*appsv1.ReplicaSet{old, cur} {
		if rs == nil {
			continue
		}
		ref := metav1.GetControllerOf(rs)
		switch {
		case ref != nil && ref.Kind == kind.Kind:
			c.loop.Add(loop.Key{Namespace: rs.Namespace, Name: ref.Name})
		case ref == nil && rs == cur:
			orphan = true
		}
	}
	if !orphan {
		return
	}
	all, err := c.deployments.Deployments(cur.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, d := range all {
		if selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector); err == nil && !selector.Empty() && selector.Matches(labels.Set(cur.Labels)) {
			c.loop.Add(loop.KeyOf(d))
		}
	}
}

// onPod wakes a Deployment of strategy Recreate that waits for its old pods to end.
// All else about pods comes through the ReplicaSets' status.
func (c *Controller) onPod(old, cur *corev1.Pod) {
	if old == nil || (cur != nil && cur.Status.Phase == old.Status.Phase) {
		return
	}
	ref := metav1.GetControllerOf(old)
	if ref == nil || ref.Kind != replicaSetKind.Kind {
		return
	}
	rs, err := c.sets.ReplicaSets(old.Namespace).Get(ref.Name)
	if err != nil {
		return
	}
	owner := metav1.GetControllerOf(rs)
	if owner == nil || owner.Kind != kind.Kind {
		return
	}
	d, err := c.deployments.Deployments(old.Namespace).Get(owner.Name)
	if err == nil && d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		c.loop.Add(loop.KeyOf(d))
	}
}

// sync does the next step for one Deployment.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	cached, err := c.deployments.Deployments(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil // its ReplicaSets are the garbage collector's
	}
	if err != nil {
		return err
	}
	d := cached.DeepCopy()
	selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	if err != nil || selector.Empty() {
		c.recorder.Event(d, corev1.EventTypeWarning, "SelectingAll", "This deployment is selecting all pods. A non-empty selector is required.")
		return nil
	}
	owned, err := c.claim(ctx, d, selector)
	if err != nil {
		return err
	}
	r := &rollout{c: c, ctx: ctx, d: d, key: key, all: owned}
	r.split()
	err = r.step()
	if errors.Is(err, errNextEvent) {
		return nil
	}
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil // the Deployment is about to go the same way
	}
	return err
}

// errNextEvent ends a sync early: what was written brings an event, and with it the
// next sync, on a cache that shows the write.
var errNextEvent = errors.New("the next event goes on")

// claim returns the ReplicaSets that belong to d, after adopting and releasing.
func (c *Controller) claim(ctx context.Context, d *appsv1.Deployment, selector labels.Selector) ([]*appsv1.ReplicaSet, error) {
	all, err := c.sets.ReplicaSets(d.Namespace).List(labels.Everything())
	if err != nil {
		return nil, err
	}
	return owner.Claim(owner.Controller{
		Object:   d,
		Ref:      *metav1.NewControllerRef(d, kind),
		Selector: selector,
		Live: func() (metav1.Object, error) {
			return c.client.AppsV1().Deployments(d.Namespace).Get(ctx, d.Name, metav1.GetOptions{})
		},
		Patch: func(name string, patch []byte) error {
			_, err := c.client.AppsV1().ReplicaSets(d.Namespace).Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
			return err
		},
	}, all, nil)
}

// rollout is one sync of one Deployment.
type rollout struct {
	c   *Controller
	ctx context.Context //nolint:containedctx // lives for one sync
	d   *appsv1.Deployment
	key loop.Key

	all     []*appsv1.ReplicaSet // all that the Deployment owns, old ones first
	current *appsv1.ReplicaSet   // the one of the present template; nil when there is none
	old     []*appsv1.ReplicaSet // the others

	noted []appsv1.DeploymentCondition // the conditions as noted by this sync; nil while nothing was noted
}

// split finds the ReplicaSet of the present template among all.
func (r *rollout) split() {
	slices.SortFunc(r.all, olderFirst)
	r.current, r.old = nil, nil
	for _, rs := range r.all {
		// The oldest match wins, so that the choice is the same each time.
		if r.current == nil && sameTemplate(rs, r.d) {
			r.current = rs
			continue
		}
		r.old = append(r.old, rs)
	}
}

func olderFirst(a, b *appsv1.ReplicaSet) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
}

// step decides what is next.
func (r *rollout) step() error {
	if r.d.DeletionTimestamp != nil {
		return r.writeStatus()
	}
	if err := r.notePause(); err != nil {
		return err
	}
	if r.d.Spec.Paused || r.wasScaled() {
		if err := r.syncRevisions(); err != nil {
			return err
		}
		if err := r.scale(); err != nil {
			return err
		}
		if r.d.Spec.Paused {
			if err := r.tidy(); err != nil {
				return err
			}
		}
		return r.writeStatus()
	}
	switch r.d.Spec.Strategy.Type {
	case appsv1.RecreateDeploymentStrategyType:
		return r.recreate()
	case appsv1.RollingUpdateDeploymentStrategyType, "":
		return r.roll()
	}
	return fmt.Errorf("deployment strategy %q is unknown", r.d.Spec.Strategy.Type)
}

// tidy deletes old, empty ReplicaSets beyond the revision history limit, the oldest
// revisions first.
func (r *rollout) tidy() error {
	if r.d.Spec.RevisionHistoryLimit == nil {
		return nil
	}
	var finished []*appsv1.ReplicaSet
	for _, rs := range r.old {
		if rs.DeletionTimestamp == nil {
			finished = append(finished, rs)
		}
	}
	excess := len(finished) - int(*r.d.Spec.RevisionHistoryLimit)
	if excess <= 0 {
		return nil
	}
	slices.SortStableFunc(finished, func(a, b *appsv1.ReplicaSet) int { return cmp.Compare(revisionOf(a), revisionOf(b)) })
	for _, rs := range finished[:excess] {
		// One that still has pods, or whose controller has not looked yet, is not
		// finished after all.
		if rs.Status.Replicas != 0 || replicasOf(rs) != 0 || rs.Generation > rs.Status.ObservedGeneration {
			continue
		}
		err := r.c.client.AppsV1().ReplicaSets(rs.Namespace).Delete(r.ctx, rs.Name, metav1.DeleteOptions{
			Preconditions: metav1.NewUIDPreconditions(string(rs.UID)),
		})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete the old replica set %s: %w", rs.Name, err)
		}
	}
	return nil
}

// resize sets a ReplicaSet's replicas and says so in an event. The cached object is
// replaced by what the API returned.
func (r *rollout) resize(rs *appsv1.ReplicaSet, n int32) error {
	was := replicasOf(rs)
	update := rs.DeepCopy()
	if update.Annotations == nil {
		update.Annotations = map[string]string{}
	}
	changed := was != n
	changed = setDesired(update, *r.d.Spec.Replicas, *r.d.Spec.Replicas+maxSurge(r.d)) || changed
	if !changed {
		return nil
	}
	update.Spec.Replicas = &n
	stored, err := r.c.client.AppsV1().ReplicaSets(rs.Namespace).Update(r.ctx, update, metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("scale replica set %s to %d: %w", rs.Name, n, err)
	}
	r.replace(stored)
	if was != n {
		verb := "up"
		if n < was {
			verb = "down"
		}
		r.c.recorder.Eventf(r.d, corev1.EventTypeNormal, "ScalingReplicaSet", "Scaled %s replica set %s from %d to %d", verb, rs.Name, was, n)
	}
	return nil
}

// replace puts the stored state of a ReplicaSet in the place of the cached one.
func (r *rollout) replace(stored *appsv1.ReplicaSet) {
	for _, list := range [][]*appsv1.ReplicaSet{r.all, r.old} {
		for i := range list {
			if list[i].UID == stored.UID {
				list[i] = stored
			}
		}
	}
	if r.current != nil && r.current.UID == stored.UID {
		r.current = stored
	}
}
