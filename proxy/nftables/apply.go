// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nfnl"
	"github.com/kplab/kplab/proxy"
)

// change is what turns the kernel's table into a ruleset.
type change struct {
	// table is to be made, after whatever is there was deleted.
	table, replace bool
	// why it has to be made anew.
	why       string
	newSets   []*container
	newChains []chain
	// written are the chains whose rules are written, those that hang on a hook
	// last. renewed says that a set is made anew under the same name, so that all
	// that refers to it has to be emptied first.
	written []chain
	renewed bool
	// handles are the rules that chains have now whose new ones are put before
	// them: see supersede.
	handles map[string][]uint64
	// replaced elements have another value than before, added and removed ones are
	// on one side only.
	replaced, added, removed [sets][]element
	staleChains, staleSets   []string
}

func (c *change) empty() bool {
	n := len(c.newSets) + len(c.newChains) + len(c.written) + len(c.staleChains) + len(c.staleSets)
	for s := range sets {
		n += len(c.replaced[s]) + len(c.added[s]) + len(c.removed[s])
	}
	return n == 0 && !c.table && !c.replace
}

// size is roughly how much is to be read back.
func (c *change) size() int {
	n := len(c.written)
	for s := range sets {
		n += len(c.replaced[s]) + len(c.added[s]) + len(c.removed[s])
	}
	return n
}

// manyChanges is the size of a change above which all of the table is read back
// in one go.
const manyChanges = 2000

// apply brings one family up to date and reads back what it wrote.
func (m *Mode) apply(r *ruleset) (*state, error) {
	conn, err := m.dial()
	if err != nil {
		return nil, err
	}
	st := m.applied[r.family]
	if st == nil || !st.same(&r.base) {
		return m.load(conn, r)
	}
	c := st.diff(r)
	st.ruleset = r
	if c.empty() {
		return st, nil
	}
	before, err := conn.Generation()
	if err != nil {
		return nil, err
	}
	if err := c.supersede(conn, r.family); err != nil {
		return nil, err
	}
	sent, err := st.write(conn, c)
	if err != nil {
		return nil, fmt.Errorf("change the nftables rules: %w", err)
	}
	if c.size() > manyChanges {
		return st, st.verify(conn)
	}
	if err := st.readBack(conn, c); err != nil {
		return nil, err
	}
	after, err := conn.Generation()
	if err != nil {
		return nil, err
	}
	// Nobody else has changed anything if the number moved by our transactions
	// only: then the last full look still holds.
	if st.checked != before || after != before+uint32(sent) {
		st.checked = 0
	} else {
		st.checked = after
	}
	return st, nil
}

// load starts from what the kernel has.
func (m *Mode) load(conn *nfnl.Conn, r *ruleset) (*state, error) {
	st := newState(r)
	have, err := look(conn, r.family, true, st.size)
	if err != nil {
		return nil, err
	}
	st.checked, st.anonymous = have.generation, have.anonymous
	c := have.compare(st)
	if c.empty() {
		return st, nil
	}
	_, err = st.write(conn, c)
	if err != nil && have.exists && !c.replace && !errors.Is(err, unix.EMSGSIZE) {
		// Something in the table is in the way that is not understood.
		_, err = st.write(conn, have.replacement(st))
	}
	if err != nil {
		return nil, fmt.Errorf("load the nftables rules: %w", err)
	}
	return st, st.verify(conn)
}

// diff compares the ruleset that the kernel holds with another of the same base,
// and counts for the other. Both list Service ports in the same order, and a
// shared block is equal.
func (st *state) diff(r *ruleset) *change {
	d := differ{state: st, wanted: map[shape]int{}}
	for _, s := range sharedSets {
		d.touched[s] = map[key]int{}
	}
	i, j := 0, 0
	for i < len(st.blocks) || j < len(r.blocks) {
		switch {
		case i < len(st.blocks) && j < len(r.blocks) && st.blocks[i] == r.blocks[j]:
			i++
			j++
		case j == len(r.blocks) || (i < len(st.blocks) && proxy.CompareServicePorts(st.owners[i], r.owners[j]) < 0):
			d.block(st.blocks[i], &block{})
			i++
		case i == len(st.blocks) || proxy.CompareServicePorts(st.owners[i], r.owners[j]) > 0:
			d.block(&block{}, r.blocks[j])
			j++
		default:
			d.block(st.blocks[i], r.blocks[j])
			i++
			j++
		}
	}
	return d.finish()
}

// differ collects what changed, block by block.
type differ struct {
	*state
	change
	// gone and fresh are elements that some block lost or gained. One key may be
	// in both, when a Service takes over what another had.
	gone, fresh [sets][]element
	// touched and wanted are the counts before, of what a changed block has to do
	// with.
	touched [sets]map[key]int
	wanted  map[shape]int
}

