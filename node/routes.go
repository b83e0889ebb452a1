// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/cni/routed"
	"github.com/kplab/kplab/internal/rtnl"
	"github.com/kplab/kplab/node/kubelet"
)

// RouteProtocol marks the routes between nodes (`ip route` shows "proto 107"): the
// node removes one that it no longer wants only when it bears the mark.
const RouteProtocol = 107

// peers returns where the node has routes to: the fabric's router, and the other
// nodes: those of the API, and those of the fabric that the
// API does not have (yet): they are there, whoever deleted their object.
func (n *Node) peers() []Peer {
	all := []Peer{n.cfg.Fabric.router()}
	known := map[string]bool{n.cfg.Name: true}
	for _, obj := range n.nodes.GetStore().List() {
		node, ok := obj.(*corev1.Node)
		if !ok || known[node.Name] {
			continue
		}
		if p, ok := n.cfg.Fabric.peerOf(node); ok {
			known[p.Name] = true
			all = append(all, p)
		}
	}
	for _, p := range n.cfg.Fabric.Nodes() {
		if !known[p.Name] {
			all = append(all, p)
		}
	}
	return all
}

// peerOf reads a Node object; false when it lacks an address or a pod range of the
// primary IP family. What it has of a family that the lab has not is passed over.
func (f *Fabric) peerOf(node *corev1.Node) (Peer, bool) {
	p := Peer{Name: node.Name}
	for _, a := range node.Status.Addresses {
		ip, err := netip.ParseAddr(a.Address)
		if a.Type != corev1.NodeInternalIP || err != nil {
			continue
		}
		switch f.subnetOf(ip) {
		case netip.Prefix{}:
		case f.cfg.Subnet:
			p.IP = first(p.IP, ip)
		default:
			p.SecondaryIP = first(p.SecondaryIP, ip)
		}
	}
	cidrs := node.Spec.PodCIDRs
	if len(cidrs) == 0 {
		cidrs = []string{node.Spec.PodCIDR}
	}
	for _, text := range cidrs {
		cidr, err := netip.ParsePrefix(text)
		if err != nil {
			continue
		}
		if cidr.Addr().Is4() == f.cfg.Subnet.Addr().Is4() {
			p.PodCIDR = first(p.PodCIDR, cidr.Masked())
		} else {
			p.SecondaryPodCIDR = first(p.SecondaryPodCIDR, cidr.Masked())
		}
	}
	return p, p.IP.IsValid() && p.PodCIDR.IsValid()
}

// first returns a unless it is the zero value.
func first[T interface {
	comparable
	IsValid() bool
}](a, b T) T {
	if a.IsValid() {
		return a
	}
	return b
}

// heal makes the node's links, addresses, routes and neighbours right. It reads
// first and writes only what is missing, so that a node in order costs four reads.
func (n *Node) heal(ctx context.Context) error {
	var now kernelState
	if err := n.member.NS.Do(func() error { return now.read(n.member, n.cfg.Fabric.hasIPv6()) }); err != nil {
		return fmt.Errorf("node %s: %w", n.cfg.Name, err)
	}
	b := new(rtnl.Batch)
	n.healUplink(b, &now)
	var err error
	if n.member.overlay != 0 {
		err = n.healOverlay(b, &now)
	}
	err = errors.Join(err, n.member.Conn.Do(b))
	if err != nil {
		err = fmt.Errorf("node %s: put back what is missing on %s: %w", n.cfg.Name, uplink, err)
	}
	return errors.Join(err, n.healPods(ctx, &now))
}

// healUplink adds what eth0 lacks, and takes away routes to nodes that are gone.
func (n *Node) healUplink(b *rtnl.Batch, now *kernelState) {
	link := n.member.Link
	if !now.up[link] {
		b.SetUp(link)
	}
	for _, addr := range n.member.Addrs {
		if now.addrs[addr] != link || !now.up[link] {
			b.AddAddr(link, addr, unix.RT_SCOPE_UNIVERSE)
		}
		if own := addr.Masked(); now.routes[own].link != link {
			r := rtnl.Route{Dst: own, Link: link, Src: addr.Addr(), Protocol: unix.RTPROT_KERNEL}
			if own.Addr().Is6() {
				r.Src, r.Metric = netip.Addr{}, kernelMetric6
			}
			b.ReplaceRoute(r)
		}
	}
	want := map[netip.Prefix]bool{}
	for i, p := range n.peers() {
		ways := p.routes(link)
		if i > 0 && n.member.overlay != 0 {
			ways = nil // only the router's are over the uplink
		}
		for _, r := range ways {
			want[r.Dst] = true
			if is := now.routes[r.Dst]; is.link != link || is.via != r.Via {
				b.ReplaceRoute(r)
			}
		}
		for _, ip := range p.ips() {
			if nb := now.neighs[linkAddr{link, ip}]; nb.mac != p.mac().String() || !nb.permanent {
				b.ReplaceNeigh(link, ip, p.mac())
			}
		}
	}
	for dst, r := range now.routes {
		if r.protocol == RouteProtocol && r.link == link && !want[dst] {
			b.DelRoute(rtnl.Route{Dst: dst, Link: link, Protocol: RouteProtocol})
		}
	}
}

