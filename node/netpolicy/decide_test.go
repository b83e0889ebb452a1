// SPDX-License-Identifier: Apache-2.0

package netpolicy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// pod makes a pod on node n1 or n2; its container names the port http.
func pod(namespace, name, node, ip, app string, httpPort int32) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": app}},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{
			Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: httpPort}},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}},
	}
}

func namespace(name string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"team": name}}}
}

func app(name string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}
}

func team(name string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"team": name}}
}

func everything() *metav1.LabelSelector { return &metav1.LabelSelector{} }

func policy(name string, selects *metav1.LabelSelector, in []networkingv1.NetworkPolicyIngressRule, out []networkingv1.NetworkPolicyEgressRule, types ...networkingv1.PolicyType) *networkingv1.NetworkPolicy {
	return &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name},
		Spec:       networkingv1.NetworkPolicySpec{PodSelector: *selects, Ingress: in, Egress: out, PolicyTypes: types},
	}
}

func port(p any, protocol corev1.Protocol, end int32) networkingv1.NetworkPolicyPort {
	var out networkingv1.NetworkPolicyPort
	switch v := p.(type) {
	case int:
		out.Port = ptr.To(intstr.FromInt32(int32(v)))
	case string:
		out.Port = ptr.To(intstr.FromString(v))
	}
	if protocol != "" {
		out.Protocol = &protocol
	}
	if end != 0 {
		out.EndPort = &end
	}
	return out
}

// passes runs a packet through the programs of both nodes, as the kernel would.
func passes(programs map[string]*Program, nodeOf map[netip.Addr]string, src, dst netip.Addr, proto uint8, dport uint16) bool {
	through := func(p *Program) bool {
		if src == dst {
			return true // the set self
		}
		for _, dir := range []direction{egress, ingress} {
			own, other := src, dst
			if dir == ingress {
				own, other = dst, src
			}
			name, isolated := p.pods[dir][own]
			if isolated && !slices.ContainsFunc(p.chains[name].clauses, func(c clause) bool {
				return (c.peers == "" || p.sets[c.peers].contains(other)) &&
					(c.proto == 0 || c.proto == proto && (c.to == 0 || c.from <= dport && dport <= c.to))
			}) {
				return false
			}
		}
		return true
	}
	for _, node := range slices.Compact([]string{nodeOf[src], nodeOf[dst]}) {
		if p := programs[node]; p != nil && !through(p) {
			return false
		}
	}
	return true
}

// allowed is what the API's documentation says, asked for one packet.
func allowed(o Objects, src, dst netip.Addr, proto corev1.Protocol, dport int32) bool {
	find := func(ip netip.Addr) *corev1.Pod {
		for _, p := range o.Pods {
			if a, ok := podIP(p, ip.Is6()); ok && a == ip {
				return p
			}
		}
		return nil
	}
	from, to := find(src), find(dst)
	if src == dst {
		return true
	}
	peer := func(np *networkingv1.NetworkPolicy, peers []networkingv1.NetworkPolicyPeer, ip netip.Addr, other *corev1.Pod) bool {
		for _, p := range peers {
			if p.IPBlock != nil {
				if netip.MustParsePrefix(p.IPBlock.CIDR).Contains(ip) &&
					!slices.ContainsFunc(p.IPBlock.Except, func(e string) bool { return netip.MustParsePrefix(e).Contains(ip) }) {
					return true
				}
				continue
			}
			if other == nil {
				continue
			}
			inNamespace := other.Namespace == np.Namespace
			if p.NamespaceSelector != nil {
				inNamespace = slices.ContainsFunc(o.Namespaces, func(n *corev1.Namespace) bool {
					return n.Name == other.Namespace && selects(p.NamespaceSelector, n.Labels)
				})
			}
			if inNamespace && (p.PodSelector == nil || selects(p.PodSelector, other.Labels)) {
				return true
			}
		}
		return len(peers) == 0
	}
	ports := func(ports []networkingv1.NetworkPolicyPort) bool {
		for _, p := range ports {
			if ptr.Deref(p.Protocol, corev1.ProtocolTCP) != proto {
				continue
			}
			switch {
			case p.Port == nil:
				return true
			case p.Port.Type == intstr.String:
				if to != nil && proto == corev1.ProtocolTCP && p.Port.StrVal == "http" && to.Spec.Containers[0].Ports[0].ContainerPort == dport {
					return true
				}
			case dport >= p.Port.IntVal && dport <= ptr.Deref(p.EndPort, p.Port.IntVal):
				return true
			}
		}
		return len(ports) == 0
	}
	check := func(own *corev1.Pod, dir direction, ip netip.Addr, other *corev1.Pod) bool {
		if own == nil {
			return true
		}
		isolated, open := false, false
		for _, np := range o.Policies {
			if np.Namespace != own.Namespace || !selects(&np.Spec.PodSelector, own.Labels) || !concerns(np, dir) {
				continue
			}
			isolated = true
			if dir == ingress {
				for _, r := range np.Spec.Ingress {
					open = open || peer(np, r.From, ip, other) && ports(r.Ports)
				}
			} else {
				for _, r := range np.Spec.Egress {
					open = open || peer(np, r.To, ip, other) && ports(r.Ports)
				}
			}
		}
		return !isolated || open
	}
	return check(from, egress, dst, to) && check(to, ingress, src, from)
}

