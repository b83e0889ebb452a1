// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/proxy"
)

// key names a virtual server.
type key struct {
	addr  netip.Addr
	port  uint16
	proto uint8 // IPPROTO_TCP and friends
}

func (k key) addrPort() netip.AddrPort { return netip.AddrPortFrom(k.addr, k.port) }

func (k key) String() string { return protoName(k.proto) + " " + k.addrPort().String() }

func compareKeys(a, b key) int {
	return cmp.Or(a.addr.Compare(b.addr), cmp.Compare(a.port, b.port), cmp.Compare(a.proto, b.proto))
}

// Flags of a virtual server, by linux/ip_vs.h.
const (
	flagPersistent = 0x1
	flagMHPort     = 0x10 // scheduler mh: hash the port too
	flagsOurs      = flagPersistent | 0x8 | flagMHPort | 0x20
)

// options is what a virtual server has besides its name and its real servers.
type options struct {
	scheduler string
	flags     uint32
	timeout   uint32 // of persistence, in seconds
}

// server is a virtual server as it is wanted.
type server struct {
	key
	options
	real []netip.AddrPort // sorted
	// serving are the endpoints that still answer, wanted or not: an open UDP flow to
	// one of them need not end.
	serving []netip.AddrPort
}

// entry is an element of a set. Which fields it has depends on the set's type; other
// is the source, an address or a range.
type entry struct {
	addr  netip.Addr
	proto uint8
	port  uint16
	other netip.Prefix
}

// text is the entry as ipset prints it.
func (e entry) text(kind string) string {
	switch kind {
	case bitmapPort:
		return strconv.Itoa(int(e.port))
	case hashIP:
		return e.addr.String()
	}
	s := e.addr.String() + "," + protoName(e.proto) + ":" + strconv.Itoa(int(e.port))
	switch {
	case kind == hashIPPortIP, kind == hashIPPortNet && e.other.IsSingleIP():
		s += "," + e.other.Addr().String()
	case kind == hashIPPortNet:
		s += "," + e.other.String()
	}
	return s
}

func compareEntries(a, b entry) int {
	return cmp.Or(a.addr.Compare(b.addr), cmp.Compare(a.proto, b.proto), cmp.Compare(a.port, b.port),
		a.other.Addr().Compare(b.other.Addr()), cmp.Compare(a.other.Bits(), b.other.Bits()))
}

func protoName(p uint8) string {
	switch p {
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	}
	return "tcp"
}

func protoOf(p corev1.Protocol) uint8 {
	switch p {
	case corev1.ProtocolUDP:
		return unix.IPPROTO_UDP
	case corev1.ProtocolSCTP:
		return unix.IPPROTO_SCTP
	}
	return unix.IPPROTO_TCP
}

// block is what one Service port adds. It is made once and never changed.
type block struct {
	servers []*server
	// nodePort has no address yet: it stands for one virtual server on each address of
	// the node, which only the node knows.
	nodePort *server
	// local says that the nodePort's traffic keeps its source.
	local bool
	// bound are the addresses for kube-ipvs0. An external one that the node has on
	// another link stays there alone.
	bound    netip.Addr
	external []netip.Addr
	entries  [sets][]entry
	// outRules are rules of KUBE-IPVS-OUT-FILTER.
	outRules []string
}

// settings is what a block depends on besides the Service port.
type settings struct {
	family        corev1.IPFamily
	scheduler     string
	clusterCIDR   netip.Prefix
	masqueradeAll bool
	features      Features
}

func (s settings) v6() bool { return s.family == corev1.IPv6Protocol }

