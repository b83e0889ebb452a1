// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/proxy"
)

// kernelState is what a proxy may write in a node's kernel, read with the tools that a
// person would use, and the connections that the kernel tracks there.
type kernelState struct {
	sections []stateSection
	flows    map[string]bool
}

// stateSection is what one tool says, each line with the place in which it stands.
type stateSection struct {
	title string
	lines []string
}

// stateTools are asked in this order; one that is not installed has nothing to say. The
// legacy tools would make the tables that they are asked for, so they are left out where
// the kernel has none.
var stateTools = []struct {
	title   string
	command []string
	only    string // a file that must have something in it
	read    func(string) []string
}{
	{"iptables", []string{"iptables-nft-save"}, "", saveLines},
	{"ip6tables", []string{"ip6tables-nft-save"}, "", saveLines},
	{"iptables-legacy", []string{"iptables-legacy-save"}, "/proc/thread-self/net/ip_tables_names", saveLines},
	{"ip6tables-legacy", []string{"ip6tables-legacy-save"}, "/proc/thread-self/net/ip6_tables_names", saveLines},
	{"nftables", []string{"nft", "list", "ruleset"}, "", nftLines},
	{"ipvs", []string{"cat", "/proc/net/ip_vs"}, "/proc/thread-self/net/ip_vs", plainLines},
	{"addresses", []string{"ip", "-o", "address", "show"}, "", addressLines},
	{"settings", []string{"sysctl", "net.ipv4.conf.all.route_localnet"}, "", plainLines},
	{"TCP listeners", []string{"ss", "-Hltn"}, "", socketLines},
	{"UDP sockets", []string{"ss", "-Hlun"}, "", socketLines},
}

// kernelStateOf reads the state of a node.
func (l *Lab) kernelStateOf(ctx context.Context, nodeName string) (kernelState, error) {
	ns, err := l.runtime.NetNS(node.NSName(nodeName))
	if err != nil {
		return kernelState{}, err
	}
	env := []string{"XTABLES_LOCKFILE=" + l.paths.XtablesLock(node.NSName(nodeName))}
	s, err := readKernelState(ctx, ns, env)
	if err != nil {
		return s, fmt.Errorf("read what the kernel of node %s holds: %w", nodeName, err)
	}
	return s, nil
}

func readKernelState(ctx context.Context, ns *netns.NS, env []string) (kernelState, error) {
	var s kernelState
	for _, tool := range stateTools {
		if tool.only != "" {
			var content []byte
			// Not there, or not readable: nothing of it either.
			if err := ns.Do(func() (err error) { content, err = os.ReadFile(tool.only); return err }); err != nil || len(content) == 0 {
				continue
			}
		}
		out, err := execx.In(ns).Run(ctx, execx.Cmd{Path: tool.command[0], Args: tool.command[1:], Env: env})
		if errors.Is(err, exec.ErrNotFound) {
			continue
		}
		if err != nil {
			return s, err
		}
		s.sections = append(s.sections, stateSection{tool.title, tool.read(string(out.Stdout))})
	}
	var err error
	s.flows, err = proxy.TrackedFlows(ns)
	return s, err
}

// Counts and times that move by themselves are no difference.
var (
	chainCounters = regexp.MustCompile(` \[[0-9]+:[0-9]+\]$`)
	ruleCounters  = regexp.MustCompile(`counter packets [0-9]+ bytes [0-9]+`)
	spaces        = regexp.MustCompile(`\s+`)
)

// saveLines puts the table in front of each line of iptables-save.
func saveLines(text string) []string {
	var out []string
	table := ""
	for l := range strings.Lines(text) {
		l = strings.TrimRight(l, " \n")
		switch {
		case strings.HasPrefix(l, "*"):
			table = l[1:]
		case strings.HasPrefix(l, ":"), strings.HasPrefix(l, "-A"):
			out = append(out, table+" "+chainCounters.ReplaceAllString(l, ""))
		}
	}
	return out
}

