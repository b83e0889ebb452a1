// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

func testFacts() Facts {
	return Facts{
		NodeName: "n1", NodeIPs: []netip.Addr{netip.MustParseAddr("172.18.0.2")}, Zone: "a",
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, LocalhostNodePorts: true,
	}
}

func testService(opts ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.50",
		Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}},
	}}
	s.Namespace, s.Name = "default", "web"
	for _, o := range opts {
		o(s)
	}
	return s
}

// ep describes an endpoint in a few letters: the node, then r(eady), s(erving),
// t(erminating), and hints as "zone=a" and "node=n1".
func ep(ip, node, conditions string, hints ...string) discoveryv1.Endpoint {
	has := func(c string) *bool { v := strings.Contains(conditions, c); return &v }
	e := discoveryv1.Endpoint{Addresses: []string{ip}, NodeName: &node}
	if conditions != "nil" {
		e.Conditions = discoveryv1.EndpointConditions{Ready: has("r"), Serving: has("s"), Terminating: has("t")}
	}
	for _, h := range hints {
		if e.Hints == nil {
			e.Hints = &discoveryv1.EndpointHints{}
		}
		k, v, _ := strings.Cut(h, "=")
		if k == "zone" {
			e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: v})
		} else {
			e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: v})
		}
	}
	return e
}

func testSlice(name string, eps ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	port, protocol, none := int32(8080), corev1.ProtocolTCP, ""
	s := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: eps,
		Ports: []discoveryv1.EndpointPort{{Name: &none, Port: &port, Protocol: &protocol}}}
	s.Namespace, s.Name, s.Labels = "default", name, map[string]string{discoveryv1.LabelServiceName: "web"}
	return s
}

func addrs(eps []Endpoint) []string {
	var out []string
	for _, e := range eps {
		out = append(out, e.Addr.Addr().String())
	}
	return out
}

func external(s *corev1.Service) {
	s.Spec.Type = corev1.ServiceTypeNodePort
	s.Spec.Ports[0].NodePort = 30080
}

func externalLocal(s *corev1.Service) {
	external(s)
	s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
}

func internalLocal(s *corev1.Service) {
	local := corev1.ServiceInternalTrafficPolicyLocal
	s.Spec.InternalTrafficPolicy = &local
}

