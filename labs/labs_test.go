// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
)

// TestBuiltinLabs loads every lab, which lints it, and looks at what only the labs of
// kplab owe: both languages in every sentence, wrong answers, hints.
func TestBuiltinLabs(t *testing.T) {
	names := Builtin()
	if len(names) == 0 {
		t.Fatal("no labs")
	}
	slugs := map[string]string{}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			l, err := Find(name)
			if err != nil {
				t.Fatal(err)
			}
			if other, taken := slugs[l.slug()]; taken {
				t.Errorf("the namespace %s is that of %s too", l.Namespace(), other)
			}
			slugs[l.slug()] = name
			if l.docs[ZH] == nil {
				t.Fatal("no lab.zh.md")
			}
			both := func(what string, text Text) {
				if text.EN == "" || text.ZH == "" {
					t.Errorf("%s: not in both languages: %+v", what, text)
				}
			}
			both("title", l.Title)
			for _, o := range l.Objectives {
				both("objective", o)
			}
			// A lab in which something is to be mended has one step, and more wrong ways.
			if l.Time == "" || len(l.Objectives) == 0 || len(l.Steps) < 2 && len(l.Steps[0].Wrong) < 4 {
				t.Errorf("want a time, objectives and at least two steps or four wrong answers: %q, %d, %d", l.Time, len(l.Objectives), len(l.Steps))
			}
			for i, s := range l.Steps {
				if len(s.Solution) == 0 || len(s.Wrong) == 0 {
					t.Errorf("step %s: %d actions solve it and %d wrong answers", s.ID, len(s.Solution), len(s.Wrong))
				}
				for _, c := range s.Checks {
					both("step "+s.ID, c.Says)
					if c.Missing.EN != "" {
						both("step "+s.ID, c.Missing)
					}
				}
				for lang, doc := range l.docs {
					if len(doc.Sections[i].Hints) == 0 || doc.Sections[i].Explained == "" {
						t.Errorf("step %s has no hint or no explanation in %s", s.ID, textFile(lang))
					}
				}
			}
		})
	}
}

const goodMD = "intro\n\n## One\ndo it\n\n### Hint\nh\n"

const goodYAML = `title: T
steps:
- id: one
  checks:
  - {says: it answers, run: "true", in: pod/client}
  solution:
  - run: kubectl get pods
`

