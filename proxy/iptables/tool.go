// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/execx"
)

// Variant is the kernel interface behind the iptables tools.
type Variant string

const (
	// VariantAuto takes the nft-backed tools where they are installed.
	VariantAuto Variant = ""
	// VariantNFT is iptables on nf_tables.
	VariantNFT Variant = "nft"
	// VariantLegacy is iptables on x_tables, where each change replaces a table.
	VariantLegacy Variant = "legacy"
)

// ErrNoTools means that the iptables tools are not installed; the message says
// what to install.
var ErrNoTools = errors.New("the iptables tools are missing")

// tool runs the restore and save programs of one variant.
type tool struct {
	exec     execx.Runner
	variant  Variant
	infix    string
	lockFile string
	// restore and save are program names by family.
	restoreName, saveName map[corev1.IPFamily]string
}

// newTool names the programs of a variant; infix is "-nft", "-legacy" or nothing.
func newTool(run execx.Runner, v Variant, infix, lockFile string) *tool {
	t := &tool{exec: run, variant: v, infix: infix, lockFile: lockFile, restoreName: map[corev1.IPFamily]string{}, saveName: map[corev1.IPFamily]string{}}
	for family, base := range map[corev1.IPFamily]string{corev1.IPv4Protocol: "iptables", corev1.IPv6Protocol: "ip6tables"} {
		t.restoreName[family], t.saveName[family] = base+infix+"-restore", base+infix+"-save"
	}
	return t
}

// findTool looks which programs there are by running them.
func findTool(ctx context.Context, run execx.Runner, want Variant, lockFile string) (*tool, error) {
	try := func(v Variant, infix string) (*tool, error) {
		t := newTool(run, v, infix, lockFile)
		out, err := run.Run(ctx, execx.Cmd{Path: t.restoreName[corev1.IPv4Protocol], Args: []string{"--version"}})
		if err != nil {
			return nil, err
		}
		// The version line is the tools' own way to name the variant:
		// "iptables-restore v1.8.9 (nf_tables)".
		if got := strings.Contains(string(out.Stdout), "nf_tables"); got != (v == VariantNFT) {
			return nil, fmt.Errorf("%s is not of the %s variant: %s", t.restoreName[corev1.IPv4Protocol], v, strings.TrimSpace(string(out.Stdout)))
		}
		return t, nil
	}
	candidates := []struct {
		v     Variant
		infix string
	}{{VariantNFT, "-nft"}, {VariantNFT, ""}, {VariantLegacy, "-legacy"}, {VariantLegacy, ""}}
	var failed []error
	for _, c := range candidates {
		if want != VariantAuto && want != c.v {
			continue
		}
		t, err := try(c.v, c.infix)
		if err == nil {
			return t, nil
		}
		failed = append(failed, err)
	}
	what := "any variant"
	if want != VariantAuto {
		what = "the " + string(want) + " variant"
	}
	return nil, fmt.Errorf("%w (%s): install the package iptables, which has iptables-nft-restore and iptables-legacy-restore: %w", ErrNoTools, what, errors.Join(failed...))
}

func (t *tool) env() []string {
	if t.lockFile == "" {
		return nil
	}
	return []string{"XTABLES_LOCKFILE=" + t.lockFile}
}

// restore loads text on top of what is there. An error carries the tool's own
// words and the line of the text that it names.
func (t *tool) restore(ctx context.Context, family corev1.IPFamily, text string) error {
	_, err := t.exec.Run(ctx, execx.Cmd{
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
		return fmt.Errorf("load %s rules: refused line %q: %w", family, bad, err)
	}
	return fmt.Errorf("load %s rules: %w", family, err)
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

// save reads a table as the tool prints it.
func (t *tool) save(ctx context.Context, family corev1.IPFamily, table string) (*savedTable, error) {
	out, err := t.exec.Run(ctx, execx.Cmd{Path: t.saveName[family], Args: []string{"-t", table}, Env: t.env()})
	if err != nil {
		return nil, fmt.Errorf("read table %s (%s): %w", table, family, err)
	}
	return parseSave(string(out.Stdout)), nil
}

// saveAll reads every table that is there, as text.
func (t *tool) saveAll(ctx context.Context, family corev1.IPFamily) (string, error) {
	out, err := t.exec.Run(ctx, execx.Cmd{Path: t.saveName[family], Env: t.env()})
	if err != nil {
		return "", fmt.Errorf("read the tables (%s): %w", family, err)
	}
	return string(out.Stdout), nil
}

// savedTable is one table as iptables-save prints it.
type savedTable struct {
	// names are the chains in the order of declaration; builtin holds those with
	// a policy.
	names   []string
	builtin map[string]bool
	// rules are the lines "-A chain …" of each chain, in order.
	rules map[string][]string
}

func parseSave(text string) *savedTable {
	t := &savedTable{builtin: map[string]bool{}, rules: map[string][]string{}}
	for l := range strings.Lines(text) {
		l = strings.TrimRight(l, "\n")
		switch {
		case strings.HasPrefix(l, ":"):
			name, rest, _ := strings.Cut(l[1:], " ")
			t.names = append(t.names, name)
			t.builtin[name] = !strings.HasPrefix(rest, "-")
		case strings.HasPrefix(l, "-A "):
			name, _, _ := strings.Cut(l[3:], " ")
			t.rules[name] = append(t.rules[name], squeeze(l))
		}
	}
	return t
}

// squeeze makes runs of spaces one: some matches print two.
func squeeze(l string) string {
	l = strings.TrimRight(l, " ")
	if !strings.Contains(l, "  ") {
		return l
	}
	return strings.Join(strings.FieldsFunc(l, func(r rune) bool { return r == ' ' }), " ")
}

// target is the chain or target that a rule jumps to; empty when none.
func target(rule string) string {
	_, after, found := strings.Cut(rule, " -j ")
	if !found {
		return ""
	}
	name, _, _ := strings.Cut(after, " ")
	return name
}

// has says whether the table has the chain.
func (t *savedTable) has(name string) bool {
	_, ok := t.builtin[name]
	return ok
}
