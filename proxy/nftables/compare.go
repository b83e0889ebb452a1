// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nfnl"
)

// compare says what makes the kernel's table equal to a ruleset. Nothing is
// written that is right already, so that clients' affinity outlives a restart.
func (k *kernelTable) compare(st *state) *change {
	if !k.exists {
		c := k.replacement(st)
		c.replace = false
		return c
	}
	c := &change{}
	if c.why = k.odd; c.why == "" {
		k.compareChains(st, c)
		k.compareSets(st, c)
	}
	if why := c.why; why != "" {
		c = k.replacement(st)
		c.why = why
	}
	return c
}

// replacement makes the whole table anew.
func (k *kernelTable) replacement(st *state) *change {
	c := &change{table: true, replace: true}
	for s, made := range st.sets() {
		if made != nil {
			c.newSets = append(c.newSets, made)
			c.added[s] = st.contents(set(s))
		}
	}
	for _, b := range st.blocks {
		c.newSets = append(c.newSets, b.affinity...)
	}
	st.all(func(ch *chain) {
		c.newChains = append(c.newChains, *ch)
		c.written = append(c.written, *ch)
	})
	return c
}

func (k *kernelTable) compareChains(st *state, c *change) {
	wanted := make(map[string]bool, len(k.chains))
	st.all(func(ch *chain) {
		wanted[ch.name] = true
		have := k.chains[ch.name]
		switch {
		case have == nil:
			c.newChains = append(c.newChains, *ch)
			c.written = append(c.written, *ch)
		case have.kind != ch.kindOf():
			c.why = fmt.Sprintf("chain %s is %q instead of %q", ch.name, have.kind, ch.kindOf())
		case !k.holds(have, ch):
			c.written = append(c.written, *ch)
		}
	})
	for name := range k.chains {
		if !wanted[name] {
			c.staleChains = append(c.staleChains, name)
		}
	}
	slices.Sort(c.staleChains)
}

// holds says whether a chain has exactly the rules that it ought to have.
func (k *kernelTable) holds(have *kernelChain, want *chain) bool {
	if len(have.rules) != len(want.rules) {
		return false
	}
	for i := range want.rules {
		h, w := &have.rules[i], &want.rules[i]
		if h.comment != w.comment || (h.anon != "") != (w.anon != nil) || h.exprs != w.form() {
			return false
		}
		if w.anon == nil {
			continue
		}
		s := k.sets[h.anon]
		if s == nil || s.kind != kindOf(w.anon.container) {
			return false
		}
		// nft counts ranges in its own way.
		if s.size != len(w.anon.elements) && w.anon.flags&unix.NFT_SET_INTERVAL == 0 {
			return false
		}
		if s.digest != "" {
			if s.digest != w.anon.digest() {
				return false
			}
			continue
		}
		if k.deep && (s.odd || !sameElements(s.elements, w.anon.elements)) {
			return false
		}
	}
	return true
}

func sameElements(have, want []element) bool {
	if len(have) != len(want) {
		return false
	}
	left := make(map[element]bool, len(have))
	for _, e := range have {
		left[e] = true
	}
	for _, e := range want {
		if !left[e] {
			return false
		}
	}
	return true
}

func (k *kernelTable) compareSets(st *state, c *change) {
	mend := func(have *kernelSet, want *container) bool {
		if have.kind != kindOf(want) || have.odd {
			c.why = fmt.Sprintf("set %s is %q instead of %q", want.name, have.kind, kindOf(want))
			return false
		}
		return true
	}
	wanted := map[string]bool{}
	for s, want := range st.sets() {
		if want == nil {
			continue
		}
		wanted[want.name] = true
		have := k.sets[want.name]
		if have == nil {
			c.newSets = append(c.newSets, want)
			c.added[s] = st.contents(set(s))
			continue
		}
		if !mend(have, want) {
			return
		}
		c.compareElements(set(s), have.elements, st)
	}
	for _, b := range st.blocks {
		for _, want := range b.affinity {
			wanted[want.name] = true
			have := k.sets[want.name]
			if have == nil {
				c.newSets = append(c.newSets, want)
			} else if !mend(have, want) {
				return
			}
		}
	}
	for name := range k.sets {
		if !wanted[name] && !strings.HasPrefix(name, "__") {
			c.staleSets = append(c.staleSets, name)
		}
	}
	slices.Sort(c.staleSets)
}

