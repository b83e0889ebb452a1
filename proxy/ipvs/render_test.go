// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"bytes"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/proxy"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// objects reads the objects that the golden texts of all modes are about.
func objects(tb testing.TB) (services []*corev1.Service, eps []*discoveryv1.EndpointSlice) {
	tb.Helper()
	data, err := os.ReadFile("testdata/objects.yaml")
	if err != nil {
		tb.Fatal(err)
	}
	for _, doc := range bytes.Split(data, []byte("\n---")) {
		var kind struct{ Kind string }
		if err := yaml.Unmarshal(doc, &kind); err != nil {
			tb.Fatal(err)
		}
		switch kind.Kind {
		case "Service":
			s := &corev1.Service{}
			if err := yaml.UnmarshalStrict(doc, s); err != nil {
				tb.Fatal(err)
			}
			if s.Name == "lb" {
				status, err := os.ReadFile("testdata/lb-status.json")
				if err != nil {
					tb.Fatal(err)
				}
				if err := yaml.Unmarshal(status, s); err != nil {
					tb.Fatal(err)
				}
			}
			services = append(services, s)
		case "EndpointSlice":
			e := &discoveryv1.EndpointSlice{}
			if err := yaml.UnmarshalStrict(doc, e); err != nil {
				tb.Fatal(err)
			}
			eps = append(eps, e)
		}
	}
	return services, eps
}

func facts() proxy.Facts {
	return proxy.Facts{
		NodeName: "node-1", NodeIPs: []netip.Addr{netip.MustParseAddr("10.200.0.2")},
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.128.0.0/9")}, LocalhostNodePorts: true,
	}
}

func snapshot(tb testing.TB, change ...func(*corev1.Service)) *proxy.Snapshot {
	tb.Helper()
	services, eps := objects(tb)
	for _, s := range services {
		for _, c := range change {
			c(s)
		}
	}
	return proxy.Decide(facts(), services, eps)
}

func render(tb testing.TB, o Options, s *proxy.Snapshot) *Program {
	tb.Helper()
	p, err := New(o).Render(s)
	if err != nil {
		tb.Fatal(err)
	}
	return p.(*Program)
}

// TestGolden compares the whole text with one that was read line by line: names, types,
// comments, matches and their order are those of kube-proxy's ipvs mode.
func TestGolden(t *testing.T) {
	want, err := os.ReadFile("testdata/program.txt")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(render(t, Options{}, snapshot(t)).String(), "\n")); d != "" {
		t.Errorf("text differs (-want +got):\n%s", d)
	}
}

func lines(text string) []string { return strings.Split(strings.TrimSuffix(text, "\n"), "\n") }

func TestRender(t *testing.T) {
	local := corev1.ServiceInternalTrafficPolicyLocal
	lb := func(fn func(*corev1.Service)) func(*corev1.Service) {
		return func(s *corev1.Service) {
			if s.Name == "lb" {
				fn(s)
			}
		}
	}
	web := func(fn func(*corev1.Service)) func(*corev1.Service) {
		return func(s *corev1.Service) {
			if s.Name == "web" {
				fn(s)
			}
		}
	}
	for name, tc := range map[string]struct {
		options      Options
		change       func(*corev1.Service)
		want, refuse []string
	}{
		"the node's scheduler":    {options: Options{Scheduler: "wlc"}, want: []string{"-A -t 10.96.10.1:80 -s wlc"}},
		"a Service's own":         {change: web(func(s *corev1.Service) { s.Annotations = map[string]string{proxy.AnnotationScheduler: "sh"} }), want: []string{"-A -t 10.96.10.1:80 -s sh", "-A -t 10.96.10.2:80 -s rr"}},
		"a name that nobody has":  {change: web(func(s *corev1.Service) { s.Annotations = map[string]string{proxy.AnnotationScheduler: "best"} }), want: []string{"-A -t 10.96.10.1:80 -s rr"}},
		"mh hashes the port":      {options: Options{Scheduler: "mh"}, want: []string{"-A -t 10.96.10.1:80 -s mh -b mh-port", "-A -t 10.96.10.3:443 -s mh -p 10800 -b mh-port"}},
		"the range of everything": {change: lb(func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"0.0.0.0/0"} }), want: []string{"add KUBE-LOAD-BALANCER-SOURCE-CIDR 192.0.2.51,tcp:443,0.0.0.0/1", "add KUBE-LOAD-BALANCER-SOURCE-CIDR 192.0.2.51,tcp:443,128.0.0.0/1", "add KUBE-LOAD-BALANCER-SOURCE-IP 192.0.2.51,tcp:443,192.0.2.51"}, refuse: []string{"--vaddr"}},
		"a node in the ranges":    {change: lb(func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.200.0.0/16"} }), want: []string{"add KUBE-LOAD-BALANCER-SOURCE-IP 192.0.2.51,tcp:443,192.0.2.51"}, refuse: []string{"--vaddr"}},
		"internal Local":          {change: web(func(s *corev1.Service) { s.Spec.InternalTrafficPolicy = &local }), want: []string{"-a -t 10.96.10.1:80 -r 10.129.0.11:8080 -m -w 1"}, refuse: []string{"-a -t 10.96.10.1:80 -r 10.130.0.12:8080 -m -w 1"}},
		"SCTP": {change: func(s *corev1.Service) {
			if s.Name == "np" {
				s.Spec.Ports[0].Protocol = corev1.ProtocolSCTP
			}
		}, want: []string{
			"-A --sctp-service 10.96.10.2:80 -s rr", "-A --sctp-service 10.200.0.2:30080 -s rr", "add KUBE-CLUSTER-IP 10.96.10.2,sctp:80", "add KUBE-NODE-PORT-SCTP-HASH 10.200.0.2,sctp:30080",
			`-A KUBE-NODE-PORT -p sctp -m comment --comment "Kubernetes nodeport SCTP port for masquerade purpose with type 'hash ip:port'" -m set --match-set KUBE-NODE-PORT-SCTP-HASH dst,dst -j KUBE-MARK-MASQ`,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			change := tc.change
			if change == nil {
				change = func(*corev1.Service) {}
			}
			got := render(t, tc.options, snapshot(t, change)).String()
			for _, l := range tc.want {
				if !slices.Contains(lines(got), l) {
					t.Errorf("no line %q in:\n%s", l, got)
				}
			}
			for _, s := range tc.refuse {
				if strings.Contains(got, s) {
					t.Errorf("%q is in:\n%s", s, got)
				}
			}
		})
	}
}

