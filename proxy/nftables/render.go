// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"net/netip"
	"slices"

	"github.com/kplab/kplab/proxy"
)

// set numbers the named sets and maps that all Services share.
type set int

const (
	hairpins set = iota
	clusterIPs
	nodePortIPs
	noEndpointServices
	noEndpointNodePorts
	firewallIPs
	serviceIPs
	serviceNodePorts
	endpoints // of the compact layout only
	sets
)

// chain is a chain with all its rules.
type chain struct {
	name, comment string
	hook          *hook
	rules         []rule
}

// hook is where a base chain hangs.
type hook struct {
	kind, point, priority string // as nft writes them
	number                uint32
	value                 int32
}

// block is what one Service port adds to the table. It is made once and never
// changed, so two rulesets that share a block agree in it.
type block struct {
	// chains come before those that refer to them.
	chains   []chain
	affinity []*container
	elements [sets][]element
	// shapes are the shared chains of the compact layout that elements lead to.
	shapes []shape
}

// settings is what a block depends on besides the Service port.
type settings struct {
	family
	layout      Layout
	clusterCIDR netip.Prefix
}

// renderBlock encodes one Service port.
func renderBlock(s settings, p *proxy.ServicePort) *block {
	w := writer{settings: s, port: p, name: p.String(), protocol: protocolNumber(string(p.Protocol)), path: portPath(p.ServicePortName)}
	// A client's endpoint is remembered in a set for each endpoint: the compact
	// layout has no place for that, so Services with affinity keep upstream's shape.
	w.compact = s.layout == LayoutCompact && p.Affinity == 0
	if !w.compact || w.limited() {
		base := hashed(w.path)
		w.svc, w.local, w.ext, w.fw = prefixCluster+base, prefixLocal+base, prefixExternal+base, prefixFirewall+base
	}
	w.endpoints()
	w.serviceChains()
	w.entries()
	w.firewall()
	return &w.out
}

// writer renders one block.
type writer struct {
	settings
	port                *proxy.ServicePort
	name, path          string
	protocol            uint8
	svc, local, ext     string
	fw                  string
	compact             bool
	out                 block
	chainOf, affinityOf map[netip.AddrPort]string // with affinity
}

func (w *writer) element(s set, e element) { w.out.elements[s] = append(w.out.elements[s], e) }

// expect makes room for n more elements.
func (w *writer) expect(s set, n int) { w.out.elements[s] = slices.Grow(w.out.elements[s], n) }

func (w *writer) chain(name string, rules ...rule) {
	w.out.chains = append(w.out.chains, chain{name: name, rules: rules})
}

// endpoints writes what each endpoint needs for itself: the hairpin of those that
// run here, and with affinity a set of clients and a chain.
func (w *writer) endpoints() {
	p := w.port
	all := p.AllEndpoints()
	local := 0
	for i := range all {
		if all[i].Local {
			local++
		}
	}
	w.expect(hairpins, local)
	for i := range all {
		if a := all[i].Addr; all[i].Local {
			w.element(hairpins, element{key: key{addr: a.Addr(), protocol: w.protocol, port: a.Port()}})
		}
	}
	if p.Affinity == 0 {
		return
	}
	w.chainOf, w.affinityOf = map[netip.AddrPort]string{}, map[netip.AddrPort]string{}
	for i := range all {
		a := all[i].Addr
		base := hashed(endpointPath(w.path, a))
		w.chainOf[a], w.affinityOf[a] = prefixEndpoint+base, prefixAffinity+base
		w.out.affinity = append(w.out.affinity, w.affinitySet(prefixAffinity+base, p.Affinity))
		w.chain(prefixEndpoint+base, w.rule(remember(prefixAffinity+base)), w.rule(protocol(w.protocol), dnatTo(a)))
	}
}

// serviceChains writes the chains that balance, and the one for traffic from
// outside.
func (w *writer) serviceChains() {
	if w.compact {
		return
	}
	p := w.port
	if p.UsesCluster() {
		w.balance(w.svc, p.Cluster)
	}
	if p.UsesLocal() {
		w.balance(w.local, p.Local)
	}
	if !p.Usable() || !p.ExternallyAccessible() {
		return
	}
	last := ""
	if p.External == proxy.Balance {
		last = w.policy(p.ExternalLocal)
	}
	short := ""
	if p.UsesCluster() {
		short = w.svc
	}
	w.chain(w.ext, w.external(p.ExternalLocal, short, last)...)
}

// policy is the chain that balances over the scope of an entry.
func (w *writer) policy(local bool) string {
	if local {
		return w.local
	}
	return w.svc
}

