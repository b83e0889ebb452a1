// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nfnl"
)

// Attributes that x/sys/unix does not have.
const (
	attrTableUserData = 6
	attrChainUserData = 12
)

// policyAccept is NF_ACCEPT, as the policy of a base chain.
const policyAccept = 1

// Limits of one message: an attribute holds 64 KiB, and a list of elements is one.
const (
	chunkElements = 200
	chunkBytes    = 48 << 10
)

// groupBytes is room for what may not be cut: the elements of two messages, or the
// rules of one chain.
const groupBytes = 128 << 10

// batch collects messages and sends them as one transaction, or as several where
// a socket takes no more: then it is cut between groups, each of which leaves the
// table in a state that serves.
type batch struct {
	family
	conn  *nfnl.Conn
	buf   []byte
	first uint32    // the number of the first message
	what  []subject // of each message from the first
	setID uint32
	// anonymous numbers the sets of single rules; see set.
	anonymous int
	sent      int // transactions
	err       error
}

// subject says what a message is about, for the error.
type subject struct{ verb, name string }

func (b *batch) begin() {
	b.buf = b.conn.BeginBatch(b.buf[:0], nfnl.NFTables)
	b.what = b.what[:0]
}

// message appends one message.
func (b *batch) message(typ, flags uint16, about subject, build func(m []byte) []byte) {
	if len(b.buf) == 0 {
		b.begin()
	}
	buf, start, seq := b.conn.Begin(b.buf, nfnl.NFTables|typ, flags, b.nfproto(), 0)
	if len(b.what) == 0 {
		b.first = seq
	}
	b.what = append(b.what, about)
	b.buf = nfnl.End(build(buf), start)
}

// mayCut ends a group.
func (b *batch) mayCut() {
	if len(b.buf) > b.conn.Limit()-groupBytes {
		b.commit()
	}
}

// commit sends what was collected and waits until the kernel has it.
func (b *batch) commit() {
	if len(b.what) == 0 || b.err != nil {
		b.buf = b.buf[:0]
		return
	}
	refused, err := b.conn.Commit(b.buf, nfnl.NFTables)
	if err != nil {
		about := subject{"change table", tableName}
		if i := int(refused) - int(b.first); refused != 0 && i >= 0 && i < len(b.what) {
			about = b.what[i]
		}
		b.err = fmt.Errorf("%s %s (%s): %w", about.verb, about.name, b.ip(), err)
	}
	b.sent++
	b.buf, b.what = b.buf[:0], b.what[:0]
}

func (b *batch) addTable() {
	b.message(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, subject{"add table", tableName}, func(m []byte) []byte {
		m = nfnl.String(m, unix.NFTA_TABLE_NAME, tableName)
		m = nfnl.Uint32(m, unix.NFTA_TABLE_FLAGS, 0)
		return nfnl.Bytes(m, attrTableUserData, commentData(tableComment))
	})
}

func (b *batch) deleteTable() {
	b.message(unix.NFT_MSG_DELTABLE, 0, subject{"delete table", tableName}, func(m []byte) []byte {
		return nfnl.String(m, unix.NFTA_TABLE_NAME, tableName)
	})
}

// commentData is a comment as nft keeps it for tables, chains and rules.
func commentData(comment string) []byte { return piece(0, append([]byte(comment), 0)...) }

func (b *batch) addChain(c *chain) {
	b.message(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, subject{"add chain", c.name}, func(m []byte) []byte {
		m = nfnl.String(m, unix.NFTA_CHAIN_TABLE, tableName)
		m = nfnl.String(m, unix.NFTA_CHAIN_NAME, c.name)
		if h := c.hook; h != nil {
			m = nfnl.String(m, unix.NFTA_CHAIN_TYPE, h.kind)
			m = nfnl.Uint32(m, unix.NFTA_CHAIN_POLICY, policyAccept)
			var at int
			m, at = nfnl.Nest(m, unix.NFTA_CHAIN_HOOK)
			m = nfnl.Uint32(m, unix.NFTA_HOOK_HOOKNUM, h.number)
			m = nfnl.EndNest(nfnl.Uint32(m, unix.NFTA_HOOK_PRIORITY, uint32(h.value)), at)
		}
		if c.comment != "" {
			m = nfnl.Bytes(m, attrChainUserData, commentData(c.comment))
		}
		return m
	})
}

func (b *batch) deleteChain(name string) {
	b.message(unix.NFT_MSG_DELCHAIN, 0, subject{"delete chain", name}, func(m []byte) []byte {
		return nfnl.String(nfnl.String(m, unix.NFTA_CHAIN_TABLE, tableName), unix.NFTA_CHAIN_NAME, name)
	})
}

// flushChain removes all rules of a chain.
func (b *batch) flushChain(name string) {
	b.message(unix.NFT_MSG_DELRULE, 0, subject{"flush chain", name}, func(m []byte) []byte {
		return nfnl.String(nfnl.String(m, unix.NFTA_RULE_TABLE, tableName), unix.NFTA_RULE_CHAIN, name)
	})
}

