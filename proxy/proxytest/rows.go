// SPDX-License-Identifier: Apache-2.0

//nolint:thelper // a row is a test and not a helper: its own lines are what a failure names
package proxytest

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// Rows is the contract, in the order of the table.
func Rows() []Row {
	var out []Row
	for _, group := range [][]Row{clusterRows(), affinityRows(), nodePortRows(), policyRows(), readinessRows(), topologyRows(), loadBalancerRows(), conntrackRows(),
		clusterEdgeRows(), nodePortEdgeRows(), policyEdgeRows(), liveRows(), sctpRows()} {
		out = append(out, group...)
	}
	slices.SortStableFunc(out, func(a, b Row) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// anyPeer says that a row does not look at the source address.
var anyPeer netip.Addr

// clusterRows are about the cluster address.
func clusterRows() []Row {
	return []Row{
		{ID: "C01", Title: "pods reach every backend with their own address", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1), Ready(l.B2))
			seen := map[string]bool{}
			for range 40 {
				r := l.C1.TCP(vip + ":80")
				want(t, "c1", r, l.seen(l.C1), l.B1, l.B2)
				seen[r.Backend] = true
			}
			if len(seen) != 2 {
				t.Errorf("40 connections met %v only", seen)
			}
		}},
		{ID: "C02", Title: "three backends get a third each", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1), Ready(l.B2), Ready(l.B3))
			if l.Mode == "ipvs" {
				for name, got := range spread(t, l.C1, vip+":80", 30) {
					if got != 10 { // in turn
						t.Errorf("%s got %d of 30", name, got)
					}
				}
				return
			}
			const n = 900
			for name, got := range spread(t, l.C1, vip+":80", n) {
				// Five standard deviations of a fair choice are 71.
				if got < n/3-71 || got > n/3+71 {
					t.Errorf("%s got %d of %d", name, got, n)
				}
			}
		}},
		{ID: "C07", Title: "the node itself is masqueraded", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			want(t, "n1 to its own pod", l.N1.TCP(vip+":80"), l.N1.IP, l.B1)
			want(t, "n2 to a pod elsewhere", l.N2.TCP(vip+":80"), l.N2.IP, l.B1)
		}},
		{ID: "C10", Title: "another port of a cluster address", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			outcome := Refused
			if l.Mode == "iptables" || l.userspace() {
				outcome = Silence // no rule, so the packet leaves by the default route
			}
			wantOutcome(t, "c1 to port 81", l.C1.TCP(vip+":81"), outcome)
		}},
		{ID: "C11", Title: "an address no Service has", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			wantOutcome(t, "c1", l.C1.TCP("10.96.0.77:80"), Silence)
		}},
		{ID: "C16", Title: "port and targetPort differ", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B2))
			if r := l.C1.TCP(vip + ":80"); r.Port != "8080" {
				t.Errorf("port 80: %s, want port 8080 of the pod", r)
			}
		}},
		{ID: "C20", Title: "each port has its own target", Run: func(t *testing.T, l *Lab) {
			svc := Service("web", Ports(
				corev1.ServicePort{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP},
				corev1.ServicePort{Name: "https", Port: 443, Protocol: corev1.ProtocolTCP}))
			l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{8080, 8443}, Ready(l.B1)))
			for port, target := range map[string]string{":80": "8080", ":443": "8443"} {
				if r := l.C1.TCP(vip + port); r.Port != target {
					t.Errorf("port %s: %s, want target %s", port, r, target)
				}
			}
		}},
		{ID: "C21", Title: "TCP and UDP on one number", Run: func(t *testing.T, l *Lab) {
			svc := Service("dns", Ports(
				corev1.ServicePort{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP},
				corev1.ServicePort{Name: "dns-tcp", Port: 53, Protocol: corev1.ProtocolTCP}))
			l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{5353, 8443}, Ready(l.B2)))
			if r := l.C1.UDP(vip + ":53"); r.Port != "5353" {
				t.Errorf("udp: %s, want port 5353", r)
			}
			if r := l.C1.TCP(vip + ":53"); r.Port != "8443" {
				t.Errorf("tcp: %s, want port 8443", r)
			}
		}},
		{ID: "C22", Title: "UDP answers come back from the cluster address", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("udp", OverUDP), Ready(l.B2))
			// The socket is connected: an answer from elsewhere would not arrive.
			want(t, "c1", l.C1.UDP(vip+":80"), l.seen(l.C1), l.B2)
		}},
		{ID: "C24", Title: "a pod reaches itself through its Service", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			want(t, "b1", l.B1.TCP(vip+":80"), l.N1.IP, l.B1)
		}},
		{ID: "C25", Title: "no endpoints: TCP is refused", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"))
			wantOutcome(t, "c1", l.C1.TCP(vip+":80"), l.nobody())
			wantOutcome(t, "n1", l.N1.TCP(vip+":80"), l.nobody())
		}},
		{ID: "C26", Title: "no endpoints: UDP is refused", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("udp", OverUDP))
			outcome := Refused
			if l.userspace() {
				outcome = Silence
			}
			wantOutcome(t, "c1", l.C1.UDP(vip+":80"), outcome)
		}},
		{ID: "C30", Title: "a replaced pod takes over behind the same address", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			want(t, "before", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
			l.Serve(t, Service("web"), Ready(l.B2))
			for range 10 {
				want(t, "after", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B2)
			}
		}},
		{ID: "C31", Title: "none to three endpoints and back", Run: func(t *testing.T, l *Lab) {
			for range 2 {
				l.Serve(t, Service("web"))
				wantOutcome(t, "none", l.C2.TCP(vip+":80"), l.nobody())
				l.Serve(t, Service("web"), Ready(l.B1), Ready(l.B2), Ready(l.B3))
				want(t, "three", l.C2.TCP(vip+":80"), l.seen(l.C2))
			}
		}},
	}
}