// TestEndpointChoice is the table of which endpoints count, row by row.
func TestEndpointChoice(t *testing.T) {
	const a, b, c = "10.244.1.1", "10.244.2.2", "10.244.3.3"
	for _, tc := range []struct {
		name           string
		svc            *corev1.Service
		eps            []discoveryv1.Endpoint
		cluster, local []string
		internal       Verdict
		external       Verdict
	}{
		{"ready", testService(), []discoveryv1.Endpoint{ep(a, "n1", "rs"), ep(b, "n2", "rs")}, []string{a, b}, nil, Balance, Balance},
		{"H17 no conditions", testService(), []discoveryv1.Endpoint{ep(a, "n1", "nil")}, []string{a}, nil, Balance, Balance},
		{"C25 none", testService(), nil, nil, nil, Reject, Reject},
		{"G01 one not ready", testService(), []discoveryv1.Endpoint{ep(a, "n1", ""), ep(b, "n2", "rs")}, []string{b}, nil, Balance, Balance},
		{"G02 all not ready", testService(), []discoveryv1.Endpoint{ep(a, "n1", "")}, nil, nil, Reject, Reject},
		{"G04 published while terminating", testService(), []discoveryv1.Endpoint{ep(a, "n1", "rt"), ep(b, "n2", "rs")}, []string{a, b}, nil, Balance, Balance},
		{"G05 one terminating", testService(), []discoveryv1.Endpoint{ep(a, "n1", "st"), ep(b, "n2", "rs")}, []string{b}, nil, Balance, Balance},
		{"G06 all terminating", testService(), []discoveryv1.Endpoint{ep(a, "n1", "st"), ep(b, "n2", "st")}, []string{a, b}, nil, Balance, Balance},
		{"G07 not serving", testService(), []discoveryv1.Endpoint{ep(a, "n1", "t"), ep(b, "n2", "t")}, nil, nil, Reject, Reject},
		{"serving but neither ready nor terminating", testService(), []discoveryv1.Endpoint{ep(a, "n1", "s")}, nil, nil, Reject, Reject},
		{"F01 external Local", testService(externalLocal), []discoveryv1.Endpoint{ep(a, "n1", "rs"), ep(b, "n2", "rs")}, []string{a, b}, []string{a}, Balance, Balance},
		{"F02 external Local, none here", testService(externalLocal), []discoveryv1.Endpoint{ep(b, "n2", "rs")}, []string{b}, nil, Balance, Drop},
		{"F05 external Local, none at all", testService(externalLocal), nil, nil, nil, Reject, Reject},
		{"external Local on a plain ClusterIP has no meaning", testService(func(s *corev1.Service) {
			s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		}), []discoveryv1.Endpoint{ep(b, "n2", "rs")}, []string{b}, nil, Balance, Balance},
		{"F08 internal Local", testService(internalLocal), []discoveryv1.Endpoint{ep(a, "n1", "rs"), ep(b, "n2", "rs")}, nil, []string{a}, Balance, Drop},
		{"F09 internal Local, none here", testService(internalLocal), []discoveryv1.Endpoint{ep(b, "n2", "rs")}, nil, nil, Drop, Drop},
		{"F11 internal Local with a nodePort", testService(external, internalLocal), []discoveryv1.Endpoint{ep(b, "n2", "rs")}, []string{b}, nil, Drop, Balance},
		{"G08 scopes fall back by themselves", testService(externalLocal), []discoveryv1.Endpoint{ep(a, "n1", "st"), ep(b, "n2", "rs")}, []string{b}, []string{a}, Balance, Balance},
		{"G09", testService(internalLocal), []discoveryv1.Endpoint{ep(a, "n1", "st"), ep(b, "n2", "rs")}, nil, []string{a}, Balance, Drop},
		{"J02 zones", testService(), []discoveryv1.Endpoint{ep(a, "n1", "rs", "zone=a"), ep(b, "n2", "rs", "zone=b")}, []string{a}, nil, Balance, Balance},
		{"J03 no zone of ours", testService(), []discoveryv1.Endpoint{ep(b, "n2", "rs", "zone=b"), ep(c, "n3", "rs", "zone=c")}, []string{b, c}, nil, Balance, Balance},
		{"J05 nodes", testService(), []discoveryv1.Endpoint{ep(a, "n1", "rs", "zone=a", "node=n1"), ep(b, "n4", "rs", "zone=a", "node=n4")}, []string{a}, nil, Balance, Balance},
		{"J06 no node of ours: zones", testService(), []discoveryv1.Endpoint{ep(b, "n4", "rs", "zone=a", "node=n4"), ep(c, "n2", "rs", "zone=b", "node=n2")}, []string{b}, nil, Balance, Balance},
		{"J07 one hint lacks", testService(), []discoveryv1.Endpoint{ep(a, "n1", "rs", "zone=a"), ep(b, "n2", "rs")}, []string{a, b}, nil, Balance, Balance},
		{"J16 a terminating one needs no hint", testService(), []discoveryv1.Endpoint{ep(a, "n1", "rs", "zone=a"), ep(b, "n2", "rs", "zone=b"), ep(c, "n3", "st")}, []string{a}, nil, Balance, Balance},
		{"J14 Local beats topology", testService(externalLocal), []discoveryv1.Endpoint{ep(a, "n1", "rs", "zone=b"), ep(b, "n2", "rs", "zone=a")}, []string{b}, []string{a}, Balance, Balance},
		{"terminating ones ignore topology", testService(), []discoveryv1.Endpoint{ep(a, "n1", "st", "zone=a"), ep(b, "n2", "st", "zone=b")}, []string{a, b}, nil, Balance, Balance},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := Decide(testFacts(), []*corev1.Service{tc.svc}, []*discoveryv1.EndpointSlice{testSlice("web-a", tc.eps...)})
			p := s.Services[0]
			if d := cmp.Diff(tc.cluster, addrs(p.Cluster)); d != "" {
				t.Errorf("cluster scope (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tc.local, addrs(p.Local)); d != "" {
				t.Errorf("local scope (-want +got):\n%s", d)
			}
			if p.Internal != tc.internal {
				t.Errorf("internal is %s, want %s", p.Internal, tc.internal)
			}
			if p.ExternallyAccessible() && p.External != tc.external {
				t.Errorf("external is %s, want %s", p.External, tc.external)
			}
		})
	}
}

