// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newDoctorCommand() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "try what a lab needs of this kernel and its tools, and say how to get what is missing",
		Args:  exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			checks := cluster.Doctor(cmd.Context())
			if format == "json" {
				if err := printJSON(cmd.OutOrStdout(), checks); err != nil {
					return err
				}
			}
			missing := 0
			for _, c := range checks {
				if c.Verdict == cluster.Missing && c.Required {
					missing++
				}
				if format == "" {
					printCheck(cmd, c)
				}
			}
			if missing > 0 {
				return fmt.Errorf("%d of %d checks found something missing that a lab cannot do without", missing, len(checks))
			}
			return nil
		},
	}
	outputFlag(cmd, &format)
	return cmd
}

func printCheck(cmd *cobra.Command, c cluster.Check) {
	out := cmd.OutOrStdout()
	switch {
	case c.Verdict == cluster.Works:
		fmt.Fprintf(out, "ok       %-24s %s\n", c.Name, c.Found)
	case c.Required:
		fmt.Fprintf(out, "MISSING  %-24s %s\n", c.Name, c.Found)
	default:
		fmt.Fprintf(out, "absent   %-24s %s\n", c.Name, c.Found)
	}
	if c.Verdict != cluster.Works {
		fmt.Fprintf(out, "         breaks: %s\n         get it: %s\n", c.Breaks, c.Remedy)
	}
}
