// SPDX-License-Identifier: Apache-2.0

// Package loadbalancer gives Services of type LoadBalancer addresses of a pool, and
// says which node announces each. It is what a load balancer for bare metal does (see
// MetalLB in layer 2 mode); a lab has none until it gets a pool.
//
// The pool is in the ConfigMap load-balancer of kube-system. The address goes to
// status.loadBalancer with ipMode VIP, the elected node to the annotation
// kplab/announced-by, where that node's announcer (package node/announce) reads it
// and answers ARP for the address. The finalizer of upstream's load balancers keeps a
// Service until its address is taken back.
//
// Nodes are checked once a second from outside of the cluster, as a provider's load
// balancer does it: at the Service's healthCheckNodePort where its policy is Local,
// else at the health port of the node's proxy.
package loadbalancer

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/internal/settle"
)

// Where the pool is kept.
const (
	Namespace = metav1.NamespaceSystem
	ConfigMap = "load-balancer"
	PoolKey   = "pool"
)

const (
	// Class is the loadBalancerClass that means this load balancer; so does none.
	Class = "kplab/l2"
	// AnnotationNode names the node that announces the Service's addresses; empty
	// when none can. Its presence says that the Service is ours.
	AnnotationNode = "kplab/announced-by"
	// finalizer is upstream's.
	finalizer = "service.kubernetes.io/load-balancer-cleanup"
)

// all is the key that stands for the pool and everybody who is concerned by it.
var all = loop.Key{}

// Controller gives addresses to Services.
type Controller struct {
	loop     *loop.Loop[loop.Key]
	client   kubernetes.Interface
	plan     loop.AddressPlan
	dial     loop.Dialer
	recorder record.EventRecorder
	clock    clock.WithTicker
	services corelisters.ServiceLister
	configs  corelisters.ConfigMapLister
	nodes    corelisters.NodeLister
	slices   discoverylisters.EndpointSliceLister

	// These belong to the one worker.
	book    *book
	pool    Pool
	state   poolState
	poolRev string // resource version of the ConfigMap that pool is from
	// waiting are the Services without an address, with what they were told.
	waiting map[loop.Key]string

	// checks is shared with the health checks.
	checks checks
}

// poolState says what is known of the pool.
type poolState int

const (
	poolUnread poolState = iota
	// poolNone: there is no load balancer.
	poolNone
	poolGood
)

// New makes the controller and subscribes it to Services, EndpointSlices, Nodes and
// the pool's ConfigMap.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	core := d.Informers.Core().V1()
	endpointSlices := d.Informers.Discovery().V1().EndpointSlices()
	c := &Controller{
		client: d.Client, plan: d.Config.Addresses, dial: d.Config.DialOutside, clock: d.Clock,
		recorder: d.Recorder("loadbalancer-controller"),
		services: core.Services().Lister(), configs: core.ConfigMaps().Lister(),
		nodes: core.Nodes().Lister(), slices: endpointSlices.Lister(),
		waiting: map[loop.Key]string{},
	}
	c.checks.init()
	c.loop = loop.New(loop.Options[loop.Key]{Name: "loadbalancer", Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "services", core.Services().Informer(), func(old, cur *corev1.Service) {
		if (old != nil && concerned(old)) || (cur != nil && concerned(cur)) {
			c.loop.Add(loop.KeyOf(ptrOr(cur, old)))
		}
	})
	loop.Watch(c.loop, "configmaps", core.ConfigMaps().Informer(), func(old, cur *corev1.ConfigMap) {
		if m := ptrOr(cur, old); m.Namespace == Namespace && m.Name == ConfigMap {
			c.loop.Add(all)
		}
	})
	loop.Watch(c.loop, "nodes", core.Nodes().Informer(), func(old, cur *corev1.Node) {
		if old == nil || cur == nil || candidateOf(old) != candidateOf(cur) ||
			!equality.Semantic.DeepEqual(old.Status.Addresses, cur.Status.Addresses) {
			c.loop.Add(all)
		}
	})
	loop.Watch(c.loop, "endpointslices", endpointSlices.Informer(), func(old, cur *discoveryv1.EndpointSlice) {
		s := ptrOr(cur, old)
		svc, err := c.services.Services(s.Namespace).Get(s.Labels[discoveryv1.LabelServiceName])
		if err == nil && concerned(svc) && isLocal(svc) {
			c.loop.Add(loop.KeyOf(svc))
		}
	})
	return c
}

