// SPDX-License-Identifier: Apache-2.0

package routed

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// Check compares an attachment with what ADD answered: both links up, addresses,
// routes and neighbours. The error names everything that is wrong, not only the
// first.
func (p *Plugin) Check(r Request, conf *Conf) error {
	if conf.PrevResult == nil {
		return types.NewError(types.ErrInvalidNetworkConfig, "CHECK needs prevResult", "")
	}
	prev, err := types100.NewResultFromResult(conf.PrevResult)
	if err != nil {
		return types.NewError(types.ErrDecodingFailure, "prevResult cannot be read", err.Error())
	}
	if len(prev.IPs) == 0 {
		return types.NewError(types.ErrInvalidNetworkConfig, "prevResult holds no address", "")
	}
	var ips []netip.Addr
	for _, c := range prev.IPs {
		ip, ok := netip.AddrFromSlice(c.Address.IP)
		if !ok {
			return types.NewError(types.ErrInvalidNetworkConfig, "prevResult holds no usable address", "")
		}
		ips = append(ips, ip.Unmap())
	}
	pod, err := netns.Open(r.Netns)
	if err != nil {
		return types.NewError(types.ErrInvalidNetNS, fmt.Sprintf("open the namespace of container %s", r.ContainerID), err.Error())
	}
	defer func() { _ = pod.Close() }()

	podEnd := end{name: r.IfName}
	nodeEnd := end{name: LinkName(r.ContainerID, r.IfName)}
	for _, ip := range ips {
		gw := gatewayOf(ip)
		inPod := part{addr: alone(ip), neigh: gw, mac: MAC(Gateway()).String(), routes: []string{"default via " + gw.String()}}
		if ip.Is4() {
			inPod.routes = append(inPod.routes, alone(gw).String())
		}
		podEnd.parts = append(podEnd.parts, inPod)
		onNode := part{addr: onLink(gw), neigh: ip, mac: MAC(ips[0]).String()}
		for _, l := range conf.lanes() {
			if l.nodeIP.Is4() == ip.Is4() {
				onNode.routes = []string{alone(ip).String() + " src " + l.nodeIP.String()}
			}
		}
		nodeEnd.parts = append(nodeEnd.parts, onNode)
	}
	podErr := pod.Do(podEnd.check)
	nodeErr := p.inNode(nodeEnd.check)
	if podErr != nil {
		podErr = fmt.Errorf("in the pod: %w", podErr)
	}
	if nodeErr != nil {
		nodeErr = fmt.Errorf("on the node: %w", nodeErr)
	}
	return errors.Join(podErr, nodeErr)
}

// end is one end of an attachment as it ought to be.
type end struct {
	name  string
	parts []part
}

// part is what an end has of one family.
type part struct {
	addr  netip.Prefix
	neigh netip.Addr
	mac   string
	// routes are written as describe writes them.
	routes []string
}

// check reads the end back from the kernel, in the namespace of the thread.
func (e end) check() error {
	link, err := netlink.LinkByName(e.name)
	if err != nil {
		return fmt.Errorf("link %s: %w", e.name, err)
	}
	var errs []error
	if link.Attrs().Flags&unix.IFF_UP == 0 {
		errs = append(errs, fmt.Errorf("link %s is down", e.name))
	}
	for _, p := range e.parts {
		errs = append(errs, p.check(link))
	}
	return errors.Join(errs...)
}

// check reads what link has of the family.
func (p part) check(link netlink.Link) error {
	name, family := link.Attrs().Name, netlink.FAMILY_V4
	if p.addr.Addr().Is6() {
		family = netlink.FAMILY_V6
	}
	var errs []error
	addrs, err := netlink.AddrList(link, family)
	if err != nil {
		return fmt.Errorf("read the addresses of %s: %w", name, err)
	}
	found := false
	for _, a := range addrs {
		found = found || a.IPNet.String() == p.addr.String()
	}
	if !found {
		errs = append(errs, fmt.Errorf("link %s has no address %s", name, p.addr))
	}
	neighs, err := netlink.NeighList(link.Attrs().Index, family)
	if err != nil {
		return fmt.Errorf("read the neighbours of %s: %w", name, err)
	}
	found = false
	for _, n := range neighs {
		found = found || n.IP.String() == p.neigh.String() && n.HardwareAddr.String() == p.mac && n.State&netlink.NUD_PERMANENT != 0
	}
	if !found {
		errs = append(errs, fmt.Errorf("link %s has no permanent neighbour %s at %s", name, p.neigh, p.mac))
	}
	routes, err := netlink.RouteList(link, family)
	if err != nil {
		return fmt.Errorf("read the routes over %s: %w", name, err)
	}
	have := map[string]bool{}
	for _, r := range routes {
		have[describe(r)] = true
	}
	for _, want := range p.routes {
		if !have[want] {
			errs = append(errs, fmt.Errorf("no route %q over %s", want, name))
		}
	}
	return errors.Join(errs...)
}

// describe writes a route the way `ip route` does, without the link.
func describe(r netlink.Route) string {
	s := "default"
	if r.Dst != nil && r.Dst.String() != "0.0.0.0/0" && r.Dst.String() != "::/0" {
		s = r.Dst.String()
	}
	if r.Gw != nil {
		s += " via " + r.Gw.String()
	}
	if r.Src != nil {
		s += " src " + r.Src.String()
	}
	return s
}

// hasLocalAddr reports whether a link of the thread's namespace carries ip.
func hasLocalAddr(ip netip.Addr) error {
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("read the node's addresses: %w", err)
	}
	for _, a := range addrs {
		if a.IP.String() == ip.String() {
			return nil
		}
	}
	return fmt.Errorf("no link of the node carries it")
}
