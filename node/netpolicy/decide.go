// SPDX-License-Identifier: Apache-2.0

package netpolicy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Objects is what policies are decided from.
type Objects struct {
	Pods       []*corev1.Pod
	Namespaces []*corev1.Namespace
	Policies   []*networkingv1.NetworkPolicy
}

// direction of traffic, seen from the pod that a policy selects.
type direction string

const (
	ingress direction = "ingress"
	egress  direction = "egress"
)

// clause is one way through a policy: traffic that matches it passes.
type clause struct {
	// peers names the set with the other side's addresses; empty for everybody.
	peers string
	// proto is the protocol's number; 0 for all, and then ports do not count.
	proto uint8
	// from and to are the destination ports; to 0 for all.
	from, to uint16
	// policy is "namespace/name", for people.
	policy string
}

// chain is what holds for the pods of one or more policies in one direction: what
// matches none of the clauses is dropped.
type chain struct {
	dir     direction
	clauses []clause
	// policies are those whose pods these are.
	policies []string
}

// Program is what one node enforces in one family, decided. It holds no reference to
// API objects.
type Program struct {
	v6 bool
	// sets are the peers, by name.
	sets map[string]spans
	// chains by name; a name stands for its content.
	chains map[string]chain
	// pods are the node's isolated pods, by direction and address, with their chain.
	pods map[direction]map[netip.Addr]string
}

// Empty says that nothing is to be enforced.
func (p *Program) Empty() bool { return len(p.pods[ingress]) == 0 && len(p.pods[egress]) == 0 }

