// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"slices"
	"strings"
)

// state is a ruleset together with what several of its Services share: what the
// kernel is known to hold of one family, or is to hold.
type state struct {
	*ruleset
	// shared counts who wants an element of the shared sets, shaped who wants a
	// chain of the compact layout.
	shared [sets]map[key]int
	shaped map[shape]int
	// checked is the generation of the namespace in which all of it was last read
	// back; 0 when others have changed something since.
	checked uint32
	// anonymous is the next free number for sets of single rules.
	anonymous int
}

// sharedSets are those in which several Services may want one element: endpoints
// of the node, and the address of a Service with several ports.
var sharedSets = [...]set{hairpins, clusterIPs}

func isShared(s set) bool { return slices.Contains(sharedSets[:], s) }

func newState(r *ruleset) *state {
	st := &state{ruleset: r, shaped: map[shape]int{}}
	for _, s := range sharedSets {
		n := 0
		for _, b := range r.blocks {
			n += len(b.elements[s])
		}
		st.shared[s] = make(map[key]int, n)
	}
	for _, b := range r.blocks {
		st.count(b, 1)
	}
	return st
}

func (st *state) count(b *block, by int) {
	for _, s := range sharedSets {
		for i := range b.elements[s] {
			st.shared[s][b.elements[s][i].key] += by
		}
	}
	for _, sh := range b.shapes {
		st.shaped[sh] += by
	}
}

// shapes lists the shapes that are used, sorted by name.
func (st *state) shapes() []shape {
	out := make([]shape, 0, len(st.shaped))
	for s := range st.shaped {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b shape) int { return strings.Compare(a.name(), b.name()) })
	return out
}

// all calls fn for every chain of the table.
func (st *state) all(fn func(c *chain)) {
	fixed := st.chains()
	for i := range fixed {
		fn(&fixed[i])
	}
	st.ofServices(fn)
}

// ofServices calls fn for the chains that exist because of Services.
func (st *state) ofServices(fn func(c *chain)) {
	for _, s := range st.shapes() {
		c := st.shapeChain(s)
		fn(&c)
	}
	for _, b := range st.blocks {
		for i := range b.chains {
			fn(&b.chains[i])
		}
	}
}

// each calls fn for every element of a set, once each.
func (st *state) each(s set, fn func(e *element)) {
	if s == nodePortIPs {
		for _, a := range st.nodePorts.Addrs {
			fn(&element{key: key{addr: a}})
		}
	}
	var seen map[key]bool
	if isShared(s) {
		seen = map[key]bool{}
	}
	for _, b := range st.blocks {
		for i := range b.elements[s] {
			e := &b.elements[s][i]
			// Most are wanted once; of the others the first one counts.
			if seen != nil && st.shared[s][e.key] > 1 {
				if seen[e.key] {
					continue
				}
				seen[e.key] = true
			}
			fn(e)
		}
	}
}

// size is about how many elements a set has.
func (st *state) size(s set) int {
	n := 0
	for _, b := range st.blocks {
		n += len(b.elements[s])
	}
	return n
}

// contents lists the elements of a set.
func (st *state) contents(s set) []element {
	out := make([]element, 0, st.size(s))
	st.each(s, func(e *element) { out = append(out, *e) })
	return out
}
