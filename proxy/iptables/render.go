// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"crypto/sha256"
	"net/netip"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/proxy"
)

// largeCluster is the number of endpoints above which the comments of Service
// and endpoint chains are left out, as upstream does: they are a third of the
// text.
const largeCluster = 1000

// hub is a chain that holds rules of many Services.
type hub int

const (
	natServices hub = iota
	natNodePorts
	filterServices
	filterExternal
	filterNodePorts
	filterProxyFirewall
	hubs
)

func (h hub) table() string {
	if h == natServices || h == natNodePorts {
		return "nat"
	}
	return "filter"
}

func (h hub) chain() string {
	return [...]string{chainServices, chainNodePorts, chainServices, chainExternalServices, chainNodePorts, chainProxyFirewall}[h]
}

// chain is one chain with all its rules as lines "-A name …".
type chain struct {
	name  string
	text  string
	rules int
	jumps int // rules that jump to it, where it is a Service's or an endpoint's
}

// block is what one Service port adds to the ruleset. It is made once and never
// changed, so two rulesets that share a block agree in it.
type block struct {
	// chains are of the nat table, in an order in which each chain comes before
	// those that jump to it.
	chains []chain
	hubs   [hubs]string
	marks  int // jumps to KUBE-MARK-MASQ
	sum    [sha256.Size]byte
}

// settings is what a block depends on besides the Service port.
type settings struct {
	family        corev1.IPFamily
	clusterCIDR   netip.Prefix
	masqueradeAll bool
	localhost     bool // nodePorts on 127.0.0.0/8
	nfacct        bool
	randomFully   bool
	invalidDrop   bool
	large         bool
}

// v6 reports the family whose tool is ip6tables.
func (s settings) v6() bool { return s.family == corev1.IPv6Protocol }

// renderBlock writes the rules of one Service port. Lines are written in the
// form in which iptables-save prints them, so that a ruleset can be compared
// with the kernel's as text.
func renderBlock(s settings, p *proxy.ServicePort) *block {
	w := writer{settings: s, port: p, name: p.String(), key: portKey(p.ServicePortName), proto: strings.ToLower(string(p.Protocol)), jumps: map[string]int{}}
	id := hash(w.key)
	w.svc, w.svl, w.ext, w.fw = prefixCluster+id, prefixLocal+id, prefixExternal+id, prefixFirewall+id
	w.internal()
	w.external()
	w.serviceChains()
	h := sha256.New()
	for i := range w.out.chains {
		c := &w.out.chains[i]
		c.jumps = w.jumps[c.name]
		h.Write([]byte(c.text))
	}
	w.out.marks = w.jumps[chainMarkMasq]
	for i := range w.hubs {
		w.out.hubs[i] = w.hubs[i].String()
		h.Write([]byte(w.out.hubs[i]))
	}
	h.Sum(w.out.sum[:0])
	return &w.out
}

// writer renders one block.
type writer struct {
	settings
	port               *proxy.ServicePort
	name, key, proto   string
	svc, svl, ext, fw  string
	hubs               [hubs]strings.Builder
	current            strings.Builder // the chain being written
	currentName        string
	currentRules       int
	jumps              map[string]int // to each chain of ours
	out                block
	sepNames, sepAddrs []string // parallel to the endpoints of endpointChains
}

// rule appends a rule to the chain being written.
func (w *writer) rule(parts ...string) {
	w.currentRules++
	w.line(&w.current, w.currentName, parts)
}

// to appends a rule to a hub.
func (w *writer) to(h hub, parts ...string) { w.line(&w.hubs[h], h.chain(), parts) }

func (w *writer) line(b *strings.Builder, chain string, parts []string) {
	if name, ours := strings.CutPrefix(parts[len(parts)-1], "-j KUBE-"); ours {
		w.jumps["KUBE-"+name]++
	}
	line(b, chain, parts)
}

func line(b *strings.Builder, chain string, parts []string) {
	b.WriteString("-A ")
	b.WriteString(chain)
	for _, p := range parts {
		if p != "" {
			b.WriteByte(' ')
			b.WriteString(p)
		}
	}
	b.WriteByte('\n')
}

func (w *writer) begin(name string) { w.currentName, w.currentRules = name, 0 }

func (w *writer) end() {
	w.out.chains = append(w.out.chains, chain{name: w.currentName, text: w.current.String(), rules: w.currentRules})
	w.current = strings.Builder{}
}

func comment(s string) string { return `-m comment --comment "` + s + `"` }

// note is a comment that large clusters do without.
func (w *writer) note(s string) string {
	if w.large {
		return ""
	}
	return comment(s)
}

func (w *writer) match(port uint16) string {
	return "-m " + w.proto + " --dport " + strconv.Itoa(int(port))
}

// host is an address as iptables-save prints it in -s and -d.
func host(a netip.Addr) string {
	return netip.PrefixFrom(a, a.BitLen()).String()
}

