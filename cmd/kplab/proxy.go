// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newProxyCommand(g *globals) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "proxy",
		Short: "look at the Service proxy of each node",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("%s: unknown command %q, want status or rules", cmd.CommandPath(), args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newProxyStatusCommand(g), newProxyRulesCommand(g))
	return cmd
}

func newProxyStatusCommand(g *globals) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "show the mode of each node's proxy and how fresh its rules are",
		Args:  exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			s, err := askStatus(cmd, g)
			if err != nil {
				return err
			}
			proxies := map[string]cluster.ProxyStatus{}
			for _, n := range s.Nodes {
				proxies[n.Name] = n.Proxy
			}
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), proxies)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 3, ' ', 0)
			fmt.Fprintln(w, "NODE\tMODE\tSYNCED\tSERVICES\tENDPOINTS\tERROR")
			for _, n := range s.Nodes {
				p := n.Proxy
				fmt.Fprintf(w, "%s\t%s\t%s ago\t%d\t%d\t%s\n", n.Name, p.Mode, time.Since(p.Synced).Round(time.Millisecond), p.Services, p.Endpoints, orNone(p.Error))
			}
			return w.Flush()
		},
	}
	outputFlag(cmd, &format)
	return cmd
}

func newProxyRulesCommand(g *globals) *cobra.Command {
	var node, mode, namespace string
	cmd := &cobra.Command{
		Use:   "rules [SERVICE]",
		Short: "print the rules that a node's proxy wants in the kernel, in the tool's own words",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usageError{fmt.Errorf("%s: unexpected argument %q", cmd.CommandPath(), args[1])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			service := ""
			if len(args) == 1 {
				service = cluster.Qualify(namespace, args[0])
			}
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			text, err := c.Rules(cmd.Context(), node, mode, service)
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), text)
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&node, "node", "", "the node whose rules to print (default: the control plane)")
	f.StringVar(&mode, "mode", "", "render in this mode instead of the running one")
	f.StringVarP(&namespace, "namespace", "n", "default", "namespace of SERVICE")
	return cmd
}
