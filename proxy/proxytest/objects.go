// SPDX-License-Identifier: Apache-2.0

package proxytest

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// namespace is where the objects of rows live.
const namespace = "default"

// vip is the cluster address of the Service that most rows use.
const vip = "10.96.0.50"

// Service makes a Service with one TCP port 80 and cluster address vip, changed
// by the options.
func Service(name string, opts ...func(*corev1.Service)) *corev1.Service {
	cluster := corev1.ServiceInternalTrafficPolicyCluster
	s := &corev1.Service{Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeClusterIP, ClusterIP: vip, SessionAffinity: corev1.ServiceAffinityNone,
		InternalTrafficPolicy: &cluster,
		Ports:                 []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}},
	}}
	s.Namespace, s.Name = namespace, name
	for _, o := range opts {
		o(s)
	}
	return s
}

// At sets the cluster address.
func At(ip string) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.ClusterIP = ip }
}

// Ports replaces the ports.
func Ports(ports ...corev1.ServicePort) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.Ports = ports }
}

// OverUDP makes all ports UDP.
func OverUDP(s *corev1.Service) {
	for i := range s.Spec.Ports {
		s.Spec.Ports[i].Protocol = corev1.ProtocolUDP
	}
}

// NodePort opens the first port on the nodes.
func NodePort(port int32) func(*corev1.Service) {
	return func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeNodePort
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
		s.Spec.Ports[0].NodePort = port
	}
}

// LoadBalancer gives the Service a load balancer address in a mode.
func LoadBalancer(ip string, mode corev1.LoadBalancerIPMode, ranges ...string) func(*corev1.Service) {
	return func(s *corev1.Service) {
		NodePort(30080)(s)
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.LoadBalancerSourceRanges = ranges
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: ip, IPMode: &mode}}
	}
}

// External adds an external address.
func External(ip string) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, ip) }
}

// ExternalLocal and InternalLocal set the traffic policies.
func ExternalLocal(s *corev1.Service) {
	s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
}

// InternalLocal sets internalTrafficPolicy: Local.
func InternalLocal(s *corev1.Service) {
	local := corev1.ServiceInternalTrafficPolicyLocal
	s.Spec.InternalTrafficPolicy = &local
}

// Sticky asks for ClientIP affinity.
func Sticky(seconds int32) func(*corev1.Service) {
	return func(s *corev1.Service) {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
	}
}

// Slice makes the EndpointSlice of a Service: each of its ports leads to the
// target port of the same position.
func Slice(svc *corev1.Service, targets []int32, eps ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: eps}
	s.Namespace, s.Name = svc.Namespace, svc.Name+"-a"
	s.Labels = map[string]string{discoveryv1.LabelServiceName: svc.Name}
	for i, p := range svc.Spec.Ports {
		name, protocol, target := p.Name, p.Protocol, targets[min(i, len(targets)-1)]
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: &name, Protocol: &protocol, Port: &target})
	}
	return s
}

// Ready is a pod that takes traffic.
func Ready(h *Host) discoveryv1.Endpoint { return endpoint(h, true, true, false) }

// NotReady is a pod whose readiness probe fails.
func NotReady(h *Host) discoveryv1.Endpoint { return endpoint(h, false, false, false) }

// Draining is a pod that is being deleted and still serves.
func Draining(h *Host) discoveryv1.Endpoint { return endpoint(h, false, true, true) }

// Dying is a pod that is being deleted and does not serve any more.
func Dying(h *Host) discoveryv1.Endpoint { return endpoint(h, false, false, true) }

func endpoint(h *Host, ready, serving, terminating bool) discoveryv1.Endpoint {
	node := h.Node
	e := discoveryv1.Endpoint{
		Addresses:  []string{h.IP.String()},
		Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
	}
	if node != "" {
		e.NodeName = &node
	}
	return e
}

// hints adds topology hints.
func hints(e discoveryv1.Endpoint, zone, node string) discoveryv1.Endpoint {
	e.Hints = &discoveryv1.EndpointHints{}
	if zone != "" {
		e.Hints.ForZones = []discoveryv1.ForZone{{Name: zone}}
	}
	if node != "" {
		e.Hints.ForNodes = []discoveryv1.ForNode{{Name: node}}
	}
	return e
}
