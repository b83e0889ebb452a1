// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/xtables"
)

// load makes the kernel equal to the ruleset whatever it holds now. An empty
// kernel is filled in chunks; otherwise what is there is read and only chains
// that differ are written, so that a restarted proxy disturbs nothing that was
// right.
//
// The order keeps traffic whole: chains of Services first, which nothing reaches
// yet or which change one by one; then the shared chains in one transaction,
// which switches every Service; then the jumps from the built-in chains; last
// what became stale.
func (m *Mode) load(ctx context.Context, r *ruleset) error {
	m.tallies.full = true
	have, err := m.existing(ctx, r.family)
	if err != nil {
		return err
	}
	var b strings.Builder
	for _, table := range tables {
		m.base(&b, r, table, have[table])
	}
	wanted, err := m.loadServices(ctx, r, have["nat"], &b)
	if err != nil {
		return err
	}
	for _, table := range tables {
		m.shared(&b, r, table, have[table])
	}
	if err := m.restoreIfAny(ctx, r, &b); err != nil {
		return err
	}
	if err := m.removeStale(ctx, r, have["nat"], wanted); err != nil {
		return err
	}
	return m.readBackAll(ctx, r)
}

func (m *Mode) restoreIfAny(ctx context.Context, r *ruleset, b *strings.Builder) error {
	if b.Len() == 0 {
		return nil
	}
	text := b.String()
	b.Reset()
	return m.restore(ctx, r.family, text)
}

// existing reads the tables; a table without any chain of ours is not worth the
// tool's time and comes back with what few rules are in its built-in chains.
func (m *Mode) existing(ctx context.Context, family corev1.IPFamily) (map[string]*xtables.Saved, error) {
	out := map[string]*xtables.Saved{}
	var names map[string]map[string]int
	if m.tool.Variant == VariantNFT {
		var err error
		if names, err = m.chainUses(ctx, family, tables[:]...); err != nil {
			return nil, err
		}
	}
	for _, table := range tables {
		if names != nil && !ownsAny(table, names[table]) {
			// No chain of ours, so no jump to one either.
			out[table] = xtables.Parse("")
			continue
		}
		saved, err := m.tool.Save(ctx, family, table)
		if err != nil {
			return nil, err
		}
		out[table] = saved
	}
	return out, nil
}

func ownsAny(table string, names map[string]int) bool {
	for n := range names {
		if isOwnChain(table, n) {
			return true
		}
	}
	return false
}

// base writes the chains that do not depend on Services, and makes the shared
// ones where they are missing, so that everything later can jump to them.
func (m *Mode) base(b *strings.Builder, r *ruleset, table string, have *xtables.Saved) {
	var declared, rules strings.Builder
	for _, c := range r.fixed(table) {
		if have.Has(c.name) && sameRules(c.text, have.Rules[c.name]) {
			continue
		}
		xtables.Declare(&declared, c.name)
		rules.WriteString(c.text)
	}
	for _, h := range hubsOf(table) {
		if !have.Has(h.chain()) {
			xtables.Declare(&declared, h.chain())
		}
	}
	if table == "filter" && r.v6() && have.Has(chainFirewall) {
		xtables.Declare(&declared, chainFirewall)
	}
	if declared.Len() > 0 {
		b.WriteString("*" + table + "\n" + declared.String() + rules.String() + "COMMIT\n")
	}
}

// sameRules compares text with saved lines in order.
func sameRules(text string, saved []string) bool {
	i := 0
	for l := range strings.Lines(text) {
		if i == len(saved) || strings.TrimSuffix(l, "\n") != saved[i] {
			return false
		}
		i++
	}
	return i == len(saved)
}

// loadServices writes the chains of Services that differ, and returns the names
// of all that are wanted. Few are added to b, to share one process with the rest;
// many go in chunks, after what is in b already.
func (m *Mode) loadServices(ctx context.Context, r *ruleset, have *xtables.Saved, b *strings.Builder) (map[string]bool, error) {
	wanted := make(map[string]bool, len(have.Names))
	size := chunk
	if m.tool.Variant == VariantLegacy {
		size = len(r.blocks) + 1 // each process replaces the whole table
	}
	few := len(r.blocks) <= size
	for start := 0; start < len(r.blocks); start += size {
		var declared, rules strings.Builder
		for _, bl := range r.blocks[start:min(start+size, len(r.blocks))] {
			for i := range bl.chains {
				c := &bl.chains[i]
				wanted[c.name] = true
				if have.Has(c.name) && sameRules(c.text, have.Rules[c.name]) {
					continue
				}
				xtables.Declare(&declared, c.name)
				rules.WriteString(c.text)
			}
		}
		if declared.Len() > 0 {
			b.WriteString("*nat\n" + declared.String() + rules.String() + "COMMIT\n")
		}
		if few {
			break
		}
		if err := m.restoreIfAny(ctx, r, b); err != nil {
			return nil, err
		}
	}
	return wanted, nil
}