func (w *writer) reject() string {
	if w.v6() {
		return "-j REJECT --reject-with icmp6-port-unreachable"
	}
	return "-j REJECT --reject-with icmp-port-unreachable"
}

// refuse is the target and comment for an entry that balances over nothing.
func (w *writer) refuse(v proxy.Verdict) (target, why string) {
	if v == proxy.Reject {
		return w.reject(), comment(w.name + " has no endpoints")
	}
	return "-j DROP", comment(w.name + " has no local endpoints")
}

// policy is the chain that balances over the scope of an entry.
func (w *writer) policy(local bool) string {
	if local {
		return w.svl
	}
	return w.svc
}

// internal writes the entry of the cluster address.
func (w *writer) internal() {
	p := w.port
	dst := "-d " + host(p.ClusterIP) + " -p " + w.proto
	if p.Internal == proxy.Balance {
		w.to(natServices, dst, comment(w.name+" cluster IP"), w.match(p.Port), "-j "+w.policy(p.InternalLocal))
		return
	}
	target, why := w.refuse(p.Internal)
	w.to(filterServices, dst, why, w.match(p.Port), target)
}

// usesFirewall says whether load balancer addresses are limited to some sources.
func (w *writer) usesFirewall() bool {
	return w.port.Usable() && len(w.port.SourceRanges) > 0 && len(w.port.LoadBalancerIPs) > 0
}

// external writes the entries of nodePort, external and load balancer
// addresses. When the policy is Local and this node has no endpoint, both kinds
// of rules are there: nat serves pods and the node itself, and what is left
// meets the drop.
func (w *writer) external() {
	p := w.port
	if p.HealthCheckNodePort != 0 {
		w.to(filterNodePorts, "-p tcp", comment(w.name+" health check node port"), "-m tcp --dport "+strconv.Itoa(int(p.HealthCheckNodePort)), "-j ACCEPT")
	}
	if !p.ExternallyAccessible() {
		return
	}
	target, why := "", ""
	if p.External != proxy.Balance {
		target, why = w.refuse(p.External)
	}
	entry := func(a netip.Addr, kind, jump string) {
		dst := "-d " + host(a) + " -p " + w.proto
		if p.Usable() {
			w.to(natServices, dst, comment(w.name+kind), w.match(p.Port), "-j "+jump)
		}
		if target != "" {
			w.to(filterExternal, dst, why, w.match(p.Port), target)
		}
	}
	for _, a := range p.ExternalIPs {
		entry(a, " external IP", w.ext)
	}
	lb := w.ext
	if w.usesFirewall() {
		lb = w.fw
	}
	for _, a := range p.LoadBalancerIPs {
		entry(a, " loadbalancer IP", lb)
		if lb == w.fw {
			w.to(filterProxyFirewall, "-d "+host(a)+" -p "+w.proto,
				comment(w.name+" traffic not accepted by "+w.fw), w.match(p.Port), "-j DROP")
		}
	}
	if p.NodePort == 0 {
		return
	}
	if p.Usable() {
		if w.localhost && w.nfacct {
			w.to(natNodePorts, "-d 127.0.0.0/8 -p "+w.proto, comment(w.name), w.match(p.NodePort), "-m nfacct --nfacct-name "+acctLocalhost, "-j "+w.ext)
		}
		w.to(natNodePorts, "-p "+w.proto, comment(w.name), w.match(p.NodePort), "-j "+w.ext)
	}
	if target != "" {
		w.to(filterExternal, "-p "+w.proto, why, "-m addrtype --dst-type LOCAL", w.match(p.NodePort), target)
	}
}

// serviceChains writes the chains of the port: endpoints first, then what jumps
// to them.
func (w *writer) serviceChains() {
	p := w.port
	w.endpointChains()
	if p.UsesCluster() {
		w.balance(w.svc, p.Cluster, p.Internal == proxy.Balance && !p.InternalLocal)
	}
	if p.UsesLocal() {
		w.balance(w.svl, p.Local, p.Internal == proxy.Balance && p.InternalLocal)
	}
	if p.Usable() && p.ExternallyAccessible() {
		w.externalChain()
	}
	if w.usesFirewall() {
		w.firewallChain()
	}
}

// endpointChains writes a chain for each endpoint: a packet from the endpoint to
// itself is masqueraded, else the answer would not come back through here; then
// the address is translated.
func (w *writer) endpointChains() {
	set := ""
	all := w.port.AllEndpoints()
	w.sepNames, w.sepAddrs = make([]string, len(all)), make([]string, len(all))
	for i := range all {
		addr := all[i].Addr.String()
		name := prefixEndpoint + hash(w.key+addr)
		w.sepNames[i], w.sepAddrs[i] = name, addr
		if w.port.Affinity > 0 {
			set = "-m recent --set --name " + name + " --mask " + w.fullMask() + " --rsource"
		}
		w.begin(name)
		w.rule("-s "+host(all[i].Addr.Addr()), w.note(w.name), "-j "+chainMarkMasq)
		w.rule("-p "+w.proto, w.note(w.name), set, "-m "+w.proto, "-j DNAT --to-destination "+addr)
		w.end()
	}
}

