// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

func newStatusCommand(g *globals) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "show how the lab is: its nodes, proxies and addresses",
		Args:  exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			s, err := askStatus(cmd, g)
			if err != nil {
				return err
			}
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), s)
			}
			return printStatus(cmd, s)
		},
	}
	outputFlag(cmd, &format)
	return cmd
}

// askStatus asks the lab's daemon how the lab is.
func askStatus(cmd *cobra.Command, g *globals) (cluster.Status, error) {
	c, err := cluster.Connect(g.name)
	if err != nil {
		return cluster.Status{}, err
	}
	return c.Status(cmd.Context())
}

func printStatus(cmd *cobra.Command, s cluster.Status) error {
	out := cmd.OutOrStdout()
	fmt.Fprintf(out, "lab         %s (pid %d, up %s)\n", s.Name, s.PID, time.Since(s.Since).Round(time.Second))
	fmt.Fprintf(out, "api         %s (revision %d)\n", s.API, s.Revision)
	fmt.Fprintf(out, "kubeconfig  %s\n", s.Kubeconfig)
	fmt.Fprintf(out, "state       %s\n", s.State)
	fmt.Fprintf(out, "outside     %s\n\n", strings.Join(s.OutsideAddresses, ", "))
	if len(s.Faults) > 0 {
		if err := printFaults(out, s.Faults); err != nil {
			return err
		}
		fmt.Fprintln(out)
	}
	if s.FaultsError != "" {
		fmt.Fprintf(cmd.ErrOrStderr(), "not all faults are in force, trying again: %s\n", s.FaultsError)
	}
	w := tabwriter.NewWriter(out, 0, 8, 3, ' ', 0)
	fmt.Fprintln(w, "NODE\tROLE\tREADY\tADDRESS\tPODS\tPOD CIDR\tPROXY\tSERVICES\tENDPOINTS\tERROR")
	for _, n := range s.Nodes {
		fmt.Fprintf(w, "%s\t%s\t%t\t%s\t%d\t%s\t%s\t%d\t%d\t%s\n", n.Name, n.Role, n.Ready, strings.Join(n.Addresses, ","), n.Pods, strings.Join(n.PodCIDRs, ","),
			n.Proxy.Mode, n.Proxy.Services, n.Proxy.Endpoints, orNone(proxyTrouble(n.Proxy)))
	}
	return w.Flush()
}

// proxyTrouble is why a proxy does not do its work.
func proxyTrouble(p cluster.ProxyStatus) string {
	if p.Held != "" {
		return "held by " + p.Held
	}
	return p.Error
}

func orNone(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
