// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/nfnl"
	"github.com/kplab/kplab/internal/xtables"
)

// rewrite is how many changed lines make a chain be written as a whole.
const rewrite = 200

// apply brings one family up to date and reads back what it wrote.
func (m *Mode) apply(ctx context.Context, r *ruleset) error {
	old := m.applied[r.family]
	if old == nil || !slices.Equal(old.jumps, r.jumps) {
		return m.load(ctx, r)
	}
	var b strings.Builder
	for _, table := range tables {
		var declared, lines strings.Builder
		for _, c := range chainsOf(table) {
			write(&declared, &lines, c, old.lines(c), r.lines(c))
		}
		section(&b, table, declared.String()+lines.String())
	}
	if b.Len() == 0 {
		return nil
	}
	if err := m.tool.Restore(ctx, r.family, b.String()); err != nil {
		return err
	}
	return m.readBack(ctx, r)
}

// load makes the kernel equal to the ruleset whatever it holds now. What is right
// already is left alone, so that a restarted proxy disturbs nothing.
func (m *Mode) load(ctx context.Context, r *ruleset) error {
	var b strings.Builder
	for _, table := range tables {
		have, err := m.tool.Save(ctx, r.family, table)
		if err != nil {
			return err
		}
		var declared, lines strings.Builder
		for _, c := range chainsOf(table) {
			if !have.Has(c.String()) {
				xtables.Declare(&declared, c.String())
			}
			write(&declared, &lines, c, have.Rules[c.String()], r.lines(c))
		}
		moveJumps(&lines, r.jumps, table, have)
		section(&b, table, declared.String()+lines.String())
	}
	if b.Len() > 0 {
		if err := m.tool.Restore(ctx, r.family, b.String()); err != nil {
			return err
		}
	}
	return m.readBack(ctx, r)
}

func section(b *strings.Builder, table, lines string) {
	if lines != "" {
		b.WriteString("*" + table + "\n" + lines + "COMMIT\n")
	}
}

// write adds what turns the rules of a chain into others. No two rules of one chain
// match the same packet, so their order does not matter.
func write(declared, lines *strings.Builder, c chain, old, want []string) {
	gone, added := difference(old, want), difference(want, old)
	if len(gone)+len(added) > rewrite && len(gone) > 0 {
		xtables.Declare(declared, c.String())
		gone, added = nil, want
	}
	// Added first: no packet may meet neither.
	for _, l := range added {
		lines.WriteString(l + "\n")
	}
	for _, l := range gone {
		lines.WriteString("-D " + strings.TrimPrefix(l, "-A ") + "\n")
	}
}

// difference lists what a has more than b.
func difference(a, b []string) []string {
	count := make(map[string]int, len(b))
	for _, l := range b {
		count[l]++
	}
	var out []string
	for _, l := range a {
		if count[l]--; count[l] < 0 {
			out = append(out, l)
		}
	}
	return out
}

// moveJumps makes the jumps stand where they should: those to the portals at the head
// of their chains, those to the nodePorts behind all that is there. Nothing of others
// moves.
func moveJumps(b *strings.Builder, want []jump, table string, have *xtables.Saved) {
	lines := map[string][]string{}
	for _, j := range want {
		if j.table == table {
			lines[j.chain] = append(lines[j.chain], j.line())
		}
	}
	moved := map[string]bool{}
	for name := range lines {
		var ours []string
		for _, l := range have.Rules[name] {
			if isOwnChain(table, xtables.Target(l)) {
				ours = append(ours, l)
			}
		}
		if slices.Equal(ours, lines[name]) {
			continue
		}
		moved[name] = true
		for _, l := range ours {
			b.WriteString("-D " + strings.TrimPrefix(l, "-A ") + "\n")
		}
	}
	for _, j := range want {
		switch {
		case j.table != table || !moved[j.chain]:
		case j.last:
			b.WriteString(j.line() + "\n")
		default:
			b.WriteString("-I " + strings.TrimPrefix(j.line(), "-A ") + "\n")
		}
	}
}

// errDiffers says that the kernel does not hold what was written.
var errDiffers = errors.New("somebody else writes to it, or it was flushed")

// readBack compares the kernel with the ruleset, line by line. The error wraps
// errDiffers when the kernel was read and holds something else.
func (m *Mode) readBack(ctx context.Context, r *ruleset) error {
	// Asked for first: a change while the tables are read belongs to the next look.
	now, err := m.generation()
	if err != nil {
		return err
	}
	for _, table := range tables {
		have, err := m.tool.Save(ctx, r.family, table)
		if err != nil {
			return err
		}
		for _, c := range chainsOf(table) {
			got, want := have.Rules[c.String()], r.lines(c)
			switch {
			case !have.Has(c.String()):
				return fmt.Errorf("read back: chain %s of table %s is not there; %w", c, table, errDiffers)
			case len(difference(want, got)) > 0:
				return fmt.Errorf("read back: chain %s of table %s lacks the rule %q; %w", c, table, difference(want, got)[0], errDiffers)
			case len(difference(got, want)) > 0:
				return fmt.Errorf("read back: chain %s of table %s has the rule %q; %w", c, table, difference(got, want)[0], errDiffers)
			}
		}
		for _, j := range r.jumps {
			if j.table == table && !slices.Contains(have.Rules[j.chain], j.line()) {
				return fmt.Errorf("read back: chain %s of table %s lacks the rule %q; %w", j.chain, table, j.line(), errDiffers)
			}
		}
	}
	m.checked[r.family] = now
	return nil
}

// generation is a number that changes with every change of any rule in the namespace;
// 0 where the kernel does not say.
func (m *Mode) generation() (uint32, error) {
	if m.tool.Variant != xtables.NFT {
		return 0, nil
	}
	c, err := nfnl.Dial(m.opts.NetNS)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	return c.Generation()
}

// Intact implements proxy.Checker.
func (m *Mode) Intact(ctx context.Context) (bool, error) {
	for family, r := range m.applied {
		now, err := m.generation()
		if err != nil {
			return false, err
		}
		if now != 0 && now == m.checked[family] {
			continue // nobody has changed anything since
		}
		if err := m.readBack(ctx, r); errors.Is(err, errDiffers) {
			return false, nil
		} else if err != nil {
			return false, err
		}
	}
	return true, nil
}

// families are both: what an earlier process wrote is cleaned up whatever the node has
// now.
var families = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
