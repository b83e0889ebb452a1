// SPDX-License-Identifier: Apache-2.0

// Package proxy turns Services and EndpointSlices into what one node has to do
// with packets, and keeps that true in the kernel through a mode.
//
// It has two halves. The pure half (snapshot.go, policy.go, topology.go,
// resolve.go) decides, once for every mode, which endpoints each entry of a
// Service uses, what happens when there are none, and which traffic is
// masqueraded. The other half (proxy.go, conntrack.go) watches the API, paces
// the work, hands the decided [Snapshot] to the node's [Mode], and removes
// connection tracking entries that point at endpoints which are gone.
//
// This package knows no mode. A mode knows this package and no other mode, and
// only encodes: it never asks again whether an endpoint is ready.
package proxy

import (
	"cmp"
	"net/netip"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// ServicePortName identifies one port of one Service. Endpoints belong to a
// port by name and protocol, never by number.
type ServicePortName struct {
	Namespace string
	Name      string
	// Port is the port's name; empty when the Service has one unnamed port.
	Port     string
	Protocol corev1.Protocol
}

// String gives "namespace/name:port", without ":port" when the port has no
// name. Chain names are hashed from this form and comments show it, as
// upstream's do.
func (n ServicePortName) String() string {
	if n.Port == "" {
		return n.Namespace + "/" + n.Name
	}
	return n.Namespace + "/" + n.Name + ":" + n.Port
}

// compare orders names by namespace, name, port name and protocol.
func (n ServicePortName) compare(o ServicePortName) int {
	if c := strings.Compare(n.Namespace, o.Namespace); c != 0 {
		return c
	}
	if c := strings.Compare(n.Name, o.Name); c != 0 {
		return c
	}
	if c := strings.Compare(n.Port, o.Port); c != 0 {
		return c
	}
	return strings.Compare(string(n.Protocol), string(o.Protocol))
}

// Verdict says what an entry of a Service does with a packet.
type Verdict string

const (
	// Balance sends the packet to one of the endpoints.
	Balance Verdict = "balance"
	// Reject answers "port unreachable": the Service has no usable endpoint
	// anywhere.
	Reject Verdict = "reject"
	// Drop says nothing: there are endpoints, but none that the traffic policy
	// of this entry allows on this node. Another node may have them, so the
	// sender must not be told that the Service is dead.
	Drop Verdict = "drop"
)

// Endpoint is one address of a Service port, with duplicates over slices
// merged. It is decided: what a mode needs is in which list it stands.
type Endpoint struct {
	Addr netip.AddrPort
	// Local says that the endpoint runs on the snapshot's node.
	Local bool
	// Ready, Serving and Terminating are the slice's conditions with their
	// defaults filled in (ready and serving true, terminating false).
	Ready, Serving, Terminating bool
}

// ServicePort is one port of a Service in one IP family, decided for one node.
// Values are shared between snapshots and never written after they are made;
// the same pointer in two snapshots means that nothing changed, which modes use
// to do no work.
type ServicePort struct {
	ServicePortName
	Family corev1.IPFamily

	ClusterIP netip.Addr
	Port      uint16
	// NodePort is 0 when the Service has none, and when another Service of the
	// snapshot holds the same number.
	NodePort uint16
	// ExternalIPs and LoadBalancerIPs are the addresses of this family that
	// this port answers on. Load balancer addresses with ipMode Proxy are left
	// out: packets to them must reach the real load balancer. Addresses that
	// another Service already holds for this port number are left out too, see
	// Snapshot.Conflicts.
	ExternalIPs     []netip.Addr
	LoadBalancerIPs []netip.Addr
	// SourceRanges limits who may use the load balancer addresses; empty means
	// everybody.
	SourceRanges []netip.Prefix
	// SourceRangesHoldNode says that an address of the node itself lies in
	// SourceRanges: then packets whose source has become the load balancer
	// address (a node talking to an address that is local to it) pass as well.
	SourceRangesHoldNode bool
	// HealthCheckNodePort is the port of the node on which the Service's health
	// is told; 0 for none.
	HealthCheckNodePort uint16
	// Affinity is the time for which a client keeps its endpoint; 0 means no
	// session affinity. Whole seconds.
	Affinity time.Duration
	// Scheduler is how the Service asks for its connections to be spread, by
	// AnnotationScheduler; modes that have no choice do not look at it.
	Scheduler string

	// InternalLocal and ExternalLocal are the traffic policies: true is Local.
	// ExternalLocal is false when nothing outside can reach the Service.
	InternalLocal, ExternalLocal bool

	// Cluster is what entries of Cluster scope balance over, Local what entries
	// of Local scope do. Each is nil when no entry uses that scope. Both are
	// sorted by address.
	Cluster, Local []Endpoint
	// Serving is every endpoint that still answers, whether or not a list above
	// holds it, the ready ones first. Connection tracking entries towards one of
	// these are healthy.
	Serving []netip.AddrPort
	// ServingReady is how many of Serving are ready.
	ServingReady int

	// Internal is the verdict for the cluster address, External the one for
	// nodePort, external and load balancer addresses (from clients that no
	// short circuit serves).
	Internal, External Verdict
}

// InternalEndpoints is what the cluster address balances over.
func (p *ServicePort) InternalEndpoints() []Endpoint {
	if p.InternalLocal {
		return p.Local
	}
	return p.Cluster
}

// ExternalEndpoints is what the external entries balance over for clients from
// outside the cluster.
func (p *ServicePort) ExternalEndpoints() []Endpoint {
	if p.ExternalLocal {
		return p.Local
	}
	return p.Cluster
}

// Ready is every ready endpoint of the cluster, whatever traffic policies and
// topology hints say, sorted by address: what the userspace mode balances over, which
// is older than both.
func (p *ServicePort) Ready() []netip.AddrPort { return p.Serving[:p.ServingReady] }

// Usable says that the Service has an endpoint somewhere in the cluster. It
// separates Reject (not usable) from Drop.
func (p *ServicePort) Usable() bool { return p.External != Reject || p.Internal != Reject }

// ExternallyAccessible says that something besides the cluster address leads
// to this port.
func (p *ServicePort) ExternallyAccessible() bool {
	return p.NodePort != 0 || len(p.ExternalIPs) > 0 || len(p.LoadBalancerIPs) > 0
}

// UsesCluster says that some entry balances over Cluster: the cluster address
// unless its policy is Local, the external entries unless theirs is, and even
// then pods and the node itself, which are served cluster-wide.
func (p *ServicePort) UsesCluster() bool {
	return len(p.Cluster) > 0 && (!p.InternalLocal || p.ExternallyAccessible())
}

// UsesLocal says that some entry balances over Local.
func (p *ServicePort) UsesLocal() bool {
	return len(p.Local) > 0 && (p.InternalLocal || (p.ExternalLocal && p.ExternallyAccessible()))
}

// AllEndpoints is the union of Cluster and Local, sorted by address: every
// endpoint that a packet may be sent to on this node.
func (p *ServicePort) AllEndpoints() []Endpoint {
	cluster, local := p.UsesCluster(), p.UsesLocal()
	switch {
	case cluster && !local:
		return p.Cluster
	case local && !cluster:
		return p.Local
	case !cluster:
		return nil
	}
	out := make([]Endpoint, 0, len(p.Cluster)+len(p.Local))
	i, j := 0, 0
	for i < len(p.Cluster) && j < len(p.Local) {
		switch c := p.Cluster[i].Addr.Compare(p.Local[j].Addr); {
		case c < 0:
			out = append(out, p.Cluster[i])
			i++
		case c > 0:
			out = append(out, p.Local[j])
			j++
		default:
			out = append(out, p.Cluster[i])
			i++
			j++
		}
	}
	out = append(out, p.Cluster[i:]...)
	return append(out, p.Local[j:]...)
}

// HealthCheck is what the node says on one healthCheckNodePort.
type HealthCheck struct {
	Namespace, Name string
	NodePort        uint16
	// LocalEndpoints counts the endpoints of this node that are ready. A
	// terminating one does not count, so that load balancers turn away before
	// it is gone.
	LocalEndpoints int
}

// NodePortAddresses says on which addresses of the node nodePorts answer.
type NodePortAddresses struct {
	// All means every address that is local to the node, those that appear
	// later too. Addrs is empty then.
	All bool
	// Addrs lists the addresses, sorted.
	Addrs []netip.Addr
}

// Conflict is an entry that a Service asked for and did not get, since another
// Service holds the same address, port and protocol.
type Conflict struct {
	Service, Holder ServicePortName
	// Addr is invalid for a nodePort.
	Addr netip.Addr
	Port uint16
}

// Snapshot is everything that the proxy of one node has to make true, decided.
// It holds no reference to API objects and is never changed after it is made,
// so it may be rendered by several modes at once and kept for comparison.
type Snapshot struct {
	// Node is the node's name, NodeIPs its own addresses, the primary one of
	// each family first.
	Node    string
	NodeIPs []netip.Addr
	// Families lists the IP families that the node takes part in; a mode writes
	// nothing for others.
	Families []corev1.IPFamily
	// ClusterCIDRs are the pods' ranges. Traffic to a cluster address from
	// outside of them is masqueraded; a family without a range is never judged
	// and so not masqueraded.
	ClusterCIDRs []netip.Prefix
	// ServiceCIDRs are the ranges of cluster addresses. A mode may refuse what goes
	// to an address in there that no Service has.
	ServiceCIDRs []netip.Prefix
	// MasqueradeAll asks for masquerading of pods' traffic too.
	MasqueradeAll bool
	// NodePorts says where nodePorts answer, for each family.
	NodePorts map[corev1.IPFamily]NodePortAddresses
	// LocalhostNodePorts lets IPv4 nodePorts answer on 127.0.0.0/8 in modes that
	// can do that.
	LocalhostNodePorts bool

	// Services is sorted by name, then IPv4 before IPv6.
	Services     []*ServicePort
	HealthChecks []HealthCheck
	Conflicts    []Conflict
	// Endpoints counts the endpoints of all Services that have any use for
	// them, per family.
	Endpoints map[corev1.IPFamily]int
}

// ClusterCIDR is the pods' range of a family; invalid when there is none.
func (s *Snapshot) ClusterCIDR(family corev1.IPFamily) netip.Prefix {
	for _, p := range s.ClusterCIDRs {
		if FamilyOf(p.Addr()) == family {
			return p
		}
	}
	return netip.Prefix{}
}

// FamilyOf names the family of an address.
func FamilyOf(a netip.Addr) corev1.IPFamily {
	if a.Unmap().Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

// CompareServicePorts is the order of Snapshot.Services: by name, then IPv4
// before IPv6.
func CompareServicePorts(a, b *ServicePort) int {
	return cmp.Or(a.compare(b.ServicePortName), cmp.Compare(a.Family, b.Family))
}