func (d *differ) block(old, want *block) {
	for _, s := range sharedSets {
		for _, b := range []*block{old, want} {
			for _, e := range b.elements[s] {
				if _, seen := d.touched[s][e.key]; !seen {
					d.touched[s][e.key] = d.shared[s][e.key]
				}
			}
		}
	}
	for _, b := range []*block{old, want} {
		for _, sh := range b.shapes {
			if _, seen := d.wanted[sh]; !seen {
				d.wanted[sh] = d.shaped[sh]
			}
		}
	}
	d.count(old, -1)
	d.count(want, 1)
	for s := range sets {
		if isShared(s) {
			continue
		}
		d.gone[s] = append(d.gone[s], missing(old.elements[s], want.elements[s])...)
		d.fresh[s] = append(d.fresh[s], missing(want.elements[s], old.elements[s])...)
	}
	d.chains(old, want)
}

// missing lists the elements of a that b lacks.
func missing(a, b []element) []element {
	if len(a)*len(b) > 1<<12 {
		have := make(map[element]bool, len(b))
		for _, e := range b {
			have[e] = true
		}
		return slices.DeleteFunc(slices.Clone(a), func(e element) bool { return have[e] })
	}
	var out []element
	for i := range a {
		if !slices.Contains(b, a[i]) {
			out = append(out, a[i])
		}
	}
	return out
}

func (d *differ) chains(old, want *block) {
	// A set whose timeout changed cannot be changed; it is made anew, and what
	// refers to it is written anew.
	renewed := false
	defer func() { d.renewed = d.renewed || renewed }()
	for _, a := range old.affinity {
		i := slices.IndexFunc(want.affinity, func(b *container) bool { return a.name == b.name })
		if i < 0 || want.affinity[i].timeout != a.timeout {
			d.staleSets = append(d.staleSets, a.name)
		}
		renewed = renewed || (i >= 0 && want.affinity[i].timeout != a.timeout)
	}
	for _, a := range want.affinity {
		if !slices.ContainsFunc(old.affinity, func(b *container) bool { return a.name == b.name && a.timeout == b.timeout }) {
			d.newSets = append(d.newSets, a)
		}
	}
	for i := range want.chains {
		c := want.chains[i]
		was := slices.IndexFunc(old.chains, func(o chain) bool { return o.name == c.name })
		switch {
		case was < 0:
			d.newChains = append(d.newChains, c)
			d.written = append(d.written, c)
		case renewed || !slices.EqualFunc(old.chains[was].rules, c.rules, func(a, b rule) bool { return a.same(&b) }):
			d.written = append(d.written, c)
		}
	}
	for i := range old.chains {
		name := old.chains[i].name
		if !slices.ContainsFunc(want.chains, func(c chain) bool { return c.name == name }) {
			d.staleChains = append(d.staleChains, name)
		}
	}
}

// finish settles what several Services have to do with.
func (d *differ) finish() *change {
	for _, s := range sharedSets {
		for k, before := range d.touched[s] {
			after := d.shared[s][k]
			switch {
			case before == 0 && after > 0:
				d.added[s] = append(d.added[s], element{key: k})
			case before > 0 && after == 0:
				d.removed[s] = append(d.removed[s], element{key: k})
			}
			if after == 0 {
				delete(d.shared[s], k)
			}
		}
	}
	for sh, before := range d.wanted {
		switch after := d.shaped[sh]; {
		case before == 0 && after > 0:
			c := d.shapeChain(sh)
			d.newChains, d.written = append(d.newChains, c), append(d.written, c)
		case before > 0 && after == 0:
			d.staleChains = append(d.staleChains, sh.name())
		}
		if d.shaped[sh] == 0 {
			delete(d.shaped, sh)
		}
	}
	for s := range sets {
		d.elements(s, d.gone[s], d.fresh[s])
	}
	return &d.change
}

// elements sorts what is gone and what is fresh by what has to be done.
func (c *change) elements(s set, gone, fresh []element) {
	if len(gone) == 0 {
		c.added[s] = append(c.added[s], fresh...)
		return
	}
	was := make(map[key]value, len(gone))
	for _, e := range gone {
		was[e.key] = e.value
	}
	for _, e := range fresh {
		old, there := was[e.key]
		switch {
		case !there:
			c.added[s] = append(c.added[s], e)
		case old != e.value:
			c.replaced[s] = append(c.replaced[s], e)
		}
		delete(was, e.key)
	}
	for _, e := range gone {
		if _, left := was[e.key]; left {
			c.removed[s] = append(c.removed[s], e)
		}
	}
}