func renderBlock(s settings, p *proxy.ServicePort) *block {
	b := &block{bound: p.ClusterIP}
	proto := protoOf(p.Protocol)
	opts := optionsOf(s, p)
	add := func(a netip.Addr, local bool) {
		b.servers = append(b.servers, &server{key: key{a, p.Port, proto}, options: opts, real: realServers(p, local), serving: p.Serving})
	}
	put := func(in set, a netip.Addr, other netip.Prefix) {
		b.entries[in] = append(b.entries[in], entry{a, proto, p.Port, other})
	}
	var none netip.Prefix

	put(setClusterIP, p.ClusterIP, none)
	add(p.ClusterIP, p.InternalLocal)
	for _, e := range p.AllEndpoints() {
		// A packet from an endpoint of this node to itself is masqueraded, else the
		// answer would not come back through here.
		if a := e.Addr.Addr(); e.Local {
			b.entries[setLoopBack] = append(b.entries[setLoopBack], entry{a, proto, e.Addr.Port(), single(a)})
		}
	}
	for _, a := range p.ExternalIPs {
		if p.ExternalLocal {
			put(setExternalIPLocal, a, none)
		} else {
			put(setExternalIP, a, none)
		}
		add(a, p.ExternalLocal)
		b.external = append(b.external, a)
	}
	for _, a := range p.LoadBalancerIPs {
		put(setLoadBalancer, a, none)
		if p.ExternalLocal {
			put(setLoadBalancerLocal, a, none)
		}
		if len(p.SourceRanges) > 0 {
			b.sourceRanges(s, p, a, put)
		}
		add(a, p.ExternalLocal)
		b.external = append(b.external, a)
	}
	if p.NodePort != 0 {
		b.nodePort = &server{key: key{port: p.NodePort, proto: proto}, options: opts, real: realServers(p, p.ExternalLocal), serving: p.Serving}
		b.local = p.ExternalLocal
		all, kept := nodePortSets(proto)
		if all.kind() == bitmapPort { // the others hold addresses of the node
			b.entries[all] = append(b.entries[all], entry{port: p.NodePort})
			if b.local {
				b.entries[kept] = append(b.entries[kept], entry{port: p.NodePort})
			}
		}
	}
	if p.HealthCheckNodePort != 0 {
		b.entries[setHealthCheckNodePort] = append(b.entries[setHealthCheckNodePort], entry{port: p.HealthCheckNodePort})
	}
	return b
}

// sourceRanges lets some sources in to a load balancer address. A packet that the
// node itself sends to it comes from the same address, since that is on kube-ipvs0;
// where the node is in no range, a rule keeps it out: it never passes INPUT.
func (b *block) sourceRanges(s settings, p *proxy.ServicePort, a netip.Addr, put func(set, netip.Addr, netip.Prefix)) {
	put(setLoadBalancerFW, a, netip.Prefix{})
	for _, r := range p.SourceRanges {
		for _, half := range halves(r) {
			put(setLoadBalancerSourceCIDR, a, half)
		}
	}
	switch {
	case p.SourceRangesHoldNode:
		put(setLoadBalancerSourceIP, a, single(a))
	case s.features.IPVSMatch:
		b.outRules = append(b.outRules, "-s "+single(a).String()+" -m ipvs --vproto "+strconv.Itoa(int(protoOf(p.Protocol)))+
			" --vaddr "+a.String()+" --vport "+strconv.Itoa(int(p.Port))+" -j DROP")
	}
}

