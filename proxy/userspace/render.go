// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
)

// ruleset is everything this mode has in the tables of one family, in the form in
// which iptables-save prints it.
type ruleset struct {
	family    corev1.IPFamily
	jumps     []jump
	rules     [chains][]rule
	listeners []listener
}

// jump is a rule of ours in a built-in chain.
type jump struct {
	table, chain, rule string
	// last puts it at the end of its chain; others stand at the head.
	last bool
}

// rule is one line of a chain of ours.
type rule struct {
	owner *proxy.ServicePort
	text  string
}

// listener is a port that has to be open for the rules to lead anywhere.
type listener struct {
	owner *proxy.ServicePort
	port  uint16
}

func (l listener) String() string {
	return fmt.Sprintf("%s/%d for %s -> %d endpoints", strings.ToLower(string(l.owner.Protocol)), l.port, l.owner.ServicePortName, len(l.owner.Ready()))
}

// newRuleset renders one family of a snapshot.
func newRuleset(s *proxy.Snapshot, family corev1.IPFamily, proxyPorts map[portID]uint16, busy map[portID]bool) *ruleset {
	r := &ruleset{family: family, jumps: jumps(s, family)}
	node := nodeIP(s, family)
	for _, p := range s.Services {
		if p.Family != family || !served(p) {
			continue
		}
		port := proxyPorts[idOf(p)]
		r.listeners = append(r.listeners, listener{p, port})
		add := func(c chain, match, target string) {
			r.rules[c] = append(r.rules[c], rule{p, "-A " + c.String() + " " + match + " " + target})
		}
		// A packet that arrives is redirected to the address of the link on which it
		// came: its answer leaves by the same link, so conntrack meets it there. One of
		// the node itself would be redirected to loopback, and be answered from
		// elsewhere; it is sent to the node's own address.
		redirect := fmt.Sprintf("-j REDIRECT --to-ports %d", port)
		toNode := "-j DNAT --to-destination " + netip.AddrPortFrom(node, port).String()
		for _, a := range append([]netip.Addr{p.ClusterIP}, p.LoadBalancerIPs...) {
			add(portalsContainer, match(p, a, p.Port), redirect)
			add(portalsHost, match(p, a, p.Port), toNode)
		}
		for _, a := range p.ExternalIPs {
			add(portalsContainer, match(p, a, p.Port), redirect)
			// The node's own packets to an external address that is not its own belong
			// to whoever has it.
			add(portalsHost, match(p, a, p.Port)+" -m addrtype --dst-type LOCAL", toNode)
		}
		if p.NodePort != 0 && !busy[idOf(p)] {
			add(nodePortContainer, match(p, netip.Addr{}, p.NodePort), redirect)
			add(nodePortHost, match(p, netip.Addr{}, p.NodePort), toNode)
			add(nodePortNonLocal, match(p, netip.Addr{}, port), "-m state --state NEW -j ACCEPT")
		}
	}
	return r
}

// match is what all rules of a Service port have: whose it is and what it is for.
func match(p *proxy.ServicePort, dst netip.Addr, port uint16) string {
	to := ""
	if dst.IsValid() {
		to = "-d " + netip.PrefixFrom(dst, dst.BitLen()).String() + " "
	}
	protocol := strings.ToLower(string(p.Protocol))
	return fmt.Sprintf("%s-p %s -m comment --comment %q -m %s --dport %d", to, protocol, p.String(), protocol, port)
}

// nodeIP is the node's primary address of a family.
func nodeIP(s *proxy.Snapshot, family corev1.IPFamily) netip.Addr {
	for _, a := range s.NodeIPs {
		if proxy.FamilyOf(a) == family {
			return a
		}
	}
	return netip.Addr{}
}

// jumps are the rules in built-in chains.
func jumps(s *proxy.Snapshot, family corev1.IPFamily) []jump {
	note := func(s string) string { return `-m comment --comment "` + s + `"` }
	out := []jump{
		{table: "filter", chain: "INPUT", rule: note(nonLocalNote) + " -j " + nodePortNonLocal.String()},
		{table: "nat", chain: "PREROUTING", rule: note(portalsNote) + " -j " + portalsContainer.String()},
		{table: "nat", chain: "OUTPUT", rule: note(portalsNote) + " -j " + portalsHost.String()},
	}
	nodePorts := func(from, match string, to chain) {
		out = append(out, jump{table: "nat", chain: from, rule: match + note(nodePortNote) + " -j " + to.String(), last: true})
	}
	const local = "-m addrtype --dst-type LOCAL "
	np, loopback := s.NodePorts[family], "127.0.0.0/8"
	if family == corev1.IPv6Protocol {
		loopback = "::1/128"
	}
	localhost := s.LocalhostNodePorts && family == corev1.IPv4Protocol
	if np.All {
		nodePorts("PREROUTING", local, nodePortContainer)
		if localhost {
			nodePorts("OUTPUT", local, nodePortHost)
		} else {
			nodePorts("OUTPUT", "! -d "+loopback+" "+local, nodePortHost)
		}
		return out
	}
	for _, a := range np.Addrs {
		to := "-d " + netip.PrefixFrom(a, a.BitLen()).String() + " "
		nodePorts("PREROUTING", to+local, nodePortContainer)
		nodePorts("OUTPUT", to+local, nodePortHost)
	}
	if localhost {
		nodePorts("OUTPUT", "-d "+loopback+" "+local, nodePortHost)
	}
	return out
}

// text writes a table in full, as for an empty kernel.
func (r *ruleset) text(b *strings.Builder, table string) {
	b.WriteString("*" + table + "\n")
	for _, c := range chainsOf(table) {
		xtables.Declare(b, c.String())
	}
	for _, j := range r.jumps {
		if j.table == table {
			b.WriteString(j.line() + "\n")
		}
	}
	for _, c := range chainsOf(table) {
		for _, l := range r.rules[c] {
			b.WriteString(l.text + "\n")
		}
	}
	b.WriteString("COMMIT\n")
}

func (j jump) line() string { return "-A " + j.chain + " " + j.rule }

// lines are the rules of a chain.
func (r *ruleset) lines(c chain) []string {
	out := make([]string, 0, len(r.rules[c]))
	for _, l := range r.rules[c] {
		out = append(out, l.text)
	}
	return out
}
