// SPDX-License-Identifier: Apache-2.0

// Package kubernetessvc keeps the Service default/kubernetes, with its Endpoints and
// its EndpointSlice: the way from a pod to the API. The Service has no selector; its
// endpoints are the API server's own addresses.
package kubernetessvc

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/internal/settle"
)

// The names are upstream's; clients in pods know them by heart.
const (
	name        = "kubernetes"
	portName    = "https"
	servicePort = 443
)

// Controller keeps the Service.
type Controller struct {
	loop      *loop.Loop[loop.Key]
	client    kubernetes.Interface
	config    loop.Config
	services  corelisters.ServiceLister
	endpoints corelisters.EndpointsLister
	slices    discoverylisters.EndpointSliceLister
}

// New makes the controller and subscribes it to Services, Endpoints, EndpointSlices
// and namespaces.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	core := d.Informers.Core().V1()
	endpointSlices := d.Informers.Discovery().V1().EndpointSlices()
	c := &Controller{
		client:    d.Client,
		config:    d.Config,
		services:  core.Services().Lister(),
		endpoints: core.Endpoints().Lister(),
		slices:    endpointSlices.Lister(),
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "kubernetes-service", Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "services", core.Services().Informer(), func(old, cur *corev1.Service) { look(c, old, cur) })
	loop.Watch(c.loop, "endpoints", core.Endpoints().Informer(), func(old, cur *corev1.Endpoints) { look(c, old, cur) })
	loop.Watch(c.loop, "endpointslices", endpointSlices.Informer(), func(old, cur *discoveryv1.EndpointSlice) { look(c, old, cur) })
	loop.Watch(c.loop, "namespaces", core.Namespaces().Informer(), func(old, cur *corev1.Namespace) {
		if old == nil && cur.Name == metav1.NamespaceDefault {
			c.loop.Add(key())
		}
	})
	return c
}

func key() loop.Key { return loop.Key{Namespace: metav1.NamespaceDefault, Name: name} }

// look puts the key in when the event is about one of the three objects.
func look[T interface {
	comparable
	metav1.Object
}](c *Controller, old, cur T) {
	var none T
	obj := cur
	if obj == none {
		obj = old
	}
	if loop.KeyOf(obj) == key() {
		c.loop.Add(key())
	}
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	if !c.config.ServiceCIDR.IsValid() || len(c.config.APIAddresses) == 0 {
		return errors.New("keep the kubernetes service: the service range or the API's address is not configured")
	}
	c.loop.Add(key())
	return c.loop.Run(ctx)
}

// sync makes the three objects true.
func (c *Controller) sync(ctx context.Context, _ loop.Key) error {
	if err := c.keepService(ctx); err != nil {
		if apierrors.IsNotFound(err) {
			return nil // no namespace yet: its event brings the loop back
		}
		return err
	}
	return errors.Join(c.keepEndpoints(ctx), c.keepSlice(ctx))
}

// clusterIP is the first address of the service range.
func (c *Controller) clusterIP() netip.Addr { return c.config.ServiceCIDR.Masked().Addr().Next() }

func (c *Controller) keepService(ctx context.Context) error {
	services := c.client.CoreV1().Services(metav1.NamespaceDefault)
	wanted := c.service()
	stored, err := c.services.Services(metav1.NamespaceDefault).Get(name)
	switch {
	case apierrors.IsNotFound(err):
		if _, err = services.Create(ctx, wanted, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			if apierrors.IsNotFound(err) {
				return err
			}
			return fmt.Errorf("create service %s: %w", name, err)
		}
		return nil
	case err != nil:
		return err
	case stored.DeletionTimestamp != nil:
		return nil
	}
	update := stored.DeepCopy()
	update.Spec.Ports, update.Spec.Selector, update.Spec.Type = wanted.Spec.Ports, nil, wanted.Spec.Type
	maps.Copy(labelsOf(&update.ObjectMeta), wanted.Labels)
	if equality.Semantic.DeepEqual(stored.Spec, update.Spec) && maps.Equal(stored.Labels, update.Labels) {
		return nil
	}
	if _, err := services.Update(ctx, update, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("update service %s: %w", name, err)
	}
	return nil
}

func labelsOf(meta *metav1.ObjectMeta) map[string]string {
	if meta.Labels == nil {
		meta.Labels = map[string]string{}
	}
	return meta.Labels
}

