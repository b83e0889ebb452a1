// SPDX-License-Identifier: Apache-2.0

package netpolicy

import (
	"net/netip"
	"slices"
)

// span is a run of addresses of one family, both ends included.
type span struct{ from, to netip.Addr }

func (s span) contains(a netip.Addr) bool { return s.from.Compare(a) <= 0 && a.Compare(s.to) <= 0 }

func (s span) String() string {
	if s.from == s.to {
		return s.from.String()
	}
	return s.from.String() + "-" + s.to.String()
}

// spans are sorted, and no two of them touch.
type spans []span

func (s spans) contains(a netip.Addr) bool {
	return slices.ContainsFunc(s, func(r span) bool { return r.contains(a) })
}

// spanOf is the addresses of a prefix.
func spanOf(p netip.Prefix) span {
	last := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	to, _ := netip.AddrFromSlice(last)
	return span{p.Masked().Addr(), to}
}

// normal sorts, and joins what overlaps or touches.
func normal(all []span) spans {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b span) int { return a.from.Compare(b.from) })
	var out spans
	for _, s := range all {
		if n := len(out); n > 0 {
			if next := out[n-1].to.Next(); !next.IsValid() || s.from.Compare(next) <= 0 {
				if out[n-1].to.Less(s.to) {
					out[n-1].to = s.to
				}
				continue
			}
		}
		out = append(out, s)
	}
	return out
}

// without takes the addresses of the second away.
func (s spans) without(cut span) spans {
	var out spans
	for _, r := range s {
		if cut.to.Less(r.from) || r.to.Less(cut.from) {
			out = append(out, r)
			continue
		}
		if r.from.Less(cut.from) {
			out = append(out, span{r.from, cut.from.Prev()})
		}
		if cut.to.Less(r.to) {
			out = append(out, span{cut.to.Next(), r.to})
		}
	}
	return out
}
