// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"bytes"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/kplab/kplab/"

// pkg is what `go list -json` says of one package.
type pkg struct {
	ImportPath string
	Imports    []string
}

// listPackages returns every package of the module, its path cut to what
// follows the module's name.
func listPackages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	cmd.Dir = repoRoot(t)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		p.ImportPath = strings.TrimPrefix(p.ImportPath, module)
		all = append(all, p)
	}
	if len(all) < 5 {
		t.Fatalf("go list found only %d packages: the rules below would prove nothing", len(all))
	}
	return all
}

func repoRoot(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			t.Fatal("no go.mod above the working directory")
		}
		dir = parent
	}
}

// TestImportsGoDown checks each room against the list of what it may import.
func TestImportsGoDown(t *testing.T) {
	for _, p := range listPackages(t) {
		room := roomOf(p.ImportPath)
		if room == "" {
			t.Errorf("package %s is in no room: add it to rooms, and say why in docs/design", p.ImportPath)
			continue
		}
		for _, imp := range p.Imports {
			own, ok := strings.CutPrefix(imp, module)
			if !ok {
				continue
			}
			if other := roomOf(own); !mayImport(room, other) {
				t.Errorf("%s (room %s) imports %s (room %s): imports go down only; it may import %v",
					p.ImportPath, room, own, other, rooms[row(room)])
			}
		}
	}
}

// TestModesAreRooms checks what the tree alone cannot show: what is not there.
func TestModesAreRooms(t *testing.T) {
	for _, x := range []struct {
		from, to string
		may      bool
	}{
		{"proxy/iptables", "proxy", true},
		{"proxy/iptables", "proxy/iptables/testdata", true},
		{"proxy/iptables", "internal/netns", true},
		{"proxy/iptables", "proxy/nftables", false},
		{"proxy/iptables", "proxy/proxytest", false},
		{"proxy", "proxy/iptables", false},
		{"proxy/proxytest", "proxy/iptables", true},
		{"cluster", "proxy/iptables", true},
		{"cluster", "proxy/proxytest", false},
		{"node", "proxy/iptables", false},
		{"apiserver", "apiserver/store", true},
	} {
		if got := mayImport(roomOf(x.from), roomOf(x.to)); got != x.may {
			t.Errorf("%s may import %s: %v, want %v", x.from, x.to, got, x.may)
		}
	}
}

// TestOneOwnerPerLibrary checks that a library is used from its one room.
func TestOneOwnerPerLibrary(t *testing.T) {
	for _, p := range listPackages(t) {
		for _, imp := range p.Imports {
			for lib, owners := range owners {
				if imp != lib && !strings.HasPrefix(imp, lib+"/") {
					continue
				}
				if !slices.ContainsFunc(owners, func(o string) bool {
					return p.ImportPath == o || strings.HasPrefix(p.ImportPath, o+"/")
				}) {
					t.Errorf("%s imports %s, which belongs to %v", p.ImportPath, lib, owners)
				}
			}
		}
	}
}

// TestHouseRules reads every Go file: a licence line first, a package comment
// in each package, no file so long that it holds two ideas.
func TestHouseRules(t *testing.T) {
	root := repoRoot(t)
	commented := map[string]bool{}
	seen := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "testdata" || d.Name() == "bin") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		if !bytes.HasPrefix(src, []byte("// SPDX-License-Identifier: Apache-2.0\n")) {
			t.Errorf("%s: the first line is not the licence line", rel)
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, src, parser.ParseComments|parser.PackageClauseOnly)
		if err != nil {
			return err
		}
		generated := ast.IsGenerated(f)
		if n := bytes.Count(src, []byte("\n")); n > 600 && !generated && !strings.HasSuffix(path, "_test.go") {
			t.Errorf("%s: %d lines; above 600 a file holds two ideas", rel, n)
		}
		dir := filepath.Dir(rel)
		if !strings.HasSuffix(path, "_test.go") {
			seen[dir] = rel
			if f.Doc != nil {
				commented[dir] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for dir, file := range seen {
		if !commented[dir] {
			t.Errorf("%s: package without a comment that says what it is for (for example in %s)", dir, file)
		}
	}
}
