// SPDX-License-Identifier: Apache-2.0

//nolint:thelper // a row is a test and not a helper: its own lines are what a failure names
package proxytest

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/proxy"
)

// tool runs a command in a node, and leaves the machine's lock of the legacy tools alone.
func (h *Host) tool(t *testing.T, path string, args ...string) string {
	t.Helper()
	out, err := execx.In(h.NS).Run(t.Context(), execx.Cmd{Path: path, Args: args, Env: []string{"XTABLES_LOCKFILE=/dev/null"}})
	if err != nil {
		t.Fatal(err)
	}
	return string(out.Stdout)
}

// iptables is the program of the variant that the mode under test writes with.
func (l *Lab) iptables() string {
	if l.variant == "legacy" {
		return "iptables-legacy"
	}
	return "iptables-nft"
}

// routed gives a host a route for the time of a row.
func routed(t *testing.T, h *Host, to string, via *Host) {
	t.Helper()
	route(t, h, to, via.IP.String())
	_, dst, _ := net.ParseCIDR(to)
	t.Cleanup(func() {
		in(t, h.NS, func() error { return netlink.RouteDel(&netlink.Route{Dst: dst, Gw: via.IP.AsSlice()}) })
	})
}

// secondAddress gives a node another address for the time of a row.
func secondAddress(t *testing.T, h *Host, ip string) {
	t.Helper()
	change := func(fn func(netlink.Link, *netlink.Addr) error) {
		t.Helper()
		in(t, h.NS, func() error {
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return fn(link, addr(ip+"/32"))
		})
	}
	change(netlink.AddrAdd)
	t.Cleanup(func() { change(netlink.AddrDel) })
}

