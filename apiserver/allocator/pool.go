// SPDX-License-Identifier: Apache-2.0

package allocator

// claim is one taken number.
type claim struct {
	owner Owner
	// stored is true while a stored object holds the number.
	stored bool
	// holds counts the requests in flight that need it. A number that is both
	// unstored and unheld is free.
	holds int
}

// pool is the state of one range. It is not safe for concurrent use: its Book
// holds the lock.
type pool struct {
	span
	// random returns a number in [0, n).
	random func(n uint64) uint64
	taken  map[uint64]*claim
	// inBand counts the taken numbers of the lower band, so that a full half is
	// known without a search.
	inBand uint64
}

func newPool(s span, random func(uint64) uint64) *pool {
	return &pool{span: s, random: random, taken: map[uint64]*claim{}}
}

// hold reserves number i for owner, or reports false when another owner has it.
func (p *pool) hold(owner Owner, i uint64) bool {
	c := p.claimFor(owner, i)
	if c == nil {
		return false
	}
	c.holds++
	return true
}

// holdNext reserves a free number: a random one of the upper band, or of the
// lower band when the upper one is full. It reports false when both are.
func (p *pool) holdNext(owner Owner) (uint64, bool) {
	i, ok := p.free(p.band, p.size-p.band, uint64(len(p.taken))-p.inBand)
	if !ok {
		i, ok = p.free(0, p.band, p.inBand)
	}
	if !ok {
		return 0, false
	}
	return i, p.hold(owner, i)
}

// free finds a number in [start, start+n) of which used are taken. From a random
// place it goes upwards to the first free one; each step passes a taken number,
// so that the search is bounded by what is taken and not by the range's size.
func (p *pool) free(start, n, used uint64) (uint64, bool) {
	if used >= n {
		return 0, false
	}
	for at := p.random(n); ; at = (at + 1) % n {
		if _, taken := p.taken[start+at]; !taken {
			return start + at, true
		}
	}
}

// drop ends one hold on number i.
func (p *pool) drop(i uint64) {
	if c := p.taken[i]; c != nil && c.holds > 0 {
		c.holds--
		p.sweep(i, c)
	}
}

// store records that owner's stored object has number i. A number that another
// owner has stays with that owner.
func (p *pool) store(owner Owner, i uint64) {
	if c := p.claimFor(owner, i); c != nil {
		c.stored = true
	}
}

// unstore records that owner's stored object no longer has number i.
func (p *pool) unstore(owner Owner, i uint64) {
	if c := p.taken[i]; c != nil && c.owner.UID == owner.UID {
		c.stored = false
		p.sweep(i, c)
	}
}

// claimFor is the claim on number i, made when it was free; nil when another
// owner has it.
func (p *pool) claimFor(owner Owner, i uint64) *claim {
	c := p.taken[i]
	if c == nil {
		c = &claim{owner: owner}
		p.taken[i] = c
		if i < p.band {
			p.inBand++
		}
	}
	if c.owner.UID != owner.UID {
		return nil
	}
	return c
}

func (p *pool) sweep(i uint64, c *claim) {
	if c.stored || c.holds > 0 {
		return
	}
	delete(p.taken, i)
	if i < p.band {
		p.inBand--
	}
}
