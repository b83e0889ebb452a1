// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newExposeCommand(g *globals) *cobra.Command {
	var r cluster.ExposeRequest
	var format string
	cmd := &cobra.Command{
		Use:   "expose svc/NAME[:PORT] | pod/NAME[:PORT] | ADDRESS:PORT",
		Short: "lead a port of this machine's loopback into the lab",
		Long: `Lead a port of this machine's loopback into the lab, for a browser or any other
program of this machine.

Connections enter the lab at "outside", a client that is no node and no pod, and
go the whole way that any client's would: to a Service's load balancer address, or
to its nodePort on a node. Outside has no route to pods, so those are reached from
their node. --from NODE enters at a node instead, where ClusterIPs work.

The port is open until Ctrl-C, or with -d until "kplab expose stop" or the end of
the lab. Nothing but this port changes on this machine.`,
		Example: `  kplab expose svc/web --listen 127.0.0.1:8080
  kplab expose svc/dns:53 --proto udp
  kplab expose pod/web-0:80
  kplab expose node1:30080`,
		Args: exactArgs("TARGET"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			r.Target = args[0]
			last := ""
			var printed error
			err = c.Expose(cmd.Context(), r, func(e cluster.Exposed) {
				printed = printExposed(cmd, e, r.Detach, format)
			}, func(failure string) {
				if failure != last { // a browser tries again and again
					fmt.Fprintf(cmd.ErrOrStderr(), "not forwarded: %s\n", failure)
				}
				last = failure
			})
			if err != nil {
				return err
			}
			return printed
		},
	}
	f := cmd.Flags()
	f.StringVar(&r.Listen, "listen", "127.0.0.1:0", "address on the loopback to listen on; port 0 is any that is free")
	f.StringVar(&r.Proto, "proto", "", "tcp or udp (default: what the Service's port has, else tcp)")
	f.StringVar(&r.From, "from", "", "where connections enter the lab: outside or a node (default outside; for a pod its node)")
	f.StringVarP(&r.Namespace, "namespace", "n", "", "namespace of the Service or pod (default: that of the lab's kubeconfig)")
	f.BoolVarP(&r.Detach, "detach", "d", false, "return at once and leave the port open")
	outputFlag(cmd, &format)
	cmd.AddCommand(newExposeListCommand(g), newExposeStopCommand(g))
	return cmd
}

func printExposed(cmd *cobra.Command, e cluster.Exposed, detached bool, format string) error {
	if format == "json" {
		return printJSON(cmd.OutOrStdout(), e)
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s/%s -> %s\n", e.Listen, e.Proto, e.Target)
	talk := cmd.ErrOrStderr()
	fmt.Fprintf(talk, "path: %s\n", e.Path)
	if e.Proto == "tcp" {
		fmt.Fprintf(talk, "in a browser: http://%s/\n", e.Listen)
	}
	if detached {
		fmt.Fprintf(talk, "open until `kplab expose stop %d` or the end of the lab\n", e.ID)
	} else {
		fmt.Fprintln(talk, "Ctrl-C closes the port")
	}
	return err
}

func newExposeListCommand(g *globals) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "list the open ports",
		Args:  exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			all, err := c.Exposed(cmd.Context())
			if err != nil {
				return err
			}
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), all)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 3, ' ', 0)
			fmt.Fprintln(w, "ID\tLISTEN\tTARGET\tPATH")
			for _, e := range all {
				fmt.Fprintf(w, "%d\t%s/%s\t%s\t%s\n", e.ID, e.Listen, e.Proto, e.Target, e.Path)
			}
			return w.Flush()
		},
	}
	outputFlag(cmd, &format)
	return cmd
}

func newExposeStopCommand(g *globals) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "stop ID",
		Short: "close a port, or with --all every one",
		Args: func(cmd *cobra.Command, args []string) error {
			if all {
				return exactArgs()(cmd, args)
			}
			return exactArgs("ID")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			id := 0
			if !all {
				var err error
				if id, err = strconv.Atoi(args[0]); err != nil || id < 1 {
					return usageError{fmt.Errorf("%q: want the number of a port, from kplab expose list", args[0])}
				}
			}
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			closed, err := c.Unexpose(cmd.Context(), id)
			for _, e := range closed {
				fmt.Fprintf(cmd.OutOrStdout(), "%s/%s -> %s closed\n", e.Listen, e.Proto, e.Target)
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "close every open port")
	return cmd
}