// clusterEdgeRows are what a cluster address does besides serving.
func clusterEdgeRows() []Row {
	return []Row{
		{ID: "C08", Title: "a client outside whose route leads by a node is masqueraded", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B2))
			routed(t, l.X, ServiceCIDR, l.N1)
			want(t, "x", l.X.TCP(vip+":80"), l.N1.IP, l.B2)
		}},
		{ID: "C09", Title: "without a route a client outside reaches nothing", Long: true, Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B2))
			if r := l.X.TCP(vip + ":80"); !errors.Is(r.Err, unix.ENETUNREACH) {
				t.Errorf("x: %s, want no route", r)
			}
		}},
		{ID: "C12", Title: "UDP to a port that is TCP", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			outcome := Refused
			if l.Mode == "iptables" || l.userspace() {
				outcome = Silence
			}
			wantOutcome(t, "c1", l.C1.UDP(vip+":80"), outcome)
		}},
		{ID: "C13", Title: "a pod pings a cluster address", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			outcome := Refused
			if l.Mode == "iptables" || l.userspace() {
				outcome = Silence
			}
			wantOutcome(t, "c1", l.C1.Ping(vip), outcome)
			wantOutcome(t, "c1 to the node, to see that it would work", l.C1.Ping(l.N1.IP.String()), Answered)
		}},
		{ID: "C14", Title: "a node pings a cluster address", Long: true, Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			outcome := Silence
			switch l.Mode {
			case "nftables":
				outcome = Denied
			case "ipvs":
				outcome = Refused
			}
			wantOutcome(t, "n1", l.N1.Ping(vip), outcome)
		}},
		{ID: "C15", Title: "connection tracking knows client, Service and who answers", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("udp", OverUDP), Ready(l.B1))
			want(t, "c1", l.C1.UDP(vip+":80"), l.seen(l.C1), l.B1)
			flows, err := proxy.NewConntrack(l.N1.NS).UDPFlows(t.Context(), corev1.IPv4Protocol)
			if err != nil {
				t.Fatal(err)
			}
			peer := netip.AddrPortFrom(l.B1.IP, 8080)
			found := false
			for _, f := range flows {
				if f.Src.Addr() != l.C1.IP || f.Dst.String() != vip+":80" {
					continue
				}
				found = found || f.Peer == peer || (l.userspace() && f.Peer.Addr() != l.B1.IP && f.Peer != f.Dst)
			}
			if !found {
				t.Errorf("no entry from %s to %s that leads where it should: %v", l.C1.IP, vip, flows)
			}
		}},
		{ID: "C17", Title: "a named targetPort is each pod's own number", Run: func(t *testing.T, l *Lab) {
			svc := Service("web")
			second := Slice(svc, []int32{8443}, Ready(l.B2))
			second.Name += "2"
			l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{8080}, Ready(l.B1)), second)
			seen := map[string]string{}
			for range 30 {
				r := l.C1.TCP(vip + ":80")
				want(t, "c1", r, l.seen(l.C1), l.B1, l.B2)
				seen[r.Backend] = r.Port
			}
			if seen["b1"] != "8080" || seen["b2"] != "8443" {
				t.Errorf("ports by pod: %v", seen)
			}
		}},
		{ID: "C18", Title: "a pod without a named port serves the others", Long: true, Run: func(t *testing.T, l *Lab) {
			svc := Service("web", Ports(
				corev1.ServicePort{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP},
				corev1.ServicePort{Name: "https", Port: 443, Protocol: corev1.ProtocolTCP}))
			plain := Slice(svc, []int32{8080}, Ready(l.B2))
			plain.Name += "2"
			plain.Ports = plain.Ports[:1]
			l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{8080, 8443}, Ready(l.B1)), plain)
			only(t, l.C1, "b1", "b2")
			for range 6 {
				want(t, "c1 to https", l.C1.TCP(vip+":443"), l.seen(l.C1), l.B1)
			}
		}},
		{ID: "C28", Title: "a ready pod whose process is dead", Run: func(t *testing.T, l *Lab) {
			// b2 lives, but nobody listens on the port of its slice.
			svc := Service("web")
			dead := Slice(svc, []int32{9999}, Ready(l.B2))
			dead.Name += "2"
			l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{8080}, Ready(l.B1)), dead)
			got := map[string]int{}
			for range 40 {
				got[l.C1.TCP(vip+":80").Outcome]++
			}
			if l.userspace() {
				if got[Answered] != 40 {
					t.Errorf("%v, want every connection answered by the next backend", got)
				}
			} else if got[Answered] == 0 || got[Refused] == 0 || got[Answered]+got[Refused] != 40 {
				t.Errorf("%v, want about half refused by the pod", got)
			}
		}},
		{ID: "C29", Title: "an endpoint whose address nobody has", Run: func(t *testing.T, l *Lab) {
			svc := Service("web")
			gone := Ready(l.B1)
			gone.Addresses = []string{"10.244.1.99"}
			l.Serve(t, svc, Ready(l.B1), gone)
			got := map[string]int{}
			for range 12 {
				got[l.C1.within(3*time.Second, l.userspace()).TCP(vip+":80").Outcome]++
			}
			if l.userspace() {
				if got[Answered] != 12 {
					t.Errorf("%v, want every connection answered after a quarter of a second", got)
				}
			} else if got[Silence] == 0 || got[Answered]+got[Silence] != 12 {
				t.Errorf("%v, want some without an answer", got)
			}
		}},
		{ID: "C32", Title: "masqueradeAll hides pods too", Run: func(t *testing.T, l *Lab) {
			l.change = func(f *proxy.Facts) { f.MasqueradeAll = true }
			l.Serve(t, Service("web"), Ready(l.B2))
			want(t, "c1", l.C1.TCP(vip+":80"), l.N1.IP, l.B2)
		}},
		{ID: "C34", Title: "a node that forwards nothing by default", Long: true, Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B2))
			l.N1.tool(t, l.iptables(), "-P", "FORWARD", "DROP")
			t.Cleanup(func() {
				if _, err := execx.In(l.N1.NS).Run(t.Context(), execx.Cmd{Path: l.iptables(), Args: []string{"-P", "FORWARD", "ACCEPT"}, Env: []string{"XTABLES_LOCKFILE=/dev/null"}}); err != nil && t.Context().Err() == nil {
					t.Error(err)
				}
			})
			r := l.X.TCP(l.N1.IP.String() + ":30080")
			if l.Mode == "nftables" {
				// What another table drops, this one cannot accept.
				wantOutcome(t, "x by n1", r, Silence)
			} else {
				want(t, "x by n1", r, l.N1.IP, l.B2)
			}
			l.N1.tool(t, l.iptables(), "-P", "FORWARD", "ACCEPT")
		}},
		{ID: "C38", Title: "a Service of another proxy is left to it", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", func(s *corev1.Service) {
				s.Labels = map[string]string{proxy.LabelServiceProxyName: "other"}
			}), Ready(l.B1))
			wantOutcome(t, "c1", l.C1.TCP(vip+":80"), Silence)
		}},
		{ID: "D04", Title: "a person can see what affinity remembers", Run: func(t *testing.T, l *Lab) {
			l.notIn(t, "userspace", "the memory is the process's")
			l.Serve(t, Service("web", Sticky(10800)), Ready(l.B1), Ready(l.B2))
			want(t, "c1", l.C1.TCP(vip+":80"), l.seen(l.C1))
			switch l.Mode {
			case "iptables":
				var all strings.Builder
				in(t, l.N1.NS, func() error {
					files, err := os.ReadDir("/proc/thread-self/net/xt_recent")
					for _, f := range files {
						b, err := os.ReadFile("/proc/thread-self/net/xt_recent/" + f.Name())
						if err != nil {
							return err
						}
						all.Write(b)
					}
					return err
				})
				if !strings.Contains(all.String(), "src="+l.C1.IP.String()) {
					t.Errorf("xt_recent does not name %s:\n%s", l.C1.IP, all.String())
				}
			case "nftables":
				if sets := l.N1.tool(t, "nft", "list", "sets"); !strings.Contains(sets, "affinity-") || !strings.Contains(sets, l.C1.IP.String()) {
					t.Errorf("the sets do not name %s:\n%s", l.C1.IP, sets)
				}
			}
		}},
		{ID: "D09", Title: "affinity of a client outside is by its own address", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080), Sticky(10800)), Ready(l.B1), Ready(l.B2), Ready(l.B3))
			for _, n := range []*Host{l.N1, l.N2} {
				if got := spread(t, l.X, n.IP.String()+":30080", 20); len(got) != 1 {
					t.Errorf("20 connections by %s went to %v", n.Name, got)
				}
			}
		}},
	}
}

