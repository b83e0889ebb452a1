// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// The behaviour of Services, Endpoints and EndpointSlices is numbered by rows, a
// letter for the subject and a number. A test case is named by its row, with a
// word more where a row has several: "A08", "A08 leading zeros".
//
//	A allocation, defaults, uniqueness     I contents of slices and Endpoints
//	B immutable and wiped fields           K load balancers, external IPs
//	E node ports                           P dual-stack
//	H Endpoints and slices by hand         Q what kubectl shows

// rowGroups are the rows that this API and the controllers of Services answer for.
var rowGroups = []string{
	"A01-A42", "B01-B21", "E01-E08", "H09", "H14-H16", "I01-I20",
	"K09", "K10", "K18", "K20", "K25-K29", "P01-P15", "Q01-Q10",
}

// rowsElsewhere are rows of those groups that no case here is named by, and why.
var rowsElsewhere = map[string]string{
	"A20": "is of servers before 1.36; A21 is what this one does",
	"K28": "is about packets: package proxytest",
	"P15": "is about packets: package proxytest",
	"I09": "is what kubectl prints: transcripts tutorial and kubectl-output",
	"Q02": "is what kubectl prints: transcript kubectl-output",
	"Q03": "is kubectl's: transcript kubectl-streams",
	"Q04": "is kubectl's: transcript kubectl-streams",
	"Q05": "is kubectl's: transcript kubectl-workloads",
	"Q06": "is what kubectl prints: transcript kubectl-output",
	"Q07": "is kubectl's: transcript kubectl-output",
}

// TestEveryRowHasACase looks for the rows among the names of the cases of all
// tests of the API and of the controllers.
func TestEveryRowHasACase(t *testing.T) {
	found := map[string]bool{}
	for _, root := range []string{"..", "../../controller"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			for _, name := range caseNames(file) {
				for _, row := range regexp.MustCompile(`[A-Z]\d\d`).FindAllString(regexp.MustCompile(`^([A-Z]\d\d,? ?)+`).FindString(name), -1) {
					found[row] = true
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, row := range expand(t, rowGroups) {
		_, elsewhere := rowsElsewhere[row]
		if !found[row] && !elsewhere {
			t.Errorf("no case is named by row %s", row)
		}
		if found[row] && elsewhere {
			t.Errorf("row %s has a case, and is listed as one of other tests", row)
		}
	}
}

// caseNames are the names of the cases in a file: the field row, id or name of a
// table's element, its first value, or the name given to a Run method.
func caseNames(file *ast.File) []string {
	var names []string
	add := func(e ast.Expr) {
		if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			if name, err := strconv.Unquote(lit.Value); err == nil {
				names = append(names, name)
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CompositeLit:
			for i, e := range n.Elts {
				kv, keyed := e.(*ast.KeyValueExpr)
				if !keyed && i == 0 {
					add(e)
				}
				if keyed {
					if key, ok := kv.Key.(*ast.Ident); ok && slices.Contains([]string{"row", "id", "name"}, key.Name) {
						add(kv.Value)
					}
				}
			}
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.SelectorExpr); ok && f.Sel.Name == "Run" && len(n.Args) > 0 {
				add(n.Args[0])
			}
		}
		return true
	})
	return names
}

// expand makes "A01-A03" into its rows.
func expand(t *testing.T, groups []string) []string {
	t.Helper()
	var rows []string
	for _, g := range groups {
		first, last, isRange := strings.Cut(g, "-")
		if !isRange {
			last = first
		}
		from, errFrom := strconv.Atoi(first[1:])
		to, errTo := strconv.Atoi(last[1:])
		if errFrom != nil || errTo != nil {
			t.Fatalf("group %q", g)
		}
		for i := from; i <= to; i++ {
			rows = append(rows, fmt.Sprintf("%c%02d", first[0], i))
		}
	}
	return rows
}

// serviceCase is a case about one Service named x.
type serviceCase struct {
	row string
	// deps are the ranges, a lab's when empty. kube-dns has 10.96.0.10 and
	// other has node port 30011.
	deps        Deps
	spec        string
	annotations map[string]string
	// then, when given, changes the created Service as a patch would.
	then func(s *corev1.Service)
	// refused is what the answer to the last step says, with code (422 when 0).
	refused string
	code    int32
	// warned are the warnings of the last step, all of them.
	warned []string
	// want looks at what is stored after the last step and before it; old is nil
	// without then.
	want func(s, old *corev1.Service) error
	// do replaces all of the above.
	do func(t *testing.T, b serviceBench)
}

func runServiceCases(t *testing.T, cases []serviceCase) {
	t.Helper()
	for _, tc := range cases {
		t.Run(tc.row, func(t *testing.T) {
			if !tc.deps.ServiceCIDR.IsValid() {
				tc.deps = serviceDeps("10.96.0.0/12", 2768)
			}
			b := serviceBench{newBench(t, tc.deps, serviceKind())}
			if tc.do != nil {
				tc.do(t, b)
				b.agree()
				return
			}
			b.mustCreate("kube-dns", "clusterIP: 10.96.0.10\nports: [{name: dns, port: 53, protocol: UDP}]")
			b.mustCreate("other", "type: NodePort\nports: [{port: 80, nodePort: 30011}]")
			tc.run(t, b)
			b.agree()
		})
	}
}

func (tc serviceCase) run(t *testing.T, b serviceBench) {
	t.Helper()
	before := b.taken()
	fresh := b.service("x", tc.spec)
	fresh.Annotations = tc.annotations
	b.warnings.take()
	out, err := b.create("services", fresh, false)
	var old *corev1.Service
	if tc.then != nil {
		if err != nil {
			t.Fatal(err)
		}
		old = b.get("services", "x").(*corev1.Service)
		before = b.taken()
		b.warnings.take()
		out, err = b.tryPatch("x", tc.then)
	}
	if got := b.warnings.take(); !slices.Equal(got, tc.warned) {
		t.Errorf("warnings %q, want %q", got, tc.warned)
	}
	if tc.refused != "" {
		wantError(t, err, tc.refused)
		if tc.code == 0 {
			tc.code = 422
		}
		if status, ok := err.(apierrors.APIStatus); !ok || status.Status().Code != tc.code { //nolint:errorlint // the registry returns it bare
			t.Errorf("the answer is %v, want code %d", apierrors.ReasonForError(err), tc.code)
		}
		if after := b.taken(); !slices.Equal(before, after) {
			t.Errorf("A17: taken before %q, after %q", before, after)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	s := out.(*corev1.Service)
	if stored := b.get("services", "x").(*corev1.Service); !same(stored.Spec, s.Spec) || !same(stored.Status, s.Status) {
		t.Errorf("answered %+v\nstored %+v", s.Spec, stored.Spec)
	}
	if tc.want != nil {
		if err := tc.want(s, old); err != nil {
			t.Error(err)
		}
	}
}
