// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

// headers is what UDP and IP add to a datagram.
func headers(ip netip.Addr) int {
	if ip.Is6() {
		return 48
	}
	return 28
}

// sendWhole sends one IP packet of that many bytes that nobody may cut into fragments.
// EMSGSIZE means that the sender knows that it is too large.
func sendWhole(from, to *netns.NS, ip netip.Addr, bytes int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	at := netip.AddrPortFrom(ip, 9).String()
	l, err := to.ListenPacket(ctx, "udp", at)
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }()
	c, err := from.Dial(ctx, "udp", at)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		return err
	}
	level, option, value := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO
	if ip.Is6() {
		level, option, value = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO
	}
	var set error
	if err := raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), level, option, value) }); err != nil || set != nil {
		return errors.Join(err, set)
	}
	text := make([]byte, bytes-headers(ip))
	if _, err := c.Write(text); err != nil {
		return err
	}
	_ = l.SetReadDeadline(time.Now().Add(900 * time.Millisecond))
	n, _, err := l.ReadFrom(make([]byte, 64<<10))
	if err == nil && n != len(text) {
		err = fmt.Errorf("%d of %d bytes arrived", n, len(text))
	}
	return err
}

// sent is how many packets a link of the namespace has sent.
func sent(t *testing.T, ns *netns.NS, link string) (n uint64) {
	t.Helper()
	if err := ns.Do(func() error {
		return withLink(link, func(l netlink.Link) error {
			n = l.Attrs().Statistics.TxPackets
			return nil
		})
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// Between nodes packets of pods travel wrapped, as large as the pods may send them,
// and what somebody takes away of the overlay comes back.
func TestOverlay(t *testing.T) {
	for choice, mtu := range map[string]int{"vxlan": 1450, "vxlan dual": 1450, "vxlan IPv6": 1430} {
		t.Run(choice, func(t *testing.T) {
			l := newLabOf(t, choice)
			nodes := families(l.runtime)[choice].Nodes
			_, a := l.pod("a", "node1")
			_, b := l.pod("b", "node2")
			node1, node2 := l.nodes["node1"].NS(), l.nodes["node2"].NS()
			ipsA, ipsB := l.podIPs("a"), l.podIPs("b")
			flow := func() error {
				for i := range ipsA {
					if _, from, err := send(t, a, b, ipsB[i]); err != nil || from != ipsA[i] {
						return fmt.Errorf("a to b at %s: from %s: %w", ipsB[i], from, err)
					}
					if _, from, err := send(t, node1, b, ipsB[i]); err != nil || from != nodes[1].overlayIPs()[i] {
						return fmt.Errorf("node1 to b at %s: from %s: %w", ipsB[i], from, err)
					}
					if _, from, err := send(t, b, node1, nodes[1].overlayIPs()[i]); err != nil || from != ipsB[i] {
						return fmt.Errorf("b to node1 at %s: from %s: %w", nodes[1].overlayIPs()[i], from, err)
					}
					if _, from, err := send(t, node1, a, ipsA[i]); err != nil || from != nodes[1].ips()[i] {
						return fmt.Errorf("node1 to its own pod at %s: from %s: %w", ipsA[i], from, err)
					}
					if _, from, err := send(t, node1, node2, nodes[2].ips()[i]); err != nil || from != nodes[1].ips()[i] {
						return fmt.Errorf("node1 to node2: from %s: %w", from, err)
					}
				}
				return nil
			}
			start, before := time.Now(), sent(t, node1, vxlanLink)
			if err := flow(); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took > time.Second {
				t.Errorf("the first packets took %s", took)
			}
			if n := sent(t, node1, vxlanLink) - before; n < uint64(2*len(ipsA)) {
				t.Errorf("%d packets went by the overlay, want those from pod and node, %d", n, 2*len(ipsA))
			}
			for _, ip := range ipsB {
				if err := sendWhole(a, b, ip, mtu); err != nil {
					t.Errorf("%d bytes to %s: %v", mtu, ip, err)
				}
				if err := sendWhole(a, b, ip, mtu+1); !errors.Is(err, unix.EMSGSIZE) {
					t.Errorf("%d bytes to %s: %v, want %v", mtu+1, ip, err, unix.EMSGSIZE)
				}
				if err := sendWhole(node1, b, ip, 1500); !errors.Is(err, unix.EMSGSIZE) {
					t.Errorf("1500 bytes of the node to %s: %v, want %v", ip, err, unix.EMSGSIZE)
				}
			}
			for i, ip := range nodes[2].ips() {
				if err := sendWhole(node1, node2, ip, 1500); err != nil {
					t.Errorf("1500 bytes from node to node: %v", err)
				}
				t.Run("path MTU of "+ip.String(), func(t *testing.T) { learnsPathMTU(t, l, nodes[1].ips()[i], b, ipsB[i], mtu) })
			}
			for name, do := range map[string]func() error{
				"overlay down": func() error { return withLink(vxlanLink, netlink.LinkSetDown) },
				"overlay gone": func() error { return withLink(vxlanLink, netlink.LinkDel) },
				"overlay's MTU": func() error {
					return withLink(vxlanLink, func(l netlink.Link) error { return errors.Join(netlink.LinkSetMTU(l, 1300), netlink.LinkSetDown(l)) })
				},
				"forwarding entry": func() error {
					return withLink(vxlanLink, func(l netlink.Link) error {
						return netlink.NeighDel(&netlink.Neigh{
							LinkIndex: l.Attrs().Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF,
							HardwareAddr: nodes[2].overlayMAC(), IP: nodes[2].IP.AsSlice(),
						})
					})
				},
				"neighbour": func() error {
					return withLink(vxlanLink, func(l netlink.Link) error {
						return netlink.NeighDel(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: nodes[2].overlayIPs()[0].AsSlice()})
					})
				},
				"uplink down": func() error { return withLink("eth0", netlink.LinkSetDown) },
			} {
				t.Run(name, func(t *testing.T) {
					if err := node1.Do(do); err != nil {
						t.Fatal(err)
					}
					nettest.Eventually(t, patience, "packets to flow again", flow)
					nettest.Eventually(t, patience, "the largest packet to flow", func() error { return sendWhole(a, b, ipsB[0], mtu) })
				})
			}
		})
	}
}

// learnsPathMTU sends from outside, whose link takes larger packets than the overlay,
// by a node: it tells the client, which knows it from then on.
func learnsPathMTU(t *testing.T, l *lab, via netip.Addr, pod *netns.NS, ip netip.Addr, mtu int) {
	t.Helper()
	client := l.outside()
	if err := client.Do(func() error {
		return withLink("eth0", func(l netlink.Link) error {
			return netlink.RouteReplace(&netlink.Route{
				LinkIndex: l.Attrs().Index, Gw: via.AsSlice(),
				Dst: &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(ip.BitLen(), ip.BitLen())},
			})
		})
	}); err != nil {
		t.Fatal(err)
	}
	if err := sendWhole(client, pod, ip, 1500); err == nil {
		t.Errorf("1500 bytes went through an overlay of %d", mtu)
	}
	nettest.Eventually(t, patience, "the client to know the path's MTU", func() error {
		if err := sendWhole(client, pod, ip, 1500); !errors.Is(err, unix.EMSGSIZE) {
			return fmt.Errorf("it sends, with %v", err) //nolint:errorlint // nil is no error to wrap
		}
		return nil
	})
	if err := sendWhole(client, pod, ip, mtu); err != nil {
		t.Errorf("%d bytes from outside: %v", mtu, err)
	}
}
