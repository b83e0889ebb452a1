// SPDX-License-Identifier: Apache-2.0

// Package endpoints keeps the Endpoints object of every Service with a selector
// true: the older, single-object form of what EndpointSlices say, which many clients
// still read.
//
// It differs from the slices in three ways, as upstream's does: only the Service's
// first IP family is in it, a pod that is being deleted is in no list any more, and
// beyond 1000 addresses it is cut off and says so in an annotation.
package endpoints

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	sliceutil "k8s.io/endpointslice/util"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/svcindex"
	"github.com/kplab/kplab/internal/settle"
)

const (
	workers = 4
	// capacity is the most addresses in one object.
	capacity = 1000
	// managedByLabel marks the objects that this controller writes; upstream's name.
	managedByLabel = "endpoints.kubernetes.io/managed-by"
	managedByValue = "endpoint-controller"
	truncated      = "truncated"
)

// Controller is the Endpoints controller.
type Controller struct {
	loop      *loop.Loop[loop.Key]
	client    kubernetes.Interface
	recorder  record.EventRecorder
	services  corelisters.ServiceLister
	byPod     cache.Indexer
	pods      corelisters.PodLister
	endpoints corelisters.EndpointsLister
	triggers  *sliceutil.TriggerTimeTracker
	setupErr  error

	mu sync.Mutex
	// orphaned are the Services whose deletion was seen: their Endpoints go with
	// them, whoever wrote those.
	orphaned map[loop.Key]bool
}

// New makes the controller and subscribes it to Services, pods and Endpoints.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	core := d.Informers.Core().V1()
	c := &Controller{
		client:    d.Client,
		recorder:  d.Recorder("endpoint-controller"),
		services:  core.Services().Lister(),
		byPod:     core.Services().Informer().GetIndexer(),
		pods:      core.Pods().Lister(),
		endpoints: core.Endpoints().Lister(),
		triggers:  sliceutil.NewTriggerTimeTracker(),
		orphaned:  map[loop.Key]bool{},
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "endpoints", Workers: workers, Sync: c.sync, Deps: d})
	c.setupErr = svcindex.Add(core.Services().Informer())
	loop.Watch(c.loop, "services", core.Services().Informer(), func(old, cur *corev1.Service) {
		if cur == nil {
			c.mu.Lock()
			c.orphaned[loop.KeyOf(old)] = true
			c.mu.Unlock()
		}
		c.loop.Add(loop.KeyOf(cmp.Or(cur, old)))
	})
	loop.Watch(c.loop, "pods", core.Pods().Informer(), func(old, cur *corev1.Pod) {
		for _, key := range svcindex.Concerned(c.byPod, old, cur) {
			c.loop.Add(key)
		}
	})
	// An edited or deleted object is put right again; one that is left over from a
	// Service that went while nobody watched is removed.
	loop.Watch(c.loop, "endpoints", core.Endpoints().Informer(), func(old, cur *corev1.Endpoints) {
		c.loop.Add(loop.KeyOf(cmp.Or(cur, old)))
	})
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	if c.setupErr != nil {
		return fmt.Errorf("index services by selector: %w", c.setupErr)
	}
	return c.loop.Run(ctx)
}

// sync makes the Endpoints of one Service true.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	svc, err := c.services.Services(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return c.cleanUp(ctx, key)
	}
	if err != nil {
		return err
	}
	c.mu.Lock()
	delete(c.orphaned, key)
	c.mu.Unlock()
	if svc.Spec.Type == corev1.ServiceTypeExternalName || len(svc.Spec.Selector) == 0 {
		return nil
	}
	pods, err := c.pods.Pods(svc.Namespace).List(labels.SelectorFromSet(svc.Spec.Selector))
	if err != nil {
		return err
	}
	trigger := c.triggers.ComputeEndpointLastChangeTriggerTime(svc.Namespace, svc, pods)
	stored, err := c.endpoints.Endpoints(svc.Namespace).Get(svc.Name)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	if apierrors.IsNotFound(err) {
		stored = nil
	}
	wanted := build(svc, pods, stored, trigger)
	if stored != nil && same(stored, wanted) {
		return nil
	}
	return c.write(ctx, stored == nil, wanted)
}

