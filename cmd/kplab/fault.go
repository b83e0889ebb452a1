// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newFaultCommand(g *globals) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "fault",
		Short: "break something on purpose, list what is broken, and mend it",
		Long: `Break something of the lab on purpose. A fault lasts until "kplab fault clear" ends
it, or the lab ends; it outlives a crash of the daemon. Faults add up: any number
of them can be in force at the same time. Broken links (kplab link) and nodes
(kplab node) are faults too: they are in the list, and clear ends them.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("%s: unknown command %q, want add, list or clear", cmd.CommandPath(), args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newFaultAddCommand(g), newFaultListCommand(g), newFaultClearCommand(g))
	return cmd
}

func newFaultAddCommand(g *globals) *cobra.Command {
	var f cluster.Fault
	cmd := &cobra.Command{
		Use:   "add KIND",
		Short: "break something: " + faultKinds(),
		Long: `Break something, and return when it is broken. KIND is one of:

  proxy-frozen   the Service proxy applies nothing any more; its rules stay as they are
  rules-flushed  the rules of the proxy are gone, and it writes none
  dns-dead       questions to cluster DNS get no answer
  api-stopped    the API takes no connection: from nobody, or with --from nodes from
                 no kubelet and no pod
  conn-limit     a node tracks at most --max connections; more are dropped

Without --node the fault is on every node. A fault of the same kind on the same
node takes the place of the one before.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := exactArgs("KIND")(cmd, args); err != nil {
				return err
			}
			if !slices.Contains(cluster.AddableFaults, cluster.FaultKind(args[0])) {
				return usageError{fmt.Errorf("%s: unknown fault %q, want one of %s", cmd.CommandPath(), args[0], faultKinds())}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			f.Kind = cluster.FaultKind(args[0])
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			if cmd.Flags().Changed("max") && f.Max < 1 {
				return usageError{fmt.Errorf("--max %d: want at least 1", f.Max)}
			}
			made, err := c.AddFault(cmd.Context(), f)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", made.ID, made.Says)
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.Node, "node", "", "the node that is hit (default: all)")
	flags.StringVar(&f.From, "from", "", "of api-stopped: all or nodes, whose connections are refused (default all)")
	flags.IntVar(&f.Max, "max", 0, "of conn-limit: how many connections a node tracks (default 10)")
	return cmd
}

func newFaultListCommand(g *globals) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "list what is broken on purpose",
		Args:  exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			faults, err := c.Faults(cmd.Context())
			if err != nil {
				return err
			}
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), append([]cluster.Fault{}, faults...))
			}
			if len(faults) == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "no faults")
				return nil
			}
			return printFaults(cmd.OutOrStdout(), faults)
		},
	}
	outputFlag(cmd, &format)
	return cmd
}

func printFaults(out io.Writer, faults []cluster.Fault) error {
	w := tabwriter.NewWriter(out, 0, 8, 3, ' ', 0)
	fmt.Fprintln(w, "ID\tAGE\tWHAT")
	for _, f := range faults {
		fmt.Fprintf(w, "%s\t%s\t%s\n", f.ID, time.Since(f.Since).Round(time.Second), f.Says)
	}
	return w.Flush()
}

func newFaultClearCommand(g *globals) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "clear ID… | --all",
		Short: "mend what was broken on purpose",
		Long: `End faults by their IDs, which "kplab fault list" shows, or all of them, and return
when things are as they were: rules read back, ports open, nodes started.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return usageError{fmt.Errorf("%s: want the IDs of faults, or --all", cmd.CommandPath())}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			cleared, err := c.ClearFaults(cmd.Context(), all, args...)
			if err != nil {
				return err
			}
			return printCleared(cmd, cleared)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "end every fault")
	return cmd
}

func printCleared(cmd *cobra.Command, cleared []cluster.Fault) error {
	var errs []error
	for _, f := range cleared {
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s cleared\n", f.ID)
		errs = append(errs, err)
	}
	if len(cleared) == 0 {
		fmt.Fprintln(cmd.ErrOrStderr(), "nothing to clear")
	}
	return errors.Join(errs...)
}

func faultKinds() string {
	var names []string
	for _, k := range cluster.AddableFaults {
		names = append(names, string(k))
	}
	return strings.Join(names, ", ")
}
