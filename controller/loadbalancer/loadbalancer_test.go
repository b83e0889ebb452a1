// SPDX-License-Identifier: Apache-2.0

package loadbalancer

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/loop"
)

func prefixes(words ...string) (out []netip.Prefix) {
	for _, w := range words {
		out = append(out, netip.MustParsePrefix(w))
	}
	return out
}

func plan() loop.AddressPlan {
	return loop.AddressPlan{
		NodeSubnets: prefixes("10.0.0.0/24", "fd00:0:0:1::/64"), PodSubnets: prefixes("10.244.0.0/16"), ServiceSubnets: prefixes("10.96.0.0/12"),
		Taken: map[netip.Addr]string{netip.MustParseAddr("10.0.0.131"): "node master", netip.MustParseAddr("10.0.0.200"): "the client outside"},
	}
}

func TestParsePool(t *testing.T) {
	for _, tc := range []struct{ text, want string }{
		{"10.0.0.240/28", "15"}, // without the broadcast address
		{"10.0.0.0/28", "15"},   // without the network's own
		{"10.0.0.240", "1"},
		{"10.0.0.10-10.0.0.12, 10.0.0.240/30", "7"},
		{"fd00:0:0:1::100/120", "256"},
		{"", "no addresses"},
		{"10.0.0.255", "no address that a Service could have"},
		{"10.0.0.128/28", "10.0.0.131 is the address of node master"},
		{"10.0.0.190-10.0.0.210", "10.0.0.200 is the address of the client outside"},
		{"10.0.0.241/28", "did you mean 10.0.0.240/28?"},
		{"10.0.1.0/24", "not inside the node network"},
		{"10.0.0.0/8", "overlaps the "},
		{"10.244.0.0/24", "overlaps the pod network"},
		{"10.96.1.0/24", "overlaps the Service network"},
		{"10.0.0.240/28,10.0.0.250", "overlaps another part"},
		{"10.0.0.20-10.0.0.10", "the lower address first"},
		{"10.0.0.x", "ParseAddr"},
	} {
		p, err := ParsePool(tc.text, plan())
		got := fmt.Sprint(err)
		if err == nil {
			n := p.Size(corev1.IPv4Protocol)
			got = n.Add(n, p.Size(corev1.IPv6Protocol)).String()
		}
		if !strings.Contains(got, tc.want) || (err == nil && got != tc.want) {
			t.Errorf("%q: %s, want %s", tc.text, got, tc.want)
		}
	}
	p, _ := ParsePool("10.0.0.1-10.0.0.3", plan())
	if got := fmt.Sprint(slices.Collect(p.addresses(corev1.IPv4Protocol))); got != "[10.0.0.1 10.0.0.2 10.0.0.3]" {
		t.Errorf("addresses %s", got)
	}
}

// service makes a Service; settings are "share=x", "ip=…", "local", "app=…", "port=…",
// "has=ADDR".
func service(name string, settings ...string) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Annotations: map[string]string{}}}
	s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	s.Spec.Ports = []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}
	for _, setting := range settings {
		key, value, _ := strings.Cut(setting, "=")
		switch key {
		case "share":
			s.Annotations["metallb.io/allow-shared-ip"] = value
		case "ip":
			s.Annotations[AnnotationIPs] = value
		case "spec":
			s.Spec.LoadBalancerIP = value
		case "local":
			s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		case "app":
			s.Spec.Selector = map[string]string{"app": value}
		case "port":
			var n int32
			_, _ = fmt.Sscan(value, &n)
			s.Spec.Ports[0].Port = n
		case "udp":
			s.Spec.Ports[0].Protocol = corev1.ProtocolUDP
		case "dual":
			s.Spec.IPFamilies = append(s.Spec.IPFamilies, corev1.IPv6Protocol)
			policy := corev1.IPFamilyPolicy(value)
			s.Spec.IPFamilyPolicy = &policy
		case "has":
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: value}}
		}
	}
	return s
}