// nodePortEdgeRows are where nodePorts answer and where they do not.
func nodePortEdgeRows() []Row {
	const np = ":30080"
	// silent is how a nodePort ends where the node does not serve it: refused by the
	// kernel, or by the userspace proxy, which holds the port.
	silent := func(t *testing.T, l *Lab, what string, r Reply) {
		t.Helper()
		if r.Outcome == Answered || (!l.userspace() && r.Outcome != Refused) {
			t.Errorf("%s: %s, want a refusal", what, r)
		}
	}
	return []Row{
		{ID: "E13", Title: "nodePorts on 127.0.0.1 can be turned off", Run: func(t *testing.T, l *Lab) {
			l.change = func(f *proxy.Facts) { f.LocalhostNodePorts = false }
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B1))
			silent(t, l, "n1", l.N1.TCP("127.0.0.1"+np))
			want(t, "x", l.X.TCP(l.N1.IP.String()+np), l.N1.IP, l.B1)
		}},
		{ID: "E18", Title: "a second address of the node", Run: func(t *testing.T, l *Lab) {
			secondAddress(t, l.N1, "172.18.0.22")
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B2))
			r := l.X.TCP("172.18.0.22" + np)
			if len(l.nodePorts) > 0 {
				wantOutcome(t, "x, nodePorts on the primary address only", r, Refused)
			} else {
				want(t, "x", r, l.N1.IP, l.B2)
			}
		}},
		{ID: "E19", Title: "nodePortAddresses limits where nodePorts answer", Run: func(t *testing.T, l *Lab) {
			secondAddress(t, l.N1, "172.18.44.2")
			l.change = func(f *proxy.Facts) {
				f.NodePortAddresses = []string{"172.18.0.0/24"}
				if f.NodeName == "n1" {
					f.NodeIPs = append(f.NodeIPs, netip.MustParseAddr("172.18.44.2"))
				}
			}
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B2))
			want(t, "x to the address that matches", l.X.TCP(l.N1.IP.String()+np), l.N1.IP, l.B2)
			silent(t, l, "x to the one that does not", l.X.TCP("172.18.44.2"+np))
		}},
		{ID: "E23", Title: "whether a nodePort is a socket", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B1))
			sockets := l.N1.tool(t, "ss", "-Hltn")
			if got := strings.Contains(sockets, np); got != l.userspace() {
				t.Errorf("somebody listens on the nodePort: %v\n%s", got, sockets)
			}
		}},
		{ID: "E25", Title: "a backend on the node itself", Run: func(t *testing.T, l *Lab) {
			serve(t, l.N1, 9090)
			host := &Host{Name: "n1", IP: l.N1.IP, Node: "n1"}
			svc := Service("web", NodePort(30080))
			l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{9090}, Ready(host)))
			want(t, "x by n1", l.X.TCP(l.N1.IP.String()+np), l.seenVia(l.X, l.N1), l.N1)
			want(t, "c1", l.C1.TCP(vip+":80"), l.seen(l.C1), l.N1)
			want(t, "c2", l.C2.TCP(vip+":80"), l.seen(l.C2), l.N1)
		}},
	}
}

