// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
)

// ruleset is everything this mode has in the tables of one family.
type ruleset struct {
	settings
	// tail is the end of nat KUBE-SERVICES: the jump for nodePorts, which must
	// come after every Service.
	tail   string
	blocks []*block
	// owners names the Service port of each block, for messages.
	owners []*proxy.ServicePort
}

// tables in the order in which they are written. The canary of mangle comes
// first: it says that a full load has begun.
var tables = [...]string{"mangle", "filter", "nat"}

// jump is a rule of ours in a built-in chain.
type jump struct{ chain, rule string }

// jumps are the rules in built-in chains, in the order in which they stand at
// the head of each chain.
func (s settings) jumps(table string) []jump {
	const fresh = "-m conntrack --ctstate NEW "
	switch table {
	case "nat":
		portals := comment("kubernetes service portals") + " -j " + chainServices
		return []jump{
			{"PREROUTING", portals},
			{"OUTPUT", portals},
			{"POSTROUTING", comment("kubernetes postrouting rules") + " -j " + chainPostrouting},
		}
	case "filter":
		lb := fresh + comment("kubernetes load balancer firewall") + " -j " + chainProxyFirewall
		portals := fresh + comment("kubernetes service portals") + " -j " + chainServices
		external := fresh + comment("kubernetes externally-visible service portals") + " -j " + chainExternalServices
		out := []jump{
			{"INPUT", lb},
			{"INPUT", comment("kubernetes health check service ports") + " -j " + chainNodePorts},
			{"INPUT", external},
			{"FORWARD", lb},
			{"FORWARD", comment("kubernetes forwarding rules") + " -j " + chainForward},
			{"FORWARD", portals},
			{"FORWARD", external},
			{"OUTPUT", lb},
			{"OUTPUT", portals},
		}
		if !s.v6() {
			wall := "-j " + chainFirewall
			out = slices.Insert(out, 0, jump{"INPUT", wall})
			out = slices.Insert(out, len(out)-2, jump{"OUTPUT", wall})
		}
		return out
	}
	return nil
}

