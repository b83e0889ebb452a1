// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/kplab/kplab/proxy"
)

// Index finds API objects by what stands in packets and rules: addresses, ports,
// chain names. It is what the API held when it was read.
type Index struct {
	services map[string]*corev1.Service // by NS/NAME
	slices   map[string][]*discoveryv1.EndpointSlice
	pods     map[string]*corev1.Pod
	podOf    map[netip.Addr]*corev1.Pod
	nodeOf   map[netip.Addr]*corev1.Node
	byAddr   map[entry]proxy.ServicePortName
	byPort   map[entry]proxy.ServicePortName // nodePorts; no address
	chains   map[string]ChainOwner           // iptables chains by the hash in their names; made when asked for
}

// entry is an address of a Service.
type entry struct {
	addr  netip.AddrPort
	proto string
}

// ChainOwner says what a chain is there for: a Service port, or one endpoint of it.
type ChainOwner struct {
	Port     proxy.ServicePortName
	Endpoint netip.AddrPort // invalid for the chains of a Service port
}

func loadIndex(ctx context.Context, c kubernetes.Interface) (*Index, error) {
	// Any version that the server has at hand will do, and is quickest.
	opts := metav1.ListOptions{ResourceVersion: "0"}
	services, err := c.CoreV1().Services("").List(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("read the Services: %w", err)
	}
	slices, err := c.DiscoveryV1().EndpointSlices("").List(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("read the EndpointSlices: %w", err)
	}
	pods, err := c.CoreV1().Pods("").List(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("read the pods: %w", err)
	}
	nodes, err := c.CoreV1().Nodes().List(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("read the nodes: %w", err)
	}
	return NewIndex(services.Items, slices.Items, pods.Items, nodes.Items), nil
}

// NewIndex makes an index of objects, which it keeps.
func NewIndex(services []corev1.Service, slices []discoveryv1.EndpointSlice, pods []corev1.Pod, nodes []corev1.Node) *Index {
	x := &Index{
		services: map[string]*corev1.Service{}, slices: map[string][]*discoveryv1.EndpointSlice{}, pods: map[string]*corev1.Pod{},
		podOf: map[netip.Addr]*corev1.Pod{}, nodeOf: map[netip.Addr]*corev1.Node{},
		byAddr: map[entry]proxy.ServicePortName{}, byPort: map[entry]proxy.ServicePortName{},
	}
	for i := range services {
		x.addService(&services[i])
	}
	for i := range slices {
		s := &slices[i]
		key := s.Namespace + "/" + s.Labels[discoveryv1.LabelServiceName]
		x.slices[key] = append(x.slices[key], s)
	}
	for i := range pods {
		p := &pods[i]
		x.pods[p.Namespace+"/"+p.Name] = p
		if p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		for _, ip := range p.Status.PodIPs {
			if a, err := netip.ParseAddr(ip.IP); err == nil {
				x.podOf[a] = p
			}
		}
	}
	for i := range nodes {
		for _, a := range nodes[i].Status.Addresses {
			if ip, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
				x.nodeOf[ip] = &nodes[i]
			}
		}
	}
	return x
}

func (x *Index) addService(s *corev1.Service) {
	x.services[s.Namespace+"/"+s.Name] = s
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		name := PortName(s, p)
		add := func(ip string) {
			if a, err := netip.ParseAddr(ip); err == nil {
				x.byAddr[entry{netip.AddrPortFrom(a, uint16(p.Port)), protoName(p.Protocol)}] = name
			}
		}
		for _, ip := range s.Spec.ClusterIPs {
			add(ip)
		}
		for _, ip := range s.Spec.ExternalIPs {
			add(ip)
		}
		for _, in := range s.Status.LoadBalancer.Ingress {
			add(in.IP)
		}
		if p.NodePort != 0 {
			x.byPort[entry{netip.AddrPortFrom(netip.Addr{}, uint16(p.NodePort)), protoName(p.Protocol)}] = name
		}
	}
}

// PortName is the name of a Service's port, as the proxy has it.
func PortName(s *corev1.Service, p *corev1.ServicePort) proxy.ServicePortName {
	proto := p.Protocol
	if proto == "" {
		proto = corev1.ProtocolTCP
	}
	return proxy.ServicePortName{Namespace: s.Namespace, Name: s.Name, Port: p.Name, Protocol: proto}
}

