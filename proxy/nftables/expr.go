// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nfnl"
)

// A rule is written down once, as a list of statements, each of which knows its
// text and its bytecode: what is shown and what is loaded cannot drift apart.

// rule is one rule of a chain. Rules with equal text, comment included, are equal.
type rule struct {
	// text is the rule as nft prints it, without its comment.
	text    string
	comment string
	// exprs is the value of NFTA_RULE_EXPRESSIONS.
	exprs []byte
	// anon is the set or map that is written out in the rule; nil for none. Its
	// number in the transaction belongs at exprs[anonAt:].
	anon   *anonymous
	anonAt int
}

// same says whether two rules do the same and read the same.
func (r *rule) same(o *rule) bool { return r.text == o.text && r.comment == o.comment }

// anonymous is a set that exists for one rule. The kernel lets nobody change it.
type anonymous struct {
	*container
	elements []element
}

// statement appends its part to a rule.
type statement func(w *ruleWriter)

type ruleWriter struct {
	family
	rule
	words []string
}

// rule puts statements together.
func (f family) rule(parts ...statement) rule { return f.noted("", parts...) }

// noted is rule with a comment.
func (f family) noted(comment string, parts ...statement) rule {
	w := ruleWriter{family: f}
	w.exprs = make([]byte, 0, 256)
	for _, p := range parts {
		p(&w)
	}
	w.text, w.comment = strings.Join(w.words, " "), comment
	return w.rule
}

func (w *ruleWriter) say(words ...string) { w.words = append(w.words, words...) }

// expr appends one expression.
func (w *ruleWriter) expr(name string, attrs func(b []byte) []byte) {
	b, elem := nfnl.Nest(w.exprs, unix.NFTA_LIST_ELEM)
	b = nfnl.String(b, unix.NFTA_EXPR_NAME, name)
	b, data := nfnl.Nest(b, unix.NFTA_EXPR_DATA)
	b = attrs(b)
	w.exprs = nfnl.EndNest(nfnl.EndNest(b, data), elem)
}

// register is the number of the register that begins at the k-th four bytes. The
// kernel has two names for each sixteenth byte and prints this one.
func register(k int) uint32 {
	if k%4 == 0 {
		return unix.NFT_REG_1 + uint32(k/4)
	}
	return unix.NFT_REG32_00 + uint32(k)
}

func data(b []byte, typ uint16, value []byte) []byte {
	b, start := nfnl.Nest(b, typ)
	return nfnl.EndNest(nfnl.Bytes(b, unix.NFTA_DATA_VALUE, value), start)
}

func verdictData(b []byte, typ uint16, code int32, chain string) []byte { //nolint:unparam // two attributes with one number
	b, start := nfnl.Nest(b, typ)
	b, inner := nfnl.Nest(b, unix.NFTA_DATA_VERDICT)
	b = nfnl.Uint32(b, unix.NFTA_VERDICT_CODE, uint32(code))
	if chain != "" {
		b = nfnl.String(b, unix.NFTA_VERDICT_CHAIN, chain)
	}
	return nfnl.EndNest(nfnl.EndNest(b, inner), start)
}

