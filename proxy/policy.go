// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// LabelServiceProxyName marks a Service that another proxy serves. Services
// with this label are left alone, whatever its value, unless it is our own name.
const LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// AnnotationScheduler names the IPVS scheduler of one Service, instead of the node's
// own. Only mode ipvs has schedulers.
const AnnotationScheduler = "kplab.io/ipvs-scheduler"

// Facts is what a decision depends on besides the Service and its slices: the
// node and the settings of its proxy.
type Facts struct {
	// NodeName and NodeIPs name the node and its addresses; the first of each
	// family is its primary address and makes the node take part in that family.
	NodeName string
	NodeIPs  []netip.Addr
	// Zone is the node's topology.kubernetes.io/zone label.
	Zone string
	// ClusterCIDRs, ServiceCIDRs, MasqueradeAll and LocalhostNodePorts are as in
	// Snapshot.
	ClusterCIDRs       []netip.Prefix
	ServiceCIDRs       []netip.Prefix
	MasqueradeAll      bool
	LocalhostNodePorts bool
	// NodePortAddresses limits where nodePorts answer: prefixes, or the words
	// "primary", "localhost" and "all". Empty means all.
	NodePortAddresses []string
	// ProxyName is this proxy's own value of LabelServiceProxyName; empty for
	// the default proxy.
	ProxyName string
}

func (f *Facts) equal(o *Facts) bool {
	return f.NodeName == o.NodeName && f.Zone == o.Zone && f.MasqueradeAll == o.MasqueradeAll &&
		f.LocalhostNodePorts == o.LocalhostNodePorts && f.ProxyName == o.ProxyName &&
		slices.Equal(f.NodeIPs, o.NodeIPs) && slices.Equal(f.ClusterCIDRs, o.ClusterCIDRs) &&
		slices.Equal(f.ServiceCIDRs, o.ServiceCIDRs) &&
		slices.Equal(f.NodePortAddresses, o.NodePortAddresses)
}

func (f *Facts) families() []corev1.IPFamily {
	var out []corev1.IPFamily
	for _, want := range []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol} {
		if slices.ContainsFunc(f.NodeIPs, func(a netip.Addr) bool { return FamilyOf(a) == want }) {
			out = append(out, want)
		}
	}
	return out
}

// Decide makes the snapshot of one node. It is pure: the same input gives the
// same snapshot, and the objects are only read. Slices are assigned to Services
// by namespace and the label kubernetes.io/service-name; others are ignored.
//
// A running proxy uses [Decider], which gives the same answer without deciding
// unchanged Services again.
func Decide(facts Facts, services []*corev1.Service, eps []*discoveryv1.EndpointSlice) *Snapshot {
	d := NewDecider()
	for _, s := range services {
		d.SetService(s)
	}
	for _, s := range eps {
		d.SetSlice(s)
	}
	return d.Decide(facts)
}

// serviceDecision is everything that follows from one Service, its slices and
// the facts.
type serviceDecision struct {
	ports     []*ServicePort
	health    *HealthCheck
	endpoints [2]int // of each family, IPv4 first
}

// familyIndex is a family's place in serviceDecision.endpoints.
func familyIndex(f corev1.IPFamily) int {
	if f == corev1.IPv6Protocol {
		return 1
	}
	return 0
}

// served says whether a Service is this proxy's business: it has a cluster
// address and no other proxy's label.
func served(f *Facts, svc *corev1.Service) bool {
	if svc.Spec.Type == corev1.ServiceTypeExternalName || svc.Spec.ClusterIP == "" || svc.Spec.ClusterIP == corev1.ClusterIPNone {
		return false
	}
	if _, headless := svc.Labels[corev1.IsHeadlessService]; headless {
		return false
	}
	name, labelled := svc.Labels[LabelServiceProxyName]
	return !labelled || (f.ProxyName != "" && name == f.ProxyName)
}

