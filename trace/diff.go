// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"io"
	"strings"
)

// DiffLine is a rule or element that went or came.
type DiffLine struct {
	// Op is "-" or "+".
	Op string `json:"op"`
	*ProgramLine
}

// Diff compares two programs rule by rule, whatever the order of Services in them.
// What x knows puts the lines into sentences; it may be nil.
func Diff(before, after string, x *Index) []DiffLine {
	sides := [2]*Program{{Lines: ParseProgram(before)}, {Lines: ParseProgram(after)}}
	if x != nil {
		for _, s := range sides {
			_, _ = s.finish(x, "") // it fails for a Service without rules only
		}
	}
	key := func(l *ProgramLine) string {
		return strings.Join([]string{l.Family, l.Table, l.Chain, l.Set, l.Text}, "\x00")
	}
	count := map[string]int{}
	for _, l := range sides[1].Lines {
		count[key(l)]++
	}
	var out []DiffLine
	for _, l := range sides[0].Lines {
		if count[key(l)]--; count[key(l)] < 0 {
			out = append(out, DiffLine{"-", l})
		}
	}
	for _, l := range sides[1].Lines {
		if count[key(l)] > 0 {
			count[key(l)]--
			out = append(out, DiffLine{"+", l})
		}
	}
	return out
}

// WriteDiff prints a diff, each chain or set with its lines, with explain each line
// with its sentence.
func WriteDiff(w io.Writer, lines []DiffLine, indent string, explain bool) error {
	var b strings.Builder
	where := ""
	for _, l := range lines {
		at := l.Family + " " + l.Table + " " + l.Chain + l.Set
		if l.Table == "kube-proxy" {
			if at != where {
				kind := "chain "
				if l.Set != "" {
					kind = "elements of "
				}
				fmt.Fprintf(&b, "%s  table %s %s, %s%s%s\n", indent, l.Family, l.Table, kind, l.Chain, l.Set)
			}
			where = at
		}
		fmt.Fprintf(&b, "%s%s %s\n", indent, l.Op, l.Text)
		if explain && l.Explanation != "" {
			fmt.Fprintf(&b, "%s      # %s\n", indent, l.Explanation)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// CountDiff counts the lines that came and went.
func CountDiff(lines []DiffLine) (added, removed int) {
	for _, l := range lines {
		if l.Op == "+" {
			added++
		} else {
			removed++
		}
	}
	return added, removed
}
