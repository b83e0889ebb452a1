// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	r := results{}
	err := r.parse(`goos: linux
BenchmarkCreate/fsync=true/writers=8-2         	     500	   1397759 ns/op	         4.000 creates/commit	       715.4 creates/s
BenchmarkPods
    lab_test.go:1: a note
BenchmarkPods-16 	       1	9 ns/op	 1e-05 x-raw
BenchmarkOneCPU  	      20	  82579859 ns/op	 2.649 x-raw
PASS
`)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []struct {
		bench, metric string
		value         float64
	}{
		{"Create/fsync=true/writers=8", "creates/s", 715.4},
		{"Create/fsync=true/writers=8", "creates/commit", 4},
		{"Pods", "x-raw", 1e-05},
		{"OneCPU", "x-raw", 2.649},
	} {
		if got, err := r.get(want.bench, want.metric); err != nil || got != want.value {
			t.Errorf("%s %s: %v, %v; want %v", want.bench, want.metric, got, err, want.value)
		}
	}
	if _, err := r.get("Pods", "pods/s"); !errors.Is(err, errMissing) {
		t.Errorf("what was not measured: %v", err)
	}
}

func TestParseRefuses(t *testing.T) {
	for what, text := range map[string]string{
		"nothing":   "PASS\n",
		"a failure": "BenchmarkA-2 1 5 ns/op\n--- FAIL: BenchmarkB\n",
		"a skip":    "--- SKIP: BenchmarkA\nPASS\n",
		"no number": "BenchmarkA-2 1 x ns/op\n",
	} {
		if err := (results{}).parse(text); err == nil {
			t.Errorf("%s was accepted", what)
		}
	}
}

func TestVerdict(t *testing.T) {
	for _, c := range []struct {
		bar  bar
		v    float64
		want string
		text string
	}{
		{below(1.3), 1.2, "met", "under 1.3"},
		{below(1.3), 1.3, "over", "under 1.3"},
		{atLeast(150), 150, "met", "at least 150"},
		{atLeast(150), 149, "over", "at least 150"},
		{bar{}, 7, "–", "–"},
	} {
		if got := c.bar.verdict(c.v); got != c.want || c.bar.String() != c.text {
			t.Errorf("%v against %v: %q %q, want %q %q", c.v, c.bar, got, c.bar, c.want, c.text)
		}
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 1: "1", 1.5: "1.5", 2.649: "2.65", 0.0123: "0.0123", 22571: "22571", 149.6: "150", 99.96: "100", 12.34: "12.3",
	} {
		if got := number(v); got != want {
			t.Errorf("%v is shown as %s, want %s", v, got, want)
		}
	}
}

// everything is a result for each figure that the table asks for.
func everything() results {
	r := results{}
	for _, row := range rows {
		for _, f := range append([]figure{row.figure}, row.beside...) {
			if r[row.bench] == nil {
				r[row.bench] = map[string]float64{}
			}
			r[row.bench][f.metric] = 1.2
		}
	}
	return r
}

func TestTable(t *testing.T) {
	r := everything()
	var b strings.Builder
	if err := report(&b, machine{cpu: "a processor", cpus: 2, loadBefore: "0.50"}, r); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	for _, want := range []string{
		"a processor, 2 CPUs", "load average 0.50 before",
		"| wiring of a lab: fabric, 3 nodes, outside ", "| 1.2 × raw netlink ", "| under 3 ", "| met ", "| over ", "1.2 µs raw",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q:\n%s", want, page)
		}
	}
	widths := map[int]bool{}
	for line := range strings.SplitSeq(page, "\n") {
		if strings.HasPrefix(line, "|") {
			widths[len([]rune(line))] = true
		}
	}
	if len(widths) != 1 {
		t.Errorf("the lines are of %d widths:\n%s", len(widths), page)
	}
	delete(r["Idle"], "MB-rss")
	if _, err := newTable(r); !errors.Is(err, errMissing) || !strings.Contains(err.Error(), "BenchmarkIdle, MB-rss") {
		t.Errorf("a figure that is missing: %v", err)
	}
}