func (w *ruleWriter) immediateVerdict(code int32, chain string) {
	w.expr("immediate", func(b []byte) []byte {
		b = nfnl.Uint32(b, unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		return verdictData(b, unix.NFTA_IMMEDIATE_DATA, code, chain)
	})
}

func (w *ruleWriter) immediate(k int, value []byte) {
	w.expr("immediate", func(b []byte) []byte {
		b = nfnl.Uint32(b, unix.NFTA_IMMEDIATE_DREG, register(k))
		return data(b, unix.NFTA_IMMEDIATE_DATA, value)
	})
}

func (w *ruleWriter) payload(k int, base, offset, length uint32) {
	w.expr("payload", func(b []byte) []byte {
		b = nfnl.Uint32(b, unix.NFTA_PAYLOAD_DREG, register(k))
		b = nfnl.Uint32(b, unix.NFTA_PAYLOAD_BASE, base)
		b = nfnl.Uint32(b, unix.NFTA_PAYLOAD_OFFSET, offset)
		return nfnl.Uint32(b, unix.NFTA_PAYLOAD_LEN, length)
	})
}

// The two addresses of a packet.
type direction string

const (
	source      direction = "saddr"
	destination direction = "daddr"
)

// offset is where the address stands in the network header.
func (w *ruleWriter) offset(d direction) uint32 {
	if w.v6() {
		return map[direction]uint32{source: 8, destination: 24}[d]
	}
	return map[direction]uint32{source: 12, destination: 16}[d]
}

// addr loads an address and returns the register behind it.
func (w *ruleWriter) addr(k int, d direction) int {
	w.payload(k, unix.NFT_PAYLOAD_NETWORK_HEADER, w.offset(d), uint32(w.addrLen()))
	return k + w.addrLen()/4
}

// protoPort loads protocol and destination port and returns the register behind.
func (w *ruleWriter) protoPort(k int) int {
	w.meta(k, unix.NFT_META_L4PROTO)
	w.payload(k+1, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2)
	return k + 2
}

func (w *ruleWriter) meta(k int, key uint32) {
	w.expr("meta", func(b []byte) []byte {
		return nfnl.Uint32(nfnl.Uint32(b, unix.NFTA_META_KEY, key), unix.NFTA_META_DREG, register(k))
	})
}

func (w *ruleWriter) ct(key uint32) {
	w.expr("ct", func(b []byte) []byte {
		return nfnl.Uint32(nfnl.Uint32(b, unix.NFTA_CT_DREG, register(0)), unix.NFTA_CT_KEY, key)
	})
}

func (w *ruleWriter) cmp(op uint32, value []byte) {
	w.expr("cmp", func(b []byte) []byte {
		b = nfnl.Uint32(b, unix.NFTA_CMP_SREG, register(0))
		b = nfnl.Uint32(b, unix.NFTA_CMP_OP, op)
		return data(b, unix.NFTA_CMP_DATA, value)
	})
}

// attrBitwiseOp chooses among the kinds of bitwise; 0 is "and mask, xor".
const attrBitwiseOp = 6

func (w *ruleWriter) bitwise(mask, xor []byte) {
	w.expr("bitwise", func(b []byte) []byte {
		b = nfnl.Uint32(b, unix.NFTA_BITWISE_SREG, register(0))
		b = nfnl.Uint32(b, unix.NFTA_BITWISE_DREG, register(0))
		b = nfnl.Uint32(b, unix.NFTA_BITWISE_LEN, uint32(len(mask)))
		b = nfnl.Uint32(b, attrBitwiseOp, 0)
		b = data(b, unix.NFTA_BITWISE_MASK, mask)
		return data(b, unix.NFTA_BITWISE_XOR, xor)
	})
}

func host32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// noRegister marks a lookup that only asks for membership.
const noRegister = -1

// lookup looks the key up that begins in the first register. to is the register
// for the value of a map; verdictRegister for one of verdicts.
func (w *ruleWriter) lookup(set string, to int64, invert bool) {
	w.expr("lookup", func(b []byte) []byte {
		b = nfnl.String(b, unix.NFTA_LOOKUP_SET, set)
		b = nfnl.Uint32(b, unix.NFTA_LOOKUP_SREG, register(0))
		if to != noRegister {
			b = nfnl.Uint32(b, unix.NFTA_LOOKUP_DREG, uint32(to))
		}
		if invert {
			b = nfnl.Uint32(b, unix.NFTA_LOOKUP_FLAGS, unix.NFT_LOOKUP_F_INV)
		}
		if w.anon != nil && set == w.anon.name {
			b = nfnl.Uint32(b, unix.NFTA_LOOKUP_SET_ID, 0)
			w.anonAt = len(b) - 4
		}
		return b
	})
}

// anonymously makes the rule's own set.
func (w *ruleWriter) anonymously(c *container, elements []element) {
	w.anon = &anonymous{c, elements}
}

func (w *ruleWriter) random(k, mod, offset int) {
	w.expr("numgen", func(b []byte) []byte {
		b = nfnl.Uint32(b, unix.NFTA_NG_DREG, register(k))
		b = nfnl.Uint32(b, unix.NFTA_NG_MODULUS, uint32(mod))
		b = nfnl.Uint32(b, unix.NFTA_NG_TYPE, unix.NFT_NG_RANDOM)
		return nfnl.Uint32(b, unix.NFTA_NG_OFFSET, uint32(offset))
	})
}

func (w *ruleWriter) dnat(addr, port int) {
	w.expr("nat", func(b []byte) []byte {
		b = nfnl.Uint32(b, unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT)
		b = nfnl.Uint32(b, unix.NFTA_NAT_FAMILY, uint32(w.nfproto()))
		b = nfnl.Uint32(b, unix.NFTA_NAT_REG_ADDR_MIN, register(addr))
		return nfnl.Uint32(b, unix.NFTA_NAT_REG_PROTO_MIN, register(port))
	})
}

func jump(chain string) statement {
	return func(w *ruleWriter) {
		w.say("jump", chain)
		w.immediateVerdict(unix.NFT_JUMP, chain)
	}
}

func gotoChain(chain string) statement {
	return func(w *ruleWriter) {
		w.say("goto", chain)
		w.immediateVerdict(unix.NFT_GOTO, chain)
	}
}

// codeDrop is NF_DROP.
const codeDrop = 0

func drop(w *ruleWriter) {
	w.say("drop")
	w.immediateVerdict(codeDrop, "")
}

// reject answers "port unreachable", to TCP as well.
func reject(w *ruleWriter) {
	code := uint8(3) // ICMP_PORT_UNREACH
	if w.v6() {
		code = 4 // ICMPV6_PORT_UNREACH
	}
	w.say("reject")
	w.expr("reject", func(b []byte) []byte {
		return nfnl.Uint8(nfnl.Uint32(b, unix.NFTA_REJECT_TYPE, unix.NFT_REJECT_ICMP_UNREACH), unix.NFTA_REJECT_ICMP_CODE, code)
	})
}

// stateNew matches the first packet of a flow.
func stateNew(w *ruleWriter) {
	w.say("ct state new")
	w.ct(unix.NFT_CT_STATE)
	w.bitwise(host32(1<<3), host32(0))
	w.cmp(unix.NFT_CMP_NEQ, host32(0))
}

// statusDNAT matches flows whose destination was translated.
func statusDNAT(w *ruleWriter) {
	w.say("ct status dnat")
	w.ct(unix.NFT_CT_STATUS)
	w.bitwise(host32(1<<5), host32(0))
	w.cmp(unix.NFT_CMP_NEQ, host32(0))
}

// in matches an address in a range; notIn one outside.
func in(d direction, p netip.Prefix) statement    { return inRange(d, p, false) }
func notIn(d direction, p netip.Prefix) statement { return inRange(d, p, true) }

func inRange(d direction, p netip.Prefix, not bool) statement {
	return func(w *ruleWriter) {
		w.say(w.ip(), string(d))
		op := uint32(unix.NFT_CMP_EQ)
		if not {
			op = unix.NFT_CMP_NEQ
			w.say("!=")
		}
		w.say(prefixText(p))
		value := p.Masked().Addr().AsSlice()
		if bytes := p.Bits() / 8; p.Bits()%8 == 0 && bytes > 0 {
			w.payload(0, unix.NFT_PAYLOAD_NETWORK_HEADER, w.offset(d), uint32(bytes))
			w.cmp(op, value[:bytes])
			return
		}
		w.addr(0, d)
		mask := make([]byte, len(value))
		for i := range p.Bits() {
			mask[i/8] |= 0x80 >> (i % 8)
		}
		w.bitwise(mask, make([]byte, len(value)))
		w.cmp(op, value)
	}
}

// prefixText is a range as nft prints it: a single address has no length.
func prefixText(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}

// inAny matches an address in one of several ranges, or with not in none of them.
func inAny(d direction, ranges []netip.Prefix, not bool) statement {
	ranges = merged(ranges)
	if len(ranges) == 1 {
		return inRange(d, ranges[0], not)
	}
	return func(w *ruleWriter) {
		w.say(w.ip(), string(d))
		if not {
			w.say("!=")
		}
		w.anonymously(w.rangeSet(d), intervals(ranges))
		w.say(w.anon.literal(ranges))
		w.addr(0, d)
		w.lookup(w.anon.name, noRegister, not)
	}
}

// inSet matches an address that a named set holds.
func inSet(d direction, set string) statement {
	return func(w *ruleWriter) {
		w.say(w.ip(), string(d), "@"+set)
		w.addr(0, d)
		w.lookup(set, noRegister, false)
	}
}

// serviceVmap goes where a map of address, protocol and port says.
func serviceVmap(set string) statement {
	return func(w *ruleWriter) {
		w.say(w.ip(), "daddr . meta l4proto . th dport vmap @"+set)
		w.protoPort(w.addr(0, destination))
		w.lookup(set, unix.NFT_REG_VERDICT, false)
	}
}

// portVmap goes where a map of protocol and port says.
func portVmap(set string) statement {
	return func(w *ruleWriter) {
		w.say("meta l4proto . th dport vmap @" + set)
		w.protoPort(0)
		w.lookup(set, unix.NFT_REG_VERDICT, false)
	}
}

// inHairpins matches what goes from an endpoint to itself.
func inHairpins(set string) statement {
	return func(w *ruleWriter) {
		w.say(w.ip(), "saddr .", w.ip(), "daddr . meta l4proto . th dport @"+set)
		w.protoPort(w.addr(w.addr(0, source), destination))
		w.lookup(set, noRegister, false)
	}
}

func (w *ruleWriter) setMark() {
	w.expr("meta", func(b []byte) []byte {
		return nfnl.Uint32(nfnl.Uint32(b, unix.NFTA_META_KEY, unix.NFT_META_MARK), unix.NFTA_META_SREG, register(0))
	})
}

const markText = "0x00004000"

// mark sets the bit that asks for masquerading.
func mark(w *ruleWriter) {
	w.say("meta mark set meta mark | " + markText)
	w.meta(0, unix.NFT_META_MARK)
	w.bitwise(host32(^uint32(masqueradeMark)), host32(masqueradeMark))
	w.setMark()
}

// marked matches the bit and takes it off again, so that a packet that passes the
// stack twice (a tunnel) is judged afresh.
func marked(w *ruleWriter) {
	w.say("meta mark & "+markText, "!= 0x00000000", "meta mark set meta mark ^ "+markText)
	w.meta(0, unix.NFT_META_MARK)
	w.bitwise(host32(masqueradeMark), host32(0))
	w.cmp(unix.NFT_CMP_NEQ, host32(0))
	w.meta(0, unix.NFT_META_MARK)
	w.bitwise(host32(^uint32(0)), host32(masqueradeMark))
	w.setMark()
}

// masquerade hides the source behind the node, on a source port that does not
// depend on the client's.
func masquerade(w *ruleWriter) {
	const randomFully = 1 << 4
	w.say("masquerade fully-random")
	w.expr("masq", func(b []byte) []byte { return nfnl.Uint32(b, unix.NFTA_MASQ_FLAGS, randomFully) })
}

// isLocal matches an address of the node.
func isLocal(d direction) statement {
	return func(w *ruleWriter) {
		flags := uint32(unix.NFTA_FIB_F_DADDR)
		if d == source {
			flags = unix.NFTA_FIB_F_SADDR
		}
		w.say("fib", string(d), "type local")
		w.expr("fib", func(b []byte) []byte {
			b = nfnl.Uint32(b, unix.NFTA_FIB_DREG, register(0))
			b = nfnl.Uint32(b, unix.NFTA_FIB_RESULT, unix.NFT_FIB_RESULT_ADDRTYPE)
			return nfnl.Uint32(b, unix.NFTA_FIB_FLAGS, flags)
		})
		w.cmp(unix.NFT_CMP_EQ, host32(unix.RTN_LOCAL))
	}
}

// remember puts the client into a set, or renews it there.
func remember(set string) statement {
	return func(w *ruleWriter) {
		w.say("update @"+set, "{", w.ip(), "saddr }")
		w.addr(0, source)
		w.expr("dynset", func(b []byte) []byte {
			b = nfnl.Uint32(b, unix.NFTA_DYNSET_SREG_KEY, register(0))
			b = nfnl.Uint32(b, unix.NFTA_DYNSET_OP, unix.NFT_DYNSET_OP_UPDATE)
			return nfnl.String(b, unix.NFTA_DYNSET_SET_NAME, set)
		})
	}
}

// protocol matches the protocol, which a translation of ports wants to know.
func protocol(p uint8) statement {
	return func(w *ruleWriter) {
		w.say("meta l4proto", protocolText(p))
		w.meta(0, unix.NFT_META_L4PROTO)
		w.cmp(unix.NFT_CMP_EQ, []byte{p})
	}
}

// dnatTo translates to one endpoint.
func dnatTo(a netip.AddrPort) statement {
	return func(w *ruleWriter) {
		w.say("dnat to", a.String())
		w.immediate(0, a.Addr().AsSlice())
		w.immediate(4, binary.BigEndian.AppendUint16(nil, a.Port()))
		w.dnat(0, 4)
	}
}

// dnatRandom translates to one of the endpoints.
func dnatRandom(to []netip.AddrPort) statement {
	return func(w *ruleWriter) {
		elements := make([]element, len(to))
		for i, a := range to {
			elements[i] = element{key: key{index: uint32(i)}, value: value{to: a}}
		}
		w.anonymously(w.endpointMap(), elements)
		w.say("dnat", w.ip(), "to numgen random mod", strconv.Itoa(len(to)), "map", w.anon.body())
		w.random(0, len(to), 0)
		w.lookup(w.anon.name, int64(register(0)), false)
		w.dnat(0, w.addrLen()/4)
	}
}

// gotoRandom goes to one of the chains.
func gotoRandom(chains []string) statement {
	return func(w *ruleWriter) {
		elements := make([]element, len(chains))
		for i, c := range chains {
			elements[i] = element{key: key{index: uint32(i)}, value: value{verdict: verdictGoto, chain: c}}
		}
		w.anonymously(w.verdictMap(), elements)
		w.say("numgen random mod", strconv.Itoa(len(chains)), "vmap", w.anon.body())
		w.random(0, len(chains), 0)
		w.lookup(w.anon.name, unix.NFT_REG_VERDICT, false)
	}
}

// dnatIndexed translates to what the map of all endpoints has for the packet's
// destination and a random index of n, counted from base. With anyAddress the
// address does not count, as for nodePorts, and is zero in the map.
func dnatIndexed(set string, n, base int, anyAddress bool) statement {
	return func(w *ruleWriter) {
		w.say("dnat", w.ip(), "to", w.ip(), "daddr")
		next := w.addr(0, destination)
		if anyAddress {
			zero := make([]byte, w.addrLen())
			w.say("&", w.anyAddr().String())
			w.bitwise(zero, zero)
		}
		next = w.protoPort(next)
		w.say(". meta l4proto . th dport . numgen random mod", strconv.Itoa(n))
		if base != 0 {
			w.say("offset", strconv.Itoa(base))
		}
		w.random(next, n, base)
		w.say("map @" + set)
		w.lookup(set, int64(register(0)), false)
		w.dnat(0, w.addrLen()/4)
	}
}