func TestDecide(t *testing.T) {
	web, db, far := pod("a", "web", "n1", "10.244.1.2", "web", 80), pod("a", "db", "n1", "10.244.1.3", "db", 5432), pod("b", "far", "n2", "10.244.2.2", "web", 8080)
	host := pod("a", "host", "n1", "10.0.0.132", "web", 80)
	host.Spec.HostNetwork = true
	ended := pod("a", "ended", "n1", "10.244.1.9", "web", 80)
	ended.Status.Phase = corev1.PodSucceeded
	in := func(from []networkingv1.NetworkPolicyPeer, ports ...networkingv1.NetworkPolicyPort) []networkingv1.NetworkPolicyIngressRule {
		return []networkingv1.NetworkPolicyIngressRule{{From: from, Ports: ports}}
	}
	out := func(to []networkingv1.NetworkPolicyPeer, ports ...networkingv1.NetworkPolicyPort) []networkingv1.NetworkPolicyEgressRule {
		return []networkingv1.NetworkPolicyEgressRule{{To: to, Ports: ports}}
	}
	peers := func(p ...networkingv1.NetworkPolicyPeer) []networkingv1.NetworkPolicyPeer { return p }
	type packet struct {
		from, to string
		proto    uint8
		port     uint16
		pass     bool
	}
	const w, d, f, x = "10.244.1.2", "10.244.1.3", "10.244.2.2", "10.0.0.200"
	tcp, udp := uint8(unix.IPPROTO_TCP), uint8(unix.IPPROTO_UDP)
	for _, tc := range []struct {
		name     string
		policies []*networkingv1.NetworkPolicy
		packets  []packet
	}{
		{"none", nil, []packet{{f, w, tcp, 80, true}}},
		{"default deny in", []*networkingv1.NetworkPolicy{policy("deny", everything(), nil, nil, "Ingress")}, []packet{
			{d, w, tcp, 80, false}, {x, w, tcp, 80, false}, {w, f, tcp, 80, true}, {w, w, tcp, 80, true}, {x, "10.0.0.132", tcp, 80, true}, {x, "10.244.1.9", tcp, 80, true},
		}},
		{"default deny out", []*networkingv1.NetworkPolicy{policy("deny", everything(), nil, nil, "Egress")}, []packet{
			{w, f, tcp, 80, false}, {w, x, udp, 53, false}, {f, w, tcp, 80, true},
		}},
		{"without types: only in", []*networkingv1.NetworkPolicy{policy("in", app("db"), nil, nil)}, []packet{{w, d, tcp, 1, false}, {d, w, tcp, 1, true}}},
		{"allow all", []*networkingv1.NetworkPolicy{policy("deny", everything(), nil, nil, "Ingress"), policy("all", app("web"), in(nil), nil)}, []packet{
			{x, w, tcp, 80, true}, {x, d, tcp, 80, false},
		}},
		{"pods of the same namespace", []*networkingv1.NetworkPolicy{policy("p", app("db"), in(peers(networkingv1.NetworkPolicyPeer{PodSelector: app("web")}), port(5432, "", 0)), nil)}, []packet{
			{w, d, tcp, 5432, true}, {w, d, tcp, 5433, false}, {w, d, udp, 5432, false}, {f, d, tcp, 5432, false}, {x, d, tcp, 5432, false},
		}},
		{"pods of another namespace", []*networkingv1.NetworkPolicy{policy("p", app("db"), in(peers(networkingv1.NetworkPolicyPeer{PodSelector: app("web"), NamespaceSelector: team("b")})), nil)}, []packet{
			{f, d, tcp, 1, true}, {w, d, tcp, 1, false},
		}},
		{"all of a namespace, or a block", []*networkingv1.NetworkPolicy{policy("p", app("db"), in(peers(
			networkingv1.NetworkPolicyPeer{NamespaceSelector: team("b")},
			networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.0/24", Except: []string{"10.0.0.128/26"}}},
		)), nil)}, []packet{
			{f, d, tcp, 1, true}, {x, d, tcp, 1, true}, {"10.0.0.131", d, tcp, 1, false}, {"10.0.1.0", d, tcp, 1, false}, {"10.0.0.0", d, tcp, 1, true}, {"10.0.0.255", d, tcp, 1, true},
		}},
		{"a named port in", []*networkingv1.NetworkPolicy{policy("p", everything(), in(nil, port("http", "", 0)), nil)}, []packet{
			{f, w, tcp, 80, true}, {f, d, tcp, 80, false}, {f, d, tcp, 5432, true},
		}},
		{"a named port out", []*networkingv1.NetworkPolicy{policy("p", app("db"), nil, out(peers(networkingv1.NetworkPolicyPeer{NamespaceSelector: everything()}), port("http", "TCP", 0)), "Egress")}, []packet{
			{d, w, tcp, 80, true}, {d, w, tcp, 8080, false}, {d, f, tcp, 8080, true}, {d, x, tcp, 80, false},
		}},
		{"a range, and all ports of a protocol", []*networkingv1.NetworkPolicy{policy("p", app("web"), in(nil, port(8000, "TCP", 8010), port(nil, "UDP", 0)), nil)}, []packet{
			{f, w, tcp, 7999, false}, {f, w, tcp, 8000, true}, {f, w, tcp, 8010, true}, {f, w, tcp, 8011, false}, {f, w, udp, 9, true}, {f, w, unix.IPPROTO_ICMP, 0, false},
		}},
		{"a selector that matches nobody", []*networkingv1.NetworkPolicy{policy("p", app("db"), in(peers(networkingv1.NetworkPolicyPeer{PodSelector: app("nobody")})), nil)}, []packet{
			{w, d, tcp, 1, false},
		}},
	} {
		o := Objects{Pods: []*corev1.Pod{web, db, far, host, ended}, Namespaces: []*corev1.Namespace{namespace("a"), namespace("b")}, Policies: tc.policies}
		programs := map[string]*Program{"n1": Decide(o, "n1", false), "n2": Decide(o, "n2", false)}
		nodeOf := map[netip.Addr]string{}
		for _, p := range o.Pods {
			nodeOf[netip.MustParseAddr(p.Status.PodIP)] = p.Spec.NodeName
		}
		for _, k := range tc.packets {
			if got := passes(programs, nodeOf, netip.MustParseAddr(k.from), netip.MustParseAddr(k.to), k.proto, k.port); got != k.pass {
				t.Errorf("%s: %s to %s, protocol %d, port %d: passes %v, want %v", tc.name, k.from, k.to, k.proto, k.port, got, k.pass)
			}
		}
	}
}

