// SPDX-License-Identifier: Apache-2.0

package allocator

import "slices"

// claim is one taken value.
type claim struct {
	owner Owner
	// stored is true while a stored object of the owner has the value.
	stored bool
	// holds counts the requests in flight that need it. A value that is both
	// unstored and unheld is free.
	holds int
	// waiting are other owners whose stored objects have the value, too: an old
	// file may be so. The first of them follows when the owner lets go, so that
	// the value is not given out a third time.
	waiting []Owner
}

// pool says who has which values of one kind, addresses or ports. It is not safe
// for concurrent use: its Book holds the lock.
type pool[V comparable] struct {
	taken map[V]*claim
	// moved is told that a value has become taken, or free.
	moved func(v V, taken bool)
}

func newPool[V comparable](moved func(V, bool)) *pool[V] {
	return &pool[V]{taken: map[V]*claim{}, moved: moved}
}

// has tells whether anybody has v.
func (p *pool[V]) has(v V) bool { return p.taken[v] != nil }

// hold reserves v for owner, or reports false when another owner has it.
func (p *pool[V]) hold(owner Owner, v V) bool {
	c := p.claimFor(owner, v)
	if c.owner.UID != owner.UID {
		return false
	}
	c.holds++
	return true
}

// drop ends one hold on v.
func (p *pool[V]) drop(v V) {
	if c := p.taken[v]; c != nil && c.holds > 0 {
		c.holds--
		p.sweep(v, c)
	}
}

// store records that owner's stored object has v, and returns who has v. Where
// that is another owner, it keeps the value and owner waits for it.
func (p *pool[V]) store(owner Owner, v V) Owner {
	c := p.claimFor(owner, v)
	if c.owner.UID == owner.UID {
		c.stored = true
	} else if !slices.ContainsFunc(c.waiting, owner.same) {
		c.waiting = append(c.waiting, owner)
	}
	return c.owner
}

// unstore records that owner's stored object no longer has v.
func (p *pool[V]) unstore(owner Owner, v V) {
	c := p.taken[v]
	if c == nil {
		return
	}
	if c.owner.UID != owner.UID {
		c.waiting = slices.DeleteFunc(c.waiting, owner.same)
		return
	}
	c.stored = false
	p.sweep(v, c)
}

// claimFor is the claim on v, made for owner when v was free.
func (p *pool[V]) claimFor(owner Owner, v V) *claim {
	c := p.taken[v]
	if c == nil {
		c = &claim{owner: owner}
		p.taken[v] = c
		p.moved(v, true)
	}
	return c
}

// sweep passes v on, or frees it, when its owner needs it no more.
func (p *pool[V]) sweep(v V, c *claim) {
	switch {
	case c.stored || c.holds > 0:
	case len(c.waiting) > 0:
		c.owner, c.stored, c.waiting = c.waiting[0], true, c.waiting[1:]
	default:
		delete(p.taken, v)
		p.moved(v, false)
	}
}

// usage counts the taken numbers of one range, so that a full half is known
// without a search.
type usage struct{ all, inBand uint64 }

// count takes note that number i of s has become taken, or free.
func (u *usage) count(s span, i uint64, taken bool) {
	// Adding the greatest number is subtracting one.
	one := uint64(1)
	if !taken {
		one = ^uint64(0)
	}
	u.all += one
	if i < s.band {
		u.inBand += one
	}
}

// pick finds a number of s that is not taken: a random one of the upper band, or
// of the lower band when the upper one is full. It reports false when both are.
func (u *usage) pick(s span, random func(n uint64) uint64, taken func(i uint64) bool) (uint64, bool) {
	if i, ok := search(s.band, s.size-s.band, u.all-u.inBand, random, taken); ok {
		return i, true
	}
	return search(0, s.band, u.inBand, random, taken)
}

// search finds a number in [start, start+n) of which used are taken. From a
// random place it goes upwards to the first free one; each step passes a taken
// number, so that the search is bounded by what is taken and not by the range's
// size.
func search(start, n, used uint64, random func(n uint64) uint64, taken func(i uint64) bool) (uint64, bool) {
	if used >= n {
		return 0, false
	}
	for at := random(n); ; at = (at + 1) % n {
		if !taken(start + at) {
			return start + at, true
		}
	}
}
