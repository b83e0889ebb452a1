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
		if p, ok := peerOf(node); ok && n.cfg.Fabric.Subnet().Contains(p.IP) {
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

// peerOf reads a Node object; false when it lacks an address or a pod range.
func peerOf(node *corev1.Node) (Peer, bool) {
	p := Peer{Name: node.Name}
	for _, a := range node.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); a.Type == corev1.NodeInternalIP && err == nil && ip.Is4() && !p.IP.IsValid() {
			p.IP = ip
		}
	}
	cidr, err := netip.ParsePrefix(node.Spec.PodCIDR)
	p.PodCIDR = cidr.Masked()
	return p, err == nil && cidr.Addr().Is4() && p.IP.IsValid()
}

// heal makes the node's links, addresses, routes and neighbours right. It reads
// first and writes only what is missing, so that a node in order costs four reads.
func (n *Node) heal(ctx context.Context) error {
	var now kernelState
	if err := n.member.NS.Do(func() error { return now.read(n.member.Link) }); err != nil {
		return fmt.Errorf("node %s: %w", n.cfg.Name, err)
	}
	b := new(rtnl.Batch)
	n.healUplink(b, &now)
	err := n.member.Conn.Do(b)
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
	if !now.addrs[n.member.Addr] || !now.up[link] {
		b.AddAddr(link, n.member.Addr, unix.RT_SCOPE_UNIVERSE)
	}
	if own := n.member.Addr.Masked(); now.routes[own].link != link {
		b.ReplaceRoute(rtnl.Route{Dst: own, Link: link, Src: n.member.Addr.Addr(), Protocol: unix.RTPROT_KERNEL})
	}
	want := map[netip.Prefix]bool{}
	for _, p := range n.peers() {
		want[p.PodCIDR] = true
		if r := now.routes[p.PodCIDR]; r.link != link || r.via != p.IP {
			b.ReplaceRoute(routeTo(p, link))
		}
		if nb := now.neighs[linkAddr{link, p.IP}]; nb.mac != MAC(p.IP).String() || !nb.permanent {
			b.ReplaceNeigh(link, p.IP, MAC(p.IP))
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
		link := now.byName[routed.LinkName(a.ID, uplink)]
		r := now.routes[netip.PrefixFrom(a.IP, 32)]
		nb := now.neighs[linkAddr{link, a.IP}]
		if link != 0 && now.up[link] && r.link == link && r.src == n.cfg.IP.Addr() && nb.permanent && now.gateways[link] {
			continue
		}
		n.cfg.Log.Info("putting a pod's wiring back", "node", n.cfg.Name, "pod", a.PodNamespace+"/"+a.PodName)
		if err := n.kubelet.Rewire(ctx, a.ID); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// kernelState is what heal looks at.
type kernelState struct {
	byName   map[string]int
	up       map[int]bool
	addrs    map[netip.Prefix]bool // of the uplink
	gateways map[int]bool          // links that carry the pods' gateway address
	routes   map[netip.Prefix]route
	neighs   map[linkAddr]neigh
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
func (s *kernelState) read(uplinkIndex int) error {
	s.byName, s.up = map[string]int{}, map[int]bool{}
	s.addrs, s.gateways = map[netip.Prefix]bool{}, map[int]bool{}
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
	addrs, err := h.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("read addresses: %w", err)
	}
	gw := routed.Gateway().String()
	for _, a := range addrs {
		if a.LinkIndex == uplinkIndex {
			if ip, ok := netip.AddrFromSlice(a.IP); ok {
				ones, _ := a.Mask.Size()
				s.addrs[netip.PrefixFrom(ip.Unmap(), ones)] = true
			}
		}
		if a.IP.String() == gw {
			s.gateways[a.LinkIndex] = true
		}
	}
	routes, err := h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return fmt.Errorf("read routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst == nil || r.Priority != 0 {
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
	neighs, err := h.NeighList(0, netlink.FAMILY_V4)
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
