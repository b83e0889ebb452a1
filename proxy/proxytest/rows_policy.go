// SPDX-License-Identifier: Apache-2.0

//nolint:thelper // a row is a test and not a helper: its own lines are what a failure names
package proxytest

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// policyRows are about externalTrafficPolicy and internalTrafficPolicy. The
// userspace mode knows neither; its rows say so.
func policyRows() []Row {
	const np = ":30080"
	local := func() *corev1.Service { return Service("web", NodePort(30080), ExternalLocal) }
	return []Row{
		{ID: "F01", Title: "Local keeps the client's address", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, local(), Ready(l.B1), Ready(l.B2))
			if l.userspace() {
				// It knows no policy: every node serves from every pod.
				if got := spread(t, l.X, l.N1.IP.String()+np, 6); len(got) != 2 {
					t.Errorf("6 connections went to %v", got)
				}
				return
			}
			for range 6 {
				want(t, "by n1", l.X.TCP(l.N1.IP.String()+np), l.X.IP, l.B1)
			}
			want(t, "by n2", l.X.TCP(l.N2.IP.String()+np), l.X.IP, l.B2)
		}},
		{ID: "F02", Title: "Local without a local pod is silent", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, local(), Ready(l.B1))
			if l.userspace() {
				want(t, "x by n2", l.X.TCP(l.N2.IP.String()+np), anyPeer, l.B1)
				return
			}
			wantOutcome(t, "x by n2", l.X.TCP(l.N2.IP.String()+np), Silence)
			want(t, "x by n1", l.X.TCP(l.N1.IP.String()+np), l.seenVia(l.X, l.N1), l.B1)
		}},
		{ID: "F03", Title: "Local serves pods cluster-wide", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, local(), Ready(l.B1))
			want(t, "c2 by n2", l.C2.TCP(l.N2.IP.String()+np), l.seen(l.C2), l.B1)
		}},
		{ID: "F04", Title: "Local serves the node itself cluster-wide", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, local(), Ready(l.B1))
			want(t, "n2 by n2", l.N2.TCP(l.N2.IP.String()+np), l.N2.IP, l.B1)
		}},
		{ID: "F05", Title: "Local without any endpoint is refused", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, local())
			wantOutcome(t, "x by n1", l.X.TCP(l.N1.IP.String()+np), l.nobody())
			wantOutcome(t, "x by n2", l.X.TCP(l.N2.IP.String()+np), l.nobody())
		}},
		{ID: "F08", Title: "internal Local uses the pod of the node", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", InternalLocal), Ready(l.B1), Ready(l.B2))
			if l.userspace() {
				only(t, l.C1, "b1", "b2")
				return
			}
			for range 8 {
				want(t, "c1", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
				want(t, "c2", l.C2.TCP(vip+":80"), l.seen(l.C2), l.B2)
			}
			want(t, "n1", l.N1.TCP(vip+":80"), l.N1.IP, l.B1) // F10
		}},
		{ID: "F09", Title: "internal Local without a local pod", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", InternalLocal), Ready(l.B1))
			switch r := l.C2.TCP(vip + ":80"); l.Mode {
			case "userspace":
				want(t, "c2", r, anyPeer, l.B1)
			case "ipvs":
				wantOutcome(t, "c2", r, Refused)
			default:
				wantOutcome(t, "c2", r, Silence)
			}
		}},
		{ID: "F11", Title: "internal Local does not concern the nodePort", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", NodePort(30080), InternalLocal), Ready(l.B1))
			want(t, "x by n2", l.X.TCP(l.N2.IP.String()+np), l.N2.IP, l.B1)
		}},
		{ID: "F12", Title: "both policies Local, each for its own entry", Run: func(t *testing.T, l *Lab) {
			l.notIn(t, "userspace", "the mode knows no traffic policies")
			l.notIn(t, "ipvs", "the mode does not keep the two apart")
			l.Serve(t, Service("web", NodePort(30080), InternalLocal, ExternalLocal), Ready(l.B1))
			want(t, "c1 by VIP", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
			wantOutcome(t, "c2 by VIP", l.C2.TCP(vip+":80"), Silence)
			want(t, "c2 by nodePort", l.C2.TCP(l.N2.IP.String()+np), l.seen(l.C2), l.B1)
			wantOutcome(t, "x by n2", l.X.TCP(l.N2.IP.String()+np), Silence)
			want(t, "x by n1", l.X.TCP(l.N1.IP.String()+np), l.seenVia(l.X, l.N1), l.B1)
		}},
	}
}

