// SPDX-License-Identifier: Apache-2.0

package iptables

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

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// goldenSnapshot is the snapshot of node-1 for the objects with which a real
// kube-proxy wrote testdata/iptables-save.txt.
func goldenSnapshot(tb testing.TB) *proxy.Snapshot {
	tb.Helper()
	data, err := os.ReadFile("testdata/objects.yaml")
	if err != nil {
		tb.Fatal(err)
	}
	var services []*corev1.Service
	var eps []*discoveryv1.EndpointSlice
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
				var patch corev1.Service
				status, err := os.ReadFile("testdata/lb-status.json")
				if err != nil {
					tb.Fatal(err)
				}
				if err := yaml.Unmarshal(status, &patch); err != nil {
					tb.Fatal(err)
				}
				s.Status = patch.Status
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
	// The API server's own Service was there as well.
	kube := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Name: "https", Port: 443, Protocol: corev1.ProtocolTCP}}}}
	kube.Namespace, kube.Name = "default", "kubernetes"
	slice := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.200.0.1"}}}}
	slice.Namespace, slice.Name, slice.Labels = "default", "kubernetes", map[string]string{discoveryv1.LabelServiceName: "kubernetes"}
	https, port, tcp := "https", int32(6443), corev1.ProtocolTCP
	slice.Ports = []discoveryv1.EndpointPort{{Name: &https, Port: &port, Protocol: &tcp}}
	return proxy.Decide(proxy.Facts{
		NodeName: "node-1", NodeIPs: []netip.Addr{netip.MustParseAddr("10.200.0.2")},
		ClusterCIDRs:       []netip.Prefix{netip.MustParsePrefix("10.128.0.0/9")},
		LocalhostNodePorts: true,
	}, append(services, kube), append(eps, slice))
}

// canonical makes iptables-save text comparable: counters and dates go, rules
// are sorted within each chain except where the order means something.
func canonical(text string, nfacct bool) []string {
	var out []string
	table, seen := "", map[string]int{}
	for l := range strings.Lines(text) {
		l = xtables.Squeeze(strings.TrimRight(l, "\n"))
		switch {
		case strings.HasPrefix(l, "*"):
			table = l[1:]
		case strings.HasPrefix(l, ":"):
			name, _, _ := strings.Cut(l[1:], " ")
			out = append(out, table+" :"+name)
		case strings.HasPrefix(l, "-A "):
			if !nfacct && strings.Contains(l, "--nfacct-name") {
				if strings.Contains(l, acctLocalhost) {
					continue // an extra rule, only there to count
				}
				l = strings.Replace(l, "-m nfacct --nfacct-name "+acctInvalidDropped+" ", "", 1)
			}
			name, _, _ := strings.Cut(l[3:], " ")
			key := table + " " + name
			if h := slices.IndexFunc(hubsOf(table), func(h hub) bool { return h.chain() == name }); h >= 0 && !strings.Contains(l, "must be the last rule") {
				out = append(out, key+" "+l)
				continue
			}
			seen[key]++
			out = append(out, key+" "+string(rune('0'+seen[key]))+" "+l)
		}
	}
	slices.Sort(out)
	return out
}

func iptablesSave(tb testing.TB, run execx.Runner) string {
	tb.Helper()
	out, err := run.Run(tb.Context(), execx.Cmd{Path: "iptables-save"})
	if err != nil {
		tb.Fatal(err)
	}
	return string(out.Stdout)
}

func readGolden(tb testing.TB) string {
	tb.Helper()
	b, err := os.ReadFile("testdata/iptables-save.txt")
	if err != nil {
		tb.Fatal(err)
	}
	return string(b)
}

// TestGoldenApplied applies the golden objects in a fresh namespace and compares
// what the kernel holds with what a real kube-proxy 1.36 left.
func TestGoldenApplied(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "iptables")
	for name, nfacct := range map[string]bool{"nfacct": true, "plain": false} {
		t.Run(name, func(t *testing.T) {
			nettest.LeakCheck(t)
			f, err := Detect(t.Context(), VariantNFT)
			if err != nil {
				t.Fatal(err)
			}
			if nfacct && !f.NFAcct {
				nettest.Need(t, "nfacct")
			}
			ns := nettest.NewNS(t)
			f.NFAcct = nfacct
			m := New(Options{NetNS: ns, Features: &f})
			p, err := m.Render(goldenSnapshot(t))
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Apply(t.Context()); err != nil {
				t.Fatal(err)
			}
			got := canonical(iptablesSave(t, execx.In(ns)), nfacct)
			if d := cmp.Diff(canonical(readGolden(t), nfacct), got); d != "" {
				t.Errorf("kernel differs from kube-proxy's (-kube-proxy +kplab):\n%s", d)
			}
			if err := m.Cleanup(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestGoldenText loads Program.String by hand and finds the same rules.
func TestGoldenText(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "iptables")
	ns := nettest.NewNS(t)
	p, err := New(Options{}).Render(goldenSnapshot(t))
	if err != nil {
		t.Fatal(err)
	}
	run := execx.In(ns)
	if _, err := run.Run(t.Context(), execx.Cmd{Path: "iptables-restore", Stdin: []byte(p.String())}); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(canonical(readGolden(t), false), canonical(iptablesSave(t, run), false)); d != "" {
		t.Errorf("text differs from kube-proxy's rules (-kube-proxy +kplab):\n%s", d)
	}
}
