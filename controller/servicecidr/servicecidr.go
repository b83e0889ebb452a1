// SPDX-License-Identifier: Apache-2.0

// Package servicecidr keeps the life of ServiceCIDRs (KEP-1880): it says that a new
// range is ready, from when on the API gives addresses from it, and keeps one that is to
// be deleted for as long as a Service has an address that no other range holds.
package servicecidr

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	networkinglisters "k8s.io/client-go/listers/networking/v1"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/internal/settle"
)

const (
	// finalizer is upstream's.
	finalizer = "networking.k8s.io/service-cidr-finalizer"
	// grace is how long after its deletion was asked for a range goes at the
	// earliest: a Service may be on its way to the store with an address of it.
	// Upstream, whose API servers learn of the deletion one by one, takes 10 s.
	grace = time.Second
)

// Controller keeps ServiceCIDRs.
type Controller struct {
	loop     *loop.Loop[loop.Key]
	client   kubernetes.Interface
	clock    clock.Clock
	cidrs    networkinglisters.ServiceCIDRLister
	services corelisters.ServiceLister
}

// New makes the controller and subscribes it to ServiceCIDRs and Services.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	cidrs := d.Informers.Networking().V1().ServiceCIDRs()
	services := d.Informers.Core().V1().Services()
	c := &Controller{client: d.Client, clock: d.Clock, cidrs: cidrs.Lister(), services: services.Lister()}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "servicecidr", Sync: c.sync, Deps: d})
	// A new or a larger range may take over the addresses of one that waits.
	loop.Watch(c.loop, "servicecidrs", cidrs.Informer(), func(_, cur *networkingv1.ServiceCIDR) {
		if cur != nil {
			c.loop.Add(loop.KeyOf(cur))
		}
		c.kickWaiting()
	})
	loop.Watch(c.loop, "services", services.Informer(), func(old, cur *corev1.Service) {
		if old != nil && (cur == nil || !slices.Equal(old.Spec.ClusterIPs, cur.Spec.ClusterIPs)) {
			c.kickWaiting()
		}
	})
	return c
}

// kickWaiting looks again at the ranges that are to be deleted.
func (c *Controller) kickWaiting() {
	all, err := c.cidrs.List(labels.Everything())
	if err != nil {
		return // a lister of a cache does not fail
	}
	for _, cidr := range all {
		if cidr.DeletionTimestamp != nil {
			c.loop.Add(loop.KeyOf(cidr))
		}
	}
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error { return c.loop.Run(ctx) }

func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	cidr, err := c.cidrs.Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if cidr.DeletionTimestamp != nil {
		return c.end(ctx, cidr)
	}
	if !slices.Contains(cidr.Finalizers, finalizer) {
		cidr = cidr.DeepCopy()
		cidr.Finalizers = append(cidr.Finalizers, finalizer)
		if cidr, err = c.client.NetworkingV1().ServiceCIDRs().Update(ctx, cidr, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("add the finalizer to servicecidr %s: %w", key, err)
		}
	}
	if meta.IsStatusConditionTrue(cidr.Status.Conditions, networkingv1.ServiceCIDRConditionReady) {
		return nil
	}
	return c.setReady(ctx, cidr, metav1.Condition{
		Status: metav1.ConditionTrue, Message: "Kubernetes Service CIDR is ready",
	})
}

// end lets a range go when nobody needs it.
func (c *Controller) end(ctx context.Context, cidr *networkingv1.ServiceCIDR) error {
	if !slices.Contains(cidr.Finalizers, finalizer) {
		return nil
	}
	needed, err := c.needed(cidr)
	if err != nil {
		return err
	}
	if needed {
		return c.setReady(ctx, cidr, metav1.Condition{
			Status: metav1.ConditionFalse, Reason: networkingv1.ServiceCIDRReasonTerminating,
			Message: "There are still IPAddresses referencing the ServiceCIDR, please remove them or create a new ServiceCIDR",
		})
	}
	if left := grace - c.clock.Since(cidr.DeletionTimestamp.Time); left > 0 {
		c.loop.After(loop.KeyOf(cidr), left)
		return nil
	}
	cidr = cidr.DeepCopy()
	cidr.Finalizers = slices.DeleteFunc(cidr.Finalizers, func(f string) bool { return f == finalizer })
	if _, err := c.client.NetworkingV1().ServiceCIDRs().Update(ctx, cidr, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("remove the finalizer of servicecidr %s: %w", cidr.Name, err)
	}
	return nil
}

// needed tells whether a Service has an address of the range that no other range,
// none of which is to be deleted, holds too.
func (c *Controller) needed(cidr *networkingv1.ServiceCIDR) (bool, error) {
	all, err := c.cidrs.List(labels.Everything())
	if err != nil {
		return false, err
	}
	var others []netip.Prefix
	for _, o := range all {
		if o.DeletionTimestamp == nil && o.UID != cidr.UID {
			others = append(others, prefixes(o)...)
		}
	}
	own := prefixes(cidr)
	services, err := c.services.List(labels.Everything())
	if err != nil {
		return false, err
	}
	for _, s := range services {
		for _, text := range s.Spec.ClusterIPs {
			ip, err := netip.ParseAddr(text)
			if err == nil && holds(own, ip) && !holds(others, ip) {
				return true, nil
			}
		}
	}
	return false, nil
}

func prefixes(cidr *networkingv1.ServiceCIDR) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range cidr.Spec.CIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p)
		}
	}
	return out
}

func holds(ranges []netip.Prefix, ip netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// setReady writes the condition Ready unless it is so already.
func (c *Controller) setReady(ctx context.Context, cidr *networkingv1.ServiceCIDR, ready metav1.Condition) error {
	ready.Type = networkingv1.ServiceCIDRConditionReady
	ready.LastTransitionTime = metav1.NewTime(c.clock.Now())
	update := cidr.DeepCopy()
	if !meta.SetStatusCondition(&update.Status.Conditions, ready) {
		return nil
	}
	if _, err := c.client.NetworkingV1().ServiceCIDRs().UpdateStatus(ctx, update, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write the status of servicecidr %s: %w", cidr.Name, err)
	}
	return nil
}
