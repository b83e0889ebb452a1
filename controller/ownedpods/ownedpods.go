// SPDX-License-Identifier: Apache-2.0

// Package ownedpods is what the controllers that make pods have in common: they find
// the pods of an owner, adopt and release by selector, create in batches that grow
// while they succeed, delete, and never count before the cache shows what they did
// themselves.
package ownedpods

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/kplab/kplab/controller/expect"
	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/owner"
)

const (
	// parallel bounds the requests in flight for one owner.
	parallel = 64
	// byOwner is the index of pods by the UID of their controller, and of orphans by
	// their namespace. All controllers of a process share it.
	byOwner = "kplab-controller"
)

// Owner is an object that owns pods.
type Owner interface {
	metav1.Object
	runtime.Object
}

// Pods is one controller's way to its pods.
type Pods struct {
	client   kubernetes.Interface
	kind     schema.GroupVersionKind
	recorder record.EventRecorder
	indexer  cache.Indexer
	expect   *expect.Expectations
	setupErr error
	// Finalizers are what adopted pods get; set it before the first Claim.
	Finalizers []string
}

// New returns the pods of owners of that kind. Events about them go to recorder.
func New(d loop.Deps, kind schema.GroupVersionKind, recorder record.EventRecorder) *Pods {
	informer := d.Informers.Core().V1().Pods().Informer()
	p := &Pods{client: d.Client, kind: kind, recorder: recorder, indexer: informer.GetIndexer(), expect: expect.New(d.Clock)}
	if _, made := informer.GetIndexer().GetIndexers()[byOwner]; !made {
		p.setupErr = informer.AddIndexers(cache.Indexers{byOwner: indexByOwner})
	}
	return p
}

// RetryWithRoom has l try again what was refused, as soon as a quota leaves more room
// than before.
func RetryWithRoom(d loop.Deps, l *loop.Loop[loop.Key]) {
	loop.Watch(l, "resourcequotas", d.Informers.Core().V1().ResourceQuotas().Informer(), func(old, cur *corev1.ResourceQuota) {
		if old != nil && (cur == nil || roomier(old, cur)) {
			l.RetryRefused()
		}
	})
}

func roomier(old, cur *corev1.ResourceQuota) bool {
	for name, hard := range cur.Status.Hard {
		was, used, before := old.Status.Hard[name], cur.Status.Used[name], old.Status.Used[name]
		if hard.Cmp(was) > 0 || used.Cmp(before) < 0 {
			return true
		}
	}
	return len(cur.Status.Hard) < len(old.Status.Hard)
}

// Check returns the error of New, for the controller's Run.
func (p *Pods) Check() error {
	if p.setupErr != nil {
		return fmt.Errorf("index pods by owner: %w", p.setupErr)
	}
	return nil
}

// Trusted reports whether the cache shows everything that was done to the owner's
// pods. Ask before the pods are read: an event that comes in between makes the count
// newer than the expectation, never older.
func (p *Pods) Trusted(uid types.UID) bool { return p.expect.Satisfied(uid) }

// Forget drops what was expected for an owner that is gone.
func (p *Pods) Forget(uid types.UID) { p.expect.Forget(uid) }

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

// Handle takes note of a pod's event. It calls wake for each owner of this kind that
// the event concerns, and orphan for a pod without a controller that may have become
// fit to be adopted.
func (p *Pods) Handle(old, cur *corev1.Pod, wake func(loop.Key), orphan func(*corev1.Pod)) {
	var was, is *metav1.OwnerReference
	if old != nil {
		was = metav1.GetControllerOf(old)
	}
	if cur != nil {
		is = metav1.GetControllerOf(cur)
	}
	switch {
	case cur == nil:
		if was != nil {
			p.expect.Deleted(was.UID, old.UID)
		}
	case cur.DeletionTimestamp != nil:
		if is != nil {
			// A restart can show a pod first when it is already on its way out.
			p.expect.Deleted(is.UID, cur.UID)
		}
	case old == nil && is != nil:
		p.expect.Created(is.UID, 1)
	}
	if was != nil && (is == nil || is.UID != was.UID) {
		p.wake(old.Namespace, was, wake)
	}
	if is != nil {
		p.wake(cur.Namespace, is, wake)
		return
	}
	if cur == nil || cur.DeletionTimestamp != nil {
		return
	}
	// An orphan may be adopted, when its labels or its owner changed just now.
	if old != nil && was == nil && labels.Equals(old.Labels, cur.Labels) {
		return
	}
	orphan(cur)
}

func (p *Pods) wake(namespace string, ref *metav1.OwnerReference, wake func(loop.Key)) {
	if ref.Kind == p.kind.Kind && ref.APIVersion == p.kind.GroupVersion().String() {
		wake(loop.Key{Namespace: namespace, Name: ref.Name})
	}
}