// shared writes the hubs and the jumps of a table where they differ.
func (m *Mode) shared(b *strings.Builder, r *ruleset, table string, have *xtables.Saved) {
	var declared, rules strings.Builder
	for _, h := range hubsOf(table) {
		text := r.hubText(h)
		if sameHub(text, have.Rules[h.chain()]) {
			continue
		}
		xtables.Declare(&declared, h.chain())
		rules.WriteString(text)
	}
	moveJumps(&rules, r.jumps(table), have)
	if declared.Len()+rules.Len() > 0 {
		b.WriteString("*" + table + "\n" + declared.String() + rules.String() + "COMMIT\n")
	}
}

// sameHub compares a hub with what is saved, in any order but for the last rule.
func sameHub(text string, saved []string) bool {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if text == "" {
		return len(saved) == 0
	}
	if len(lines) != len(saved) || lines[len(lines)-1] != saved[len(saved)-1] {
		return false
	}
	a, b := slices.Clone(lines), slices.Clone(saved)
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}

// moveJumps makes the jumps stand at the head of their built-in chains, in
// order. Those that do are left alone; otherwise ours are taken out, every one
// that leads to a chain of ours, and put in again. Nothing else moves.
func moveJumps(b *strings.Builder, want []jump, have *xtables.Saved) {
	byChain := map[string][]string{}
	var order []string
	for _, j := range want {
		if byChain[j.chain] == nil {
			order = append(order, j.chain)
		}
		byChain[j.chain] = append(byChain[j.chain], "-A "+j.chain+" "+j.rule)
	}
	for _, name := range order {
		var ours []string
		for _, l := range have.Rules[name] {
			if isJump(want, l) {
				ours = append(ours, l)
			}
		}
		if slices.Equal(ours, byChain[name]) {
			continue
		}
		for _, l := range ours {
			b.WriteString("-D " + strings.TrimPrefix(l, "-A ") + "\n")
		}
		for _, l := range slices.Backward(byChain[name]) {
			b.WriteString("-I " + strings.TrimPrefix(l, "-A ") + "\n")
		}
	}
}

// isJump says whether a saved rule leads to one of the chains that the wanted
// jumps lead to.
func isJump(want []jump, l string) bool {
	to := xtables.Target(l)
	return to != "" && slices.ContainsFunc(want, func(j jump) bool { return xtables.Target(j.rule) == to || strings.HasSuffix(j.rule, "-j "+to) })
}

// removeStale deletes chains of Services and endpoints that are not wanted.
func (m *Mode) removeStale(ctx context.Context, r *ruleset, have *xtables.Saved, wanted map[string]bool) error {
	c := &change{}
	for _, name := range have.Names {
		if isServiceChain(name) && !wanted[name] {
			c.stale = append(c.stale, name)
		}
	}
	if len(c.stale) == 0 {
		return nil
	}
	return m.write(ctx, r, c)
}

// errDiffers says that the kernel does not hold what was written.
var errDiffers = errors.New("somebody else writes to it, or it was flushed")

func wrongCount(table, chain string, got, want int) error {
	return fmt.Errorf("read back: chain %s of table %s has %d rules instead of %d; %w", chain, table, got, want, errDiffers)
}

// readBackAll checks every chain of the ruleset and the jumps from the built-in
// chains, and that no other chain of ours is left. One list of the kernel's
// chains decides it nearly always; single chains are counted where it leaves a
// doubt. The error wraps errDiffers when the kernel was read and holds something
// else.
func (m *Mode) readBackAll(ctx context.Context, r *ruleset) error {
	// Asked for first: a change while the list is read belongs to the next look.
	now, err := m.generation()
	if err != nil {
		return err
	}
	have, err := m.chainUses(ctx, r.family, tables[:]...)
	if err != nil {
		return err
	}
	for _, table := range tables {
		if err := m.compare(ctx, r, table, have[table]); err != nil {
			return err
		}
	}
	m.checked[r.family] = now
	return nil
}