// TestSlices is about how slices become endpoints.
func TestSlices(t *testing.T) {
	decide := func(svc *corev1.Service, eps ...*discoveryv1.EndpointSlice) *ServicePort {
		t.Helper()
		s := Decide(testFacts(), []*corev1.Service{svc}, eps)
		if len(s.Services) != 1 {
			t.Fatalf("%d service ports, want 1", len(s.Services))
		}
		return s.Services[0]
	}
	two := func(change func(*discoveryv1.EndpointSlice)) (a, b *discoveryv1.EndpointSlice) {
		a, b = testSlice("web-a", ep("10.244.1.1", "n1", "rs")), testSlice("web-b", ep("10.244.2.2", "n2", "rs"))
		change(b)
		return a, b
	}
	for _, tc := range []struct {
		name   string
		change func(*discoveryv1.EndpointSlice)
		want   []string
	}{
		{"two slices", func(*discoveryv1.EndpointSlice) {}, []string{"10.244.1.1", "10.244.2.2"}},
		{"H13 duplicate", func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses[0] = "10.244.1.1" }, []string{"10.244.1.1"}},
		{"duplicate that is worse", func(s *discoveryv1.EndpointSlice) { s.Endpoints[0] = ep("10.244.1.1", "n1", "") }, []string{"10.244.1.1"}},
		{"H05 other port name", func(s *discoveryv1.EndpointSlice) { *s.Ports[0].Name = "db" }, []string{"10.244.1.1"}},
		{"other protocol", func(s *discoveryv1.EndpointSlice) { *s.Ports[0].Protocol = corev1.ProtocolUDP }, []string{"10.244.1.1"}},
		{"no port", func(s *discoveryv1.EndpointSlice) { s.Ports[0].Port = nil }, []string{"10.244.1.1"}},
		{"I19 nil name and protocol", func(s *discoveryv1.EndpointSlice) { s.Ports[0].Name, s.Ports[0].Protocol = nil, nil }, []string{"10.244.1.1", "10.244.2.2"}},
		{"H12 no label", func(s *discoveryv1.EndpointSlice) { s.Labels = nil }, []string{"10.244.1.1"}},
		{"another namespace", func(s *discoveryv1.EndpointSlice) { s.Namespace = "other" }, []string{"10.244.1.1"}},
		{"H14 FQDN", func(s *discoveryv1.EndpointSlice) { s.AddressType = discoveryv1.AddressTypeFQDN }, []string{"10.244.1.1"}},
		{"no address", func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses = nil }, []string{"10.244.1.1"}},
		{"bad address", func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses[0] = "nonsense" }, []string{"10.244.1.1"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := two(tc.change)
			if d := cmp.Diff(tc.want, addrs(decide(testService(), a, b).Cluster)); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if d := cmp.Diff(tc.want, addrs(decide(testService(), b, a).Cluster)); d != "" {
				t.Errorf("in the other order (-want +got):\n%s", d)
			}
		})
	}
	t.Run("C17 a named port with two numbers", func(t *testing.T) {
		a, b := two(func(s *discoveryv1.EndpointSlice) { *s.Ports[0].Port = 9090 })
		got := decide(testService(), a, b).Cluster
		if len(got) != 2 || got[0].Addr.String() != "10.244.1.1:8080" || got[1].Addr.String() != "10.244.2.2:9090" {
			t.Errorf("endpoints are %v", got)
		}
	})
}