// isolated lists the addresses of the pods with a policy, sorted.
func (p *Program) isolated() []netip.Addr {
	out := slices.Concat(slices.Collect(maps.Keys(p.pods[ingress])), slices.Collect(maps.Keys(p.pods[egress])))
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// Decide says what the node has to enforce in a family. It is pure: the same objects
// in another order give an equal program.
func Decide(o Objects, node string, v6 bool) *Program {
	d := &decision{
		p: &Program{
			v6: v6, sets: map[string]spans{}, chains: map[string]chain{},
			pods: map[direction]map[netip.Addr]string{ingress: {}, egress: {}},
		},
		namespaces: map[string]labels.Set{},
	}
	for _, ns := range o.Namespaces {
		d.namespaces[ns.Name] = ns.Labels
	}
	for _, pod := range o.Pods {
		if ip, ok := podIP(pod, v6); ok {
			d.pods = append(d.pods, member{pod, ip})
		}
	}
	slices.SortFunc(d.pods, func(a, b member) int { return a.ip.Compare(b.ip) })
	policies := slices.SortedFunc(slices.Values(o.Policies), func(a, b *networkingv1.NetworkPolicy) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	for _, m := range d.pods {
		if m.pod.Spec.NodeName != node {
			continue
		}
		for _, dir := range []direction{ingress, egress} {
			c := chain{dir: dir}
			for _, policy := range policies {
				if policy.Namespace == m.pod.Namespace && concerns(policy, dir) && selects(&policy.Spec.PodSelector, m.pod.Labels) {
					c.policies = append(c.policies, policy.Namespace+"/"+policy.Name)
					c.clauses = append(c.clauses, d.clauses(policy, dir, m)...)
				}
			}
			if len(c.policies) > 0 {
				name := c.name()
				d.p.chains[name] = c
				d.p.pods[dir][m.ip] = name
			}
		}
	}
	// Sets that no chain of this node refers to were not made: clauses makes them.
	return d.p
}

// decision is a Program that is being made.
type decision struct {
	p          *Program
	namespaces map[string]labels.Set
	pods       []member
}

// member is a pod that takes part, with its address.
type member struct {
	pod *corev1.Pod
	ip  netip.Addr
}

// podIP returns a pod's address of a family, if it takes part: pods in the node's own
// network are the node, and those that have ended are nobody.
func podIP(pod *corev1.Pod, v6 bool) (netip.Addr, bool) {
	if pod.Spec.HostNetwork || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return netip.Addr{}, false
	}
	ips := pod.Status.PodIPs
	if len(ips) == 0 {
		ips = []corev1.PodIP{{IP: pod.Status.PodIP}}
	}
	for _, ip := range ips {
		if a, err := netip.ParseAddr(ip.IP); err == nil && a.Is6() == v6 {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// concerns says whether a policy isolates in a direction. Without policyTypes it does
// for ingress, and for egress if it has rules for that.
func concerns(p *networkingv1.NetworkPolicy, dir direction) bool {
	if len(p.Spec.PolicyTypes) == 0 {
		return dir == ingress || len(p.Spec.Egress) > 0
	}
	want := networkingv1.PolicyTypeIngress
	if dir == egress {
		want = networkingv1.PolicyTypeEgress
	}
	return slices.Contains(p.Spec.PolicyTypes, want)
}

// selects says whether a selector matches; one that cannot be read matches nothing.
func selects(s *metav1.LabelSelector, set labels.Set) bool {
	selector, err := metav1.LabelSelectorAsSelector(s)
	return err == nil && selector.Matches(set)
}

// clauses are the ways that a policy leaves open to or from a pod.
func (d *decision) clauses(policy *networkingv1.NetworkPolicy, dir direction, to member) []clause {
	var out []clause
	name := policy.Namespace + "/" + policy.Name
	add := func(i int, peers []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort) {
		var from spans
		if len(peers) > 0 {
			if from = d.peers(policy.Namespace, peers); len(from) == 0 {
				return // nobody: a rule that never matches
			}
		}
		set := func(s spans, extra string) string {
			if s == nil {
				return ""
			}
			n := nameOf("peers", fmt.Sprintf("%s/%s/%d/%s", name, dir, i, extra), name)
			d.p.sets[n] = s
			return n
		}
		if len(ports) == 0 {
			out = append(out, clause{peers: set(from, ""), policy: name})
		}
		for _, port := range ports {
			out = append(out, d.portClauses(port, dir, to, from, set, name)...)
		}
	}
	if dir == ingress {
		for i, r := range policy.Spec.Ingress {
			add(i, r.From, r.Ports)
		}
	} else {
		for i, r := range policy.Spec.Egress {
			add(i, r.To, r.Ports)
		}
	}
	return out
}

// portClauses are the clauses of one port of a rule. A port's name means what the
// containers of the pod that is connected to say.
func (d *decision) portClauses(port networkingv1.NetworkPolicyPort, dir direction, to member, from spans, set func(spans, string) string, policy string) []clause {
	protocol := corev1.ProtocolTCP
	if port.Protocol != nil {
		protocol = *port.Protocol
	}
	c := clause{proto: protocolNumber(protocol), policy: policy}
	if c.proto == 0 {
		return nil
	}
	switch {
	case port.Port == nil:
		c.peers = set(from, "")
		return []clause{c}
	case port.Port.StrVal == "":
		c.peers = set(from, "")
		c.from, c.to = uint16(port.Port.IntVal), uint16(port.Port.IntVal)
		if port.EndPort != nil {
			c.to = uint16(*port.EndPort)
		}
		return []clause{c}
	case dir == ingress:
		n := containerPort(to.pod, port.Port.StrVal, protocol)
		if n == 0 {
			return nil
		}
		c.peers, c.from, c.to = set(from, ""), n, n
		return []clause{c}
	}
	byPort := map[uint16][]span{}
	for _, m := range d.pods {
		if from != nil && !from.contains(m.ip) {
			continue
		}
		if n := containerPort(m.pod, port.Port.StrVal, protocol); n != 0 {
			byPort[n] = append(byPort[n], span{m.ip, m.ip})
		}
	}
	var out []clause
	for _, n := range slices.Sorted(maps.Keys(byPort)) {
		one := c
		one.from, one.to = n, n
		one.peers = set(normal(byPort[n]), fmt.Sprintf("%s/%s/%d", port.Port.StrVal, protocol, n))
		out = append(out, one)
	}
	return out
}

func containerPort(pod *corev1.Pod, name string, protocol corev1.Protocol) uint16 {
	for _, c := range slices.Concat(pod.Spec.Containers, pod.Spec.InitContainers) {
		for _, p := range c.Ports {
			if p.Name == name && cmp.Or(p.Protocol, corev1.ProtocolTCP) == protocol {
				return uint16(p.ContainerPort)
			}
		}
	}
	return 0
}

// peers are the addresses of a rule's other side.
func (d *decision) peers(namespace string, peers []networkingv1.NetworkPolicyPeer) spans {
	var out []span
	for _, peer := range peers {
		if peer.IPBlock != nil {
			out = append(out, d.block(peer.IPBlock)...)
			continue
		}
		for _, m := range d.pods {
			if peer.NamespaceSelector == nil {
				if m.pod.Namespace != namespace {
					continue
				}
			} else if set, known := d.namespaces[m.pod.Namespace]; !known || !selects(peer.NamespaceSelector, set) {
				continue
			}
			if peer.PodSelector == nil || selects(peer.PodSelector, m.pod.Labels) {
				out = append(out, span{m.ip, m.ip})
			}
		}
	}
	return normal(out)
}

// block is the addresses of an ipBlock that are of the program's family.
func (d *decision) block(b *networkingv1.IPBlock) spans {
	cidr, err := netip.ParsePrefix(b.CIDR)
	if err != nil || cidr.Addr().Is6() != d.p.v6 {
		return nil
	}
	out := spans{spanOf(cidr)}
	for _, text := range b.Except {
		if except, err := netip.ParsePrefix(text); err == nil && except.Addr().Is6() == d.p.v6 {
			out = out.without(spanOf(except))
		}
	}
	return out
}

// protocolNumber is 0 for what nobody has.
func protocolNumber(p corev1.Protocol) uint8 {
	return map[corev1.Protocol]uint8{
		corev1.ProtocolTCP: unix.IPPROTO_TCP, corev1.ProtocolUDP: unix.IPPROTO_UDP, corev1.ProtocolSCTP: unix.IPPROTO_SCTP,
	}[p]
}

// name stands for the content, so that pods with the same rules share a chain and a
// chain never changes.
func (c *chain) name() string {
	first := c.policies[0]
	if more := len(c.policies) - 1; more > 0 {
		first += fmt.Sprintf("+%d", more)
	}
	return nameOf(string(c.dir), fmt.Sprintf("%v%v", c.policies, c.clauses), first)
}

// nameOf makes a name that is unique for content and says something to people.
func nameOf(kind, content, readable string) string {
	sum := sha256.Sum256([]byte(content))
	name := kind + "-" + strings.ToUpper(hex.EncodeToString(sum[:5])) + "-" + readable
	// The kernel takes 255 bytes; a long name is unique by its beginning.
	return strings.ReplaceAll(name[:min(len(name), 200)], "+", "_and_")
}
