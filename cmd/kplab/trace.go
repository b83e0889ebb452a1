// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/trace"
)

func newTraceCommand(g *globals) *cobra.Command {
	var r trace.Request
	var reply, all bool
	var format string
	cmd := &cobra.Command{
		Use:   "trace FROM TO",
		Short: "send one real request and tell what the kernel did with it",
		Long: `Send one real request and tell what the kernel did with it: the look-up of the
name, every device, hook and rule on the way, how addresses were translated, who
answered, or where and why the request ended.

FROM is a node's name, "outside" (a client that is no node and no pod), or
pod/[NAMESPACE/]NAME. TO is one of
  svc/[NAMESPACE/]NAME[:PORT]   a Service, at its cluster IP; PORT is a number or a name
  NAME[:PORT]                   a DNS name, looked up as a program in FROM would
  node/NAME:PORT                a node's address, for a nodePort
  pod/[NAMESPACE/]NAME[:PORT]   a pod, without any Service
  ADDRESS:PORT

Exit code 0 means that the request was answered, 1 that it was not.`,
		Example: `  kplab trace node1 svc/web
  kplab trace pod/client web.default:80 --reply
  kplab trace outside node/node2:30080 --count 10 -o json`,
		Args: exactArgs("FROM", "TO"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if r.Proto != "tcp" && r.Proto != "udp" {
				return usageError{fmt.Errorf("protocol %q: want tcp or udp", r.Proto)}
			}
			if r.Count < 1 {
				return usageError{fmt.Errorf("count %d: want at least 1", r.Count)}
			}
			if format != "" && format != "text" && format != "json" {
				return usageError{fmt.Errorf("output format %q: want text or json", format)}
			}
			r.From, r.To = args[0], args[1]
			lab, err := openTrace(cmd, g)
			if err != nil {
				return err
			}
			defer lab.Close()
			rep, err := lab.Run(cmd.Context(), r)
			if bad := (*trace.TargetError)(nil); errors.As(err, &bad) {
				return usageError{err}
			} else if err != nil {
				return err
			}
			if format == "json" {
				err = printJSON(cmd.OutOrStdout(), rep)
			} else {
				err = rep.WriteText(cmd.OutOrStdout(), trace.TextOptions{Reply: reply, All: all})
			}
			if err == nil && !rep.OK() {
				err = exitError(exitFailed)
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&r.Proto, "proto", "tcp", "protocol: tcp or udp")
	f.IntVar(&r.Count, "count", 1, "number of requests, one after the other")
	f.BoolVar(&reply, "reply", false, "tell the way back in full, too")
	f.BoolVar(&all, "all", false, "tell every event, also of chains in which nothing was decided")
	f.DurationVar(&r.Timeout, "timeout", 3*time.Second, "how long a request may take")
	f.StringVarP(&r.Namespace, "namespace", "n", "default", "namespace of pods and Services that are named without one")
	f.StringVarP(&format, "output", "o", "", "output format: text or json")
	return cmd
}

// openTrace opens the running lab for looking.
func openTrace(cmd *cobra.Command, g *globals) (*trace.Lab, error) {
	s, err := askStatus(cmd, g)
	if err != nil {
		return nil, err
	}
	return trace.Open(traceOptions(s))
}

// traceOptions is what a lab's status says to package trace.
func traceOptions(s cluster.Status) trace.Options {
	o := trace.Options{Runtime: s.Runtime, Kubeconfig: s.Kubeconfig, XtablesLock: cluster.PathsOf(s.Name).XtablesLock}
	for _, n := range s.Nodes {
		t := trace.Node{Name: n.Name, Mode: n.Proxy.Mode, Layout: n.Proxy.Layout, ProxyError: n.Proxy.Error, Synced: n.Proxy.Synced}
		// The lab's own words: they parse.
		t.Address, _ = netip.ParseAddr(n.Address)
		t.PodCIDR, _ = netip.ParsePrefix(n.PodCIDR)
		o.Nodes = append(o.Nodes, t)
	}
	return o
}
