// SPDX-License-Identifier: Apache-2.0

package nfnl

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Attributes are appended to a message under construction. Numbers are in network
// byte order, as all of nf_tables has them.

// Bytes appends an attribute.
func Bytes(b []byte, typ uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	return pad(append(b, value...))
}

// String appends an attribute that is a name.
func String(b []byte, typ uint16, value string) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(value)+1))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, value...)
	return pad(append(b, 0))
}

// Uint8 appends an attribute of one byte.
func Uint8(b []byte, typ uint16, value uint8) []byte {
	b = binary.NativeEndian.AppendUint16(b, 5)
	b = binary.NativeEndian.AppendUint16(b, typ)
	return append(b, value, 0, 0, 0)
}

// Uint32 appends an attribute of four bytes.
func Uint32(b []byte, typ uint16, value uint32) []byte {
	b = binary.NativeEndian.AppendUint16(b, 8)
	b = binary.NativeEndian.AppendUint16(b, typ)
	return binary.BigEndian.AppendUint32(b, value)
}

// Uint64 appends an attribute of eight bytes.
func Uint64(b []byte, typ uint16, value uint64) []byte {
	b = binary.NativeEndian.AppendUint16(b, 12)
	b = binary.NativeEndian.AppendUint16(b, typ)
	return binary.BigEndian.AppendUint64(b, value)
}

// Nest opens an attribute that holds attributes; EndNest closes it.
func Nest(b []byte, typ uint16) (out []byte, start int) {
	start = len(b)
	b = append(b, 0, 0)
	return binary.NativeEndian.AppendUint16(b, typ|unix.NLA_F_NESTED), start
}

// EndNest fills in the length of the attribute that begins at start.
func EndNest(b []byte, start int) []byte {
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	return b
}

func pad(b []byte) []byte {
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// Body is the attributes of a received message: what follows its nfgenmsg.
func Body(message []byte) []byte { return message[min(4, len(message)):] }

// Attrs walks attributes. What is malformed ends the walk.
func Attrs(b []byte, fn func(typ uint16, value []byte)) {
	for {
		typ, value, rest, ok := Next(b)
		if !ok {
			return
		}
		fn(typ, value)
		b = rest
	}
}

// Next takes the first attribute off b. It is Attrs for loops that must not
// allocate.
func Next(b []byte) (typ uint16, value, rest []byte, ok bool) {
	if len(b) < 4 {
		return 0, nil, nil, false
	}
	length := int(binary.NativeEndian.Uint16(b))
	if length < 4 || length > len(b) {
		return 0, nil, nil, false
	}
	typ = binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
	return typ, b[4:length], b[min(len(b), (length+3)&^3):], true
}

// U32 reads a number of four bytes; 0 where the value has another size.
func U32(value []byte) uint32 {
	if len(value) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(value)
}

// U64 reads a number of eight bytes; 0 where the value has another size.
func U64(value []byte) uint64 {
	if len(value) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(value)
}

// CString reads a name.
func CString(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}
