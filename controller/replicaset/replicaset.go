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
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/controller/expect"
	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/owner"
	"github.com/kplab/kplab/controller/podstate"
	"github.com/kplab/kplab/internal/settle"
)

const (
	// workers is how many ReplicaSets are worked on at the same time.
	workers = 4
	// burst is the most pods created or deleted in one sync; the rest waits for the
	// next one.
	burst = 500
	// parallel bounds the requests in flight for one ReplicaSet.
	parallel = 64
	// byOwner is the index of pods by the UID of their controller, and of orphans
	// by their namespace.
	byOwner = "kplab-controller"
)

var kind = appsv1.SchemeGroupVersion.WithKind("ReplicaSet")

// Controller is the ReplicaSet controller.
type Controller struct {
	loop     *loop.Loop[loop.Key]
	client   kubernetes.Interface
	clock    clock.PassiveClock
	recorder record.EventRecorder
	sets     appslisters.ReplicaSetLister
	pods     cache.Indexer
	expect   *expect.Expectations
	setupErr error
}

// New makes the controller and subscribes it to ReplicaSets and pods.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	sets, pods := d.Informers.Apps().V1().ReplicaSets(), d.Informers.Core().V1().Pods()
	c := &Controller{
		client:   d.Client,
		clock:    d.Clock,
		recorder: d.Recorder("replicaset-controller"),
		sets:     sets.Lister(),
		pods:     pods.Informer().GetIndexer(),
		expect:   expect.New(d.Clock),
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "replicaset", Workers: workers, Sync: c.sync, Deps: d})
	c.setupErr = pods.Informer().AddIndexers(cache.Indexers{byOwner: indexByOwner})
	loop.Watch(c.loop, "replicasets", sets.Informer(), c.onSet)
	loop.Watch(c.loop, "pods", pods.Informer(), c.onPod)
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	if c.setupErr != nil {
		return fmt.Errorf("index pods by owner: %w", c.setupErr)
	}
	return c.loop.Run(ctx)
}

func indexByOwner(obj any) ([]string, error) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, nil
	}
	if ref := metav1.GetControllerOf(pod); ref != nil {
		return []string{string(ref.UID)}, nil
	}
	return []string{orphansOf(pod.Namespace)}, nil
}

func orphansOf(namespace string) string { return "orphans/" + namespace }

func (c *Controller) onSet(old, cur *appsv1.ReplicaSet) {
	if cur == nil || (old != nil && old.UID != cur.UID) {
		c.expect.Forget(old.UID)
	}
	if cur == nil {
		c.loop.Add(loop.KeyOf(old))
		return
	}
	c.loop.Add(loop.KeyOf(cur))
}

func (c *Controller) onPod(old, cur *corev1.Pod) {
	var oldRef, curRef *metav1.OwnerReference
	if old != nil {
		oldRef = metav1.GetControllerOf(old)
	}
	if cur != nil {
		curRef = metav1.GetControllerOf(cur)
	}
	switch {
	case cur == nil:
		if oldRef != nil {
			c.expect.Deleted(oldRef.UID, old.UID)
		}
	case cur.DeletionTimestamp != nil:
		if curRef != nil {
			// A restart can show a pod first when it is already on its way out.
			c.expect.Deleted(curRef.UID, cur.UID)
		}
	case old == nil && curRef != nil:
		c.expect.Created(curRef.UID, 1)
	}
	if oldRef != nil && (curRef == nil || curRef.UID != oldRef.UID) {
		c.addOwner(old.Namespace, oldRef)
	}
	if curRef != nil {
		c.addOwner(cur.Namespace, curRef)
		return
	}
	if cur == nil || cur.DeletionTimestamp != nil {
		return
	}
	// An orphan may be adopted, when its labels or its owner changed just now.
	if old != nil && oldRef == nil && labels.Equals(old.Labels, cur.Labels) {
		return
	}
	all, err := c.sets.ReplicaSets(cur.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, rs := range all {
		selector, err := metav1.LabelSelectorAsSelector(rs.Spec.Selector)
		if err == nil && !selector.Empty() && selector.Matches(labels.Set(cur.Labels)) {
			c.loop.Add(loop.KeyOf(rs))
		}
	}
}

func (c *Controller) addOwner(namespace string, ref *metav1.OwnerReference) {
	if ref.Kind == kind.Kind && ref.APIVersion == kind.GroupVersion().String() {
		c.loop.Add(loop.Key{Namespace: namespace, Name: ref.Name})
	}
}

// sync makes the pods and the status of one ReplicaSet true.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	rs, err := c.sets.ReplicaSets(key.Namespace).Get(key.Name)
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
	// Read before the pods: an event that comes in between makes the count newer
	// than the expectation, never older.
	trusted := c.expect.Satisfied(rs.UID)
	pods, err := c.claim(ctx, rs, selector)
	if err != nil {
		return err
	}
	var manageErr error
	if trusted && rs.DeletionTimestamp == nil {
		manageErr = c.manage(ctx, rs, pods)
	}
	status, wait := newStatus(rs, pods, manageErr, c.clock.Now())
	if err := c.writeStatus(ctx, rs, status); err != nil {
		return errors.Join(manageErr, err)
	}
	if manageErr == nil && wait > 0 {
		c.loop.After(key, wait)
	}
	return manageErr
}

