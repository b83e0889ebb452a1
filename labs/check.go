// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/jsonpath"
)

// runTimeout is how long one command of a check may take. It only ends what hangs: a
// command that waits for a packet brings its own, shorter one.
const runTimeout = 40 * time.Second

// ops are how a field may be compared.
var ops = []string{"exists", "absent", "equals", "not-equals", "matches", "not-matches", "in", "at-least", "at-most"}

// lintCheck says what is wrong with a check.
func (l *Lab) lintCheck(s *Step, c *Check, bad func(int, string, ...any)) {
	if c.Says.EN == "" {
		bad(c.Line, "check: says is missing; it is the sentence that the learner reads")
	}
	if (c.Run == "") == (c.Get == "") {
		bad(c.Line, "check: want either run (a command) or get (an object)")
		return
	}
	for _, m := range c.Modes {
		if !slices.Contains(proxyModes, m) {
			bad(c.Line, "check: unknown mode %q%s", m, didYouMean(m, proxyModes))
		}
	}
	for key, expr := range map[string]string{"stdout": c.Stdout, "stderr": c.Stderr, "not": c.Not, "find": c.Find} {
		if _, err := regexp.Compile(expr); err != nil {
			bad(c.Line, "check: %s: %v", key, err)
		}
	}
	for key, bound := range map[string]string{"count": c.Count, "distinct": c.Distinct, "share": c.Share} {
		if bound == "" {
			continue
		}
		if _, _, err := parseBound(bound); err != nil {
			bad(c.Line, "check: %s: %v", key, err)
		}
	}
	if c.Run != "" {
		l.lintRun(s, c, bad)
	} else {
		c.lintGet(bad)
	}
}

func (l *Lab) lintRun(s *Step, c *Check, bad func(int, string, ...any)) {
	l.lintNode(s, c.Line, c.In, c.Run, bad)
	if _, _, err := parseExit(c.Exit); err != nil {
		bad(c.Line, "check: %v", err)
	}
	if c.Op != "" || c.JSONPath != "" || c.Value != "" || c.Selector != "" || c.Namespace != "" {
		bad(c.Line, "check: jsonpath, op, value, selector and namespace go with get")
	}
	if c.Find == "" && (c.Count != "" || c.Distinct != "" || c.Share != "") {
		bad(c.Line, "check: count, distinct and share are about what find finds")
	}
	if c.Exit == "any" && c.Stdout == "" && c.Stderr == "" && c.Not == "" && c.Find == "" {
		bad(c.Line, "check: any exit code and any output will do: it cannot fail")
	}
	if c.Find != "" && c.Count == "" && c.Distinct == "" && c.Share == "" {
		bad(c.Line, "check: find needs count, distinct or share")
	}
}

func (c *Check) lintGet(bad func(int, string, ...any)) {
	if c.In != "" || c.Exit != "" || c.Stdout != "" || c.Stderr != "" || c.Not != "" || c.Find != "" || c.Distinct != "" || c.Share != "" {
		bad(c.Line, "check: in, exit, stdout, stderr, not, find, distinct and share go with run")
	}
	if c.Op != "" && !slices.Contains(ops, c.Op) {
		bad(c.Line, "check: unknown op %q%s", c.Op, didYouMean(c.Op, ops))
	}
	if c.JSONPath != "" {
		if _, err := parseJSONPath(c.JSONPath); err != nil {
			bad(c.Line, "check: jsonpath %s: %v", c.JSONPath, err)
		}
	}
	switch c.Op {
	case "", "exists", "absent":
		if c.Value != "" {
			bad(c.Line, "check: value needs an op that compares, one of %s", strings.Join(ops[2:], ", "))
		}
	case "matches", "not-matches":
		if _, err := regexp.Compile(c.Value); err != nil {
			bad(c.Line, "check: value: %v", err)
		}
	case "at-least", "at-most":
		if _, err := strconv.ParseFloat(c.Value, 64); err != nil {
			bad(c.Line, "check: value %q: want a number", c.Value)
		}
	}
	if c.JSONPath == "" && c.Op != "" && c.Op != "exists" && c.Op != "absent" {
		bad(c.Line, "check: op %s needs a jsonpath", c.Op)
	}
	if c.Selector != "" && strings.Contains(c.Get, "/") {
		bad(c.Line, "check: get: either a name or a selector")
	}
}

