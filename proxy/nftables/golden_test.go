// SPDX-License-Identifier: Apache-2.0

package nftables

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
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/proxy"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// goldenSnapshot is the snapshot of node-1 for the objects with which a real
// kube-proxy wrote testdata/nft-list-ruleset.txt.
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
		ClusterCIDRs:      []netip.Prefix{netip.MustParsePrefix("10.128.0.0/9")},
		ServiceCIDRs:      []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
		NodePortAddresses: []string{"primary"},
	}, append(services, kube), append(eps, slice))
}

func run(tb testing.TB, ns *netns.NS, stdin string, args ...string) string {
	tb.Helper()
	out, err := execx.In(ns).Run(tb.Context(), execx.Cmd{Path: "nft", Args: args, Stdin: []byte(stdin)})
	if err != nil {
		tb.Fatal(err)
	}
	return string(out.Stdout)
}

// listing is what nft lists, in a form that does not depend on the order in which
// sets, elements and chains were made. Rules keep their order.
func listing(text, table string) []string {
	_, text, found := strings.Cut(text, "table "+table+" {\n")
	if !found {
		return nil
	}
	text, _, _ = strings.Cut(text, "\n}")
	var out []string
	for part := range strings.SplitSeq(text, "\n\n") {
		head, elements, has := strings.Cut(part, "elements = { ")
		if !has {
			out = append(out, part)
			continue
		}
		elements, _, _ = strings.Cut(elements, " }")
		list := strings.Split(strings.Join(strings.Fields(elements), " "), ", ")
		slices.Sort(list)
		out = append(out, head+strings.Join(list, "\n"))
	}
	slices.Sort(out)
	return out
}

func readGolden(tb testing.TB) string {
	tb.Helper()
	b, err := os.ReadFile("testdata/nft-list-ruleset.txt")
	if err != nil {
		tb.Fatal(err)
	}
	return string(b)
}

// TestGoldenApplied applies the golden objects in a fresh namespace and compares
// what the kernel holds with what a real kube-proxy 1.36 left.
func TestGoldenApplied(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "nft")
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	m := New(Options{NetNS: ns})
	t.Cleanup(m.Close)
	apply(t, m, goldenSnapshot(t))
	if d := cmp.Diff(listing(readGolden(t), "ip kube-proxy"), listing(run(t, ns, "", "list", "ruleset"), "ip kube-proxy")); d != "" {
		t.Errorf("kernel differs from kube-proxy's (-kube-proxy +kplab):\n%s", d)
	}
	// The bytecode too, not only its listing: what nft made of kube-proxy's text
	// is found to be right as it stands.
	other := nettest.NewNS(t)
	run(t, other, readGolden(t), "-f", "-")
	nothingToDo(t, other, goldenSnapshot(t), LayoutUpstream)
}

// nothingToDo checks that the kernel holds exactly what a snapshot wants.
func nothingToDo(tb testing.TB, ns *netns.NS, s *proxy.Snapshot, layout Layout) {
	tb.Helper()
	p, err := New(Options{Layout: layout}).Render(s)
	if err != nil {
		tb.Fatal(err)
	}
	for _, r := range p.(*Program).rulesets {
		c := lookIn(tb, ns, r.family).compare(newState(r))
		for try := 1; !c.empty() && try < looks; try++ {
			c = lookIn(tb, ns, r.family).compare(newState(r))
		}
		if !c.empty() {
			tb.Errorf("%s: %s", r.ip(), c.describe(r))
		}
	}
}

// TestGoldenText loads Program.String by hand and finds the same rules.
func TestGoldenText(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "nft")
	for _, layout := range Layouts() {
		t.Run(string(layout), func(t *testing.T) {
			nettest.LeakCheck(t)
			ns := nettest.NewNS(t)
			p, err := New(Options{Layout: layout}).Render(goldenSnapshot(t))
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				run(t, ns, p.String(), "-f", "-")
			}
			nothingToDo(t, ns, goldenSnapshot(t), layout)
			run(t, ns, "", "list", "ruleset")
			run(t, ns, "", "-j", "list", "ruleset")
		})
	}
}