// random objects of a small world, where policies often meet pods.
func random(r *rand.Rand) Objects {
	o := Objects{Namespaces: []*corev1.Namespace{namespace("a"), namespace("b")}}
	apps, spaces := []string{"web", "db"}, []string{"a", "b"}
	pick := func(words []string) string { return words[r.IntN(len(words))] }
	for i := range 2 + r.IntN(6) {
		p := pod(pick(spaces), fmt.Sprint("p", i), pick([]string{"n1", "n2"}), fmt.Sprintf("10.244.1.%d", i+1), pick(apps), int32(80+r.IntN(3)))
		switch r.IntN(10) {
		case 0:
			p.Spec.HostNetwork = true
		case 1:
			p.Status.Phase = corev1.PodFailed
		}
		o.Pods = append(o.Pods, p)
	}
	selector := func() *metav1.LabelSelector {
		return []*metav1.LabelSelector{everything(), app(pick(apps)), {MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: metav1.LabelSelectorOpNotIn, Values: []string{pick(apps)}}}}}[r.IntN(3)]
	}
	peers := func() (out []networkingv1.NetworkPolicyPeer) {
		for range r.IntN(3) {
			p := networkingv1.NetworkPolicyPeer{}
			switch r.IntN(4) {
			case 0:
				p.PodSelector = selector()
			case 1:
				p.NamespaceSelector = team(pick(spaces))
			case 2:
				p.NamespaceSelector, p.PodSelector = everything(), selector()
			default:
				p.IPBlock = &networkingv1.IPBlock{CIDR: pick([]string{"10.244.1.0/29", "10.244.0.0/16", "10.244.1.4/30", "0.0.0.0/0"})}
				if r.IntN(2) == 0 {
					p.IPBlock.Except = []string{pick([]string{"10.244.1.2/31", "10.244.1.4/32", "10.244.1.0/30"})}
				}
			}
			out = append(out, p)
		}
		return out
	}
	ports := func() (out []networkingv1.NetworkPolicyPort) {
		for range r.IntN(3) {
			protocol := corev1.Protocol(pick([]string{"", "TCP", "UDP"}))
			switch r.IntN(4) {
			case 0:
				out = append(out, port("http", protocol, 0))
			case 1:
				out = append(out, port(nil, protocol, 0))
			case 2:
				out = append(out, port(80, protocol, int32(80+r.IntN(3))))
			default:
				out = append(out, port(80+r.IntN(3), protocol, 0))
			}
		}
		return out
	}
	for i := range r.IntN(5) {
		np := policy(fmt.Sprint("np", i), selector(), nil, nil)
		np.Namespace = pick(spaces)
		for range r.IntN(3) {
			np.Spec.Ingress = append(np.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: peers(), Ports: ports()})
		}
		for range r.IntN(3) {
			np.Spec.Egress = append(np.Spec.Egress, networkingv1.NetworkPolicyEgressRule{To: peers(), Ports: ports()})
		}
		np.Spec.PolicyTypes = [][]networkingv1.PolicyType{nil, {"Ingress"}, {"Egress"}, {"Ingress", "Egress"}}[r.IntN(4)]
		o.Policies = append(o.Policies, np)
	}
	return o
}