// deleteRule removes one rule.
func (b *batch) deleteRule(chain string, handle uint64) {
	b.message(unix.NFT_MSG_DELRULE, 0, subject{"delete a rule of chain", chain}, func(m []byte) []byte {
		m = nfnl.String(nfnl.String(m, unix.NFTA_RULE_TABLE, tableName), unix.NFTA_RULE_CHAIN, chain)
		return nfnl.Uint64(m, unix.NFTA_RULE_HANDLE, handle)
	})
}

// addRule puts a rule at the end of a chain, or before all others, after the set
// that is written out in it.
func (b *batch) addRule(chain string, r *rule, atHead bool) {
	id, place := uint32(0), uint16(unix.NLM_F_APPEND)
	if atHead {
		place = 0
	}
	if r.anon != nil {
		// The kernel would look through the names of all sets for a free number;
		// with ten thousand of them that is most of the time of a load. So the
		// number is chosen here, and the kernel refuses one that is taken.
		c := *r.anon.container
		c.name = c.name[:len(c.name)-len("%d")] + strconv.Itoa(b.anonymous)
		b.anonymous++
		c.digest = r.anon.digest()
		id = b.addSet(&c, len(r.anon.elements))
		b.elements(unix.NFT_MSG_NEWSETELEM, &c, id, r.anon.elements)
	}
	b.message(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|place, subject{"add a rule to chain", chain}, func(m []byte) []byte {
		m = nfnl.String(m, unix.NFTA_RULE_TABLE, tableName)
		m = nfnl.String(m, unix.NFTA_RULE_CHAIN, chain)
		m, at := nfnl.Nest(m, unix.NFTA_RULE_EXPRESSIONS)
		exprs := len(m)
		m = nfnl.EndNest(append(m, r.exprs...), at)
		if r.anon != nil {
			binary.BigEndian.PutUint32(m[exprs+r.anonAt:], id)
		}
		if r.comment != "" {
			m = nfnl.Bytes(m, unix.NFTA_RULE_USERDATA, commentData(r.comment))
		}
		return m
	})
}

// addSet makes a set and returns its number in the transaction. size is the number
// of elements it will ever have; 0 for any.
func (b *batch) addSet(c *container, size int) uint32 {
	b.setID++
	id := b.setID
	b.message(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE|unix.NLM_F_EXCL, subject{"add set", c.name}, func(m []byte) []byte {
		m = nfnl.String(m, unix.NFTA_SET_TABLE, tableName)
		m = nfnl.String(m, unix.NFTA_SET_NAME, c.name)
		m = nfnl.Uint32(m, unix.NFTA_SET_FLAGS, c.flags)
		typ, length := c.keyType()
		m = nfnl.Uint32(m, unix.NFTA_SET_KEY_TYPE, typ)
		m = nfnl.Uint32(m, unix.NFTA_SET_KEY_LEN, length)
		if c.worth != worthNothing {
			typ, length = c.dataType()
			m = nfnl.Uint32(m, unix.NFTA_SET_DATA_TYPE, typ)
			m = nfnl.Uint32(m, unix.NFTA_SET_DATA_LEN, length)
		}
		m = nfnl.Uint32(m, unix.NFTA_SET_ID, id)
		if c.timeout != 0 {
			m = nfnl.Uint64(m, unix.NFTA_SET_TIMEOUT, uint64(c.timeout.Milliseconds()))
		}
		if size != 0 {
			var at int
			m, at = nfnl.Nest(m, unix.NFTA_SET_DESC)
			m = nfnl.EndNest(nfnl.Uint32(m, unix.NFTA_SET_DESC_SIZE, uint32(size)), at)
		}
		return nfnl.Bytes(m, unix.NFTA_SET_USERDATA, c.userData())
	})
	return id
}

func (b *batch) deleteSet(name string) {
	b.message(unix.NFT_MSG_DELSET, 0, subject{"delete set", name}, func(m []byte) []byte {
		return nfnl.String(nfnl.String(m, unix.NFTA_SET_TABLE, tableName), unix.NFTA_SET_NAME, name)
	})
}

// elements adds elements to a set or takes them away. With id the set is of this
// transaction, and is found by it: by name the kernel would look through all sets.
func (b *batch) elements(typ uint16, c *container, id uint32, all []element) {
	verb, flags := "delete elements of", uint16(0)
	if typ == unix.NFT_MSG_NEWSETELEM {
		verb, flags = "add elements to", unix.NLM_F_CREATE
	}
	for len(all) > 0 {
		n := 0
		b.message(typ, flags, subject{verb, c.name}, func(m []byte) []byte {
			m = nfnl.String(m, unix.NFTA_SET_ELEM_LIST_TABLE, tableName)
			if id != 0 {
				m = nfnl.Uint32(m, unix.NFTA_SET_ELEM_LIST_SET_ID, id)
			} else {
				m = nfnl.String(m, unix.NFTA_SET_ELEM_LIST_SET, c.name)
			}
			m, at := nfnl.Nest(m, unix.NFTA_SET_ELEM_LIST_ELEMENTS)
			for n < len(all) && n < chunkElements && len(m)-at < chunkBytes {
				m = c.encode(m, all[n], typ == unix.NFT_MSG_NEWSETELEM)
				n++
			}
			return nfnl.EndNest(m, at)
		})
		all = all[n:]
	}
}
