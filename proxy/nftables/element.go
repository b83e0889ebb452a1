// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nfnl"
)

// key is the key of an element; which parts count is its container's business.
type key struct {
	addr     netip.Addr
	index    uint32
	port     uint16
	protocol uint8
	// end marks the address behind a range.
	end bool
}

type verdict uint8

const (
	verdictNone verdict = iota
	verdictGoto
	verdictJump
	verdictDrop
)

// value is what an element leads to.
type value struct {
	verdict verdict
	chain   string // of verdictGoto and verdictJump
	to      netip.AddrPort
	comment string
}

// element is one element of a set or map. Elements are compared with ==.
type element struct {
	key
	value
}

func protocolNumber(p string) uint8 {
	switch p {
	case "UDP":
		return unix.IPPROTO_UDP
	case "SCTP":
		return unix.IPPROTO_SCTP
	}
	return unix.IPPROTO_TCP
}

func protocolText(p uint8) string {
	switch p {
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	}
	return "tcp"
}

// keyText and valueText are as nft prints them.
func (c *container) keyText(k key) string {
	var parts []string
	for _, f := range c.fields {
		switch f {
		case fieldAddr, fieldSameAddr:
			parts = append(parts, k.addr.String())
		case fieldProtocol:
			parts = append(parts, protocolText(k.protocol))
		case fieldPort:
			parts = append(parts, strconv.Itoa(int(k.port)))
		case fieldIndex:
			parts = append(parts, strconv.Itoa(int(k.index)))
		}
	}
	return strings.Join(parts, " . ")
}

func (c *container) elementText(e element) string {
	text := c.keyText(e.key)
	if e.comment != "" {
		text += ` comment "` + e.comment + `"`
	}
	switch {
	case c.worth == worthTarget:
		text += " : " + e.to.Addr().String() + " . " + strconv.Itoa(int(e.to.Port()))
	case e.verdict == verdictGoto:
		text += " : goto " + e.chain
	case e.verdict == verdictJump:
		text += " : jump " + e.chain
	case e.verdict == verdictDrop:
		text += " : drop"
	}
	return text
}

// body is an anonymous set as it is written in a rule.
func (a *anonymous) body() string {
	var parts []string
	for _, e := range a.elements {
		parts = append(parts, a.elementText(e))
	}
	return "{ " + strings.Join(parts, ", ") + " }"
}

// digest is short for all elements.
func (a *anonymous) digest() string {
	var b []byte
	for _, e := range a.elements {
		b = a.encode(b, e, true)
	}
	sum := sha256.Sum256(b)
	return string(sum[:16])
}

// literal is a set of ranges as it is written in a rule.
func (a *anonymous) literal(ranges []netip.Prefix) string {
	var parts []string
	for _, p := range ranges {
		parts = append(parts, prefixText(p))
	}
	return "{ " + strings.Join(parts, ", ") + " }"
}

// encode appends the element as one item of a list.
func (c *container) encode(b []byte, e element, withValue bool) []byte {
	b, item := nfnl.Nest(b, unix.NFTA_LIST_ELEM)
	if e.end {
		b = nfnl.Uint32(b, unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	}
	var raw [48]byte // the longest key: two IPv6 addresses, protocol, port
	b = data(b, unix.NFTA_SET_ELEM_KEY, c.appendKey(raw[:0], e.key))
	if withValue {
		switch {
		case c.worth == worthTarget:
			addr := e.to.Addr()
			raw := binary.BigEndian.AppendUint16(addr.AsSlice(), e.to.Port())
			b = data(b, unix.NFTA_SET_ELEM_DATA, append(raw, 0, 0))
		case e.verdict == verdictGoto:
			b = verdictData(b, unix.NFTA_SET_ELEM_DATA, unix.NFT_GOTO, e.chain)
		case e.verdict == verdictJump:
			b = verdictData(b, unix.NFTA_SET_ELEM_DATA, unix.NFT_JUMP, e.chain)
		case e.verdict == verdictDrop:
			b = verdictData(b, unix.NFTA_SET_ELEM_DATA, codeDrop, "")
		}
		if e.comment != "" {
			b = nfnl.Bytes(b, unix.NFTA_SET_ELEM_USERDATA, piece(0, append([]byte(e.comment), 0)...))
		}
	}
	return nfnl.EndNest(b, item)
}

func (c *container) appendKey(b []byte, k key) []byte {
	for _, f := range c.fields {
		switch f {
		case fieldAddr, fieldSameAddr:
			b = appendAddr(b, k.addr)
		case fieldProtocol:
			b = append(b, k.protocol, 0, 0, 0)
		case fieldPort:
			b = append(binary.BigEndian.AppendUint16(b, k.port), 0, 0)
		case fieldIndex:
			b = binary.NativeEndian.AppendUint32(b, k.index)
		}
	}
	return b
}

func appendAddr(b []byte, a netip.Addr) []byte {
	if a.Is4() {
		raw := a.As4()
		return append(b, raw[:]...)
	}
	raw := a.As16()
	return append(b, raw[:]...)
}

// decode reads an element as the kernel lists it. It reports false for what this
// mode cannot have written. It runs once for each of many thousands.
func (c *container) decode(item []byte, e *element) (ok bool) {
	ok = true
	for {
		typ, v, rest, more := nfnl.Next(item)
		if !more {
			return ok
		}
		item = rest
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			_, raw, _, _ := nfnl.Next(v)
			ok = ok && c.decodeKey(&e.key, raw)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.end = nfnl.U32(v)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_DATA:
			typ, raw, _, _ := nfnl.Next(v)
			n := c.addrLen()
			switch {
			case typ == unix.NFTA_DATA_VERDICT:
				ok = ok && decodeVerdict(&e.value, raw)
			case len(raw) < n+2:
				ok = false
			default:
				addr, _ := netip.AddrFromSlice(raw[:n])
				e.to = netip.AddrPortFrom(addr, binary.BigEndian.Uint16(raw[n:]))
			}
		case unix.NFTA_SET_ELEM_USERDATA:
			e.comment = commentOf(v)
		}
	}
}

