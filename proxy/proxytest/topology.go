// SPDX-License-Identifier: Apache-2.0

// Package proxytest is the contract of a proxy mode, told in packets. A [Lab] is
// a small cluster network made of namespaces: two nodes, client and backend pods
// on each, and clients outside. A row of [Rows] applies Services to the nodes
// through the mode under test, sends real connections, and looks at who answers
// and which source address the backend saw.
//
// Rows carry the numbers of the table of observable Service behaviour. Where
// modes differ by design the row says what each does.
package proxytest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/ctkeep"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

// Addresses of the lab. The node network is 172.18.0.0/16, pods are
// 10.244.<node>.0/24, cluster addresses 10.96.0.0/12.
const (
	ClusterCIDR = "10.244.0.0/16"
	ServiceCIDR = "10.96.0.0/12"
	// LoadBalancerIP is routed to n1 by the clients outside.
	LoadBalancerIP = "203.0.113.10"
	// ExternalIP is routed to n1 by the clients outside, too.
	ExternalIP = "203.0.113.77"
)

// quiet is how long a client waits before it calls a silence a timeout. It is
// below the second after which the kernel repeats a SYN, so nothing slow can pass
// for an answer. In an emulated machine everything is slow, and KPLAB_SLOW says so.
func quiet() time.Duration {
	if os.Getenv("KPLAB_SLOW") != "" {
		return 900 * time.Millisecond
	}
	return 400 * time.Millisecond
}

// Host is something with an address of its own: a node, a pod, or a client
// outside.
type Host struct {
	Name string
	IP   netip.Addr
	NS   *netns.NS
	// Node is where a pod runs; empty for others.
	Node string
	link string // the pod's link on the node
	// patience replaces quiet when it is set.
	patience time.Duration
}

// Topology is the lab's namespaces. Every name below is wired and can reach what
// it could reach in a cluster: pods reach pods and nodes, clients outside reach
// nodes only.
type Topology struct {
	fabric *netns.NS
	// N1 and N2 are the nodes.
	N1, N2 *Host
	// C1 and C2 are client pods, one on each node; B1 is a backend on n1, B2 and
	// B3 are on n2. Every backend serves TCP and UDP on ports 8080, 8443 and
	// 5353.
	C1, C2, B1, B2, B3 *Host
	// X and X2 are outside: 172.18.0.200, which Services may know as a source
	// range, and 172.18.99.200, which is in none.
	X, X2 *Host
}

// NewTopology builds the namespaces and starts the backends; all of it ends with
// the test.
func NewTopology(tb testing.TB) *Topology {
	tb.Helper()
	tp := &Topology{fabric: nettest.NewNS(tb)}
	in(tb, tp.fabric, func() error {
		br := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
		br.Name = "underlay"
		if err := netlink.LinkAdd(br); err != nil {
			return err
		}
		// The default gateway of the nodes: it takes every packet and answers
		// none, as a network does that knows no route.
		if err := netlink.AddrAdd(br, addr("172.18.255.254/16")); err != nil {
			return err
		}
		return netlink.LinkSetUp(br)
	})
	sysctls(tb, tp.fabric, map[string]string{"net/ipv4/ip_forward": "0"})

	tp.N1, tp.N2 = tp.node(tb, "n1", "172.18.0.2"), tp.node(tb, "n2", "172.18.0.3")
	tp.X, tp.X2 = tp.outside(tb, "x", "172.18.0.200"), tp.outside(tb, "x2", "172.18.99.200")
	tp.C1, tp.B1 = tp.pod(tb, tp.N1, "c1", "10.244.1.2"), tp.pod(tb, tp.N1, "b1", "10.244.1.11")
	tp.C2, tp.B2 = tp.pod(tb, tp.N2, "c2", "10.244.2.2"), tp.pod(tb, tp.N2, "b2", "10.244.2.12")
	tp.B3 = tp.pod(tb, tp.N2, "b3", "10.244.2.13")
	for _, r := range []struct {
		from *Host
		to   string
		via  *Host
	}{
		{tp.N1, "10.244.2.0/24", tp.N2}, {tp.N2, "10.244.1.0/24", tp.N1},
		{tp.X, LoadBalancerIP + "/32", tp.N1}, {tp.X2, LoadBalancerIP + "/32", tp.N1}, {tp.X, ExternalIP + "/32", tp.N1},
	} {
		route(tb, r.from, r.to, r.via.IP.String())
	}
	for _, b := range []*Host{tp.B1, tp.B2, tp.B3} {
		for _, port := range []int{8080, 8443, 5353} {
			serve(tb, b, port)
		}
	}
	return tp
}