func TestRenderIPv6(t *testing.T) {
	six := corev1.IPv6Protocol
	svc := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "fd00:96::50", Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80, NodePort: 30080, Protocol: corev1.ProtocolTCP}}}}
	svc.Namespace, svc.Name = "default", "six"
	port, tcp, empty, node := int32(8080), corev1.ProtocolTCP, "", "node-1"
	slice := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv6, Ports: []discoveryv1.EndpointPort{{Name: &empty, Port: &port, Protocol: &tcp}}, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"fd00:244::11"}, NodeName: &node}}}
	slice.Namespace, slice.Name, slice.Labels = "default", "six-a", map[string]string{discoveryv1.LabelServiceName: "six"}
	f := facts()
	f.NodeIPs = append(f.NodeIPs, netip.MustParseAddr("fd00:200::2"))
	f.ClusterCIDRs = append(f.ClusterCIDRs, netip.MustParsePrefix("fd00:244::/56"))
	got := render(t, Options{}, proxy.Decide(f, []*corev1.Service{svc}, []*discoveryv1.EndpointSlice{slice})).String()
	for _, l := range []string{
		"ip addr add fd00:96::50/128 dev kube-ipvs0",
		"create KUBE-6-CLUSTER-IP hash:ip,port family inet6 hashsize 1024 maxelem 65536",
		"create KUBE-6-NODE-PORT-TCP bitmap:port range 0-65535",
		"add KUBE-6-LOOP-BACK fd00:244::11,tcp:8080,fd00:244::11",
		"-A -t [fd00:96::50]:80 -s rr", "-a -t [fd00:96::50]:80 -r [fd00:244::11]:8080 -m -w 1", "-A -t [fd00:200::2]:30080 -s rr",
		"ip6tables-restore --noflush <<'EOF'", "-A KUBE-SERVICES -s ::1/128 -j RETURN",
		"-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-6-IPVS-IPS dst -j REJECT --reject-with icmp6-port-unreachable",
	} {
		if !slices.Contains(lines(got), l) {
			t.Errorf("no line %q in:\n%s", l, got)
		}
	}
	// Two names are cut to what the kernel takes, and stay apart.
	seen := map[string]set{}
	for s := range sets {
		name := s.nameIn(six)
		if len(name) > maxSetName {
			t.Errorf("%s has %d characters", name, len(name))
		}
		if other, taken := seen[name]; taken {
			t.Errorf("sets %d and %d are both called %s", s, other, name)
		}
		seen[name] = s
	}
}

// TestRenderService shows one Service alone.
func TestRenderService(t *testing.T) {
	got := render(t, Options{}, snapshot(t)).Service("demo", "web")
	want := []string{
		"ip addr add 10.96.10.1/32 dev kube-ipvs0", "-A -t 10.96.10.1:80 -s rr",
		"-a -t 10.96.10.1:80 -r 10.129.0.11:8080 -m -w 1", "-a -t 10.96.10.1:80 -r 10.130.0.12:8080 -m -w 1", "-a -t 10.96.10.1:80 -r 10.131.0.13:8080 -m -w 1",
		"add KUBE-LOOP-BACK 10.129.0.11,tcp:8080,10.129.0.11", "add KUBE-CLUSTER-IP 10.96.10.1,tcp:80", "add KUBE-IPVS-IPS 10.96.10.1",
	}
	if d := cmp.Diff(want, lines(got)); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

// TestRenderKeepsBlocks: what has not changed is not rendered again.
func TestRenderKeepsBlocks(t *testing.T) {
	m := New(Options{})
	s := snapshot(t)
	first, err := m.Render(s)
	if err != nil {
		t.Fatal(err)
	}
	second, err := m.Render(s)
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range first.(*Program).rulesets[0].blocks {
		if second.(*Program).rulesets[0].blocks[i] != b {
			t.Errorf("block %d was made again", i)
		}
	}
}

func TestParseScheduler(t *testing.T) {
	for name := range Schedulers() {
		if got, err := ParseScheduler(name); err != nil || got != name {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if got, err := ParseScheduler(""); err != nil || got != "rr" {
		t.Errorf("default: %q, %v", got, err)
	}
	if _, err := ParseScheduler("best"); err == nil || !strings.Contains(err.Error(), "dh, fo, lblc") {
		t.Errorf("unknown: %v", err)
	}
}
