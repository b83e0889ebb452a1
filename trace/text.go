// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"
)

// TextOptions choose how much is told.
type TextOptions struct {
	// Reply tells the way back in full; otherwise it is told by its devices.
	Reply bool
	// All tells every event, also those of chains in which nothing was decided.
	All bool
	// Width is the number of columns for the drawing; 0 means 100.
	Width int
}

// WriteText tells a report to a person. Of several requests the first is told in
// full, and each by one line.
func (r *Report) WriteText(w io.Writer, o TextOptions) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s → %s, %s", r.From, r.To, r.Protocol)
	if len(r.Traces) > 0 && r.Traces[0].Target.Addr.Addr().IsValid() {
		t := r.Traces[0].Target
		fmt.Fprintf(&b, " %s", t.Addr)
		if t.Service != "" {
			fmt.Fprintf(&b, ", %s", serviceText(t.Service))
		}
	}
	fmt.Fprintf(&b, "\nproxy mode: %s\n", r.modesText())
	for i, t := range r.Traces {
		if i == 0 {
			t.write(&b, o)
		}
		if len(r.Traces) > 1 {
			if i == 0 {
				fmt.Fprintf(&b, "\nall %d requests\n", len(r.Traces))
			}
			fmt.Fprintf(&b, "  %3d  %-9s %s\n", i+1, t.Verdict.Outcome, t.Verdict.Text)
		}
	}
	if len(r.Traces) > 1 && len(r.Endpoints) > 0 {
		b.WriteString("\nby endpoint\n")
		for _, e := range slices.Sorted(maps.Keys(r.Endpoints)) {
			fmt.Fprintf(&b, "  %3d  %s\n", r.Endpoints[e], e)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// modesText names the modes of the nodes, once when all are alike.
func (r *Report) modesText() string {
	modes := map[string][]string{}
	for _, n := range slices.Sorted(maps.Keys(r.Modes)) {
		modes[r.Modes[n]] = append(modes[r.Modes[n]], n)
	}
	var out []string
	for _, m := range slices.Sorted(maps.Keys(modes)) {
		if len(modes) == 1 {
			return m
		}
		out = append(out, m+" on "+strings.Join(modes[m], ", "))
	}
	return strings.Join(out, "; ")
}

func (t *Trace) write(b *strings.Builder, o TextOptions) {
	if len(t.Path) > 0 {
		b.WriteByte('\n')
		b.WriteString(t.Draw(o.Width))
	}
	leg, place, n := Leg(""), "", 0
	titles := map[Leg]string{Lookup: "name look-up", Forward: "request", Back: "reply"}
	for i := 0; i < len(t.Steps); i++ {
		s := t.Steps[i]
		if s.Leg == Back && !o.Reply && s.Kind != KindDevice && s.Kind != KindNAT && s.Kind != KindAnswer {
			continue
		}
		n++
		if s.Leg != leg {
			leg, place = s.Leg, ""
			fmt.Fprintf(b, "\n%s\n", titles[leg])
		}
		if s.Place != place {
			place = s.Place
			fmt.Fprintf(b, "  %s\n", place)
		}
		if !o.All {
			if dull := t.dull(i); dull > 0 {
				writeDull(b, n, t.Steps[i:i+dull])
				i += dull - 1
				continue
			}
			if s.end() {
				n--
				continue
			}
		}
		s.write(b, n)
	}
	fmt.Fprintf(b, "\nverdict: %s (%s)\n", t.Verdict.Outcome, t.Verdict.Reason)
	fmt.Fprintf(b, "  %s\n", t.Verdict.Text)
	if t.Verdict.Fix != "" {
		fmt.Fprintf(b, "  what to do: %s\n", t.Verdict.Fix)
	}
	for _, note := range t.Notes {
		fmt.Fprintf(b, "  note: %s\n", note)
	}
}

// end says that the step is only the end of a chain that let the packet pass.
func (s *Step) end() bool {
	return s.Kind == KindRule && s.Rule == nil && (s.Verdict == "return" || s.Verdict == "accept")
}

// dull counts the steps from i on that are one hook's table in which nothing was
// decided: the packet was only led into chains and back.
func (t *Trace) dull(i int) int {
	first, n, entered := t.Steps[i], 0, 0
	for _, s := range t.Steps[i:] {
		if s.Kind != KindRule || s.Leg != first.Leg || s.Place != first.Place || s.Hook != first.Hook || s.Table != first.Table {
			break
		}
		jump := s.Rule != nil && strings.HasPrefix(s.Verdict, "jump ") && len(s.Objects) == 0
		if !jump && !s.end() {
			return 0
		}
		n++
		if jump {
			entered++
		}
	}
	if entered == 0 {
		return 0
	}
	return n
}

// writeDull tells such a table in a line.
func writeDull(b *strings.Builder, n int, steps []*Step) {
	var chains []string
	for _, s := range steps {
		if c, ok := strings.CutPrefix(s.Verdict, "jump "); ok && !slices.Contains(chains, c) {
			chains = append(chains, c)
		}
	}
	last := steps[len(steps)-1]
	ended := "let through"
	if last.Rule != nil {
		ended = "the packet went no further"
	}
	fmt.Fprintf(b, "   %3d   %s %s %s: looked at by %s; no rule there decided, %s\n", n, steps[0].Hook, steps[0].Table, steps[0].Chain, strings.Join(chains, ", "), ended)
}

func (s *Step) write(b *strings.Builder, n int) {
	const indent = "         "
	inferred := ""
	if s.Inferred != "" {
		inferred = indent + "(inferred) " + s.Inferred + "\n"
	}
	if s.Kind != KindRule {
		fmt.Fprintf(b, "   %3d   %s\n%s", n, s.Text, inferred)
		if s.NAT != nil && s.NAT.Conntrack != "" {
			fmt.Fprintf(b, "%sconntrack: %s\n", indent, s.NAT.Conntrack)
		}
		return
	}
	where := fmt.Sprintf("%s %s %s", s.Hook, s.Table, s.Chain)
	switch {
	case s.Rule == nil && s.Verdict == "return":
		where += ": end of the chain"
	case s.Rule == nil:
		where += ": policy " + s.Verdict
	case s.Rule.Number > 0:
		where += fmt.Sprintf(": rule %d of %d", s.Rule.Number, s.Rule.Of)
	}
	if s.Rule != nil {
		where += " → " + s.Verdict
	}
	fmt.Fprintf(b, "   %3d   %s\n", n, where)
	if s.Rule != nil && s.Rule.Text != "" {
		fmt.Fprintf(b, "%s| %s\n", indent, s.Rule.Text)
	}
	if s.Text != "" {
		fmt.Fprintf(b, "%s%s\n", indent, s.Text)
	}
	b.WriteString(inferred)
}

// Draw draws the request's path in boxes, at most width columns wide; 0 means 100.
func (t *Trace) Draw(width int) string {
	if width == 0 {
		width = 100
	}
	var out strings.Builder
	var top, mid, bottom strings.Builder
	flush := func() {
		for _, l := range []*strings.Builder{&top, &mid, &bottom} {
			out.WriteString(strings.TrimRight(l.String(), " ") + "\n")
			l.Reset()
		}
	}
	for i, h := range t.Path {
		name := shortName(h.Place)
		w := utf8.RuneCountInString(name) + 2
		arrow := "──▶"
		if i == 0 {
			arrow = "  "
		}
		if i > 0 && utf8.RuneCountInString(mid.String())+w+5 > width {
			flush()
			arrow = "  └▶"
		}
		blank := strings.Repeat(" ", utf8.RuneCountInString(arrow))
		line := strings.Repeat("─", w)
		top.WriteString(blank + "┌" + line + "┐")
		mid.WriteString(arrow + "│ " + name + " │")
		bottom.WriteString(blank + "└" + line + "┘")
	}
	if !t.Verdict.OK() {
		mid.WriteString(" ✗ " + t.Verdict.Reason)
	}
	flush()
	return out.String()
}
