// SPDX-License-Identifier: Apache-2.0

// Package mirroring makes EndpointSlices out of Endpoints that a user wrote for a
// Service without a selector, so that proxies and DNS need to read slices only.
//
// The subsets of one set of ports become one slice for each address family in them.
// The slices belong to the Endpoints object and go with it. Endpoints labelled
// endpointslice.kubernetes.io/skip-mirror, those used for leader election, and those
// of a Service that has a selector (its slices are another controller's) are not
// mirrored.
package mirroring

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/tools/record"
	sliceutil "k8s.io/endpointslice/util"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/internal/settle"
)

const (
	workers = 2
	// ManagedBy is the value of the label that marks this controller's slices.
	ManagedBy = "endpointslicemirroring-controller.k8s.io"
)

// Controller is the mirroring controller.
type Controller struct {
	loop      *loop.Loop[loop.Key]
	client    kubernetes.Interface
	recorder  record.EventRecorder
	endpoints corelisters.EndpointsLister
	services  corelisters.ServiceLister
	slices    discoverylisters.EndpointSliceLister
	tracker   *sliceutil.EndpointSliceTracker
}

// New makes the controller and subscribes it to Endpoints, Services and slices.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	core := d.Informers.Core().V1()
	slices := d.Informers.Discovery().V1().EndpointSlices()
	c := &Controller{
		client:    d.Client,
		recorder:  d.Recorder("endpoint-slice-mirroring-controller"),
		endpoints: core.Endpoints().Lister(),
		services:  core.Services().Lister(),
		slices:    slices.Lister(),
		tracker:   sliceutil.NewEndpointSliceTracker(),
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "mirroring", Workers: workers, Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "endpoints", core.Endpoints().Informer(), func(old, cur *corev1.Endpoints) {
		// What the Endpoints controller writes follows a selector: nothing to mirror.
		if mirrored(old) || mirrored(cur) {
			c.loop.Add(loop.KeyOf(cmp.Or(cur, old)))
		}
	})
	loop.Watch(c.loop, "services", core.Services().Informer(), func(old, cur *corev1.Service) {
		if old == nil || cur == nil || (len(old.Spec.Selector) == 0) != (len(cur.Spec.Selector) == 0) {
			c.loop.Add(loop.KeyOf(cmp.Or(cur, old)))
		}
	})
	loop.Watch(c.loop, "endpointslices", slices.Informer(), c.onSlice)
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error { return c.loop.Run(ctx) }

// mirrored reports whether an Endpoints object is one to mirror, as far as it says
// so itself.
func mirrored(e *corev1.Endpoints) bool {
	if e == nil || e.Labels[discoveryv1.LabelSkipMirror] == "true" {
		return false
	}
	_, election := e.Annotations[resourcelock.LeaderElectionRecordAnnotationKey]
	return !election
}

// onSlice looks at the Endpoints again when somebody else changed or removed a
// mirrored slice.
func (c *Controller) onSlice(old, cur *discoveryv1.EndpointSlice) {
	ours := func(s *discoveryv1.EndpointSlice) bool {
		return s != nil && s.Labels[discoveryv1.LabelManagedBy] == ManagedBy
	}
	switch {
	case cur == nil:
		if ours(old) && c.tracker.Has(old) && !c.tracker.HandleDeletion(old) {
			c.addServiceOf(old)
		}
	case ours(old) && !ours(cur):
		c.addServiceOf(old)
	case ours(cur) && c.tracker.ShouldSync(cur):
		c.addServiceOf(cur)
	}
}

func (c *Controller) addServiceOf(slice *discoveryv1.EndpointSlice) {
	if name := slice.Labels[discoveryv1.LabelServiceName]; name != "" {
		c.loop.Add(loop.Key{Namespace: slice.Namespace, Name: name})
	}
}

// sync makes the mirrored slices of one Endpoints object true.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	existing, err := c.slices.EndpointSlices(key.Namespace).List(labels.SelectorFromSet(labels.Set{
		discoveryv1.LabelServiceName: key.Name, discoveryv1.LabelManagedBy: ManagedBy,
	}))
	if err != nil {
		return err
	}
	endpoints, err := c.source(key)
	if err != nil {
		return err
	}
	if endpoints == nil {
		return c.remove(ctx, key, existing)
	}
	if c.tracker.StaleSlices(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}, existing) {
		return loop.Stale("mirrored slices of " + key.String())
	}
	wanted, skipped := mirror(endpoints)
	c.tell(endpoints, skipped)
	return c.write(ctx, plan(wanted, existing))
}

// source returns the Endpoints to mirror under key; nil when there are none.
func (c *Controller) source(key loop.Key) (*corev1.Endpoints, error) {
	endpoints, err := c.endpoints.Endpoints(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) || (err == nil && (!mirrored(endpoints) || endpoints.DeletionTimestamp != nil)) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	svc, err := c.services.Services(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) || (err == nil && len(svc.Spec.Selector) > 0) {
		return nil, nil
	}
	return endpoints, err
}

// remove deletes the slices of Endpoints that are not mirrored any more.
func (c *Controller) remove(ctx context.Context, key loop.Key, existing []*discoveryv1.EndpointSlice) error {
	var errs []error
	for _, s := range existing {
		if err := c.deleteSlice(ctx, s); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) == 0 && len(existing) == 0 {
		c.tracker.DeleteService(key.Namespace, key.Name)
	}
	return errors.Join(errs...)
}

// tell says in an event what could not be mirrored.
func (c *Controller) tell(endpoints *corev1.Endpoints, s skips) {
	if s.tooMany > 0 {
		// The number is of all that were skipped, as upstream counts.
		c.recorder.Eventf(endpoints, corev1.EventTypeWarning, "TooManyAddressesToMirror",
			"A max of %d addresses can be mirrored to EndpointSlices per Endpoints subset. %d addresses were skipped", perSubset, s.tooMany+s.invalid)
	}
	if s.invalid > 0 {
		c.recorder.Eventf(endpoints, corev1.EventTypeWarning, "InvalidIPAddress",
			"Skipped %d invalid IP addresses when mirroring to EndpointSlices", s.invalid)
	}
}

func (c *Controller) write(ctx context.Context, p changes) error {
	var errs []error
	for _, s := range p.create {
		made, err := c.client.DiscoveryV1().EndpointSlices(s.Namespace).Create(ctx, s, metav1.CreateOptions{})
		switch {
		case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
			return nil
		case err != nil:
			errs = append(errs, fmt.Errorf("create a mirrored slice: %w", err))
		default:
			c.tracker.Update(made)
		}
	}
	for _, s := range p.update {
		stored, err := c.client.DiscoveryV1().EndpointSlices(s.Namespace).Update(ctx, s, metav1.UpdateOptions{})
		if err != nil {
			errs = append(errs, fmt.Errorf("update mirrored slice %s: %w", s.Name, err))
			continue
		}
		c.tracker.Update(stored)
	}
	for _, s := range p.remove {
		if err := c.deleteSlice(ctx, s); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (c *Controller) deleteSlice(ctx context.Context, s *discoveryv1.EndpointSlice) error {
	if s.DeletionTimestamp != nil {
		return nil
	}
	err := c.client.DiscoveryV1().EndpointSlices(s.Namespace).Delete(ctx, s.Name, metav1.DeleteOptions{
		Preconditions: metav1.NewUIDPreconditions(string(s.UID)),
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete mirrored slice %s: %w", s.Name, err)
	}
	if err == nil {
		c.tracker.ExpectDeletion(s)
	}
	return nil
}
