// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/xtables"
)

// Probe implements proxy.Mode.
func (m *Mode) Probe(ctx context.Context) error {
	if m.opts.Probed {
		return nil
	}
	return Detect(ctx, m.opts.Variant)
}

// Requirement is one thing that the mode asks of the kernel and the tools.
type Requirement struct {
	// Name is for people, for example "iptables REDIRECT".
	Name string
	// Table and Rule are what is written, and read back, to find out: a rule without
	// its chain.
	Table, Rule string
	// Breaks says what does not work without it.
	Breaks string
	// Options are the kernel's configuration options that bring it.
	Options string
}

// Requirements lists what the mode writes, each once.
func Requirements() []Requirement {
	return []Requirement{
		{"iptables REDIRECT", "nat", `-p tcp -m comment --comment "a: b" -m tcp --dport 80 -j REDIRECT --to-ports 20000`, "every Service", "CONFIG_NETFILTER_XT_TARGET_REDIRECT, CONFIG_NETFILTER_XT_MATCH_COMMENT"},
		{"iptables DNAT", "nat", `-p tcp -m tcp -j DNAT --to-destination 192.0.2.1:80`, "Services for the node itself", "CONFIG_NF_NAT, CONFIG_NETFILTER_XT_NAT"},
		{"iptables addrtype", "nat", `-m addrtype --dst-type LOCAL -j RETURN`, "nodePorts", "CONFIG_NETFILTER_XT_MATCH_ADDRTYPE"},
		{"iptables state", "filter", `-m state --state NEW -j ACCEPT`, "nodePorts on a node that refuses what nobody allowed", "CONFIG_NF_CONNTRACK, CONFIG_NETFILTER_XT_MATCH_STATE"},
	}
}

// Detect tries, in a namespace that is thrown away, everything that the mode writes, and
// reads it back. The error names what is missing. Its result is good for every node of a
// machine.
func Detect(ctx context.Context, variant xtables.Variant) error {
	ns, err := netns.New()
	if err != nil {
		return fmt.Errorf("probe userspace: %w", err)
	}
	defer func() { _ = ns.Close() }()
	t, err := xtables.Find(ctx, execx.In(ns), variant, "/dev/null")
	if err != nil {
		return err
	}
	all := map[string][]string{}
	for _, r := range Requirements() {
		all[r.Table] = append(all[r.Table], r.Rule)
	}
	err = t.Try(ctx, all)
	if err == nil {
		return nil
	}
	for _, r := range Requirements() {
		if one := t.Try(ctx, map[string][]string{r.Table: {r.Rule}}); one != nil {
			return fmt.Errorf("probe userspace: %s is missing (kernel options %s), and with it %s: %w", r.Name, r.Options, r.Breaks, one)
		}
	}
	return fmt.Errorf("probe userspace: %w", err)
}
