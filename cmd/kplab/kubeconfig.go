// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newKubeconfigCommand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "kubeconfig",
		Short: "print the path of the lab's kubeconfig",
		Args:  exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := cluster.Connect(g.name); err != nil {
				return err
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), cluster.PathsOf(g.name).Kubeconfig())
			return err
		},
	}
}