func TestAssign(t *testing.T) {
	pool, err := ParsePool("10.0.0.240-10.0.0.242", plan())
	if err != nil {
		t.Fatal(err)
	}
	held := func(all ...*corev1.Service) *book {
		b := newBook()
		for _, s := range all {
			h := tenantOf(s)
			h.addrs = current(s)
			b.hold(h)
		}
		return b
	}
	a := service("a", "has=10.0.0.240", "share=k")
	for _, tc := range []struct {
		name string
		have []*corev1.Service
		svc  *corev1.Service
		want string
	}{
		{"the lowest free one", nil, service("b"), "[10.0.0.240]"},
		{"the next one", []*corev1.Service{a}, service("b"), "[10.0.0.241]"},
		{"what it has", []*corev1.Service{a}, service("b", "has=10.0.0.242"), "[10.0.0.242]"},
		{"what it has is out of the pool", nil, service("b", "has=10.0.0.9"), "[10.0.0.240]"},
		{"by annotation", nil, service("b", "ip=10.0.0.242"), "[10.0.0.242]"},
		{"by spec", nil, service("b", "spec=10.0.0.242", "has=10.0.0.240"), "[10.0.0.242]"},
		{"two wishes", nil, service("b", "spec=10.0.0.242", "ip=10.0.0.241"), "give one of them"},
		{"no address", nil, service("b", "ip=lb.example.com"), "no IP address"},
		{"wrong family", nil, service("b", "ip=fd00::1"), "the Service has no IPv6"},
		{"out of the pool", nil, service("b", "spec=10.0.0.9"), "address 10.0.0.9 is not in the pool"},
		{"used", []*corev1.Service{a}, service("b", "spec=10.0.0.240"), "address 10.0.0.240 is used by Service ns/a"},
		{"shared, other port", []*corev1.Service{a}, service("b", "share=k", "port=443"), "[10.0.0.240]"},
		{"shared, other protocol", []*corev1.Service{a}, service("b", "share=k", "udp"), "[10.0.0.240]"},
		{"shared, same port", []*corev1.Service{a}, service("b", "share=k"), "[10.0.0.241]"},
		{"shared by name, same port", []*corev1.Service{a}, service("b", "share=k", "spec=10.0.0.240"), "which has port 80/TCP as well"},
		{"other key", []*corev1.Service{a}, service("b", "share=x", "port=443"), "[10.0.0.241]"},
		{"shared, Local and Cluster", []*corev1.Service{a}, service("b", "share=k", "port=443", "local", "spec=10.0.0.240"), "select the same pods"},
		{
			"shared, both Local, same pods",
			[]*corev1.Service{service("a", "has=10.0.0.240", "share=k", "local", "app=x")},
			service("b", "share=k", "port=443", "local", "app=x"), "[10.0.0.240]",
		},
		{
			"shared, both Local, other pods",
			[]*corev1.Service{service("a", "has=10.0.0.240", "share=k", "local", "app=x")},
			service("b", "share=k", "port=443", "local", "app=y"), "[10.0.0.241]",
		},
		{
			"exhausted",
			[]*corev1.Service{service("a", "has=10.0.0.240"), service("c", "has=10.0.0.241")},
			service("b"), "no free IPv4 address: all 3 are in use",
		},
		{"dual where the pool is not", nil, service("b", "dual=PreferDualStack"), "[10.0.0.240]"},
		{"dual by force", nil, service("b", "dual=RequireDualStack"), "has no IPv6 addresses"},
	} {
		// 10.0.0.242 is no node's, but in the case of the exhausted pool.
		nodes := map[netip.Addr]string{}
		if tc.name == "exhausted" {
			nodes[netip.MustParseAddr("10.0.0.242")] = "node9"
		}
		got, err := held(tc.have...).assign(tc.svc, pool, nodes)
		text := fmt.Sprint(got)
		if err != nil {
			text = err.Error()
		}
		if !strings.Contains(text, tc.want) {
			t.Errorf("%s: %s, want %s", tc.name, text, tc.want)
		}
	}
}

