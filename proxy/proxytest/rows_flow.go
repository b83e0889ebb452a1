// SPDX-License-Identifier: Apache-2.0

//nolint:thelper // a row is a test and not a helper: its own lines are what a failure names
package proxytest

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/proxy"
)

// afterPauses asks after each of up to so many pauses that are longer than one
// second of affinity, without a connection in between, until the answer is yes.
func (l *Lab) afterPauses(t *testing.T, pauses int, moved func() bool) bool {
	t.Helper()
	for range pauses {
		timer := time.NewTimer(1300 * time.Millisecond)
		select {
		case <-timer.C:
		case <-t.Context().Done():
			timer.Stop()
			return false
		}
		if moved() {
			return true
		}
	}
	return false
}

// loopbackGuard sends a packet for 127.0.0.1 from outside to a node's hardware
// address. A process on the node's loopback must not see it, although the node
// may have route_localnet set.
func (l *Lab) loopbackGuard(t *testing.T) {
	t.Helper()
	victim, err := l.N1.NS.ListenPacket(t.Context(), "udp", "127.0.0.1:8181")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = victim.Close() }()
	in(t, l.X.NS, func() error {
		// The sender must want to send it: its own loopback would answer else.
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.AddrDel(lo, addr("127.0.0.1/8")); err != nil {
			return err
		}
		_, loop, _ := net.ParseCIDR("127.0.0.0/8")
		eth, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Dst: loop, Gw: net.ParseIP(l.N1.IP.String())})
	})
	sysctls(t, l.X.NS, map[string]string{"net/ipv4/conf/all/route_localnet": "1"})
	t.Cleanup(func() {
		in(t, l.X.NS, func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			_, loop, _ := net.ParseCIDR("127.0.0.0/8")
			if err := netlink.RouteDel(&netlink.Route{Dst: loop}); err != nil {
				return err
			}
			return netlink.AddrAdd(lo, addr("127.0.0.1/8"))
		})
	})
	c, err := l.X.NS.Dial(t.Context(), "udp", "127.0.0.1:8181")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Write([]byte("intruder")); err != nil {
		t.Fatal(err)
	}
	_ = victim.SetReadDeadline(time.Now().Add(quiet()))
	if n, from, err := victim.ReadFrom(make([]byte, 64)); err == nil {
		t.Errorf("%d bytes from %s reached 127.0.0.1 of the node", n, from)
	}
}

// conntrackRows are about UDP clients that keep their port.
func conntrackRows() []Row {
	steady := func(t *testing.T, h *Host, to string) net.Conn {
		t.Helper()
		c, err := h.NS.Dial(context.Background(), "udp", to)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	ask := func(c net.Conn) Reply { return talk(c, "udp", time.Now()) }
	return []Row{
		{ID: "O01", Title: "a UDP client moves when its backend goes", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("udp", OverUDP), Ready(l.B1))
			c := steady(t, l.C1, vip+":80")
			want(t, "before", ask(c), l.seen(l.C1), l.B1)
			l.Serve(t, Service("udp", OverUDP), Ready(l.B2))
			want(t, "after", ask(c), l.seen(l.C1), l.B2)
		}},
		{ID: "O02", Title: "a UDP client that was early gets through", Run: func(t *testing.T, l *Lab) {
			l.Apply(t, nil)
			c := steady(t, l.C1, vip+":80")
			wantOutcome(t, "before the Service", ask(c), Silence)
			l.Serve(t, Service("udp", OverUDP))
			if !l.userspace() {
				wantOutcome(t, "before the endpoint", ask(c), Refused)
			}
			l.Serve(t, Service("udp", OverUDP), Ready(l.B2))
			nettest.Eventually(t, 5*time.Second, "an answer on the old port", func() error {
				r := ask(c)
				if r.Outcome == Answered && r.Backend == "b2" {
					return nil
				}
				return fmt.Errorf("%s", r)
			})
		}},
		{ID: "O03", Title: "all endpoints gone: entries are left alone", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("udp", OverUDP), Ready(l.B1))
			c := steady(t, l.C1, vip+":80")
			want(t, "before", ask(c), l.seen(l.C1), l.B1)
			l.Serve(t, Service("udp", OverUDP))
			if l.Mode == "iptables" || l.Mode == "nftables" {
				want(t, "the flow goes on", ask(c), l.seen(l.C1), l.B1)
			}
		}},
		{ID: "O04", Title: "a UDP nodePort client moves too", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("udp", NodePort(30053), OverUDP), Ready(l.B1))
			c := steady(t, l.X, l.N1.IP.String()+":30053")
			want(t, "before", ask(c), l.N1.IP, l.B1)
			l.Serve(t, Service("udp", NodePort(30053), OverUDP), Ready(l.B2))
			want(t, "after", ask(c), l.N1.IP, l.B2)
		}},
		{ID: "O05", Title: "a flow to a terminating pod that serves is kept", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("udp", OverUDP), Ready(l.B1))
			c := steady(t, l.C1, vip+":80")
			want(t, "before", ask(c), l.seen(l.C1), l.B1)
			l.Serve(t, Service("udp", OverUDP), Draining(l.B1), Ready(l.B2))
			if !l.userspace() {
				want(t, "after", ask(c), l.seen(l.C1), l.B1)
			}
		}},
		{ID: "O06", Title: "an open TCP connection outlives a change of rules", Run: func(t *testing.T, l *Lab) {
			ln, err := l.B1.NS.Listen(t.Context(), "tcp", l.B1.IP.String()+":9090")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = ln.Close() }()
			svc := Service("web")
			l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{9090}, Ready(l.B1)))
			c, err := l.C1.NS.Dial(t.Context(), "tcp", vip+":80")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			s, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Close() }()
			l.Serve(t, svc, Ready(l.B2))
			deadline := time.Now().Add(2 * time.Second)
			_, _ = c.SetDeadline(deadline), s.SetDeadline(deadline)
			if _, err := c.Write([]byte("still here")); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 32)
			if n, err := s.Read(buf); err != nil || string(buf[:n]) != "still here" {
				t.Errorf("read %q, %v", buf[:n], err)
			}
		}},
		{ID: "O08", Title: "a deleted UDP Service lets go of its clients", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("udp", OverUDP), Ready(l.B1))
			c := steady(t, l.C1, vip+":80")
			want(t, "before", ask(c), l.seen(l.C1), l.B1)
			l.Apply(t, nil)
			if r := ask(c); r.Outcome == Answered {
				t.Errorf("after: %s", r)
			}
			flows, err := proxy.NewConntrack(l.N1.NS).UDPFlows(t.Context(), proxy.FamilyOf(netip.MustParseAddr(vip)))
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range flows {
				if f.Dst.String() == vip+":80" && f.Peer.Addr() == l.B1.IP {
					t.Errorf("the entry %v is still there", f)
				}
			}
		}},
	}
}