// write carries out a change: what it needs first, then what leads there, then
// what nothing leads to any more. It returns the number of transactions, which is
// one unless the socket takes no more.
func (st *state) write(conn *nfnl.Conn, c *change) (int, error) {
	b := &batch{family: st.family, conn: conn, anonymous: st.anonymous}
	if c.replace {
		b.addTable() // so that there is one to delete
		b.deleteTable()
	}
	if c.table || c.replace {
		b.addTable()
	}
	fresh := make(map[string]bool, len(c.newChains))
	for i := range c.newChains {
		fresh[c.newChains[i].name] = true
	}
	stale := c.staleSets
	if c.renewed {
		for i := range c.written {
			if !fresh[c.written[i].name] {
				b.flushChain(c.written[i].name)
			}
		}
		for _, name := range c.staleChains {
			b.flushChain(name)
		}
		for _, name := range stale {
			b.deleteSet(name)
		}
		stale = nil
	}
	for _, s := range c.newSets {
		b.addSet(s, 0)
	}
	b.mayCut()
	for i := range c.newChains {
		b.addChain(&c.newChains[i])
		b.mayCut()
	}
	containers := st.containers()
	put := func(s set) {
		for part := range slices.Chunk(c.replaced[s], chunkElements) {
			b.elements(unix.NFT_MSG_DELSETELEM, containers[s], 0, part)
			b.elements(unix.NFT_MSG_NEWSETELEM, containers[s], 0, part)
			b.mayCut()
		}
		for part := range slices.Chunk(c.added[s], chunkElements) {
			b.elements(unix.NFT_MSG_NEWSETELEM, containers[s], 0, part)
			b.mayCut()
		}
	}
	put(endpoints)
	write := func(w *chain) {
		_, old := c.handles[w.name]
		switch {
		case old:
			for i := range slices.Backward(w.rules) {
				b.addRule(w.name, &w.rules[i], true)
			}
		case !fresh[w.name]:
			b.flushChain(w.name)
			fallthrough
		default:
			for i := range w.rules {
				b.addRule(w.name, &w.rules[i], false)
			}
		}
		b.mayCut()
	}
	for i := range c.written {
		if c.written[i].hook == nil {
			write(&c.written[i])
		}
	}
	for s := range sets {
		if s != endpoints {
			put(s)
		}
	}
	for i := range c.written {
		if c.written[i].hook != nil {
			write(&c.written[i])
		}
	}
	for s := range sets {
		for part := range slices.Chunk(c.removed[s], chunkElements) {
			b.elements(unix.NFT_MSG_DELSETELEM, containers[s], 0, part)
			b.mayCut()
		}
	}
	if len(c.handles) > 0 {
		b.commit()
	}
	for name, handles := range c.handles {
		for _, h := range handles {
			b.deleteRule(name, h)
		}
		b.mayCut()
	}
	for _, name := range c.staleChains {
		b.flushChain(name)
	}
	for _, name := range c.staleChains {
		b.deleteChain(name)
		b.mayCut()
	}
	for _, name := range stale {
		b.deleteSet(name)
		b.mayCut()
	}
	b.commit()
	st.anonymous = b.anonymous
	return b.sent, b.err
}

// supersede notes the rules of the chains that are to be written, so that they go
// in a transaction of their own after the new ones have come. When a rule goes, the
// kernel takes the elements of its map out of force at once, and a packet that is in
// the rule at that moment finds nothing: in one transaction, one new connection in a
// thousand was refused when endpoints changed a thousand times a second.
func (c *change) supersede(conn *nfnl.Conn, f family) error {
	if c.renewed {
		return nil // the rules have to go before their sets do
	}
	fresh := make(map[string]bool, len(c.newChains))
	for i := range c.newChains {
		fresh[c.newChains[i].name] = true
	}
	c.handles = map[string][]uint64{}
	for i := range c.written {
		name := c.written[i].name
		if fresh[name] {
			continue
		}
		var handles []uint64
		err := conn.Dump(nfnl.NFTables|unix.NFT_MSG_GETRULE, f.nfproto(), func(b []byte) []byte {
			return nfnl.String(nfnl.String(b, unix.NFTA_RULE_TABLE, tableName), unix.NFTA_RULE_CHAIN, name)
		}, func() { handles = nil }, func(body []byte) {
			nfnl.Attrs(nfnl.Body(body), func(typ uint16, v []byte) {
				if typ == unix.NFTA_RULE_HANDLE {
					handles = append(handles, nfnl.U64(v))
				}
			})
		})
		if err != nil {
			return fmt.Errorf("list the rules of chain %s (%s): %w", name, f.ip(), err)
		}
		c.handles[name] = handles
	}
	return nil
}