// TestServed is about which Services are this proxy's.
func TestServed(t *testing.T) {
	label := func(k, v string) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Labels = map[string]string{k: v} }
	}
	for name, tc := range map[string]struct {
		svc  *corev1.Service
		own  string
		want int
	}{
		"plain":                {testService(), "", 1},
		"headless":             {testService(func(s *corev1.Service) { s.Spec.ClusterIP = "None" }), "", 0},
		"not allocated yet":    {testService(func(s *corev1.Service) { s.Spec.ClusterIP = "" }), "", 0},
		"ExternalName":         {testService(func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeExternalName }), "", 0},
		"C38 another proxy's":  {testService(label(LabelServiceProxyName, "foo")), "", 0},
		"C38 empty label":      {testService(label(LabelServiceProxyName, "")), "", 0},
		"our own name":         {testService(label(LabelServiceProxyName, "foo")), "foo", 1},
		"C38 headless label":   {testService(label(corev1.IsHeadlessService, "")), "", 0},
		"an IPv6 address only": {testService(func(s *corev1.Service) { s.Spec.ClusterIP = "fd00::1" }), "", 0},
	} {
		f := testFacts()
		f.ProxyName = tc.own
		if got := len(Decide(f, []*corev1.Service{tc.svc}, nil).Services); got != tc.want {
			t.Errorf("%s: %d service ports, want %d", name, got, tc.want)
		}
	}
}

// TestServiceFields is about what else is decided.
func TestServiceFields(t *testing.T) {
	vipMode, proxyMode := corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy
	timeout := int32(5)
	svc := testService(externalLocal, func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.HealthCheckNodePort = 31000
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &timeout}}
		s.Spec.LoadBalancerSourceRanges = []string{"172.18.0.9/24", "fd00::/8", "nonsense"}
		s.Spec.ExternalIPs = []string{"192.0.2.1", "192.0.2.1", "fd00::5"}
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{
			{IP: "203.0.113.1", IPMode: &vipMode}, {IP: "203.0.113.2", IPMode: &proxyMode}, {IP: "203.0.113.3"}, {Hostname: "lb.example.com"},
		}
	})
	s := Decide(testFacts(), []*corev1.Service{svc}, []*discoveryv1.EndpointSlice{
		testSlice("web-a", ep("10.244.1.1", "n1", "rs"), ep("10.244.1.2", "n1", "st"), ep("10.244.2.2", "n2", "rs")),
	})
	p := s.Services[0]
	if p.Affinity != 5*time.Second {
		t.Errorf("affinity is %s", p.Affinity)
	}
	text := func(v any) string { return strings.Trim(strings.Join(strings.Fields(toString(v)), " "), "[]") }
	for _, c := range []struct{ what, got, want string }{
		{"load balancer addresses", text(p.LoadBalancerIPs), "203.0.113.1 203.0.113.3"},
		{"external addresses", text(p.ExternalIPs), "192.0.2.1"},
		{"source ranges", text(p.SourceRanges), "172.18.0.0/24"},
	} {
		if c.got != c.want {
			t.Errorf("%s are %s, want %s", c.what, c.got, c.want)
		}
	}
	if !p.SourceRangesHoldNode {
		t.Error("the node's address lies in the ranges")
	}
	want := []HealthCheck{{Namespace: "default", Name: "web", NodePort: 31000, LocalEndpoints: 1}}
	if d := cmp.Diff(want, s.HealthChecks); d != "" {
		t.Errorf("health checks (-want +got):\n%s", d)
	}
	if got := len(p.Serving); got != 3 {
		t.Errorf("%d serving endpoints, want 3", got)
	}
}

func toString(v any) string {
	switch x := v.(type) {
	case []netip.Addr:
		var out []string
		for _, a := range x {
			out = append(out, a.String())
		}
		return strings.Join(out, " ")
	case []netip.Prefix:
		var out []string
		for _, a := range x {
			out = append(out, a.String())
		}
		return strings.Join(out, " ")
	}
	return ""
}

// TestDualStack checks that each family has its own endpoints and addresses.
func TestDualStack(t *testing.T) {
	f := testFacts()
	f.NodeIPs = append(f.NodeIPs, netip.MustParseAddr("fd02::1"))
	svc := testService(func(s *corev1.Service) { s.Spec.ClusterIPs = []string{"10.96.0.50", "fd00::50"} })
	six := testSlice("web-6", ep("fd01::1", "n1", "rs"))
	six.AddressType = discoveryv1.AddressTypeIPv6
	s := Decide(f, []*corev1.Service{svc}, []*discoveryv1.EndpointSlice{testSlice("web-4", ep("10.244.1.1", "n1", "rs")), six})
	if len(s.Services) != 2 || s.Services[0].Family != corev1.IPv4Protocol || s.Services[1].Family != corev1.IPv6Protocol {
		t.Fatalf("services are %v", s.Services)
	}
	if got := addrs(s.Services[1].Cluster); !slices.Equal(got, []string{"fd01::1"}) {
		t.Errorf("IPv6 endpoints are %v", got)
	}
}