// parseExit reads what exit codes are right.
func parseExit(s string) (codes []int, fails bool, err error) {
	switch s {
	case "":
		return []int{0}, false, nil
	case "any":
		return nil, false, nil
	case "fails":
		return nil, true, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(part))
		if err != nil || n < 0 || n > 255 {
			return nil, false, fmt.Errorf("exit %q: want exit codes by commas, fails or any", s)
		}
		codes = append(codes, n)
	}
	return codes, false, nil
}

// CheckResult is what a check came to.
type CheckResult struct {
	Says   string `json:"says"`
	Passed bool   `json:"passed"`
	// Missing is one sentence on what is not there yet.
	Missing string `json:"missing,omitempty"`
	// Seen is what the check met.
	Seen string `json:"seen,omitempty"`
}

// try looks once. seen is what was met where it is not what has to be.
func (c *Check) try(ctx context.Context, w *World) (ok bool, seen string, err error) {
	if c.Run != "" {
		return c.tryRun(ctx, w)
	}
	return c.tryGet(ctx, w)
}

func (c *Check) tryRun(ctx context.Context, w *World) (ok bool, seen string, err error) {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	r, err := w.Run(ctx, c.In, c.Run, nil)
	if err != nil {
		if ctx.Err() == nil || errors.Is(err, errNoPlace) {
			return false, err.Error(), nil
		}
		return false, fmt.Sprintf("no end after %s", runTimeout), nil
	}
	// Most programs end their output with a line's end, which $ would not match.
	r.Stdout, r.Stderr = strings.TrimRight(r.Stdout, "\n"), strings.TrimRight(r.Stderr, "\n")
	said := lastLine(r.Stderr)
	if said == "" {
		said = lastLine(r.Stdout)
	}
	describe := fmt.Sprintf("exit code %d", r.Exit)
	if said != "" {
		describe += ": " + said
	}
	codes, fails, err := parseExit(c.Exit)
	switch {
	case err != nil:
		return false, "", err
	case r.Exit == 126 || r.Exit == 127:
		// The command never ran: that proves nothing, whatever was expected.
		return false, describe, nil
	case fails && r.Exit == 0, !fails && codes != nil && !slices.Contains(codes, r.Exit):
		return false, describe, nil
	case c.Stdout != "" && !regexp.MustCompile(c.Stdout).MatchString(r.Stdout):
		return false, orNothing(r.Stdout, r.Stderr), nil
	case c.Stderr != "" && !regexp.MustCompile(c.Stderr).MatchString(r.Stderr):
		return false, orNothing(r.Stderr, r.Stdout), nil
	case c.Not != "" && regexp.MustCompile(c.Not).MatchString(r.Stdout):
		return false, oneLine(regexp.MustCompile(c.Not).FindString(r.Stdout)), nil
	case c.Find != "":
		return c.spread(r.Stdout)
	}
	return true, "", nil
}

// spread looks at how the values that find finds are distributed.
func (c *Check) spread(stdout string) (ok bool, seen string, err error) {
	counts := map[string]int{}
	total := 0
	for _, m := range regexp.MustCompile(c.Find).FindAllStringSubmatch(stdout, -1) {
		counts[m[min(1, len(m)-1)]]++
		total++
	}
	var parts []string
	for v, n := range counts {
		parts = append(parts, fmt.Sprintf("%s ×%d", oneLine(v), n))
	}
	slices.Sort(parts)
	seen = fmt.Sprintf("%d: %s", total, strings.Join(parts[:min(len(parts), 8)], ", "))
	within := func(bound string, x float64) bool {
		if bound == "" {
			return true
		}
		low, high, e := parseBound(bound)
		if e != nil {
			err = e
		}
		return x >= low && x <= high
	}
	ok = within(c.Count, float64(total)) && within(c.Distinct, float64(len(counts)))
	if c.Share != "" && total == 0 {
		ok = false
	}
	for _, n := range counts {
		ok = ok && within(c.Share, 100*float64(n)/float64(total))
	}
	return ok, seen, err
}