// iptablesTables are the tables that the nft-backed iptables tools show better.
var iptablesTables = regexp.MustCompile(`^table ip6? (filter|nat|mangle|raw|security)$`)

// nftLines puts the table and the chain, set or map in front of each line of nft's
// listing. Elements that come and go by themselves are left out.
func nftLines(text string) []string {
	var out, scope []string
	skip := false
	for l := range strings.Lines(text) {
		l = strings.TrimSpace(ruleCounters.ReplaceAllString(l, "counter"))
		switch {
		case l == "" || strings.HasPrefix(l, "#") || strings.Contains(l, " expires "):
		case strings.HasSuffix(l, "{") && !strings.Contains(l, "elements ="):
			name := strings.TrimSpace(strings.TrimSuffix(l, "{"))
			if len(scope) == 0 {
				skip = iptablesTables.MatchString(name)
				name = strings.TrimPrefix(name, "table ")
			}
			scope = append(scope, name)
			if !skip {
				out = append(out, strings.Join(scope, " "))
			}
		case l == "}" && len(scope) > 0:
			scope = scope[:len(scope)-1]
		case !skip:
			out = append(out, strings.Join(scope, " ")+": "+l)
		}
	}
	return out
}

func plainLines(text string) []string {
	var out []string
	for l := range strings.Lines(text) {
		out = append(out, strings.TrimSpace(spaces.ReplaceAllString(l, " ")))
	}
	return out
}

// addressLines keeps link and address.
func addressLines(text string) []string {
	var out []string
	for l := range strings.Lines(text) {
		if f := strings.Fields(l); len(f) >= 4 {
			out = append(out, f[1]+" "+f[3])
		}
	}
	return out
}

// socketLines keeps the address of each socket.
func socketLines(text string) []string {
	var out []string
	for l := range strings.Lines(text) {
		if f := strings.Fields(l); len(f) >= 4 {
			out = append(out, f[3])
		}
	}
	return out
}

// proof says what lies between two states of a node: which lines went and which came,
// and how many of the connections that were tracked still are.
func proof(nodeName string, from, to fmt.Stringer, before, after kernelState) string {
	var b strings.Builder
	fmt.Fprintf(&b, "node %s: %s -> %s\n", nodeName, from, to)
	had, have := map[string][]string{}, map[string][]string{}
	var titles []string
	for _, side := range []struct {
		s    kernelState
		into map[string][]string
	}{{before, had}, {after, have}} {
		for _, sec := range side.s.sections {
			side.into[sec.title] = sec.lines
			if !slices.Contains(titles, sec.title) {
				titles = append(titles, sec.title)
			}
		}
	}
	gone, came, same := 0, 0, 0
	for _, title := range titles {
		minus, plus := lineDifference(had[title], have[title]), lineDifference(have[title], had[title])
		gone, came, same = gone+len(minus), came+len(plus), same+len(have[title])-len(plus)
		if len(minus)+len(plus) == 0 {
			continue
		}
		fmt.Fprintf(&b, "  %s\n", title)
		for _, l := range minus {
			fmt.Fprintf(&b, "  - %s\n", l)
		}
		for _, l := range plus {
			fmt.Fprintf(&b, "  + %s\n", l)
		}
	}
	kept := 0
	for f := range before.flows {
		if after.flows[f] {
			kept++
		}
	}
	fmt.Fprintf(&b, "  %d lines gone, %d new, %d as before; of %d tracked connections %d are kept\n", gone, came, same, len(before.flows), kept)
	return b.String()
}

// lineDifference lists what a has more than b, in the order of a.
func lineDifference(a, b []string) []string {
	count := make(map[string]int, len(b))
	for _, l := range b {
		count[l]++
	}
	var out []string
	for _, l := range a {
		if count[l]--; count[l] < 0 {
			out = append(out, l)
		}
	}
	return out
}
