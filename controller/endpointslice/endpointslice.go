// SPDX-License-Identifier: Apache-2.0

// Package endpointslice keeps the EndpointSlices of every Service with a selector
// true. Which endpoint goes into which slice is decided by upstream's own reconciler
// (k8s.io/endpointslice): slices of at most 100 endpoints, as few writes as
// possible, a placeholder for a Service without pods, hints for traffic distribution.
//
// This package finds out when a Service has to be looked at and hands over its pods
// and slices. A pod that is being deleted is told by its conditions at once; whether
// it still gets traffic is the proxy's decision.
package endpointslice

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	reconcile "k8s.io/endpointslice"
	"k8s.io/endpointslice/topologycache"
	sliceutil "k8s.io/endpointslice/util"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/svcindex"
	"github.com/kplab/kplab/internal/settle"
)

const (
	workers = 4
	// perSlice is the most endpoints in one slice.
	perSlice = 100
	// ManagedBy is the value of the label that marks this controller's slices.
	ManagedBy = "endpointslice-controller.k8s.io"
)

// Controller is the EndpointSlice controller.
type Controller struct {
	loop       *loop.Loop[loop.Key]
	recorder   record.EventRecorder
	services   corelisters.ServiceLister
	byPod      cache.Indexer
	pods       corelisters.PodLister
	nodes      corelisters.NodeLister
	slices     discoverylisters.EndpointSliceLister
	reconciler *reconcile.Reconciler
	tracker    *sliceutil.EndpointSliceTracker
	triggers   *sliceutil.TriggerTimeTracker
	topology   *topologycache.TopologyCache
	logr       logr.Logger
	setupErr   error
}

// New makes the controller and subscribes it to Services, pods, nodes and slices.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	core := d.Informers.Core().V1()
	slicesInformer := d.Informers.Discovery().V1().EndpointSlices()
	c := &Controller{
		recorder: d.Recorder("endpoint-slice-controller"),
		services: core.Services().Lister(),
		byPod:    core.Services().Informer().GetIndexer(),
		pods:     core.Pods().Lister(),
		nodes:    core.Nodes().Lister(),
		slices:   slicesInformer.Lister(),
		tracker:  sliceutil.NewEndpointSliceTracker(),
		triggers: sliceutil.NewTriggerTimeTracker(),
		topology: topologycache.NewTopologyCache(),
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "endpointslice", Workers: workers, Sync: c.sync, Deps: d})
	c.logr = logr.FromSlogHandler(c.loop.Log().Handler())
	c.reconciler = reconcile.NewReconciler(d.Client, c.nodes, perSlice, c.tracker, c.topology, c.recorder, ManagedBy,
		reconcile.WithPreferSameTrafficDistributionEnabled(true))
	c.setupErr = svcindex.Add(core.Services().Informer())
	loop.Watch(c.loop, "services", core.Services().Informer(), func(old, cur *corev1.Service) {
		c.loop.Add(loop.KeyOf(cmp.Or(cur, old)))
	})
	loop.Watch(c.loop, "pods", core.Pods().Informer(), func(old, cur *corev1.Pod) {
		for _, key := range svcindex.Concerned(c.byPod, old, cur) {
			c.loop.Add(key)
		}
	})
	loop.Watch(c.loop, "nodes", core.Nodes().Informer(), c.onNode)
	loop.Watch(c.loop, "endpointslices", slicesInformer.Informer(), c.onSlice)
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

// onNode tells the hints' calculator about nodes that come, go, or change zone,
// size or readiness.
func (c *Controller) onNode(old, cur *corev1.Node) {
	if old != nil && cur != nil &&
		old.Labels[corev1.LabelTopologyZone] == cur.Labels[corev1.LabelTopologyZone] &&
		equality.Semantic.DeepEqual(old.Status.Allocatable, cur.Status.Allocatable) &&
		readyOf(old) == readyOf(cur) {
		return
	}
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return
	}
	c.topology.SetNodes(c.logr, nodes)
	for _, name := range c.topology.GetOverloadedServices() {
		if namespace, svc, err := cache.SplitMetaNamespaceKey(name); err == nil {
			c.loop.Add(loop.Key{Namespace: namespace, Name: svc})
		}
	}
}

func readyOf(node *corev1.Node) corev1.ConditionStatus {
	for i := range node.Status.Conditions {
		if node.Status.Conditions[i].Type == corev1.NodeReady {
			return node.Status.Conditions[i].Status
		}
	}
	return corev1.ConditionUnknown
}

// onSlice looks at a slice's Service again when somebody else changed the slice.
func (c *Controller) onSlice(old, cur *discoveryv1.EndpointSlice) {
	switch {
	case cur == nil:
		if c.reconciler.ManagedByController(old) && c.tracker.Has(old) && !c.tracker.HandleDeletion(old) {
			c.addServiceOf(old)
		}
	case old == nil:
		if c.reconciler.ManagedByController(cur) && c.tracker.ShouldSync(cur) {
			c.addServiceOf(cur)
		}
	default:
		// The label that names the Service may have been edited: both are concerned.
		if old.Labels[discoveryv1.LabelServiceName] != cur.Labels[discoveryv1.LabelServiceName] {
			c.addServiceOf(old)
			c.addServiceOf(cur)
			return
		}
		if c.reconciler.ManagedByChanged(old, cur) ||
			(c.reconciler.ManagedByController(cur) && c.tracker.ShouldSync(cur)) {
			c.addServiceOf(cur)
		}
	}
}

func (c *Controller) addServiceOf(slice *discoveryv1.EndpointSlice) {
	if name := slice.Labels[discoveryv1.LabelServiceName]; name != "" {
		c.loop.Add(loop.Key{Namespace: slice.Namespace, Name: name})
	}
}

// sync makes the slices of one Service true.
func (c *Controller) sync(_ context.Context, key loop.Key) error {
	svc, err := c.services.Services(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		c.triggers.DeleteService(key.Namespace, key.Name)
		c.reconciler.DeleteService(key.Namespace, key.Name)
		c.tracker.DeleteService(key.Namespace, key.Name)
		return nil // the slices are owned by the Service: garbage
	}
	if err != nil {
		return err
	}
	// A Service that is being deleted is served until it is gone; the reconciler
	// makes no new slices for it.
	if svc.Spec.Type == corev1.ServiceTypeExternalName || len(svc.Spec.Selector) == 0 {
		return nil
	}
	pods, err := c.pods.Pods(svc.Namespace).List(labels.SelectorFromSet(svc.Spec.Selector))
	if err != nil {
		return err
	}
	existing, err := c.slices.EndpointSlices(svc.Namespace).List(labels.SelectorFromSet(labels.Set{
		discoveryv1.LabelServiceName: svc.Name, discoveryv1.LabelManagedBy: ManagedBy,
	}))
	if err != nil {
		return err
	}
	existing = slices.DeleteFunc(existing, func(s *discoveryv1.EndpointSlice) bool { return s.DeletionTimestamp != nil })
	if c.tracker.StaleSlices(svc, existing) {
		return loop.Stale("endpoint slices of " + key.String())
	}
	trigger := c.triggers.ComputeEndpointLastChangeTriggerTime(svc.Namespace, svc, pods)
	if err := c.reconciler.Reconcile(c.logr, svc, pods, existing, trigger); err != nil {
		if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return nil
		}
		c.recorder.Eventf(svc, corev1.EventTypeWarning, "FailedToUpdateEndpointSlices",
			"Error updating Endpoint Slices for Service %s/%s: %v", svc.Namespace, svc.Name, err)
		return err
	}
	return nil
}