// policyEdgeRows are rarer cases of policies, readiness, topology and load balancers.
func policyEdgeRows() []Row {
	const np = ":30080"
	vipMode := corev1.LoadBalancerIPModeVIP
	return []Row{
		{ID: "F15", Title: "a policy changes while connections are open", Long: true, Run: func(t *testing.T, l *Lab) {
			l.notIn(t, "userspace", "the mode knows no traffic policies")
			ln, err := l.B1.NS.Listen(t.Context(), "tcp", l.B1.IP.String()+":9090")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = ln.Close() }()
			svc, long := Service("web", NodePort(30080)), Service("long", At("10.96.0.51"), NodePort(30081))
			l.Apply(t, []*corev1.Service{svc, long}, Slice(svc, []int32{8080}, Ready(l.B1)), Slice(long, []int32{9090}, Ready(l.B1)))
			want(t, "Cluster", l.X.TCP(l.N1.IP.String()+np), l.N1.IP, l.B1)
			c, err := l.X.NS.Dial(t.Context(), "tcp", l.N1.IP.String()+":30081")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			s, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Close() }()
			ExternalLocal(svc)
			ExternalLocal(long)
			l.Apply(t, []*corev1.Service{svc, long}, Slice(svc, []int32{8080}, Ready(l.B1)), Slice(long, []int32{9090}, Ready(l.B1)))
			want(t, "Local", l.X.TCP(l.N1.IP.String()+np), l.X.IP, l.B1)
			if err := echo(c, s); err != nil {
				t.Errorf("the open connection: %v", err)
			}
		}},
		{ID: "F16", Title: "external Local holds for external addresses", Run: func(t *testing.T, l *Lab) {
			l.notIn(t, "userspace", "the mode knows no traffic policies")
			l.Serve(t, Service("web", External(ExternalIP), ExternalLocal), Ready(l.B2))
			if l.Mode != "ipvs" {
				wantOutcome(t, "x, none here", l.X.TCP(ExternalIP+":80"), Silence)
			}
			l.Serve(t, Service("web", External(ExternalIP), ExternalLocal), Ready(l.B1))
			want(t, "x", l.X.TCP(ExternalIP+":80"), l.X.IP, l.B1)
		}},
		{ID: "G03", Title: "publishNotReadyAddresses: a pod that is not ready serves", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), endpoint(l.B1, true, false, false))
			want(t, "c1", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
		}},
		{ID: "G04", Title: "publishNotReadyAddresses: a terminating pod serves on", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), endpoint(l.B1, true, true, true), Ready(l.B2))
			only(t, l.C1, "b1", "b2")
		}},
		{ID: "J08", Title: "a node without a zone uses all endpoints", Long: true, Run: func(t *testing.T, l *Lab) {
			l.change = func(f *proxy.Facts) { f.Zone = "" }
			l.Serve(t, Service("web"), hints(Ready(l.B1), "a", ""), hints(Ready(l.B2), "b", ""))
			only(t, l.C1, "b1", "b2")
		}},
		{ID: "J14", Title: "policy Local comes before hints", Run: func(t *testing.T, l *Lab) {
			l.notIn(t, "userspace", "the mode knows neither")
			l.Serve(t, Service("web", InternalLocal), hints(Ready(l.B1), "b", ""), hints(Ready(l.B2), "a", ""))
			only(t, l.C1, "b1")
		}},
		{ID: "J16", Title: "a pod that is not ready needs no hint", Long: true, Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), hints(Ready(l.B1), "a", ""), hints(Ready(l.B2), "b", ""), NotReady(l.B3))
			near(t, l, l.C1, []string{"b1", "b2"}, "b1")
		}},
		{ID: "K09", Title: "a load balancer without nodePorts", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, vipMode), func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 0 }), Ready(l.B2))
			want(t, "x", l.X.TCP(LoadBalancerIP+":80"), l.N1.IP, l.B2)
			wantOutcome(t, "x to what would be the nodePort", l.X.TCP(l.N1.IP.String()+np), Refused)
		}},
		{ID: "K19", Title: "a load balancer that has a name only", Long: true, Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, vipMode), func(s *corev1.Service) {
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "lb.example"}}
			}), Ready(l.B2))
			wantOutcome(t, "c1", l.C1.TCP(LoadBalancerIP+":80"), Silence)
			want(t, "x by nodePort", l.X.TCP(l.N1.IP.String()+np), l.N1.IP, l.B2)
		}},
		{ID: "K28", Title: "an external address can take traffic away from its owner", Run: func(t *testing.T, l *Lab) {
			serve(t, l.N2, 80)
			l.Apply(t, nil)
			want(t, "c1, before", l.C1.TCP(l.N2.IP.String()+":80"), anyPeer, l.N2)
			l.Serve(t, Service("web", External(l.N2.IP.String())), Ready(l.B1))
			want(t, "c1, after", l.C1.TCP(l.N2.IP.String()+":80"), anyPeer, l.B1)
		}},
		{ID: "M25", Title: "a UDP client of the userspace proxy keeps its backend while it sends", Run: func(t *testing.T, l *Lab) {
			l.onlyIn(t, "userspace")
			l.Serve(t, Service("udp", OverUDP), Ready(l.B1), Ready(l.B2), Ready(l.B3))
			seen := map[string]bool{}
			for range 6 {
				seen[l.C1.UDP(vip+":80").Backend] = true
			}
			if len(seen) != 3 {
				t.Errorf("six clients met %v", seen)
			}
		}},
		{ID: "R05", Title: "two Services of one pod", Run: func(t *testing.T, l *Lab) {
			a, b := Service("a"), Service("b", At("10.96.0.51"))
			l.Apply(t, []*corev1.Service{a, b}, Slice(a, []int32{8080}, Ready(l.B1)), Slice(b, []int32{8080}, Ready(l.B1)))
			want(t, "a", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
			want(t, "b", l.C1.TCP("10.96.0.51:80"), l.seen(l.C1), l.B1)
		}},
		{ID: "R06", Title: "a canary gets its share of the pods", Long: true, Run: func(t *testing.T, l *Lab) {
			stable, all := Service("stable"), Service("all", At("10.96.0.51"))
			l.Apply(t, []*corev1.Service{stable, all}, Slice(stable, []int32{8080}, Ready(l.B1)), Slice(all, []int32{8080}, Ready(l.B1), Ready(l.B2)))
			only(t, l.C1, "b1")
			// Six standard deviations of a fair choice are 42.
			if got := spread(t, l.C1, "10.96.0.51:80", 200); got["b2"] < 58 || got["b2"] > 142 {
				t.Errorf("200 connections: %v", got)
			}
		}},
	}
}
