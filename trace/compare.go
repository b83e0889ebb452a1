// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// stage is what both sides of a comparison have: the same question, which each mode
// answers with other rules.
func (s *Step) stage() string {
	switch s.Kind {
	case KindRule:
		return s.Hook
	case KindDevice:
		return s.Direction
	}
	return string(s.Kind)
}

// told says whether a step is worth a line in a comparison: what decided.
func (s *Step) told() bool {
	switch s.Kind {
	case KindRule:
		return s.Rule != nil && (len(s.Objects) > 0 || s.Verdict == "drop" || s.Verdict == "accept")
	case KindNAT, KindRoute, KindQuery, KindAnswer, KindHop:
		return s.Leg != Back || s.Kind != KindRoute
	}
	return false
}

// WriteComparison lays the first requests of two reports side by side: place by
// place and hook by hook, what decided in each mode.
func WriteComparison(w io.Writer, left, right *Report, width int) error {
	if width == 0 {
		width = 150
	}
	column := (width - 3) / 2
	var b strings.Builder
	row := func(l, r string) {
		ls, rs := wrap(l, column), wrap(r, column)
		for i := range max(len(ls), len(rs)) {
			var a, c string
			if i < len(ls) {
				a = ls[i]
			}
			if i < len(rs) {
				c = rs[i]
			}
			b.WriteString(strings.TrimRight(a+strings.Repeat(" ", column-utf8.RuneCountInString(a))+" │ "+c, " ") + "\n")
		}
	}
	fmt.Fprintf(&b, "%s → %s, %s\n\n", left.From, left.To, left.Protocol)
	row(left.modesText(), right.modesText())
	b.WriteString(strings.Repeat("─", column+1) + "┼" + strings.Repeat("─", column+1) + "\n")
	ls, rs := blocks(left.Traces[0]), blocks(right.Traces[0])
	var keys []string
	for _, side := range [][]block{ls, rs} {
		at := 0
		for _, k := range side {
			if i := slices.Index(keys, k.key); i >= 0 {
				at = i + 1
				continue
			}
			keys = slices.Insert(keys, at, k.key)
			at++
		}
	}
	for _, k := range keys {
		l, r := linesOf(ls, k), linesOf(rs, k)
		row("— "+k, "— "+k)
		for i := range max(len(l), len(r)) {
			var a, c string
			if i < len(l) {
				a = l[i]
			}
			if i < len(r) {
				c = r[i]
			}
			row(a, c)
		}
	}
	verdict := func(t *Trace) string {
		return fmt.Sprintf("verdict: %s (%s): %s", t.Verdict.Outcome, t.Verdict.Reason, t.Verdict.Text)
	}
	b.WriteString(strings.Repeat("─", column+1) + "┼" + strings.Repeat("─", column+1) + "\n")
	row(verdict(left.Traces[0]), verdict(right.Traces[0]))
	_, err := io.WriteString(w, b.String())
	return err
}

type block struct {
	key   string
	lines []string
}

// blocks sorts a trace's decisions by leg, place and stage. Which endpoint is drawn
// is chance, so a pod's name is no key.
func blocks(t *Trace) []block {
	var out []block
	for _, s := range t.Steps {
		if !s.told() {
			continue
		}
		key := fmt.Sprintf("%s, %s, %s", s.Leg, s.Place, s.stage())
		if i := slices.IndexFunc(out, func(b block) bool { return b.key == key }); i < 0 {
			out = append(out, block{key: key})
		}
		line := s.Text
		if s.Kind == KindRule {
			line = s.Chain + ": " + line
		}
		for i := range out {
			if out[i].key == key {
				out[i].lines = append(out[i].lines, line)
			}
		}
	}
	return out
}

func linesOf(all []block, key string) []string {
	for _, b := range all {
		if b.key == key {
			return b.lines
		}
	}
	return nil
}
