// SPDX-License-Identifier: Apache-2.0

package routed

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/rtnl"
)

// wiring is the attachment of one pod, decided and ready to be written.
type wiring struct {
	node *rtnl.Conn
	pod  *netns.NS
	mtu  int
	// ips are the pod's addresses, at most one a family; nodeIPs are the node's, in
	// the same order.
	ips, nodeIPs []netip.Addr
	host         string // name of the node's end
	ifName       string // name of the pod's end
	alias        string
}

// add writes the attachment, in three calls to the kernel. Every message but the
// one that makes the pair may be repeated.
func (w wiring) add() error {
	pod, err := rtnl.DialIn(w.pod)
	if err != nil {
		return err
	}
	defer func() { _ = pod.Close() }()

	host, fresh, err := w.pair(pod)
	if err != nil {
		return err
	}
	eth0 := host.Peer
	var (
		l              rtnl.Link
		all, byDefault bool // eth0 began with the latter
	)
	b := new(rtnl.Batch).SetUp(1) // lo
	if w.hasIPv6() {
		b.NoLinkLocal(eth0)
	}
	b.SetUp(eth0)
	for _, ip := range w.ips {
		gw := gatewayOf(ip)
		b.AddAddr(eth0, alone(ip), unix.RT_SCOPE_UNIVERSE).ReplaceNeigh(eth0, gw, MAC(Gateway()))
		if ip.Is4() {
			b.ReplaceRoute(rtnl.Route{Dst: alone(gw), Link: eth0})
		} else {
			b.AddAddr(eth0, linkLocal(MAC(w.ips[0])), unix.RT_SCOPE_LINK)
		}
		b.ReplaceRoute(rtnl.Route{Dst: anywhere(ip), Via: gw, Link: eth0})
	}
	err = pod.Do(b.
		GetForwarding(rtnl.AllLinks, &all).GetForwarding(rtnl.DefaultLinks, &byDefault).
		GetLinkAt(eth0, &l))
	if err != nil {
		return fmt.Errorf("set up %s: %w", w.ifName, err)
	}
	if all || byDefault {
		// A new namespace copies the host's setting, and a host that runs
		// containers forwards; a pod that does is a router nobody asked for.
		if err := w.pod.Do(stopForwarding); err != nil {
			return err
		}
	}
	b = new(rtnl.Batch)
	if fresh {
		b.SetLink(host.Index, w.alias, 0, 0)
	} else {
		b.SetUp(host.Index).SetLink(host.Index, w.alias, w.mtu, 0)
	}
	for i, ip := range w.ips {
		b.AddAddr(host.Index, onLink(gatewayOf(ip)), unix.RT_SCOPE_LINK).
			ReplaceNeigh(host.Index, ip, MAC(w.ips[0])).
			ReplaceRoute(rtnl.Route{Dst: alone(ip), Link: host.Index, Src: w.nodeIPs[i]})
	}
	if err := w.node.Do(b.GetLinkAt(host.Index, &l)); err != nil {
		return fmt.Errorf("set up %s: %w", w.host, err)
	}
	return nil
}

func (w wiring) hasIPv6() bool { return slices.ContainsFunc(w.ips, netip.Addr.Is6) }

// onLink is a gateway's address as it stands on the node's end: IPv6 link-local
// addresses have a network of their own on each link.
func onLink(gw netip.Addr) netip.Prefix {
	if gw.Is4() {
		return alone(gw)
	}
	return netip.PrefixFrom(gw, 64)
}

// linkLocal is the IPv6 link-local address that the kernel would give a link (RFC
// 4291, appendix A). It is set by hand because the kernel tries its own out first.
func linkLocal(mac net.HardwareAddr) netip.Prefix {
	ip := netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, 9: mac[1], 10: mac[2], 11: 0xff, 12: 0xfe, 13: mac[3], 14: mac[4], 15: mac[5]})
	return netip.PrefixFrom(ip, 64)
}

