// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newVersionCommand() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "print the versions of kplab and of the Kubernetes that it speaks",
		Args:  exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			v := cluster.Versions()
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), v)
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "kplab       %s\nkubernetes  %s\ngo          %s\n", v.Kplab, v.Kubernetes, v.Go)
			return err
		},
	}
	outputFlag(cmd, &format)
	return cmd
}