// external is the rules of a chain for traffic from outside, before it is
// balanced. cluster is the chain that serves cluster-wide; last where everybody
// else goes, "" for on to the drop.
func (s settings) external(local bool, cluster, last string) []rule {
	var rules []rule
	switch {
	case !local:
		rules = append(rules, s.noted("masquerade", mark))
	case cluster != "":
		// Pods and the node itself would be served cluster-wide by the cluster
		// address; they are on this road as well.
		if s.clusterCIDR.IsValid() {
			rules = append(rules, s.noted("short-circuit pod traffic", in(source, s.clusterCIDR), gotoChain(cluster)))
		}
		rules = append(rules,
			s.noted("masquerade local traffic", isLocal(source), mark),
			s.noted("short-circuit local traffic", isLocal(source), gotoChain(cluster)))
	}
	if last != "" {
		rules = append(rules, s.rule(gotoChain(last)))
	}
	return rules
}

// balance writes a chain that spreads over endpoints. A client with affinity goes
// where it was seen last.
func (w *writer) balance(name string, eps []proxy.Endpoint) {
	if w.port.Affinity == 0 {
		addrs := make([]netip.AddrPort, len(eps))
		for i := range eps {
			addrs[i] = eps[i].Addr
		}
		w.chain(name, w.rule(protocol(w.protocol), dnatRandom(addrs)))
		return
	}
	var rules []rule
	var chains []string
	for i := range eps {
		a := eps[i].Addr
		rules = append(rules, w.rule(inSet(source, w.affinityOf[a]), gotoChain(w.chainOf[a])))
		chains = append(chains, w.chainOf[a])
	}
	w.chain(name, append(rules, w.rule(gotoRandom(chains)))...)
}

// entries writes the elements through which a packet finds the Service. When the
// policy is Local and this node has no endpoint, an entry is in both maps: what
// is not served on the way meets the drop.
func (w *writer) entries() {
	p := w.port
	at := func(a netip.Addr) key { return key{addr: a, protocol: w.protocol, port: p.Port} }
	w.element(clusterIPs, element{key: key{addr: p.ClusterIP}})
	if p.Internal == proxy.Balance {
		w.serve(serviceIPs, at(p.ClusterIP), true)
	} else {
		w.element(noEndpointServices, element{at(p.ClusterIP), w.refuse(p.Internal)})
	}
	if !p.ExternallyAccessible() {
		return
	}
	entry := func(serving, refusing set, k key) {
		if p.Usable() {
			w.serve(serving, k, false)
		}
		if p.External != proxy.Balance {
			w.element(refusing, element{k, w.refuse(p.External)})
		}
	}
	for _, a := range slices.Concat(p.ExternalIPs, p.LoadBalancerIPs) {
		entry(serviceIPs, noEndpointServices, at(a))
	}
	if p.NodePort != 0 {
		entry(serviceNodePorts, noEndpointNodePorts, key{protocol: w.protocol, port: p.NodePort})
	}
}

// serve writes an entry that leads to endpoints.
func (w *writer) serve(s set, k key, internal bool) {
	if w.compact {
		w.serveCompact(s, k, internal)
		return
	}
	to := w.ext
	if internal {
		to = w.policy(w.port.InternalLocal)
	}
	w.element(s, element{k, value{verdict: verdictGoto, chain: to}})
}

// refuse is the value of an entry that balances over nothing.
func (w *writer) refuse(v proxy.Verdict) value {
	if v == proxy.Reject {
		return value{verdict: verdictGoto, chain: chainReject, comment: w.name}
	}
	return value{verdict: verdictDrop, comment: w.name}
}

// limited says whether load balancer addresses are for some sources only.
func (w *writer) limited() bool {
	return len(w.port.SourceRanges) > 0 && len(w.port.LoadBalancerIPs) > 0
}

// firewall limits the load balancer addresses to the source ranges. It stands
// before the translation, so it may drop, and it holds for Services without
// endpoints too.
func (w *writer) firewall() {
	p := w.port
	if !w.limited() {
		return
	}
	ranges := slices.Clone(p.SourceRanges)
	for _, a := range p.LoadBalancerIPs {
		w.element(firewallIPs, element{key{addr: a, protocol: w.protocol, port: p.Port}, value{verdict: verdictGoto, chain: w.fw}})
		if p.SourceRangesHoldNode {
			// A node that talks to an address which is local to it does so from that
			// address.
			ranges = append(ranges, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	w.chain(w.fw, w.rule(inAny(source, ranges, true), drop))
}
