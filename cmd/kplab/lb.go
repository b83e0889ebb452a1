// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newLBCommand(g *globals) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lb",
		Short: "give Services of type LoadBalancer addresses on the node network",
		Long: `Give Services of type LoadBalancer addresses on the node network.

A lab has no load balancer at first, and EXTERNAL-IP stays <pending>. With a pool,
each such Service gets an address of it, and one elected node answers ARP for the
address on the node network, as MetalLB does in layer 2 mode.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("%s: unknown command %q, want enable, disable or status", cmd.CommandPath(), args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newLBEnableCommand(g), newLBDisableCommand(g), newLBStatusCommand(g))
	return cmd
}

func newLBEnableCommand(g *globals) *cobra.Command {
	var pool string
	cmd := &cobra.Command{
		Use:   "enable",
		Short: "give the lab a pool of addresses, or another one",
		Args:  exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			if pool == "" {
				cfg, err := cluster.KeptConfig(g.name)
				if err != nil {
					return err
				}
				if pool = cfg.DefaultPool(); pool == "" {
					return fmt.Errorf("the last addresses of the node network %s are taken: say with --pool which to use", cfg.Networking.NodeSubnet)
				}
			}
			if err := c.SetLoadBalancer(cmd.Context(), pool); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "load balancer with pool %s\n", pool)
			return err
		},
	}
	cmd.Flags().StringVar(&pool, "pool", "", "prefixes, ranges (FIRST-LAST) and addresses, separated by commas (default: the last 16 addresses of the node network)")
	return cmd
}

func newLBDisableCommand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "disable",
		Short: "take the load balancer away: Services lose their addresses",
		Args:  exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			if err := c.SetLoadBalancer(cmd.Context(), ""); err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), "no load balancer: EXTERNAL-IP of Services of type LoadBalancer is <pending>")
			return err
		},
	}
}

func newLBStatusCommand(g *globals) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "show the pool, who has which address, and which node announces it",
		Args:  exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			s, err := c.LoadBalancer(cmd.Context())
			if err != nil {
				return err
			}
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), s)
			}
			if s.Pool == "" {
				fmt.Fprintln(cmd.OutOrStdout(), "no load balancer; `kplab lb enable` gives the lab one")
			} else {
				fmt.Fprintf(cmd.OutOrStdout(), "pool %s, %s addresses\n", s.Pool, s.Size)
			}
			if len(s.Services) == 0 {
				return nil
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 3, ' ', 0)
			fmt.Fprintln(w, "ADDRESS\tSERVICE\tNODE")
			for _, h := range s.Services {
				address := "<pending>"
				if h.Address.IsValid() {
					address = h.Address.String()
				}
				fmt.Fprintf(w, "%s\t%s\t%s\n", address, h.Service, orNone(h.Node))
			}
			return w.Flush()
		},
	}
	outputFlag(cmd, &format)
	return cmd
}
