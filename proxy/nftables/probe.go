// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nfnl"
)

// Probe implements proxy.Mode.
func (m *Mode) Probe(ctx context.Context) error {
	if m.opts.Probed {
		return nil
	}
	if err := Detect(ctx); err != nil {
		return err
	}
	m.opts.Probed = true
	return nil
}

// Requirement is one thing that the mode asks of the kernel. All are required.
type Requirement struct {
	// Name is for people, for example "nft numgen".
	Name string
	// Breaks says what does not work without it.
	Breaks string
	// Options are the kernel's configuration options that bring it.
	Options string

	sets   []*container
	chains []chain
	// added elements lead to chain probe2 and go together with it.
	added [sets][]element
}

// probed is what requirements are written for.
const probed = family(unix.NFPROTO_IPV4)

// Requirements lists what the mode writes, each once. It is the one list: Detect
// goes by it, and whoever shows a person what the machine lacks should too.
func Requirements() []Requirement {
	to := netip.MustParseAddrPort("192.0.2.1:80")
	rules := func(h *hook, r ...rule) []chain { return []chain{{name: "probe", hook: h, rules: r}} }
	named := probed.containers()
	affinity := probed.affinitySet(prefixAffinity+"probe", time.Hour)
	balance := settings{family: probed, layout: LayoutCompact}
	var none, entry [sets][]element
	entry[serviceIPs] = []element{{key{addr: to.Addr(), protocol: unix.IPPROTO_TCP, port: to.Port()}, value{verdict: verdictGoto, chain: "probe2"}}}
	return []Requirement{
		{"nftables", "everything", "CONFIG_NF_TABLES, CONFIG_NF_TABLES_IPV4", nil, rules(nil, probed.rule(in(source, netip.PrefixFrom(to.Addr(), 24)), drop)), none},
		{"nft comment", "the names in the rules (Linux 5.10)", "none: Linux 5.10", nil,
			[]chain{{name: "probe", comment: "comment", rules: []rule{probed.noted("comment", drop)}}}, none},
		{"nft verdict maps", "every Service", "CONFIG_NF_TABLES", named[serviceIPs : serviceIPs+1], rules(nil, probed.rule(serviceVmap(named[serviceIPs].name))), none},
		{"nft ct", "every Service", "CONFIG_NFT_CT", nil, rules(&hookFilterForward, probed.rule(stateNew, drop), probed.rule(statusDNAT, drop)), none},
		{"nft numgen", "spreading over several endpoints", "CONFIG_NFT_NUMGEN", nil, rules(nil, probed.rule(gotoRandom([]string{"probe2"}))), none},
		{"nft nat", "every Service", "CONFIG_NFT_NAT, CONFIG_NF_NAT", nil, rules(&hookNATPrerouting, probed.rule(protocol(unix.IPPROTO_TCP), dnatRandom([]netip.AddrPort{to, to}))), none},
		{"nft masquerade", "nodePorts, and traffic from nodes", "CONFIG_NFT_MASQ", nil, rules(&hookNATPostrouting, probed.rule(marked, masquerade)), none},
		{"nft reject", "a quick refusal of Services without endpoints", "CONFIG_NFT_REJECT, CONFIG_NFT_REJECT_IPV4", nil, rules(&hookFilterInput, probed.rule(reject)), none},
		{"nft fib", "nodePorts", "CONFIG_NFT_FIB_IPV4", nil, rules(&hookNATPrerouting, probed.rule(isLocal(destination), drop)), none},
		{"nft dynamic sets", "sessionAffinity: ClientIP", "CONFIG_NF_TABLES", []*container{affinity},
			rules(nil, probed.rule(remember(affinity.name)), probed.rule(inSet(source, affinity.name), drop)), none},
		{"nft ranges", "loadBalancerSourceRanges", "CONFIG_NF_TABLES", nil,
			rules(nil, probed.rule(inAny(source, []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("198.51.100.0/24")}, true), drop)), none},
		{"nft indexed maps", "the compact layout", "CONFIG_NF_TABLES, CONFIG_NFT_NUMGEN", named[endpoints : endpoints+1],
			rules(&hookNATPrerouting, balance.draw(2, 0, false), balance.draw(2, localBase, true)), none},
		{"nft deletion of a chain with what leads to it", "changes of Services", "none: Linux 6.2", named[serviceIPs : serviceIPs+1], nil, entry},
	}
}

// Try writes the requirement in a namespace and reads it back. It leaves a table
// behind: use a namespace that is thrown away.
func (r Requirement) Try(_ context.Context, ns *netns.NS) error {
	conn, err := nfnl.Dial(ns)
	if err != nil {
		return err
	}
	defer conn.Close()
	return r.try(conn)
}

func (r Requirement) try(conn *nfnl.Conn) error {
	c := &change{table: true, replace: true, newSets: r.sets, newChains: append([]chain{{name: "probe2"}}, r.chains...), written: r.chains, added: r.added}
	st := &state{ruleset: &ruleset{base: base{settings: settings{family: probed}}}}
	if _, err := st.write(conn, c); err != nil {
		return err
	}
	if err := st.readBack(conn, c); err != nil {
		return err
	}
	have, err := look(conn, probed, false, st.size)
	if err != nil {
		return err
	}
	for _, s := range r.sets {
		if got := have.sets[s.name]; got == nil || got.kind != kindOf(s) {
			return fmt.Errorf("set %s was made and does not read back as made", s.name)
		}
	}
	for _, want := range r.chains {
		if got := have.chains[want.name]; got == nil || got.kind != want.kindOf() {
			return fmt.Errorf("chain %s was made and does not read back as made", want.name)
		}
	}
	if len(r.added[serviceIPs]) == 0 {
		return nil
	}
	c = &change{removed: r.added, staleChains: []string{"probe2"}}
	if _, err := st.write(conn, c); err != nil {
		return err
	}
	return st.readBack(conn, c)
}

// Detect tries, in a namespace that is thrown away, everything that the mode
// writes, and reads it back. The error names what is missing. Its result is good
// for every node of a machine.
func Detect(context.Context) (err error) {
	ns, err := netns.New()
	if err != nil {
		return fmt.Errorf("probe nftables: %w", err)
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	conn, err := nfnl.Dial(ns)
	if err != nil {
		return fmt.Errorf("probe nftables: %w", err)
	}
	defer conn.Close()
	for _, r := range Requirements() {
		if err := r.try(conn); err != nil {
			return fmt.Errorf("probe nftables: %s is missing (kernel options %s), and with it %s: %w", r.Name, r.Options, r.Breaks, err)
		}
	}
	return nil
}