// Of returns the pods whose controller has one of the UIDs.
func (p *Pods) Of(uids ...types.UID) ([]*corev1.Pod, error) {
	values := make([]string, len(uids))
	for i, uid := range uids {
		values[i] = string(uid)
	}
	return p.byIndex(values...)
}

func (p *Pods) byIndex(values ...string) ([]*corev1.Pod, error) {
	var pods []*corev1.Pod
	for _, value := range values {
		found, err := p.indexer.ByIndex(byOwner, value)
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

// Claim returns the pods that belong to o, after adopting and releasing by selector.
// Pods that keep refuses are neither touched nor returned; nil keeps all. live reads
// the owner past the cache. The result is sorted by name, so that what is decided from
// it is the same each time.
func (p *Pods) Claim(ctx context.Context, o Owner, selector labels.Selector, keep func(*corev1.Pod) bool, live func() (metav1.Object, error)) ([]*corev1.Pod, error) {
	candidates, err := p.byIndex(string(o.GetUID()), orphansOf(o.GetNamespace()))
	if err != nil {
		return nil, err
	}
	candidates = slices.DeleteFunc(candidates, func(pod *corev1.Pod) bool {
		return pod.Namespace != o.GetNamespace() || (keep != nil && !keep(pod))
	})
	slices.SortFunc(candidates, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return owner.Claim(owner.Controller{
		Object:     o,
		Ref:        *p.Ref(o),
		Selector:   selector,
		Finalizers: p.Finalizers,
		Live:       live,
		Patch: func(name string, patch []byte) error {
			_, err := p.client.CoreV1().Pods(o.GetNamespace()).Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
			return err
		},
	}, candidates, nil)
}

// Ref is the reference that makes o the controller of a pod.
func (p *Pods) Ref(o metav1.Object) *metav1.OwnerReference { return metav1.NewControllerRef(o, p.kind) }

// FromTemplate returns the pod that o asks for, without a name of its own.
func (p *Pods) FromTemplate(o metav1.Object, template *corev1.PodTemplateSpec) *corev1.Pod {
	t := template.DeepCopy()
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName:    o.GetName() + "-",
			Namespace:       o.GetNamespace(),
			Labels:          t.Labels,
			Annotations:     t.Annotations,
			Finalizers:      t.Finalizers,
			OwnerReferences: []metav1.OwnerReference{*p.Ref(o)},
		},
		Spec: t.Spec,
	}
}

// Create makes n pods, the i-th as pod(i) says: one first, then two, four, …, so that
// when the API refuses them all (a bad template, a quota) this costs one request, not
// n. In a namespace that is being deleted nothing is made, and nothing is wrong.
func (p *Pods) Create(ctx context.Context, o Owner, n int, pod func(i int) *corev1.Pod) error {
	p.expect.Creations(o.GetUID(), n)
	for first, batch := 0, 1; first < n; batch = min(2*batch, parallel) {
		size := min(batch, n-first)
		errs := InParallel(size, func(i int) error {
			// One object a request: the client writes to it while it encodes.
			made, err := p.client.CoreV1().Pods(o.GetNamespace()).Create(ctx, pod(first+i), metav1.CreateOptions{})
			if err != nil {
				p.expect.Created(o.GetUID(), 1) // no event will come
				return err
			}
			p.recorder.Eventf(o, corev1.EventTypeNormal, "SuccessfulCreate", "Created pod: %v", made.Name)
			return nil
		})
		first += size
		if len(errs) == 0 {
			continue
		}
		p.expect.Created(o.GetUID(), n-first) // not even tried
		if apierrors.HasStatusCause(errs[0], corev1.NamespaceTerminatingCause) {
			return nil // the owner is about to go the same way
		}
		p.recorder.Eventf(o, corev1.EventTypeWarning, "FailedCreate", "Error creating: %v", errs[0])
		return fmt.Errorf("create pods of %s: %w", o.GetName(), errs[0])
	}
	return nil
}

// Delete deletes pods of o.
func (p *Pods) Delete(ctx context.Context, o Owner, pods []*corev1.Pod) error {
	uids := make([]types.UID, len(pods))
	for i, pod := range pods {
		uids[i] = pod.UID
	}
	p.expect.Deletions(o.GetUID(), uids...)
	errs := InParallel(len(pods), func(i int) error {
		pod := pods[i]
		err := p.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			Preconditions: metav1.NewUIDPreconditions(string(pod.UID)),
		})
		if err != nil {
			p.expect.Deleted(o.GetUID(), pod.UID)
			if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
				return nil // gone already
			}
			p.recorder.Eventf(o, corev1.EventTypeWarning, "FailedDelete", "Error deleting: %v", err)
			return err
		}
		p.recorder.Eventf(o, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted pod: %v", pod.Name)
		return nil
	})
	if len(errs) > 0 {
		return fmt.Errorf("delete pods of %s: %w", o.GetName(), errs[0])
	}
	return nil
}

// InParallel calls fn(0) … fn(n-1), a bounded number at a time, and returns the
// errors.
func InParallel(n int, fn func(i int) error) []error {
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
