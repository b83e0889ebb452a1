// SPDX-License-Identifier: Apache-2.0

package loadbalancer

import (
	"errors"
	"fmt"
	"math/big"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/controller/loop"
)

// span is a run of addresses of one family, both ends included.
type span struct{ from, to netip.Addr }

func (s span) contains(a netip.Addr) bool { return s.from.Compare(a) <= 0 && a.Compare(s.to) <= 0 }

func (s span) overlaps(o span) bool { return s.from.Compare(o.to) <= 0 && o.from.Compare(s.to) <= 0 }

// Pool is the addresses that Services of type LoadBalancer get. The zero value has
// none.
type Pool struct {
	text  string
	spans []span
	// barred are the addresses in it that nobody may have, with the reason.
	barred map[netip.Addr]string
}

// String returns the pool as it was written.
func (p Pool) String() string { return p.text }

// Empty says that there is no pool.
func (p Pool) Empty() bool { return len(p.spans) == 0 }

// ParsePool reads a pool: prefixes (10.0.0.240/28), ranges (10.0.0.240-10.0.0.250)
// and single addresses, separated by commas or white space. It refuses a pool that
// cannot work in the plan: one outside of the node network, where nobody would ask
// for its addresses, and one that holds an address that somebody has already.
func ParsePool(text string, plan loop.AddressPlan) (Pool, error) {
	words := strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' || r == '\t' || r == '\n' })
	if len(words) == 0 {
		return Pool{}, errors.New("load balancer pool: no addresses; give a prefix such as 10.0.0.240/28 or a range such as 10.0.0.240-10.0.0.250")
	}
	p := Pool{text: strings.Join(words, ","), barred: map[netip.Addr]string{}}
	for _, word := range words {
		s, err := parseSpan(word)
		if err == nil {
			err = p.add(s, plan)
		}
		if err != nil {
			return Pool{}, fmt.Errorf("load balancer pool %s: %w", word, err)
		}
	}
	if p.Size(corev1.IPv4Protocol).Sign() == 0 && p.Size(corev1.IPv6Protocol).Sign() == 0 {
		return Pool{}, fmt.Errorf("load balancer pool %s: no address that a Service could have", text)
	}
	return p, nil
}

func parseSpan(word string) (span, error) {
	if from, to, ok := strings.Cut(word, "-"); ok {
		a, err := netip.ParseAddr(from)
		b, err2 := netip.ParseAddr(to)
		if err := errors.Join(err, err2); err != nil {
			return span{}, fmt.Errorf("want FIRST-LAST, two addresses: %w", err)
		}
		if a.Is4() != b.Is4() || b.Less(a) {
			return span{}, errors.New("want FIRST-LAST of one family, the lower address first")
		}
		return span{a, b}, nil
	}
	if !strings.Contains(word, "/") {
		a, err := netip.ParseAddr(word)
		return span{a, a}, err
	}
	prefix, err := netip.ParsePrefix(word)
	if err != nil {
		return span{}, err
	}
	if prefix != prefix.Masked() {
		return span{}, fmt.Errorf("not a network address, did you mean %s?", prefix.Masked())
	}
	return spanOf(prefix), nil
}

func spanOf(p netip.Prefix) span {
	last := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	to, _ := netip.AddrFromSlice(last)
	return span{p.Masked().Addr(), to}
}

// add takes a span into the pool if the plan leaves room for it.
func (p *Pool) add(s span, plan loop.AddressPlan) error {
	for _, other := range p.spans {
		if s.overlaps(other) {
			return errors.New("overlaps another part of the pool")
		}
	}
	for what, prefixes := range map[string][]netip.Prefix{"pod network": plan.PodSubnets, "Service network": plan.ServiceSubnets} {
		for _, prefix := range prefixes {
			if s.overlaps(spanOf(prefix)) {
				return fmt.Errorf("overlaps the %s %s; take free addresses of the node network %s", what, prefix, prefixesText(plan.NodeSubnets))
			}
		}
	}
	home := slices.IndexFunc(plan.NodeSubnets, func(n netip.Prefix) bool { return spanOf(n).contains(s.from) && spanOf(n).contains(s.to) })
	if home < 0 {
		return fmt.Errorf("not inside the node network %s, where its addresses would be asked for", prefixesText(plan.NodeSubnets))
	}
	var taken []netip.Addr
	for a := range plan.Taken {
		if s.contains(a) {
			taken = append(taken, a)
		}
	}
	if len(taken) > 0 {
		slices.SortFunc(taken, netip.Addr.Compare)
		var who []string
		for _, a := range taken {
			who = append(who, fmt.Sprintf("%s is the address of %s", a, plan.Taken[a]))
		}
		return fmt.Errorf("%s; take addresses that nobody has", strings.Join(who, ", "))
	}
	subnet := spanOf(plan.NodeSubnets[home])
	p.barred[subnet.from] = "it names the node network itself"
	if s.from.Is4() {
		p.barred[subnet.to] = "it is the broadcast address of the node network"
	}
	p.spans = append(p.spans, s)
	return nil
}

func prefixesText(all []netip.Prefix) string {
	var out []string
	for _, p := range all {
		out = append(out, p.String())
	}
	return strings.Join(out, ", ")
}

// check says why a Service cannot have an address of the pool; nil when it can.
func (p Pool) check(a netip.Addr) error {
	if !slices.ContainsFunc(p.spans, func(s span) bool { return s.contains(a) }) {
		return fmt.Errorf("address %s is not in the pool %s", a, p)
	}
	if why := p.barred[a]; why != "" {
		return fmt.Errorf("address %s cannot be given away: %s", a, why)
	}
	return nil
}

// addresses walks the addresses of a family, lowest first within each part.
func (p Pool) addresses(family corev1.IPFamily) func(yield func(netip.Addr) bool) {
	return func(yield func(netip.Addr) bool) {
		for _, s := range p.spans {
			if familyOf(s.from) != family {
				continue
			}
			for a := s.from; a.IsValid() && s.contains(a); a = a.Next() {
				if p.barred[a] == "" && !yield(a) {
					return
				}
			}
		}
	}
}

// Size counts the addresses of a family that can be given away.
func (p Pool) Size(family corev1.IPFamily) *big.Int {
	n := new(big.Int)
	for _, s := range p.spans {
		if familyOf(s.from) == family {
			n.Add(n, new(big.Int).Sub(number(s.to), number(s.from))).Add(n, big.NewInt(1))
		}
	}
	for a := range p.barred {
		if familyOf(a) == family && slices.ContainsFunc(p.spans, func(s span) bool { return s.contains(a) }) {
			n.Sub(n, big.NewInt(1))
		}
	}
	return n
}

func number(a netip.Addr) *big.Int { return new(big.Int).SetBytes(a.AsSlice()) }

func familyOf(a netip.Addr) corev1.IPFamily {
	if a.Unmap().Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}
