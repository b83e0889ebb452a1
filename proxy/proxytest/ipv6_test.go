// SPDX-License-Identifier: Apache-2.0

//nolint:thelper // a row is a test and not a helper: its own lines are what a failure names
package proxytest

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/proxy"
)

// Addresses of IPv6. Nodes, pods and x have one more, which ends as their IPv4
// address does.
const (
	ClusterCIDR6 = "fd00:10:244::/56"
	ServiceCIDR6 = "fd00:10:96::/112"
	vip6         = "fd00:10:96::50"
)

// addresses6 are the IPv6 addresses by name.
func addresses6() map[string]string {
	return map[string]string{
		"n1": "fd00:18::2", "n2": "fd00:18::3", "x": "fd00:18::200",
		"c1": "fd00:10:244:1::2", "b1": "fd00:10:244:1::11",
		"c2": "fd00:10:244:2::2", "b2": "fd00:10:244:2::12", "b3": "fd00:10:244:2::13",
	}
}

// IP6 is the host's IPv6 address, after [Topology.AddIPv6].
func (h *Host) IP6() netip.Addr { return netip.MustParseAddr(addresses6()[h.Name]) }

// AddIPv6 gives every host its second address, with the routes to the others and
// backends that serve port 8080 there.
func (tp *Topology) AddIPv6(tb testing.TB) {
	tb.Helper()
	put := func(h *Host, link string, addrs []string, routes map[string]string) {
		tb.Helper()
		in(tb, h.NS, func() error {
			l, err := netlink.LinkByName(link)
			if err != nil {
				return err
			}
			for _, a := range addrs {
				a := addr(a)
				a.Flags = 0x02 // IFA_F_NODAD: usable at once
				if err := netlink.AddrReplace(l, a); err != nil {
					return fmt.Errorf("%s on %s: %w", a, h.Name, err)
				}
			}
			for to, via := range routes {
				dst := netip.MustParsePrefix(to)
				r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: prefixNet(dst)}
				if via != "" {
					r.Gw = netip.MustParseAddr(via).AsSlice()
				}
				if err := netlink.RouteReplace(r); err != nil {
					return fmt.Errorf("route to %s on %s: %w", to, h.Name, err)
				}
			}
			return nil
		})
	}
	on := map[string]*Host{"n1": tp.N1, "n2": tp.N2}
	other := map[string]map[string]string{
		"n1": {"fd00:10:244:2::/64": tp.N2.IP6().String(), "::/0": "fd00:18::ffff"},
		"n2": {"fd00:10:244:1::/64": tp.N1.IP6().String(), "::/0": "fd00:18::ffff"},
	}
	for name, h := range on {
		sysctls(tb, h.NS, map[string]string{"net/ipv6/conf/all/forwarding": "1", "net/ipv6/icmp/ratelimit": "0"})
		put(h, "eth0", []string{h.IP6().String() + "/64"}, other[name])
	}
	put(tp.X, "eth0", []string{tp.X.IP6().String() + "/64"}, nil)
	in(tb, tp.fabric, func() error {
		br, err := netlink.LinkByName("underlay")
		if err != nil {
			return err
		}
		a := addr("fd00:18::ffff/64")
		a.Flags = 0x02
		return netlink.AddrAdd(br, a)
	})
	sysctls(tb, tp.fabric, map[string]string{"net/ipv6/conf/all/forwarding": "0"})
	for _, h := range []*Host{tp.C1, tp.C2, tp.B1, tp.B2, tp.B3} {
		put(on[h.Node], h.link, []string{"fe80::1/64"}, map[string]string{h.IP6().String() + "/128": ""})
		put(h, "eth0", []string{h.IP6().String() + "/128"}, map[string]string{"::/0": "fe80::1"})
	}
	for _, b := range []*Host{tp.B1, tp.B2, tp.B3} {
		serveAt(tb, b, b.IP6(), 8080)
	}
	// Neighbours are asked for here, by addresses that the kernel tries out first.
	for _, from := range []*Host{tp.C1, tp.C2, tp.B1, tp.N1, tp.N2} {
		for _, b := range []*Host{tp.B1, tp.B2, tp.B3} {
			nettest.Eventually(tb, 20*time.Second, from.Name+" to reach "+b.Name, func() error {
				if r := from.TCP(netip.AddrPortFrom(b.IP6(), 8080).String()); r.Outcome != Answered {
					return errors.New(r.String())
				}
				return nil
			})
		}
	}
	for _, n := range []*Host{tp.N1, tp.N2} {
		nettest.Eventually(tb, 20*time.Second, "x to reach "+n.Name, func() error {
			if r := tp.X.TCP(netip.AddrPortFrom(n.IP6(), 9).String()); r.Outcome != Refused {
				return errors.New(r.String())
			}
			return nil
		})
	}
}

// addIPv6 gives the lab IPv6 and has its modes serve both families from now on.
func (l *Lab) addIPv6(t *testing.T) {
	l.AddIPv6(t)
	l.change = func(f *proxy.Facts) {
		f.NodeIPs = append(f.NodeIPs, netip.MustParseAddr(addresses6()[f.NodeName]))
		f.ClusterCIDRs = append(f.ClusterCIDRs, netip.MustParsePrefix(ClusterCIDR6))
		f.ServiceCIDRs = append(f.ServiceCIDRs, netip.MustParsePrefix(ServiceCIDR6))
	}
}

func prefixNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// TestIPv6 runs the rows of IPv6 with the modes that serve it by rules.
func TestIPv6(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	for _, m := range modes() {
		if m.Name != "iptables" && m.Name != "nftables" {
			continue
		}
		t.Run(m.String(), func(t *testing.T) {
			lab := NewLab(t, m)
			lab.addIPv6(t)
			for _, row := range ipv6Rows() {
				t.Run(row.ID, func(t *testing.T) {
					t.Logf("%s: %s", row.ID, row.Title)
					t.Cleanup(func() { lab.Apply(t, nil) })
					row.Run(t, lab)
				})
			}
		})
	}
}

// ready6 is a pod that takes traffic at its IPv6 address.
func ready6(h *Host) discoveryv1.Endpoint {
	e := Ready(h)
	e.Addresses = []string{h.IP6().String()}
	return e
}

// dual gives a Service an address of each family.
func dual(s *corev1.Service) {
	s.Spec.ClusterIPs = []string{vip, vip6}
	s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
}

// serve6 applies a Service of both families: its IPv4 endpoints, and the same ones at
// their IPv6 addresses.
func (l *Lab) serve6(t *testing.T, svc *corev1.Service, eps ...*Host) {
	var four, six []discoveryv1.Endpoint
	for _, h := range eps {
		four, six = append(four, Ready(h)), append(six, ready6(h))
	}
	second := Slice(svc, []int32{8080}, six...)
	second.Name, second.AddressType = svc.Name+"-v6", discoveryv1.AddressTypeIPv6
	l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{8080}, four...), second)
}

// ipv6Rows are about a Service of both families, at its IPv6 addresses.
func ipv6Rows() []Row {
	at := "[" + vip6 + "]:80"
	return []Row{
		{ID: "P15", Title: "each family has its own rules and reaches its own endpoints", Run: func(t *testing.T, l *Lab) {
			l.serve6(t, Service("web", dual), l.B1, l.B2)
			seen := map[string]bool{}
			for range 40 {
				r := l.C1.TCP(at)
				want(t, "c1", r, l.C1.IP6(), l.B1, l.B2)
				seen[r.Backend] = true
			}
			if len(seen) != 2 {
				t.Errorf("40 connections met %v only", seen)
			}
			want(t, "c1 by IPv4", l.C1.TCP(vip+":80"), l.C1.IP, l.B1, l.B2)
		}},
		{ID: "P15-node", Title: "the node itself is masqueraded", Run: func(t *testing.T, l *Lab) {
			l.serve6(t, Service("web", dual), l.B1)
			want(t, "n1 to its own pod", l.N1.TCP(at), l.N1.IP6(), l.B1)
			want(t, "n2 to a pod elsewhere", l.N2.TCP(at), l.N2.IP6(), l.B1)
		}},
		{ID: "P15-udp", Title: "UDP answers come back from the cluster address", Run: func(t *testing.T, l *Lab) {
			l.serve6(t, Service("udp", dual, OverUDP), l.B2)
			want(t, "c1", l.C1.UDP(at), l.C1.IP6(), l.B2)
		}},
		{ID: "P15-hairpin", Title: "a pod reaches itself through its Service", Run: func(t *testing.T, l *Lab) {
			l.serve6(t, Service("web", dual), l.B1)
			want(t, "b1", l.B1.TCP(at), l.N1.IP6(), l.B1)
		}},
		{ID: "P15-none", Title: "no endpoints of the family: refused, and the other one serves", Run: func(t *testing.T, l *Lab) {
			// Over UDP: a TCP socket of IPv6 that is still in its connect call keeps the
			// refusal for later, and gives up with the SYN that it repeats after a second.
			svc := Service("udp", dual, OverUDP)
			l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{8080}, Ready(l.B1)))
			wantOutcome(t, "c1", l.C1.UDP(at), Refused)
			want(t, "c1 by IPv4", l.C1.UDP(vip+":80"), l.C1.IP, l.B1)
		}},
		{ID: "P15-sticky", Title: "ClientIP keeps one backend", Run: func(t *testing.T, l *Lab) {
			l.serve6(t, Service("web", dual, Sticky(10800)), l.B1, l.B2, l.B3)
			if got := spread(t, l.C1, at, 30); len(got) != 1 {
				t.Errorf("30 connections went to %v", got)
			}
		}},
		{ID: "P15-nodeport", Title: "every node answers on the nodePort, localhost never", Run: func(t *testing.T, l *Lab) {
			l.serve6(t, Service("web", dual, NodePort(30080)), l.B2)
			want(t, "by n1", l.X.TCP("["+l.N1.IP6().String()+"]:30080"), l.N1.IP6(), l.B2)
			want(t, "by n2", l.X.TCP("["+l.N2.IP6().String()+"]:30080"), l.N2.IP6(), l.B2)
			wantOutcome(t, "n1 at ::1", l.N1.TCP("[::1]:30080"), Refused)
		}},
		{ID: "P15-local", Title: "externalTrafficPolicy Local keeps the client's address", Run: func(t *testing.T, l *Lab) {
			l.serve6(t, Service("web", dual, NodePort(30080), ExternalLocal), l.B2)
			want(t, "by n2", l.X.TCP("["+l.N2.IP6().String()+"]:30080"), l.X.IP6(), l.B2)
			wantOutcome(t, "by n1", l.X.TCP("["+l.N1.IP6().String()+"]:30080"), Silence)
		}},
		{ID: "P10", Title: "a family that the Service gave up is not served", Run: func(t *testing.T, l *Lab) {
			l.serve6(t, Service("web", dual), l.B1)
			want(t, "both", l.C1.TCP(at), l.C1.IP6(), l.B1)
			l.Serve(t, Service("web"), Ready(l.B1))
			if r := l.C1.TCP(at); r.Outcome == Answered {
				t.Errorf("the address that is gone: %s", r)
			}
			want(t, "the other one", l.C1.TCP(vip+":80"), l.C1.IP, l.B1)
		}},
	}
}