func (c *container) decodeKey(k *key, raw []byte) bool {
	for _, f := range c.fields {
		_, n := c.part(f)
		if len(raw) < int(n) {
			return false
		}
		switch f {
		case fieldAddr:
			k.addr, _ = netip.AddrFromSlice(raw[:n])
		case fieldSameAddr:
			if again, _ := netip.AddrFromSlice(raw[:n]); again != k.addr {
				return false
			}
		case fieldProtocol:
			k.protocol = raw[0]
		case fieldPort:
			k.port = binary.BigEndian.Uint16(raw)
		case fieldIndex:
			k.index = binary.NativeEndian.Uint32(raw)
		}
		raw = raw[n:]
	}
	return len(raw) == 0
}

func decodeVerdict(v *value, raw []byte) (ok bool) {
	code := int32(0)
	for {
		typ, b, rest, more := nfnl.Next(raw)
		if !more {
			break
		}
		raw = rest
		switch typ {
		case unix.NFTA_VERDICT_CODE:
			code = int32(nfnl.U32(b))
		case unix.NFTA_VERDICT_CHAIN:
			v.chain = nfnl.CString(b)
		}
	}
	switch code {
	case unix.NFT_GOTO:
		v.verdict = verdictGoto
	case unix.NFT_JUMP:
		v.verdict = verdictJump
	case codeDrop:
		v.verdict = verdictDrop
	default:
		return false
	}
	return true
}

// merged sorts ranges and leaves out what another holds.
func merged(ranges []netip.Prefix) []netip.Prefix {
	sorted := slices.Clone(ranges)
	slices.SortFunc(sorted, func(a, b netip.Prefix) int {
		if c := a.Addr().Compare(b.Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
	var out []netip.Prefix
	for _, p := range sorted {
		if n := len(out); n > 0 && out[n-1].Contains(p.Addr()) {
			continue
		}
		out = append(out, p)
	}
	return out
}

// intervals is the form in which the kernel holds sorted ranges: where each
// begins, and the address behind it unless there is none. Ranges side by side are
// one, as nft makes them.
func intervals(ranges []netip.Prefix) []element {
	var out []element
	for i, p := range ranges {
		if i == 0 || behind(ranges[i-1]) != p.Addr() {
			out = append(out, element{key: key{addr: p.Addr()}})
		}
		if end := behind(p); end.IsValid() && (i+1 == len(ranges) || ranges[i+1].Addr() != end) {
			out = append(out, element{key: key{addr: end, end: true}})
		}
	}
	// nft says where the space before the first range ends.
	if len(out) > 0 && !ranges[0].Addr().IsUnspecified() {
		zero := netip.IPv4Unspecified()
		if ranges[0].Addr().Is6() {
			zero = netip.IPv6Unspecified()
		}
		out = slices.Insert(out, 0, element{key: key{addr: zero, end: true}})
	}
	return out
}

// behind is the first address after a range; invalid after the last of all.
func behind(p netip.Prefix) netip.Addr {
	raw := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(raw)*8; i++ {
		raw[i/8] |= 0x80 >> (i % 8)
	}
	last, _ := netip.AddrFromSlice(raw)
	return last.Next()
}
