// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
)

//go:embed all:[0-9]*
var builtin embed.FS

// ErrNoLab says that no lab is called so.
var ErrNoLab = errors.New("no such lab")

var (
	numbered = regexp.MustCompile(`^([0-9]+)-`)
	stepID   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)
)

// slug is the folder's name without its number, fit for a namespace's name.
func (l *Lab) slug() string {
	s := strings.Map(func(r rune) rune {
		if r < unicode.MaxASCII && (unicode.IsLower(r) || unicode.IsDigit(r)) {
			return r
		}
		return '-'
	}, strings.ToLower(numbered.ReplaceAllString(l.Name, "")))
	s = strings.Trim(s[:min(len(s), 50)], "-")
	if s == "" {
		return "x"
	}
	return s
}

// file names one of the lab's files for messages.
func (l *Lab) file(name string) string {
	if l.Dir == "" {
		return "labs/" + l.Name + "/" + name
	}
	return filepath.Join(l.Dir, name)
}

// Builtin returns the names of the labs that are part of kplab, in order.
func Builtin() []string {
	entries, err := builtin.ReadDir(".")
	if err != nil {
		return nil // an embedded file system has its root
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names
}

// Find loads the lab that a person means: a folder by its path, or a built-in lab
// by its folder's name, its number, or the name after the number.
func Find(arg string) (*Lab, error) {
	if strings.ContainsRune(arg, filepath.Separator) || arg == "." || arg == ".." {
		dir, err := filepath.Abs(arg)
		if err != nil {
			return nil, err
		}
		if info, err := os.Stat(dir); err != nil {
			return nil, fmt.Errorf("lab %s: %w: %w", arg, ErrNoLab, err)
		} else if !info.IsDir() {
			return nil, fmt.Errorf("lab %s: %w: it is a file; a lab is a folder with a lab.yaml", arg, ErrNoLab)
		}
		return load(os.DirFS(dir), filepath.Base(dir), dir)
	}
	var slugs []string
	for _, name := range Builtin() {
		m := numbered.FindStringSubmatch(name)
		slug := numbered.ReplaceAllString(name, "")
		if arg == name || arg == slug || strings.TrimLeft(arg, "0") != "" && strings.TrimLeft(arg, "0") == strings.TrimLeft(m[1], "0") {
			sub, err := fs.Sub(builtin, name)
			if err != nil {
				return nil, err
			}
			return load(sub, name, "")
		}
		slugs = append(slugs, name)
	}
	hint := didYouMean(arg, slugs)
	if _, err := os.Stat(filepath.Join(arg, "lab.yaml")); err == nil {
		hint = fmt.Sprintf(": did you mean the folder ./%s?", arg)
	}
	return nil, fmt.Errorf("lab %q: %w%s", arg, ErrNoLab, hint)
}

// load reads and lints one folder.
func load(files fs.FS, name, dir string) (*Lab, error) {
	l := &Lab{Name: name, Dir: dir, files: files, docs: map[Lang]*document{}}
	data, err := fs.ReadFile(files, "lab.yaml")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, broken("%s: no such file; `kplab lab new NAME` writes a folder to begin with", l.file("lab.yaml"))
	} else if err != nil {
		return nil, broken("read %s: %w", l.file("lab.yaml"), err)
	}
	d := &decoder{file: l.file("lab.yaml")}
	d.document(data, l)
	if err := d.err(); err != nil {
		return nil, err
	}
	for _, lang := range []Lang{EN, ZH} {
		text, err := fs.ReadFile(files, textFile(lang))
		switch {
		case err == nil:
			l.docs[lang] = parseDocument(string(text))
		case lang == EN || !errors.Is(err, fs.ErrNotExist):
			return nil, broken("read the lab's text: %w", err)
		}
	}
	if len(l.Modes) == 0 {
		l.Modes = []string{"iptables", "nftables"}
	}
	if l.Digest, err = digest(files); err != nil {
		return nil, broken("lab %s: read its files: %w", name, err)
	}
	return l, l.lint()
}

// digest is a SHA-256 over every file below a folder and its path.
func digest(files fs.FS) (string, error) {
	h := sha256.New()
	err := fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := fs.ReadFile(files, path)
		if err != nil {
			return err
		}
		_, _ = fmt.Fprintf(h, "%s\x00%d\x00", path, len(data))
		_, _ = h.Write(data)
		return nil
	})
	return hex.EncodeToString(h.Sum(nil)), err
}

// doc returns the text in a language, in English where there is no other.
func (l *Lab) doc(lang Lang) *document {
	if doc, ok := l.docs[lang]; ok {
		return doc
	}
	return l.docs[EN]
}

// proxyModes are the modes that a lab may name.
var proxyModes = []string{"iptables", "nftables", "ipvs", "userspace", "none"}

// lintSeeds is for how many seeds the templates are tried.
const lintSeeds = 20

