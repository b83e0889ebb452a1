// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
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

// probed is one thing that the mode writes, and what lacks when it fails.
type probed struct {
	table, rule, lacks string
}

// needs are the matches and targets without which the mode does not work.
func needs() []probed {
	return []probed{
		{"nat", `-m comment --comment "a: b" -j RETURN`, "the comment match (CONFIG_NETFILTER_XT_MATCH_COMMENT)"},
		{"nat", `-j MARK --set-xmark 0x4000/0x4000`, "packet marks (CONFIG_NETFILTER_XT_MARK)"},
		{"nat", `-m statistic --mode random --probability 0.33333333349 -j RETURN`, "the statistic match, which spreads connections (CONFIG_NETFILTER_XT_MATCH_STATISTIC)"},
		{"nat", `-m recent --rcheck --seconds 5 --reap --name KUBE-SEP-PROBE --mask 255.255.255.255 --rsource -j RETURN`, "the recent match, which keeps session affinity (CONFIG_NETFILTER_XT_MATCH_RECENT)"},
		{"nat", `-m addrtype --dst-type LOCAL -j RETURN`, "the addrtype match, which finds nodePorts (CONFIG_NETFILTER_XT_MATCH_ADDRTYPE)"},
		{"nat", `-p tcp -m tcp -j DNAT --to-destination 192.0.2.1:80`, "destination translation (CONFIG_NF_NAT, CONFIG_NETFILTER_XT_NAT)"},
		{"nat", `-j MASQUERADE`, "masquerading (CONFIG_NETFILTER_XT_TARGET_MASQUERADE)"},
		{"filter", `-m conntrack --ctstate NEW -j RETURN`, "connection tracking (CONFIG_NF_CONNTRACK, CONFIG_NETFILTER_XT_MATCH_CONNTRACK)"},
		{"filter", `-j REJECT --reject-with icmp-port-unreachable`, "the reject target (CONFIG_IP_NF_TARGET_REJECT)"},
	}
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
	t, err := findTool(ctx, execx.In(ns), variant, "/dev/null")
	if err != nil {
		return Features{}, err
	}
	f := Features{Variant: t.variant, found: true, infix: t.infix, RandomFully: true}
	if k, err := dialNFNL(ns); err == nil {
		f.NFAcct = k.createAcct(acctInvalidDropped) == nil
		k.close()
	}
	all := needs()
	if tryRules(ctx, t, append(all, wishes(f)...)) == nil {
		return f, nil
	}
	// Something lacks. Without what is necessary there is no use in going on.
	if err := tryRules(ctx, t, all); err != nil {
		for _, p := range all {
			if one := tryRules(ctx, t, []probed{p}); one != nil {
				return f, fmt.Errorf("probe iptables: the kernel or the tools lack %s: %w", p.lacks, one)
			}
		}
		return f, fmt.Errorf("probe iptables: %w", err)
	}
	f.RandomFully = tryRules(ctx, t, wishes(Features{RandomFully: true})) == nil
	f.NFAcct = f.NFAcct && tryRules(ctx, t, wishes(Features{NFAcct: true})) == nil
	return f, nil
}

// wishes are the rules of optional features.
func wishes(f Features) (out []probed) {
	if f.RandomFully {
		out = append(out, probed{"nat", "-j MASQUERADE --random-fully", ""})
	}
	if f.NFAcct {
		out = append(out, probed{"filter", "-m nfacct --nfacct-name " + acctInvalidDropped + " -j RETURN", ""})
	}
	return out
}

// tryRules loads rules into chains of their own, and reads them back.
func tryRules(ctx context.Context, t *tool, rules []probed) error {
	const chain = "KPLAB-PROBE"
	want := map[string][]string{}
	for _, p := range rules {
		want[p.table] = append(want[p.table], "-A "+chain+" "+p.rule)
	}
	var b strings.Builder
	for _, table := range slices.Sorted(maps.Keys(want)) {
		b.WriteString("*" + table + "\n")
		declare(&b, chain)
		b.WriteString(strings.Join(want[table], "\n") + "\nCOMMIT\n")
	}
	if err := t.restore(ctx, corev1.IPv4Protocol, b.String()); err != nil {
		return err
	}
	saved, err := t.saveAll(ctx, corev1.IPv4Protocol)
	if err != nil {
		return err
	}
	for part := range strings.SplitSeq(saved, "COMMIT\n") {
		_, table, _ := strings.Cut(part, "*")
		table, _, _ = strings.Cut(table, "\n")
		if got := parseSave(part).rules[chain]; want[table] != nil && !slices.Equal(got, want[table]) {
			return fmt.Errorf("rules of table %s do not read back as written: wrote %q, read %q", table, want[table], got)
		}
		delete(want, table)
	}
	for table := range want {
		return fmt.Errorf("rules of table %s were written and are not there", table)
	}
	return nil
}
