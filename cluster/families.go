// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// A lab has one IP family or both. Of each there is a whole address plan: node, pod
// and Service network, and for each node an address and a block of pod addresses. The
// primary family's is in the fields of [Networking] and [NodeConfig] themselves, the
// other one's in their Secondary. In a settings file both are in one field, divided
// by a comma, as for other installers: podSubnet: 10.244.0.0/16,fd00:10:244::/56.

// SecondaryNetworking is the address plan of the second IP family.
type SecondaryNetworking struct {
	NodeSubnet    netip.Prefix `json:"nodeSubnet,omitzero"`
	PodSubnet     netip.Prefix `json:"podSubnet,omitzero"`
	ServiceSubnet netip.Prefix `json:"serviceSubnet,omitzero"`
	Outside       netip.Addr   `json:"outside,omitzero"`
}

// SecondaryAddresses are a node's own of the second IP family.
type SecondaryAddresses struct {
	Address netip.Addr   `json:"address,omitzero"`
	PodCIDR netip.Prefix `json:"podCIDR,omitzero"`
}

// ParseIPFamilies reads a choice of families: ipv4, ipv6, dual, or a list such as
// ipv6,ipv4, the primary one first.
func ParseIPFamilies(text string) ([]corev1.IPFamily, error) {
	var out []corev1.IPFamily
	for word := range strings.SplitSeq(text, ",") {
		switch strings.ToLower(strings.TrimSpace(word)) {
		case "ipv4":
			out = append(out, corev1.IPv4Protocol)
		case "ipv6":
			out = append(out, corev1.IPv6Protocol)
		case "dual":
			out = append(out, corev1.IPv4Protocol, corev1.IPv6Protocol)
		default:
			return nil, fmt.Errorf("IP families %q: want ipv4, ipv6, dual, or a list such as ipv6,ipv4", text)
		}
	}
	if len(out) > 2 || len(out) == 2 && out[0] == out[1] {
		return nil, fmt.Errorf("IP families %q: each at most once", text)
	}
	return out, nil
}

func familyOf(a netip.Addr) corev1.IPFamily {
	if a.Is6() {
		return corev1.IPv6Protocol
	}
	return corev1.IPv4Protocol
}

