// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
)

func run(tb testing.TB, ns *netns.NS, stdin string, cmd ...string) string {
	tb.Helper()
	out, err := execx.In(ns).Run(tb.Context(), execx.Cmd{Path: cmd[0], Args: cmd[1:], Stdin: []byte(stdin)})
	if err != nil {
		tb.Fatal(err)
	}
	return string(out.Stdout)
}

// nodeNS is a namespace with the address of node-1.
func nodeNS(tb testing.TB) *netns.NS {
	tb.Helper()
	ns := nettest.NewNS(tb)
	if err := ns.Do(func() error {
		br := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
		br.Name = "eth0"
		if err := netlink.LinkAdd(br); err != nil {
			return err
		}
		a, err := netlink.ParseAddr("10.200.0.2/24")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(br, a)
	}); err != nil {
		tb.Fatal(err)
	}
	return ns
}

func links(tb testing.TB, ns *netns.NS) *kernel {
	tb.Helper()
	k, err := openLinks(ns)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(k.close)
	return k
}

// TestWithoutIPVS: a kernel without it is refused, by Detect and by Apply, although the
// library's calls would succeed; and Cleanup has nothing to do.
func TestWithoutIPVS(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "iptables")
	nettest.LeakCheck(t)
	_, err := Detect(t.Context(), xtables.Auto, "")
	if err == nil {
		t.Skip("this kernel has IPVS: nothing to refuse")
	}
	if !errors.Is(err, ErrNoIPVS) || !strings.Contains(err.Error(), "modprobe ip_vs") || !strings.Contains(err.Error(), "CONFIG_IP_VS") {
		t.Errorf("probe: %v", err)
	}
	m := New(Options{NetNS: nodeNS(t)})
	p, err := m.Render(snapshot(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Apply(t.Context()); !errors.Is(err, ErrNoIPVS) {
		t.Errorf("apply: %v", err)
	}
	for range 2 {
		if err := m.Cleanup(t.Context()); err != nil {
			t.Errorf("clean up: %v", err)
		}
	}
}

// TestSets makes each set in both families, and puts one entry of each kind in and out.
func TestSets(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	k := links(t, nettest.NewNS(t))
	for _, f := range families {
		a, other := netip.MustParseAddr("10.96.0.1"), netip.MustParsePrefix("172.18.0.0/24")
		if f == corev1.IPv6Protocol {
			a, other = netip.MustParseAddr("fd00::1"), netip.MustParsePrefix("fd00:18::/64")
		}
		for s := range sets {
			if have, err := k.entriesOf(s, f); err != nil || have != nil {
				t.Fatalf("%s before it was made: %v, %v", s.nameIn(f), have, err)
			}
			for range 2 {
				if err := k.createSet(s, f); err != nil {
					t.Fatal(err)
				}
			}
			var all []entry
			switch s.kind() {
			case bitmapPort:
				all = []entry{{port: 30080}, {port: 65535}}
			case hashIP:
				all = []entry{{addr: a}}
			case hashIPPort:
				all = []entry{{addr: a, proto: unix.IPPROTO_TCP, port: 80}, {addr: a, proto: unix.IPPROTO_SCTP, port: 80}}
			case hashIPPortIP:
				all = []entry{{a, unix.IPPROTO_UDP, 53, single(a)}}
			case hashIPPortNet:
				all = []entry{{a, unix.IPPROTO_TCP, 80, other}, {a, unix.IPPROTO_TCP, 80, single(a)}}
			}
			for _, e := range all {
				if ok, err := k.has(s, f, e); err != nil || ok {
					t.Errorf("%s in %s before it was added: %t, %v", e.text(s.kind()), s.nameIn(f), ok, err)
				}
				for range 2 {
					if err := k.addEntry(s, f, e); err != nil {
						t.Fatal(err)
					}
				}
				if ok, err := k.has(s, f, e); err != nil || !ok {
					t.Errorf("%s in %s: %t, %v", e.text(s.kind()), s.nameIn(f), ok, err)
				}
			}
			have, err := k.entriesOf(s, f)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range all {
				if !have[e] || len(have) != len(all) {
					t.Errorf("%s holds %v, want %v", s.nameIn(f), have, all)
				}
				if err := k.deleteEntry(s, f, e); err != nil {
					t.Error(err)
				}
			}
			if have, err := k.entriesOf(s, f); err != nil || len(have) != 0 {
				t.Errorf("%s after all were deleted: %v, %v", s.nameIn(f), have, err)
			}
		}
	}
	m := New(Options{})
	for range 2 {
		if err := m.destroySets(k); err != nil {
			t.Fatal(err)
		}
	}
	for s := range sets {
		if have, _ := k.entriesOf(s, corev1.IPv4Protocol); have != nil {
			t.Errorf("%s is still there", s.nameIn(corev1.IPv4Protocol))
		}
	}
}

// TestDevice: whatever driver kube-ipvs0 is made with, it is down, asks nobody by ARP,
// and makes its addresses the node's own.
func TestDevice(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns := nodeNS(t)
	k := links(t, ns)
	l, err := k.makeDevice()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s is a %s", Device, l.Type())
	if l.Attrs().RawFlags&unix.IFF_UP != 0 {
		t.Error("the device is up")
	}
	again, err := k.makeDevice()
	if err != nil || again.Attrs().Index != l.Attrs().Index || again.Attrs().RawFlags&unix.IFF_NOARP == 0 {
		t.Errorf("made again: %+v, %v", again, err)
	}
	vip := netip.MustParseAddr("10.96.0.50")
	for range 2 {
		if err := k.bind(l, vip); err != nil {
			t.Fatal(err)
		}
	}
	bound, local, err := k.addresses(corev1.IPv4Protocol)
	if err != nil || len(bound) != 1 || !bound[vip] || !slices.Equal(local, []netip.Addr{netip.MustParseAddr("10.200.0.2")}) {
		t.Errorf("addresses: bound %v, local %v, %v", bound, local, err)
	}
	if err := ns.Do(func() error {
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_LOCAL}, netlink.RT_FILTER_TABLE)
		if err == nil && !slices.ContainsFunc(routes, func(r netlink.Route) bool {
			return r.Dst != nil && r.Dst.String() == "10.96.0.50/32" && r.LinkIndex == l.Attrs().Index
		}) {
			err = errors.New("the address is not in the local table")
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := k.unbind(l, vip); err != nil {
			t.Error(err)
		}
		if err := New(Options{}).deleteDevice(k); err != nil {
			t.Error(err)
		}
	}
}

// TestRules loads the rules next to somebody else's, finds them on a second look, puts
// them right, and takes away only its own; what another mode holds stays.
func TestRules(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "iptables")
	nettest.LeakCheck(t)
	ns := nodeNS(t)
	k := links(t, ns)
	for s := range sets {
		if err := k.createSet(s, corev1.IPv4Protocol); err != nil {
			t.Fatal(err)
		}
	}
	run(t, ns, "*filter\n:MINE - [0:0]\n-A INPUT -s 192.0.2.9/32 -j MINE\n-A MINE -j RETURN\nCOMMIT\n*nat\n-A PREROUTING -s 192.0.2.9/32 -j ACCEPT\nCOMMIT\n", "iptables-nft-restore", "--noflush")
	f := DefaultFeatures()
	f.IPVSMatch = false // this kernel may lack it
	m := New(Options{NetNS: ns, Features: &f})
	if err := m.haveTool(t.Context()); err != nil {
		t.Fatal(err)
	}
	p, err := m.Render(snapshot(t))
	if err != nil {
		t.Fatal(err)
	}
	r := p.(*Program).rulesets[0]
	st := &state{family: corev1.IPv4Protocol}
	if err := m.applyRules(t.Context(), st, r); err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		if !r.holds(st.saved, table) {
			t.Errorf("table %s is not what was rendered: %q", table, st.saved[table])
		}
	}
	before := run(t, ns, "", "iptables-nft-save")
	if err := m.applyRules(t.Context(), &state{family: corev1.IPv4Protocol}, r); err != nil {
		t.Fatal(err)
	}
	body := func(s string) []string {
		return slices.DeleteFunc(lines(s), func(l string) bool { return strings.HasPrefix(l, "#") })
	}
	if d := cmp.Diff(body(before), body(run(t, ns, "", "iptables-nft-save"))); d != "" {
		t.Errorf("a second load changed something:\n%s", d)
	}
	// Somebody takes a rule away and puts another jump in.
	run(t, ns, "*nat\n-D KUBE-SERVICES 1\n-I OUTPUT -d 192.0.2.8/32 -j KUBE-SERVICES\nCOMMIT\n", "iptables-nft-restore", "--noflush")
	if err := m.applyRules(t.Context(), &state{family: corev1.IPv4Protocol}, r); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(body(before), body(run(t, ns, "", "iptables-nft-save"))); d != "" {
		t.Errorf("not put right:\n%s", d)
	}
	m.Yield(proxy.Chains{"nat": {chainServices, chainPostrouting, chainMarkMasq}, "filter": {chainForward, chainProxyFirewall}})
	if err := m.cleanRules(t.Context()); err != nil {
		t.Fatal(err)
	}
	after := run(t, ns, "", "iptables-nft-save")
	for _, s := range []string{":KUBE-SERVICES", "-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES", ":KUBE-FORWARD"} {
		if !strings.Contains(after, s) {
			t.Errorf("%q was yielded and is gone", s)
		}
	}
	for _, s := range []string{"KUBE-IPVS", ":KUBE-NODE-PORT", ":KUBE-LOAD-BALANCER"} {
		if strings.Contains(after, s) {
			t.Errorf("%q is still there:\n%s", s, after)
		}
	}
	m.Yield(nil)
	for range 2 {
		if err := m.cleanRules(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	after = run(t, ns, "", "iptables-nft-save")
	if strings.Contains(after, "KUBE-") || !strings.Contains(after, "-A INPUT -s 192.0.2.9/32 -j MINE") || !strings.Contains(after, "-A PREROUTING -s 192.0.2.9/32 -j ACCEPT") {
		t.Errorf("after the clean-up:\n%s", after)
	}
}

// applied is a mode that has applied the golden objects in a namespace of its own.
func applied(t *testing.T, o Options) (*Mode, *Program) {
	t.Helper()
	nettest.NeedRoot(t)
	nettest.Need(t, "ipvs")
	if o.NetNS == nil {
		o.NetNS = nodeNS(t)
	}
	m := New(o)
	if err := m.Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	p, err := m.Render(snapshot(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Apply(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for range 2 {
			if err := m.Cleanup(context.WithoutCancel(t.Context())); err != nil {
				t.Errorf("clean up: %v", err)
			}
		}
	})
	return m, p.(*Program)
}

// dump is what the tools show of a namespace, without counters and comments.
func dump(t *testing.T, ns *netns.NS) []string {
	t.Helper()
	var out []string
	out = append(out, lines(run(t, ns, "", "ipvsadm", "--save", "--numeric"))...)
	for _, l := range lines(run(t, ns, "", "ipset", "save")) {
		if strings.HasPrefix(l, "create ") { // sizes and seeds are the kernel's
			l = strings.Join(strings.Fields(l)[:3], " ")
		}
		out = append(out, l)
	}
	for _, l := range lines(run(t, ns, "", "iptables-nft-save")) {
		if !strings.HasPrefix(l, "#") {
			out = append(out, l)
		}
	}
	for _, l := range lines(run(t, ns, "", "ip", "-o", "address", "show", "dev", Device)) {
		out = append(out, strings.Join(strings.Fields(l)[2:4], " "))
	}
	slices.Sort(out)
	return out
}

// TestApplyEqualsText loads the text by hand in one namespace, and applies it in
// another: the tools show the same.
func TestApplyEqualsText(t *testing.T) {
	nettest.LeakCheck(t)
	m, p := applied(t, Options{})
	byHand := nodeNS(t)
	run(t, byHand, p.String(), "bash", "-e")
	if d := cmp.Diff(dump(t, byHand), dump(t, m.opts.NetNS)); d != "" {
		t.Errorf("-by hand +applied:\n%s", d)
	}
	for name, want := range m.sysctls() {
		if got, err := m.sysctl(name); err != nil || got != want {
			t.Errorf("%s is %q, %v", name, got, err)
		}
	}
}

// TestForeignIsLeftAlone: virtual servers, sets, and addresses of somebody else stay
// through Apply, changes and Cleanup, and a mode that starts anew after a crash knows
// its own.
func TestForeignIsLeftAlone(t *testing.T) {
	nettest.LeakCheck(t)
	ns := nodeNS(t)
	nettest.NeedRoot(t)
	nettest.Need(t, "ipvs")
	run(t, ns, "-A -t 10.200.0.2:8000 -s wlc\n-a -t 10.200.0.2:8000 -r 192.0.2.1:80 -m -w 7\n-A -t 198.51.100.9:80 -s rr\n", "ipvsadm", "--restore")
	run(t, ns, "create MINE hash:ip\nadd MINE 192.0.2.1\n", "ipset", "restore")
	foreign := run(t, ns, "", "ipvsadm", "--save", "--numeric")
	journal := filepath.Join(t.TempDir(), "ipvs.json")
	m, p := applied(t, Options{NetNS: ns, Journal: journal})
	for _, l := range lines(foreign) {
		if !slices.Contains(lines(run(t, ns, "", "ipvsadm", "--save", "--numeric")), l) {
			t.Errorf("%q is gone", l)
		}
	}
	before := dump(t, ns)
	// A crash: another process finds everything right, and then has less to serve.
	again := New(Options{NetNS: ns, Journal: journal, Features: m.features})
	next, err := again.Render(snapshot(t))
	if err != nil {
		t.Fatal(err)
	}
	if next.String() != p.String() {
		t.Error("the same objects give another text")
	}
	if err := next.Apply(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(before, dump(t, ns)); d != "" {
		t.Errorf("a restart changed something:\n%s", d)
	}
	third := New(Options{NetNS: ns, Journal: journal, Features: m.features})
	for range 2 {
		if err := third.Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got := run(t, ns, "", "ipvsadm", "--save", "--numeric"); got != foreign {
		t.Errorf("virtual servers after the clean-up:\n%swant\n%s", got, foreign)
	}
	if got := run(t, ns, "", "ipset", "list", "-n"); got != "MINE\n" {
		t.Errorf("sets after the clean-up: %q", got)
	}
	if got := run(t, ns, "", "iptables-nft-save"); strings.Contains(got, "KUBE-") {
		t.Errorf("rules after the clean-up:\n%s", got)
	}
	if l, err := links(t, ns).device(); l != nil || err != nil {
		t.Errorf("%s after the clean-up: %v, %v", Device, l, err)
	}
	if _, err := os.Stat(journal); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the journal after the clean-up: %v", err)
	}
	if v, err := m.sysctl("ipv4/vs/conntrack"); err != nil || v != "0" {
		t.Errorf("vs.conntrack after the clean-up: %q, %v", v, err)
	}
}

// TestIntact: each thing that somebody changes is seen, and put right.
func TestIntact(t *testing.T) {
	nettest.LeakCheck(t)
	m, p := applied(t, Options{})
	ns := m.opts.NetNS
	want := dump(t, ns)
	if ok, err := m.Intact(t.Context()); err != nil || !ok {
		t.Fatalf("untouched: %t, %v", ok, err)
	}
	for name, cmd := range map[string][]string{
		"a virtual server deleted": {"ipvsadm", "-D", "-t", "10.96.10.1:80"},
		"another scheduler":        {"ipvsadm", "-E", "-t", "10.96.10.1:80", "-s", "lc"},
		"a real server deleted":    {"ipvsadm", "-d", "-t", "10.96.10.1:80", "-r", "10.129.0.11:8080"},
		"another weight":           {"ipvsadm", "-e", "-t", "10.96.10.1:80", "-r", "10.129.0.11:8080", "-m", "-w", "5"},
		"a set entry deleted":      {"ipset", "del", "KUBE-CLUSTER-IP", "10.96.10.1,tcp:80"},
		"a set entry added":        {"ipset", "add", "KUBE-NODE-PORT-TCP", "31000"},
		"an address taken off":     {"ip", "address", "del", "10.96.10.1/32", "dev", Device},
		"the device deleted":       {"ip", "link", "del", Device},
		"a rule deleted":           {"iptables-nft", "-t", "nat", "-F", "KUBE-SERVICES"},
		"a jump deleted":           {"iptables-nft", "-F", "INPUT"},
		"everything cleared":       {"ipvsadm", "--clear"},
		"a sysctl":                 {"sh", "-c", "echo 0 >/proc/sys/net/ipv4/vs/conntrack"},
	} {
		run(t, ns, "", cmd...)
		if ok, err := m.Intact(t.Context()); err != nil || ok {
			t.Errorf("%s: intact %t, %v", name, ok, err)
		}
		m.Reset()
		if err := p.Apply(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if ok, err := m.Intact(t.Context()); err != nil || !ok {
			t.Errorf("%s, and written again: intact %t, %v", name, ok, err)
		}
	}
	if d := cmp.Diff(want, dump(t, ns)); d != "" {
		t.Errorf("not put right:\n%s", d)
	}
}

// TestSchedulersThere: each scheduler that may be asked for is in the kernel.
func TestSchedulersThere(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "ipvs")
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	for name := range Schedulers() {
		if err := trySchedulers(name)(t.Context(), ns, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := trySchedulers("best")(t.Context(), ns, nil); err == nil {
		t.Error("a scheduler that nobody has was taken")
	}
}