func protoName(p corev1.Protocol) string {
	if p == "" {
		return "tcp"
	}
	return strings.ToLower(string(p))
}

// Service returns a Service by "NS/NAME"; nil when there is none.
func (x *Index) Service(key string) *corev1.Service { return x.services[key] }

// Pod returns the pod that has an address; nil when none has.
func (x *Index) Pod(a netip.Addr) *corev1.Pod { return x.podOf[a] }

// Owner names the Service port that answers on an address: a cluster, external or
// load balancer address, or a nodePort on an address of a node.
func (x *Index) Owner(dst netip.AddrPort, proto string) (proxy.ServicePortName, string, bool) {
	if n, ok := x.byAddr[entry{dst, proto}]; ok {
		kind := "external address"
		if s := x.services[n.Namespace+"/"+n.Name]; s != nil {
			for _, ip := range s.Spec.ClusterIPs {
				if ip == dst.Addr().String() {
					kind = "cluster IP"
				}
			}
			for _, in := range s.Status.LoadBalancer.Ingress {
				if in.IP == dst.Addr().String() {
					kind = "load balancer address"
				}
			}
		}
		return n, kind, true
	}
	if x.nodeOf[dst.Addr()] != nil || dst.Addr().IsLoopback() {
		if n, ok := x.byPort[entry{netip.AddrPortFrom(netip.Addr{}, dst.Port()), proto}]; ok {
			return n, "nodePort", true
		}
	}
	return proxy.ServicePortName{}, "", false
}

// PortSpec returns the port of a Service that a name stands for.
func (x *Index) PortSpec(n proxy.ServicePortName) (*corev1.Service, *corev1.ServicePort) {
	s := x.services[n.Namespace+"/"+n.Name]
	if s == nil {
		return nil, nil
	}
	for i := range s.Spec.Ports {
		if p := &s.Spec.Ports[i]; p.Name == n.Port && strings.EqualFold(protoName(p.Protocol), string(n.Protocol)) {
			return s, p
		}
	}
	return s, nil
}

// EndpointRef is one endpoint of a Service with the objects that it comes from.
type EndpointRef struct {
	Addr  netip.AddrPort
	Slice string // NS/NAME of the EndpointSlice
	Pod   string // NS/NAME, or empty
	Node  string
	Ready bool
	// Serving and Terminating are the slice's other conditions.
	Serving, Terminating bool
}

// Endpoints lists the endpoints of a Service port, ready or not.
func (x *Index) Endpoints(n proxy.ServicePortName) []EndpointRef {
	var out []EndpointRef
	for _, s := range x.slices[n.Namespace+"/"+n.Name] {
		for _, p := range s.Ports {
			if deref(p.Name, "") != n.Port || !strings.EqualFold(string(deref(p.Protocol, corev1.ProtocolTCP)), string(n.Protocol)) || p.Port == nil {
				continue
			}
			for _, e := range s.Endpoints {
				for _, text := range e.Addresses {
					a, err := netip.ParseAddr(text)
					if err != nil {
						continue
					}
					r := EndpointRef{
						Addr: netip.AddrPortFrom(a, uint16(*p.Port)), Slice: s.Namespace + "/" + s.Name, Node: deref(e.NodeName, ""),
						Ready: deref(e.Conditions.Ready, true), Serving: deref(e.Conditions.Serving, true), Terminating: deref(e.Conditions.Terminating, false),
					}
					if t := e.TargetRef; t != nil && t.Kind == "Pod" {
						r.Pod = t.Namespace + "/" + t.Name
					}
					out = append(out, r)
				}
			}
		}
	}
	return out
}

func deref[T any](p *T, unset T) T {
	if p == nil {
		return unset
	}
	return *p
}

// Endpoint finds an endpoint of a Service port by its address.
func (x *Index) Endpoint(n proxy.ServicePortName, a netip.AddrPort) (EndpointRef, bool) {
	for _, e := range x.Endpoints(n) {
		if e.Addr == a {
			return e, true
		}
	}
	return EndpointRef{}, false
}

// Describe names who has an address: a pod, a node, or nobody that the API knows.
func (x *Index) Describe(a netip.Addr) (text string, objects []string) {
	if p := x.podOf[a]; p != nil {
		return fmt.Sprintf("pod %s/%s on %s", p.Namespace, p.Name, p.Spec.NodeName), []string{"pod/" + p.Namespace + "/" + p.Name}
	}
	if n := x.nodeOf[a]; n != nil {
		return "node " + n.Name, []string{"node/" + n.Name}
	}
	return "", nil
}