// readinessRows are about which pods take traffic.
func readinessRows() []Row {
	return []Row{
		{ID: "G01", Title: "a pod that is not ready leaves the rotation", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), NotReady(l.B1), Ready(l.B2))
			if got := spread(t, l.C1, vip+":80", 20); got["b1"] != 0 {
				t.Errorf("connections went to %v", got)
			}
		}},
		{ID: "G02", Title: "none ready: refused", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), NotReady(l.B1), NotReady(l.B2))
			wantOutcome(t, "c1", l.C1.TCP(vip+":80"), l.nobody())
		}},
		{ID: "G05", Title: "a terminating pod gets nothing while others are ready", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Draining(l.B1), Ready(l.B2))
			if got := spread(t, l.C1, vip+":80", 20); got["b1"] != 0 {
				t.Errorf("connections went to %v", got)
			}
		}},
		{ID: "G06", Title: "all terminating: those that serve still do", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Draining(l.B1), Draining(l.B2))
			if l.userspace() {
				// It is older than the fallback.
				wantOutcome(t, "c1", l.C1.TCP(vip+":80"), Closed)
				return
			}
			if got := spread(t, l.C1, vip+":80", 40); len(got) != 2 {
				t.Errorf("connections went to %v", got)
			}
		}},
		{ID: "G07", Title: "all terminating and not serving: refused", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), Dying(l.B1), Dying(l.B2))
			wantOutcome(t, "c1", l.C1.TCP(vip+":80"), l.nobody())
		}},
		{ID: "G08", Title: "external Local falls back to the node's terminating pod", Run: func(t *testing.T, l *Lab) {
			l.notIn(t, "userspace", "the mode knows no traffic policies")
			l.Serve(t, Service("web", NodePort(30080), ExternalLocal), Draining(l.B1), Ready(l.B2))
			want(t, "x by n1", l.X.TCP(l.N1.IP.String()+":30080"), l.seenVia(l.X, l.N1), l.B1)
			if got := spread(t, l.C1, vip+":80", 10); got["b1"] != 0 {
				t.Errorf("the cluster address sent connections to %v", got)
			}
		}},
		{ID: "G09", Title: "internal Local falls back to the node's terminating pod", Run: func(t *testing.T, l *Lab) {
			l.notIn(t, "userspace", "the mode knows no traffic policies")
			l.Serve(t, Service("web", InternalLocal), Draining(l.B1), Ready(l.B2))
			want(t, "c1", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
		}},
	}
}

// topologyRows are about hints; n1 is in zone a, n2 in zone b.
func topologyRows() []Row {
	all := []string{"b1", "b2", "b3"}
	return []Row{
		{ID: "J02", Title: "zone hints keep traffic in the zone", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), hints(Ready(l.B1), "a", ""), hints(Ready(l.B2), "b", ""), hints(Ready(l.B3), "b", ""))
			near(t, l, l.C1, all, "b1")
			near(t, l, l.C2, all, "b2", "b3")
		}},
		{ID: "J03", Title: "no endpoint for the zone: all are used", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), hints(Ready(l.B2), "b", ""), hints(Ready(l.B3), "b", ""))
			only(t, l.C1, "b2", "b3")
		}},
		{ID: "J05", Title: "node hints keep traffic on the node", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), hints(Ready(l.B1), "a", "n1"), hints(Ready(l.B2), "b", "n2"), hints(Ready(l.B3), "b", "n3"))
			near(t, l, l.C1, all, "b1")
			near(t, l, l.C2, all, "b2")
		}},
		{ID: "J07", Title: "one endpoint without a hint: hints are ignored", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web"), hints(Ready(l.B1), "a", ""), Ready(l.B2))
			only(t, l.C1, "b1", "b2")
		}},
	}
}

