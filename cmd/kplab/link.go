// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newLinkCommand(g *globals) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "link",
		Short: "look at the nodes' links, and make them slow, lossy or dead",
		Long: `Look at the links that join the nodes and the client outside, and break them on
purpose. All of it happens on the far end, in the fabric, so that addresses and
routes of the nodes stay. NODE is a node's name, or "outside".`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("%s: unknown command %q, want show, down, up or set", cmd.CommandPath(), args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newLinkShowCommand(g), newLinkDownCommand(g), newLinkUpCommand(g), newLinkSetCommand(g))
	return cmd
}

func newLinkShowCommand(g *globals) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "show [NODE]",
		Short: "show each link and what is wrong with it on purpose",
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
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			all, err := c.Links(cmd.Context())
			if err != nil {
				return err
			}
			links := []cluster.LinkStatus{}
			for _, l := range all {
				if len(args) == 0 || l.Node == args[0] {
					links = append(links, l)
				}
			}
			if len(args) == 1 && len(links) == 0 {
				return fmt.Errorf("no node with a link is called %q", args[0])
			}
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), links)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 3, ' ', 0)
			fmt.Fprintln(w, "NODE\tPORT\tSTATE\tFAULTS")
			for _, l := range links {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", l.Node, l.Port, linkState(l), orNone(linkFaults(l)))
			}
			return w.Flush()
		},
	}
	outputFlag(cmd, &format)
	return cmd
}

func linkState(l cluster.LinkStatus) string {
	switch {
	case !l.Up:
		return "down"
	case !l.Carrier:
		return "no carrier"
	}
	return "up"
}

func linkFaults(l cluster.LinkStatus) string {
	var all []string
	for _, f := range l.Faults {
		said := f.Says
		if f.Link.To != "" {
			said = fmt.Sprintf("%s-%s: %s", f.Node, f.Link.To, said)
		}
		all = append(all, said)
	}
	return strings.Join(all, "; ")
}

func newLinkDownCommand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "down NODE",
		Short: "pull the plug of a node's link",
		Long: `Set the fabric's end of a node's link down: the node loses its carrier, and no packet
passes. The node's addresses and routes stay. "kplab link up" ends it.`,
		Args: exactArgs("NODE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return setLink(cmd, g, args[0], cluster.LinkFaults{Down: true})
		},
	}
}

func newLinkUpCommand(g *globals) *cobra.Command {
	var to string
	cmd := &cobra.Command{
		Use:   "up NODE",
		Short: "end everything that is wrong with a node's link on purpose",
		Long: `Set a node's link up and end everything that "kplab link" has done to it and to the
ways from this node to others; with --to only to the way between the two.`,
		Args: exactArgs("NODE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			cleared, err := c.LinkUp(cmd.Context(), args[0], to)
			if err != nil {
				return err
			}
			return printCleared(cmd, cleared)
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "only the way to this node")
	return cmd
}

func newLinkSetCommand(g *globals) *cobra.Command {
	var with cluster.LinkFaults
	cmd := &cobra.Command{
		Use:   "set NODE",
		Short: "make a node's link lossy, slow, or deaf in one direction",
		Long: `Make a node's link lossy or slow, or drop all packets in one direction. What is set
adds to what was set before; the value 0 (or none) takes one back, and
"kplab link up" all of them.

  --loss   the share of packets that are lost, in each direction
  --delay  how long each packet to the node is held up (needs the kernel's netem)
  --rate   the most that passes in each direction; packets queue for up to 400 ms and
           are dropped after that (needs the kernel's tbf)
  --drop   all packets to the node (in), from it (out), or both

With --to, loss and drop concern only the packets between the two nodes: a partition
of the two is --to NODE2 --drop both.`,
		Example: `  kplab link set node1 --loss 30%
  kplab link set node1 --rate 1mbit --delay 50ms
  kplab link set node1 --to node2 --drop both`,
		Args: exactArgs("NODE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if with == (cluster.LinkFaults{To: with.To}) {
				return usageError{fmt.Errorf("%s: set what? want at least one of --loss, --delay, --rate and --drop", cmd.CommandPath())}
			}
			if err := cluster.CheckLink(args[0], with); err != nil {
				return usageError{err}
			}
			return setLink(cmd, g, args[0], with)
		},
	}
	f := cmd.Flags()
	f.StringVar(&with.To, "to", "", "only packets from and to this node")
	f.StringVar(&with.Loss, "loss", "", "share of packets that are lost, as in 30%")
	f.StringVar(&with.Delay, "delay", "", "how long a packet is held up, as in 50ms")
	f.StringVar(&with.Rate, "rate", "", "bits a second, as in 500kbit or 1mbit")
	f.StringVar(&with.Drop, "drop", "", "direction in which all packets are lost: in, out, both or none")
	return cmd
}

// setLink makes a link faulty and says what it is then.
func setLink(cmd *cobra.Command, g *globals, node string, with cluster.LinkFaults) error {
	c, err := cluster.Connect(g.name)
	if err != nil {
		return err
	}
	f, err := c.SetLink(cmd.Context(), node, with)
	if err != nil {
		return err
	}
	said := f.Says
	if said == "" {
		said = "nothing is wrong with it any more"
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", f.ID, said)
	return err
}
