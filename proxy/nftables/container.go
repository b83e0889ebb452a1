// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// family is the family of a table, as the kernel numbers it.
type family uint8

func familyOf(f corev1.IPFamily) family {
	if f == corev1.IPv6Protocol {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

func (f family) v6() bool       { return f == unix.NFPROTO_IPV6 }
func (f family) nfproto() uint8 { return uint8(f) }

// ip is the family's word in tables and rules.
func (f family) ip() string {
	if f.v6() {
		return "ip6"
	}
	return "ip"
}

// addrLen is the size of an address in bytes.
func (f family) addrLen() int {
	if f.v6() {
		return 16
	}
	return 4
}

func (f family) anyAddr() netip.Addr {
	if f.v6() {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// field is a part of a set's key.
type field uint8

const (
	fieldAddr     field = iota
	fieldSameAddr       // the address once more, as source and destination of a hairpin
	fieldProtocol
	fieldPort
	fieldIndex
)

// Types of the parts, by nft's own numbers, which the kernel keeps for it. A key
// of several parts has them side by side, six bits each.
const (
	typeInteger = 4
	typeIPv4    = 7
	typeIPv6    = 8
	typeProto   = 12
	typeService = 13
	typeBits    = 6
)

// worth is what a set's elements lead to.
type worth uint8

const (
	worthNothing worth = iota // a set
	worthVerdict              // a verdict map
	worthTarget               // a map to address and port
)

// container is a set or a map, without its elements.
type container struct {
	family
	name, comment string
	fields        []field
	worth         worth
	flags         uint32
	timeout       time.Duration
	// size is how many elements it may hold; 0 for no limit.
	size int
	// byExpression says that nft is told the expressions which the key stands for;
	// a part that is a bare number has no other name.
	byExpression bool
	// of says which address a set of ranges is asked about; nft wants to know.
	of direction
	// digest stands for the elements of a set that never changes; see udDigest.
	digest string
}

// keyType and keyLen describe the key; each part takes a multiple of four bytes.
func (c *container) keyType() (typ, length uint32) {
	for _, f := range c.fields {
		t, n := c.part(f)
		typ, length = typ<<typeBits|t, length+n
	}
	return typ, length
}

func (c *container) part(f field) (typ, length uint32) {
	switch f {
	case fieldAddr, fieldSameAddr:
		if c.v6() {
			return typeIPv6, 16
		}
		return typeIPv4, 4
	case fieldProtocol:
		return typeProto, 4
	case fieldPort:
		return typeService, 4
	default:
		return typeInteger, 4
	}
}

// dataType and dataLen describe the values of a map.
func (c *container) dataType() (typ, length uint32) {
	if c.worth == worthVerdict {
		return unix.NFT_DATA_VERDICT, 0
	}
	t, n := c.part(fieldAddr)
	return t<<typeBits | typeService, n + 4
}

// typeText is how the declaration names key and value.
func (c *container) typeText() string {
	addr := "ipv4_addr"
	if c.v6() {
		addr = "ipv6_addr"
	}
	words := map[field]string{fieldAddr: addr, fieldSameAddr: addr, fieldProtocol: "inet_proto", fieldPort: "inet_service", fieldIndex: "integer"}
	kind, target := "type ", addr+" . inet_service"
	if c.byExpression {
		kind, target = "typeof ", c.ip()+" daddr . th dport"
		words = map[field]string{fieldAddr: c.ip() + " daddr", fieldProtocol: "meta l4proto", fieldPort: "th dport", fieldIndex: "numgen random mod 65536"}
	}
	var key []string
	for _, f := range c.fields {
		key = append(key, words[f])
	}
	text := kind + strings.Join(key, " . ")
	switch c.worth {
	case worthVerdict:
		text += " : verdict"
	case worthTarget:
		text += " : " + target
	}
	return text
}

// nft remembers what the kernel need not know about a set in user data: pieces of
// one byte of type and one of length. The kernel stores them and gives them back;
// without them nft lists keys as bare bytes.
const (
	udKeyOrder     = 0
	udDataOrder    = 1
	udMerge        = 2
	udKeyTypeof    = 3
	udDataTypeof   = 4
	udDataInterval = 6
	udComment      = 7
	// udDigest is our own, which nft does not look at: a digest of the elements of
	// a set that is written out in a rule. Nobody can change such a set, and to list
	// ten thousand of them takes a minute.
	udDigest = 0x7f

	orderHost = 1
	orderBig  = 2
)

// Kinds of expressions in user data, by nft's numbers, and those of the fields
// of headers that occur here.
const (
	exprVerdict = 1
	exprPayload = 7
	exprMeta    = 9
	exprConcat  = 13
	exprNumgen  = 23

	headerTransport = 11
	headerIPv4      = 12
	headerIPv6      = 13
)

func piece(typ byte, value ...byte) []byte {
	return append([]byte{typ, byte(len(value))}, value...)
}

func piece32(typ byte, value uint32) []byte {
	return piece(typ, binary.NativeEndian.AppendUint32(nil, value)...)
}

func pieces(parts ...[]byte) []byte {
	var out []byte
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

// described is an expression of a kind with its own pieces.
func described(kind uint32, parts ...[]byte) []byte {
	return append(piece32(0, kind), piece(1, pieces(parts...)...)...)
}

func (f family) addrExpr(d direction) []byte {
	header, number := uint32(headerIPv4), map[direction]uint32{source: 11, destination: 12}[d]
	if f.v6() {
		header, number = headerIPv6, map[direction]uint32{source: 8, destination: 9}[d]
	}
	return described(exprPayload, piece32(0, header), piece32(1, number))
}

func portExpr() []byte { return described(exprPayload, piece32(0, headerTransport), piece32(1, 2)) }

func concat(parts ...[]byte) []byte {
	var numbered [][]byte
	for i, p := range parts {
		numbered = append(numbered, piece(byte(i), p...))
	}
	return described(exprConcat, numbered...)
}

// userData is what nft would store with this set.
func (c *container) userData() []byte {
	order := uint32(0)
	if len(c.fields) == 1 {
		order = orderBig
		if c.fields[0] == fieldIndex {
			order = orderHost
		}
	}
	out := piece32(udKeyOrder, order)
	add := func(p []byte) { out = append(out, p...) }
	if c.worth != worthNothing {
		add(piece32(udDataOrder, 0))
	}
	switch {
	case c.byExpression:
		numgen := described(exprNumgen, piece32(0, unix.NFT_NG_RANDOM), piece32(1, 65536), piece32(2, 0))
		l4proto := described(exprMeta, piece32(0, unix.NFT_META_L4PROTO))
		add(piece(udKeyTypeof, concat(c.addrExpr(destination), l4proto, portExpr(), numgen)...))
		add(piece(udDataTypeof, concat(c.addrExpr(destination), portExpr())...))
	case c.flags&unix.NFT_SET_INTERVAL != 0:
		add(piece32(udMerge, 1))
		add(piece(udKeyTypeof, c.addrExpr(c.of)...))
	case len(c.fields) > 1:
		add(piece(udKeyTypeof, described(exprConcat)...))
	case c.worth == worthVerdict:
		add(piece(udDataTypeof, described(exprVerdict)...))
	}
	if c.worth != worthNothing {
		add(piece32(udDataInterval, 0))
	}
	if c.comment != "" {
		add(piece(udComment, append([]byte(c.comment), 0)...))
	}
	if c.digest != "" {
		add(piece(udDigest, []byte(c.digest)...))
	}
	return out
}

// text is the declaration as nft prints it, with elements that are printed
// already.
func (c *container) text(b *strings.Builder, elements []string) {
	kind := "set"
	if c.worth != worthNothing {
		kind = "map"
	}
	b.WriteString("\t" + kind + " " + c.name + " {\n\t\t" + c.typeText() + "\n")
	if c.size != 0 {
		b.WriteString("\t\tsize " + strconv.Itoa(c.size) + "\n")
	}
	if c.flags&unix.NFT_SET_EVAL != 0 {
		b.WriteString("\t\tflags dynamic,timeout\n")
	}
	if c.timeout != 0 {
		b.WriteString("\t\ttimeout " + strconv.Itoa(int(c.timeout.Seconds())) + "s\n")
	}
	if c.comment != "" {
		b.WriteString("\t\tcomment \"" + c.comment + "\"\n")
	}
	if len(elements) > 0 {
		b.WriteString("\t\telements = { " + strings.Join(elements, ",\n\t\t\t     ") + " }\n")
	}
	b.WriteString("\t}\n\n")
}

// Containers of single rules.

const anonymousFlags = unix.NFT_SET_ANONYMOUS | unix.NFT_SET_CONSTANT

// The kernel puts a number in place of %d.
const (
	anonymousSet = "__set%d"
	anonymousMap = "__map%d"
)

func (f family) rangeSet(of direction) *container {
	return &container{family: f, name: anonymousSet, of: of, fields: []field{fieldAddr}, flags: anonymousFlags | unix.NFT_SET_INTERVAL}
}

func (f family) endpointMap() *container {
	return &container{family: f, name: anonymousMap, fields: []field{fieldIndex}, worth: worthTarget, flags: anonymousFlags | unix.NFT_SET_MAP}
}

func (f family) verdictMap() *container {
	return &container{family: f, name: anonymousMap, fields: []field{fieldIndex}, worth: worthVerdict, flags: anonymousFlags | unix.NFT_SET_MAP}
}

// affinitySet remembers the clients of one endpoint for a time.
func (f family) affinitySet(name string, timeout time.Duration) *container {
	return &container{family: f, name: name, fields: []field{fieldAddr}, flags: unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT, timeout: timeout}
}