// TestDecideAgainstTheWords compares the program with a direct reading of what the
// API says, packet by packet.
func TestDecideAgainstTheWords(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	packets, dropped := 0, 0
	for round := range 3000 {
		o := random(r)
		programs := map[string]*Program{"n1": Decide(o, "n1", false), "n2": Decide(o, "n2", false)}
		slices.Reverse(o.Pods)
		slices.Reverse(o.Policies)
		if again := Decide(o, "n1", false); !reflect.DeepEqual(again, programs["n1"]) {
			t.Fatalf("round %d: the order of objects matters", round)
		}
		nodeOf, addrs := map[netip.Addr]string{}, []netip.Addr{netip.MustParseAddr("10.0.0.200"), netip.MustParseAddr("10.244.1.200")}
		for _, p := range o.Pods {
			a := netip.MustParseAddr(p.Status.PodIP)
			nodeOf[a] = p.Spec.NodeName
			addrs = append(addrs, a)
		}
		for range 60 {
			src, dst := addrs[r.IntN(len(addrs))], addrs[r.IntN(len(addrs))]
			proto, number := corev1.ProtocolTCP, uint8(unix.IPPROTO_TCP)
			if r.IntN(3) == 0 {
				proto, number = corev1.ProtocolUDP, unix.IPPROTO_UDP
			}
			dport := uint16(79 + r.IntN(5))
			got, want := passes(programs, nodeOf, src, dst, number, dport), allowed(o, src, dst, proto, int32(dport))
			if got != want {
				t.Fatalf("round %d: %s to %s %s/%d passes: %v, want %v", round, src, dst, proto, dport, got, want)
			}
			packets++
			if !want {
				dropped++
			}
		}
	}
	if dropped < packets/20 || dropped > packets*19/20 {
		t.Errorf("%d of %d packets are dropped: this proves little", dropped, packets)
	}
}

func TestSpans(t *testing.T) {
	ip := netip.MustParseAddr
	all := normal([]span{{ip("10.0.0.5"), ip("10.0.0.9")}, {ip("10.0.0.1"), ip("10.0.0.2")}, {ip("10.0.0.3"), ip("10.0.0.4")}, {ip("10.0.0.20"), ip("10.0.0.30")}, {ip("10.0.0.22"), ip("10.0.0.25")}})
	if got := fmt.Sprint(all); got != "[10.0.0.1-10.0.0.9 10.0.0.20-10.0.0.30]" {
		t.Errorf("joined %s", got)
	}
	if got := fmt.Sprint(all.without(span{ip("10.0.0.9"), ip("10.0.0.20")})); got != "[10.0.0.1-10.0.0.8 10.0.0.21-10.0.0.30]" {
		t.Errorf("cut %s", got)
	}
	whole := spans{spanOf(netip.MustParsePrefix("0.0.0.0/0"))}
	if got := fmt.Sprint(whole.without(whole[0])); got != "[]" {
		t.Errorf("all without all is %s", got)
	}
	if got := len(intervals(whole)); got != 1 {
		t.Errorf("the whole space ends at %d points", got-1)
	}
}