func in(tb testing.TB, ns *netns.NS, fn func() error) {
	tb.Helper()
	if err := ns.Do(fn); err != nil {
		tb.Fatal(err)
	}
}

func addr(s string) *netlink.Addr {
	a, err := netlink.ParseAddr(s)
	if err != nil {
		panic(fmt.Sprintf("address %q of the test topology: %v", s, err)) // a constant of this file
	}
	return a
}

func sysctls(tb testing.TB, ns *netns.NS, values map[string]string) {
	tb.Helper()
	in(tb, ns, func() error {
		for k, v := range values {
			if err := os.WriteFile("/proc/sys/"+k, []byte(v), 0); err != nil {
				return err
			}
		}
		return nil
	})
}

// attach joins a namespace to the fabric's bridge as eth0.
func (tp *Topology) attach(tb testing.TB, ns *netns.NS, name, ip string) {
	tb.Helper()
	nettest.Veth(tb, nettest.End{NS: ns, Name: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix(ip + "/16")}}, nettest.End{NS: tp.fabric, Name: name})
	in(tb, tp.fabric, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		br, err := netlink.LinkByName("underlay")
		if err != nil {
			return err
		}
		return netlink.LinkSetMaster(l, br)
	})
}

func (tp *Topology) node(tb testing.TB, name, ip string) *Host {
	tb.Helper()
	ns := nettest.NewNS(tb)
	sysctls(tb, ns, map[string]string{
		"net/ipv4/ip_forward":                  "1",
		"net/ipv4/conf/all/rp_filter":          "0",
		"net/ipv4/conf/default/rp_filter":      "0",
		"net/ipv4/conf/all/send_redirects":     "0", // a redirect would use up the
		"net/ipv4/conf/default/send_redirects": "0", // peer's allowance of ICMP
		"net/ipv4/icmp_ratelimit":              "0", // every refusal is told at once
	})
	tp.attach(tb, ns, name, ip)
	h := &Host{Name: name, IP: netip.MustParseAddr(ip), NS: ns}
	route(tb, h, "0.0.0.0/0", "172.18.255.254")
	if err := ctkeep.Keep(ns); err != nil {
		tb.Fatal(err)
	}
	return h
}

func (tp *Topology) outside(tb testing.TB, name, ip string) *Host {
	tb.Helper()
	ns := nettest.NewNS(tb)
	tp.attach(tb, ns, name, ip)
	return &Host{Name: name, IP: netip.MustParseAddr(ip), NS: ns}
}

// pod wires a pod as the routed CNI plugin does: a /32 on eth0, a gateway that
// exists only on the link, and a /32 route on the node.
func (tp *Topology) pod(tb testing.TB, node *Host, name, ip string) *Host {
	tb.Helper()
	ns := nettest.NewNS(tb)
	h := &Host{Name: name, IP: netip.MustParseAddr(ip), NS: ns, Node: node.Name, link: "p-" + name}
	nettest.Veth(tb, nettest.End{NS: ns, Name: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix(ip + "/32")}}, nettest.End{NS: node.NS, Name: h.link})
	in(tb, node.NS, func() error {
		l, err := netlink.LinkByName(h.link)
		if err != nil {
			return err
		}
		// Of link scope, so that masquerading never picks it as a source.
		a := addr("169.254.1.1/32")
		a.Scope = int(netlink.SCOPE_LINK)
		if err := netlink.AddrAdd(l, a); err != nil {
			return err
		}
		_, dst, _ := net.ParseCIDR(ip + "/32")
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, Scope: netlink.SCOPE_LINK, Src: node.IP.AsSlice()})
	})
	in(tb, ns, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		_, gw, _ := net.ParseCIDR("169.254.1.1/32")
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: gw, Scope: netlink.SCOPE_LINK}); err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: gw.IP})
	})
	return h
}

func route(tb testing.TB, h *Host, to, via string) {
	tb.Helper()
	in(tb, h.NS, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		_, dst, err := net.ParseCIDR(to)
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, Gw: net.ParseIP(via)})
	})
}

// serve answers on one port of a backend, TCP and UDP, with the backend's name
// and the peer's address.
func serve(tb testing.TB, h *Host, port int) {
	tb.Helper()
	serveAt(tb, h, h.IP, port)
}

