// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/trace"
)

// withStoppedAPI says that the API is stopped on purpose, where that is why it was not
// reached.
func withStoppedAPI(s cluster.Status, err error) error {
	for _, f := range s.Faults {
		if f.Kind == cluster.APIStopped {
			return fmt.Errorf("%w; the API is stopped on purpose (kplab fault clear %s)", err, f.ID)
		}
	}
	return err
}

func newWhyCommand(g *globals) *cobra.Command {
	var r trace.WhyRequest
	var format string
	cmd := &cobra.Command{
		Use:   "why svc/NAME[:PORT] [from WHERE]",
		Short: "say why a Service does not work: the first cause, and the fix",
		Long: `Walk the path of a Service from the API to the kernel and name the first cause why
it does not work, with the fix, and prove it with a real request.

WHERE is a node's name, "outside", or pod/[NAMESPACE/]NAME, as for kplab trace; without
it a worker node is asked. What is found behind the first cause is listed after it: mend
the first and ask again.

Exit code 0 means that nothing was found, 1 that something was.`,
		Example: `  kplab why svc/web
  kplab why svc/web:http from pod/client
  kplab why svc/shop/web from outside -o json`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 1 || len(args) == 3 && args[1] == "from" {
				return nil
			}
			return usageError{errors.New("want svc/NAME[:PORT], and perhaps `from WHERE` behind it")}
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if format != "" && format != "json" {
				return usageError{fmt.Errorf("output format %q: want json, or nothing for text", format)}
			}
			r.Service = args[0]
			if len(args) == 3 {
				r.From = args[2]
			}
			s, err := askStatus(cmd, g)
			if err != nil {
				return err
			}
			for _, f := range s.Faults {
				r.Known = append(r.Known, trace.KnownFault{ID: f.ID, Kind: string(f.Kind), Node: f.Node, Says: f.Says})
			}
			lab, err := trace.Open(traceOptions(s))
			if err != nil {
				return err
			}
			defer lab.Close()
			d, err := lab.Why(cmd.Context(), r)
			if bad := (*trace.TargetError)(nil); errors.As(err, &bad) {
				return usageError{err}
			} else if err != nil {
				return withStoppedAPI(s, err)
			}
			if format == "json" {
				err = printJSON(cmd.OutOrStdout(), d)
			} else {
				err = d.WriteText(cmd.OutOrStdout())
			}
			if err == nil && !d.Healthy {
				err = exitError(exitFailed)
			}
			return err
		},
	}
	outputFlag(cmd, &format)
	cmd.Flags().StringVarP(&r.Namespace, "namespace", "n", "", "namespace of Services and pods that are named without one (default: that of the lab's kubeconfig)")
	return cmd
}
