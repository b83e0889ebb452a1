// SPDX-License-Identifier: Apache-2.0

// Package xtables runs the iptables tools for the proxy modes that write iptables
// Rules: iptables-restore and iptables-save of either variant, in a node's
// namespace, and what they print, read as chains and rules. It knows no chain.
package xtables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/execx"
)

// Variant is the kernel interface behind the iptables tools.
type Variant string

const (
	// Auto takes the nft-backed tools where they are installed.
	Auto Variant = ""
	// NFT is iptables on nf_tables.
	NFT Variant = "nft"
	// Legacy is iptables on x_tables, where each change replaces a table.
	Legacy Variant = "legacy"
)

// ErrNoTools means that the iptables tools are not installed; the message says
// what to install.
var ErrNoTools = errors.New("the iptables tools are missing")

// Tool runs the restore and save programs of one variant.
type Tool struct {
	// Exec runs them: inside the namespace whose rules are meant.
	Exec execx.Runner
	// Variant is the kernel interface behind them, Infix what their names have for
	// it: "-nft", "-legacy" or nothing.
	Variant  Variant
	Infix    string
	lockFile string
	// restore and save are program names by family.
	restoreName, saveName map[corev1.IPFamily]string
}

// New names the programs of a variant. lockFile is the legacy tools' lock: give
// each namespace its own, for the default is one for the whole machine.
func New(run execx.Runner, v Variant, infix, lockFile string) *Tool {
	t := &Tool{Exec: run, Variant: v, Infix: infix, lockFile: lockFile, restoreName: map[corev1.IPFamily]string{}, saveName: map[corev1.IPFamily]string{}}
	for family, base := range map[corev1.IPFamily]string{corev1.IPv4Protocol: "iptables", corev1.IPv6Protocol: "ip6tables"} {
		t.restoreName[family], t.saveName[family] = base+infix+"-restore", base+infix+"-save"
	}
	return t
}

// Find looks which programs there are by running them. The error wraps ErrNoTools
// when there are none of the variant asked for.
func Find(ctx context.Context, run execx.Runner, want Variant, lockFile string) (*Tool, error) {
	try := func(v Variant, infix string) (*Tool, error) {
		t := New(run, v, infix, lockFile)
		out, err := run.Run(ctx, execx.Cmd{Path: t.restoreName[corev1.IPv4Protocol], Args: []string{"--version"}})
		if err != nil {
			return nil, err
		}
		// The version line is the tools' own way to name the variant:
		// "iptables-restore v1.8.9 (nf_tables)".
		if got := strings.Contains(string(out.Stdout), "nf_tables"); got != (v == NFT) {
			return nil, fmt.Errorf("%s is not of the %s variant: %s", t.restoreName[corev1.IPv4Protocol], v, strings.TrimSpace(string(out.Stdout)))
		}
		return t, nil
	}
	candidates := []struct {
		v     Variant
		infix string
	}{{NFT, "-nft"}, {NFT, ""}, {Legacy, "-legacy"}, {Legacy, ""}}
	var failed []error
	for _, c := range candidates {
		if want != Auto && want != c.v {
			continue
		}
		t, err := try(c.v, c.infix)
		if err == nil {
			return t, nil
		}
		failed = append(failed, err)
	}
	what := "any variant"
	if want != Auto {
		what = "the " + string(want) + " variant"
	}
	return nil, fmt.Errorf("%w (%s): install the package iptables, which has iptables-nft-restore and iptables-legacy-restore: %w", ErrNoTools, what, errors.Join(failed...))
}

func (t *Tool) env() []string {
	if t.lockFile == "" {
		return nil
	}
	return []string{"XTABLES_LOCKFILE=" + t.lockFile}
}

// Restore loads text on top of what is there. An error carries the tool's own
// words and the line of the text that it names.
func (t *Tool) Restore(ctx context.Context, family corev1.IPFamily, text string) error {
	_, err := t.Exec.Run(ctx, execx.Cmd{
		Path: t.restoreName[family],
		// Waiting for the lock is the legacy variant's; the other ignores it.
		Args: []string{"--noflush", "-w", "5"}, Env: t.env(), Stdin: []byte(text),
	})
	if err == nil {
		return nil
	}
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("%w: install the package iptables: %w", ErrNoTools, err)
	}
	if bad := offendingLine(err, text); bad != "" {
		return fmt.Errorf("load %s Rules: refused line %q: %w", family, bad, err)
	}
	return fmt.Errorf("load %s Rules: %w", family, err)
}

var lineNumber = regexp.MustCompile(`line:? *([0-9]+)`)

