// SPDX-License-Identifier: Apache-2.0

// Package resourcequota counts what the objects of a namespace take of its
// ResourceQuotas and writes it into their status.
//
// The API server charges a quota before it stores an object; this controller gives
// back what was deleted or has ended, and puts right what the two have come to see
// differently. A count from a cache that lags behind would forget what was just
// charged. Therefore new objects ask for no count, deletions do, and no quota is
// counted in the first moment after it was charged.
package resourcequota

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/podstate"
	"github.com/kplab/kplab/internal/settle"
	"github.com/kplab/kplab/internal/usage"
)

const (
	// young is how long a charge may be ahead of the object that it was made for.
	young = 100 * time.Millisecond
	// quiet is how long after its last change a quota is counted again: what was
	// charged may not have been stored after all.
	quiet = time.Second
	// recount is after how long objects are counted again whose events nobody here
	// sees.
	recount = 10 * time.Second
)

// watched are the resources whose deletion makes room at once; that of others is
// noticed with the next count.
var watched = []string{
	"pods", "services", "persistentvolumeclaims", "configmaps", "secrets", "replicationcontrollers",
	"deployments", "replicasets", "statefulsets",
}

// Controller is the resource quota controller.
type Controller struct {
	loop     *loop.Loop[loop.Key]
	client   kubernetes.Interface
	metadata metadata.Interface
	clock    clock.PassiveClock
	quotas   corelisters.ResourceQuotaLister
	// caches hold the objects of the resources that are watched anyway.
	caches   map[schema.GroupResource]cache.GenericLister
	setupErr error

	mu      sync.Mutex
	changed map[loop.Key]time.Time // when a quota was last seen to change
}

// New makes the controller and subscribes it to quotas and to what they count, as far
// as it is watched in this process anyway.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	quotas := d.Informers.Core().V1().ResourceQuotas()
	c := &Controller{
		client: d.Client, metadata: d.Metadata, clock: d.Clock, quotas: quotas.Lister(),
		caches: map[schema.GroupResource]cache.GenericLister{}, changed: map[loop.Key]time.Time{},
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "resourcequota", Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "resourcequotas", quotas.Informer(), c.onQuota)
	for _, kind := range loop.Kinds() {
		informer, err := d.Informers.ForResource(kind.GroupVersionResource)
		if err != nil {
			c.setupErr = errors.Join(c.setupErr, fmt.Errorf("watch %s: %w", kind.Resource, err))
			continue
		}
		gr := kind.GroupResource()
		c.caches[gr] = informer.Lister()
		if slices.Contains(watched, kind.Resource) {
			loop.Watch(c.loop, kind.Resource, informer.Informer(), func(old, cur metav1.Object) { c.onObject(gr, old, cur) })
		}
	}
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	if c.setupErr != nil {
		return c.setupErr
	}
	return c.loop.Run(ctx)
}

func (c *Controller) onQuota(old, cur *corev1.ResourceQuota) {
	if cur == nil {
		c.mu.Lock()
		delete(c.changed, loop.KeyOf(old))
		c.mu.Unlock()
		return
	}
	key := loop.KeyOf(cur)
	c.mu.Lock()
	c.changed[key] = c.clock.Now()
	c.mu.Unlock()
	if old == nil || !equality.Semantic.DeepEqual(old.Spec, cur.Spec) || !equality.Semantic.DeepEqual(cur.Spec.Hard, cur.Status.Hard) {
		c.loop.Add(key)
		return
	}
	c.loop.After(key, quiet)
}

// onObject wakes the quotas of a namespace when an object leaves room there.
func (c *Controller) onObject(gr schema.GroupResource, old, cur metav1.Object) {
	if old == nil {
		return // charged already
	}
	if cur != nil && old.GetUID() == cur.GetUID() && !lessens(gr, old, cur) {
		return
	}
	all, err := c.quotas.ResourceQuotas(old.GetNamespace()).List(labels.Everything())
	if err != nil {
		return
	}
	for _, q := range all {
		for name := range q.Spec.Hard {
			if usage.Resource(name) == gr {
				c.loop.Add(loop.KeyOf(q))
				break
			}
		}
	}
	// A pod that outlives its grace period counts no longer, though no event says so.
	if pod, ok := cur.(*corev1.Pod); ok && pod.DeletionTimestamp != nil && pod.DeletionGracePeriodSeconds != nil {
		for _, q := range all {
			c.loop.After(loop.KeyOf(q), time.Duration(*pod.DeletionGracePeriodSeconds+1)*time.Second)
		}
	}
}

