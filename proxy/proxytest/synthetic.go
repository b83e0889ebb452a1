// SPDX-License-Identifier: Apache-2.0

package proxytest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kplab/kplab/proxy"
)

// Synthetic makes n Services of e endpoints each, half of them on node n1: the
// load of benchmarks, and of tests that need many Services.
func Synthetic(n, e int) (services []*corev1.Service, eps []*discoveryv1.EndpointSlice) {
	port, tcp, name := int32(8080), corev1.ProtocolTCP, "http"
	node1, node2 := "n1", "n2"
	for i := range n {
		s := &corev1.Service{Spec: corev1.ServiceSpec{
			ClusterIP: netip.AddrFrom4([4]byte{10, 100, byte(i >> 8), byte(i)}).String(),
			Ports:     []corev1.ServicePort{{Name: name, Port: 80, Protocol: tcp}},
		}}
		s.Namespace, s.Name = "bench", fmt.Sprintf("svc-%05d", i)
		services = append(services, s)
		slice := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &tcp}}}
		slice.Namespace, slice.Name, slice.Labels = s.Namespace, s.Name+"-a", map[string]string{discoveryv1.LabelServiceName: s.Name}
		for j := range e {
			k := i*e + j
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
				Addresses: []string{netip.AddrFrom4([4]byte{10, byte(200 + k>>16), byte(k >> 8), byte(k)}).String()},
				NodeName:  []*string{&node1, &node2}[j%2],
			})
		}
		eps = append(eps, slice)
	}
	return services, eps
}

// SyntheticFacts are the facts of node n1 in a cluster with the Services of
// Synthetic.
func SyntheticFacts() proxy.Facts {
	return proxy.Facts{
		NodeName: "n1", NodeIPs: []netip.Addr{netip.MustParseAddr("172.18.0.2")},
		ClusterCIDRs:       []netip.Prefix{netip.MustParsePrefix("10.200.0.0/13")},
		ServiceCIDRs:       []netip.Prefix{netip.MustParsePrefix("10.100.0.0/16")},
		LocalhostNodePorts: true,
	}
}

// SyntheticDecider holds the Services of Synthetic.
func SyntheticDecider(n, e int) *proxy.Decider {
	svcs, eps := Synthetic(n, e)
	d := proxy.NewDecider()
	for i := range svcs {
		d.SetService(svcs[i])
		d.SetSlice(eps[i])
	}
	return d
}

// Churner changes a set of Services at random: all kinds of Services, policies
// and conditions come and go.
type Churner struct {
	*rand.Rand
	// Decider holds what there is now.
	Decider  *proxy.Decider
	services map[string]*corev1.Service
	slices   map[string]*discoveryv1.EndpointSlice
}

// NewChurner makes the same changes for the same seed.
func NewChurner(seed uint64) *Churner {
	return &Churner{rand.New(rand.NewPCG(seed, 1)), proxy.NewDecider(), map[string]*corev1.Service{}, map[string]*discoveryv1.EndpointSlice{}}
}

// Step makes one change.
func (c *Churner) Step() {
	i := c.IntN(8)
	svcs, eps := Synthetic(i+1, c.IntN(6))
	svc, slice := svcs[i], eps[i]
	key := svc.Name
	switch c.IntN(6) {
	case 0:
		c.Decider.DeleteService(svc.Namespace, svc.Name)
		delete(c.services, key)
		return
	case 1:
		c.Decider.DeleteSlice(slice.Namespace, slice.Name)
		delete(c.slices, key)
		return
	case 2, 3:
		svc.Spec.Type = corev1.ServiceTypeLoadBalancer
		svc.Spec.Ports[0].NodePort = int32(30000 + i)
		if c.IntN(2) == 0 {
			svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			svc.Spec.HealthCheckNodePort = int32(31000 + i)
		}
		if c.IntN(2) == 0 {
			local := corev1.ServiceInternalTrafficPolicyLocal
			svc.Spec.InternalTrafficPolicy = &local
		}
		if c.IntN(2) == 0 {
			svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			if seconds := int32(100 * (1 + c.IntN(2))); c.IntN(2) == 0 {
				svc.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
			}
		}
		if c.IntN(2) == 0 {
			svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: fmt.Sprintf("203.0.113.%d", i)}}
			svc.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24", "172.18.0.0/16"}[:c.IntN(3)]
		}
		if c.IntN(2) == 0 {
			svc.Spec.ExternalIPs = []string{fmt.Sprintf("192.0.2.%d", c.IntN(4))}
		}
	}
	for j := range slice.Endpoints {
		yes, no := true, false
		switch c.IntN(4) {
		case 0:
			slice.Endpoints[j].Conditions = discoveryv1.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}
		case 1:
			slice.Endpoints[j].Conditions = discoveryv1.EndpointConditions{Ready: &no, Serving: &no}
		}
	}
	c.Decider.SetService(svc)
	c.services[key] = svc
	if c.IntN(3) > 0 {
		c.Decider.SetSlice(slice)
		c.slices[key] = slice
	}
}

// Fresh decides what there is now without any memory of the changes.
func (c *Churner) Fresh() *proxy.Snapshot {
	var svcs []*corev1.Service
	for _, s := range c.services {
		svcs = append(svcs, s)
	}
	var eps []*discoveryv1.EndpointSlice
	for _, s := range c.slices {
		eps = append(eps, s)
	}
	return proxy.Decide(SyntheticFacts(), svcs, eps)
}
