// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
)

// chunk is the number of Service ports whose chains are loaded by one process of
// a full load. The nft-backed restore walks a list of all its chains for each
// rule, so its time grows with the square of what it is given at once.
const chunk = 100

func nfFamily(f corev1.IPFamily) uint8 {
	if f == corev1.IPv6Protocol {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// change is what turns the kernel's tables of one family into a ruleset.
type change struct {
	// written are the chains that are made or rewritten, stale those that go.
	written []chain
	stale   []string
	// before and after are lines for the filter table around the change of nat:
	// what refuses is added before the way to the endpoints closes, and taken
	// away after it has opened, so that no packet meets neither.
	before, nat, after []string
	hubs               [hubs]bool // whose rules changed
}

func (c *change) empty() bool {
	return len(c.written)+len(c.stale)+len(c.before)+len(c.nat)+len(c.after) == 0
}

// apply brings one family up to date and reads back what it wrote.
func (m *Mode) apply(ctx context.Context, r *ruleset) error {
	old := m.applied[r.family]
	if old == nil || old.settings != r.settings || old.tail != r.tail {
		return m.load(ctx, r)
	}
	c := diff(old, r)
	if c.empty() {
		return nil
	}
	if len(c.written) > 40*chunk {
		// Too much for one process; the full load cuts it into chunks and leaves
		// alone what is right.
		return m.load(ctx, r)
	}
	if err := m.write(ctx, r, c); err != nil {
		return err
	}
	return m.readBack(ctx, r, c)
}

// write carries out a change in one process of the restore tool, then removes
// stale chains.
func (m *Mode) write(ctx context.Context, r *ruleset, c *change) error {
	var b strings.Builder
	section := func(table string, body func()) {
		b.WriteString("*" + table + "\n")
		body()
		b.WriteString("COMMIT\n")
	}
	lines := func(ls []string) {
		for _, l := range ls {
			b.WriteString(l)
			b.WriteByte('\n')
		}
	}
	if len(c.before) > 0 {
		section("filter", func() { lines(c.before) })
	}
	legacy := m.tool.Variant == VariantLegacy
	if len(c.written)+len(c.nat) > 0 || (legacy && len(c.stale) > 0) {
		section("nat", func() {
			for i := range c.written {
				xtables.Declare(&b, c.written[i].name)
			}
			if legacy {
				// Emptied here and deleted below. The other variant would read
				// every chain for this; it deletes over netlink afterwards.
				for _, name := range c.stale {
					xtables.Declare(&b, name)
				}
			}
			for i := range c.written {
				b.WriteString(c.written[i].text)
			}
			lines(c.nat)
			if legacy {
				for _, name := range c.stale {
					b.WriteString("-X " + name + "\n")
				}
			}
		})
	}
	if len(c.after) > 0 {
		section("filter", func() { lines(c.after) })
	}
	if b.Len() > 0 {
		if err := m.restore(ctx, r.family, b.String()); err != nil {
			return err
		}
	}
	if legacy || len(c.stale) == 0 {
		return nil
	}
	k, err := dialNFNL(m.opts.NetNS)
	if err != nil {
		return err
	}
	defer k.Close()
	return k.removeChains(nfFamily(r.family), "nat", c.stale)
}

// diff compares two rulesets of the same settings. Both list Service ports in
// the same order, and a shared block is equal.
func diff(old, r *ruleset) *change {
	c := &change{}
	i, j := 0, 0
	for i < len(old.blocks) || j < len(r.blocks) {
		order := 0
		switch {
		case i == len(old.blocks):
			order = 1
		case j == len(r.blocks):
			order = -1
		default:
			order = proxy.CompareServicePorts(old.owners[i], r.owners[j])
		}
		switch {
		case order < 0:
			c.block(old.blocks[i], &block{})
			i++
		case order > 0:
			c.block(&block{}, r.blocks[j])
			j++
		default:
			if old.blocks[i] != r.blocks[j] {
				c.block(old.blocks[i], r.blocks[j])
			}
			i++
			j++
		}
	}
	return c
}

// block adds what changed in one Service port.
func (c *change) block(old, want *block) {
	if old.sum == want.sum {
		return
	}
	had := make(map[string]string, len(old.chains))
	for i := range old.chains {
		had[old.chains[i].name] = old.chains[i].text
	}
	for i := range want.chains {
		if text, there := had[want.chains[i].name]; !there || text != want.chains[i].text {
			c.written = append(c.written, want.chains[i])
		}
		delete(had, want.chains[i].name)
	}
	for i := range old.chains {
		if _, left := had[old.chains[i].name]; left {
			c.stale = append(c.stale, old.chains[i].name)
		}
	}
	for h := range hubs {
		if old.hubs[h] == want.hubs[h] {
			continue
		}
		c.hubs[h] = true
		gone, added := lineDiff(old.hubs[h], want.hubs[h])
		c.hub(h, gone, added)
	}
}

// hub adds a change of some rules of a hub. New rules go to the head: order
// does not matter among Services, and the jump for nodePorts must stay last. The
// two rules of a nodePort do have an order, so they are put in backwards.
func (c *change) hub(h hub, gone, added []string) {
	slices.Reverse(added)
	for _, l := range added {
		l = "-I " + strings.TrimPrefix(l, "-A ")
		if h.table() == "nat" {
			c.nat = append(c.nat, l)
		} else {
			c.before = append(c.before, l)
		}
	}
	for _, l := range gone {
		l = "-D " + strings.TrimPrefix(l, "-A ")
		if h.table() == "nat" {
			c.nat = append(c.nat, l)
		} else {
			c.after = append(c.after, l)
		}
	}
}

// lineDiff lists the lines of a that b lacks and the other way round.
func lineDiff(a, b string) (gone, added []string) {
	count := map[string]int{}
	for l := range strings.Lines(b) {
		count[l]++
	}
	for l := range strings.Lines(a) {
		if count[l]--; count[l] < 0 {
			gone = append(gone, strings.TrimSuffix(l, "\n"))
		}
	}
	for l := range strings.Lines(b) {
		if count[l] > 0 {
			count[l]--
			added = append(added, strings.TrimSuffix(l, "\n"))
		}
	}
	return gone, added
}

// readBack checks that the kernel has what a change wrote. The tool's exit code
// says that the kernel took it; this says that it is there.
func (m *Mode) readBack(ctx context.Context, r *ruleset, c *change) error {
	want := map[string]map[string]int{"nat": {}, "filter": {}}
	for i := range c.written {
		want["nat"][c.written[i].name] = c.written[i].rules
	}
	for _, name := range c.stale {
		want["nat"][name] = 0
	}
	for h := range hubs {
		if c.hubs[h] {
			want[h.table()][h.chain()] = r.hubRules(h)
		}
	}
	for table, chains := range want {
		if len(chains) == 0 {
			continue
		}
		got, err := m.countRules(ctx, r.family, table, chains)
		if err != nil {
			return err
		}
		for name, n := range chains {
			if got[name] != n {
				return wrongCount(table, name, got[name], n)
			}
		}
	}
	return nil
}

// hubRules counts the rules of a hub.
func (r *ruleset) hubRules(h hub) int {
	n := 0
	for _, b := range r.blocks {
		n += strings.Count(b.hubs[h], "\n")
	}
	if h == natServices {
		n += strings.Count(r.tail, "\n")
	}
	return n
}

// countRules counts rules in the kernel for the chains asked for, or more with
// the legacy tools, which know whole tables only.
func (m *Mode) countRules(ctx context.Context, family corev1.IPFamily, table string, chains map[string]int) (map[string]int, error) {
	if m.tool.Variant == VariantLegacy {
		saved, err := m.tool.Save(ctx, family, table)
		if err != nil {
			return nil, err
		}
		out := make(map[string]int, len(saved.Rules))
		for name, rules := range saved.Rules {
			out[name] = len(rules)
		}
		return out, nil
	}
	k, err := dialNFNL(m.opts.NetNS)
	if err != nil {
		return nil, err
	}
	defer k.Close()
	out := make(map[string]int, len(chains))
	for name := range chains {
		if out[name], err = k.countRules(nfFamily(family), table, name); err != nil {
			return nil, err
		}
	}
	return out, nil
}
