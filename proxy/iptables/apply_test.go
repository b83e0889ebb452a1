// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/proxytest"
)

// variants are the tools that every test below is run with, and the feature that
// nettest knows each by.
func variants() map[Variant]string {
	return map[Variant]string{VariantNFT: "iptables", VariantLegacy: "iptables-legacy"}
}

// variant gives a namespace, and makes modes that work in it.
func variant(t *testing.T, v Variant) (ns *netns.NS, mode func() *Mode) {
	t.Helper()
	nettest.NeedRoot(t)
	nettest.Need(t, variants()[v])
	nettest.LeakCheck(t)
	ns = nettest.NewNS(t)
	f, err := Detect(t.Context(), v)
	if err != nil {
		t.Fatal(err)
	}
	lock := t.TempDir() + "/lock"
	return ns, func() *Mode { return New(Options{NetNS: ns, Variant: v, Features: &f, LockFile: lock}) }
}

func saveCmd(m *Mode) string {
	if m.opts.Variant == VariantLegacy {
		return "iptables-legacy-save"
	}
	return "iptables-nft-save"
}

func dumpKernel(tb testing.TB, ns *netns.NS, m *Mode) []string {
	tb.Helper()
	out, err := inNode(ns).Run(tb.Context(), execx.Cmd{Path: saveCmd(m)})
	if err != nil {
		tb.Fatal(err)
	}
	return canonical(string(out.Stdout), true)
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

// TestChurn changes Services at random, applies each change, and compares the
// kernel with a fresh rendering in an empty namespace.
func TestChurn(t *testing.T) {
	for v := range variants() {
		t.Run(string(v), func(t *testing.T) {
			ns, mode := variant(t, v)
			c := proxytest.NewChurner(7)
			m := mode()
			const steps = 60
			for i := range steps {
				for range 1 + c.IntN(2) {
					c.Step()
				}
				apply(t, m, c.Decider.Decide(proxytest.SyntheticFacts()))
				if i%15 == 7 {
					m = mode() // a restart: nothing is remembered
				}
				if i%6 != 0 && i != steps-1 {
					continue
				}
				other := nettest.NewNS(t)
				f := *m.features
				ref := New(Options{NetNS: other, Variant: m.opts.Variant, Features: &f, LockFile: m.opts.LockFile})
				apply(t, ref, c.Fresh())
				if d := cmp.Diff(dumpKernel(t, other, ref), dumpKernel(t, ns, m)); d != "" {
					t.Fatalf("step %d: kernel differs from a fresh rendering (-fresh +kernel):\n%s", i, d)
				}
			}
			if err := m.Cleanup(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestRestartTouchesNothing checks that a new process with the same wanted state
// writes no rule: counters of the kernel's rules keep their values.
func TestRestartTouchesNothing(t *testing.T) {
	for v := range variants() {
		t.Run(string(v), func(t *testing.T) {
			ns, mode := variant(t, v)
			s := goldenSnapshot(t)
			apply(t, mode(), s)
			m := mode()
			seen := &recorder{Runner: inNode(ns)}
			m.exec = seen
			apply(t, m, s)
			for _, c := range seen.cmds {
				if strings.HasSuffix(c.Path, "-restore") && len(c.Stdin) > 0 {
					t.Errorf("a restart wrote:\n%s", c.Stdin)
				}
			}
		})
	}
}

// recorder notes the commands it passes on.
type recorder struct {
	execx.Runner
	cmds []execx.Cmd
}

func (r *recorder) Run(ctx context.Context, c execx.Cmd) (execx.Result, error) {
	r.cmds = append(r.cmds, c)
	return r.Runner.Run(ctx, c)
}

// TestSmallChange checks that one endpoint's change writes one Service's chains
// and runs one process.
func TestSmallChange(t *testing.T) {
	for v := range variants() {
		t.Run(string(v), func(t *testing.T) {
			ns, mode := variant(t, v)
			svcs, eps := proxytest.Synthetic(30, 4)
			d := proxy.NewDecider()
			for i := range svcs {
				d.SetService(svcs[i])
				d.SetSlice(eps[i])
			}
			m := mode()
			apply(t, m, d.Decide(proxytest.SyntheticFacts()))
			seen := &recorder{Runner: inNode(ns)}
			m.tool.Exec = seen
			changed := eps[3].DeepCopy()
			changed.Endpoints = changed.Endpoints[1:]
			d.SetSlice(changed)
			apply(t, m, d.Decide(proxytest.SyntheticFacts()))
			restores := 0
			for _, c := range seen.cmds {
				if !strings.HasSuffix(c.Path, "-restore") {
					continue
				}
				restores++
				if n := strings.Count(string(c.Stdin), "\n"); n > 12 {
					t.Errorf("%d lines for one endpoint:\n%s", n, c.Stdin)
				}
			}
			if restores != 1 {
				t.Errorf("%d restore processes, want 1", restores)
			}
		})
	}
}

// TestHeal takes rules away behind the mode's back, and adds some: Intact sees
// all that changes ours and only that, and the next Apply puts it right.
func TestHeal(t *testing.T) {
	for v := range variants() {
		t.Run(string(v), func(t *testing.T) {
			ns, mode := variant(t, v)
			m := mode()
			s := goldenSnapshot(t)
			apply(t, m, s)
			before := dumpKernel(t, ns, m)
			run := func(args string) {
				t.Helper()
				for _, one := range strings.Split(args, "; ") {
					if _, err := inNode(ns).Run(t.Context(), execx.Cmd{Path: strings.TrimSuffix(saveCmd(m), "-save"), Args: strings.Fields(one)}); err != nil {
						t.Fatal(err)
					}
				}
			}
			for _, args := range []string{
				"-t nat -F; -t nat -X", "-t filter -F; -t filter -X", "-t mangle -F; -t mangle -X",
				"-t nat -F", "-t filter -F", "-t nat -F KUBE-SERVICES", "-t nat -F KUBE-NODEPORTS", "-t nat -F KUBE-MARK-MASQ",
				"-t nat -D PREROUTING 1", "-F FORWARD", "-t nat -I KUBE-SERVICES -j RETURN", "-t nat -N KUBE-SVC-STALE",
			} {
				run(args)
				if intact, err := m.Intact(t.Context()); err != nil || intact {
					t.Errorf("%s: intact %v, %v", args, intact, err)
				}
				m.Reset()
				apply(t, m, s)
				if d := cmp.Diff(before, dumpKernel(t, ns, m)); d != "" {
					t.Errorf("%s: not healed (-before +after):\n%s", args, d)
				}
			}
			for _, args := range []string{"-t nat -S KUBE-SERVICES", "-N MINE; -A MINE -j KUBE-FORWARD; -I FORWARD -j MINE", "-t nat -A OUTPUT -j KUBE-SERVICES"} {
				run(args)
				if intact, err := m.Intact(t.Context()); err != nil || !intact {
					t.Errorf("%s: intact %v, %v", args, intact, err)
				}
			}
		})
	}
}

// TestCleanup checks that everything of ours goes and everything else stays.
func TestCleanup(t *testing.T) {
	for v := range variants() {
		t.Run(string(v), func(t *testing.T) {
			ns, mode := variant(t, v)
			m := mode()
			tool := strings.TrimSuffix(saveCmd(m), "-save")
			foreign := "*filter\n:MINE - [0:0]\n:KUBE-KUBELET-CANARY - [0:0]\n-A INPUT -s 192.0.2.1/32 -j MINE\n-A MINE -m comment --comment \"jumps to KUBE-SERVICES\" -j DROP\n-A FORWARD -j ACCEPT\nCOMMIT\n" +
				"*nat\n:CNI-HOSTPORT - [0:0]\n-A PREROUTING -p tcp -j CNI-HOSTPORT\n-A POSTROUTING -s 192.0.2.0/24 -j MASQUERADE\nCOMMIT\n*mangle\n-A OUTPUT -j MARK --set-xmark 0x1/0x1\nCOMMIT\n"
			run := inNode(ns)
			if _, err := run.Run(t.Context(), execx.Cmd{Path: tool + "-restore", Stdin: []byte(foreign)}); err != nil {
				t.Fatal(err)
			}
			if err := m.Cleanup(t.Context()); err != nil {
				t.Fatalf("nothing to clean: %v", err)
			}
			before := dumpKernel(t, ns, m)
			was, err := readSysctl(ns, routeLocalnet)
			if err != nil {
				t.Fatal(err)
			}
			apply(t, m, goldenSnapshot(t))
			if now, err := readSysctl(ns, routeLocalnet); err != nil || now != "1" {
				t.Errorf("route_localnet is %s, %v", now, err)
			}
			for i := range 2 {
				if err := m.Cleanup(t.Context()); err != nil {
					t.Fatalf("clean-up %d: %v", i+1, err)
				}
				if d := cmp.Diff(before, dumpKernel(t, ns, m)); d != "" {
					t.Errorf("clean-up %d (-before +after):\n%s", i+1, d)
				}
			}
			if now, err := readSysctl(ns, routeLocalnet); err != nil || now != was {
				t.Errorf("route_localnet is %s, %v; was %s", now, err, was)
			}

			// After a crash another process cleans up.
			apply(t, mode(), goldenSnapshot(t))
			if err := mode().Cleanup(t.Context()); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(before, dumpKernel(t, ns, m)); d != "" {
				t.Errorf("clean-up by another process (-before +after):\n%s", d)
			}
		})
	}
}

// TestCleanupKeepsForeignJumps checks that a foreign rule which uses a chain of
// ours is named and not removed.
func TestCleanupKeepsForeignJumps(t *testing.T) {
	for v := range variants() {
		t.Run(string(v), func(t *testing.T) {
			ns, mode := variant(t, v)
			m := mode()
			apply(t, m, goldenSnapshot(t))
			run := inNode(ns)
			tool := strings.TrimSuffix(saveCmd(m), "-save")
			if _, err := run.Run(t.Context(), execx.Cmd{Path: tool + "-restore", Args: []string{"--noflush"}, Stdin: []byte("*nat\n:MINE - [0:0]\n-A MINE -j KUBE-MARK-MASQ\nCOMMIT\n")}); err != nil {
				t.Fatal(err)
			}
			if err := m.Cleanup(t.Context()); err == nil || !strings.Contains(err.Error(), "-A MINE -j KUBE-MARK-MASQ") {
				t.Errorf("error is %v", err)
			}
			if _, err := run.Run(t.Context(), execx.Cmd{Path: tool, Args: strings.Fields("-t nat -D MINE -j KUBE-MARK-MASQ")}); err != nil {
				t.Fatal(err)
			}
			if err := m.Cleanup(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestForeignRulesSurvive applies and changes beside somebody else's rules, and
// puts the jumps back at the head when they were moved.
func TestForeignRulesSurvive(t *testing.T) {
	for v := range variants() {
		t.Run(string(v), func(t *testing.T) {
			ns, mode := variant(t, v)
			m := mode()
			run := inNode(ns)
			tool := strings.TrimSuffix(saveCmd(m), "-save")
			apply(t, m, goldenSnapshot(t))
			for _, args := range []string{"-I INPUT -s 192.0.2.9/32 -j ACCEPT", "-t nat -A PREROUTING -s 192.0.2.9/32 -j ACCEPT", "-N MINE", "-D FORWARD 2"} {
				if _, err := run.Run(t.Context(), execx.Cmd{Path: tool, Args: strings.Fields(args)}); err != nil {
					t.Fatal(err)
				}
			}
			m.Reset()
			apply(t, m, goldenSnapshot(t))
			got := strings.Join(dumpKernel(t, ns, m), "\n")
			for _, want := range []string{"-A INPUT -s 192.0.2.9/32 -j ACCEPT", "-A PREROUTING -s 192.0.2.9/32 -j ACCEPT", ":MINE", `"kubernetes forwarding rules" -j KUBE-FORWARD`} {
				if !strings.Contains(got, want) {
					t.Errorf("no %q in\n%s", want, got)
				}
			}
		})
	}
}

// TestTwoFamilies applies IPv4 and IPv6 rules together.
func TestTwoFamilies(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "iptables")
	nettest.Need(t, "ipv6")
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	s := dualSnapshot()
	m := New(Options{NetNS: ns, Variant: VariantNFT})
	if err := m.Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	apply(t, m, s)
	out, err := inNode(ns).Run(t.Context(), execx.Cmd{Path: "ip6tables-save"})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(out.Stdout), "--to-destination [fd01::1]:8080") {
		t.Errorf("ip6tables has\n%s", out.Stdout)
	}
	// A restart must find its own IPv6 text again, too.
	again := New(Options{NetNS: ns, Variant: VariantNFT, Features: m.features})
	seen := &recorder{Runner: inNode(ns)}
	again.exec = seen
	apply(t, again, s)
	for _, c := range seen.cmds {
		if strings.HasSuffix(c.Path, "-restore") && len(c.Stdin) > 0 {
			t.Errorf("a restart wrote with %s:\n%s", c.Path, c.Stdin)
		}
	}
	if err := m.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if out, err = inNode(ns).Run(t.Context(), execx.Cmd{Path: "ip6tables-save"}); err != nil || strings.Contains(string(out.Stdout), "KUBE-") {
		t.Errorf("after the clean-up, %v:\n%s", err, out.Stdout)
	}
}

func dualSnapshot() *proxy.Snapshot {
	svcs, eps := proxytest.Synthetic(1, 1)
	svcs[0].Spec.ClusterIPs = []string{svcs[0].Spec.ClusterIP, "fd00::10"}
	svcs[0].Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	svcs[0].Spec.Type = corev1.ServiceTypeNodePort
	svcs[0].Spec.Ports[0].NodePort = 30080
	none, _ := proxytest.Synthetic(2, 0)
	none[1].Spec.ClusterIPs = []string{none[1].Spec.ClusterIP, "fd00::11"}
	six := eps[0].DeepCopy()
	six.Name, six.AddressType, six.Endpoints[0].Addresses = "six", discoveryv1.AddressTypeIPv6, []string{"fd01::1"}
	f := proxytest.SyntheticFacts()
	f.NodeIPs = append(f.NodeIPs, netip.MustParseAddr("fd02::1"))
	f.ClusterCIDRs = append(f.ClusterCIDRs, netip.MustParsePrefix("fd01::/64"))
	return proxy.Decide(f, append(svcs, none[1]), append(eps, six))
}

// TestRequirements checks that each requirement can be tried by itself, that a
// rule which the kernel does not take is found out, and that Detect knows no more
// and no less.
func TestRequirements(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "iptables")
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	f, err := Detect(t.Context(), VariantAuto)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range Requirements() {
		err := r.Try(t.Context(), ns, VariantAuto)
		want := r.Required || r.Name == requireRandom && f.RandomFully || r.Name == requireAcct && f.NFAcct
		if (err == nil) != want {
			t.Errorf("%s: %v; Detect says %v", r.Name, err, want)
		}
	}
	if err := (Requirement{Table: "nat", Rule: "-m addrtype --dst-type NOWHERE -j RETURN"}).Try(t.Context(), ns, VariantAuto); err == nil {
		t.Error("a rule that no kernel takes was tried without an error")
	}
}

// unlocked runs the tools in a namespace without the lock file that the legacy
// ones would make on the machine.
type unlocked struct{ execx.Runner }

func inNode(ns *netns.NS) execx.Runner { return unlocked{execx.In(ns)} }

func (u unlocked) Run(ctx context.Context, c execx.Cmd) (execx.Result, error) {
	if len(c.Env) == 0 {
		c.Env = []string{"XTABLES_LOCKFILE=/dev/null"}
	}
	return u.Runner.Run(ctx, c)
}