// DescribeEndpoint names an endpoint of a Service port with its pod and slice.
func (x *Index) DescribeEndpoint(n proxy.ServicePortName, a netip.AddrPort) (text string, objects []string) {
	e, ok := x.Endpoint(n, a)
	if !ok {
		text, objects = x.Describe(a.Addr())
		if text == "" {
			return a.String() + " (in no EndpointSlice of the Service now)", objects
		}
		return fmt.Sprintf("%s (%s; in no EndpointSlice of the Service now)", a, text), objects
	}
	who := ""
	if e.Pod != "" {
		who = "pod " + e.Pod
		objects = append(objects, "pod/"+e.Pod)
	} else if who, objects = x.Describe(a.Addr()); who == "" {
		who = "no pod"
	}
	if e.Node != "" && !strings.Contains(who, " on ") {
		who += " on " + e.Node
	}
	objects = append(objects, "endpointslice/"+e.Slice)
	return fmt.Sprintf("%s (%s, EndpointSlice %s)", a, who, afterSlash(e.Slice)), objects
}

func afterSlash(s string) string { return s[strings.LastIndexByte(s, '/')+1:] }

// candidates lists the addresses that may answer for a target.
func (x *Index) candidates(t Target) []netip.Addr {
	name, _, ok := x.Owner(t.Addr, "tcp")
	if !ok {
		name, _, ok = x.Owner(t.Addr, "udp")
	}
	if !ok {
		return []netip.Addr{t.Addr.Addr()}
	}
	var out []netip.Addr
	for _, e := range x.Endpoints(name) {
		out = append(out, e.Addr.Addr())
	}
	return out
}

// IPTablesChain finds the owner of a chain of mode iptables by its name:
// KUBE-SVC-, KUBE-SVL-, KUBE-EXT-, KUBE-FW- and the hash of a Service port, or
// KUBE-SEP- and the hash of an endpoint.
func (x *Index) IPTablesChain(name string) (ChainOwner, bool) {
	if x.chains == nil {
		x.chains = map[string]ChainOwner{}
		for _, s := range x.services {
			for i := range s.Spec.Ports {
				n := PortName(s, &s.Spec.Ports[i])
				key := n.String() + strings.ToLower(string(n.Protocol))
				x.chains["SVC-"+chainHash(key)] = ChainOwner{Port: n}
				for _, e := range x.Endpoints(n) {
					x.chains["SEP-"+chainHash(key+e.Addr.String())] = ChainOwner{Port: n, Endpoint: e.Addr}
				}
			}
		}
	}
	kind, id, ok := strings.Cut(strings.TrimPrefix(name, "KUBE-"), "-")
	if !ok {
		return ChainOwner{}, false
	}
	if kind != "SEP" {
		kind = "SVC"
	}
	o, ok := x.chains[kind+"-"+id]
	return o, ok
}

// chainHash is what upstream puts into chain names: the first 16 characters of the
// base32 form of a SHA-256.
func chainHash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return base32.StdEncoding.EncodeToString(sum[:10])
}

// ports are the ports of a Service with the name "NS/NAME:PORT" and a protocol.
func (x *Index) ports(port, proto string) []proxy.ServicePortName {
	key, name, _ := strings.Cut(port, ":")
	s := x.services[key]
	if s == nil {
		return nil
	}
	for i := range s.Spec.Ports {
		if n := PortName(s, &s.Spec.Ports[i]); n.Port == name && strings.EqualFold(string(n.Protocol), proto) {
			return []proxy.ServicePortName{n}
		}
	}
	return nil
}

// portsOf are the Service ports that have an endpoint.
func (x *Index) portsOf(a netip.AddrPort, proto string) []proxy.ServicePortName {
	var out []proxy.ServicePortName
	for _, s := range x.services {
		for i := range s.Spec.Ports {
			n := PortName(s, &s.Spec.Ports[i])
			if _, ok := x.Endpoint(n, a); ok && strings.EqualFold(string(n.Protocol), proto) {
				out = append(out, n)
			}
		}
	}
	slices.SortFunc(out, func(a, b proxy.ServicePortName) int { return strings.Compare(a.String(), b.String()) })
	return out
}
