// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// results are the metrics of each benchmark by its name, without "Benchmark" and
// without the number of CPUs.
type results map[string]map[string]float64

// parse adds what `go test -bench` printed. A failed or skipped benchmark is an
// error, and so is text without any.
func (r results) parse(text string) error {
	found := 0
	for line := range strings.SplitSeq(text, "\n") {
		if strings.HasPrefix(line, "--- FAIL") || strings.HasPrefix(line, "--- SKIP") {
			return fmt.Errorf("%s\n%s", line, text)
		}
		name, ok := strings.CutPrefix(line, "Benchmark")
		f := strings.Fields(name)
		if !ok || len(f) < 4 || len(f)%2 != 0 {
			continue // other output, such as a benchmark's name before its log
		}
		metrics := map[string]float64{}
		for i := 2; i < len(f); i += 2 {
			v, err := strconv.ParseFloat(f[i], 64)
			if err != nil {
				return fmt.Errorf("cannot read %q in %q", f[i], line)
			}
			metrics[f[i+1]] = v
		}
		r[withoutCPUs(f[0])] = metrics
		found++
	}
	if found == 0 {
		return fmt.Errorf("no benchmark ran:\n%s", text)
	}
	return nil
}

// withoutCPUs cuts the suffix that go test adds where there is more than one CPU.
func withoutCPUs(name string) string {
	base, n, ok := cutLast(name, "-")
	if _, err := strconv.Atoi(n); !ok || err != nil {
		return name
	}
	return base
}

func cutLast(s, sep string) (before, after string, ok bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// get returns one figure.
func (r results) get(bench, metric string) (float64, error) {
	v, ok := r[bench][metric]
	if !ok || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0, fmt.Errorf("%s, %s: %w", "Benchmark"+bench, metric, errMissing)
	}
	return v, nil
}

// table is rows of cells; the first is the head.
type table [][]string

// newTable makes the table of rows from what was measured.
func newTable(measured results) (table, error) {
	t := table{{"what", "measured", "bar", "verdict", "beside it"}}
	for _, r := range rows {
		v, err := measured.get(r.bench, r.figure.metric)
		if err != nil {
			return nil, err
		}
		var beside []string
		for _, f := range r.beside {
			b, err := measured.get(r.bench, f.metric)
			if err != nil {
				return nil, err
			}
			beside = append(beside, number(b)+" "+f.label)
		}
		t = append(t, []string{r.what, number(v) + " " + r.figure.label, r.bar.String(), r.bar.verdict(v), strings.Join(beside, ", ")})
	}
	return t, nil
}

// String is the bar as the table shows it.
func (b bar) String() string {
	switch {
	case b == bar{}:
		return "–"
	case b.atLeast:
		return "at least " + number(b.limit)
	default:
		return "under " + number(b.limit)
	}
}

// verdict says whether v keeps to the bar.
func (b bar) verdict(v float64) string {
	switch {
	case b == bar{}:
		return "–"
	case b.atLeast && v >= b.limit, !b.atLeast && v < b.limit:
		return "met"
	default:
		return "over"
	}
}

// number prints three digits that count, and no exponent.
func number(v float64) string {
	digits := 0
	for limit := 100.0; math.Abs(v) < limit && digits < 4 && v != 0; limit /= 10 {
		digits++
	}
	s := strconv.FormatFloat(v, 'f', digits, 64)
	if strings.Contains(s, ".") {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	return s
}

// write prints the table as Markdown whose columns line up in a terminal as well.
func (t table) write(w io.Writer) error {
	widths := make([]int, len(t[0]))
	for _, cells := range t {
		for i, c := range cells {
			widths[i] = max(widths[i], utf8.RuneCountInString(c))
		}
	}
	var b strings.Builder
	for n, cells := range t {
		for i, c := range cells {
			b.WriteString("| " + c + strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c)) + " ")
		}
		b.WriteString("|\n")
		if n == 0 {
			for _, width := range widths {
				b.WriteString("|" + strings.Repeat("-", width+2))
			}
			b.WriteString("|\n")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