func (c *Controller) write(ctx context.Context, create bool, wanted *corev1.Endpoints) error {
	var err error
	verb := "update"
	if create {
		verb = "create"
		_, err = c.client.CoreV1().Endpoints(wanted.Namespace).Create(ctx, wanted, metav1.CreateOptions{})
	} else {
		_, err = c.client.CoreV1().Endpoints(wanted.Namespace).Update(ctx, wanted, metav1.UpdateOptions{})
	}
	switch {
	case err == nil, apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil
	case apierrors.IsAlreadyExists(err), apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return loop.Stale("endpoints " + wanted.Namespace + "/" + wanted.Name)
	}
	if create {
		c.recorder.Eventf(wanted, corev1.EventTypeWarning, "FailedToCreateEndpoint", "Failed to create endpoint for service %s/%s: %v", wanted.Namespace, wanted.Name, err)
	} else {
		c.recorder.Eventf(wanted, corev1.EventTypeWarning, "FailedToUpdateEndpoint", "Failed to update endpoint %s/%s: %v", wanted.Namespace, wanted.Name, err)
	}
	return fmt.Errorf("%s endpoints %s/%s: %w", verb, wanted.Namespace, wanted.Name, err)
}

// cleanUp removes the Endpoints of a Service that is gone.
func (c *Controller) cleanUp(ctx context.Context, key loop.Key) error {
	c.triggers.DeleteService(key.Namespace, key.Name)
	stored, err := c.endpoints.Endpoints(key.Namespace).Get(key.Name)
	if err == nil {
		c.mu.Lock()
		orphaned := c.orphaned[key]
		c.mu.Unlock()
		// Endpoints that a user wrote before the Service are left alone.
		if !orphaned && stored.Labels[managedByLabel] != managedByValue {
			return nil
		}
		err = c.client.CoreV1().Endpoints(key.Namespace).Delete(ctx, key.Name, metav1.DeleteOptions{
			Preconditions: metav1.NewUIDPreconditions(string(stored.UID)),
		})
	}
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete endpoints %s: %w", key, err)
	}
	c.mu.Lock()
	delete(c.orphaned, key)
	c.mu.Unlock()
	return nil
}

// build returns the Endpoints that svc should have, on top of the stored one.
func build(svc *corev1.Service, pods []*corev1.Pod, stored *corev1.Endpoints, trigger time.Time) *corev1.Endpoints {
	out := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: svc.Name, Namespace: svc.Namespace}}
	if stored != nil {
		out.ObjectMeta = *stored.ObjectMeta.DeepCopy()
	}
	out.Labels = maps.Clone(svc.Labels)
	if out.Labels == nil {
		out.Labels = map[string]string{}
	}
	delete(out.Labels, corev1.IsHeadlessService)
	if svc.Spec.ClusterIP == corev1.ClusterIPNone {
		out.Labels[corev1.IsHeadlessService] = ""
	}
	out.Labels[managedByLabel] = managedByValue
	cut := false
	out.Subsets, cut = truncate(subsets(svc, pods))
	if out.Annotations == nil {
		out.Annotations = map[string]string{}
	}
	delete(out.Annotations, corev1.EndpointsOverCapacity)
	if cut {
		out.Annotations[corev1.EndpointsOverCapacity] = truncated
	}
	if !trigger.IsZero() {
		out.Annotations[corev1.EndpointsLastChangeTriggerTime] = trigger.UTC().Format(time.RFC3339Nano)
	} else {
		delete(out.Annotations, corev1.EndpointsLastChangeTriggerTime)
	}
	return out
}

// same reports whether writing wanted would change anything that a reader cares
// about. The time of the last change alone does not.
func same(stored, wanted *corev1.Endpoints) bool {
	return equality.Semantic.DeepEqual(stored.Subsets, wanted.Subsets) &&
		maps.Equal(stored.Labels, wanted.Labels) &&
		stored.Annotations[corev1.EndpointsOverCapacity] == wanted.Annotations[corev1.EndpointsOverCapacity]
}