// healPods repeats ADD for every pod whose wiring lacks something on the node's
// side. Only the built-in plugin's wiring is known well enough for that.
func (n *Node) healPods(ctx context.Context, now *kernelState) error {
	if n.kubelet == nil || !n.network.BuiltIn() {
		return nil
	}
	var errs []error
	for _, a := range n.kubelet.Attachments() {
		if n.wired(a, now) {
			continue
		}
		n.cfg.Log.Info("putting a pod's wiring back", "node", n.cfg.Name, "pod", a.PodNamespace+"/"+a.PodName)
		if err := n.kubelet.Rewire(ctx, a.ID); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// wired tells whether a pod's wiring is whole on the node's side.
func (n *Node) wired(a kubelet.Attachment, now *kernelState) bool {
	link := now.byName[routed.LinkName(a.ID, uplink)]
	if link == 0 || !now.up[link] {
		return false
	}
	for _, ip := range a.IPs {
		src, gw := n.cfg.IP.Addr(), routed.Gateway()
		if src.Is4() != ip.Is4() {
			src = n.cfg.SecondaryIP.Addr()
		}
		if ip.Is6() {
			gw = routed.Gateway6()
		}
		r := now.routes[netip.PrefixFrom(ip, ip.BitLen())]
		if r.link != link || r.src != src || !now.neighs[linkAddr{link, ip}].permanent || !now.gateways[linkAddr{link, gw}] {
			return false
		}
	}
	return true
}

// The metrics that the kernel gives IPv6 routes: to a link's own network, and where
// the writer names none.
const (
	kernelMetric6  = 256
	defaultMetric6 = 1024
)

// kernelState is what heal looks at.
type kernelState struct {
	byName   map[string]int
	up       map[int]bool
	addrs    map[netip.Prefix]int // of uplink and overlay: the link that has them
	gateways map[linkAddr]bool    // links that carry a gateway address of the pods
	routes   map[netip.Prefix]route
	neighs   map[linkAddr]neigh
	fdb      map[string]netip.Addr // of the overlay: where a hardware address is
}

type route struct {
	link     int
	via, src netip.Addr
	protocol int
}

type neigh struct {
	mac       string
	permanent bool
}

type linkAddr struct {
	link int
	ip   netip.Addr
}

// read fills the state from the namespace of the thread.
func (s *kernelState) read(m *Member, ipv6 bool) error {
	s.byName, s.up = map[string]int{}, map[int]bool{}
	s.addrs, s.gateways = map[netip.Prefix]int{}, map[linkAddr]bool{}
	s.routes, s.neighs = map[netip.Prefix]route{}, map[linkAddr]neigh{}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open a netlink socket: %w", err)
	}
	defer h.Close()
	links, err := h.LinkList()
	if err != nil {
		return fmt.Errorf("read links: %w", err)
	}
	for _, l := range links {
		a := l.Attrs()
		s.byName[a.Name] = a.Index
		s.up[a.Index] = a.RawFlags&unix.IFF_UP != 0
	}
	families := []int{netlink.FAMILY_V4}
	if ipv6 {
		families = append(families, netlink.FAMILY_V6)
	}
	for _, f := range families {
		if err := s.readFamily(h, m, f); err != nil {
			return err
		}
	}
	if m.overlay == 0 {
		return nil
	}
	return s.readOverlay(h, m.overlay)
}

// readOverlay reads what the overlay's end has been told.
func (s *kernelState) readOverlay(h *netlink.Handle, link int) error {
	s.fdb = map[string]netip.Addr{}
	entries, err := h.NeighList(link, unix.AF_BRIDGE)
	if err != nil {
		return fmt.Errorf("read the overlay's forwarding entries: %w", err)
	}
	for _, e := range entries {
		if ip, ok := netip.AddrFromSlice(e.IP); ok {
			s.fdb[e.HardwareAddr.String()] = ip.Unmap()
		}
	}
	return nil
}

// readFamily reads what the namespace has of one IP family.
func (s *kernelState) readFamily(h *netlink.Handle, m *Member, family int) error {
	addrs, err := h.AddrList(nil, family)
	if err != nil {
		return fmt.Errorf("read addresses: %w", err)
	}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		if !ok {
			continue
		}
		if ip = ip.Unmap(); a.LinkIndex == m.Link || a.LinkIndex == m.overlay {
			ones, _ := a.Mask.Size()
			s.addrs[netip.PrefixFrom(ip, ones)] = a.LinkIndex
		}
		if ip == routed.Gateway() || ip == routed.Gateway6() {
			s.gateways[linkAddr{a.LinkIndex, ip}] = true
		}
	}
	routes, err := h.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return fmt.Errorf("read routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst == nil || r.Priority != 0 && r.Priority != kernelMetric6 && r.Priority != defaultMetric6 {
			continue
		}
		dst, ok := netip.AddrFromSlice(r.Dst.IP)
		if !ok {
			continue
		}
		ones, _ := r.Dst.Mask.Size()
		via, _ := netip.AddrFromSlice(r.Gw)
		src, _ := netip.AddrFromSlice(r.Src)
		s.routes[netip.PrefixFrom(dst.Unmap(), ones)] = route{link: r.LinkIndex, via: via.Unmap(), src: src.Unmap(), protocol: int(r.Protocol)}
	}
	neighs, err := h.NeighList(0, family)
	if err != nil {
		return fmt.Errorf("read neighbours: %w", err)
	}
	for _, nb := range neighs {
		if ip, ok := netip.AddrFromSlice(nb.IP); ok {
			s.neighs[linkAddr{nb.LinkIndex, ip.Unmap()}] = neigh{mac: nb.HardwareAddr.String(), permanent: nb.State&netlink.NUD_PERMANENT != 0}
		}
	}
	return nil
}