func ptrOr[T any](a, b *T) *T {
	if a != nil {
		return a
	}
	return b
}

// concerned says that a Service is, was or wants to be served here.
func concerned(svc *corev1.Service) bool {
	_, ours := svc.Annotations[AnnotationNode]
	return ours || wants(svc)
}

// wants says that a Service asks for this load balancer.
func wants(svc *corev1.Service) bool {
	return svc.Spec.Type == corev1.ServiceTypeLoadBalancer && ptr.Deref(svc.Spec.LoadBalancerClass, Class) == Class
}

func isLocal(svc *corev1.Service) bool {
	return svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works, and checks the nodes' health, until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var checking sync.WaitGroup
	if c.dial != nil {
		checking.Go(func() { c.checkNodes(ctx) })
	}
	c.loop.Add(all)
	err := c.loop.Run(ctx)
	cancel()
	checking.Wait()
	return err
}

// sync makes one Service true.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	if err := c.begin(); err != nil {
		return err
	}
	c.readPool()
	if key == all {
		services, err := c.services.List(labels.Everything())
		if err != nil {
			return err
		}
		for _, svc := range services {
			if concerned(svc) {
				c.loop.Add(loop.KeyOf(svc))
			}
		}
		return nil
	}
	svc, err := c.services.Services(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		c.forget(key)
		return nil
	}
	if err != nil {
		return err
	}
	if c.state == poolUnread {
		return nil // its ConfigMap cannot be read: what is there stays as it is
	}
	if c.state == poolGood && wants(svc) && svc.DeletionTimestamp == nil {
		return c.provide(ctx, svc)
	}
	return c.withdraw(ctx, svc)
}

// begin fills the book with what the API has, once.
func (c *Controller) begin() error {
	if c.book != nil {
		return nil
	}
	services, err := c.services.List(labels.Everything())
	if err != nil {
		return err
	}
	c.book = newBook()
	for _, svc := range services {
		if _, ours := svc.Annotations[AnnotationNode]; ours {
			c.hold(svc, current(svc))
		}
	}
	return nil
}

// readPool takes over a pool that has changed. One with a mistake changes nothing.
func (c *Controller) readPool() {
	m, err := c.configs.ConfigMaps(Namespace).Get(ConfigMap)
	if err != nil || m.DeletionTimestamp != nil {
		c.pool, c.state, c.poolRev = Pool{}, poolNone, ""
		return
	}
	if m.ResourceVersion == c.poolRev {
		return
	}
	c.poolRev = m.ResourceVersion
	pool, err := ParsePool(m.Data[PoolKey], c.plan)
	if err != nil {
		c.recorder.Event(m, corev1.EventTypeWarning, "InvalidPool", err.Error()+"; the pool of before stays in force")
		return
	}
	c.pool, c.state = pool, poolGood
}

// hold notes the addresses of a Service, and calls those that wait when one became
// free.
func (c *Controller) hold(svc *corev1.Service, addrs []netip.Addr) {
	t := tenantOf(svc)
	t.addrs = addrs
	if c.book.hold(t) {
		c.callWaiting()
	}
}

func (c *Controller) callWaiting() {
	for key := range c.waiting {
		c.loop.Add(key)
	}
}

// forget drops a Service that is gone.
func (c *Controller) forget(key loop.Key) {
	delete(c.waiting, key)
	c.checks.drop(key)
	if c.book.hold(&tenant{key: key}) {
		c.callWaiting()
	}
}

