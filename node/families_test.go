// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/cni/routed"
	"github.com/kplab/kplab/internal/nettest"
)

// Pods and nodes have each family of the lab, say so in the API, reach each other by
// each, and get back what somebody takes away.
func TestFamilies(t *testing.T) {
	for choice, count := range map[string]int{"dual": 2, "IPv6": 1} {
		t.Run(choice, func(t *testing.T) {
			l := newLabOf(t, choice)
			net := families(l.runtime)[choice].Nodes
			_, a := l.pod("a", "node1")
			_, b := l.pod("b", "node2")
			node1 := l.nodes["node1"].NS()
			ipsA, ipsB := l.podIPs("a"), l.podIPs("b")
			if len(ipsA) != count {
				t.Fatalf("pod a has %v, want %d addresses", ipsA, count)
			}
			n, err := l.client.CoreV1().Nodes().Get(context.Background(), "node1", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			var internal []string
			for _, addr := range n.Status.Addresses {
				if addr.Type == corev1.NodeInternalIP {
					internal = append(internal, addr.Address)
				}
			}
			if fmt.Sprint(internal) != fmt.Sprint(net[1].ips()) || len(n.Spec.PodCIDRs) != count || n.Spec.PodCIDRs[0] != n.Spec.PodCIDR {
				t.Errorf("the node has addresses %v and pod ranges %v", internal, n.Spec.PodCIDRs)
			}
			flow := func() error {
				for i := range ipsA {
					if _, from, err := send(t, a, b, ipsB[i]); err != nil || from != ipsA[i] {
						return fmt.Errorf("a to b at %s: from %s: %w", ipsB[i], from, err)
					}
					if _, from, err := send(t, node1, a, ipsA[i]); err != nil || from != net[1].ips()[i] {
						return fmt.Errorf("node1 to a at %s: from %s: %w", ipsA[i], from, err)
					}
					if _, from, err := send(t, node1, b, ipsB[i]); err != nil || from != net[1].ips()[i] {
						return fmt.Errorf("node1 to b at %s: from %s: %w", ipsB[i], from, err)
					}
				}
				return nil
			}
			start := time.Now()
			if err := flow(); err != nil {
				t.Fatal(err)
			}
			// A neighbour that is asked for, or an address that is tried out, costs a second.
			if took := time.Since(start); took > 500*time.Millisecond {
				t.Errorf("the first packets took %s", took)
			}
			for i, ip := range ipsA {
				if _, _, err := send(t, l.outside(), a, ip); !errors.Is(err, unix.ENETUNREACH) {
					t.Errorf("outside to a pod at %s (address %d): %v, want no route", ip, i, err)
				}
			}
			veth := routed.LinkName("uid-a", "eth0")
			last := len(ipsA) - 1 // of IPv6, in both choices
			for name, do := range map[string]func() error{
				"route to the other node's pods": func() error { return delRouteOf(ipsB[last]) },
				"route to a pod":                 func() error { return delRouteOf(ipsA[last]) },
				"pod link down":                  func() error { return withLink(veth, netlink.LinkSetDown) },
				"pod link gone":                  func() error { return withLink(veth, netlink.LinkDel) },
				"uplink down":                    func() error { return withLink("eth0", netlink.LinkSetDown) },
				"route to the node network":      func() error { return delRouteOf(net[2].ips()[last]) },
				"uplink address": func() error {
					return withLink("eth0", func(l netlink.Link) error {
						addr, err := netlink.ParseAddr(net[1].ips()[last].String() + "/64")
						if err != nil {
							return err
						}
						return netlink.AddrDel(l, addr)
					})
				},
			} {
				t.Run(name, func(t *testing.T) {
					if err := node1.Do(do); err != nil {
						t.Fatal(err)
					}
					nettest.Eventually(t, patience, "packets to flow again", flow)
				})
			}
		})
	}
}

// podIPs are a pod's addresses as the API has them.
func (l *lab) podIPs(name string) (ips []netip.Addr) {
	l.t.Helper()
	p, err := l.client.CoreV1().Pods("default").Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		l.t.Fatal(err)
	}
	for _, ip := range p.Status.PodIPs {
		ips = append(ips, netip.MustParseAddr(ip.IP))
	}
	return ips
}

// delRouteOf removes the route by which the namespace reaches ip, of IPv6.
func delRouteOf(ip netip.Addr) error {
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return err
	}
	for _, r := range routes {
		if r.Dst != nil && r.Dst.Contains(ip.AsSlice()) && r.Dst.String() != "::/0" {
			return netlink.RouteDel(&r)
		}
	}
	return fmt.Errorf("no route to %s", ip)
}
