// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

// whereHelp is the same sentence in exec and shell.
const whereHelp = `WHERE is a node's name, "outside" (a client that is no node and no pod), or
pod/[NAMESPACE/]NAME.`

func newExecCommand(g *globals) *cobra.Command {
	var namespace string
	cmd := &cobra.Command{
		Use:   "exec WHERE -- COMMAND [ARGUMENT…]",
		Short: "run a tool of this host in the network of a node, a pod or outside",
		Long: `Run a tool of this host in the network of a node, a pod or the outside client, and
exit with its exit code. Files and processes are the host's, the network is the
lab's; for a pod's own files use kubectl exec. On a node, kubectl works too, as it
would on a control-plane node.

` + whereHelp,
		Args: func(cmd *cobra.Command, args []string) error {
			switch command := afterDash(args); {
			case len(args) == 0 || args[0] == "--":
				return usageError{fmt.Errorf("%s: missing WHERE", cmd.CommandPath())}
			case len(command) == 0:
				return usageError{fmt.Errorf("%s: missing COMMAND, as in: kplab exec %s -- ip addr", cmd.CommandPath(), args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return runIn(g.name, cluster.Place{Where: args[0], Namespace: namespace}, afterDash(args), nil)
		},
	}
	// Flags after WHERE are the command's, with the dashes or without.
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace of a pod that is named without one (default: that of the lab's kubeconfig)")
	return cmd
}

// afterDash returns what follows WHERE, without the dashes that may part the two.
func afterDash(args []string) []string {
	if len(args) > 1 && args[1] == "--" {
		return args[2:]
	}
	return args[min(1, len(args)):]
}

func newShellCommand(g *globals) *cobra.Command {
	var namespace string
	cmd := &cobra.Command{
		Use:   "shell WHERE",
		Short: "open a shell in the network of a node, a pod or outside",
		Long:  "Open a shell of this host in the network of a node, a pod or the outside client.\n\n" + whereHelp,
		Args:  exactArgs("WHERE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			argv := []string{"/bin/sh"}
			if bash, err := exec.LookPath("bash"); err == nil {
				argv = []string{bash, "--norc"}
			}
			prompt := fmt.Sprintf("PS1=[%s %s] \\w# ", g.name, args[0])
			return runIn(g.name, cluster.Place{Where: args[0], Namespace: namespace}, argv, []string{prompt})
		},
	}
	cmd.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace of a pod that is named without one (default: that of the lab's kubeconfig)")
	return cmd
}

// runIn becomes argv in a place of the lab; it returns only when that failed.
func runIn(lab string, place cluster.Place, argv, env []string) error {
	err := cluster.Exec(lab, place, argv, append(os.Environ(), env...))
	if errors.Is(err, exec.ErrNotFound) {
		fmt.Fprintf(os.Stderr, "kplab: %v\n", err)
		return exitError(127) // as a shell says it
	}
	return err
}