// serveAt is serve at one of the backend's addresses.
func serveAt(tb testing.TB, h *Host, ip netip.Addr, port int) {
	tb.Helper()
	at := netip.AddrPortFrom(ip, uint16(port)).String()
	l, err := h.NS.Listen(context.Background(), "tcp", at)
	if err != nil {
		tb.Fatal(err)
	}
	u, err := h.NS.ListenPacket(context.Background(), "udp", at)
	if err != nil {
		tb.Fatal(err)
	}
	done := make(chan struct{}, 2)
	go func() {
		defer func() { done <- struct{}{} }()
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = fmt.Fprintf(c, "%s %s %d", h.Name, c.RemoteAddr(), port)
			_ = c.Close()
		}
	}()
	go func() {
		defer func() { done <- struct{}{} }()
		buf := make([]byte, 2048)
		for {
			_, peer, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = u.WriteTo(fmt.Appendf(nil, "%s %s %d", h.Name, peer, port), peer)
		}
	}()
	tb.Cleanup(func() {
		_ = l.Close()
		_ = u.Close()
		<-done
		<-done
	})
}

// How an attempt to reach something ended.
const (
	Answered = "answered"
	Refused  = "refused"   // at once: a reset or ICMP port unreachable
	Silence  = "timeout"   // nothing came back
	Denied   = "forbidden" // the sender's own kernel refused (EPERM)
	Closed   = "closed"    // accepted, and closed without a word
)

// Reply is the outcome of one connection or one datagram.
type Reply struct {
	Outcome string
	// Backend names who answered, Peer is the source address it saw, Port the
	// port on which it was reached.
	Backend string
	Peer    netip.AddrPort
	Port    string
	Took    time.Duration
	Err     error
	// again asks once more, with the patience for an answer that is expected.
	again func() Reply
}

// patience is how long an answer that is expected may take: on a machine that is busy
// with other things a packet waits, and its sender repeats it after a second.
const patience = 10 * time.Second

// String is the reply without what differs from try to try.
func (r Reply) String() string {
	if r.Outcome == Answered {
		return fmt.Sprintf("%s saw %s on %s", r.Backend, r.Peer.Addr(), r.Port)
	}
	return fmt.Sprintf("%s after %s (%v)", r.Outcome, r.Took.Round(time.Millisecond), r.Err)
}

// TCP connects from a host and reads what the backend says.
func (h *Host) TCP(to string) Reply { return h.ask("tcp", to) }

// UDP sends one datagram from a fresh socket and awaits the answer.
func (h *Host) UDP(to string) Reply { return h.ask("udp", to) }

func (h *Host) ask(network, to string) Reply {
	r := h.send(network, to)
	r.again = func() Reply { return h.within(patience, true).send(network, to) }
	return r
}

func (h *Host) send(network, to string) Reply {
	start := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), h.wait())
	defer cancel()
	c, err := h.NS.Dial(ctx, network, to)
	if err != nil {
		return failure(err, start)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(start.Add(h.wait()))
	return exchange(c, network, start)
}

// talk has one exchange on an open connection or socket.
func talk(c net.Conn, network string, start time.Time) Reply {
	_ = c.SetDeadline(start.Add(quiet()))
	return exchange(c, network, start)
}

func exchange(c net.Conn, network string, start time.Time) Reply {
	var buf []byte
	var err error
	if network == "udp" {
		if _, err = c.Write([]byte("hello")); err == nil {
			buf = make([]byte, 2048)
			var n int
			n, err = c.Read(buf)
			buf = buf[:n]
		}
	} else {
		buf, err = io.ReadAll(c)
	}
	if err != nil {
		return failure(err, start)
	}
	if len(buf) == 0 && network == "tcp" {
		return Reply{Outcome: Closed, Took: time.Since(start)}
	}
	f := strings.Fields(string(buf))
	if len(f) != 3 {
		return Reply{Outcome: "garbled", Err: fmt.Errorf("answer %q", buf), Took: time.Since(start)}
	}
	peer, err := netip.ParseAddrPort(f[1])
	return Reply{Outcome: Answered, Backend: f[0], Peer: peer, Port: f[2], Took: time.Since(start), Err: err}
}

func failure(err error, start time.Time) Reply {
	r := Reply{Outcome: "error", Err: err, Took: time.Since(start)}
	var timeout net.Error
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		r.Outcome = Refused
	case errors.Is(err, unix.EPERM):
		r.Outcome = Denied
	case errors.As(err, &timeout) && timeout.Timeout(), errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		r.Outcome = Silence
	}
	return r
}
