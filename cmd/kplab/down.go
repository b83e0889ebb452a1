// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newDownCommand(g *globals) *cobra.Command {
	var opts cluster.DownOptions
	var format string
	cmd := &cobra.Command{
		Use:   "down",
		Short: "end a lab; its state is kept for the next up",
		Long: `End a lab: its processes, namespaces, mounts and rules go, its state stays for
the next up. It works too when the daemon was killed, and doing it twice is fine.`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			result, err := cluster.Down(cmd.Context(), g.name, opts)
			if err != nil {
				return err
			}
			switch {
			case format == "json":
				if err := printJSON(cmd.OutOrStdout(), result); err != nil {
					return err
				}
			case result.Proof != nil:
				fmt.Fprint(cmd.OutOrStdout(), result.Proof)
			}
			fmt.Fprintln(cmd.ErrOrStderr(), result.Said)
			if result.Proof != nil && len(result.Proof.Changed) > 0 {
				return fmt.Errorf("the host is not as it was before lab %q began: see above", g.name)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&opts.Prove, "prove", false, "compare the host with how it was before the lab began, and print the differences")
	cmd.Flags().BoolVar(&opts.Purge, "purge", false, "delete the kept state too")
	outputFlag(cmd, &format)
	return cmd
}
