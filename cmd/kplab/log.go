// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/trace"
)

func newLogCommand(g *globals) *cobra.Command {
	var node, namespace, format string
	var explain bool
	cmd := &cobra.Command{
		Use:   "log svc/NAME",
		Short: "tell a Service's history: changes in the API, and the rules that each changed",
		Long: `Tell a Service's history since the lab's daemon started: each change of the Service
and its EndpointSlices, and below it the rules that it changed in the nodes' kernels.
Nodes whose rules changed alike are told once.`,
		Args: exactArgs("svc/NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			name := strings.TrimPrefix(strings.Replace(args[0], "service/", "svc/", 1), "svc/")
			if name == "" || strings.Count(name, "/") > 1 {
				return usageError{fmt.Errorf("%q: want svc/[NAMESPACE/]NAME", args[0])}
			}
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			l, err := c.ServiceLog(cmd.Context(), cluster.Qualify(namespace, name), node)
			if err != nil {
				return err
			}
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), l)
			}
			x, err := indexFor(cmd, g, explain)
			if err != nil {
				return err
			}
			return printLog(cmd.OutOrStdout(), l, x, explain)
		},
	}
	f := cmd.Flags()
	f.StringVar(&node, "node", "", "only the rules of this node")
	f.StringVarP(&namespace, "namespace", "n", "", "namespace of a Service that is named without one (default: that of the lab's kubeconfig)")
	f.BoolVar(&explain, "explain", false, "put each rule into a sentence")
	outputFlag(cmd, &format)
	return cmd
}

// indexFor reads what sentences need; nil when none are wanted.
func indexFor(cmd *cobra.Command, g *globals, explain bool) (*trace.Index, error) {
	if !explain {
		return nil, nil
	}
	lab, err := openTrace(cmd, g)
	if err != nil {
		return nil, err
	}
	defer lab.Close()
	return lab.Index(cmd.Context())
}

// printLog puts each change of rules behind the last change in the API that it
// reflects.
func printLog(w io.Writer, l cluster.ServiceLog, x *trace.Index, explain bool) error {
	rules := l.Rules
	show := func(upTo uint64, last bool) error {
		n := 0
		for n < len(rules) && (last || rules[n].Revision < upTo) {
			n++
		}
		err := printRules(w, rules[:n], x, explain)
		rules = rules[n:]
		return err
	}
	fmt.Fprintf(w, "Service %s, since %s\n", l.Service, l.Since.Format(time.TimeOnly))
	for _, c := range l.API {
		if err := show(c.Revision, false); err != nil {
			return err
		}
		fmt.Fprintf(w, "\n%s  revision %-6d %s %s\n", c.At.Format(time.TimeOnly+".000"), c.Revision, c.Object, c.Verb)
		for _, what := range c.What {
			fmt.Fprintf(w, "    %s\n", what)
		}
	}
	return show(0, true)
}

// printRules tells changes of rules, those of several nodes together where they are
// the same.
func printRules(w io.Writer, rules []cluster.RuleChange, x *trace.Index, explain bool) error {
	type group struct {
		cluster.RuleChange
		nodes []string
	}
	var groups []*group
next:
	for _, r := range rules {
		for _, g := range groups {
			if g.Before == r.Before && g.After == r.After {
				g.nodes = append(g.nodes, r.Node)
				continue next
			}
		}
		groups = append(groups, &group{r, []string{r.Node}})
	}
	for _, g := range groups {
		lines := trace.Diff(g.Before, g.After, x)
		if len(lines) == 0 {
			continue
		}
		added, removed := trace.CountDiff(lines)
		fmt.Fprintf(w, "    → rules on %s (%s, as of revision %d): %d came, %d went\n", strings.Join(g.nodes, ", "), g.Mode, g.Revision, added, removed)
		if err := trace.WriteDiff(w, lines, "      ", explain); err != nil {
			return err
		}
	}
	return nil
}

func newProxyDiffCommand(g *globals) *cobra.Command {
	var r cluster.DiffRequest
	var format string
	var explain bool
	cmd := &cobra.Command{
		Use:   "diff",
		Short: "show what changed in the rules of a node's kernel",
		Long: `Show what changed in the rules of a node's kernel: by the last change of a Service
or its endpoints, between two revisions (the resourceVersion of an object), or across
the last change of the proxy's mode. It goes back to the start of the lab's daemon, or
as far as 512 changes do.`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			f := cmd.Flags()
			if r.SinceSwitch && (f.Changed("from") || f.Changed("to")) {
				return usageError{fmt.Errorf("--since-switch goes without --from and --to")}
			}
			if f.Changed("to") && r.To < r.From {
				return usageError{fmt.Errorf("--to %d is before --from %d", r.To, r.From)}
			}
			return printDiff(cmd.Context(), cmd, g, r, format, explain)
		},
	}
	f := cmd.Flags()
	f.StringVar(&r.Node, "node", "", "the node whose rules to compare (default: the control plane)")
	f.Uint64Var(&r.From, "from", 0, "compare with the rules as they were at this revision")
	f.Uint64Var(&r.To, "to", 0, "compare up to this revision (default: now)")
	f.BoolVar(&r.SinceSwitch, "since-switch", false, "compare the rules before and after the last change of the proxy's mode")
	f.BoolVar(&explain, "explain", false, "put each rule into a sentence")
	outputFlag(cmd, &format)
	return cmd
}

func printDiff(ctx context.Context, cmd *cobra.Command, g *globals, r cluster.DiffRequest, format string, explain bool) error {
	c, err := cluster.Connect(g.name)
	if err != nil {
		return err
	}
	d, err := c.Diff(ctx, r)
	if err != nil {
		return err
	}
	x, err := indexFor(cmd, g, explain || format == "json")
	if err != nil {
		return err
	}
	lines := trace.Diff(d.Before, d.After, x)
	w := cmd.OutOrStdout()
	if format == "json" {
		return printJSON(w, struct {
			cluster.RuleChange
			Before string           `json:"-"`
			After  string           `json:"-"`
			Lines  []trace.DiffLine `json:"lines"`
		}{RuleChange: d, Lines: lines})
	}
	added, removed := trace.CountDiff(lines)
	if d.Was != d.Mode {
		fmt.Fprintf(w, "node %s: mode %s → %s at %s (revision %d): %d rules came, %d went\n", d.Node, d.Was, d.Mode, d.At.Format(time.TimeOnly), d.Revision, added, removed)
	} else {
		fmt.Fprintf(w, "node %s, mode %s: revision %d → %d, applied at %s: %d rules came, %d went\n", d.Node, d.Mode, cmp.Or(r.From, d.From), d.Revision, d.At.Format(time.TimeOnly), added, removed)
	}
	return trace.WriteDiff(w, lines, "", explain)
}