func (c *Controller) service() *corev1.Service {
	ip := c.clusterIP()
	family, policy := corev1.IPv4Protocol, corev1.IPFamilyPolicySingleStack
	if ip.Is6() {
		family = corev1.IPv6Protocol
	}
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: metav1.NamespaceDefault,
			Labels: map[string]string{"component": "apiserver", "provider": "kubernetes"},
		},
		Spec: corev1.ServiceSpec{
			Type:            corev1.ServiceTypeClusterIP,
			ClusterIP:       ip.String(),
			ClusterIPs:      []string{ip.String()},
			IPFamilies:      []corev1.IPFamily{family},
			IPFamilyPolicy:  &policy,
			SessionAffinity: corev1.ServiceAffinityNone,
			Ports: []corev1.ServicePort{{
				Name: portName, Protocol: corev1.ProtocolTCP, Port: servicePort,
				TargetPort: intstr.FromInt32(c.port()),
			}},
		},
	}
}

func (c *Controller) port() int32 { return int32(c.config.APIAddresses[0].Port()) }

// addresses returns the API's addresses of the Service's family, sorted.
func (c *Controller) addresses() []netip.Addr {
	var out []netip.Addr
	for _, a := range c.config.APIAddresses {
		if a.Addr().Is6() == c.clusterIP().Is6() {
			out = append(out, a.Addr())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

func (c *Controller) keepEndpoints(ctx context.Context) error {
	client := c.client.CoreV1().Endpoints(metav1.NamespaceDefault)
	subset := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Name: portName, Port: c.port(), Protocol: corev1.ProtocolTCP}}}
	for _, a := range c.addresses() {
		subset.Addresses = append(subset.Addresses, corev1.EndpointAddress{IP: a.String()})
	}
	// The slice is written here too, so nobody has to derive one from these.
	labels := map[string]string{discoveryv1.LabelSkipMirror: "true"}
	stored, err := c.endpoints.Endpoints(metav1.NamespaceDefault).Get(name)
	if apierrors.IsNotFound(err) {
		_, err = client.Create(ctx, &corev1.Endpoints{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: metav1.NamespaceDefault, Labels: labels},
			Subsets:    []corev1.EndpointSubset{subset},
		}, metav1.CreateOptions{})
		return raced(err, "create endpoints "+name)
	}
	if err != nil {
		return err
	}
	update := stored.DeepCopy()
	update.Subsets = []corev1.EndpointSubset{subset}
	maps.Copy(labelsOf(&update.ObjectMeta), labels)
	if equality.Semantic.DeepEqual(stored, update) {
		return nil
	}
	_, err = client.Update(ctx, update, metav1.UpdateOptions{})
	return raced(err, "update endpoints "+name)
}

func (c *Controller) keepSlice(ctx context.Context) error {
	client := c.client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault)
	wanted := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: metav1.NamespaceDefault,
			Labels: map[string]string{discoveryv1.LabelServiceName: name},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	if c.clusterIP().Is6() {
		wanted.AddressType = discoveryv1.AddressTypeIPv6
	}
	port, protocol, label, ready := c.port(), corev1.ProtocolTCP, portName, true
	wanted.Ports = []discoveryv1.EndpointPort{{Name: &label, Port: &port, Protocol: &protocol}}
	for _, a := range c.addresses() {
		wanted.Endpoints = append(wanted.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{a.String()}, Conditions: discoveryv1.EndpointConditions{Ready: &ready},
		})
	}
	stored, err := c.slices.EndpointSlices(metav1.NamespaceDefault).Get(name)
	if apierrors.IsNotFound(err) {
		_, err = client.Create(ctx, wanted, metav1.CreateOptions{})
		return raced(err, "create endpoint slice "+name)
	}
	if err != nil {
		return err
	}
	if stored.AddressType != wanted.AddressType {
		// The type cannot be changed; the deletion's event makes a new one.
		return raced(client.Delete(ctx, name, metav1.DeleteOptions{}), "replace endpoint slice "+name)
	}
	update := stored.DeepCopy()
	update.Endpoints, update.Ports = wanted.Endpoints, wanted.Ports
	maps.Copy(labelsOf(&update.ObjectMeta), wanted.Labels)
	if equality.Semantic.DeepEqual(stored, update) {
		return nil
	}
	_, err = client.Update(ctx, update, metav1.UpdateOptions{})
	return raced(err, "update endpoint slice "+name)
}

// raced drops the errors that mean that the cache is a moment behind: its next event
// brings the loop back.
func raced(err error, what string) error {
	if err == nil || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}
