// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newStateCommand(g *globals) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "state",
		Short: "check, save, load and shrink what a lab keeps",
		Long: `Check, save, load and shrink what a lab keeps: every object of its API, in one file
(state.db) that survives a stop, a crash and a reboot.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("%s: unknown command %q, want check, export, import or compact", cmd.CommandPath(), args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newStateCheckCommand(g), newStateExportCommand(g), newStateImportCommand(g), newStateCompactCommand(g))
	return cmd
}

func newStateCheckCommand(g *globals) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "check",
		Short: "read a stopped lab's file from end to end and say what is wrong with it",
		Long: `Read a stopped lab's file from end to end and say what is wrong with it: its
pages, every object, the log of events and the indices, addresses and ports that
were given out twice. Nothing is changed. A lab that runs is refused: kplab down
keeps the state. Exit code 1 when something is wrong.`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			r, err := cluster.CheckState(cmd.Context(), g.name)
			if err != nil {
				return err
			}
			if format == "json" {
				err = printJSON(cmd.OutOrStdout(), r)
			} else {
				printStateReport(cmd.OutOrStdout(), r)
			}
			if err == nil && len(r.Problems) > 0 {
				return fmt.Errorf("the state of lab %q has %s: see above", g.name, count(len(r.Problems), "problem"))
			}
			return err
		},
	}
	outputFlag(cmd, &format)
	return cmd
}

func printStateReport(w io.Writer, r *cluster.StateReport) {
	fmt.Fprintf(w, "file       %s (%s, of which %s are free)\n", r.File, mebibytes(r.Size), mebibytes(r.Free))
	fmt.Fprintf(w, "revision   %d (its log goes back to %d)\n", r.Revision, r.Since)
	fmt.Fprintf(w, "objects    %d of %s\n", r.Objects, count(len(r.Kinds), "kind"))
	fmt.Fprintf(w, "given out  %s, %s\n", count(r.ClusterIPs, "cluster IP"), count(r.NodePorts, "node port"))
	for _, p := range r.Problems {
		fmt.Fprintf(w, "problem    %s\n           what to do: %s\n", p.What, p.Do)
	}
	if len(r.Problems) == 0 {
		fmt.Fprintln(w, "problems   none")
	}
}

// count is a number with its noun.
func count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

func mebibytes(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

func newStateExportCommand(g *globals) *cobra.Command {
	var opts cluster.ExportOptions
	var file string
	cmd := &cobra.Command{
		Use:   "export",
		Short: "write what people made in a lab as YAML that kubectl apply takes",
		Long: `Write the objects that people made in a lab as YAML documents, which kubectl apply
or kplab state import make again in another lab: without what the server sets and
without what controllers derive (pods of a Deployment, EndpointSlices, default
service accounts). Cluster IPs and node ports are kept. Secrets are in it, in the
clear. All objects are of one revision. From a lab that does not run they are read
out of its file, also when a part of that is damaged.`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			e, err := cluster.ExportState(cmd.Context(), g.name, opts)
			if err != nil {
				return err
			}
			if file == "" || file == "-" {
				err = e.WriteYAML(cmd.OutOrStdout())
			} else {
				err = e.WriteFile(file)
			}
			if err != nil {
				return err
			}
			for _, n := range e.Notices {
				fmt.Fprintln(cmd.ErrOrStderr(), n)
			}
			if file != "" && file != "-" {
				fmt.Fprintf(cmd.ErrOrStderr(), "%s of lab %q are in %s\n", count(len(e.Objects), "object"), g.name, file)
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&file, "output", "o", "", "file to write (default: standard output)")
	cmd.Flags().BoolVar(&opts.All, "all", false, "every object as the API shows it, status and derived objects too; for reading")
	return cmd
}

func newStateImportCommand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "import FILE",
		Short: "make the objects of a YAML file in a running lab",
		Long: `Apply the YAML documents of FILE (- is standard input) to a running lab by
server-side apply, namespaces and definitions first. All of them are tried
without effect before, so that an invalid one leaves nothing half made.`,
		Args: exactArgs("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			in := cmd.InOrStdin()
			if args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return err
				}
				defer f.Close()
				in = f
			}
			done := func(i cluster.Imported) { fmt.Fprintf(cmd.OutOrStdout(), "%s %s\n", i.Object, i.Did) }
			notice := func(s string) { fmt.Fprintln(cmd.ErrOrStderr(), s) }
			return cluster.ImportState(cmd.Context(), g.name, in, done, notice)
		},
	}
}

func newStateCompactCommand(g *globals) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "compact",
		Short: "make a stopped lab's file as small as what is in it",
		Long: `Make a stopped lab's file as small as what is in it. A lab uses free space in its
file again but never gives it back. Objects, resource versions and the log of events
stay what they are. The new file is written beside the old one, checked, and put
in its place, so there must be room for both.`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			c, err := cluster.CompactState(cmd.Context(), g.name)
			if err != nil {
				return err
			}
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), c)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s: %s became %s\n", c.File, mebibytes(c.Before), mebibytes(c.After))
			return nil
		},
	}
	outputFlag(cmd, &format)
	return cmd
}