// decideService decides all ports of one Service in all families.
func decideService(f *Facts, svc *corev1.Service, eps []*discoveryv1.EndpointSlice) serviceDecision {
	var out serviceDecision
	if !served(f, svc) {
		return out
	}
	localReady := map[netip.Addr]bool{}
	for _, family := range f.families() {
		vip := clusterIP(svc, family)
		if !vip.IsValid() {
			continue
		}
		for i := range svc.Spec.Ports {
			name := ServicePortName{Namespace: svc.Namespace, Name: svc.Name, Port: svc.Spec.Ports[i].Name, Protocol: svc.Spec.Ports[i].Protocol}
			if name.Protocol == "" {
				name.Protocol = corev1.ProtocolTCP
			}
			all := collect(name, family, f.NodeName, eps)
			out.endpoints[familyIndex(family)] += len(all)
			for j := range all {
				if all[j].Local && all[j].Ready && !all[j].Terminating {
					localReady[all[j].Addr.Addr()] = true
				}
			}
			out.ports = append(out.ports, decidePort(f, svc, &svc.Spec.Ports[i], name, family, vip, all))
		}
	}
	// The decisions of all Services are in the order of names; so all ports are in
	// order when each Service's are.
	slices.SortStableFunc(out.ports, CompareServicePorts)
	if hc := healthCheckPort(svc); hc != 0 && len(out.ports) > 0 {
		out.health = &HealthCheck{Namespace: svc.Namespace, Name: svc.Name, NodePort: hc, LocalEndpoints: len(localReady)}
	}
	return out
}

func decidePort(f *Facts, svc *corev1.Service, port *corev1.ServicePort, name ServicePortName, family corev1.IPFamily, vip netip.Addr, all []candidate) *ServicePort {
	p := &ServicePort{
		ServicePortName: name,
		Family:          family,
		ClusterIP:       vip,
		Port:            uint16(port.Port),
		NodePort:        uint16(port.NodePort),
		ExternalIPs:     parseAddrs(svc.Spec.ExternalIPs, family),
		InternalLocal:   deref(svc.Spec.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster) == corev1.ServiceInternalTrafficPolicyLocal,
		Affinity:        affinity(svc),
		Scheduler:       svc.Annotations[AnnotationScheduler],
	}
	if svc.Spec.Type == corev1.ServiceTypeLoadBalancer {
		p.LoadBalancerIPs = loadBalancerIPs(svc, family)
		p.SourceRanges = parsePrefixes(svc.Spec.LoadBalancerSourceRanges, family)
		p.SourceRangesHoldNode = holdAny(p.SourceRanges, f.NodeIPs)
		p.HealthCheckNodePort = healthCheckPort(svc)
	}
	p.ExternalLocal = svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal && p.ExternallyAccessible()

	c := choose(all, f.NodeName, f.Zone)
	if !p.InternalLocal || p.ExternallyAccessible() {
		p.Cluster = c.cluster
	}
	if p.InternalLocal || p.ExternalLocal {
		p.Local = c.local
	}
	for i := range all {
		if all[i].Ready {
			p.Serving = append(p.Serving, all[i].Addr)
		}
	}
	p.ServingReady = len(p.Serving)
	for i := range all {
		if all[i].Serving && !all[i].Ready {
			p.Serving = append(p.Serving, all[i].Addr)
		}
	}
	p.Internal = verdict(c.anywhere, p.InternalEndpoints())
	p.External = verdict(c.anywhere, p.ExternalEndpoints())
	return p
}

func verdict(anywhere bool, eps []Endpoint) Verdict {
	switch {
	case !anywhere:
		return Reject
	case len(eps) == 0:
		return Drop
	}
	return Balance
}

// clusterIP is the Service's address of a family. Objects written before dual
// stack have clusterIP only.
func clusterIP(svc *corev1.Service, family corev1.IPFamily) netip.Addr {
	ips := svc.Spec.ClusterIPs
	if len(ips) == 0 {
		ips = []string{svc.Spec.ClusterIP}
	}
	for _, a := range parseAddrs(ips, family) {
		return a
	}
	return netip.Addr{}
}

