// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/xtables"
)

// applyRules loads the iptables rules when they differ from those that were loaded
// last, each table in one transaction, and reads them back. There are some forty, so
// chains are written as a whole.
func (m *Mode) applyRules(ctx context.Context, st *state, r *ruleset) error {
	text := r.rulesText()
	if st.rules == text {
		return nil
	}
	saved, err := st.saved, error(nil)
	if saved == nil {
		if saved, err = m.saveRules(ctx, r.family); err != nil {
			return err
		}
	}
	var b strings.Builder
	for _, table := range tables {
		if !r.holds(saved, table) {
			r.tableText(&b, table)
			moveJumps(&b, table, saved[table])
			b.WriteString("COMMIT\n")
		}
	}
	if b.Len() > 0 {
		if err := m.tool.Restore(ctx, r.family, b.String()); err != nil {
			return err
		}
		if saved, err = m.saveRules(ctx, r.family); err != nil {
			return err
		}
		for _, table := range tables {
			for _, c := range chainsOf(table) {
				if got, want := len(saved[table][c]), len(r.rules[table][c]); got != want {
					return fmt.Errorf("read back: chain %s of table %s has %d rules instead of %d; %w", c, table, got, want, errDiffers)
				}
			}
			for _, j := range jumpsOf(table) {
				if !slices.Contains(saved[table][j.chain], j.line()) {
					return fmt.Errorf("read back: chain %s of table %s lacks the jump %q; %w", j.chain, table, j.rule, errDiffers)
				}
			}
		}
	}
	st.rules, st.saved = text, saved
	return nil
}

// holds says whether a table, as saved, has our chains and jumps already.
func (r *ruleset) holds(saved map[string]map[string][]string, table string) bool {
	for _, c := range chainsOf(table) {
		have, there := saved[table][c]
		if !there || len(have) != len(r.rules[table][c]) {
			return false
		}
		for i, rule := range r.rules[table][c] {
			if have[i] != "-A "+c+" "+rule {
				return false
			}
		}
	}
	return jumpsStand(table, saved[table])
}

// jumpsStand says whether the built-in chains lead to ours by our jumps, in their
// order, and by no others.
func jumpsStand(table string, saved map[string][]string) bool {
	want := map[string][]string{}
	for _, j := range jumpsOf(table) {
		want[j.chain] = append(want[j.chain], j.line())
	}
	for chain := range want {
		if !slices.Equal(ours(table, saved[chain]), want[chain]) {
			return false
		}
	}
	return true
}

// ours picks the rules of a built-in chain that lead to one of our chains.
func ours(table string, rules []string) []string {
	var out []string
	for _, l := range rules {
		if slices.Contains(chainsOf(table), xtables.Target(l)) {
			out = append(out, l)
		}
	}
	return out
}

// moveJumps puts our jumps at the head of the built-in chains, where they do not stand
// there already. Those that mode iptables has to chains of the same names go.
func moveJumps(b *strings.Builder, table string, saved map[string][]string) {
	if jumpsStand(table, saved) {
		return
	}
	chains := map[string]bool{}
	for _, j := range jumpsOf(table) {
		chains[j.chain] = true
	}
	for _, chain := range slices.Sorted(maps.Keys(chains)) {
		for _, l := range ours(table, saved[chain]) {
			b.WriteString("-D " + strings.TrimPrefix(l, "-A ") + "\n")
		}
	}
	for _, j := range slices.Backward(jumpsOf(table)) {
		b.WriteString("-I " + j.chain + " " + j.rule + "\n")
	}
}

// saveRules reads, of both tables, our chains and the rules of built-in chains that
// lead to one.
func (m *Mode) saveRules(ctx context.Context, f corev1.IPFamily) (map[string]map[string][]string, error) {
	all, err := m.save(ctx, f)
	if err != nil {
		return nil, err
	}
	out := map[string]map[string][]string{}
	for table, saved := range all {
		out[table] = map[string][]string{}
		for _, name := range saved.Names {
			switch {
			case slices.Contains(chainsOf(table), name):
				out[table][name] = append([]string{}, saved.Rules[name]...)
			case saved.Builtin[name]:
				if rules := ours(table, saved.Rules[name]); rules != nil {
					out[table][name] = rules
				}
			}
		}
	}
	return out, nil
}

// save reads both tables with one process.
func (m *Mode) save(ctx context.Context, f corev1.IPFamily) (map[string]*xtables.Saved, error) {
	text, err := m.tool.SaveAll(ctx, f)
	if err != nil {
		return nil, err
	}
	out := map[string]*xtables.Saved{}
	for _, table := range tables {
		out[table] = xtables.Parse("")
	}
	for part := range strings.SplitSeq(text, "COMMIT\n") {
		_, name, _ := strings.Cut(part, "*")
		name, _, _ = strings.Cut(name, "\n")
		if slices.Contains(tables, name) {
			out[name] = xtables.Parse(part)
		}
	}
	return out, nil
}

func equalRules(a, b map[string]map[string][]string) bool {
	return maps.EqualFunc(a, b, func(x, y map[string][]string) bool { return maps.EqualFunc(x, y, slices.Equal) })
}