// provide gives a Service its addresses and a node.
func (c *Controller) provide(ctx context.Context, svc *corev1.Service) error {
	key, had := loop.KeyOf(svc), current(svc)
	addrs, err := c.book.assign(svc, c.pool, c.nodeAddresses())
	if err != nil {
		if c.waiting[key] != err.Error() {
			c.recorder.Eventf(svc, corev1.EventTypeWarning, "SyncLoadBalancerFailed", "Error syncing load balancer: %v", err)
		}
		c.waiting[key] = err.Error()
		// What it has and may keep, it keeps: a slip in a wish cuts nobody off.
		addrs = slices.DeleteFunc(slices.Clone(had), func(a netip.Addr) bool {
			return c.pool.check(a) != nil || c.book.free(tenantOf(svc), a, nil) != nil
		})
		if len(addrs) == 0 {
			return c.withdraw(ctx, svc)
		}
	} else {
		delete(c.waiting, key)
	}
	c.hold(svc, addrs)
	node, err := c.electFor(svc, addrs[0])
	if err != nil {
		return err
	}
	changed := !slices.Equal(had, addrs)
	if changed {
		c.recorder.Event(svc, corev1.EventTypeNormal, "EnsuringLoadBalancer", "Ensuring load balancer")
	}
	before, named := svc.Annotations[AnnotationNode]
	if !slices.Contains(svc.Finalizers, finalizer) || !named || before != node {
		if svc, err = c.patch(ctx, svc, "", map[string]any{"metadata": map[string]any{
			"resourceVersion": svc.ResourceVersion,
			"finalizers":      withFinalizer(svc.Finalizers),
			"annotations":     map[string]any{AnnotationNode: node},
		}}); err != nil {
			return err
		}
	}
	if named && before != node && node == "" {
		c.recorder.Event(svc, corev1.EventTypeWarning, "UnAvailableLoadBalancer", "There are no available nodes for LoadBalancer")
	}
	wanted := ingressOf(addrs)
	if equality.Semantic.DeepEqual(svc.Status.LoadBalancer.Ingress, wanted) {
		return nil
	}
	if svc, err = c.patchStatus(ctx, svc, wanted); err != nil {
		return err
	}
	if changed {
		c.recorder.Eventf(svc, corev1.EventTypeNormal, "IPAllocated", "Assigned IP %q", texts(addrs))
		c.recorder.Event(svc, corev1.EventTypeNormal, "EnsuredLoadBalancer", "Ensured load balancer")
	}
	return nil
}

func withFinalizer(have []string) []string {
	if slices.Contains(have, finalizer) {
		return have
	}
	return append(slices.Clone(have), finalizer)
}

func texts(addrs []netip.Addr) (out []string) {
	for _, a := range addrs {
		out = append(out, a.String())
	}
	return out
}

func ingressOf(addrs []netip.Addr) (out []corev1.LoadBalancerIngress) {
	for _, a := range addrs {
		out = append(out, corev1.LoadBalancerIngress{IP: a.String(), IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)})
	}
	return out
}

// withdraw takes a Service's addresses back, if they are ours.
func (c *Controller) withdraw(ctx context.Context, svc *corev1.Service) error {
	key := loop.KeyOf(svc)
	if !wants(svc) || svc.DeletionTimestamp != nil || c.state == poolNone {
		delete(c.waiting, key)
	}
	c.checks.drop(key)
	if _, ours := svc.Annotations[AnnotationNode]; !ours {
		c.hold(svc, nil)
		return nil
	}
	c.recorder.Event(svc, corev1.EventTypeNormal, "DeletingLoadBalancer", "Deleting load balancer")
	var err error
	if len(svc.Status.LoadBalancer.Ingress) > 0 {
		// The proxies let go of the address before somebody else may get it.
		if svc, err = c.patchStatus(ctx, svc, nil); err != nil {
			return ignoreGone(err)
		}
	}
	c.recorder.Event(svc, corev1.EventTypeNormal, "DeletedLoadBalancer", "Deleted load balancer")
	_, err = c.patch(ctx, svc, "", map[string]any{"metadata": map[string]any{
		"resourceVersion": svc.ResourceVersion,
		"finalizers":      slices.DeleteFunc(slices.Clone(svc.Finalizers), func(f string) bool { return f == finalizer }),
		"annotations":     map[string]any{AnnotationNode: nil},
	}})
	if err := ignoreGone(err); err != nil {
		return err
	}
	c.hold(svc, nil)
	return nil
}