// fixed are the chains with rules that do not depend on Services.
func (s settings) fixed(table string) []chain {
	chainOf := func(name string, rules ...string) chain {
		var b strings.Builder
		for _, r := range rules {
			line(&b, name, []string{r})
		}
		return chain{name: name, text: b.String(), rules: len(rules)}
	}
	canary := chainOf(chainCanary)
	switch table {
	case "mangle":
		return []chain{canary}
	case "nat":
		masquerade := comment("kubernetes service traffic requiring SNAT") + " -j MASQUERADE"
		if s.randomFully {
			masquerade += " --random-fully"
		}
		return []chain{
			canary,
			chainOf(chainMarkMasq, "-j MARK --set-xmark "+masqueradeMark),
			// The mark is taken off again, so that a packet that passes the stack
			// twice (a tunnel) is judged afresh.
			chainOf(chainPostrouting, "-m mark ! --mark "+masqueradeMark+" -j RETURN", "-j MARK --set-xmark 0x4000/0x0", masquerade),
		}
	case "filter":
		var forward []string
		if s.invalidDrop {
			acct := ""
			if s.nfacct {
				acct = " -m nfacct --nfacct-name " + acctInvalidDropped
			}
			forward = append(forward, "-m conntrack --ctstate INVALID"+acct+" -j DROP")
		}
		forward = append(forward,
			comment("kubernetes forwarding rules")+" -m mark --mark "+masqueradeMark+" -j ACCEPT",
			comment("kubernetes forwarding conntrack rule")+" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
		out := []chain{canary, chainOf(chainForward, forward...)}
		if !s.v6() {
			// route_localnet opens 127.0.0.0/8 to neighbours on the link; only
			// what a nodePort translated may use it.
			out = append(out, chainOf(chainFirewall, "! -s 127.0.0.0/8 -d 127.0.0.0/8 "+comment("block incoming localnet connections")+
				" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"))
		}
		return out
	}
	return nil
}

// hubsOf are the hubs in a table.
func hubsOf(table string) []hub {
	switch table {
	case "nat":
		return []hub{natNodePorts, natServices}
	case "filter":
		return []hub{filterServices, filterExternal, filterNodePorts, filterProxyFirewall}
	}
	return nil
}

// hubText is the whole of a hub.
func (r *ruleset) hubText(h hub) string {
	var b strings.Builder
	for _, bl := range r.blocks {
		b.WriteString(bl.hubs[h])
	}
	if h == natServices {
		b.WriteString(r.tail)
	}
	return b.String()
}

// text writes a table in full, as for an empty kernel.
func (r *ruleset) text(b *strings.Builder, table string) {
	b.WriteString("*" + table + "\n")
	fixed := r.fixed(table)
	for _, h := range hubsOf(table) {
		xtables.Declare(b, h.chain())
	}
	for _, c := range fixed {
		xtables.Declare(b, c.name)
	}
	if table == "nat" {
		for _, bl := range r.blocks {
			for i := range bl.chains {
				xtables.Declare(b, bl.chains[i].name)
			}
		}
	}
	for _, j := range r.jumps(table) {
		b.WriteString("-A " + j.chain + " " + j.rule + "\n")
	}
	for _, c := range fixed {
		b.WriteString(c.text)
	}
	for _, h := range hubsOf(table) {
		b.WriteString(r.hubText(h))
	}
	if table == "nat" {
		for _, bl := range r.blocks {
			for i := range bl.chains {
				b.WriteString(bl.chains[i].text)
			}
		}
	}
	b.WriteString("COMMIT\n")
}

// nodePortTail is the end of nat KUBE-SERVICES.
func nodePortTail(s *proxy.Snapshot, family corev1.IPFamily, localhost bool) string {
	what := comment("kubernetes service nodeports; NOTE: this must be the last rule in this chain")
	np := s.NodePorts[family]
	var b strings.Builder
	if np.All {
		not := ""
		switch {
		case family == corev1.IPv6Protocol:
			// Nothing can leave the node with ::1 as its source.
			not = "! -d ::1/128"
		case !localhost:
			not = "! -d 127.0.0.0/8"
		}
		line(&b, chainServices, []string{not, what, "-m addrtype --dst-type LOCAL", "-j " + chainNodePorts})
		return b.String()
	}
	addrs := np.Addrs
	if localhost && family == corev1.IPv4Protocol {
		line(&b, chainServices, []string{"-d 127.0.0.0/8", what, "-j " + chainNodePorts})
	}
	for _, a := range addrs {
		line(&b, chainServices, []string{"-d " + host(a), what, "-j " + chainNodePorts})
	}
	return b.String()
}

// newRuleset renders one family of a snapshot. known maps Service ports to
// blocks of an earlier rendering with the same settings.
func newRuleset(s *proxy.Snapshot, set settings, known map[*proxy.ServicePort]*block) *ruleset {
	r := &ruleset{settings: set, tail: nodePortTail(s, set.family, set.localhost)}
	for _, p := range s.Services {
		if p.Family != set.family {
			continue
		}
		bl := known[p]
		if bl == nil {
			bl = renderBlock(set, p)
		}
		r.blocks = append(r.blocks, bl)
		r.owners = append(r.owners, p)
	}
	return r
}

// settingsFor reads the settings of one family out of a snapshot.
func settingsFor(s *proxy.Snapshot, family corev1.IPFamily, f Features) settings {
	set := settings{
		family:        family,
		masqueradeAll: s.MasqueradeAll,
		localhost:     s.LocalhostNodePorts && family == corev1.IPv4Protocol,
		nfacct:        f.NFAcct,
		randomFully:   f.RandomFully,
		invalidDrop:   !f.TCPLiberal,
		large:         s.Endpoints[family] > largeCluster,
		clusterCIDR:   netip.Prefix{},
	}
	if c := s.ClusterCIDR(family); c.IsValid() {
		set.clusterCIDR = c.Masked()
	}
	return set
}
