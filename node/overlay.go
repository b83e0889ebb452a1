// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/rtnl"
)

// Overlay is how packets between pods of two nodes travel.
type Overlay string

const (
	// OverlayRoutes sends them as they are: each node has a route to the pods of
	// every other one.
	OverlayRoutes Overlay = "routes"
	// OverlayVXLAN wraps them in UDP (RFC 7348) between the nodes, as where the
	// network between nodes knows nothing of pods:
	//
	//	10.244.2.0/24 via 10.244.2.0 dev vxlan0 onlink    the other node's end
	//	10.244.2.0 dev vxlan0 lladdr 0e:58:… PERMANENT    its hardware address
	//	0e:58:… dev vxlan0 dst 10.0.0.133 self permanent  where that is
	//
	// Nothing is learned and nothing is flooded. A node's end has the first address
	// of its pod range, which no pod gets; what the node itself sends to pods
	// elsewhere has it as its source.
	OverlayVXLAN Overlay = "vxlan"
)

// What both ends of the overlay agree on. The port is IANA's, not the one that Linux
// had before.
const (
	vxlanLink = "vxlan0"
	vxlanVNI  = 1
	vxlanPort = 4789
)

// Overhead is what a packet grows by between nodes with addresses of the family of
// underlay, in bytes: with VXLAN by Ethernet's 14, VXLAN's 8, UDP's 8 and an IP header.
func (o Overlay) Overhead(underlay netip.Addr) int {
	switch {
	case o != OverlayVXLAN:
		return 0
	case underlay.Is6():
		return 14 + 8 + 8 + 40
	}
	return 14 + 8 + 8 + 20
}

// overlayMAC is the hardware address of a node's end.
func (p Peer) overlayMAC() net.HardwareAddr {
	m := p.mac()
	m[0] = 0x0e
	return m
}

// overlayIPs are the addresses of a node's end, one a family.
func (p Peer) overlayIPs() []netip.Addr {
	all := []netip.Addr{p.PodCIDR.Addr()}
	if p.SecondaryIP.IsValid() && p.SecondaryPodCIDR.IsValid() {
		all = append(all, p.SecondaryPodCIDR.Addr())
	}
	return all
}

// overlayRoutes are the ways to the node's pods over link, an end of the overlay.
func (p Peer) overlayRoutes(link int) []rtnl.Route {
	all := p.routes(link)
	for i := range all {
		all[i].Via, all[i].OnLink = all[i].Dst.Addr(), true
	}
	return all
}

// joinOverlay gives a node its end of the overlay, with the way to the others, or
// makes true what is there.
func (f *Fabric) joinOverlay(m *Member, node Peer, others []Peer) error {
	link, err := f.overlayLink(m, node)
	if err != nil {
		return fmt.Errorf("join %s to the overlay: %w", node.Name, err)
	}
	b := new(rtnl.Batch)
	toOverlay(b, link, node)
	for _, p := range others {
		viaOverlay(b, link, p)
	}
	if err := m.Conn.Do(b); err != nil {
		return fmt.Errorf("join %s to the overlay: %w", node.Name, err)
	}
	return nil
}

// overlayLink finds the node's end or makes it; one that is something else, or has
// another size, is replaced.
func (f *Fabric) overlayLink(m *Member, node Peer) (int, error) {
	var l rtnl.Link
	if err := m.Conn.Do(new(rtnl.Batch).GetLink(vxlanLink, &l).Tolerate(unix.ENODEV)); err != nil {
		return 0, err
	}
	if l.Index != 0 && (l.Kind != "vxlan" || l.MTU != f.PodMTU() || l.MAC.String() != node.overlayMAC().String()) {
		if err := m.Conn.Do(new(rtnl.Batch).DelLink(l.Index).Tolerate(unix.ENODEV)); err != nil {
			return 0, err
		}
		l.Index = 0
	}
	if l.Index == 0 {
		err := m.Conn.Do(new(rtnl.Batch).AddVXLAN(rtnl.VXLAN{
			Name: vxlanLink, VNI: vxlanVNI, Port: vxlanPort, Local: node.IP, MTU: f.PodMTU(), MAC: node.overlayMAC(),
		}).GetLink(vxlanLink, &l))
		if err != nil {
			return 0, err
		}
	}
	m.overlay = l.Index
	return l.Index, nil
}

// toOverlay sets a node's own end up.
func toOverlay(b *rtnl.Batch, link int, node Peer) {
	b.SetUp(link)
	for _, ip := range node.overlayIPs() {
		b.AddAddr(link, netip.PrefixFrom(ip, ip.BitLen()), unix.RT_SCOPE_UNIVERSE)
	}
}

// viaOverlay adds what reaches the pods of another node over the overlay.
func viaOverlay(b *rtnl.Batch, link int, p Peer) {
	b.ReplaceFDB(link, p.overlayMAC(), p.IP)
	for _, ip := range p.overlayIPs() {
		b.ReplaceNeigh(link, ip, p.overlayMAC())
	}
	for _, r := range p.overlayRoutes(link) {
		b.ReplaceRoute(r)
	}
}

// healOverlay adds what the node's end lacks, and takes away what leads to nodes that
// are gone.
func (n *Node) healOverlay(b *rtnl.Batch, now *kernelState) error {
	f, self := n.cfg.Fabric, n.cfg.peer()
	link, err := f.overlayLink(n.member, self)
	if err != nil {
		return err
	}
	whole := now.up[link]
	for _, ip := range self.overlayIPs() {
		whole = whole && now.addrs[netip.PrefixFrom(ip, ip.BitLen())] == link
	}
	if !whole {
		toOverlay(b, link, self)
	}
	wantRoute, wantFDB := map[netip.Prefix]bool{}, map[string]bool{}
	for _, p := range n.peers()[1:] { // the first is the router, which is on the node network
		wantFDB[p.overlayMAC().String()] = true
		has := now.fdb[p.overlayMAC().String()] == p.IP
		for _, ip := range p.overlayIPs() {
			nb := now.neighs[linkAddr{link, ip}]
			has = has && nb.permanent && nb.mac == p.overlayMAC().String()
		}
		for _, r := range p.overlayRoutes(link) {
			wantRoute[r.Dst] = true
			has = has && now.routes[r.Dst].link == link && now.routes[r.Dst].via == r.Via
		}
		if !has || !whole {
			viaOverlay(b, link, p)
		}
	}
	for dst, r := range now.routes {
		if r.protocol == RouteProtocol && r.link == link && !wantRoute[dst] {
			b.DelRoute(rtnl.Route{Dst: dst, Link: link, Protocol: RouteProtocol}).DelNeigh(link, dst.Addr())
		}
	}
	for mac := range now.fdb {
		if hw, err := net.ParseMAC(mac); err == nil && !wantFDB[mac] {
			b.DelFDB(link, hw)
		}
	}
	return nil
}