// affinityRows are about session affinity.
func affinityRows() []Row {
	return []Row{
		{ID: "D01", Title: "ClientIP keeps one backend", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", Sticky(10800)), Ready(l.B1), Ready(l.B2), Ready(l.B3))
			if got := spread(t, l.C1, vip+":80", 50); len(got) != 1 {
				t.Errorf("50 connections went to %v", got)
			}
		}},
		{ID: "D02", Title: "each client has its own", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", Sticky(10800)), Ready(l.B1), Ready(l.B2), Ready(l.B3))
			for _, c := range []*Host{l.C1, l.B1, l.B2, l.C2} {
				if got := spread(t, c, vip+":80", 20); len(got) != 1 {
					t.Errorf("20 connections of %s went to %v", c.Name, got)
				}
			}
		}},
		{ID: "D03", Title: "an idle client is forgotten", Long: true, Run: func(t *testing.T, l *Lab) {
			// One second of affinity: a client that pauses longer is free to move,
			// and of many such pauses one must lead elsewhere.
			l.Serve(t, Service("web", Sticky(1)), Ready(l.B1), Ready(l.B2), Ready(l.B3))
			first := l.C1.TCP(vip + ":80")
			want(t, "first", first, l.seen(l.C1))
			if r := l.C1.TCP(vip + ":80"); r.Backend != first.Backend {
				t.Errorf("moved from %s to %s at once", first.Backend, r.Backend)
			}
			if l.Mode == "ipvs" {
				// There a client is kept as long as the kernel knows a connection of it, which
				// is two minutes after the last has ended.
				if l.afterPauses(t, 2, func() bool { return l.C1.TCP(vip+":80").Backend != first.Backend }) {
					t.Error("moved while its connections were still known")
				}
				return
			}
			moved := l.afterPauses(t, 12, func() bool { return l.C1.TCP(vip+":80").Backend != first.Backend })
			if !moved {
				t.Error("12 pauses of more than the timeout, and never another backend")
			}
		}},
		{ID: "D07", Title: "a backend that goes is left", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", Sticky(10800)), Ready(l.B1))
			want(t, "before", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
			l.Serve(t, Service("web", Sticky(10800)), Ready(l.B2))
			want(t, "after", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B2)
		}},
		{ID: "D08", Title: "affinity is per port", Run: func(t *testing.T, l *Lab) {
			svc := Service("web", Sticky(10800), Ports(
				corev1.ServicePort{Name: "a", Port: 80, Protocol: corev1.ProtocolTCP},
				corev1.ServicePort{Name: "b", Port: 81, Protocol: corev1.ProtocolTCP}))
			l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{8080, 8443}, Ready(l.B1), Ready(l.B2)))
			for _, port := range []string{":80", ":81"} {
				if got := spread(t, l.C1, vip+port, 15); len(got) != 1 {
					t.Errorf("15 connections to %s went to %v", port, got)
				}
			}
		}},
	}
}

// nodePortRows are about ports of the nodes.
func nodePortRows() []Row {
	const np = ":30080"
	return []Row{
		{ID: "E09", Title: "every node answers on the nodePort", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B2))
			want(t, "by n1", l.X.TCP(l.N1.IP.String()+np), l.N1.IP, l.B2)
			want(t, "by n2", l.X.TCP(l.N2.IP.String()+np), l.N2.IP, l.B2)
		}},
		{ID: "E10", Title: "pods use a nodePort of their node", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B1), Ready(l.B2))
			for range 8 {
				want(t, "c1", l.C1.TCP(l.N1.IP.String()+np), l.N1.IP, l.B1, l.B2)
			}
		}},
		{ID: "E11", Title: "a node uses its own nodePort", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B2))
			want(t, "n1", l.N1.TCP(l.N1.IP.String()+np), l.N1.IP, l.B2)
		}},
		{ID: "E12", Title: "nodePort on 127.0.0.1", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B1), Ready(l.B2))
			for range 8 {
				r := l.N1.TCP("127.0.0.1" + np)
				if l.Mode == "iptables" || l.userspace() {
					want(t, "n1", r, l.N1.IP, l.B1, l.B2)
				} else {
					wantOutcome(t, "n1", r, Refused)
				}
			}
		}},
		{ID: "E17", Title: "neighbours do not reach 127.0.0.1 of a node", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B1))
			l.loopbackGuard(t)
		}},
		{ID: "E21", Title: "nodePort without endpoints is refused", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)))
			wantOutcome(t, "x", l.X.TCP(l.N1.IP.String()+np), l.nobody())
		}},
		{ID: "E22", Title: "a port nobody opened is refused by the kernel", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B1))
			wantOutcome(t, "x", l.X.TCP(l.N1.IP.String()+":30099"), Refused)
		}},
		{ID: "E24", Title: "a nodePort comes before a process on the node", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B1))
			ln, err := l.N1.NS.Listen(t.Context(), "tcp", l.N1.IP.String()+np)
			if l.userspace() {
				if !errors.Is(err, unix.EADDRINUSE) {
					t.Errorf("listen on the nodePort: %v; the proxy process should hold it", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = ln.Close() }()
			want(t, "x", l.X.TCP(l.N1.IP.String()+np), l.N1.IP, l.B1)
		}},
	}
}