// loadBalancerIPs is the addresses of a family that the node itself has to
// answer for: ipMode VIP, which is also what no ipMode means (KEP-1860). Entries
// with a host name are for DNS.
func loadBalancerIPs(svc *corev1.Service, family corev1.IPFamily) []netip.Addr {
	var ips []string
	for i := range svc.Status.LoadBalancer.Ingress {
		ing := &svc.Status.LoadBalancer.Ingress[i]
		if ing.IP != "" && deref(ing.IPMode, corev1.LoadBalancerIPModeVIP) == corev1.LoadBalancerIPModeVIP {
			ips = append(ips, ing.IP)
		}
	}
	return parseAddrs(ips, family)
}

func healthCheckPort(svc *corev1.Service) uint16 {
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer || svc.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return 0
	}
	return uint16(svc.Spec.HealthCheckNodePort)
}

func affinity(svc *corev1.Service) time.Duration {
	if svc.Spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return 0
	}
	seconds := corev1.DefaultClientIPServiceAffinitySeconds
	if c := svc.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		seconds = *c.ClientIP.TimeoutSeconds
	}
	return time.Duration(seconds) * time.Second
}

// parseAddrs keeps the addresses of one family, in order, once each. What does
// not parse is left out: the API refuses it, and one bad entry of old data must
// not stop the others.
func parseAddrs(in []string, family corev1.IPFamily) []netip.Addr {
	var out []netip.Addr
	for _, s := range in {
		a, err := netip.ParseAddr(s)
		if err != nil || FamilyOf(a) != family {
			continue
		}
		if a = a.Unmap(); !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// parsePrefixes is parseAddrs for ranges. Bits after the prefix length are
// cleared, as every tool prints them.
func parsePrefixes(in []string, family corev1.IPFamily) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range in {
		p, err := netip.ParsePrefix(s)
		if err != nil || FamilyOf(p.Addr()) != family {
			continue
		}
		if p = p.Masked(); !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}

func holdAny(ranges []netip.Prefix, addrs []netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return slices.ContainsFunc(addrs, p.Contains) })
}

// nodePortAddresses expands the setting for one family. localhost reports
// whether loopback addresses are meant to answer.
func (f *Facts) nodePortAddresses(family corev1.IPFamily) (out NodePortAddresses, localhost bool) {
	if len(f.NodePortAddresses) == 0 {
		return NodePortAddresses{All: true}, true
	}
	add := func(a netip.Addr) {
		if FamilyOf(a) == family && !slices.Contains(out.Addrs, a) {
			out.Addrs = append(out.Addrs, a)
		}
	}
	for _, word := range f.NodePortAddresses {
		switch word {
		case "all":
			return NodePortAddresses{All: true}, true
		case "primary":
			for _, a := range f.NodeIPs {
				if FamilyOf(a) == family {
					add(a)
					break
				}
			}
		case "localhost":
			localhost = true
		default:
			p, err := netip.ParsePrefix(word)
			if err != nil {
				continue
			}
			if p.Bits() == 0 && FamilyOf(p.Addr()) == family {
				return NodePortAddresses{All: true}, true
			}
			localhost = localhost || p.Contains(loopback(family))
			for _, a := range f.NodeIPs {
				if p.Contains(a) {
					add(a)
				}
			}
		}
	}
	slices.SortFunc(out.Addrs, netip.Addr.Compare)
	return out, localhost
}