// claim returns the active pods that belong to rs, after adopting and releasing.
func (c *Controller) claim(ctx context.Context, rs *appsv1.ReplicaSet, selector labels.Selector) ([]*corev1.Pod, error) {
	candidates, err := c.byIndex(string(rs.UID), orphansOf(rs.Namespace))
	if err != nil {
		return nil, err
	}
	candidates = slices.DeleteFunc(candidates, func(p *corev1.Pod) bool {
		return p.Namespace != rs.Namespace || !podstate.Active(p)
	})
	return owner.Claim(owner.Controller{
		Object:   rs,
		Ref:      *metav1.NewControllerRef(rs, kind),
		Selector: selector,
		Live: func() (metav1.Object, error) {
			return c.client.AppsV1().ReplicaSets(rs.Namespace).Get(ctx, rs.Name, metav1.GetOptions{})
		},
		Patch: func(name string, patch []byte) error {
			_, err := c.client.CoreV1().Pods(rs.Namespace).Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
			return err
		},
	}, candidates, nil)
}

func (c *Controller) byIndex(values ...string) ([]*corev1.Pod, error) {
	var pods []*corev1.Pod
	for _, value := range values {
		found, err := c.pods.ByIndex(byOwner, value)
		if err != nil {
			return nil, err
		}
		for _, obj := range found {
			if pod, ok := obj.(*corev1.Pod); ok {
				pods = append(pods, pod)
			}
		}
	}
	return pods, nil
}

// manage creates the pods that are missing or deletes those that are too many.
func (c *Controller) manage(ctx context.Context, rs *appsv1.ReplicaSet, pods []*corev1.Pod) error {
	missing := int(replicas(rs)) - len(pods)
	switch {
	case missing > 0:
		return c.create(ctx, rs, min(missing, burst))
	case missing < 0:
		return c.remove(ctx, rs, pods, min(-missing, burst))
	}
	return nil
}

// create makes n pods, one first, then two, four, …: when the API refuses them all
// (a bad template, a quota) this costs one request, not n.
func (c *Controller) create(ctx context.Context, rs *appsv1.ReplicaSet, n int) error {
	c.expect.Creations(rs.UID, n)
	for left, batch := n, 1; left > 0; batch = min(2*batch, parallel) {
		size := min(batch, left)
		errs := inParallel(size, func(int) error {
			// One object a request: the client writes to it while it encodes.
			made, err := c.client.CoreV1().Pods(rs.Namespace).Create(ctx, podFor(rs), metav1.CreateOptions{})
			if err != nil {
				c.expect.Created(rs.UID, 1) // no event will come
				return err
			}
			c.recorder.Eventf(rs, corev1.EventTypeNormal, "SuccessfulCreate", "Created pod: %v", made.Name)
			return nil
		})
		left -= size
		if len(errs) == 0 {
			continue
		}
		c.expect.Created(rs.UID, left) // not even tried
		if apierrors.HasStatusCause(errs[0], corev1.NamespaceTerminatingCause) {
			return nil // the ReplicaSet is about to go the same way
		}
		c.recorder.Eventf(rs, corev1.EventTypeWarning, "FailedCreate", "Error creating: %v", errs[0])
		return fmt.Errorf("create pods of %s: %w", rs.Name, errs[0])
	}
	return nil
}

// podFor returns the pod that rs asks for, without a name.
func podFor(rs *appsv1.ReplicaSet) *corev1.Pod {
	t := rs.Spec.Template.DeepCopy()
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName:    rs.Name + "-",
			Namespace:       rs.Namespace,
			Labels:          t.Labels,
			Annotations:     t.Annotations,
			Finalizers:      t.Finalizers,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(rs, kind)},
		},
		Spec: t.Spec,
	}
}

// remove deletes n of the pods, those first that matter least.
func (c *Controller) remove(ctx context.Context, rs *appsv1.ReplicaSet, pods []*corev1.Pod, n int) error {
	victims := leastNeeded(pods, c.onSameNode(rs, pods), n)
	uids := make([]types.UID, len(victims))
	for i, pod := range victims {
		uids[i] = pod.UID
	}
	c.expect.Deletions(rs.UID, uids...)
	errs := inParallel(len(victims), func(i int) error {
		pod := victims[i]
		err := c.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			Preconditions: metav1.NewUIDPreconditions(string(pod.UID)),
		})
		if err != nil {
			c.expect.Deleted(rs.UID, pod.UID)
			if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
				return nil // gone already
			}
			c.recorder.Eventf(rs, corev1.EventTypeWarning, "FailedDelete", "Error deleting: %v", err)
			return err
		}
		c.recorder.Eventf(rs, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted pod: %v", pod.Name)
		return nil
	})
	if len(errs) > 0 {
		return fmt.Errorf("delete pods of %s: %w", rs.Name, errs[0])
	}
	return nil
}

// onSameNode returns, by pod UID, how many active pods of the same Deployment run on
// the pod's node: a node with two of them loses one first.
func (c *Controller) onSameNode(rs *appsv1.ReplicaSet, pods []*corev1.Pod) map[types.UID]int {
	related := pods
	if ref := metav1.GetControllerOf(rs); ref != nil {
		related = nil
		all, err := c.sets.ReplicaSets(rs.Namespace).List(labels.Everything())
		if err != nil {
			return nil
		}
		for _, sibling := range all {
			if r := metav1.GetControllerOf(sibling); r != nil && r.UID == ref.UID {
				found, err := c.byIndex(string(sibling.UID))
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

// inParallel calls fn(0) … fn(n-1), at most parallel at a time, and returns the
// errors.
func inParallel(n int, fn func(i int) error) []error {
	var (
		mu   sync.Mutex
		errs []error
		wg   sync.WaitGroup
		next = make(chan int)
	)
	for range min(n, parallel) {
		wg.Go(func() {
			for i := range next {
				if err := fn(i); err != nil {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	return errs
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