// offendingLine finds the line whose number stands in the tool's message. It is
// for people only; nothing is decided by it.
func offendingLine(err error, text string) string {
	var failed *execx.Error
	if !errors.As(err, &failed) {
		return ""
	}
	m := lineNumber.FindStringSubmatch(failed.Stderr)
	if m == nil {
		return ""
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		return ""
	}
	for i := 1; ; i++ {
		l, rest, more := strings.Cut(text, "\n")
		if i == n {
			return l
		}
		if !more {
			return ""
		}
		text = rest
	}
}

// Save reads a table as the tool prints it.
func (t *Tool) Save(ctx context.Context, family corev1.IPFamily, table string) (*Saved, error) {
	out, err := t.Exec.Run(ctx, execx.Cmd{Path: t.saveName[family], Args: []string{"-t", table}, Env: t.env()})
	if err != nil {
		return nil, fmt.Errorf("read table %s (%s): %w", table, family, err)
	}
	return Parse(string(out.Stdout)), nil
}

// SaveAll reads every table that is there, as text.
func (t *Tool) SaveAll(ctx context.Context, family corev1.IPFamily) (string, error) {
	out, err := t.Exec.Run(ctx, execx.Cmd{Path: t.saveName[family], Env: t.env()})
	if err != nil {
		return "", fmt.Errorf("read the tables (%s): %w", family, err)
	}
	return string(out.Stdout), nil
}

// Saved is one table as iptables-save prints it.
type Saved struct {
	// Names are the chains in the order of declaration; Builtin holds each, and says
	// whether it has a policy.
	Names   []string
	Builtin map[string]bool
	// Rules are the lines "-A chain …" of each chain, in order.
	Rules map[string][]string
}

// Parse reads what iptables-save printed of one table.
func Parse(text string) *Saved {
	t := &Saved{Builtin: map[string]bool{}, Rules: map[string][]string{}}
	for l := range strings.Lines(text) {
		l = strings.TrimRight(l, "\n")
		switch {
		case strings.HasPrefix(l, ":"):
			name, rest, _ := strings.Cut(l[1:], " ")
			t.Names = append(t.Names, name)
			t.Builtin[name] = !strings.HasPrefix(rest, "-")
		case strings.HasPrefix(l, "-A "):
			name, _, _ := strings.Cut(l[3:], " ")
			t.Rules[name] = append(t.Rules[name], Squeeze(l))
		}
	}
	return t
}

// Squeeze makes runs of spaces one: some matches print two.
func Squeeze(l string) string {
	l = strings.TrimRight(l, " ")
	if !strings.Contains(l, "  ") {
		return l
	}
	return strings.Join(strings.FieldsFunc(l, func(r rune) bool { return r == ' ' }), " ")
}

// Target is the chain or target that a rule jumps to; empty when none.
func Target(rule string) string {
	_, after, found := strings.Cut(rule, " -j ")
	if !found {
		return ""
	}
	name, _, _ := strings.Cut(after, " ")
	return name
}

// Has says whether the table has the chain.
func (t *Saved) Has(name string) bool {
	_, ok := t.Builtin[name]
	return ok
}

// Declare writes the line that makes a chain, or empties it when it is there.
func Declare(b *strings.Builder, name string) {
	b.WriteByte(':')
	b.WriteString(name)
	b.WriteString(" - [0:0]\n")
}

// Try loads rules, given by table, into chains of their own and reads them back: the
// way to find out what kernel and tools can do. It leaves the chains behind, so use a
// namespace that is thrown away.
func (t *Tool) Try(ctx context.Context, rules map[string][]string) error {
	const chain = "KPLAB-PROBE"
	want := map[string][]string{}
	var b strings.Builder
	for _, table := range slices.Sorted(maps.Keys(rules)) {
		for _, r := range rules[table] {
			want[table] = append(want[table], "-A "+chain+" "+r)
		}
		b.WriteString("*" + table + "\n")
		Declare(&b, chain)
		b.WriteString(strings.Join(want[table], "\n") + "\nCOMMIT\n")
	}
	if err := t.Restore(ctx, corev1.IPv4Protocol, b.String()); err != nil {
		return err
	}
	saved, err := t.SaveAll(ctx, corev1.IPv4Protocol)
	if err != nil {
		return err
	}
	for part := range strings.SplitSeq(saved, "COMMIT\n") {
		_, table, _ := strings.Cut(part, "*")
		table, _, _ = strings.Cut(table, "\n")
		if got := Parse(part).Rules[chain]; want[table] != nil && !slices.Equal(got, want[table]) {
			return fmt.Errorf("rules of table %s do not read back as written: wrote %q, read %q", table, want[table], got)
		}
		delete(want, table)
	}
	for table := range want {
		return fmt.Errorf("rules of table %s were written and are not there", table)
	}
	return nil
}