func (c *Check) tryGet(ctx context.Context, w *World) (ok bool, seen string, err error) {
	namespace := c.Namespace
	if namespace == "" {
		namespace = w.namespace
	}
	object, err := w.Get(ctx, c.Get, namespace, c.Selector)
	switch {
	case apierrors.IsNotFound(err):
		return c.Op == "absent" && c.JSONPath == "", c.Get + ": not there", nil
	case err != nil:
		return false, oneLine(err.Error()), nil
	}
	items, isList := object["items"].([]any)
	if c.JSONPath == "" {
		n := 1
		if isList {
			n = len(items)
		}
		if c.Count != "" {
			low, high, err := parseBound(c.Count)
			return err == nil && float64(n) >= low && float64(n) <= high, fmt.Sprintf("%s: %d", c.Get, n), err
		}
		if c.Op == "absent" {
			return n == 0, c.Get + ": there", nil
		}
		return n > 0, c.Get + ": none", nil
	}
	values, err := findJSONPath(c.JSONPath, object)
	if err != nil {
		return false, oneLine(err.Error()), nil // an index that is not there
	}
	return c.compare(values)
}

// compare holds the values of a field against what is wanted. All of them have to
// be right, and there has to be one.
func (c *Check) compare(values []string) (ok bool, seen string, err error) {
	if c.Count != "" {
		low, high, err := parseBound(c.Count)
		if n := float64(len(values)); err != nil || n < low || n > high {
			return false, fmt.Sprintf("%s: %d", c.Get, len(values)), err
		}
		if c.Op == "" {
			return true, "", nil
		}
	}
	seen = fmt.Sprintf("%s: %s", c.Get, orNothing(strings.Join(values, " "), ""))
	switch c.Op {
	case "", "exists":
		return len(values) > 0 && !slices.Contains(values, ""), seen, nil
	case "absent":
		return len(values) == 0, seen, nil
	}
	right := func(v string) bool {
		switch c.Op {
		case "equals":
			return v == c.Value
		case "not-equals":
			return v != c.Value
		case "matches":
			return regexp.MustCompile(c.Value).MatchString(v)
		case "not-matches":
			return !regexp.MustCompile(c.Value).MatchString(v)
		case "in":
			return slices.Contains(strings.FieldsFunc(c.Value, func(r rune) bool { return r == ',' || r == ' ' }), v)
		}
		x, err := strconv.ParseFloat(v, 64)
		want, _ := strconv.ParseFloat(c.Value, 64) // lint has read it
		return err == nil && (c.Op == "at-least" && x >= want || c.Op == "at-most" && x <= want)
	}
	for _, v := range values {
		if !right(v) {
			return false, seen, nil
		}
	}
	return len(values) > 0, seen, nil
}

func parseJSONPath(expr string) (*jsonpath.JSONPath, error) {
	if !strings.HasPrefix(expr, "{") {
		expr = "{" + expr + "}"
	}
	p := jsonpath.New("check").AllowMissingKeys(true)
	return p, p.Parse(expr)
}

// findJSONPath returns every value that a path finds, as text.
func findJSONPath(expr string, object map[string]any) ([]string, error) {
	p, err := parseJSONPath(expr)
	if err != nil {
		return nil, err
	}
	found, err := p.FindResults(object)
	if err != nil {
		return nil, fmt.Errorf("jsonpath %s: %w", expr, err)
	}
	var values []string
	for _, results := range found {
		for i := range results {
			var b bytes.Buffer
			if err := p.PrintResults(&b, results[i:i+1]); err != nil {
				return nil, fmt.Errorf("jsonpath %s: %w", expr, err)
			}
			values = append(values, b.String())
		}
	}
	return values, nil
}

// longestSeen bounds what a failed check shows of an output.
const longestSeen = 160

func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > longestSeen {
		return string(r[:longestSeen]) + "…"
	}
	return s
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return oneLine(lines[len(lines)-1])
}

// orNothing shows an output, or the other one where there is none.
func orNothing(s, other string) string {
	if s = oneLine(s); s != "" {
		return s
	}
	if other = oneLine(other); other != "" {
		return other
	}
	return "(nothing)"
}