// only checks that connections of a client to the cluster address meet these backends,
// each of them, and no other.
func only(t *testing.T, from *Host, backends ...string) {
	t.Helper()
	got := spread(t, from, vip+":80", 30)
	for _, b := range backends {
		if got[b] == 0 {
			t.Errorf("%s never went to %s: %v", from.Name, b, got)
		}
		delete(got, b)
	}
	if len(got) != 0 {
		t.Errorf("%s went to %v as well", from.Name, got)
	}
}

// near is only for Services with hints, which the userspace mode does not know: there
// all of the endpoints serve.
func near(t *testing.T, l *Lab, from *Host, all []string, backends ...string) {
	t.Helper()
	if l.userspace() {
		backends = all
	}
	only(t, from, backends...)
}

// loadBalancerRows are about load balancer and external addresses.
func loadBalancerRows() []Row {
	vipMode, proxyMode := corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy
	at := LoadBalancerIP + ":80"
	return []Row{
		{ID: "K04", Title: "pods are short-circuited to the Service", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, vipMode)), Ready(l.B2))
			want(t, "c1", l.C1.TCP(at), anyPeer, l.B2)
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, vipMode), ExternalLocal), Ready(l.B2))
			want(t, "c1, policy Local", l.C1.TCP(at), anyPeer, l.B2)
		}},
		{ID: "K05", Title: "ipMode Proxy: the packet goes to the real load balancer", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, proxyMode)), Ready(l.B2))
			wantOutcome(t, "c1", l.C1.TCP(at), Silence)
		}},
		{ID: "K06", Title: "clients outside, routed to a node", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, vipMode)), Ready(l.B2))
			want(t, "x", l.X.TCP(at), l.N1.IP, l.B2)
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, vipMode), ExternalLocal), Ready(l.B2))
			if !l.userspace() {
				wantOutcome(t, "x, Local, none here", l.X.TCP(at), Silence)
			}
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, vipMode), ExternalLocal), Ready(l.B1))
			want(t, "x, Local", l.X.TCP(at), l.seenVia(l.X, l.N1), l.B1)
		}},
		{ID: "K08", Title: "the nodePort is open beside the load balancer", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, vipMode)), Ready(l.B2))
			want(t, "x", l.X.TCP(l.N1.IP.String()+":30080"), l.N1.IP, l.B2)
		}},
		{ID: "K11", Title: "a client in the source ranges passes", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, vipMode, "172.18.0.0/24")), Ready(l.B1))
			want(t, "x", l.X.TCP(at), l.N1.IP, l.B1)
		}},
		{ID: "K12", Title: "a client outside the source ranges meets silence", Run: func(t *testing.T, l *Lab) {
			l.notIn(t, "userspace", "the mode knows no source ranges")
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, vipMode, "172.18.0.0/24")), Ready(l.B1))
			wantOutcome(t, "x2", l.X2.TCP(at), Silence)
			wantOutcome(t, "c1, K14", l.C1.TCP(at), Silence)
			want(t, "n2, K15", l.N2.TCP(at), l.N2.IP, l.B1)
		}},
		{ID: "K13", Title: "source ranges do not concern the nodePort", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, vipMode, "172.18.0.0/24")), Ready(l.B1))
			want(t, "x2", l.X2.TCP(l.N1.IP.String()+":30080"), l.N1.IP, l.B1)
		}},
		{ID: "K24", Title: "an external address that a node receives", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", External(ExternalIP)), Ready(l.B2))
			want(t, "x", l.X.TCP(ExternalIP+":80"), l.N1.IP, l.B2)
			want(t, "c2", l.C2.TCP(ExternalIP+":80"), anyPeer, l.B2)
		}},
		{ID: "K30", Title: "no endpoints: the load balancer address is refused", Run: func(t *testing.T, l *Lab) {
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, vipMode)))
			wantOutcome(t, "x", l.X.TCP(at), l.nobody())
		}},
	}
}