// TestFaultsAreNamed takes what authors get wrong, and wants the line and the cure.
func TestFaultsAreNamed(t *testing.T) {
	for _, x := range []struct{ name, from, to, want string }{
		{"typo in a key", "checks:", "cheks:", `lab.yaml:4: unknown key "cheks": did you mean "checks"?`},
		{"typo in a check's key", "in: pod", "inn: pod", `lab.yaml:5: unknown key "inn": did you mean "in"?`},
		{"twice", "title: T\n", "title: T\ntitle: U\n", `lab.yaml:2: key "title" stands here twice`},
		{"a list is wanted", "solution:\n  - run: kubectl get pods", "solution: kubectl", `lab.yaml:6: want a list, found "kubectl"`},
		{"no solution", "  solution:\n  - run: kubectl get pods\n", "", "lab.yaml:3: solution: nothing to do"},
		{"template without quotes", "title: T", "title: {{.x}}", "has to stand in quotes"},
		{"unknown value", "run: \"true\"", `run: "{{.nod1}}"`, `lab.yaml:5: template: no value is called "nod1": did you mean "node1"?`},
		{"node unsaid", "in: pod/client", "in: node1", "say node: true"},
		{"calls kplab", `run: "true"`, `run: "kplab fault list"`, "say node: true"},
		{"mode", "title: T", "title: T\nmodes: [iptable]", `unknown mode "iptable": did you mean "iptables"?`},
		{"nothing to check", `run: "true", in: pod/client`, `modes: []`, "want either run (a command) or get (an object)"},
		{"cannot fail", `run: "true"`, `run: "true", exit: any`, "it cannot fail"},
		{"regexp", `run: "true"`, `run: "true", stdout: "("`, "check: stdout: error parsing regexp"},
		{"bound", `run: "true"`, `run: "true", find: x, count: many`, `"many": want a number or a range`},
		{"op", `run: "true", in: pod/client`, `get: service/web, jsonpath: "{.x}", op: equal`, `unknown op "equal": did you mean "equals"?`},
		{"jsonpath", `run: "true", in: pod/client`, `get: service/web, jsonpath: "{.x["`, "jsonpath"},
		{"no file", "run: kubectl get pods", "apply: web.yml", "web.yml: no such file in the lab's folder"},
		{"no object", "run: kubectl get pods", "apply: bad.yaml", "an object without apiVersion, kind or metadata.name"},
		{"no sentence", "says: it answers, ", "", "says is missing"},
		{"keep alone", `run: "true"`, `run: "true", keep: true`, "every check is marked keep"},
		{"two steps", "steps:", "steps:\n- id: zero\n  checks: [{says: s, run: x}]\n  solution: [{run: x}]", "lab.md has 1 steps"},
		{"id", "id: one", "id: One", `step id "One"`},
		{"within", "id: one", "id: one\n  within: soon", `within "soon": want a time`},
		{"empty range", "title: T", "title: T\nvalues: {port: 9-8}", "the range 9-8 is empty"},
		{"own value", "title: T", "title: T\nvalues: {node1: [x]}", "kplab gives this one itself"},
		{"language", "title: T", "title: {en: T, cn: T}", `unknown language "cn"`},
	} {
		t.Run(x.name, func(t *testing.T) {
			if !strings.Contains(goodYAML, x.from) {
				t.Fatalf("%q is not in the good lab", x.from)
			}
			text := strings.Replace(goodYAML, x.from, x.to, 1)
			_, err := load(fstest.MapFS{
				"lab.yaml": {Data: []byte(text)}, "lab.md": {Data: []byte(goodMD)}, "bad.yaml": {Data: []byte("kind: Pod\n")},
			}, "x", "")
			if err == nil || !strings.Contains(err.Error(), x.want) {
				t.Errorf("error %v\nwant %s", err, x.want)
			}
		})
	}
	if _, err := load(fstest.MapFS{"lab.yaml": {Data: []byte(goodYAML)}, "lab.md": {Data: []byte(goodMD)}}, "x", ""); err != nil {
		t.Errorf("the good lab: %v", err)
	}
}

// TestLanguagesAgree wants the same steps and hints in both.
func TestLanguagesAgree(t *testing.T) {
	for _, x := range []struct{ zh, want string }{
		{"## 一\n做\n### 提示\nh\n", ""},
		{"## 一\n做\n", "has 0 hints in lab.zh.md and 1 in lab.md"},
		{"## 一\n做\n## 二\n做\n", "lab.zh.md has 2 steps"},
		{"## 一\n### 提示\nh\n", "has no text in lab.zh.md"},
	} {
		_, err := load(fstest.MapFS{
			"lab.yaml": {Data: []byte(goodYAML)}, "lab.md": {Data: []byte(goodMD)}, "lab.zh.md": {Data: []byte(x.zh)},
		}, "x", "")
		if x.want == "" && err != nil || x.want != "" && (err == nil || !strings.Contains(err.Error(), x.want)) {
			t.Errorf("%q: %v, want %q", x.zh, err, x.want)
		}
	}
}

func TestDocument(t *testing.T) {
	d := parseDocument("# T\nintro\n## One \ntext\n```\n## no heading\n### Hint no\n```\n### Note\nstill text\n### Hint\nfirst\n### Hint 2\nsecond\n### Explained\nwhy\n## Two\nx\n")
	if d.Intro != "# T\nintro" || len(d.Sections) != 2 {
		t.Fatalf("%+v", d)
	}
	s := d.Sections[0]
	if s.Title != "One" || s.Line != 3 || !strings.Contains(s.Text, "## no heading") || !strings.Contains(s.Text, "still text") {
		t.Errorf("%+v", s)
	}
	if strings.Join(s.Hints, "|") != "first|second" || s.Explained != "why" {
		t.Errorf("hints %q, explained %q", s.Hints, s.Explained)
	}
}