// stopForwarding runs in the pod. Writing ip_forward sets all links and the value
// that new ones start with, but only when it changes: hence first the other way.
func stopForwarding() error {
	for _, value := range []string{"1", "0"} {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte(value), 0); err != nil {
			return fmt.Errorf("stop the pod from forwarding: %w", err)
		}
	}
	return nil
}

// pair makes the two ends (true), or finds them when an earlier call made them.
func (w wiring) pair(pod *rtnl.Conn) (host rtnl.Link, fresh bool, err error) {
	for attempt := 0; ; attempt++ {
		err = w.node.Do(new(rtnl.Batch).AddVeth(rtnl.Veth{
			Name: w.host, MTU: w.mtu, MAC: MAC(Gateway()), Up: true,
			Peer: rtnl.VethPeer{Name: w.ifName, MTU: w.mtu, MAC: MAC(w.ips[0]), NSFd: w.pod.Fd()},
		}).GetLink(w.host, &host))
		if err == nil {
			return host, true, nil
		}
		if !errors.Is(err, unix.EEXIST) || attempt > 0 {
			return host, false, err
		}
		// One of the two names is taken: by an earlier ADD of this attachment, by
		// the dying link of an earlier sandbox, or by a stranger.
		found, err := w.existing(pod)
		if err != nil || found.Index != 0 {
			return found, false, err
		}
	}
}

// existing returns the host end when both ends belong together. A host end of this
// attachment whose pod end is elsewhere is removed, and the zero Link returned.
func (w wiring) existing(pod *rtnl.Conn) (rtnl.Link, error) {
	var host, eth rtnl.Link
	if err := w.node.Do(new(rtnl.Batch).GetLink(w.host, &host).Tolerate(unix.ENODEV)); err != nil {
		return host, err
	}
	if err := pod.Do(new(rtnl.Batch).GetLink(w.ifName, &eth).Tolerate(unix.ENODEV)); err != nil {
		return host, err
	}
	switch {
	case host.Index == 0:
		return host, fmt.Errorf("the pod has an interface %s already that is not this plugin's: %w", w.ifName, unix.EEXIST)
	case host.Alias != "" && !w.owns(host.Alias):
		return rtnl.Link{}, fmt.Errorf("link %s on the node belongs to %q: %w", w.host, host.Alias, unix.EEXIST)
	case eth.Index != 0 && eth.Index == host.Peer && eth.Peer == host.Index && eth.MAC.String() == MAC(w.ips[0]).String():
		return host, nil
	case eth.Index != 0 && (eth.Index != host.Peer || eth.Peer != host.Index):
		return rtnl.Link{}, fmt.Errorf("the pod has an interface %s already that is not this plugin's: %w", w.ifName, unix.EEXIST)
	}
	err := w.node.Do(new(rtnl.Batch).DelLink(host.Index).Tolerate(unix.ENODEV))
	return rtnl.Link{}, err
}

// owns reports whether an alias was written for this attachment.
func (w wiring) owns(alias string) bool {
	mine, _, _ := strings.Cut(w.alias, " ")
	theirs, _, _ := strings.Cut(alias, " ")
	return mine == theirs
}

// remove takes the node's side away. The pod's side goes with the pair or with
// the namespace.
func (w wiring) remove(keepLink bool) error {
	var host rtnl.Link
	if err := w.node.Do(new(rtnl.Batch).GetLink(w.host, &host).Tolerate(unix.ENODEV)); err != nil {
		return err
	}
	if host.Index == 0 || host.Alias != "" && !w.owns(host.Alias) {
		return nil
	}
	b := new(rtnl.Batch)
	for _, ip := range w.ips {
		b.DelRoute(rtnl.Route{Dst: alone(ip), Link: host.Index}).DelNeigh(host.Index, ip)
	}
	if !keepLink {
		b.DelLink(host.Index).Tolerate(unix.ENODEV)
	}
	return w.node.Do(b)
}
