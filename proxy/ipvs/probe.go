// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/xtables"
)

// Probe implements proxy.Mode. What it finds is kept for Render.
func (m *Mode) Probe(ctx context.Context) error {
	m.mu.Lock()
	known := m.features != nil
	m.mu.Unlock()
	if known {
		return nil
	}
	f, err := Detect(ctx, m.opts.Variant, m.opts.Scheduler)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.features = &f
	return nil
}

// Requirement is one thing that the mode asks of the kernel and the tools.
type Requirement struct {
	// Name is for people, for example "ip_vs".
	Name string
	// Breaks says what does not work without it.
	Breaks string
	// Options are the kernel's configuration options that bring it.
	Options string
	// Required says that the mode does not work at all without it; the others are used
	// where they are.
	Required bool

	// table and rule are a rule without its chain, where that is what is needed.
	table, rule string
	try         func(context.Context, *netns.NS, *xtables.Tool) error
}

// Names of requirements by which Detect finds features.
const (
	requireMatch  = "iptables ipvs"
	requireRandom = "iptables random source ports for ipvs"
)

// probeServer is a virtual server that nobody has: its address is for documentation.
var probeServer = key{netip.MustParseAddr("198.51.100.1"), 80, unix.IPPROTO_TCP}

// Requirements lists what the mode uses, each once, with a Service that asks for
// scheduler. It is the one list: Detect goes by it, and whoever shows a person what the
// machine lacks should too.
func Requirements(scheduler string) []Requirement {
	out := []Requirement{
		{"ip_vs", "every Service", "CONFIG_IP_VS, CONFIG_IP_VS_PROTO_TCP", true, "", "", trySchedulers(DefaultScheduler)},
		{"ip_vs conntrack", "masquerading: nodePorts, and traffic from nodes", "CONFIG_IP_VS_NFCT", true, "", "", tryConntrack},
	}
	if scheduler != DefaultScheduler && scheduler != "" {
		out = append(out, Requirement{"ip_vs_" + scheduler, "the scheduler " + scheduler, "CONFIG_IP_VS_*", true, "", "", trySchedulers(scheduler)})
	}
	out = append(out, Requirement{"dummy", "nothing: a bridge without ports stands in as " + Device, "CONFIG_DUMMY", false, "", "", tryDummy})
	for _, kind := range []struct {
		s       set
		options string
	}{
		{setClusterIP, "CONFIG_IP_SET_HASH_IPPORT"}, {setLoopBack, "CONFIG_IP_SET_HASH_IPPORTIP"}, {setLoadBalancerSourceCIDR, "CONFIG_IP_SET_HASH_IPPORTNET"},
		{setIPs, "CONFIG_IP_SET_HASH_IP"}, {setNodePortTCP, "CONFIG_IP_SET_BITMAP_PORT"},
	} {
		out = append(out, Requirement{"ipset " + kind.s.kind(), "every Service", "CONFIG_IP_SET, " + kind.options, true, "", "", trySet(kind.s)})
	}
	rule := func(name, breaks, options string, required bool, table, rule string) {
		out = append(out, Requirement{name, breaks, options, required, table, rule, tryRule(table, rule)})
	}
	rule("iptables set", "every Service", "CONFIG_NETFILTER_XT_SET", true, "nat", "-m set --match-set "+setClusterIP.nameIn(corev1.IPv4Protocol)+" dst,dst -j RETURN")
	rule("iptables MARK for ipvs", "masquerading only what needs it", "CONFIG_NETFILTER_XT_MARK", true, "nat", "-j MARK --set-xmark "+masqueradeMark)
	rule("iptables addrtype for ipvs", "nodePorts", "CONFIG_NETFILTER_XT_MATCH_ADDRTYPE", true, "nat", "-m addrtype --dst-type LOCAL -j RETURN")
	rule("iptables MASQUERADE for ipvs", "nodePorts, and traffic from nodes", "CONFIG_NETFILTER_XT_TARGET_MASQUERADE", true, "nat", "-j MASQUERADE")
	rule("iptables REJECT for ipvs", "a refusal on other ports of a Service's address", "CONFIG_IP_NF_TARGET_REJECT", true, "filter", "-m conntrack --ctstate NEW -j REJECT --reject-with icmp-port-unreachable")
	rule(requireRandom, "source ports that do not collide under load", "none: iptables 1.6.2", false, "nat", "-j MASQUERADE --random-fully")
	rule(requireMatch, "keeping a node that is in no source range from load balancers", "CONFIG_NETFILTER_XT_MATCH_IPVS", false, "filter", "-m ipvs --vproto 6 --vaddr 198.51.100.1 --vport 80 -j DROP")
	return out
}

// Try does what the mode does with it in a namespace, and reads it back, with the
// iptables tools of a variant. Use a namespace that is thrown away.
func (r Requirement) Try(ctx context.Context, ns *netns.NS, variant xtables.Variant) error {
	t, err := xtables.Find(ctx, execx.In(ns), variant, "/dev/null")
	if err != nil {
		return err
	}
	return r.try(ctx, ns, t)
}