// endpoint finds the chain name and the text of the address of an endpoint.
func (w *writer) endpoint(all []proxy.Endpoint, from int, want netip.AddrPort) int {
	for i := from; i < len(all); i++ {
		if all[i].Addr == want {
			return i
		}
	}
	return -1
}

func (w *writer) fullMask() string {
	if w.v6() {
		return "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	}
	return "255.255.255.255"
}

// balance writes the chain that spreads over endpoints. A client with affinity
// goes where it was seen last; others are spread evenly: of n endpoints the
// first is taken with probability 1/n, the next with 1/(n-1), the last always.
func (w *writer) balance(name string, eps []proxy.Endpoint, clusterAddress bool) {
	p := w.port
	w.begin(name)
	if clusterAddress {
		dst := "-d " + host(p.ClusterIP) + " -p " + w.proto
		what := comment(w.name + " cluster IP")
		switch {
		case w.masqueradeAll:
			w.rule(dst, what, w.match(p.Port), "-j "+chainMarkMasq)
		case w.clusterCIDR.IsValid():
			w.rule("! -s "+w.clusterCIDR.String(), dst, what, w.match(p.Port), "-j "+chainMarkMasq)
		}
	}
	all := p.AllEndpoints()
	index := make([]int, len(eps))
	from := 0
	for i := range eps {
		index[i] = w.endpoint(all, from, eps[i].Addr)
		from = index[i] + 1
	}
	arrow := func(i int) string {
		if w.large {
			return ""
		}
		return comment(w.name + " -> " + w.sepAddrs[i])
	}
	if p.Affinity > 0 {
		seconds := strconv.Itoa(int(p.Affinity.Seconds()))
		for _, i := range index {
			w.rule(arrow(i), "-m recent --rcheck --seconds "+seconds+" --reap --name "+w.sepNames[i]+" --mask "+w.fullMask()+" --rsource", "-j "+w.sepNames[i])
		}
	}
	for k, i := range index {
		chance := ""
		if left := len(index) - k; left > 1 {
			chance = "-m statistic --mode random --probability " + probability(left)
		}
		w.rule(arrow(i), chance, "-j "+w.sepNames[i])
	}
	w.end()
}

// probability is 1/n as the kernel can hold it, a multiple of 2^-31, printed as
// iptables-save does: 1/3 is 0.33333333349.
func probability(n int) string {
	steps := (uint64(1)<<31 + uint64(n)/2) / uint64(n)
	return strconv.FormatFloat(float64(steps)/(1<<31), 'f', 11, 64)
}

// externalChain writes where external traffic goes once it is let in.
func (w *writer) externalChain() {
	p := w.port
	w.begin(w.ext)
	switch {
	case !p.ExternalLocal:
		w.rule(comment("masquerade traffic for "+w.name+" external destinations"), "-j "+chainMarkMasq)
	case p.UsesCluster():
		// Pods and the node itself would be served cluster-wide by the cluster
		// address; they are on this road as well.
		if w.clusterCIDR.IsValid() {
			w.rule("-s "+w.clusterCIDR.String(), comment("pod traffic for "+w.name+" external destinations"), "-j "+w.svc)
		}
		w.rule(comment("masquerade LOCAL traffic for "+w.name+" external destinations"), "-m addrtype --src-type LOCAL", "-j "+chainMarkMasq)
		w.rule(comment("route LOCAL traffic for "+w.name+" external destinations"), "-m addrtype --src-type LOCAL", "-j "+w.svc)
	}
	if p.External == proxy.Balance {
		w.rule("-j " + w.policy(p.ExternalLocal))
	}
	w.end()
}

// firewallChain lets the source ranges pass. What comes back from it untranslated
// is dropped by KUBE-PROXY-FIREWALL, since nat may not drop.
func (w *writer) firewallChain() {
	p := w.port
	what := comment(w.name + " loadbalancer IP")
	w.begin(w.fw)
	for _, r := range p.SourceRanges {
		src := "-s " + r.String()
		if r.Bits() == 0 {
			src = "" // everybody; the tools print no match for it
		}
		w.rule(src, what, "-j "+w.ext)
	}
	if p.SourceRangesHoldNode {
		for _, a := range p.LoadBalancerIPs {
			w.rule("-s "+host(a), what, "-j "+w.ext)
		}
	}
	w.rule(comment("other traffic to " + w.name + " will be dropped by " + chainProxyFirewall))
	w.end()
}