func loopback(family corev1.IPFamily) netip.Addr {
	if family == corev1.IPv6Protocol {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// assemble puts the decisions of all Services together: it settles who holds an
// address that two Services ask for, and fills in the node's part. decisions is
// in the order of namespace and name.
func assemble(f *Facts, decisions []*serviceDecision) *Snapshot {
	s := &Snapshot{
		Node:          f.NodeName,
		NodeIPs:       slices.Clone(f.NodeIPs),
		Families:      f.families(),
		ClusterCIDRs:  slices.Clone(f.ClusterCIDRs),
		ServiceCIDRs:  slices.Clone(f.ServiceCIDRs),
		MasqueradeAll: f.MasqueradeAll,
		NodePorts:     map[corev1.IPFamily]NodePortAddresses{},
		Endpoints:     map[corev1.IPFamily]int{},
	}
	for _, family := range s.Families {
		addrs, localhost := f.nodePortAddresses(family)
		s.NodePorts[family] = addrs
		if family == corev1.IPv4Protocol {
			s.LocalhostNodePorts = f.LocalhostNodePorts && localhost
		}
	}
	n := 0
	for _, d := range decisions {
		n += len(d.ports)
	}
	var counts [2]int
	s.Services = make([]*ServicePort, 0, n)
	for _, d := range decisions {
		s.Services = append(s.Services, d.ports...)
		if d.health != nil {
			s.HealthChecks = append(s.HealthChecks, *d.health)
		}
		counts[0] += d.endpoints[0]
		counts[1] += d.endpoints[1]
	}
	for _, family := range s.Families {
		if c := counts[familyIndex(family)]; c > 0 {
			s.Endpoints[family] = c
		}
	}
	settleClaims(s)
	return s
}

// claim is an address, or any address of the node for a nodePort, with a port
// and protocol.
type claim struct {
	addr     netip.Addr
	port     uint16
	protocol corev1.Protocol
	family   corev1.IPFamily
}

// settleClaims gives each address, port and protocol to one Service. Cluster
// addresses come first, since the API hands them out once; for the rest the
// first Service in the order of names holds it. Without this, who wins would
// depend on the order of rules in one mode, and the whole table would fail to
// load in another (a map has each key once).
func settleClaims(s *Snapshot) {
	if !slices.ContainsFunc(s.Services, (*ServicePort).ExternallyAccessible) {
		return // nothing is asked for that the API has not handed out
	}
	held := make(map[claim]*ServicePort, len(s.Services)*2)
	for _, p := range s.Services {
		c := claim{p.ClusterIP, p.Port, p.Protocol, p.Family}
		if _, taken := held[c]; !taken {
			held[c] = p
		}
	}
	for i, p := range s.Services {
		if !p.ExternallyAccessible() {
			continue
		}
		lose := func(c claim) bool {
			holder, taken := held[c]
			if !taken {
				held[c] = p
				return false
			}
			if holder == p {
				// The same address twice in one Service: the first entry serves it.
				return true
			}
			s.Conflicts = append(s.Conflicts, Conflict{Service: p.ServicePortName, Holder: holder.ServicePortName, Addr: c.addr, Port: c.port})
			return true
		}
		lost := func(addrs []netip.Addr) []netip.Addr {
			var out []netip.Addr
			for _, a := range addrs {
				if lose(claim{a, p.Port, p.Protocol, p.Family}) {
					out = append(out, a)
				}
			}
			return out
		}
		// Load balancer addresses are claimed before external ones: only they
		// carry source ranges, which must not be lost.
		noLB, noExt := lost(p.LoadBalancerIPs), lost(p.ExternalIPs)
		noNodePort := p.NodePort != 0 && lose(claim{port: p.NodePort, protocol: p.Protocol, family: p.Family})
		if len(noLB) == 0 && len(noExt) == 0 && !noNodePort {
			continue
		}
		q := *p
		q.LoadBalancerIPs = without(p.LoadBalancerIPs, noLB)
		q.ExternalIPs = without(p.ExternalIPs, noExt)
		if noNodePort {
			q.NodePort = 0
		}
		s.Services[i] = &q
	}
}

func without(addrs, drop []netip.Addr) []netip.Addr {
	if len(drop) == 0 {
		return addrs
	}
	return slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return slices.Contains(drop, a) })
}