// lessens reports whether a changed object may take less than before.
func lessens(gr schema.GroupResource, old, cur metav1.Object) bool {
	switch now := cur.(type) {
	case *corev1.Pod:
		// What a pod asks for changes seldom; its status does often.
		was, ok := old.(*corev1.Pod)
		return ok && (podstate.Active(now) != podstate.Active(was) || now.Generation != was.Generation)
	case *corev1.Service, *corev1.PersistentVolumeClaim:
		return !equality.Semantic.DeepEqual(usage.Of(gr, old, time.Time{}), usage.Of(gr, cur, time.Time{}))
	}
	return false
}

// sync makes the status of one quota true.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	q, err := c.quotas.ResourceQuotas(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	fresh := !equality.Semantic.DeepEqual(q.Spec.Hard, q.Status.Hard)
	if age := c.age(key); !fresh && age < young {
		c.loop.After(key, young-age)
		return nil
	}
	used, complete, err := c.count(ctx, q)
	if err != nil {
		return err
	}
	if !complete {
		c.loop.After(key, recount)
	}
	if !fresh && equality.Semantic.DeepEqual(q.Status.Used, used) {
		return nil
	}
	update := q.DeepCopy()
	update.Status = corev1.ResourceQuotaStatus{Hard: q.Spec.Hard, Used: used}
	_, err = c.client.CoreV1().ResourceQuotas(q.Namespace).UpdateStatus(ctx, update, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write the status of the quota %s: %w", q.Name, err)
	}
	return nil
}

// age is how long ago a quota was seen to change.
func (c *Controller) age(key loop.Key) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.clock.Since(c.changed[key])
}

// count adds up what the objects take that the quota is about. complete says that the
// events of all of them come here.
func (c *Controller) count(ctx context.Context, q *corev1.ResourceQuota) (used corev1.ResourceList, complete bool, err error) {
	used, complete = corev1.ResourceList{}, true
	names := map[schema.GroupResource][]corev1.ResourceName{}
	for name := range q.Spec.Hard {
		if gr := usage.Resource(name); gr.Resource != "" {
			names[gr] = append(names[gr], name)
			used[name] = resource.Quantity{Format: resource.DecimalSI}
		}
	}
	now := c.clock.Now()
	for gr := range names {
		objects, err := c.objects(ctx, gr, q.Namespace)
		if err != nil {
			return nil, false, err
		}
		complete = complete && slices.Contains(watched, gr.Resource)
		for _, o := range objects {
			if in, err := inScopes(q, o); err != nil || !in {
				if err != nil {
					return nil, false, err
				}
				continue
			}
			takes := usage.Of(gr, o, now)
			for _, name := range names[gr] {
				total := used[name]
				total.Add(takes[name])
				used[name] = total
			}
		}
	}
	return used, complete, nil
}

func inScopes(q *corev1.ResourceQuota, o any) (bool, error) {
	for _, r := range usage.Scopes(q) {
		if match, err := usage.InScope(o, r); err != nil || !match {
			return false, err
		}
	}
	return true, nil
}

// objects returns the objects of a resource in a namespace: from a cache, or from the
// API when there is none. A resource that is not served has none.
func (c *Controller) objects(ctx context.Context, gr schema.GroupResource, namespace string) ([]any, error) {
	var out []any
	if lister, ok := c.caches[gr]; ok {
		all, err := lister.ByNamespace(namespace).List(labels.Everything())
		for _, o := range all {
			out = append(out, o)
		}
		return out, err
	}
	groups, err := c.client.Discovery().ServerGroups()
	if err != nil {
		return nil, fmt.Errorf("find the version of %s: %w", gr, err)
	}
	for _, g := range groups.Groups {
		if g.Name != gr.Group {
			continue
		}
		all, err := c.metadata.Resource(gr.WithVersion(g.PreferredVersion.Version)).Namespace(namespace).List(ctx, metav1.ListOptions{})
		if apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("count %s: %w", gr, err)
		}
		for i := range all.Items {
			out = append(out, &all.Items[i])
		}
	}
	return out, nil
}
