// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/trace"
)

func newTraceCommand(g *globals) *cobra.Command {
	var r trace.Request
	var reply, all bool
	var format, compare string
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
			if format != "" && format != "text" && format != "json" && format != "svg" {
				return usageError{fmt.Errorf("output format %q: want text, json or svg", format)}
			}
			r.From, r.To = args[0], args[1]
			if compare != "" {
				return compareModes(cmd, g, r, compare, format)
			}
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
			switch format {
			case "json":
				err = printJSON(cmd.OutOrStdout(), rep)
			case "svg":
				err = lab.WriteSVG(cmd.Context(), cmd.OutOrStdout(), rep)
			default:
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
	f.StringVarP(&r.Namespace, "namespace", "n", "", "namespace of pods and Services that are named without one (default: that of the lab's kubeconfig)")
	f.StringVarP(&format, "output", "o", "", "output format: text, json or svg")
	f.StringVar(&compare, "compare", "", "two proxy modes, as in iptables,nftables: trace in each, and lay both side by side")
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
		// The lab's own words: they parse. Packets are followed over IPv4.
		t.Address, _ = netip.ParseAddr(n.Address)
		for _, text := range n.Addresses {
			if a, err := netip.ParseAddr(text); err == nil && a.Is4() {
				t.Address = a
			}
		}
		t.PodCIDR, _ = netip.ParsePrefix(n.PodCIDR)
		o.Nodes = append(o.Nodes, t)
	}
	return o
}

// compareModes traces the same request in two modes. The nodes are switched to each
// in turn and then back, which no connection notices.
func compareModes(cmd *cobra.Command, g *globals, r trace.Request, modes, format string) (err error) {
	left, right, ok := strings.Cut(modes, ",")
	if !ok || left == "" || right == "" || strings.Contains(right, ",") {
		return usageError{fmt.Errorf("--compare %q: want two modes, as in iptables,nftables or iptables,nftables/compact", modes)}
	}
	if format == "svg" {
		return usageError{errors.New("--compare has no picture: want text or json")}
	}
	ctx := cmd.Context()
	c, err := cluster.Connect(g.name)
	if err != nil {
		return err
	}
	before, err := c.Status(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restoreModes(context.WithoutCancel(ctx), c, before)) }()
	var reports []*trace.Report
	for _, m := range []string{left, right} {
		mode, layout, _ := strings.Cut(m, "/")
		if err := c.SetProxy(ctx, "", cluster.ProxyConfig{Mode: mode, NFTLayout: layout}); err != nil {
			return err
		}
		if err := c.Settle(ctx, 0); err != nil {
			return err
		}
		lab, err := openTrace(cmd, g)
		if err != nil {
			return err
		}
		rep, err := lab.Run(ctx, r)
		lab.Close()
		if bad := (*trace.TargetError)(nil); errors.As(err, &bad) {
			return usageError{err}
		} else if err != nil {
			return err
		}
		reports = append(reports, rep)
	}
	if format == "json" {
		return printJSON(cmd.OutOrStdout(), reports)
	}
	return trace.WriteComparison(cmd.OutOrStdout(), reports[0], reports[1], 0)
}

// restoreModes gives every node the mode that it had: all at once where they had one.
func restoreModes(ctx context.Context, c *cluster.Client, s cluster.Status) error {
	had := map[cluster.ProxyConfig][]string{}
	for _, n := range s.Nodes {
		p := cluster.ProxyConfig{Mode: n.Proxy.Mode, NFTLayout: n.Proxy.Layout}
		had[p] = append(had[p], n.Name)
	}
	var errs []error
	for p, nodes := range had {
		if len(had) == 1 {
			nodes = []string{""}
		}
		for _, n := range nodes {
			errs = append(errs, c.SetProxy(ctx, n, p))
		}
	}
	return errors.Join(errs...)
}
