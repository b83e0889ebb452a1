// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"strings"
	"testing"
)

// TestSpread holds the distribution of answers against bounds.
func TestSpread(t *testing.T) {
	answers := "Pod: a\nPod: b\nPod: a\nPod: c\n"
	for _, x := range []struct {
		name, out, count, distinct, share string
		want                              bool
	}{
		{"all", answers, "4", "3", "25%-50%", true},
		{"count", answers, "5", "", "", false},
		{"at least", answers, ">=4", ">=3", "", true},
		{"distinct", answers, "", "2", "", false},
		{"one has too much", answers, "", "", "<=49", false},
		{"one has too little", answers, "", "", ">=26", false},
		{"nothing found has no share", "", "", "", "0-100", false},
		{"nothing wanted", "", "0", "", "", true},
	} {
		c := Check{Find: `Pod: (\w)`, Count: x.count, Distinct: x.distinct, Share: x.share}
		if got, seen, err := c.spread(x.out); got != x.want || err != nil {
			t.Errorf("%s: %v (%s), %v", x.name, got, seen, err)
		}
	}
}

// TestCompare tries every op on what a path may find.
func TestCompare(t *testing.T) {
	one, two, none := []string{"5"}, []string{"5", "7"}, []string(nil)
	for _, x := range []struct {
		op, value, count string
		values           []string
		want             bool
	}{
		{"exists", "", "", one, true}, {"exists", "", "", none, false}, {"", "", "", []string{""}, false},
		{"absent", "", "", none, true}, {"absent", "", "", one, false},
		{"equals", "5", "", one, true}, {"equals", "5", "", two, false}, {"equals", "5", "", none, false},
		{"not-equals", "6", "", two, true}, {"not-equals", "7", "", two, false}, {"not-equals", "7", "", none, false},
		{"matches", "^[57]$", "", two, true}, {"matches", "^5$", "", two, false},
		{"not-matches", "9", "", two, true}, {"not-matches", "7", "", two, false},
		{"in", "5, 7", "", two, true}, {"in", "5", "", two, false},
		{"at-least", "5", "", two, true}, {"at-least", "6", "", two, false}, {"at-least", "1", "", []string{"x"}, false},
		{"at-most", "7", "", two, true}, {"at-most", "6", "", two, false},
		{"", "", "2", two, true}, {"", "", ">=3", two, false}, {"equals", "5", "2", two, false}, {"at-least", "5", "2", two, true},
	} {
		c := Check{Get: "x/y", Op: x.op, Value: x.value, Count: x.count}
		if got, seen, err := c.compare(x.values); got != x.want || err != nil {
			t.Errorf("%v %s %q count %q: %v (%s), %v", x.values, x.op, x.value, x.count, got, seen, err)
		}
	}
}

func TestExitCodes(t *testing.T) {
	for text, want := range map[string]string{"": "[0] false", "any": "[] false", "fails": "[] true", "7, 28": "[7 28] false"} {
		codes, fails, err := parseExit(text)
		if got := strings.TrimSpace(strings.Join([]string{sprint(codes), sprint(fails)}, " ")); got != want || err != nil {
			t.Errorf("%q: %s, %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"x", "256", "-1", "7,"} {
		if _, _, err := parseExit(text); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

// TestJSONPath reads fields as kubectl does.
func TestJSONPath(t *testing.T) {
	o := map[string]any{"spec": map[string]any{"type": "NodePort", "ports": []any{
		map[string]any{"port": int64(80), "name": "http"}, map[string]any{"port": int64(443)},
	}}}
	for expr, want := range map[string]string{
		"{.spec.type}": "NodePort", ".spec.type": "NodePort", "{.spec.ports[*].port}": "80|443", "{.spec.nothing}": "",
		"{.spec.ports[*].name}": "http", `{.spec.ports[?(@.port==443)].port}`: "443",
	} {
		got, err := findJSONPath(expr, o)
		if strings.Join(got, "|") != want || err != nil {
			t.Errorf("%s: %q, %v, want %q", expr, got, err, want)
		}
	}
	if _, err := findJSONPath("{.spec.ports[5].port}", o); err == nil {
		t.Error("an index that is not there is no error")
	}
}