// compareElements compares what the kernel has in a set with what it ought to.
func (c *change) compareElements(s set, have []element, st *state) {
	at := make(map[key]int, len(have))
	wanted := make([]bool, len(have))
	for i := range have {
		if _, twice := at[have[i].key]; twice {
			wanted[i] = true // listed again, see verify
			continue
		}
		at[have[i].key] = i
	}
	st.each(s, func(e *element) {
		switch i, there := at[e.key]; {
		case !there:
			c.added[s] = append(c.added[s], *e)
		case have[i].value != e.value:
			c.replaced[s] = append(c.replaced[s], *e)
			wanted[i] = true
		default:
			wanted[i] = true
		}
	})
	for i := range have {
		if !wanted[i] {
			c.removed[s] = append(c.removed[s], have[i])
		}
	}
}

// check looks whether the kernel still holds what was applied, in full if anybody
// has changed any rule of the namespace since the last full look.
func (m *Mode) check(st *state) error {
	conn, err := m.dial()
	if err != nil {
		return err
	}
	now, err := conn.Generation()
	if err != nil {
		return err
	}
	if now == st.checked {
		return nil
	}
	return st.verify(conn)
}

// looks is how often a table that differs is looked at before that is believed:
// while the kernel makes a hash table larger or smaller, after a great change, its
// list may show an element twice or leave one out.
const looks = 3

// verify reads all of the table back.
func (st *state) verify(conn *nfnl.Conn) error {
	for try := 1; ; try++ {
		have, err := look(conn, st.family, false, st.size)
		if err != nil {
			return err
		}
		c := have.compare(st)
		if c.empty() {
			st.checked = have.generation
			return nil
		}
		if try == looks {
			return fmt.Errorf("read back table %s %s: %s; %w", st.ip(), tableName, c.describe(st.ruleset), errDiffers)
		}
	}
}

// describe names the first difference.
func (c *change) describe(r *ruleset) string {
	containers := r.containers()
	switch {
	case c.replace:
		return c.why
	case c.table:
		return "it is not there"
	case len(c.newChains) > 0:
		return "chain " + c.newChains[0].name + " is missing"
	case len(c.newSets) > 0:
		return "set " + c.newSets[0].name + " is missing"
	case len(c.written) > 0:
		return "chain " + c.written[0].name + " has other rules"
	case len(c.staleChains) > 0:
		return "chain " + c.staleChains[0] + " should not be there"
	case len(c.staleSets) > 0:
		return "set " + c.staleSets[0] + " should not be there"
	}
	for s := range sets {
		for what, list := range map[string][]element{"should not hold": c.removed[s], "has another value for": c.replaced[s], "lacks": c.added[s]} {
			if len(list) > 0 {
				return containers[s].name + " " + what + " " + containers[s].elementText(list[0])
			}
		}
	}
	return "no difference"
}

