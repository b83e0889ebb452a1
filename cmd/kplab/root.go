// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

// globals are the flags that go on every command.
type globals struct {
	name string
}

func newRootCommand() *cobra.Command {
	g := &globals{name: cluster.DefaultName}
	if env := os.Getenv("KPLAB_LAB"); env != "" {
		g.name = env
	}
	root := &cobra.Command{
		Use:   "kplab",
		Short: "a small Kubernetes on one Linux host whose Service path you can see",
		Long: `kplab makes a small Kubernetes on one Linux host: a Kubernetes-compatible API,
nodes and pods that are network namespaces, a routed CNI and a Service proxy
that writes real kernel rules. No Docker, no images, no network needed.

  kplab up -d                       start a lab and return when it is ready
  kplab kubectl get nodes           the stock kubectl, bound to the lab
  kplab exec master -- iptables-save -t nat
  kplab down                        end it; the state is kept for the next up`,
		SilenceUsage:  true,
		SilenceErrors: true,
		// So that `kplab --name x kubectl …` is understood although kubectl's
		// own flags are not ours to parse.
		TraverseChildren: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("unknown command %q", args[0])}
			}
			return nil
		},
		// A lab has one current namespace, for kubectl and for our own commands: that of
		// the exercise that somebody is at.
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if f := cmd.Flags().Lookup("namespace"); f != nil && f.Value.String() == "" {
				return f.Value.Set(cluster.PathsOf(g.name).Namespace())
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.PersistentFlags().StringVar(&g.name, "name", g.name, "name of the lab (also $KPLAB_LAB)")
	root.AddCommand(
		newUpCommand(g),
		newDownCommand(g),
		newStatusCommand(g),
		newKubectlCommand(g),
		newKubeconfigCommand(g),
		newExecCommand(g),
		newShellCommand(g),
		newSettleCommand(g),
		newProxyCommand(g),
		newNodeCommand(g),
		newLinkCommand(g),
		newFaultCommand(g),
		newLBCommand(g),
		newTraceCommand(g),
		newWhyCommand(g),
		newLogCommand(g),
		newExposeCommand(g),
		newStateCommand(g),
		newLabCommand(g),
		newDoctorCommand(),
		newVersionCommand(),
	)
	return root
}

// outputFlag adds -o for commands whose answer a script may want.
func outputFlag(cmd *cobra.Command, format *string) {
	cmd.Flags().StringVarP(format, "output", "o", "", "output format: json, or empty for text")
}

// printJSON writes v for a script.
func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// checkOutput refuses formats that do not exist.
func checkOutput(format string) error {
	if format != "" && format != "json" {
		return usageError{fmt.Errorf("output format %q: want json", format)}
	}
	return nil
}