// lint says everything that is wrong with a lab, as far as reading it can tell.
func (l *Lab) lint() error {
	var faults []string
	bad := func(line int, format string, args ...any) {
		faults = append(faults, fmt.Sprintf("%s:%d: %s", l.file("lab.yaml"), line, fmt.Sprintf(format, args...)))
	}
	if l.Title.EN == "" {
		bad(1, "title: missing")
	}
	if len(l.Steps) == 0 {
		bad(1, "steps: a lab needs at least one")
	}
	for _, m := range l.Modes {
		if !slices.Contains(proxyModes, m) {
			bad(1, "modes: unknown mode %q%s", m, didYouMean(m, proxyModes))
		}
	}
	if l.Time != "" {
		if _, err := time.ParseDuration(l.Time); err != nil {
			bad(1, "time %q: want a time such as 15m", l.Time)
		}
	}
	ids := map[string]bool{}
	for i := range l.Steps {
		s := &l.Steps[i]
		if !stepID.MatchString(s.ID) {
			bad(s.Line, "step id %q: want lower-case letters, digits and '-'", s.ID)
		}
		if ids[s.ID] {
			bad(s.Line, "step id %q: another step has it", s.ID)
		}
		ids[s.ID] = true
	}
	l.lintTexts(bad)
	for seed := range uint64(lintSeeds) {
		values := placeholders()
		for k, v := range l.Values.draw(l.Name, seed) {
			values[k] = v
		}
		r, err := l.render(values)
		if err != nil {
			faults = append(faults, err.Error())
			break
		}
		before := len(faults)
		r.lintRendered(values, bad)
		if len(faults) > before {
			break // the other seeds would say the same again
		}
	}
	if len(faults) > 0 {
		return broken("%s", strings.Join(faults, "\n"))
	}
	return nil
}

// lintTexts compares the texts with the steps, and with one another.
func (l *Lab) lintTexts(bad func(int, string, ...any)) {
	for lang, doc := range l.docs {
		if len(doc.Sections) != len(l.Steps) {
			bad(1, "%s has %d steps (headings that begin with \"## \"), and lab.yaml has %d", textFile(lang), len(doc.Sections), len(l.Steps))
			continue
		}
		for i, s := range doc.Sections {
			if s.Text == "" {
				bad(l.Steps[i].Line, "step %s has no text in %s", l.Steps[i].ID, textFile(lang))
			}
			if en := l.docs[EN]; len(en.Sections) == len(doc.Sections) && len(en.Sections[i].Hints) != len(s.Hints) {
				bad(l.Steps[i].Line, "step %s has %d hints in %s and %d in %s", l.Steps[i].ID, len(s.Hints), textFile(lang), len(en.Sections[i].Hints), textFile(EN))
			}
		}
	}
}

// lintRendered looks at a lab whose templates are filled.
func (l *Lab) lintRendered(values map[string]any, bad func(int, string, ...any)) {
	actions := func(s *Step, what string, line int, all []Action) {
		for _, a := range all {
			l.lintAction(s, what, a, values, bad)
		}
		if len(all) == 0 && what != "setup" && what != "cleanup" {
			bad(line, "%s: nothing to do", what)
		}
	}
	actions(nil, "setup", 1, l.Setup)
	actions(nil, "cleanup", 1, l.Cleanup)
	for i := range l.Steps {
		s := &l.Steps[i]
		if s.Within != "" {
			if _, err := time.ParseDuration(s.Within); err != nil {
				bad(s.Line, "within %q: want a time such as 10s", s.Within)
			}
		}
		actions(s, "setup", s.Line, s.Setup)
		actions(s, "solution", s.Line, s.Solution)
		if len(s.Checks) == 0 {
			bad(s.Line, "step %s: no checks, so that nothing could tell whether it is done", s.ID)
		}
		if !slices.ContainsFunc(s.Checks, func(c Check) bool { return !c.Keep }) && len(s.Checks) > 0 {
			bad(s.Line, "step %s: every check is marked keep, and would pass before anything is done", s.ID)
		}
		for j := range s.Checks {
			l.lintCheck(s, &s.Checks[j], bad)
		}
		if len(s.Wrong) > 5 {
			bad(s.Line, "step %s: %d wrong answers, want at most five", s.ID, len(s.Wrong))
		}
		for _, w := range s.Wrong {
			actions(s, "wrong answer", w.Line, w.Do)
			if w.Why == "" {
				bad(w.Line, "wrong answer: why is missing")
			}
		}
	}
}

// isNode says whether a place is a node or the outside client.
func isNode(in string) bool { return in != "" && !strings.HasPrefix(in, "pod/") }

var callsKplab = regexp.MustCompile(`(^|[^\w./-])kplab\s`)

func (l *Lab) lintNode(s *Step, line int, in, run string, bad func(int, string, ...any)) {
	if s != nil && !l.needsNode(s) && (isNode(in) || callsKplab.MatchString(run)) {
		bad(line, "step %s enters a node or calls kplab: say node: true, so that it is skipped on clusters where that cannot be", s.ID)
	}
}

func (l *Lab) lintAction(s *Step, what string, a Action, values map[string]any, bad func(int, string, ...any)) {
	if (a.Apply == "") == (a.Run == "") {
		bad(a.Line, "%s: want either apply or run", what)
		return
	}
	if a.In != "" && a.Run == "" {
		bad(a.Line, "%s: in goes with run", what)
	}
	l.lintNode(s, a.Line, a.In, a.Run, bad)
	if a.Apply == "" {
		return
	}
	text, err := l.manifest(a.Apply, values)
	if err == nil {
		_, err = decodeObjects(text)
	}
	if err != nil {
		bad(a.Line, "%s: %v", what, err)
	}
}

// manifest returns the YAML that an action applies: the file, or the text itself.
func (l *Lab) manifest(apply string, values map[string]any) (string, error) {
	if strings.Contains(apply, "\n") || strings.Contains(apply, "apiVersion:") {
		return apply, nil
	}
	data, err := fs.ReadFile(l.files, apply)
	if err != nil {
		return "", fmt.Errorf("apply %s: no such file in the lab's folder: %w", apply, err)
	}
	text, err := fill(string(data), values)
	if err != nil {
		return "", fmt.Errorf("%s: %w", l.file(apply), err)
	}
	return text, nil
}
