// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newNodeCommand(g *globals) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "node",
		Short: "add and remove nodes, and stop, kill, pause and start them",
		Long: `Add nodes to a running lab and remove them, and do to nodes what happens to machines.
The API hears of none of it but by the silence of the node: it becomes NotReady after
40 seconds, is tainted, and after another 300 seconds its pods are evicted.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("%s: unknown command %q, want list, add, remove, stop, kill, pause, start or resume", cmd.CommandPath(), args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newNodeListCommand(g), newNodeAddCommand(g), newNodeRemoveCommand(g))
	for _, a := range []struct {
		action            cluster.NodeAction
		said, short, long string
	}{
		{cluster.StopNode, "stopped", "shut nodes down", `Shut nodes down: kubelet and proxy end, processes are asked to end and have three
seconds for it, then the power goes.`},
		{cluster.KillNode, "killed", "cut the power of nodes", `Cut the power of nodes: everything of them dies at once, the processes of their pods
too, and nobody is told.`},
		{cluster.PauseNode, "paused", "freeze kubelet and proxy of nodes", `Freeze the kubelet and the proxy of nodes: heartbeats end, nothing new is started,
probed or written. What runs goes on, and rules stay as they are.`},
		{cluster.StartNode, "started", "start nodes that are stopped, killed or paused", `Start nodes that are stopped, killed or paused, and return when they are ready. The
pods that they had and still have begin anew; those of a paused node go on.`},
		{cluster.ResumeNode, "resumed", "let paused nodes go on", `Let paused nodes go on, and return when they are ready.`},
	} {
		cmd.AddCommand(&cobra.Command{
			Use:   string(a.action) + " NODE…",
			Short: a.short,
			Long:  a.long,
			Args:  nodeNames,
			RunE: func(cmd *cobra.Command, args []string) error {
				return eachNode(cmd, g, args, a.said, func(c *cluster.Client, name string) error {
					return c.ActOnNode(cmd.Context(), name, a.action)
				})
			},
		})
	}
	return cmd
}

// nodeNames wants at least one name.
func nodeNames(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return usageError{fmt.Errorf("%s: missing argument NODE", cmd.CommandPath())}
	}
	return nil
}

// eachNode does something to nodes, one after the other.
func eachNode(cmd *cobra.Command, g *globals, names []string, said string, do func(*cluster.Client, string) error) error {
	c, err := cluster.Connect(g.name)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := do(c, name); err != nil {
			return err
		}
		if _, err := fmt.Fprintf(cmd.OutOrStdout(), "node/%s %s\n", name, said); err != nil {
			return err
		}
	}
	return nil
}

func newNodeListCommand(g *globals) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "list the nodes and what they do",
		Args:  exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			s, err := askStatus(cmd, g)
			if err != nil {
				return err
			}
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), s.Nodes)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 3, ' ', 0)
			fmt.Fprintln(w, "NODE\tSTATE\tREADY\tROLE\tADDRESS\tPOD CIDR\tPODS\tPROXY")
			for _, n := range s.Nodes {
				fmt.Fprintf(w, "%s\t%s\t%t\t%s\t%s\t%s\t%d\t%s\n", n.Name, n.State, n.Ready, n.Role, n.Address, n.PodCIDR, n.Pods, n.Proxy.Mode)
			}
			return w.Flush()
		},
	}
	outputFlag(cmd, &format)
	return cmd
}

func newNodeAddCommand(g *globals) *cobra.Command {
	var n cluster.NodeConfig
	var mode string
	cmd := &cobra.Command{
		Use:   "add [NODE]",
		Short: "add a node to the running lab",
		Long: `Add a worker to the running lab, and return when it is ready. Without a name it gets
the first of node1, node2, … that is free, and likewise an address and a block of pod
addresses. The lab keeps the node: the next up has it too.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usageError{fmt.Errorf("%s: unexpected argument %q", cmd.CommandPath(), args[1])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				n.Name = args[0]
			}
			n.Proxy.Mode = mode
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			made, err := c.AddNode(cmd.Context(), n)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "node/%s added: address %s, pods %s\n", made.Name, made.Address, made.PodCIDR)
			return err
		},
	}
	f := cmd.Flags()
	f.StringToStringVar(&n.Labels, "labels", nil, "labels of the node, as in zone=a,disk=ssd")
	f.StringVar(&mode, "proxy-mode", "", "mode of the node's Service proxy (default: the lab's)")
	f.IntVar(&n.MaxPods, "max-pods", 0, "how many pods the node takes (default 110)")
	return cmd
}

func newNodeRemoveCommand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:     "remove NODE…",
		Aliases: []string{"rm"},
		Short:   "take nodes away for good",
		Long: `Take nodes away for good: the power goes, and the Node object with it, as when a cloud
takes a machine back. Pods that are left there are deleted by the controllers when the
node has been gone for 40 seconds; "kplab kubectl drain NODE" moves them before.`,
		Args: nodeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			return eachNode(cmd, g, args, "removed", func(c *cluster.Client, name string) error {
				return c.RemoveNode(cmd.Context(), name)
			})
		},
	}
}