// halves splits the range of all addresses, which a set cannot hold, into two that
// it can.
func halves(r netip.Prefix) []netip.Prefix {
	if r.Bits() != 0 {
		return []netip.Prefix{r}
	}
	upper := r.Addr().AsSlice()
	upper[0] = 0x80
	high, _ := netip.AddrFromSlice(upper)
	return []netip.Prefix{netip.PrefixFrom(r.Addr(), 1), netip.PrefixFrom(high, 1)}
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func optionsOf(s settings, p *proxy.ServicePort) options {
	o := options{scheduler: s.scheduler}
	// A name that nobody knows is said where the annotation is read; here it means the
	// node's own.
	if name, err := ParseScheduler(p.Scheduler); err == nil && p.Scheduler != "" {
		o.scheduler = name
	}
	if p.Affinity > 0 {
		o.flags |= flagPersistent
		o.timeout = uint32(p.Affinity.Seconds())
	}
	if o.scheduler == "mh" {
		o.flags |= flagMHPort
	}
	return o
}

// realServers is what an entry balances over. Where its policy is Local and the node
// has no endpoint, all are taken: pods and the node itself are to be served, and the
// client outside, whose address is kept, does not know the endpoint that answers it.
// A cluster address with that policy has none then, unless the Service has external
// entries: upstream's mode does not tell the two apart.
func realServers(p *proxy.ServicePort, local bool) []netip.AddrPort {
	from := p.Cluster
	if local && len(p.Local) > 0 {
		from = p.Local
	}
	var out []netip.AddrPort
	for _, e := range from {
		out = append(out, e.Addr)
	}
	return out
}

// nodePortSets are the set of a protocol's nodePorts, and that of those among them
// whose traffic keeps its source.
func nodePortSets(proto uint8) (all, local set) {
	switch proto {
	case unix.IPPROTO_UDP:
		return setNodePortUDP, setNodePortLocalUDP
	case unix.IPPROTO_SCTP:
		return setNodePortSCTP, setNodePortLocalSCTP
	}
	return setNodePortTCP, setNodePortLocalTCP
}

// ruleset is everything that this mode has in the kernel for one family, as far as it
// can be said without looking at the node.
type ruleset struct {
	settings
	blocks []*block
	owners []*proxy.ServicePort // parallel
	// nodeAddrs is where nodePorts answer; allAddrs means every address of the node, and
	// nodeAddrs are those that are known from elsewhere.
	nodeAddrs []netip.Addr
	allAddrs  bool
	rules     map[string]map[string][]string // table, chain, rules in order
}

// newRuleset renders one family of a snapshot. known maps Service ports to blocks of
// an earlier rendering with the same settings.
func newRuleset(s *proxy.Snapshot, set settings, known map[*proxy.ServicePort]*block) *ruleset {
	np := s.NodePorts[set.family]
	r := &ruleset{settings: set, nodeAddrs: np.Addrs, allAddrs: np.All}
	if np.All {
		for _, a := range s.NodeIPs {
			if proxy.FamilyOf(a) == set.family {
				r.nodeAddrs = append(r.nodeAddrs, a)
			}
		}
	}
	var used [sets]bool
	var out []string
	for _, p := range s.Services {
		if p.Family != set.family {
			continue
		}
		b := known[p]
		if b == nil {
			b = renderBlock(set, p)
		}
		r.blocks, r.owners = append(r.blocks, b), append(r.owners, p)
		for i := range b.entries {
			used[i] = used[i] || len(b.entries[i]) > 0
		}
		if b.nodePort != nil && b.nodePort.proto == unix.IPPROTO_SCTP {
			used[setNodePortSCTP] = true
			used[setNodePortLocalSCTP] = used[setNodePortLocalSCTP] || b.local
		}
		out = append(out, b.outRules...)
	}
	r.rules = renderRules(set, used, out)
	return r
}

// want is a ruleset on a node whose addresses are known.
type want struct {
	servers map[key]*server
	bound   map[netip.Addr]bool
	entries [sets]map[entry]bool
}

// on fills in the node's addresses: local is every address that it has on other links
// than kube-ipvs0.
func (r *ruleset) on(local []netip.Addr) *want {
	w := &want{servers: make(map[key]*server, len(r.blocks)), bound: make(map[netip.Addr]bool, len(r.blocks))}
	for i := range w.entries {
		w.entries[i] = map[entry]bool{}
	}
	for _, b := range r.blocks {
		for _, s := range b.servers {
			w.servers[s.key] = s
		}
		w.bound[b.bound] = true
		for _, a := range b.external {
			if !slices.Contains(local, a) {
				w.bound[a] = true
			}
		}
		for i := range b.entries {
			for _, e := range b.entries[i] {
				w.entries[i][e] = true
			}
		}
	}
	addrs := r.nodeAddrs
	if r.allAddrs {
		addrs = local
	}
	for _, b := range r.blocks {
		if b.nodePort == nil {
			continue
		}
		all, kept := nodePortSets(b.nodePort.proto)
		for _, a := range addrs {
			s := *b.nodePort
			s.addr = a
			if w.servers[s.key] == nil { // else a Service claims it by its address
				w.servers[s.key] = &s
			}
			if all.kind() != bitmapPort {
				e := entry{addr: a, proto: s.proto, port: s.port}
				w.entries[all][e] = true
				if b.local {
					w.entries[kept][e] = true
				}
			}
		}
	}
	for a := range w.bound {
		w.entries[setIPs][entry{addr: a}] = true
	}
	return w
}

// renderRules writes the rules of all chains in the form in which iptables-save prints
// them. There are as many for one Service as for ten thousand, but for load balancers
// that keep the node out.
func renderRules(s settings, used [sets]bool, outRules []string) map[string]map[string][]string {
	nat, filter := map[string][]string{}, map[string][]string{}
	match := func(in set, dir string) string { return "-m set --match-set " + in.nameIn(s.family) + " " + dir }
	noted := func(in set, dir string) string { return comment(setInfo[in].comment) + " " + match(in, dir) }
	add := func(table map[string][]string, chain string, parts ...string) {
		table[chain] = append(table[chain], strings.Join(parts, " "))
	}
	// when adds a rule that looks into a set, where the set holds anything.
	when := func(in set, table map[string][]string, chain string, parts ...string) {
		if used[in] {
			add(table, chain, parts...)
		}
	}
	loop, reject := "127.0.0.0/8", "-j REJECT --reject-with icmp-port-unreachable"
	if s.v6() {
		loop, reject = "::1/128", "-j REJECT --reject-with icmp6-port-unreachable"
	}
	masquerade := "-j MASQUERADE"
	if s.features.RandomFully {
		masquerade += " --random-fully"
	}
	const mark = "-j " + chainMarkMasq

	// nat: who is masqueraded.
	add(nat, chainServices, "-s "+loop+" -j RETURN")
	when(setLoadBalancer, nat, chainServices, noted(setLoadBalancer, "dst,dst"), "-j "+chainLoadBalancer)
	switch cluster := noted(setClusterIP, "dst,dst"); {
	case s.masqueradeAll:
		when(setClusterIP, nat, chainServices, cluster, mark)
	case s.clusterCIDR.IsValid():
		when(setClusterIP, nat, chainServices, "! -s "+s.clusterCIDR.String(), cluster, mark)
	default:
		// The node's own packets at least: they come from the cluster address itself.
		when(setClusterIP, nat, chainServices, noted(setClusterIP, "src,dst"), mark)
	}
	when(setExternalIP, nat, chainServices, noted(setExternalIP, "dst,dst"), mark)
	for _, in := range []set{setExternalIP, setExternalIPLocal} {
		when(in, nat, chainServices, noted(in, "dst,dst"), "-m addrtype ! --src-type LOCAL -j ACCEPT")
		when(in, nat, chainServices, noted(in, "dst,dst"), "-m addrtype --dst-type LOCAL -j ACCEPT")
	}
	add(nat, chainServices, "-m addrtype --dst-type LOCAL -j "+chainNodePort)
	when(setClusterIP, nat, chainServices, match(setClusterIP, "dst,dst"), "-j ACCEPT")
	when(setLoadBalancer, nat, chainServices, match(setLoadBalancer, "dst,dst"), "-j ACCEPT")

	when(setLoopBack, nat, chainPostrouting, noted(setLoopBack, "dst,dst,src"), "-j MASQUERADE")
	add(nat, chainPostrouting, "-m mark ! --mark "+masqueradeMark+" -j RETURN")
	add(nat, chainPostrouting, "-j MARK --set-xmark 0x4000/0x0")
	add(nat, chainPostrouting, comment("kubernetes service traffic requiring SNAT"), masquerade)
	for _, proto := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
		all, local := nodePortSets(proto)
		dir := "dst"
		if all.kind() != bitmapPort {
			dir = "dst,dst"
		}
		when(local, nat, chainNodePort, "-p "+protoName(proto), noted(local, dir), "-j RETURN")
		when(all, nat, chainNodePort, "-p "+protoName(proto), noted(all, dir), mark)
	}
	when(setLoadBalancerLocal, nat, chainLoadBalancer, noted(setLoadBalancerLocal, "dst,dst"), "-j RETURN")
	add(nat, chainLoadBalancer, mark)
	add(nat, chainMarkMasq, "-j MARK --set-xmark "+masqueradeMark)

	// filter: who is kept out.
	add(filter, chainForward, comment("kubernetes forwarding rules"), "-m mark --mark "+masqueradeMark+" -j ACCEPT")
	add(filter, chainForward, comment("kubernetes forwarding conntrack rule"), "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
	add(filter, chainNodePort, noted(setHealthCheckNodePort, "dst"), "-j ACCEPT")
	when(setLoadBalancerFW, filter, chainProxyFirewall, noted(setLoadBalancerFW, "dst,dst"), "-j "+chainSourceFirewall)
	when(setLoadBalancerSourceCIDR, filter, chainSourceFirewall, noted(setLoadBalancerSourceCIDR, "dst,dst,src"), "-j RETURN")
	when(setLoadBalancerSourceIP, filter, chainSourceFirewall, noted(setLoadBalancerSourceIP, "dst,dst,src"), "-j RETURN")
	add(filter, chainSourceFirewall, "-j DROP")
	for _, in := range []set{setLoadBalancer, setClusterIP, setExternalIP, setExternalIPLocal} {
		add(filter, chainFilter, match(in, "dst,dst"), "-j RETURN")
	}
	add(filter, chainFilter, match(setHealthCheckNodePort, "dst"), "-j RETURN")
	// Else every listener of the node would answer on the addresses of Services too.
	add(filter, chainFilter, "-m conntrack --ctstate NEW", match(setIPs, "dst"), reject)
	filter[chainOutFilter] = outRules
	return map[string]map[string][]string{"nat": nat, "filter": filter}
}