func ignoreGone(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func (c *Controller) patchStatus(ctx context.Context, svc *corev1.Service, ingress []corev1.LoadBalancerIngress) (*corev1.Service, error) {
	return c.patch(ctx, svc, "status", map[string]any{
		"metadata": map[string]any{"resourceVersion": svc.ResourceVersion},
		"status":   map[string]any{"loadBalancer": map[string]any{"ingress": ingress}},
	})
}

// patch changes a Service unless somebody else did meanwhile.
func (c *Controller) patch(ctx context.Context, svc *corev1.Service, subresource string, change map[string]any) (*corev1.Service, error) {
	data, err := json.Marshal(change)
	if err != nil {
		return nil, err
	}
	var sub []string
	if subresource != "" {
		sub = append(sub, subresource)
	}
	out, err := c.client.CoreV1().Services(svc.Namespace).Patch(ctx, svc.Name, types.MergePatchType, data, metav1.PatchOptions{}, sub...)
	if err != nil {
		return nil, fmt.Errorf("patch service %s/%s: %w", svc.Namespace, svc.Name, err)
	}
	return out, nil
}

// electFor chooses the node for a Service and has the candidates checked.
func (c *Controller) electFor(svc *corev1.Service, addr netip.Addr) (string, error) {
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return "", err
	}
	local := isLocal(svc)
	var there map[string]bool
	if local {
		ofService, err := c.slices.EndpointSlices(svc.Namespace).List(labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: svc.Name}))
		if err != nil {
			return "", err
		}
		there = nodesWithEndpoints(ofService)
	}
	port := proxyHealthPort
	if local && svc.Spec.HealthCheckNodePort != 0 {
		port = int(svc.Spec.HealthCheckNodePort)
	}
	var candidates []candidate
	var targets []target
	for _, n := range nodes {
		cand := candidateOf(n)
		cand.endpoints = there[n.Name]
		if ip, ok := internalIP(n); ok && !cand.excluded && (!local || cand.endpoints) {
			t := target{n.Name, netip.AddrPortFrom(ip, uint16(port))}
			targets = append(targets, t)
			cand.healthy = !c.checks.sick(t)
		}
		candidates = append(candidates, cand)
	}
	c.checks.want(loop.KeyOf(svc), targets)
	return elect(addr, candidates, local), nil
}

// nodeAddresses are addresses that no Service may have, with the node's name.
func (c *Controller) nodeAddresses() map[netip.Addr]string {
	out := map[netip.Addr]string{}
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return out // a lister of a cache does not fail
	}
	for _, n := range nodes {
		for _, a := range n.Status.Addresses {
			if ip, err := netip.ParseAddr(a.Address); err == nil {
				out[ip] = n.Name
			}
		}
	}
	return out
}

// Holders lists which Services have which addresses, by the Services' status, sorted
// by address: for showing.
func Holders(services []*corev1.Service) []Holder {
	var out []Holder
	for _, svc := range services {
		node, ours := svc.Annotations[AnnotationNode]
		if !ours && !wants(svc) {
			continue
		}
		addrs := current(svc)
		if len(addrs) == 0 {
			addrs = []netip.Addr{{}}
		}
		for _, a := range addrs {
			out = append(out, Holder{Service: svc.Namespace + "/" + svc.Name, Address: a, Node: node})
		}
	}
	slices.SortFunc(out, func(a, b Holder) int {
		if n := a.Address.Compare(b.Address); n != 0 {
			return n
		}
		return strings.Compare(a.Service, b.Service)
	})
	return out
}

// Holder is one Service at one address.
type Holder struct {
	Service string `json:"service"`
	// Address is the zero value for a Service that waits for one.
	Address netip.Addr `json:"address,omitzero"`
	// Node announces the address; empty when none can.
	Node string `json:"node,omitempty"`
}

// keysOf is the keys of m, for tests and logs in order.
func keysOf[V any](m map[loop.Key]V) []loop.Key {
	return slices.SortedFunc(maps.Keys(m), compareKeys)
}
