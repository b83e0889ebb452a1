// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Packet is the first packet of a flow as a node sees it before translation.
type Packet struct {
	Src      netip.Addr
	Dst      netip.AddrPort
	Protocol corev1.Protocol
}

// Outcome is what a node does with a packet.
type Outcome struct {
	// Service is nil when no Service answers on the packet's destination.
	Service *ServicePort
	Verdict Verdict
	// Endpoints is where the packet may go, when the verdict is Balance.
	Endpoints []Endpoint
	// Masquerade says that the source becomes the node's address, whichever
	// endpoint is taken. An endpoint that is the source itself (hairpin) is
	// masqueraded in any case.
	Masquerade bool
}

// Resolve says what this node does with a packet. It is the semantics that each
// mode encodes, in the form of an answer about one packet; explanations and
// tests compare the kernel with it.
func (s *Snapshot) Resolve(pkt Packet) Outcome {
	family := FamilyOf(pkt.Dst.Addr())
	dst := pkt.Dst.Addr().Unmap()
	var viaNodePort *ServicePort
	for _, p := range s.Services {
		if p.Family != family || p.Protocol != pkt.Protocol {
			continue
		}
		if p.Port == pkt.Dst.Port() {
			switch {
			case p.ClusterIP == dst:
				return s.internal(p, pkt)
			case slices.Contains(p.LoadBalancerIPs, dst):
				if !p.admits(pkt.Src, dst) && p.Usable() {
					return Outcome{Service: p, Verdict: Drop}
				}
				return s.external(p, pkt)
			case slices.Contains(p.ExternalIPs, dst):
				return s.external(p, pkt)
			}
		}
		if p.NodePort != 0 && p.NodePort == pkt.Dst.Port() {
			viaNodePort = p
		}
	}
	if viaNodePort != nil && s.answersNodePorts(dst, family) {
		return s.external(viaNodePort, pkt)
	}
	return Outcome{}
}

// admits applies the source ranges.
func (p *ServicePort) admits(src, dst netip.Addr) bool {
	return len(p.SourceRanges) == 0 || holdAny(p.SourceRanges, []netip.Addr{src}) || (p.SourceRangesHoldNode && src == dst)
}

func (s *Snapshot) internal(p *ServicePort, pkt Packet) Outcome {
	out := Outcome{Service: p, Verdict: p.Internal}
	if p.Internal != Balance {
		return out
	}
	out.Endpoints = p.InternalEndpoints()
	cidr := s.ClusterCIDR(p.Family)
	out.Masquerade = s.MasqueradeAll || (cidr.IsValid() && !cidr.Contains(pkt.Src))
	return out
}

func (s *Snapshot) external(p *ServicePort, pkt Packet) Outcome {
	out := Outcome{Service: p, Verdict: p.External, Endpoints: p.ExternalEndpoints(), Masquerade: true}
	if p.ExternalLocal {
		out.Masquerade = false
		fromPod := s.ClusterCIDR(p.Family).IsValid() && s.ClusterCIDR(p.Family).Contains(pkt.Src)
		if (fromPod || s.isNode(pkt.Src)) && len(p.Cluster) > 0 {
			out.Verdict, out.Endpoints, out.Masquerade = Balance, p.Cluster, !fromPod
		}
	}
	if out.Verdict != Balance {
		out.Endpoints, out.Masquerade = nil, false
	}
	return out
}

// isNode says whether an address belongs to the node, loopback included.
func (s *Snapshot) isNode(a netip.Addr) bool {
	return a.IsLoopback() || slices.Contains(s.NodeIPs, a.Unmap())
}

func (s *Snapshot) answersNodePorts(dst netip.Addr, family corev1.IPFamily) bool {
	if dst.IsLoopback() {
		return s.LocalhostNodePorts && family == corev1.IPv4Protocol
	}
	np := s.NodePorts[family]
	return (np.All && s.isNode(dst)) || slices.Contains(np.Addrs, dst)
}
