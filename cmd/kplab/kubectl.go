// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"

	"github.com/kplab/kplab/cluster"
)

func newKubectlCommand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "kubectl [kubectl's arguments]",
		Short: "run the embedded stock kubectl, bound to the lab",
		Long: `Run the embedded stock kubectl with the lab's kubeconfig. Everything after
"kubectl" is kubectl's, but for --name directly behind it, which names the lab: kubectl
has no flag of that name there.`,
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			args = takeName(g, args)
			// With a kubeconfig of one's own, no lab needs to run.
			if !namesKubeconfig(args) {
				if _, err := cluster.Connect(g.name); err != nil {
					return err
				}
				paths := cluster.PathsOf(g.name)
				// On a node, `kplab exec` has said where the API is.
				if os.Getenv("KUBECONFIG") != paths.NodeKubeconfig() {
					if err := os.Setenv("KUBECONFIG", paths.Kubeconfig()); err != nil {
						return err
					}
				}
			}
			// kplab's own commands end by their context; kubectl knows none and is to
			// end by a signal, or do with it what it does.
			signal.Reset(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
			// kubectl reads os.Args when it looks for plugins and for the name
			// it is called by.
			os.Args = append([]string{"kubectl"}, args...)
			k := kubectl.NewDefaultKubectlCommandWithArgs(kubectl.KubectlOptions{
				PluginHandler: kubectl.NewDefaultPluginHandler([]string{"kubectl"}),
				Arguments:     os.Args,
				ConfigFlags:   genericclioptions.NewConfigFlags(true).WithDeprecatedPasswordFlag().WithDiscoveryBurst(300).WithDiscoveryQPS(50),
				IOStreams:     genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr},
			})
			k.SetArgs(args)
			// kubectl prints its own errors and exits with its own codes.
			kubectlutil.CheckErr(cli.RunNoErrOutput(k))
			return nil
		},
	}
}

// takeName reads the lab's name off the front of kubectl's arguments. Commands of
// kubectl that have a flag --name have it behind their own name.
func takeName(g *globals, args []string) []string {
	if len(args) >= 2 && args[0] == "--name" {
		g.name = args[1]
		return args[2:]
	}
	if len(args) >= 1 {
		if name, ok := strings.CutPrefix(args[0], "--name="); ok {
			g.name = name
			return args[1:]
		}
	}
	return args
}

// namesKubeconfig says whether kubectl's arguments choose a kubeconfig.
func namesKubeconfig(args []string) bool {
	for _, arg := range args {
		if arg == "--" {
			return false
		}
		if arg == "--kubeconfig" || strings.HasPrefix(arg, "--kubeconfig=") {
			return true
		}
	}
	return false
}
