// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sort"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// world is a random cluster as API objects, and a packet.
type world struct {
	svc    *corev1.Service
	slices []*discoveryv1.EndpointSlice
	pkt    Packet
}

// clients by kind: a pod, the node, the node's loopback, somebody outside in the
// source range, somebody outside of it.
var clients = []string{"10.244.1.9", "172.18.0.2", "127.0.0.1", "172.18.0.200", "198.51.100.1"}

func randomWorld(r *rand.Rand) world {
	svc := testService()
	chance := func(n int) bool { return r.IntN(n) == 0 }
	if chance(2) {
		external(svc)
		if chance(2) {
			svc.Spec.Type = corev1.ServiceTypeLoadBalancer
			svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}
			if chance(2) {
				svc.Spec.LoadBalancerSourceRanges = []string{"172.18.0.200/32"}
			}
		}
	}
	if chance(3) {
		svc.Spec.ExternalIPs = []string{"192.0.2.1"}
	}
	if chance(2) {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if chance(2) {
		internalLocal(svc)
	}
	conditions := []string{"rs", "rs", "st", "s", "t", "", "r", "rst", "nil"}
	hintsets := [][]string{nil, {"zone=a"}, {"zone=b"}, {"zone=a", "node=n1"}, {"zone=b", "node=n2"}}
	w := world{svc: svc}
	mode := r.IntN(3) // how freely hints are mixed
	for s := range r.IntN(3) {
		var eps []discoveryv1.Endpoint
		for range r.IntN(4) {
			h := hintsets[0]
			if mode > 0 {
				h = hintsets[r.IntN(len(hintsets)-mode+1)+mode-1]
			}
			i := r.IntN(6)
			eps = append(eps, ep(fmt.Sprintf("10.244.%d.%d", i%2+1, i+1), fmt.Sprintf("n%d", i%2+1), conditions[r.IntN(len(conditions))], h...))
		}
		w.slices = append(w.slices, testSlice(fmt.Sprintf("web-%d", s), eps...))
	}
	dsts := []string{"10.96.0.50:80", "10.96.0.50:81", "192.0.2.1:80", "203.0.113.1:80", "172.18.0.2:30080", "127.0.0.1:30080", "10.244.1.1:30080"}
	w.pkt = Packet{
		Src:      netip.MustParseAddr(clients[r.IntN(len(clients))]),
		Dst:      netip.MustParseAddrPort(dsts[r.IntN(len(dsts))]),
		Protocol: corev1.ProtocolTCP,
	}
	return w
}