// Detect tries all of Requirements in a namespace that is thrown away, and reports the
// optional features found. The error names what is missing, and wraps ErrNoIPVS where
// that is IPVS itself. Its result is good for every node of a machine.
func Detect(ctx context.Context, variant xtables.Variant, scheduler string) (f Features, err error) {
	ns, err := netns.New()
	if err != nil {
		return f, fmt.Errorf("probe ipvs: %w", err)
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	t, err := xtables.Find(ctx, execx.In(ns), variant, "/dev/null")
	if err != nil {
		return f, err
	}
	f = Features{Variant: t.Variant, Infix: t.Infix}
	all := Requirements(scheduler)
	// One process for all rules, where nothing lacks.
	rules := map[string][]string{}
	for _, r := range all {
		if r.table != "" {
			rules[r.table] = append(rules[r.table], r.rule)
		}
	}
	together := false
	for _, r := range all {
		if r.table != "" && !together {
			together = trySet(setClusterIP)(ctx, ns, t) == nil && t.Try(ctx, rules) == nil
		}
		var err error
		if r.table == "" || !together {
			err = r.try(ctx, ns, t)
		}
		if err != nil && r.Required {
			return f, fmt.Errorf("probe ipvs: %s is missing (kernel options %s), and with it %s: %w", r.Name, r.Options, r.Breaks, err)
		}
		switch r.Name {
		case requireMatch:
			f.IPVSMatch = err == nil
		case requireRandom:
			f.RandomFully = err == nil
		}
	}
	return f, nil
}

// trySchedulers makes a virtual server with a scheduler, and finds it in the list: the
// answer to the call alone proves nothing.
func trySchedulers(name string) func(context.Context, *netns.NS, *xtables.Tool) error {
	return func(_ context.Context, ns *netns.NS, _ *xtables.Tool) error {
		k, err := openKernel(ns)
		if err != nil {
			return err
		}
		defer k.close()
		s := &server{key: probeServer, options: options{scheduler: name}}
		if err := k.ipvs.NewService(s.service()); err != nil {
			return fmt.Errorf("make a virtual server with scheduler %s: %w", name, explain(err))
		}
		have, err := k.serversOf(corev1.IPv4Protocol)
		if err != nil {
			return err
		}
		if have[s.key] != s.options {
			return fmt.Errorf("a virtual server with scheduler %s was made and is not there", name)
		}
		return k.deleteServer(s.key)
	}
}

func tryConntrack(_ context.Context, ns *netns.NS, _ *xtables.Tool) error {
	return inNS(ns, func() error {
		const path = sysctlRoot + "ipv4/vs/conntrack"
		if err := os.WriteFile(path, []byte("1"), 0); err != nil {
			return err
		}
		b, err := os.ReadFile(path)
		if err == nil && string(b) != "1\n" {
			err = fmt.Errorf("%s is %s after it was set to 1", path, strconv.Quote(string(b)))
		}
		return err
	})
}

func tryDummy(_ context.Context, ns *netns.NS, _ *xtables.Tool) error {
	k, err := openLinks(ns)
	if err != nil {
		return err
	}
	defer k.close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "probe"
	if err := k.LinkAdd(&netlink.Dummy{LinkAttrs: attrs}); err != nil {
		return fmt.Errorf("make a link of type dummy: %w", err)
	}
	l, err := k.LinkByName(attrs.Name)
	if err != nil {
		return fmt.Errorf("find the link of type dummy that was made: %w", err)
	}
	return k.LinkDel(l)
}

func trySet(s set) func(context.Context, *netns.NS, *xtables.Tool) error {
	return func(_ context.Context, ns *netns.NS, _ *xtables.Tool) error {
		k, err := openLinks(ns)
		if err != nil {
			return err
		}
		defer k.close()
		if err := k.createSet(s, corev1.IPv4Protocol); err != nil {
			return err
		}
		e := entry{port: 80}
		if s.kind() != bitmapPort {
			e.addr = probeServer.addr
		}
		switch s.kind() {
		case hashIP:
			e.port = 0
		case hashIPPort:
			e.proto = probeServer.proto
		case hashIPPortIP:
			e.proto, e.other = probeServer.proto, single(probeServer.addr)
		case hashIPPortNet:
			e.proto, e.other = probeServer.proto, netip.PrefixFrom(probeServer.addr, 24).Masked()
		}
		if err := k.addEntry(s, corev1.IPv4Protocol, e); err != nil {
			return err
		}
		have, err := k.entriesOf(s, corev1.IPv4Protocol)
		if err == nil && !have[e] {
			err = fmt.Errorf("%s was added to a set of type %s and is not there", e.text(s.kind()), s.kind())
		}
		return err
	}
}

func tryRule(table, rule string) func(context.Context, *netns.NS, *xtables.Tool) error {
	return func(ctx context.Context, ns *netns.NS, t *xtables.Tool) error {
		if table == "nat" {
			// For those that look into a set.
			k, err := openLinks(ns)
			if err != nil {
				return err
			}
			defer k.close()
			if err := k.createSet(setClusterIP, corev1.IPv4Protocol); err != nil {
				return err
			}
		}
		return t.Try(ctx, map[string][]string{table: {rule}})
	}
}
