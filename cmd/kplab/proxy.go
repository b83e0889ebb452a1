// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/trace"
)

func newProxyCommand(g *globals) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "proxy",
		Short: "look at the Service proxy of each node, and change its mode",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("%s: unknown command %q, want status, rules, diff or set", cmd.CommandPath(), args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newProxyStatusCommand(g), newProxyRulesCommand(g), newProxyDiffCommand(g), newProxySetCommand(g))
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
				fmt.Fprintf(w, "%s\t%s\t%s ago\t%d\t%d\t%s\n", n.Name, cluster.ProxyConfig{Mode: p.Mode, NFTLayout: p.Layout}, time.Since(p.Synced).Round(time.Millisecond), p.Services, p.Endpoints, orNone(proxyTrouble(p)))
			}
			return w.Flush()
		},
	}
	outputFlag(cmd, &format)
	return cmd
}

func newProxyRulesCommand(g *globals) *cobra.Command {
	var node, mode, layout, namespace, format string
	var explain bool
	cmd := &cobra.Command{
		Use:   "rules [SERVICE]",
		Short: "print the rules of a node's proxy, or of one Service, in the tool's own words",
		Long: `Print the rules that a node's kernel has now, all of the Service proxy or those of
one Service. With --mode they are not read back but rendered: what that mode would
write for the same objects, whatever this kernel can do. --explain puts each line
into a sentence and names the object that it comes from.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usageError{fmt.Errorf("%s: unexpected argument %q", cmd.CommandPath(), args[1])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			service := ""
			if len(args) == 1 {
				service = cluster.Qualify(namespace, strings.TrimPrefix(args[0], "svc/"))
			}
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			s, err := c.Status(cmd.Context())
			if err != nil {
				return err
			}
			if node == "" {
				node = s.ControlPlane()
			}
			text := ""
			if mode != "" || layout != "" || !readable(s.ProxyModes[node]) {
				if text, err = c.Rules(cmd.Context(), node, mode, layout, service); err != nil {
					return err
				}
				if !explain && format == "" {
					_, err = fmt.Fprint(cmd.OutOrStdout(), text)
					return err
				}
			}
			lab, err := trace.Open(traceOptions(s))
			if err != nil {
				return err
			}
			defer lab.Close()
			var p *trace.Program
			if text != "" {
				p, err = lab.Explained(cmd.Context(), node, cmp.Or(mode, s.ProxyModes[node]), service, text)
			} else {
				p, err = lab.Program(cmd.Context(), node, service)
			}
			if err != nil {
				return err
			}
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), p)
			}
			return p.WriteText(cmd.OutOrStdout(), explain)
		},
	}
	f := cmd.Flags()
	f.StringVar(&node, "node", "", "the node whose rules to print (default: the control plane)")
	f.StringVar(&mode, "mode", "", "render what this mode would write, instead of reading the kernel")
	f.StringVar(&layout, "nft-layout", "", "render this layout of mode nftables")
	f.StringVarP(&namespace, "namespace", "n", "", "namespace of SERVICE (default: that of the lab's kubeconfig)")
	f.BoolVar(&explain, "explain", false, "put each line into a sentence, and name the object that it comes from")
	outputFlag(cmd, &format)
	return cmd
}

// readable says whether the rules of a mode can be read back with the tools of
// iptables and nft. Those of others are rendered.
func readable(mode string) bool { return mode != "ipvs" && mode != "none" && mode != "" }

func newProxySetCommand(g *globals) *cobra.Command {
	var node, layout string
	var ipvs cluster.IPVSConfig
	var proof bool
	cmd := &cobra.Command{
		Use:   "set MODE",
		Short: "change the mode of the Service proxies while the lab runs",
		Long: `Change the mode of the Service proxies while the lab runs, to one of
` + strings.Join(cluster.ProxyModes(), ", ") + `. The new rules are written and read back before the old ones go, so that no
connection is refused or cut; what mode ipvs holds open when it is left has a minute
to end. The next up has the mode as well.`,
		Args: exactArgs("MODE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			want := cluster.ProxyConfig{Mode: args[0], NFTLayout: layout, IPVS: ipvs}
			text := ""
			if proof {
				text, err = c.ProveProxy(cmd.Context(), node, want)
			} else {
				err = c.SetProxy(cmd.Context(), node, want)
			}
			if err != nil {
				return err
			}
			where := "every node"
			if node != "" {
				where = "node " + node
			}
			runs := want
			if ipvs.Fallback {
				s, err := c.Status(cmd.Context())
				if err != nil {
					return err
				}
				for n, mode := range s.ProxyModes {
					if (node == "" || node == n) && mode != want.Mode {
						runs = cluster.ProxyConfig{Mode: mode}
					}
				}
			}
			if w := cluster.ModeWarning(runs.Mode); w != "" {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning: "+w)
			}
			if runs != want {
				fmt.Fprintf(cmd.ErrOrStderr(), "warning: mode %s does not work here, so %s took its place; kplab doctor says what is missing\n", want, runs)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%sproxy mode %s on %s\n", text, runs, where)
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&node, "node", "", "the node whose proxy to change (default: all)")
	f.StringVar(&layout, "nft-layout", "", "layout of mode nftables: upstream or compact (default upstream)")
	f.BoolVar(&proof, "proof", false, "print what the change did to each node's kernel: rules, addresses, settings and sockets that went (-) and came (+), and how many tracked connections it kept")
	ipvsFlags(f, &ipvs)
	return cmd
}

// ipvsFlags are the flags of mode ipvs.
func ipvsFlags(f *pflag.FlagSet, c *cluster.IPVSConfig) {
	f.StringVar(&c.Scheduler, "ipvs-scheduler", "", "how mode ipvs spreads connections: rr, wrr, lc, wlc, lblc, lblcr, sh, dh, sed, nq, fo, ovf or mh (default rr)")
	f.BoolVar(&c.StrictARP, "ipvs-strict-arp", false, "in mode ipvs, answer no ARP requests for addresses of Services")
	f.BoolVar(&c.Fallback, "ipvs-fallback", false, "run mode iptables where this kernel has no IPVS, instead of refusing")
}
