// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/proxy"
)

// setEndpoints is the name of the compact layout's map.
const setEndpoints = "endpoints"

// containers are the named sets and maps of a table, in the order in which they
// are listed. Their comments are upstream's, but for the compact layout's own.
func (f family) containers() [sets]*container {
	addr, service, nodePort := []field{fieldAddr}, []field{fieldAddr, fieldProtocol, fieldPort}, []field{fieldProtocol, fieldPort}
	named := func(name, comment string, fields []field, w worth) *container {
		c := &container{family: f, name: name, comment: comment, fields: fields, worth: w}
		if w != worthNothing {
			c.flags = unix.NFT_SET_MAP
		}
		return c
	}
	out := [sets]*container{
		hairpins:            named("hairpin-connections", "service hairpin connections", []field{fieldAddr, fieldSameAddr, fieldProtocol, fieldPort}, worthNothing),
		clusterIPs:          named("cluster-ips", "Active ClusterIPs", addr, worthNothing),
		nodePortIPs:         named("nodeport-ips", "IPs that accept NodePort traffic", addr, worthNothing),
		noEndpointServices:  named("no-endpoint-services", "vmap to drop or reject packets to services with no endpoints", service, worthVerdict),
		noEndpointNodePorts: named("no-endpoint-nodeports", "vmap to drop or reject packets to service nodeports with no endpoints", nodePort, worthVerdict),
		firewallIPs:         named("firewall-ips", "destinations that are subject to LoadBalancerSourceRanges", service, worthVerdict),
		serviceIPs:          named("service-ips", "ClusterIP, ExternalIP and LoadBalancer IP traffic", service, worthVerdict),
		serviceNodePorts:    named("service-nodeports", "NodePort traffic", nodePort, worthVerdict),
		endpoints:           named(setEndpoints, "endpoints by what a packet asks for and a random index", append(slices.Clone(service), fieldIndex), worthTarget),
	}
	out[endpoints].byExpression = true
	return out
}

// base is what a ruleset has whether or not there are Services.
type base struct {
	settings
	masqueradeAll bool
	serviceCIDRs  []netip.Prefix
	nodePorts     proxy.NodePortAddresses
}

func baseFor(s *proxy.Snapshot, f corev1.IPFamily, layout Layout) base {
	b := base{settings: settings{family: familyOf(f), layout: layout}, masqueradeAll: s.MasqueradeAll, nodePorts: s.NodePorts[f]}
	if c := s.ClusterCIDR(f); c.IsValid() {
		b.clusterCIDR = c.Masked()
	}
	for _, c := range s.ServiceCIDRs {
		if proxy.FamilyOf(c.Addr()) == f {
			b.serviceCIDRs = append(b.serviceCIDRs, c.Masked())
		}
	}
	return b
}

// same says whether two bases give the same rules.
func (b *base) same(o *base) bool {
	return b.settings == o.settings && b.masqueradeAll == o.masqueradeAll && slices.Equal(b.serviceCIDRs, o.serviceCIDRs) &&
		b.nodePorts.All == o.nodePorts.All && slices.Equal(b.nodePorts.Addrs, o.nodePorts.Addrs)
}

// sets are the containers that the table has.
func (b *base) sets() [sets]*container {
	all := b.containers()
	if b.nodePorts.All {
		all[nodePortIPs] = nil
	}
	if b.layout != LayoutCompact {
		all[endpoints] = nil
	}
	return all
}

// Hooks and their priorities. What filters by the address that was asked for
// stands before the translation; what refuses stands behind it, since reject
// works in no earlier hook, and a packet that was translated matches no longer.
var (
	hookFilterPrerouting = hook{"filter", "prerouting", "-110", unix.NF_INET_PRE_ROUTING, -110}
	hookFilterOutputPre  = hook{"filter", "output", "-110", unix.NF_INET_LOCAL_OUT, -110}
	hookFilterInput      = hook{"filter", "input", "0", unix.NF_INET_LOCAL_IN, 0}
	hookFilterForward    = hook{"filter", "forward", "0", unix.NF_INET_FORWARD, 0}
	hookFilterOutput     = hook{"filter", "output", "0", unix.NF_INET_LOCAL_OUT, 0}
	hookNATPrerouting    = hook{"nat", "prerouting", "-100", unix.NF_INET_PRE_ROUTING, -100}
	hookNATOutput        = hook{"nat", "output", "-100", unix.NF_INET_LOCAL_OUT, -100}
	hookNATPostrouting   = hook{"nat", "postrouting", "100", unix.NF_INET_POST_ROUTING, 100}
)

