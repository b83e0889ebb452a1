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
	ip, ok := netip.AddrFromSlice(prev.IPs[0].Address.IP)
	if !ok {
		return types.NewError(types.ErrInvalidNetworkConfig, "prevResult holds no usable address", "")
	}
	ip = ip.Unmap()
	pod, err := netns.Open(r.Netns)
	if err != nil {
		return types.NewError(types.ErrInvalidNetNS, fmt.Sprintf("open the namespace of container %s", r.ContainerID), err.Error())
	}
	defer func() { _ = pod.Close() }()

	podErr := pod.Do(func() error {
		return end{
			name: r.IfName, addr: ip, neigh: Gateway(), mac: MAC(Gateway()).String(),
			routes: []string{netip.PrefixFrom(Gateway(), 32).String(), "default via " + Gateway().String()},
		}.check()
	})
	nodeErr := p.inNode(func() error {
		return end{
			name: LinkName(r.ContainerID, r.IfName), addr: Gateway(), neigh: ip, mac: MAC(ip).String(),
			routes: []string{netip.PrefixFrom(ip, 32).String() + " src " + conf.NodeIP.String()},
		}.check()
	})
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
	addr  netip.Addr
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
	addrs, err := netlink.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("read the addresses of %s: %w", e.name, err)
	}
	found := false
	for _, a := range addrs {
		found = found || a.IPNet.String() == netip.PrefixFrom(e.addr, 32).String()
	}
	if !found {
		errs = append(errs, fmt.Errorf("link %s has no address %s/32", e.name, e.addr))
	}
	neighs, err := netlink.NeighList(link.Attrs().Index, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("read the neighbours of %s: %w", e.name, err)
	}
	found = false
	for _, n := range neighs {
		found = found || n.IP.String() == e.neigh.String() && n.HardwareAddr.String() == e.mac && n.State&netlink.NUD_PERMANENT != 0
	}
	if !found {
		errs = append(errs, fmt.Errorf("link %s has no permanent neighbour %s at %s", e.name, e.neigh, e.mac))
	}
	routes, err := netlink.RouteList(link, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("read the routes over %s: %w", e.name, err)
	}
	have := map[string]bool{}
	for _, r := range routes {
		have[describe(r)] = true
	}
	for _, want := range e.routes {
		if !have[want] {
			errs = append(errs, fmt.Errorf("no route %q over %s", want, e.name))
		}
	}
	return errors.Join(errs...)
}

// describe writes a route the way `ip route` does, without the link.
func describe(r netlink.Route) string {
	s := "default"
	if r.Dst != nil && r.Dst.String() != "0.0.0.0/0" {
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
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_V4)
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
