// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
)

// rulesComplete reads the rules of the node that the request meets, and compares the
// endpoints in them with those of the slices.
func rulesComplete(p *patient) []Cause {
	if p.headless() || p.spec == nil || p.probe == nil || !p.probe.OK() && p.probe.Reason != "no-answer" {
		return nil // the request has said it already
	}
	name := p.viaNode()
	n := p.lab.node(name)
	if n == nil {
		return nil
	}
	in, err := p.inRules(n)
	if err != nil || in == nil {
		return nil
	}
	want := map[netip.AddrPort]bool{}
	hints := false
	for _, s := range p.x.slices[p.key] {
		for _, e := range s.Endpoints {
			hints = hints || e.Hints != nil
		}
	}
	local := p.svc.Spec.InternalTrafficPolicy != nil && *p.svc.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
	var missing, stale []string
	for _, e := range p.endpoints() {
		if e.Addr.Addr().Is4() {
			want[e.Addr] = true
		}
		if e.Ready && e.Addr.Addr().Is4() && !hints && !local && !in[e.Addr] {
			missing = append(missing, e.Addr.String())
		}
	}
	for a := range in {
		if !want[a] {
			stale = append(stale, a.String())
		}
	}
	slices.Sort(stale)
	if len(missing)+len(stale) == 0 {
		return nil
	}
	c := Cause{Text: fmt.Sprintf("the rules of %s are not those of the EndpointSlices of Service %s:", name, p.key), Evidence: p.sliceEvidence()}
	if len(missing) > 0 {
		c.Text += " no rule leads to " + strings.Join(missing, ", ")
	}
	if len(stale) > 0 {
		c.Text += " rules lead to " + strings.Join(stale, ", ") + ", where no endpoint is any more"
	}
	p.proxyTrouble(&c, name)
	return []Cause{c}
}

// inRules reads the endpoints of the Service port out of a node's rules; nil where the
// mode has none that name them.
func (p *patient) inRules(n *Node) (map[netip.AddrPort]bool, error) {
	place, err := p.lab.Place(n.Name, "")
	if err != nil {
		return nil, err
	}
	port := PortName(p.svc, p.spec)
	out := map[netip.AddrPort]bool{}
	switch n.ModeName() {
	case "iptables":
		prog, err := openProgram(place.ns, p.lab.lockOf(place))
		if err != nil {
			return nil, err
		}
		defer prog.close()
		lines, err := prog.save(p.ctx, chainKey{family: unix.NFPROTO_IPV4, table: "nat"})
		if err != nil {
			return nil, err
		}
		for _, all := range lines {
			for _, l := range all {
				if _, rest, ok := strings.Cut(l, fmt.Sprintf("--comment \"%s -> ", port)); ok {
					if a, err := netip.ParseAddrPort(rest[:max(0, strings.IndexByte(rest, '"'))]); err == nil {
						out[a] = true
					}
				}
			}
		}
	case "nftables":
		text, err := nftChains(p.ctx, place.ns, fmt.Sprintf("-%s/%s/%s/%s", port.Namespace, port.Name, p.proto(), port.Port))
		if err != nil {
			return nil, err
		}
		for _, m := range nftEndpoint.FindAllStringSubmatch(text, -1) {
			if a, err := netip.ParseAddrPort(m[1] + ":" + m[2]); err == nil {
				out[a] = true
			}
		}
	default:
		return nil, nil
	}
	return out, nil
}

// nftEndpoint is an endpoint as nft lists it, in a map of a Service's chain or as the
// destination of a translation.
var nftEndpoint = regexp.MustCompile(`(\d+(?:\.\d+){3})(?: \. |:)(\d+)`)

// nftChains lists the chains of table kube-proxy that belong to one Service port: mark is
// how their names end, but for those of endpoints, which go on with the endpoint.
func nftChains(ctx context.Context, ns *netns.NS, mark string) (string, error) {
	run := execx.In(ns)
	r, err := run.Run(ctx, execx.Cmd{Path: "nft", Args: []string{"list", "chains", "ip"}})
	if err != nil {
		return "", fmt.Errorf("list the chains: %w", err)
	}
	var script strings.Builder
	for l := range strings.Lines(string(r.Stdout)) {
		f := strings.Fields(l)
		if len(f) > 1 && f[0] == "chain" && (strings.HasSuffix(f[1], mark) || strings.Contains(f[1], mark+"__")) {
			fmt.Fprintf(&script, "list chain ip kube-proxy %s\n", f[1])
		}
	}
	if r, err = run.Run(ctx, execx.Cmd{Path: "nft", Args: []string{"-f", "-"}, Stdin: []byte(script.String())}); err != nil {
		return "", fmt.Errorf("list the chains of %s: %w", mark[1:], err)
	}
	return string(r.Stdout), nil
}
