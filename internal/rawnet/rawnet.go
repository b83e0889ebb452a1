// SPDX-License-Identifier: Apache-2.0

// Package rawnet tells the kernel the least that it must be told for a pod: what
// benchmarks measure the product against, in the same run on the same machine. The
// product does not import it.
package rawnet

import (
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/rtnl"
)

// The gateway that every pod sees, and hardware addresses that no one asks for.
var (
	gateway    = netip.MustParseAddr("169.254.1.1")
	gatewayMAC = net.HardwareAddr{2, 0, 169, 254, 1, 1}
)

// Wire joins a pod's namespace to a node's by a pair of links and gives the pod the
// address ip, in three calls on open sockets: links, addresses, permanent
// neighbours and routes of both sides. name is the node's end, nodeIP the source of
// what the node itself sends to the pod; it may be left out.
func Wire(node, pod *rtnl.Conn, ns *netns.NS, name string, ip, nodeIP netip.Addr) error {
	var host, link rtnl.Link
	gw := netip.PrefixFrom(gateway, 32)
	ip4 := ip.As4()
	mac := net.HardwareAddr{2, 1, ip4[0], ip4[1], ip4[2], ip4[3]}
	if err := node.Do(new(rtnl.Batch).AddVeth(rtnl.Veth{
		Name: name, MAC: gatewayMAC, Up: true, Peer: rtnl.VethPeer{Name: "eth0", MAC: mac, NSFd: ns.Fd()},
	}).GetLink(name, &host)); err != nil {
		return err
	}
	if err := pod.Do(new(rtnl.Batch).SetUp(1).SetUp(host.Peer).
		AddAddr(host.Peer, netip.PrefixFrom(ip, 32), unix.RT_SCOPE_UNIVERSE).
		ReplaceNeigh(host.Peer, gateway, gatewayMAC).
		ReplaceRoute(rtnl.Route{Dst: gw, Link: host.Peer}).
		ReplaceRoute(rtnl.Route{Dst: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Via: gateway, Link: host.Peer}).
		GetLinkAt(host.Peer, &link)); err != nil {
		return err
	}
	return node.Do(new(rtnl.Batch).
		AddAddr(host.Index, gw, unix.RT_SCOPE_LINK).
		ReplaceNeigh(host.Index, ip, mac).
		ReplaceRoute(rtnl.Route{Dst: netip.PrefixFrom(ip, 32), Link: host.Index, Src: nodeIP}).
		GetLinkAt(host.Index, &link))
}
