// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"
	"slices"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/xtables"
)

// Probe implements proxy.Mode. What it finds is kept for Render.
func (m *Mode) Probe(ctx context.Context) error {
	m.mu.Lock()
	var f Features
	known := m.features != nil
	if known {
		f = *m.features
	}
	m.mu.Unlock()
	if !known {
		var err error
		if f, err = Detect(ctx, m.opts.Variant); err != nil {
			return err
		}
	}
	// Whether conntrack is liberal is the node's setting and not an ability.
	v, err := readSysctl(m.opts.NetNS, tcpLiberal)
	f.TCPLiberal = err == nil && v != "0" && v != ""
	m.mu.Lock()
	defer m.mu.Unlock()
	m.features = &f
	return nil
}

// Requirement is one thing that the mode asks of the kernel and the tools.
type Requirement struct {
	// Name is for people, for example "iptables statistic".
	Name string
	// Table and Rule are what is written, and read back, to find out: a rule
	// without its chain.
	Table, Rule string
	// Breaks says what does not work without it.
	Breaks string
	// Options are the kernel's configuration options that bring it.
	Options string
	// Required says that the mode does not work at all without it; the others are
	// used where they are.
	Required bool
}

// Requirements lists what the mode writes, each once. It is the one list: Detect
// goes by it, and whoever shows a person what the machine lacks should too.
func Requirements() []Requirement {
	return []Requirement{
		{"iptables comment", "nat", `-m comment --comment "a: b" -j RETURN`, "the names in the rules", "CONFIG_NETFILTER_XT_MATCH_COMMENT", true},
		{"iptables MARK", "nat", `-j MARK --set-xmark 0x4000/0x4000`, "masquerading only what needs it", "CONFIG_NETFILTER_XT_MARK", true},
		{"iptables statistic", "nat", `-m statistic --mode random --probability 0.33333333349 -j RETURN`, "spreading over several endpoints", "CONFIG_NETFILTER_XT_MATCH_STATISTIC", true},
		{"iptables recent", "nat", `-m recent --rcheck --seconds 5 --reap --name KUBE-SEP-PROBE --mask 255.255.255.255 --rsource -j RETURN`, "sessionAffinity: ClientIP", "CONFIG_NETFILTER_XT_MATCH_RECENT", true},
		{"iptables addrtype", "nat", `-m addrtype --dst-type LOCAL -j RETURN`, "nodePorts", "CONFIG_NETFILTER_XT_MATCH_ADDRTYPE", true},
		{"iptables DNAT", "nat", `-p tcp -m tcp -j DNAT --to-destination 192.0.2.1:80`, "every Service", "CONFIG_NF_NAT, CONFIG_NETFILTER_XT_NAT", true},
		{"iptables MASQUERADE", "nat", `-j MASQUERADE`, "nodePorts, and traffic from nodes", "CONFIG_NETFILTER_XT_TARGET_MASQUERADE", true},
		{"iptables conntrack", "filter", `-m conntrack --ctstate NEW -j RETURN`, "every Service, and forwarding of replies", "CONFIG_NF_CONNTRACK, CONFIG_NETFILTER_XT_MATCH_CONNTRACK", true},
		{"iptables REJECT", "filter", `-j REJECT --reject-with icmp-port-unreachable`, "a quick refusal of Services without endpoints", "CONFIG_IP_NF_TARGET_REJECT", true},
		{requireRandom, "nat", "-j MASQUERADE --random-fully", "source ports that do not collide under load; without it the kernel's own choice is taken", "none: iptables 1.6.2", false},
		{requireAcct, "filter", "-m nfacct --nfacct-name " + acctInvalidDropped + " -j RETURN", "counting dropped packets and nodePort traffic on 127.0.0.1", "CONFIG_NETFILTER_NETLINK_ACCT, CONFIG_NETFILTER_XT_MATCH_NFACCT", false},
	}
}

// The optional requirements, by name.
const (
	requireRandom = "iptables random source ports"
	requireAcct   = "iptables nfacct"
)

// Try writes the requirement's rule in a namespace and reads it back, with the
// tools that the mode would pick there. It leaves a chain behind: use a namespace
// that is thrown away. The error wraps ErrNoTools when there are no tools.
func (r Requirement) Try(ctx context.Context, ns *netns.NS, variant Variant) error {
	t, err := xtables.Find(ctx, execx.In(ns), variant, "/dev/null")
	if err != nil {
		return err
	}
	if r.Name == requireAcct {
		if err := makeAcct(ns); err != nil {
			return err
		}
	}
	return tryRules(ctx, t, []Requirement{r})
}

// makeAcct makes the object that the nfacct match of the probe needs.
func makeAcct(ns *netns.NS) error {
	k, err := dialNFNL(ns)
	if err != nil {
		return err
	}
	defer k.Close()
	return k.createAcct(acctInvalidDropped)
}

// Detect tries, in a namespace that is thrown away, everything that the mode
// writes, reads it back, and reports the optional features found. An error names
// what is missing. Its result is good for every node of a machine.
func Detect(ctx context.Context, variant Variant) (Features, error) {
	ns, err := netns.New()
	if err != nil {
		return Features{}, fmt.Errorf("probe iptables: %w", err)
	}
	defer func() { _ = ns.Close() }()
	t, err := xtables.Find(ctx, execx.In(ns), variant, "/dev/null")
	if err != nil {
		return Features{}, err
	}
	f := Features{Variant: t.Variant, found: true, infix: t.Infix}
	acct := makeAcct(ns) == nil
	var needed, wished []Requirement
	for _, r := range Requirements() {
		switch {
		case r.Required:
			needed = append(needed, r)
		case r.Name != requireAcct || acct:
			wished = append(wished, r)
		}
	}
	// One process for all, where nothing lacks.
	if tryRules(ctx, t, slices.Concat(needed, wished)) == nil {
		f.RandomFully, f.NFAcct = true, acct
		return f, nil
	}
	if err := tryRules(ctx, t, needed); err != nil {
		for _, r := range needed {
			if one := tryRules(ctx, t, []Requirement{r}); one != nil {
				return f, fmt.Errorf("probe iptables: %s is missing (kernel options %s), and with it %s: %w", r.Name, r.Options, r.Breaks, one)
			}
		}
		return f, fmt.Errorf("probe iptables: %w", err)
	}
	for _, r := range wished {
		found := tryRules(ctx, t, []Requirement{r}) == nil
		switch r.Name {
		case requireRandom:
			f.RandomFully = found
		case requireAcct:
			f.NFAcct = found
		}
	}
	return f, nil
}

// tryRules tries requirements together.
func tryRules(ctx context.Context, t *xtables.Tool, rules []Requirement) error {
	want := map[string][]string{}
	for _, r := range rules {
		want[r.Table] = append(want[r.Table], r.Rule)
	}
	return t.Try(ctx, want)
}