// oracle answers a packet by reading the rules of the API documentation one
// after the other, for this one packet, without any of the code under test. The
// answer is "nobody", "reject", "drop", or the endpoints and whether the source
// is hidden.
func oracle(w world, node, zone string) string {
	spec := &w.svc.Spec
	// Which entry is it?
	entry := ""
	switch w.pkt.Dst.String() {
	case "10.96.0.50:80":
		entry = "cluster"
	case "192.0.2.1:80":
		if len(spec.ExternalIPs) > 0 {
			entry = "external"
		}
	case "203.0.113.1:80":
		if spec.Type == corev1.ServiceTypeLoadBalancer {
			entry = "lb"
		}
	case "172.18.0.2:30080", "127.0.0.1:30080":
		if spec.Ports[0].NodePort != 0 {
			entry = "nodePort"
		}
	}
	if entry == "" {
		return "nobody"
	}
	type state struct {
		ready, drain, here bool
		zones, nodes       []string
	}
	// The state of each address; of duplicates the more useful one.
	all := map[string]state{}
	var order []string
	for _, s := range w.slices {
		for _, e := range s.Endpoints {
			is := func(b *bool, missing bool) bool {
				if b == nil {
					return missing
				}
				return *b
			}
			st := state{ready: is(e.Conditions.Ready, true), here: *e.NodeName == node}
			st.drain = !st.ready && is(e.Conditions.Serving, true) && is(e.Conditions.Terminating, false)
			if e.Hints != nil {
				for _, z := range e.Hints.ForZones {
					st.zones = append(st.zones, z.Name)
				}
				for _, n := range e.Hints.ForNodes {
					st.nodes = append(st.nodes, n.Name)
				}
			}
			old, dup := all[e.Addresses[0]]
			if !dup {
				order = append(order, e.Addresses[0])
			}
			if !dup || (st.ready && !old.ready) || (st.drain && !old.ready && !old.drain) {
				all[e.Addresses[0]] = st
			}
		}
	}
	pick := func(cond func(state) bool) (out []string) {
		for _, a := range order {
			if cond(all[a]) {
				out = append(out, a)
			}
		}
		sort.Strings(out)
		return out
	}
	if len(pick(func(s state) bool { return s.ready || s.drain })) == 0 {
		return "reject"
	}
	clusterWide := func() []string {
		ready := pick(func(s state) bool { return s.ready })
		if len(ready) == 0 {
			return pick(func(s state) bool { return s.drain })
		}
		everyNode, everyZone := true, true
		for _, a := range ready {
			everyNode = everyNode && len(all[a].nodes) > 0
			everyZone = everyZone && len(all[a].zones) > 0
		}
		if byNode := pick(func(s state) bool { return s.ready && slices.Contains(s.nodes, node) }); everyNode && len(byNode) > 0 {
			return byNode
		}
		if byZone := pick(func(s state) bool { return s.ready && slices.Contains(s.zones, zone) }); everyZone && len(byZone) > 0 {
			return byZone
		}
		return ready
	}
	onNode := func() []string {
		if ready := pick(func(s state) bool { return s.ready && s.here }); len(ready) > 0 {
			return ready
		}
		return pick(func(s state) bool { return s.drain && s.here })
	}
	answer := func(eps []string, hidden bool) string {
		if len(eps) == 0 {
			return "drop"
		}
		return fmt.Sprintf("%s hidden=%v", strings.Join(eps, ","), hidden)
	}
	src := w.pkt.Src.String()
	pod := strings.HasPrefix(src, "10.244.")
	self := src == "172.18.0.2" || src == "127.0.0.1"
	if entry == "cluster" {
		if deref(spec.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster) == corev1.ServiceInternalTrafficPolicyLocal {
			return answer(onNode(), !pod)
		}
		return answer(clusterWide(), !pod)
	}
	if entry == "lb" && len(spec.LoadBalancerSourceRanges) > 0 && src != "172.18.0.200" {
		return "drop"
	}
	if spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return answer(clusterWide(), true)
	}
	if pod || self {
		return answer(clusterWide(), self)
	}
	return answer(onNode(), false)
}

func resolved(w world, facts Facts) string {
	out := Decide(facts, []*corev1.Service{w.svc}, w.slices).Resolve(w.pkt)
	switch {
	case out.Service == nil:
		return "nobody"
	case out.Verdict != Balance:
		return string(out.Verdict)
	}
	got := addrs(out.Endpoints)
	sort.Strings(got)
	return fmt.Sprintf("%s hidden=%v", strings.Join(got, ","), out.Masquerade)
}

// FuzzPolicy compares the decisions with the oracle.
func FuzzPolicy(f *testing.F) {
	for seed := range uint64(3000) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		w := randomWorld(rand.New(rand.NewPCG(seed, 2)))
		want, got := oracle(w, "n1", "a"), resolved(w, testFacts())
		if got != want {
			t.Errorf("packet %s -> %s: decided %q, oracle says %q\nservice %+v", w.pkt.Src, w.pkt.Dst, got, want, w.svc.Spec)
			for _, s := range w.slices {
				for _, e := range s.Endpoints {
					t.Logf("%s %s on %s ready=%v serving=%v terminating=%v hints=%+v", s.Name, e.Addresses[0], *e.NodeName, deref(e.Conditions.Ready, true), deref(e.Conditions.Serving, true), deref(e.Conditions.Terminating, false), e.Hints)
				}
			}
		}
	})
}
