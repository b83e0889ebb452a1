// SPDX-License-Identifier: Apache-2.0

// Package allocator decides which Service address and which node port is free.
//
// It keeps nothing on disk. A [Book] holds two things: the values of the
// Services that are stored, as its caller reported them, and the values that
// requests in flight have reserved. A value is taken while either names it. The
// API server is the only writer of Services, so the two together are the whole
// truth: after a crash the first half is derived again from the stored Services
// and the second half is empty, and nothing can leak or disagree.
//
// The package knows no Kubernetes type and does no input or output.
//
// Dynamic picks follow upstream's split of a range into two bands (KEP-3070 for
// addresses, KEP-3668 for ports): the lower band is left to static requests for
// as long as the upper one has room.
package allocator

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/big"
	"net/netip"
)

// Errors of a request for a value. The texts are the ones upstream's API server
// puts into its answers.
var (
	// ErrFull says that no value of the range is free.
	ErrFull = errors.New("range is full")
	// ErrIPTaken says that the requested address belongs to another owner.
	ErrIPTaken = errors.New("provided IP is already allocated")
	// ErrNoRange says that no range holds the requested address. A range's first
	// address, and its last for IPv4, are not in it.
	ErrNoRange = errors.New("the provided network does not match the current range")
	// ErrPortTaken says that the requested port belongs to another owner.
	ErrPortTaken = errors.New("provided port is already allocated")
)

// NotInRangeError says that a requested port lies outside the range. Of an address
// it is said in a dry run, which looks at one range only.
type NotInRangeError struct {
	// Value is what was asked for, in its usual notation.
	Value string
	// Range is what can be asked for, in its usual notation.
	Range string
	// Port is true for a node port and false for an address.
	Port bool
}

// Error is upstream's sentence for this refusal.
func (e *NotInRangeError) Error() string {
	if e.Port {
		return "provided port is not in the valid range. The range of valid ports is " + e.Range
	}
	return fmt.Sprintf("the provided IP (%s) is not in the valid range. The range of valid IPs is %s", e.Value, e.Range)
}

// span is a range seen as the whole numbers [0, size). Numbers below band are
// the lower band.
type span struct {
	size, band uint64
}

// bandOf is how many values the lower band has in a range of size values: one
// step-th, within [16, most]. A range of 16 values or fewer has none.
func bandOf(size, step, most uint64) uint64 {
	const least = 16
	if size <= least {
		return 0
	}
	return min(max(least, size/step), most)
}

// IPRange is one range of Service addresses.
type IPRange struct {
	prefix netip.Prefix
	span
}

// maxSpan bounds the numbers used for one range, so that an IPv6 /64 does not
// overflow. No lab holds that many Services.
const maxSpan = 1 << 62

// NewIPRange makes a range of the addresses in prefix. The first address is
// never given out, nor is the last of an IPv4 range. It fails when nothing is
// left.
func NewIPRange(prefix netip.Prefix) (IPRange, error) {
	if !prefix.IsValid() {
		return IPRange{}, fmt.Errorf("service address range %q is not a valid CIDR", prefix)
	}
	prefix = prefix.Masked()
	total := uint64(maxSpan)
	if bits := prefix.Addr().BitLen() - prefix.Bits(); bits < 62 {
		total = 1 << bits
	}
	lost := uint64(1)
	if prefix.Addr().Is4() {
		lost = 2
	}
	if total <= lost {
		return IPRange{}, fmt.Errorf("service address range %s holds no usable address; use a wider one", prefix)
	}
	r := IPRange{prefix: prefix}
	r.size = total - lost
	r.band = min(bandOf(total, 16, 256), r.size)
	return r, nil
}

// Prefix is the range as a CIDR.
func (r IPRange) Prefix() netip.Prefix { return r.prefix }

// Is4 tells whether the range holds IPv4 addresses.
func (r IPRange) Is4() bool { return r.prefix.Addr().Is4() }

// index is the number of an address: 0 is the one after the range's base.
func (r IPRange) index(a netip.Addr) (uint64, bool) {
	a = a.Unmap()
	if !r.prefix.Contains(a) {
		return 0, false
	}
	n := new(big.Int).Sub(number(a), number(r.prefix.Addr()))
	if !n.IsUint64() || n.Uint64() == 0 || n.Uint64() > r.size {
		return 0, false
	}
	return n.Uint64() - 1, true
}

// at is the address with number i.
func (r IPRange) at(i uint64) netip.Addr {
	base := r.prefix.Addr()
	if base.Is4() {
		b := base.As4()
		binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(i+1))
		return netip.AddrFrom4(b)
	}
	b := base.As16()
	// A range's host part never exceeds 62 bits here, so the low half suffices.
	binary.BigEndian.PutUint64(b[8:], binary.BigEndian.Uint64(b[8:])+i+1)
	return netip.AddrFrom16(b)
}

func number(a netip.Addr) *big.Int { return new(big.Int).SetBytes(a.AsSlice()) }

// PortRange is the range of node ports.
type PortRange struct {
	first int32
	span
}

// NewPortRange makes a range of the ports first to last, both included.
func NewPortRange(first, last int32) (PortRange, error) {
	if first < 1 || last > 65535 || first > last {
		return PortRange{}, fmt.Errorf("node port range %d-%d is not within 1-65535 or is empty", first, last)
	}
	r := PortRange{first: first}
	r.size = uint64(last-first) + 1
	r.band = bandOf(r.size, 32, 128)
	return r, nil
}

// String is the range as "30000-32767".
func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.first, r.first+int32(r.size)-1) }

func (r PortRange) index(port int32) (uint64, bool) {
	if port < r.first || uint64(port-r.first) >= r.size {
		return 0, false
	}
	return uint64(port - r.first), true
}

func (r PortRange) at(i uint64) int32 { return r.first + int32(i) }