// compare checks one table against the list of its chains.
func (m *Mode) compare(ctx context.Context, r *ruleset, table string, have map[string]int) error {
	var missing []string
	ours := 0
	doubt, jumps := map[string]int{}, map[string]int{}
	r.expect(table, func(name string, t tally) {
		uses, there := have[name]
		switch {
		case !there:
			missing = append(missing, name)
		case uses != t.rules+t.jumps:
			doubt[name], jumps[name] = t.rules, t.jumps
		}
		ours++
	})
	if len(missing) > 0 {
		return fmt.Errorf("read back: chain %s of table %s is not there; %w", missing[0], table, errDiffers)
	}
	for name := range have {
		if isOwnChain(table, name) {
			ours--
		}
	}
	if ours < 0 {
		if stale := r.stale(table, have); stale != "" {
			return fmt.Errorf("read back: chain %s of table %s should be gone; %w", stale, table, errDiffers)
		}
	}
	if len(doubt) == 0 {
		return nil
	}
	got, err := m.countRules(ctx, r.family, table, doubt)
	if err != nil {
		return err
	}
	for name, n := range doubt {
		if got[name] != n {
			return wrongCount(table, name, got[name], n)
		}
		// More jumps than ours are somebody else's.
		if lead := have[name] - n; lead < jumps[name] {
			return fmt.Errorf("read back: %d rules jump to chain %s of table %s instead of %d; %w", lead, name, table, jumps[name], errDiffers)
		}
	}
	return nil
}

// stale finds a chain of ours that the ruleset has no use for.
func (r *ruleset) stale(table string, have map[string]int) string {
	wanted := map[string]bool{chainFirewall: true} // left empty where the family has none
	r.expect(table, func(name string, _ tally) { wanted[name] = true })
	for name := range have {
		if isOwnChain(table, name) && !wanted[name] {
			return name
		}
	}
	return ""
}

// tally is what the kernel must hold of a chain: its rules, and at least so many
// rules that jump to it.
type tally struct{ rules, jumps int }

// expect calls fn for each chain of ours in a table.
func (r *ruleset) expect(table string, fn func(name string, t tally)) {
	jumps := map[string]int{}
	for _, j := range r.jumps(table) {
		jumps[xtables.Target(" "+j.rule)]++
	}
	if table == "nat" {
		jumps[chainNodePorts] += strings.Count(r.tail, "-j "+chainNodePorts+"\n")
		for _, bl := range r.blocks {
			jumps[chainMarkMasq] += bl.marks
			for i := range bl.chains {
				c := &bl.chains[i]
				fn(c.name, tally{c.rules, c.jumps})
			}
		}
	}
	for _, c := range r.fixed(table) {
		fn(c.name, tally{c.rules, jumps[c.name]})
	}
	for _, h := range hubsOf(table) {
		fn(h.chain(), tally{r.hubRules(h), jumps[h.chain()]})
	}
}

// generation is a number that changes with every change of any rule in the
// namespace; 0 where the kernel does not say.
func (m *Mode) generation() (uint32, error) {
	if m.tool.Variant != VariantNFT {
		return 0, nil
	}
	k, err := dialNFNL(m.opts.NetNS)
	if err != nil {
		return 0, err
	}
	defer k.Close()
	return k.Generation()
}

// chainUses lists the chains of tables, each with its rules and the rules that
// jump to it in one number: more the kernel does not say of all chains at once,
// and it changes with every rule that somebody removes.
func (m *Mode) chainUses(ctx context.Context, family corev1.IPFamily, of ...string) (map[string]map[string]int, error) {
	if m.tool.Variant == VariantNFT {
		k, err := dialNFNL(m.opts.NetNS)
		if err != nil {
			return nil, err
		}
		defer k.Close()
		return k.chainUses(nfFamily(family))
	}
	out := map[string]map[string]int{}
	for _, table := range of {
		saved, err := m.tool.Save(ctx, family, table)
		if err != nil {
			return nil, err
		}
		out[table] = make(map[string]int, len(saved.Names))
		for _, name := range saved.Names {
			out[table][name] += len(saved.Rules[name])
			for _, l := range saved.Rules[name] {
				if to := xtables.Target(l); saved.Has(to) {
					out[table][to]++
				}
			}
		}
	}
	return out, nil
}