func TestPrograms(t *testing.T) {
	in := "kubectl in prose, `kubectl get pods`, `kplab exec node1 -- ip addr`\n```\n$ kubectl x | kubectl y\nx=$(kubectl z)\nkplab kubectl w\n```\n"
	want := "kubectl in prose, `k kubectl get pods`, `k exec node1 -- ip addr`\n```\n$ k kubectl x | k kubectl y\nx=$(k kubectl z)\nk kubectl w\n```\n"
	if got := withPrograms(in, "k", "k kubectl"); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

// TestSeeds wants the same for the same seed, and something else for some other.
func TestSeeds(t *testing.T) {
	v := Values{"app": {choices: []any{"a", "b", "c"}}, "port": {low: 8000, high: 8999}}
	if zero := v.draw("l", 0); zero["app"] != "a" || zero["port"] != "8000" {
		t.Errorf("seed 0: %v, want the first of each", zero)
	}
	seen := map[any]bool{}
	ports := map[any]bool{}
	for seed := range uint64(50) {
		one, two := v.draw("l", seed), v.draw("l", seed)
		if one["app"] != two["app"] || one["port"] != two["port"] {
			t.Errorf("seed %d: %v and %v", seed, one, two)
		}
		seen[one["app"]], ports[one["port"]] = true, true
		alone := Values{"port": v["port"]}.draw("l", seed)
		if alone["port"] != one["port"] {
			t.Errorf("seed %d: another value moves this one", seed)
		}
	}
	if len(seen) != 3 || len(ports) < 30 {
		t.Errorf("50 seeds gave %v and %d ports", seen, len(ports))
	}
}

func TestBounds(t *testing.T) {
	for text, x := range map[string][2]float64{"3": {3, 3}, ">=2": {2, 1e18}, "<=4": {0, 4}, "2-4": {2, 4}, "5%-75%": {5, 75}, ">= 10%": {10, 1e18}} {
		if low, high, err := parseBound(text); err != nil || low != x[0] || high != x[1] {
			t.Errorf("%q: %g to %g, %v", text, low, high, err)
		}
	}
	for _, text := range []string{"", "x", "4-2", ">=", "1-", "-3"} {
		if low, high, err := parseBound(text); err == nil {
			t.Errorf("%q: %g to %g, want an error", text, low, high)
		}
	}
}

// TestFind takes the names that people use.
func TestFind(t *testing.T) {
	for _, arg := range []string{"3", "03", "clusterip", "03-clusterip"} {
		if l, err := Find(arg); err != nil || l.Name != "03-clusterip" {
			t.Errorf("%s: %v, %v", arg, l, err)
		}
	}
	for arg, want := range map[string]string{
		"clusteripp": "no such lab", "03-clusterp": `did you mean "03-clusterip"?`, "./nowhere": "no such lab", "99": "no such lab", "0": "no such lab",
	} {
		if _, err := Find(arg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", arg, err, want)
		}
	}
}

// TestNew wants a folder that loads, and that nothing is written over.
func TestNew(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "my-lab")
	files, err := New(dir)
	if err != nil || len(files) != 4 {
		t.Fatalf("%v, %v", files, err)
	}
	l, err := Find(dir)
	if err != nil || l.Namespace() != "lab-my-lab" {
		t.Fatalf("%v, %v", l, err)
	}
	before := l.Digest
	if _, err := New(dir); err == nil || !strings.Contains(err.Error(), "exists already") {
		t.Errorf("a second time: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "more"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if l, err = Find(dir); err != nil || l.Digest == before {
		t.Errorf("the digest stays although a file was added: %v", err)
	}
}