// TestConflicts checks that one address, port and protocol has one holder.
func TestConflicts(t *testing.T) {
	a := testService(external, func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.1", "10.96.0.51"} })
	b := testService(external, func(s *corev1.Service) {
		s.Name, s.Spec.ClusterIP = "web2", "10.96.0.51"
		s.Spec.ExternalIPs = []string{"192.0.2.1"}
	})
	s := Decide(testFacts(), []*corev1.Service{b, a}, nil)
	if got := toString(s.Services[0].ExternalIPs); got != "192.0.2.1" {
		t.Errorf("first has external addresses %s", got)
	}
	if p := s.Services[1]; len(p.ExternalIPs) != 0 || p.NodePort != 0 {
		t.Errorf("second has %v and nodePort %d", p.ExternalIPs, p.NodePort)
	}
	if len(s.Conflicts) != 3 {
		t.Errorf("conflicts are %v", s.Conflicts)
	}
}

// TestNodePortAddresses expands the setting.
func TestNodePortAddresses(t *testing.T) {
	for _, tc := range []struct {
		words     []string
		all       bool
		addrs     string
		localhost bool
	}{
		{nil, true, "", true},
		{[]string{"all"}, true, "", true},
		{[]string{"0.0.0.0/0"}, true, "", true},
		{[]string{"primary"}, false, "172.18.0.2", false},
		{[]string{"primary", "localhost"}, false, "172.18.0.2", true},
		{[]string{"10.9.0.0/16"}, false, "10.9.9.1", false},
		{[]string{"127.0.0.0/8", "172.18.0.0/16"}, false, "172.18.0.2", true},
	} {
		f := testFacts()
		f.NodeIPs = append(f.NodeIPs, netip.MustParseAddr("10.9.9.1"))
		f.NodePortAddresses = tc.words
		s := Decide(f, nil, nil)
		np := s.NodePorts[corev1.IPv4Protocol]
		if np.All != tc.all || toString(np.Addrs) != tc.addrs || s.LocalhostNodePorts != tc.localhost {
			t.Errorf("%v: all %v, addresses %v, localhost %v", tc.words, np.All, np.Addrs, s.LocalhostNodePorts)
		}
	}
}

// TestDeciderShares checks that unchanged Services keep their values, and that
// the Decider agrees with a fresh decision.
func TestDeciderShares(t *testing.T) {
	d := NewDecider()
	one := testService()
	two := testService(func(s *corev1.Service) { s.Name, s.Spec.ClusterIP = "web2", "10.96.0.51" })
	slice := testSlice("web-a", ep("10.244.1.1", "n1", "rs"))
	d.SetService(one)
	d.SetService(two)
	d.SetSlice(slice)
	first := d.Decide(testFacts())
	moved := slice.DeepCopy()
	moved.Labels[discoveryv1.LabelServiceName] = "web2"
	d.SetSlice(moved)
	second := d.Decide(testFacts())
	if got := addrs(second.Services[0].Cluster); got != nil {
		t.Errorf("web still has %v", got)
	}
	if got := addrs(second.Services[1].Cluster); len(got) != 1 {
		t.Errorf("web2 has %v", got)
	}
	d.DeleteSlice("default", "web-a")
	d.SetSlice(slice)
	third := d.Decide(testFacts())
	if d := cmp.Diff(first, third, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" {
		t.Errorf("back again, but (-first +third):\n%s", d)
	}
	d.DeleteService("default", "web")
	fourth := d.Decide(testFacts())
	if len(fourth.Services) != 1 || fourth.Services[0] != third.Services[1] {
		t.Error("an unchanged Service was decided again")
	}
}
