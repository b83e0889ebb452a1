// SPDX-License-Identifier: Apache-2.0

package store

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	storagetesting "k8s.io/apiserver/pkg/storage/testing"
)

// Every function that upstream's suite exports is called, on the store itself
// and through the watch cache, or README.md says why not. A new one in a later
// version fails this test.
func TestSuiteIsComplete(t *testing.T) {
	all := exported(t)
	if len(all) < 60 {
		t.Fatalf("only %d functions found: %v", len(all), all)
	}
	for layer, files := range map[string][]string{
		"store": {"suite_test.go", "bench_test.go"},
		"cache": {"cacher_test.go", "bench_test.go"},
	} {
		called, excused := calls(t, files), excuses(t, layer)
		for _, name := range all {
			switch {
			case called[name] && excused[name]:
				t.Errorf("%s: %s is called, but README.md excuses it", layer, name)
			case !called[name] && !excused[name]:
				t.Errorf("%s: %s is neither called nor excused in README.md", layer, name)
			}
		}
		for name := range excused {
			if !slices.Contains(all, name) {
				t.Errorf("%s: README.md excuses %s, which does not exist", layer, name)
			}
		}
	}
}

// exported names the functions of the suite: all that begin with Run.
func exported(t *testing.T) []string {
	t.Helper()
	file, _ := runtime.FuncForPC(reflect.ValueOf(storagetesting.RunTestCreate).Pointer()).FileLine(0)
	sources, err := filepath.Glob(filepath.Join(filepath.Dir(file), "*.go"))
	if err != nil || len(sources) == 0 {
		t.Fatalf("the suite's sources are not at %s: %v", filepath.Dir(file), err)
	}
	var names []string
	for _, path := range sources {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Run") {
				names = append(names, fn.Name.Name)
			}
		}
	}
	return names
}

// calls collects what the given files of this package use of the suite.
func calls(t *testing.T, files []string) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	for _, path := range files {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok {
				if pkg, ok := sel.X.(*ast.Ident); ok && pkg.Name == "storagetesting" {
					found[sel.Sel.Name] = true
				}
			}
			return true
		})
	}
	return found
}

// excuses reads the table in README.md: | `RunX` | store or cache | reason |.
func excuses(t *testing.T, layer string) map[string]bool {
	t.Helper()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("(?m)^\\| `(Run\\w+)` \\| (\\w+) \\| (.+) \\|$")
	found := map[string]bool{}
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		if m[2] == layer && len(m[3]) > 10 {
			found[m[1]] = true
		}
	}
	return found
}
