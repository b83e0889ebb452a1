// SPDX-License-Identifier: Apache-2.0

package netpolicy

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nfnl"
)

// table is the name of the table, in ip and in ip6.
const table = "kplab-netpol"

// Names of the fixed parts.
const (
	chainForward = "forward"
	setSelf      = "self"
	mapPrefix    = "pods-" // and the direction
)

// hookPriority is behind the proxies' own filters in the same hook (0), so that a
// Service without endpoints is refused as ever.
const hookPriority = 10

// Types of keys, by nft's own numbers, which the kernel keeps for it.
const (
	typeIPv4 = 7
	typeIPv6 = 8
)

// maxElements is how many elements go into one message, whose list holds 64 KiB.
const maxElements = 200

// batch collects the messages of one transaction.
type batch struct {
	conn  *nfnl.Conn
	v6    bool
	buf   []byte
	first uint32
	what  []string
	setID uint32
}

func newBatch(conn *nfnl.Conn, v6 bool) *batch {
	return &batch{conn: conn, v6: v6, buf: conn.BeginBatch(nil, nfnl.NFTables)}
}

func (b *batch) family() uint8 {
	if b.v6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

func (b *batch) message(typ, flags uint16, what string, build func(m []byte) []byte) {
	buf, start, seq := b.conn.Begin(b.buf, nfnl.NFTables|typ, flags, b.family(), 0)
	if len(b.what) == 0 {
		b.first = seq
	}
	b.what = append(b.what, what)
	b.buf = nfnl.End(build(buf), start)
}

// commit sends all of it as one transaction.
func (b *batch) commit() error {
	if len(b.what) == 0 {
		return nil
	}
	refused, err := b.conn.Commit(b.buf, nfnl.NFTables)
	if err == nil {
		return nil
	}
	what := "change table " + table
	if i := int(refused) - int(b.first); refused != 0 && i >= 0 && i < len(b.what) {
		what = b.what[i]
	}
	return fmt.Errorf("%s: %w", what, err)
}

func (b *batch) addTable() {
	b.message(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "add table", func(m []byte) []byte {
		return nfnl.Uint32(nfnl.String(m, unix.NFTA_TABLE_NAME, table), unix.NFTA_TABLE_FLAGS, 0)
	})
}

func (b *batch) deleteTable() {
	b.message(unix.NFT_MSG_DELTABLE, 0, "delete table", func(m []byte) []byte {
		return nfnl.String(m, unix.NFTA_TABLE_NAME, table)
	})
}

func (b *batch) addChain(name string, base bool) {
	b.message(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, "add chain "+name, func(m []byte) []byte {
		m = nfnl.String(nfnl.String(m, unix.NFTA_CHAIN_TABLE, table), unix.NFTA_CHAIN_NAME, name)
		if base {
			m = nfnl.Uint32(nfnl.String(m, unix.NFTA_CHAIN_TYPE, "filter"), unix.NFTA_CHAIN_POLICY, 1) // NF_ACCEPT
			var at int
			m, at = nfnl.Nest(m, unix.NFTA_CHAIN_HOOK)
			m = nfnl.Uint32(m, unix.NFTA_HOOK_HOOKNUM, unix.NF_INET_FORWARD)
			m = nfnl.EndNest(nfnl.Uint32(m, unix.NFTA_HOOK_PRIORITY, hookPriority), at)
		}
		return m
	})
}

func (b *batch) deleteChain(name string) {
	b.message(unix.NFT_MSG_DELRULE, 0, "flush chain "+name, func(m []byte) []byte {
		return nfnl.String(nfnl.String(m, unix.NFTA_RULE_TABLE, table), unix.NFTA_RULE_CHAIN, name)
	})
	b.message(unix.NFT_MSG_DELCHAIN, 0, "delete chain "+name, func(m []byte) []byte {
		return nfnl.String(nfnl.String(m, unix.NFTA_CHAIN_TABLE, table), unix.NFTA_CHAIN_NAME, name)
	})
}

// keyType describes the addresses of a key, one or two.
func (b *batch) keyType(addrs int) (typ, length uint32) {
	one, n := uint32(typeIPv4), uint32(4)
	if b.v6 {
		one, n = typeIPv6, 16
	}
	for range addrs {
		typ, length = typ<<6|one, length+n
	}
	return typ, length
}

// User data that nft keeps with a set, in pieces of one byte of type and one of
// length: the byte order of the key, without which it lists bare bytes.
func orderBig() []byte {
	return binary.NativeEndian.AppendUint32([]byte{0, 4}, 2)
}

func (b *batch) addSet(name string, addrs int, flags uint32) {
	b.setID++
	id := b.setID
	b.message(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE|unix.NLM_F_EXCL, "add set "+name, func(m []byte) []byte {
		m = nfnl.String(nfnl.String(m, unix.NFTA_SET_TABLE, table), unix.NFTA_SET_NAME, name)
		m = nfnl.Uint32(m, unix.NFTA_SET_FLAGS, flags)
		typ, length := b.keyType(addrs)
		m = nfnl.Uint32(nfnl.Uint32(m, unix.NFTA_SET_KEY_TYPE, typ), unix.NFTA_SET_KEY_LEN, length)
		if flags&unix.NFT_SET_MAP != 0 {
			m = nfnl.Uint32(nfnl.Uint32(m, unix.NFTA_SET_DATA_TYPE, unix.NFT_DATA_VERDICT), unix.NFTA_SET_DATA_LEN, 0)
		}
		m = nfnl.Uint32(m, unix.NFTA_SET_ID, id)
		if addrs == 1 {
			m = nfnl.Bytes(m, unix.NFTA_SET_USERDATA, orderBig())
		}
		return m
	})
}

func (b *batch) deleteSet(name string) {
	b.message(unix.NFT_MSG_DELSET, 0, "delete set "+name, func(m []byte) []byte {
		return nfnl.String(nfnl.String(m, unix.NFTA_SET_TABLE, table), unix.NFTA_SET_NAME, name)
	})
}

// element is one element of a set or map.
type element struct {
	key []byte
	end bool   // where an interval has ended
	to  string // the chain of a map
}

// intervals are the elements of a set of ranges: where each begins, and the address
// behind it unless there is none.
func intervals(all spans) []element {
	var out []element
	for _, s := range all {
		out = append(out, element{key: s.from.AsSlice()})
		if behind := s.to.Next(); behind.IsValid() {
			out = append(out, element{key: behind.AsSlice(), end: true})
		}
	}
	return out
}

func (b *batch) elements(typ uint16, set string, all []element) {
	what, flags := "delete elements of "+set, uint16(0)
	if typ == unix.NFT_MSG_NEWSETELEM {
		what, flags = "add elements to "+set, unix.NLM_F_CREATE
	}
	for len(all) > 0 {
		n := min(len(all), maxElements)
		b.message(typ, flags, what, func(m []byte) []byte {
			m = nfnl.String(nfnl.String(m, unix.NFTA_SET_ELEM_LIST_TABLE, table), unix.NFTA_SET_ELEM_LIST_SET, set)
			m, list := nfnl.Nest(m, unix.NFTA_SET_ELEM_LIST_ELEMENTS)
			for _, e := range all[:n] {
				var at int
				m, at = nfnl.Nest(m, unix.NFTA_LIST_ELEM)
				m = data(m, unix.NFTA_SET_ELEM_KEY, e.key)
				if e.end {
					m = nfnl.Uint32(m, unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
				}
				if e.to != "" {
					m = verdict(m, unix.NFTA_SET_ELEM_DATA, unix.NFT_JUMP, e.to)
				}
				m = nfnl.EndNest(m, at)
			}
			return nfnl.EndNest(m, list)
		})
		all = all[n:]
	}
}

func data(m []byte, typ uint16, value []byte) []byte {
	m, at := nfnl.Nest(m, typ)
	return nfnl.EndNest(nfnl.Bytes(m, unix.NFTA_DATA_VALUE, value), at)
}

func verdict(m []byte, typ uint16, code int32, chain string) []byte {
	m, at := nfnl.Nest(m, typ)
	m, inner := nfnl.Nest(m, unix.NFTA_DATA_VERDICT)
	m = nfnl.Uint32(m, unix.NFTA_VERDICT_CODE, uint32(code))
	if chain != "" {
		m = nfnl.String(m, unix.NFTA_VERDICT_CHAIN, chain)
	}
	return nfnl.EndNest(nfnl.EndNest(m, inner), at)
}

// rule is the expressions of a rule under construction, with its text.
type rule struct {
	v6    bool
	exprs []byte
	text  string
}

func (r *rule) say(words string) {
	if r.text != "" {
		r.text += " "
	}
	r.text += words
}

func (r *rule) expr(name string, attrs func(m []byte) []byte) {
	m, elem := nfnl.Nest(r.exprs, unix.NFTA_LIST_ELEM)
	m = nfnl.String(m, unix.NFTA_EXPR_NAME, name)
	m, at := nfnl.Nest(m, unix.NFTA_EXPR_DATA)
	r.exprs = nfnl.EndNest(nfnl.EndNest(attrs(m), at), elem)
}

func (r *rule) ip() string {
	if r.v6 {
		return "ip6"
	}
	return "ip"
}

// register is the number of the register that begins at the k-th four bytes; the
// kernel prefers the name of sixteen bytes where one begins.
func register(k int) uint32 {
	if k%4 == 0 {
		return unix.NFT_REG_1 + uint32(k/4)
	}
	return unix.NFT_REG32_00 + uint32(k)
}

// addr loads the source or the destination address.
func (r *rule) addr(k int, source bool) (next int) {
	offset, length := uint32(16), uint32(4)
	switch {
	case r.v6 && source:
		offset, length = 8, 16
	case r.v6:
		offset, length = 24, 16
	case source:
		offset = 12
	}
	r.expr("payload", func(m []byte) []byte {
		m = nfnl.Uint32(nfnl.Uint32(m, unix.NFTA_PAYLOAD_DREG, register(k)), unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_NETWORK_HEADER)
		return nfnl.Uint32(nfnl.Uint32(m, unix.NFTA_PAYLOAD_OFFSET, offset), unix.NFTA_PAYLOAD_LEN, length)
	})
	return k + int(length)/4
}

func (r *rule) lookup(set string, toVerdict bool) {
	r.expr("lookup", func(m []byte) []byte {
		m = nfnl.Uint32(nfnl.String(m, unix.NFTA_LOOKUP_SET, set), unix.NFTA_LOOKUP_SREG, register(0))
		if toVerdict {
			m = nfnl.Uint32(m, unix.NFTA_LOOKUP_DREG, unix.NFT_REG_VERDICT)
		}
		return m
	})
}

func (r *rule) cmp(op uint32, value []byte) {
	r.expr("cmp", func(m []byte) []byte {
		m = nfnl.Uint32(nfnl.Uint32(m, unix.NFTA_CMP_SREG, register(0)), unix.NFTA_CMP_OP, op)
		return data(m, unix.NFTA_CMP_DATA, value)
	})
}

func (r *rule) verdict(code int32, word string) {
	r.say(word)
	r.expr("immediate", func(m []byte) []byte {
		m = nfnl.Uint32(m, unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		return verdict(m, unix.NFTA_IMMEDIATE_DATA, code, "")
	})
}

// Verdicts of netfilter itself.
const (
	codeDrop   = 0
	codeAccept = 1
)

// protocol and port match what a clause names.
func (r *rule) protoPorts(c clause) {
	if c.proto == 0 {
		return
	}
	name := map[uint8]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}[c.proto]
	r.expr("meta", func(m []byte) []byte {
		return nfnl.Uint32(nfnl.Uint32(m, unix.NFTA_META_KEY, unix.NFT_META_L4PROTO), unix.NFTA_META_DREG, register(0))
	})
	r.cmp(unix.NFT_CMP_EQ, []byte{c.proto})
	if c.to == 0 {
		r.say("meta l4proto " + name)
		return
	}
	r.expr("payload", func(m []byte) []byte {
		m = nfnl.Uint32(nfnl.Uint32(m, unix.NFTA_PAYLOAD_DREG, register(0)), unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_TRANSPORT_HEADER)
		return nfnl.Uint32(nfnl.Uint32(m, unix.NFTA_PAYLOAD_OFFSET, 2), unix.NFTA_PAYLOAD_LEN, 2)
	})
	from, to := binary.BigEndian.AppendUint16(nil, c.from), binary.BigEndian.AppendUint16(nil, c.to)
	if c.from == c.to {
		r.say(fmt.Sprintf("%s dport %d", name, c.from))
		r.cmp(unix.NFT_CMP_EQ, from)
		return
	}
	r.say(fmt.Sprintf("%s dport %d-%d", name, c.from, c.to))
	r.cmp(unix.NFT_CMP_GTE, from)
	r.cmp(unix.NFT_CMP_LTE, to)
}

// baseRules are those of the chain at the hook.
func baseRules(v6 bool) []rule {
	established := rule{v6: v6}
	established.say("ct state established,related")
	established.expr("ct", func(m []byte) []byte {
		return nfnl.Uint32(nfnl.Uint32(m, unix.NFTA_CT_DREG, register(0)), unix.NFTA_CT_KEY, unix.NFT_CT_STATE)
	})
	host32 := func(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
	established.expr("bitwise", func(m []byte) []byte {
		m = nfnl.Uint32(nfnl.Uint32(m, unix.NFTA_BITWISE_SREG, register(0)), unix.NFTA_BITWISE_DREG, register(0))
		m = nfnl.Uint32(m, unix.NFTA_BITWISE_LEN, 4)
		return data(data(m, unix.NFTA_BITWISE_MASK, host32(1<<1|1<<2)), unix.NFTA_BITWISE_XOR, host32(0))
	})
	established.cmp(unix.NFT_CMP_NEQ, host32(0))
	established.verdict(codeAccept, "accept")

	self := rule{v6: v6}
	self.say(self.ip() + " saddr . " + self.ip() + " daddr @" + setSelf)
	self.addr(self.addr(0, true), false)
	self.lookup(setSelf, false)
	self.verdict(codeAccept, "accept")

	out := []rule{established, self}
	for _, dir := range []direction{egress, ingress} {
		r := rule{v6: v6}
		word := "daddr"
		if dir == egress {
			word = "saddr"
		}
		r.say(r.ip() + " " + word + " vmap @" + mapPrefix + string(dir))
		r.addr(0, dir == egress)
		r.lookup(mapPrefix+string(dir), true)
		out = append(out, r)
	}
	return out
}

// rules are those of a chain: a way through returns to the base chain, where the
// other direction is asked; what finds none is dropped.
func (c *chain) rules(v6 bool) []rule {
	var out []rule
	for _, cl := range c.clauses {
		r := rule{v6: v6}
		if cl.peers != "" {
			word := "saddr"
			if c.dir == egress {
				word = "daddr"
			}
			r.say(r.ip() + " " + word + " @" + cl.peers)
			r.addr(0, c.dir == ingress)
			r.lookup(cl.peers, false)
		}
		r.protoPorts(cl)
		r.verdict(unix.NFT_RETURN, "return")
		out = append(out, r)
	}
	last := rule{v6: v6}
	last.verdict(codeDrop, "drop")
	return append(out, last)
}

// User data of a rule, in pieces as above: the comment that nft shows, and a digest of
// the expressions, by which the rule is known again. What the kernel gives back of
// the expressions is in its own words; a rule that somebody replaces loses both.
const (
	udComment = 0
	udDigest  = 0x7f
)

// digest stands for what a rule does.
func (r *rule) digest() string {
	sum := sha256.Sum256(r.exprs)
	return string(sum[:8])
}

// addRule appends a rule, with a comment for people.
func (b *batch) addRule(chain string, r rule, comment string) {
	b.message(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, "add a rule to "+chain, func(m []byte) []byte {
		m = nfnl.String(nfnl.String(m, unix.NFTA_RULE_TABLE, table), unix.NFTA_RULE_CHAIN, chain)
		m, at := nfnl.Nest(m, unix.NFTA_RULE_EXPRESSIONS)
		m = nfnl.EndNest(append(m, r.exprs...), at)
		var ud []byte
		if comment != "" {
			comment = comment[:min(len(comment), 120)] // nft reads 128 bytes
			ud = append(append([]byte{udComment, byte(len(comment) + 1)}, comment...), 0)
		}
		ud = append(append(ud, udDigest, 8), r.digest()...)
		return nfnl.Bytes(m, unix.NFTA_RULE_USERDATA, ud)
	})
}

func concat(a, b netip.Addr) []byte { return append(a.AsSlice(), b.AsSlice()...) }
