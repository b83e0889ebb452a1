// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
)

// Probe implements proxy.Mode. What it finds is kept for Render.
func (m *Mode) Probe(ctx context.Context) error {
	m.mu.Lock()
	known := m.features != nil
	m.mu.Unlock()
	if known {
		return nil
	}
	f, err := Detect(ctx, m.opts.Variant)
	if err != nil {
		return err
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
	f := Features{Variant: t.variant}
	tryAll := func(rules []probed) error {
		for _, table := range []string{"nat", "filter"} {
			var text, want []string
			for _, p := range rules {
				if p.table == table {
					text = append(text, "-A KPLAB-PROBE "+p.rule)
				}
			}
			if len(text) == 0 {
				continue
			}
			want = slices.Clone(text)
			if err := t.restore(ctx, corev1.IPv4Protocol, "*"+table+"\n:KPLAB-PROBE - [0:0]\n"+strings.Join(text, "\n")+"\nCOMMIT\n"); err != nil {
				return err
			}
			saved, err := t.save(ctx, corev1.IPv4Protocol, table)
			if err != nil {
				return err
			}
			for i, l := range want {
				if i >= len(saved.rules["KPLAB-PROBE"]) || saved.rules["KPLAB-PROBE"][i] != l {
					return fmt.Errorf("rule %q does not read back as written but as %q", l, saved.rules["KPLAB-PROBE"])
				}
			}
		}
		return nil
	}
	if err := tryAll(needs()); err != nil {
		// Which one is it?
		for _, p := range needs() {
			if one := tryAll([]probed{p}); one != nil {
				return f, fmt.Errorf("probe iptables: the kernel or the tools lack %s: %w", p.lacks, one)
			}
		}
		return f, fmt.Errorf("probe iptables: %w", err)
	}
	f.RandomFully = tryAll([]probed{{"nat", "-j MASQUERADE --random-fully", ""}}) == nil
	if k, err := dialNFNL(ns); err == nil {
		if k.createAcct(acctInvalidDropped) == nil {
			f.NFAcct = tryAll([]probed{{"filter", "-m nfacct --nfacct-name " + acctInvalidDropped + " -j RETURN", ""}}) == nil
		}
		k.close()
	}
	return f, nil
}