// readBack asks the kernel for what a change wrote: its answer to a transaction
// says that it took it, this says that it is there.
func (st *state) readBack(conn *nfnl.Conn, c *change) error {
	containers := st.containers()
	differs := func(format string, args ...any) error {
		return fmt.Errorf("read back table %s %s: "+format+"; %w", append(append([]any{st.ip(), tableName}, args...), errDiffers)...)
	}
	for s := range sets {
		want := map[key]value{}
		for _, e := range slices.Concat(c.replaced[s], c.added[s]) {
			want[e.key] = e.value
		}
		for part := range slices.Chunk(slices.Concat(c.replaced[s], c.added[s]), chunkElements) {
			err := get(conn, containers[s], part, func(e element) {
				if v, there := want[e.key]; there && v == e.value {
					delete(want, e.key)
				}
			})
			if err != nil {
				return differs("%s: %w", containers[s].name, err)
			}
		}
		for k, v := range want {
			return differs("%s lacks %s", containers[s].name, containers[s].elementText(element{k, v}))
		}
		for _, e := range c.removed[s] {
			found := false
			err := get(conn, containers[s], []element{e}, func(element) { found = true })
			if found {
				return differs("%s still holds %s", containers[s].name, containers[s].keyText(e.key))
			}
			if err != nil && !isGone(err) {
				return differs("%s: %w", containers[s].name, err)
			}
		}
	}
	for i := range c.written {
		w := &c.written[i]
		part, err := lookChain(conn, st.family, w)
		if err != nil {
			return differs("chain %s: %w", w.name, err)
		}
		if !part.holds(part.chains[w.name], w) {
			return differs("chain %s has other rules", w.name)
		}
	}
	for _, name := range c.staleChains {
		err := conn.Request(nfnl.NFTables|unix.NFT_MSG_GETCHAIN, 0, st.nfproto(), func(b []byte) []byte {
			return nfnl.String(nfnl.String(b, unix.NFTA_CHAIN_TABLE, tableName), unix.NFTA_CHAIN_NAME, name)
		}, nil)
		if err == nil {
			return differs("chain %s is still there", name)
		}
		if !isGone(err) {
			return differs("chain %s: %w", name, err)
		}
	}
	return nil
}

func isGone(err error) bool { return errors.Is(err, unix.ENOENT) }

// get asks for single elements.
func get(conn *nfnl.Conn, c *container, keys []element, fn func(element)) error {
	return conn.Request(nfnl.NFTables|unix.NFT_MSG_GETSETELEM, 0, c.nfproto(), func(b []byte) []byte {
		b = nfnl.String(b, unix.NFTA_SET_ELEM_LIST_TABLE, tableName)
		b = nfnl.String(b, unix.NFTA_SET_ELEM_LIST_SET, c.name)
		b, at := nfnl.Nest(b, unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		for _, e := range keys {
			b = c.encode(b, e, false)
		}
		return nfnl.EndNest(b, at)
	}, func(body []byte) { decodeElements(c, body, fn) })
}

// lookChain reads the rules of one chain, and the sets that are written out in
// them.
func lookChain(conn *nfnl.Conn, f family, want *chain) (*kernelTable, error) {
	have := &kernelChain{}
	k := &kernelTable{family: f, deep: true, chains: map[string]*kernelChain{want.name: have}, sets: map[string]*kernelSet{}}
	err := conn.Dump(nfnl.NFTables|unix.NFT_MSG_GETRULE, f.nfproto(), func(b []byte) []byte {
		return nfnl.String(nfnl.String(b, unix.NFTA_RULE_TABLE, tableName), unix.NFTA_RULE_CHAIN, want.name)
	}, func() { have.rules = nil }, func(body []byte) {
		_, r := decodeRule(body)
		have.rules = append(have.rules, r)
	})
	if err != nil {
		return nil, err
	}
	for i := range want.rules {
		if i >= len(have.rules) || want.rules[i].anon == nil || have.rules[i].anon == "" {
			continue
		}
		name, c := have.rules[i].anon, want.rules[i].anon.container
		err := conn.Request(nfnl.NFTables|unix.NFT_MSG_GETSET, 0, f.nfproto(), func(b []byte) []byte {
			return nfnl.String(nfnl.String(b, unix.NFTA_SET_TABLE, tableName), unix.NFTA_SET_NAME, name)
		}, func(body []byte) {
			_, k.sets[name] = decodeSet(body)
		})
		if err != nil {
			return nil, err
		}
		// The digest is what was wanted; here what is there is read.
		k.sets[name].digest = ""
		if err := k.sets[name].read(conn, c, name, len(want.rules[i].anon.elements)); err != nil {
			return nil, err
		}
	}
	return k, nil
}