// chains are those that do not depend on Services: base chains, then the others.
func (b *base) chains() []chain {
	fresh := func(to string) rule { return b.rule(stateNew, jump(to)) }
	// The address of the node's own loopback is not a nodePort's: a translated
	// packet from it could not leave the node.
	loop := netip.MustParsePrefix("127.0.0.0/8")
	if b.v6() {
		loop = netip.MustParsePrefix("::1/128")
	}
	check, serve := []statement{notIn(destination, loop)}, []statement{isLocal(destination), notIn(destination, loop)}
	if !b.nodePorts.All {
		check = []statement{inSet(destination, "nodeport-ips")}
		serve = check
	}

	var services []rule
	switch {
	case b.masqueradeAll:
		services = append(services, b.noted("masquerade clusterIP traffic", inSet(destination, "cluster-ips"), mark))
	case b.clusterCIDR.IsValid():
		services = append(services, b.noted("masquerade clusterIP traffic from outside cluster",
			inSet(destination, "cluster-ips"), notIn(source, b.clusterCIDR), mark))
	}
	services = append(services, b.rule(serviceVmap("service-ips")))
	if b.layout == LayoutCompact {
		services = append(services, b.rule(missed(false)))
	}
	services = append(services, b.rule(slices.Concat(serve, []statement{portVmap("service-nodeports")})...))
	if b.layout == LayoutCompact {
		services = append(services, b.rule(slices.Concat(serve, []statement{missed(true)})...))
	}

	clusterIPCheck := []rule{b.noted("Reject traffic to invalid ports of ClusterIPs", inSet(destination, "cluster-ips"), reject)}
	if len(b.serviceCIDRs) > 0 {
		clusterIPCheck = append(clusterIPCheck, b.noted("Drop traffic to unallocated ClusterIPs", inAny(destination, b.serviceCIDRs, false), drop))
	}
	return []chain{
		{name: chainFilterPrerouting, hook: &hookFilterPrerouting, rules: []rule{fresh(chainFirewallCheck)}},
		{name: chainFilterOutputPre, hook: &hookFilterOutputPre, rules: []rule{fresh(chainFirewallCheck)}},
		{name: chainFilterInput, hook: &hookFilterInput, rules: []rule{fresh(chainNodePortCheck), fresh(chainServiceCheck)}},
		{name: chainFilterForward, hook: &hookFilterForward, rules: []rule{fresh(chainServiceCheck), fresh(chainClusterIPCheck)}},
		{name: chainFilterOutput, hook: &hookFilterOutput, rules: []rule{fresh(chainServiceCheck), fresh(chainClusterIPCheck)}},
		{name: chainNATPrerouting, hook: &hookNATPrerouting, rules: []rule{b.rule(jump(chainServices))}},
		{name: chainNATOutput, hook: &hookNATOutput, rules: []rule{b.rule(jump(chainServices))}},
		{name: chainNATPostrouting, hook: &hookNATPostrouting, rules: []rule{b.rule(jump(chainMasquerading))}},

		{name: chainNodePortCheck, rules: []rule{b.rule(slices.Concat(check, []statement{portVmap("no-endpoint-nodeports")})...)}},
		{name: chainServiceCheck, rules: []rule{b.rule(serviceVmap("no-endpoint-services"))}},
		{name: chainFirewallCheck, rules: []rule{b.rule(serviceVmap("firewall-ips"))}},
		{name: chainServices, rules: services},
		{name: chainMasquerading, rules: []rule{
			b.rule(marked, masquerade),
			b.rule(statusDNAT, inHairpins("hairpin-connections"), masquerade),
		}},
		{name: chainClusterIPCheck, rules: clusterIPCheck},
		{name: chainReject, comment: "helper for @no-endpoint-services / @no-endpoint-nodeports", rules: []rule{b.rule(reject)}},
	}
}

// ruleset is everything this mode has in the table of one family.
type ruleset struct {
	base
	ipFamily corev1.IPFamily
	blocks   []*block
	// owners names the Service port of each block.
	owners []*proxy.ServicePort
}

// newRuleset renders one family of a snapshot. Service ports that last, an earlier
// ruleset, has as well are not rendered again.
func newRuleset(s *proxy.Snapshot, f corev1.IPFamily, b base, last *ruleset) *ruleset {
	r := &ruleset{base: b, ipFamily: f}
	if last == nil || last.settings != b.settings {
		last = &ruleset{}
	}
	r.blocks, r.owners = make([]*block, 0, len(last.blocks)), make([]*proxy.ServicePort, 0, len(last.owners))
	i := 0
	for _, p := range s.Services {
		if p.Family != f {
			continue
		}
		// Both lists have the same order.
		for i < len(last.owners) && last.owners[i] != p && proxy.CompareServicePorts(last.owners[i], p) < 0 {
			i++
		}
		var bl *block
		if i < len(last.owners) && last.owners[i] == p {
			bl = last.blocks[i]
			i++
		} else {
			bl = renderBlock(b.settings, p)
		}
		r.blocks, r.owners = append(r.blocks, bl), append(r.owners, p)
	}
	return r
}
