// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/internal/nfnl"
	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/proxytest"
)

// layouts runs a test with each layout in a namespace of its own.
func layouts(t *testing.T, fn func(t *testing.T, ns *netns.NS, mode func() *Mode)) {
	t.Helper()
	nettest.NeedRoot(t)
	for _, l := range Layouts() {
		t.Run(string(l), func(t *testing.T) {
			nettest.LeakCheck(t)
			ns := nettest.NewNS(t)
			fn(t, ns, func() *Mode {
				m := New(Options{NetNS: ns, Layout: l})
				t.Cleanup(m.Close)
				return m
			})
		})
	}
}

func apply(tb testing.TB, m *Mode, s *proxy.Snapshot) *Program {
	tb.Helper()
	p, err := m.Render(s)
	if err != nil {
		tb.Fatal(err)
	}
	if err := p.Apply(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	return p.(*Program)
}

func lookIn(tb testing.TB, ns *netns.NS, f family) *kernelTable {
	tb.Helper()
	conn, err := nfnl.Dial(ns)
	if err != nil {
		tb.Fatal(err)
	}
	defer conn.Close()
	k, err := look(conn, f, true, func(set) int { return 0 })
	if err != nil {
		tb.Fatal(err)
	}
	return k
}

// generation is the number of changes that a namespace has seen.
func generation(tb testing.TB, ns *netns.NS) uint32 {
	tb.Helper()
	conn, err := nfnl.Dial(ns)
	if err != nil {
		tb.Fatal(err)
	}
	defer conn.Close()
	n, err := conn.Generation()
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

// TestChurn changes Services at random, applies each change, and finds in the kernel what a fresh rendering wants: no more, no less, down to
// the contents of every map.
func TestChurn(t *testing.T) {
	layouts(t, func(t *testing.T, ns *netns.NS, mode func() *Mode) {
		t.Helper()
		c := proxytest.NewChurner(7)
		m := mode()
		apply(t, m, c.Decider.Decide(proxytest.SyntheticFacts()))
		for i := range 400 {
			for range 1 + c.IntN(2) {
				c.Step()
			}
			before := generation(t, ns)
			apply(t, m, c.Decider.Decide(proxytest.SyntheticFacts()))
			// What comes, and what goes.
			if n := generation(t, ns) - before; n > 2 {
				t.Errorf("step %d took %d transactions", i, n)
			}
			nothingToDo(t, ns, c.Fresh(), m.Layout())
			if intact, err := m.Intact(t.Context()); err != nil || !intact {
				t.Errorf("step %d: intact %v, %v", i, intact, err)
			}
			if t.Failed() {
				t.FailNow()
			}
			if i%50 == 49 {
				m = mode() // a restart: nothing is remembered
			}
		}
	})
}

// TestRestartTouchesNothing checks that a new process with the same wanted state
// writes nothing, so that clients keep their affinity.
func TestRestartTouchesNothing(t *testing.T) {
	layouts(t, func(t *testing.T, ns *netns.NS, mode func() *Mode) {
		t.Helper()
		for _, s := range []*proxy.Snapshot{goldenSnapshot(t), dualSnapshot()} {
			apply(t, mode(), s)
			before := generation(t, ns)
			apply(t, mode(), s)
			if after := generation(t, ns); after != before {
				t.Errorf("a restart made %d transactions", after-before)
			}
		}
	})
}

// TestSmallBatches loads and changes through a socket that takes what an
// unprivileged one does: several transactions with the same end.
func TestSmallBatches(t *testing.T) {
	layouts(t, func(t *testing.T, ns *netns.NS, mode func() *Mode) {
		t.Helper()
		m := mode()
		m.opts.MaxBatch = 380 << 10
		d := proxytest.SyntheticDecider(2000, 5)
		before := generation(t, ns)
		apply(t, m, d.Decide(proxytest.SyntheticFacts()))
		if n := generation(t, ns) - before; n < 3 {
			t.Errorf("2,000 Services in %d transactions of 380 KiB", n)
		}
		nothingToDo(t, ns, d.Decide(proxytest.SyntheticFacts()), m.Layout())
		_, eps := proxytest.Synthetic(2000, 5)
		for _, slice := range eps {
			slice.Endpoints = slice.Endpoints[1:4]
			d.SetSlice(slice)
		}
		apply(t, m, d.Decide(proxytest.SyntheticFacts()))
		nothingToDo(t, ns, d.Decide(proxytest.SyntheticFacts()), m.Layout())
	})
}

// TestHeal changes the table behind the mode's back: Intact sees it, and the next
// Apply puts it right.
func TestHeal(t *testing.T) {
	nettest.Need(t, "nft")
	layouts(t, func(t *testing.T, ns *netns.NS, mode func() *Mode) {
		t.Helper()
		m := mode()
		s := goldenSnapshot(t)
		apply(t, m, s)
		for _, damage := range []string{
			"flush ruleset",
			"delete table ip kube-proxy",
			"flush table ip kube-proxy",
			"flush chain ip kube-proxy services",
			"flush chain ip kube-proxy nat-prerouting",
			"add rule ip kube-proxy services counter",
			"insert rule ip kube-proxy masquerading accept",
			"add chain ip kube-proxy stray",
			"add chain ip kube-proxy stray/tcp/x ; add element ip kube-proxy service-ips { 10.96.99.99 . tcp . 80 : goto stray/tcp/x }",
			"add set ip kube-proxy stray { type ipv4_addr ; }",
			"delete element ip kube-proxy cluster-ips { 10.96.10.1 }",
			"add element ip kube-proxy cluster-ips { 10.96.10.99 }",
			"delete element ip kube-proxy service-ips { 10.96.10.1 . tcp . 80 }",
			"delete element ip kube-proxy service-ips { 10.96.10.1 . tcp . 80 } ; add element ip kube-proxy service-ips { 10.96.10.1 . tcp . 80 : drop }",
			"add element ip kube-proxy service-ips { 10.96.10.77 . tcp . 80 : accept }",
			"flush set ip kube-proxy nodeport-ips",
			"add chain ip kube-proxy filter-input { policy drop ; }",
			"add table ip kube-proxy { flags dormant ; }",
			"flush chain ip kube-proxy endpoint-HJMH3KZJ-demo/lb/tcp/https__10.130.0.32/8443",
		} {
			run(t, ns, damage, "-f", "-")
			if intact, err := m.Intact(t.Context()); err != nil || intact {
				t.Errorf("%s: intact %v, %v", damage, intact, err)
			}
			m.Reset()
			apply(t, m, s)
			nothingToDo(t, ns, s, m.Layout())
			if intact, err := m.Intact(t.Context()); err != nil || !intact {
				t.Errorf("%s: intact %v, %v after the repair", damage, intact, err)
			}
		}
		before := generation(t, ns)
		for _, harmless := range []string{"add table ip other", "add element ip kube-proxy affinity-RUKNYLKB-demo/lb/tcp/https__10.129.0.31/8443 { 10.128.0.9 }"} {
			run(t, ns, harmless, "-f", "-")
			if intact, err := m.Intact(t.Context()); err != nil || !intact {
				t.Errorf("%s: intact %v, %v", harmless, intact, err)
			}
		}
		if after := generation(t, ns); after != before+2 {
			t.Errorf("looking changed something: %d transactions", after-before)
		}
	})
}

// TestAffinitySurvives checks that a change of other things keeps the clients of
// an endpoint, and that another timeout is taken up.
func TestAffinitySurvives(t *testing.T) {
	nettest.Need(t, "nft")
	layouts(t, func(t *testing.T, ns *netns.NS, mode func() *Mode) {
		t.Helper()
		svcs, eps := proxytest.Synthetic(1, 2)
		svcs[0].Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		decide := func() *proxy.Snapshot { return proxy.Decide(proxytest.SyntheticFacts(), svcs, eps) }
		m := mode()
		p := apply(t, m, decide())
		set := p.rulesets[0].blocks[0].affinity[0].name
		run(t, ns, "add element ip kube-proxy "+set+" { 10.128.0.9 }", "-f", "-")
		has := func() bool {
			return strings.Contains(run(t, ns, "", "list", "set", "ip", "kube-proxy", set), "10.128.0.9")
		}
		eps[0].Endpoints = append(eps[0].Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.201.0.9"}})
		apply(t, m, decide())
		if !has() {
			t.Error("a new endpoint made the client's set anew")
		}
		apply(t, mode(), decide())
		if !has() {
			t.Error("a restart made the client's set anew")
		}
		seconds := int32(77)
		svcs[0].Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
		apply(t, m, decide())
		if got := run(t, ns, "", "list", "set", "ip", "kube-proxy", set); !strings.Contains(got, "timeout 1m17s") {
			t.Errorf("set after another timeout:\n%s", got)
		}
		nothingToDo(t, ns, decide(), m.Layout())
	})
}

// TestCleanup checks that everything of ours goes and everything else stays.
func TestCleanup(t *testing.T) {
	nettest.Need(t, "nft")
	layouts(t, func(t *testing.T, ns *netns.NS, mode func() *Mode) {
		t.Helper()
		run(t, ns, "table ip mine { chain kube-proxy { type nat hook prerouting priority -100 ; counter\n}\n}\ntable inet kube-proxy { set services { type ipv4_addr\n}\n}\n", "-f", "-")
		before := run(t, ns, "", "list", "ruleset")
		m := mode()
		if err := m.Cleanup(t.Context()); err != nil {
			t.Fatalf("nothing to clean: %v", err)
		}
		apply(t, m, dualSnapshot())
		for i := range 2 {
			if err := m.Cleanup(t.Context()); err != nil {
				t.Fatalf("clean-up %d: %v", i+1, err)
			}
			if d := cmp.Diff(before, run(t, ns, "", "list", "ruleset")); d != "" {
				t.Errorf("clean-up %d (-before +after):\n%s", i+1, d)
			}
		}
		// After a crash another process cleans up, and the mode can go on after it.
		apply(t, mode(), dualSnapshot())
		if err := mode().Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
		apply(t, m, dualSnapshot())
		nothingToDo(t, ns, dualSnapshot(), m.Layout())
	})
}

// dualSnapshot has Services of both families and of all kinds.
func dualSnapshot() *proxy.Snapshot {
	svcs, eps := proxytest.Synthetic(4, 3)
	for i, svc := range svcs {
		svc.Spec.ClusterIPs = []string{svc.Spec.ClusterIP, "fd00::1" + string(rune('0'+i))}
		six := eps[i].DeepCopy()
		six.Name, six.AddressType = six.Name+"6", discoveryv1.AddressTypeIPv6
		for j := range six.Endpoints {
			six.Endpoints[j].Addresses = []string{"fd01::" + string(rune('1'+j))}
		}
		eps = append(eps, six)
	}
	svcs[0].Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	svcs[0].Spec.Type = corev1.ServiceTypeNodePort
	svcs[0].Spec.Ports[0].NodePort = 30080
	svcs[1].Spec.Type = corev1.ServiceTypeLoadBalancer
	svcs[1].Spec.Ports[0].NodePort = 30081
	svcs[1].Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	svcs[1].Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24", "198.51.101.0/25", "203.0.112.0/20", "2001:db8::/33", "2001:db9::/48", "172.18.0.0/16"}
	svcs[1].Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}, {IP: "2001:db8::1"}}
	svcs[2].Spec.ExternalIPs = []string{"192.0.2.7", "2001:db8::7"}
	none, _ := proxytest.Synthetic(5, 0)
	none[4].Spec.ClusterIPs = []string{none[4].Spec.ClusterIP, "fd00::1f"}
	f := proxytest.SyntheticFacts()
	f.NodeIPs = append(f.NodeIPs, netip.MustParseAddr("fd02::1"))
	f.ClusterCIDRs = append(f.ClusterCIDRs, netip.MustParsePrefix("fd01::/64"))
	f.ServiceCIDRs = append(f.ServiceCIDRs, netip.MustParsePrefix("10.101.0.0/16"), netip.MustParsePrefix("fd00::/108"))
	return proxy.Decide(f, append(svcs, none[4]), eps)
}

// TestTwoFamilies applies IPv4 and IPv6 tables together, and finds that nft makes
// the same of their text.
func TestTwoFamilies(t *testing.T) {
	nettest.Need(t, "nft")
	nettest.Need(t, "ipv6")
	layouts(t, func(t *testing.T, ns *netns.NS, mode func() *Mode) {
		t.Helper()
		m := mode()
		p := apply(t, m, dualSnapshot())
		other := nettest.NewNS(t)
		run(t, other, p.String(), "-f", "-")
		for _, table := range []string{"ip kube-proxy", "ip6 kube-proxy"} {
			if d := cmp.Diff(listing(run(t, other, "", "list", "ruleset"), table), listing(run(t, ns, "", "list", "ruleset"), table)); d != "" {
				t.Errorf("the text loaded by nft differs from what Apply wrote (-nft +Apply):\n%s", d)
			}
		}
		nothingToDo(t, ns, dualSnapshot(), m.Layout())
		nothingToDo(t, other, dualSnapshot(), m.Layout())
	})
}

// TestRequirements checks that each requirement can be tried by itself, that what
// the kernel does not take is found out, and that this kernel has them all.
func TestRequirements(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	for _, r := range Requirements() {
		if err := r.Try(t.Context(), ns); err != nil {
			t.Errorf("%s: %v", r.Name, err)
		}
	}
	if err := Detect(t.Context()); err != nil {
		t.Error(err)
	}
	// A rejection in a hook that knows none, and a chain that is used elsewhere.
	bad := Requirement{Name: "bad", chains: []chain{{name: "probe", hook: &hookNATPostrouting, rules: []rule{probed.rule(reject)}}}}
	if err := bad.Try(t.Context(), ns); err == nil || !strings.Contains(err.Error(), "probe") {
		t.Errorf("error is %v", err)
	}
}

// TestErrors checks that an error names what the kernel refused.
func TestErrors(t *testing.T) {
	nettest.NeedRoot(t)
	ns := nettest.NewNS(t)
	m := New(Options{NetNS: ns})
	t.Cleanup(m.Close)
	svcs, eps := proxytest.Synthetic(1, 1)
	p, err := m.Render(proxy.Decide(proxytest.SyntheticFacts(), svcs, eps))
	if err != nil {
		t.Fatal(err)
	}
	r := p.(*Program).rulesets[0]
	bad := *r.blocks[0]
	bad.chains = slices.Clone(bad.chains)
	bad.chains[0].rules = []rule{r.rule(gotoChain("nowhere"))}
	r.blocks[0] = &bad
	err = p.Apply(t.Context())
	if err == nil || !strings.Contains(err.Error(), "add a rule to chain service-") {
		t.Errorf("error is %v", err)
	}
	// And the next Apply is not disturbed by it.
	apply(t, m, proxy.Decide(proxytest.SyntheticFacts(), svcs, eps))
}