// splitFamilies moves the second value of the fields that may hold one for each
// family into the secondary plan, so that the file has the fields of [Config].
func splitFamilies(data []byte) ([]byte, error) {
	var doc map[string]any
	if err := yaml.UnmarshalStrict(data, &doc); err != nil {
		return nil, err
	}
	networking, _ := doc["networking"].(map[string]any)
	errs := []error{splitFields("networking", networking, "nodeSubnet", "podSubnet", "serviceSubnet", "outside")}
	nodes, _ := doc["nodes"].([]any)
	for i, n := range nodes {
		node, _ := n.(map[string]any)
		errs = append(errs, splitFields(fmt.Sprintf("nodes[%d]", i), node, "address", "podCIDR"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return yaml.Marshal(doc)
}

func splitFields(where string, in map[string]any, fields ...string) error {
	const secondary = "secondary"
	for _, f := range fields {
		text, _ := in[f].(string)
		values := strings.Split(text, ",")
		if len(values) == 1 {
			continue
		}
		if len(values) > 2 {
			return fmt.Errorf("%s.%s %q: want at most one for each IP family", where, f, text)
		}
		second, ok := in[secondary].(map[string]any)
		if !ok {
			second = map[string]any{}
			in[secondary] = second
		}
		in[f], second[f] = strings.TrimSpace(values[0]), strings.TrimSpace(values[1])
	}
	return nil
}

// setFamilies fills IPFamilies, and brings each value to the plan of its family: one
// that is given alone may be of the second.
func (c *Config) setFamilies() {
	n, second := &c.Networking, &c.Networking.Secondary
	if n.IPFamily != "" && len(n.IPFamilies) == 0 {
		if families, err := ParseIPFamilies(n.IPFamily); err == nil {
			n.IPFamilies, n.IPFamily = families, ""
		}
	}
	if len(n.IPFamilies) == 0 {
		n.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
		for _, given := range [][2]netip.Prefix{
			{n.NodeSubnet, second.NodeSubnet}, {n.PodSubnet, second.PodSubnet}, {n.ServiceSubnet, second.ServiceSubnet},
		} {
			if !given[0].IsValid() {
				continue
			}
			n.IPFamilies = []corev1.IPFamily{familyOf(given[0].Addr())}
			if given[1].IsValid() {
				n.IPFamilies = append(n.IPFamilies, familyOf(given[1].Addr()))
			}
			break
		}
	}
	if len(n.IPFamilies) != 2 {
		return
	}
	swap := func(a, b *netip.Prefix) {
		if a.IsValid() && familyOf(a.Addr()) == n.IPFamilies[1] && (!b.IsValid() || familyOf(b.Addr()) == n.IPFamilies[0]) {
			*a, *b = *b, *a
		}
	}
	swapAddr := func(a, b *netip.Addr) {
		if a.IsValid() && familyOf(*a) == n.IPFamilies[1] && (!b.IsValid() || familyOf(*b) == n.IPFamilies[0]) {
			*a, *b = *b, *a
		}
	}
	swap(&n.NodeSubnet, &second.NodeSubnet)
	swap(&n.PodSubnet, &second.PodSubnet)
	swap(&n.ServiceSubnet, &second.ServiceSubnet)
	swapAddr(&n.Outside, &second.Outside)
	for i := range c.Nodes {
		swapAddr(&c.Nodes[i].Address, &c.Nodes[i].Secondary.Address)
		swap(&c.Nodes[i].PodCIDR, &c.Nodes[i].Secondary.PodCIDR)
	}
}

// plan is the address plan of one family: where its values are.
type plan struct {
	family                     corev1.IPFamily
	nodes, pods, services      *netip.Prefix
	outside                    *netip.Addr
	address                    func(*NodeConfig) *netip.Addr
	podCIDR                    func(*NodeConfig) *netip.Prefix
	defaultNodes, defaultPods  string
	defaultServices            string
	podCIDRBits, maxPodCIDRLen int
}

// plans are the address plans of the lab's families, the primary one first.
func (c *Config) plans() (out []plan) {
	n := &c.Networking
	for i, f := range n.IPFamilies {
		p := plan{family: f, nodes: &n.NodeSubnet, pods: &n.PodSubnet, services: &n.ServiceSubnet, outside: &n.Outside}
		p.address = func(n *NodeConfig) *netip.Addr { return &n.Address }
		p.podCIDR = func(n *NodeConfig) *netip.Prefix { return &n.PodCIDR }
		if i > 0 {
			s := &n.Secondary
			p.nodes, p.pods, p.services, p.outside = &s.NodeSubnet, &s.PodSubnet, &s.ServiceSubnet, &s.Outside
			p.address = func(n *NodeConfig) *netip.Addr { return &n.Secondary.Address }
			p.podCIDR = func(n *NodeConfig) *netip.Prefix { return &n.Secondary.PodCIDR }
		}
		if f == corev1.IPv6Protocol {
			p.defaultNodes, p.defaultPods, p.defaultServices = "fd00:10::/64", "fd00:10:244::/56", "fd00:10:96::/112"
			p.podCIDRBits, p.maxPodCIDRLen = 64, 128-32+maxPodCIDRBits
		} else {
			p.defaultNodes, p.defaultPods, p.defaultServices = "10.0.0.0/24", "10.244.0.0/16", "10.96.0.0/12"
			p.podCIDRBits, p.maxPodCIDRLen = 24, maxPodCIDRBits
		}
		out = append(out, p)
	}
	return out
}

// setNetworks fills in what is not set of the three networks and outside.
func (p plan) setNetworks() {
	for _, x := range []struct {
		field *netip.Prefix
		value string
	}{{p.nodes, p.defaultNodes}, {p.pods, p.defaultPods}, {p.services, p.defaultServices}} {
		if !x.field.IsValid() {
			*x.field = netip.MustParsePrefix(x.value)
		}
	}
	if !p.outside.IsValid() {
		*p.outside = called(*p.nodes, 200)
	}
}

// setNode fills in what is not set of node number i.
func (p plan) setNode(n *NodeConfig, i int) {
	if a := p.address(n); !a.IsValid() {
		*a = called(*p.nodes, 131+i)
	}
	if b := p.podCIDR(n); !b.IsValid() {
		*b = block(*p.pods, p.podCIDRBits, i)
	}
}

// validate says what is wrong with the three networks and outside.
func (p plan) validate(bad func(format string, args ...any)) {
	for _, x := range []struct {
		field string
		value netip.Prefix
	}{{"nodeSubnet", *p.nodes}, {"podSubnet", *p.pods}, {"serviceSubnet", *p.services}} {
		switch {
		case familyOf(x.value.Addr()) != p.family || x.value.Addr().Is4In6():
			bad("networking.%s %s: want an %s network, see ipFamilies", x.field, x.value, p.family)
		case x.value != x.value.Masked():
			bad("networking.%s %s: not a network address, did you mean %s?", x.field, x.value, x.value.Masked())
		}
	}
	for _, pair := range [][2]netip.Prefix{{*p.nodes, *p.pods}, {*p.nodes, *p.services}, {*p.pods, *p.services}} {
		if pair[0].Overlaps(pair[1]) {
			bad("networking: %s and %s overlap: node, pod and Service addresses must be three separate networks", pair[0], pair[1])
		}
	}
	if !p.nodes.Contains(*p.outside) {
		bad("networking.outside %s: not in nodeSubnet %s", *p.outside, *p.nodes)
	}
}

// validateNode says what is wrong with the addresses of node number i. taken are the
// addresses that others have, by whom.
func (p plan) validateNode(i int, nodes []NodeConfig, taken map[netip.Addr]string, bad func(format string, args ...any)) {
	node := &nodes[i]
	address, podCIDR := *p.address(node), *p.podCIDR(node)
	if !address.IsValid() {
		bad("nodes[%d] (%s): nodeSubnet %s has no address left for it", i, node.Name, *p.nodes)
	} else if !p.nodes.Contains(address) {
		bad("nodes[%d] (%s): address %s is not in nodeSubnet %s; a network of this size has too few addresses, or give each node its own", i, node.Name, address, *p.nodes)
	} else if other, is := taken[address]; is {
		bad("nodes[%d] (%s): address %s is already that of %s", i, node.Name, address, other)
	}
	taken[address] = node.Name
	switch {
	case !podCIDR.IsValid():
		bad("nodes[%d] (%s): podSubnet %s has no /%d left for it", i, node.Name, *p.pods, p.podCIDRBits)
	case !p.pods.Overlaps(podCIDR) || podCIDR.Bits() < p.pods.Bits():
		bad("nodes[%d] (%s): podCIDR %s is not inside podSubnet %s", i, node.Name, podCIDR, *p.pods)
	case podCIDR != podCIDR.Masked():
		bad("nodes[%d] (%s): podCIDR %s is not a network address, did you mean %s?", i, node.Name, podCIDR, podCIDR.Masked())
	case podCIDR.Bits() > p.maxPodCIDRLen:
		bad("nodes[%d] (%s): podCIDR %s has too few addresses, want at most /%d", i, node.Name, podCIDR, p.maxPodCIDRLen)
	}
	if room := roomOf(podCIDR); node.MaxPods < 0 || podCIDR.IsValid() && node.MaxPods > room {
		bad("nodes[%d] (%s): maxPods %d: want 0 to %d, the addresses of its podCIDR %s", i, node.Name, node.MaxPods, room, podCIDR)
	}
	for _, before := range nodes[:i] {
		if podCIDR.IsValid() && podCIDR.Overlaps(*p.podCIDR(&before)) {
			bad("nodes[%d] (%s): podCIDR %s overlaps that of %s", i, node.Name, podCIDR, before.Name)
		}
	}
}

// roomOf is how many pods a block has addresses for.
func roomOf(p netip.Prefix) int {
	bits := p.Addr().BitLen() - max(0, p.Bits())
	if bits >= 31 {
		return math.MaxInt32
	}
	return 1<<bits - 2
}

// called returns the address of a network that a person would call number i: the
// number i of IPv4, and of IPv6 the one whose end is written with the same digits,
// fd00:10::131 beside 10.0.0.131.
func called(p netip.Prefix, i int) netip.Addr {
	if p.Addr().Is6() {
		hex, err := strconv.ParseInt(strconv.Itoa(i), 16, 32)
		if err != nil {
			return netip.Addr{} // digits of a number are digits of a larger base
		}
		i = int(hex)
	}
	return nth(p, i)
}

// nth returns the address number i of a prefix, or the zero address when the prefix
// does not hold it or is none, which Validate refuses.
func nth(p netip.Prefix, i int) netip.Addr {
	return shifted(p, uint64(i), 0)
}

// block returns the block number i, of that many bits (whole bytes), of a pod network.
func block(p netip.Prefix, bits, i int) netip.Prefix {
	if bits < p.Bits() || bits > p.Addr().BitLen() {
		return netip.Prefix{}
	}
	addr := shifted(p, uint64(i), p.Addr().BitLen()-bits)
	if !addr.IsValid() {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(addr, bits)
}

// shifted returns the prefix's first address plus i << shift, which is a multiple of 8;
// the zero address when the prefix does not hold it.
func shifted(p netip.Prefix, i uint64, shift int) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for at := len(b) - 1 - shift/8; at >= 0 && i > 0; at-- {
		i += uint64(b[at])
		b[at] = byte(i)
		i >>= 8
	}
	addr, ok := netip.AddrFromSlice(b)
	if !ok || i > 0 || !p.Contains(addr) {
		return netip.Addr{}
	}
	return addr
}

// addressesOf and podCIDRsOf are a node's, one for each family of the lab.
func (c *Config) addressesOf(n NodeConfig) (out []netip.Addr) {
	for _, p := range c.plans() {
		out = append(out, *p.address(&n))
	}
	return out
}

func (c *Config) podCIDRsOf(n NodeConfig) (out []netip.Prefix) {
	for _, p := range c.plans() {
		out = append(out, *p.podCIDR(&n))
	}
	return out
}

// podSubnets and serviceSubnets are the networks of each family of the lab.
func (c *Config) podSubnets() (out []netip.Prefix) {
	for _, p := range c.plans() {
		out = append(out, *p.pods)
	}
	return out
}

func (c *Config) serviceSubnets() (out []netip.Prefix) {
	for _, p := range c.plans() {
		out = append(out, *p.services)
	}
	return out
}

// validateFamilies says what is wrong with the choice of families; the address plans
// cannot be looked at then.
func (c *Config) validateFamilies(bad func(format string, args ...any)) bool {
	n := c.Networking
	for _, f := range n.IPFamilies {
		if f != corev1.IPv4Protocol && f != corev1.IPv6Protocol {
			bad("networking.ipFamilies %v: %q is none; want %s, %s or both, the primary one first", n.IPFamilies, f, corev1.IPv4Protocol, corev1.IPv6Protocol)
			return false
		}
	}
	switch {
	case n.IPFamily != "":
		if _, err := ParseIPFamilies(n.IPFamily); err != nil {
			bad("networking.ipFamily: %w", err)
		} else {
			bad("networking.ipFamily %q: not together with ipFamilies", n.IPFamily)
		}
	case len(n.IPFamilies) == 0 || len(n.IPFamilies) > 2 || len(n.IPFamilies) == 2 && n.IPFamilies[0] == n.IPFamilies[1]:
		bad("networking.ipFamilies %v: want %s, %s or both, each once", n.IPFamilies, corev1.IPv4Protocol, corev1.IPv6Protocol)
	case len(n.IPFamilies) == 1 && (n.Secondary != SecondaryNetworking{} ||
		slices.ContainsFunc(c.Nodes, func(n NodeConfig) bool { return n.Secondary != SecondaryAddresses{} })):
		bad("networking.ipFamilies %v: one family, and networks or addresses for two", n.IPFamilies)
	default:
		return true
	}
	return false
}