func TestElect(t *testing.T) {
	addr := netip.MustParseAddr("10.0.0.240")
	node := func(name string, flags ...string) candidate {
		has := func(f string) bool { return slices.Contains(flags, f) }
		return candidate{name: name, ready: !has("notready"), healthy: !has("sick"), excluded: has("excluded"), endpoints: has("pods")}
	}
	first := elect(addr, []candidate{node("n1"), node("n2"), node("n3")}, false)
	for _, tc := range []struct {
		name  string
		nodes []candidate
		local bool
		want  string
	}{
		{"nobody", nil, false, ""},
		{"order does not matter", []candidate{node("n3"), node("n2"), node("n1")}, false, first},
		{"excluded", []candidate{node("n1", "excluded"), node("n2")}, false, "n2"},
		{"sick", []candidate{node("n1", "sick"), node("n2"), node("n3", "sick")}, false, "n2"},
		{"not ready", []candidate{node("n1", "notready"), node("n2", "sick")}, false, "n2"},
		{"all are bad: one is better than none", []candidate{node("n1", "notready", "sick")}, false, "n1"},
		{"Local, with pods", []candidate{node("n1"), node("n2", "pods"), node("n3")}, true, "n2"},
		{"Local, without", []candidate{node("n1"), node("n2")}, true, ""},
		{"Local, sick but the only one", []candidate{node("n1"), node("n2", "pods", "sick")}, true, "n2"},
	} {
		if got := elect(addr, tc.nodes, tc.local); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
	// Addresses spread over the nodes, and a loss moves only what was lost.
	all, seen := []candidate{node("n1"), node("n2"), node("n3")}, map[string]int{}
	for a := range 100 {
		addr := netip.AddrFrom4([4]byte{10, 0, 1, byte(a)})
		before := elect(addr, all, false)
		seen[before]++
		if before != "n3" && elect(addr, all[:2], false) != before {
			t.Errorf("the loss of n3 moves %s, which %s had", addr, before)
		}
	}
	if seen["n1"] < 15 || seen["n2"] < 15 || seen["n3"] < 15 {
		t.Errorf("100 addresses on three nodes: %v", seen)
	}
}

func TestNodesWithEndpoints(t *testing.T) {
	end := func(node string, ready, terminating bool) discoveryv1.Endpoint {
		return discoveryv1.Endpoint{NodeName: &node, Conditions: discoveryv1.EndpointConditions{Ready: &ready, Terminating: ptr.To(terminating)}}
	}
	got := nodesWithEndpoints([]*discoveryv1.EndpointSlice{{Endpoints: []discoveryv1.Endpoint{
		end("n1", true, false), end("n2", false, false), end("n3", true, true), {},
	}}})
	if len(got) != 1 || !got["n1"] {
		t.Errorf("%v, want n1", got)
	}
}

func TestChecks(t *testing.T) {
	var c checks
	c.init()
	one := target{"n1", netip.MustParseAddrPort("10.0.0.132:10256")}
	c.want(loop.Key{Namespace: "ns", Name: "a"}, []target{one})
	c.want(loop.Key{Namespace: "ns", Name: "b"}, []target{one})
	if n := len(c.due()); n != 1 {
		t.Errorf("%d checks of one target", n)
	}
	for i := 1; i <= checkFailures; i++ {
		keys := c.found(one, fmt.Errorf("refused"))
		if want := i == checkFailures; c.sick(one) != want || (len(keys) == 2) != want {
			t.Errorf("after %d failures: sick %v, told %v", i, c.sick(one), keys)
		}
	}
	if keys := c.found(one, nil); c.sick(one) || len(keys) != 2 {
		t.Errorf("after a good check: sick %v, told %v", c.sick(one), keys)
	}
}
