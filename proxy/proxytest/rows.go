// SPDX-License-Identifier: Apache-2.0

//nolint:thelper // a row is a test and not a helper: its own lines are what a failure names
package proxytest

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// Rows is the contract, in the order of the table.
func Rows() []Row {
	var out []Row
	for _, group := range [][]Row{clusterRows(), affinityRows(), nodePortRows(), policyRows(), readinessRows(), topologyRows(), loadBalancerRows(), conntrackRows()} {
		out = append(out, group...)
	}
	return out
}

// anyPeer says that a row does not look at the source address.
var anyPeer netip.Addr

// clusterRows are about the cluster address.
func clusterRows() []Row {
	return []Row{
		{"C01", "pods reach every backend with their own address", func(t *testing.T, l *Lab) {
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
		{"C02", "three backends get a third each", func(t *testing.T, l *Lab) {
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
		{"C07", "the node itself is masqueraded", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			want(t, "n1 to its own pod", l.N1.TCP(vip+":80"), l.N1.IP, l.B1)
			want(t, "n2 to a pod elsewhere", l.N2.TCP(vip+":80"), l.N2.IP, l.B1)
		}},
		{"C10", "another port of a cluster address", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			outcome := Refused
			if l.Mode == "iptables" || l.userspace() {
				outcome = Silence // no rule, so the packet leaves by the default route
			}
			wantOutcome(t, "c1 to port 81", l.C1.TCP(vip+":81"), outcome)
		}},
		{"C11", "an address no Service has", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			wantOutcome(t, "c1", l.C1.TCP("10.96.0.77:80"), Silence)
		}},
		{"C16", "port and targetPort differ", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B2))
			if r := l.C1.TCP(vip + ":80"); r.Port != "8080" {
				t.Errorf("port 80: %s, want port 8080 of the pod", r)
			}
		}},
		{"C20", "each port has its own target", func(t *testing.T, l *Lab) {
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
		{"C21", "TCP and UDP on one number", func(t *testing.T, l *Lab) {
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
		{"C22", "UDP answers come back from the cluster address", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("udp", OverUDP), Ready(l.B2))
			// The socket is connected: an answer from elsewhere would not arrive.
			want(t, "c1", l.C1.UDP(vip+":80"), l.seen(l.C1), l.B2)
		}},
		{"C24", "a pod reaches itself through its Service", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			want(t, "b1", l.B1.TCP(vip+":80"), l.N1.IP, l.B1)
		}},
		{"C25", "no endpoints: TCP is refused", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"))
			wantOutcome(t, "c1", l.C1.TCP(vip+":80"), l.nobody())
			wantOutcome(t, "n1", l.N1.TCP(vip+":80"), l.nobody())
		}},
		{"C26", "no endpoints: UDP is refused", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("udp", OverUDP))
			outcome := Refused
			if l.userspace() {
				outcome = Silence
			}
			wantOutcome(t, "c1", l.C1.UDP(vip+":80"), outcome)
		}},
		{"C30", "a replaced pod takes over behind the same address", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Ready(l.B1))
			want(t, "before", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
			l.Serve(t, Service("web"), Ready(l.B2))
			for range 10 {
				want(t, "after", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B2)
			}
		}},
		{"C31", "none to three endpoints and back", func(t *testing.T, l *Lab) {
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
		{"D01", "ClientIP keeps one backend", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", Sticky(10800)), Ready(l.B1), Ready(l.B2), Ready(l.B3))
			if got := spread(t, l.C1, vip+":80", 50); len(got) != 1 {
				t.Errorf("50 connections went to %v", got)
			}
		}},
		{"D02", "each client has its own", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", Sticky(10800)), Ready(l.B1), Ready(l.B2), Ready(l.B3))
			for _, c := range []*Host{l.C1, l.B1, l.B2, l.C2} {
				if got := spread(t, c, vip+":80", 20); len(got) != 1 {
					t.Errorf("20 connections of %s went to %v", c.Name, got)
				}
			}
		}},
		{"D03", "an idle client is forgotten", func(t *testing.T, l *Lab) {
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
		{"D07", "a backend that goes is left", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", Sticky(10800)), Ready(l.B1))
			want(t, "before", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
			l.Serve(t, Service("web", Sticky(10800)), Ready(l.B2))
			want(t, "after", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B2)
		}},
		{"D08", "affinity is per port", func(t *testing.T, l *Lab) {
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
		{"E09", "every node answers on the nodePort", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B2))
			want(t, "by n1", l.X.TCP(l.N1.IP.String()+np), l.N1.IP, l.B2)
			want(t, "by n2", l.X.TCP(l.N2.IP.String()+np), l.N2.IP, l.B2)
		}},
		{"E10", "pods use a nodePort of their node", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B1), Ready(l.B2))
			for range 8 {
				want(t, "c1", l.C1.TCP(l.N1.IP.String()+np), l.N1.IP, l.B1, l.B2)
			}
		}},
		{"E11", "a node uses its own nodePort", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B2))
			want(t, "n1", l.N1.TCP(l.N1.IP.String()+np), l.N1.IP, l.B2)
		}},
		{"E12", "nodePort on 127.0.0.1", func(t *testing.T, l *Lab) {
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
		{"E17", "neighbours do not reach 127.0.0.1 of a node", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B1))
			l.loopbackGuard(t)
		}},
		{"E21", "nodePort without endpoints is refused", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)))
			wantOutcome(t, "x", l.X.TCP(l.N1.IP.String()+np), l.nobody())
		}},
		{"E22", "a port nobody opened is refused by the kernel", func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080)), Ready(l.B1))
			wantOutcome(t, "x", l.X.TCP(l.N1.IP.String()+":30099"), Refused)
		}},
		{"E24", "a nodePort comes before a process on the node", func(t *testing.T, l *Lab) {
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
