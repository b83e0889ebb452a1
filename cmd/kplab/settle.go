// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newSettleCommand(g *globals) *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "settle",
		Short: "wait until every controller, node and proxy has caught up",
		Long: `Wait until every controller, node and proxy has seen the newest change, has
nothing left to do, and the rules were read back from the kernel. Scripts and
tests wait for this, not for time. Exit code 1 says who has not caught up.

Nodes and proxies that a fault holds (kplab fault list) cannot catch up and are not
waited for; they are named. While the API is stopped for all, nothing that is left to
do can be done, and the command fails at once.`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := cluster.Connect(g.name)
			if err != nil {
				return err
			}
			err = c.Settle(cmd.Context(), timeout)
			var behind *cluster.UnsettledError
			if errors.As(err, &behind) {
				return fmt.Errorf("lab %q did not settle within %s: %w", g.name, timeout, err)
			}
			if err != nil {
				return err
			}
			return sayHeld(cmd, c)
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 30*time.Second, "how long to wait")
	return cmd
}

// sayHeld names those that were not waited for.
func sayHeld(cmd *cobra.Command, c *cluster.Client) error {
	s, err := c.Status(cmd.Context())
	if err != nil {
		return err
	}
	for _, n := range s.Nodes {
		if n.State == "paused" {
			fmt.Fprintf(cmd.ErrOrStderr(), "not waited for: node %s, which is paused\n", n.Name)
			continue
		}
		if n.Proxy.Held != "" {
			fmt.Fprintf(cmd.ErrOrStderr(), "not waited for: the proxy of %s, held by fault %s\n", n.Name, n.Proxy.Held)
		}
	}
	return nil
}
