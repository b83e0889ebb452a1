// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
)

// The encodings of what is in the buckets; README.md has the table. All of
// them end in bytes that run to the end of the value, all begin with a
// checksum over key and value, because bbolt has none for its data pages.

// formatVersion is the first byte of the state record.
const formatVersion = 1

// errRecord is a value that is not what its bucket holds.
var errRecord = errors.New("record is damaged")

// checksumLen is the length of the checksum in front of each value.
const checksumLen = 4

func checksum(key, payload []byte) uint32 {
	table := castagnoli() // a lookup of a ready-made table
	return crc32.Update(crc32.Checksum(key, table), table, payload)
}

// seal writes the checksum of key and buf[checksumLen:] into the first bytes.
func seal(key, buf []byte) []byte {
	binary.LittleEndian.PutUint32(buf, checksum(key, buf[checksumLen:]))
	return buf
}

// unseal returns what follows a correct checksum.
func unseal(key, buf []byte) ([]byte, error) {
	if len(buf) < checksumLen || binary.LittleEndian.Uint32(buf) != checksum(key, buf[checksumLen:]) {
		return nil, errRecord
	}
	return buf[checksumLen:], nil
}

// uvarint cuts one number off the front of buf.
func uvarint(buf []byte) (uint64, []byte, error) {
	v, n := binary.Uvarint(buf)
	if n <= 0 {
		return 0, nil, errRecord
	}
	return v, buf[n:], nil
}

// revKey is a revision as a key: big-endian, so that the order of the keys is
// the order of the revisions.
func revKey(rev uint64) []byte {
	return binary.BigEndian.AppendUint64(nil, rev)
}

// record is a stored object: the value of its key in bucketObjects.
type record struct {
	rev    uint64 // revision of its last change
	expire int64  // Unix milliseconds at which it ends, 0 = never
	value  []byte // encoded object
}

// encode returns the bytes to store and, as a part of them, the value.
func (r record) encode(key []byte) (buf, value []byte) {
	buf = make([]byte, checksumLen, checksumLen+2*binary.MaxVarintLen64+len(r.value))
	buf = binary.AppendUvarint(buf, r.rev)
	buf = binary.AppendUvarint(buf, uint64(r.expire))
	head := len(buf)
	buf = append(buf, r.value...)
	return seal(key, buf), buf[head:len(buf):len(buf)]
}

// decodeRecord reads a stored object. The value is a part of buf, not a copy.
func decodeRecord(key, buf []byte) (record, error) {
	var r record
	buf, err := unseal(key, buf)
	if err != nil {
		return r, err
	}
	if r.rev, buf, err = uvarint(buf); err != nil {
		return r, err
	}
	expire, buf, err := uvarint(buf)
	if err != nil || r.rev == 0 || int64(expire) < 0 {
		return r, errRecord
	}
	r.expire, r.value = int64(expire), buf
	return r, nil
}

// change is one entry of the event log: the value of its revision in
// bucketLog. It holds what was before; what came after is in the next change
// of the same key, or in bucketObjects. So each object version is written to
// disk twice in its life (as the object, then as somebody's past), not three
// times.
type change struct {
	key     string
	deleted bool
	prevRev uint64 // revision of prev, 0 = there was nothing
	prev    []byte
}

const changeDeleted = 1

// encode returns the bytes to store under rev.
func (c change) encode(rev []byte) []byte {
	buf := make([]byte, checksumLen+1, checksumLen+1+2*binary.MaxVarintLen64+len(c.key)+len(c.prev))
	if c.deleted {
		buf[checksumLen] = changeDeleted
	}
	buf = binary.AppendUvarint(buf, c.prevRev)
	buf = binary.AppendUvarint(buf, uint64(len(c.key)))
	buf = append(buf, c.key...)
	buf = append(buf, c.prev...)
	return seal(rev, buf)
}

// decodeChange reads an entry of the event log. prev is a part of buf.
func decodeChange(rev, buf []byte) (change, error) {
	var c change
	buf, err := unseal(rev, buf)
	if err != nil {
		return c, err
	}
	if len(buf) == 0 || buf[0]&^changeDeleted != 0 {
		return c, errRecord
	}
	c.deleted, buf = buf[0] == changeDeleted, buf[1:]
	if c.prevRev, buf, err = uvarint(buf); err != nil {
		return c, err
	}
	n, buf, err := uvarint(buf)
	if err != nil || n > uint64(len(buf)) {
		return c, errRecord
	}
	c.key, c.prev = string(buf[:n]), buf[n:]
	if c.prevRev == 0 && (len(c.prev) > 0 || c.deleted) {
		return c, errRecord
	}
	return c, nil
}

// state is the one record in bucketMeta that says how far the DB is.
type state struct {
	rev       uint64 // newest revision
	compacted uint64 // the event log begins after this revision
	logBytes  uint64 // size of the event log, keys included
}

func (s state) encode(key []byte) []byte {
	buf := make([]byte, checksumLen, checksumLen+1+3*binary.MaxVarintLen64)
	buf = append(buf, formatVersion)
	buf = binary.AppendUvarint(buf, s.rev)
	buf = binary.AppendUvarint(buf, s.compacted)
	buf = binary.AppendUvarint(buf, s.logBytes)
	return seal(key, buf)
}

// decodeState reads the state; ErrFormat when the version is another.
func decodeState(key, buf []byte) (state, error) {
	var s state
	buf, err := unseal(key, buf)
	if err != nil {
		return s, err
	}
	if len(buf) == 0 {
		return s, errRecord
	}
	if buf[0] != formatVersion {
		return s, ErrFormat
	}
	if s.rev, buf, err = uvarint(buf[1:]); err != nil {
		return s, err
	}
	if s.compacted, buf, err = uvarint(buf); err != nil {
		return s, err
	}
	if s.logBytes, buf, err = uvarint(buf); err != nil {
		return s, err
	}
	if len(buf) > 0 || s.rev == 0 || s.compacted > s.rev {
		return s, errRecord
	}
	return s, nil
}

// tally is what is known about all objects under one resource prefix: the
// value of the prefix in bucketTallies.
type tally struct {
	newest uint64 // newest revision of anything under the prefix, deletions included
	count  uint64 // objects
	bytes  uint64 // sum of the lengths of their encoded values
}

func (t tally) encode(key []byte) []byte {
	buf := make([]byte, checksumLen, checksumLen+3*binary.MaxVarintLen64)
	buf = binary.AppendUvarint(buf, t.newest)
	buf = binary.AppendUvarint(buf, t.count)
	buf = binary.AppendUvarint(buf, t.bytes)
	return seal(key, buf)
}

func decodeTally(key, buf []byte) (tally, error) {
	var t tally
	buf, err := unseal(key, buf)
	if err != nil {
		return t, err
	}
	if t.newest, buf, err = uvarint(buf); err != nil {
		return t, err
	}
	if t.count, buf, err = uvarint(buf); err != nil {
		return t, err
	}
	if t.bytes, buf, err = uvarint(buf); err != nil {
		return t, err
	}
	if len(buf) > 0 {
		return t, errRecord
	}
	return t, nil
}

// expiryKey is a key of bucketExpiry: when, then who.
func expiryKey(expire int64, key []byte) []byte {
	buf := make([]byte, 0, 8+len(key))
	return append(binary.BigEndian.AppendUint64(buf, uint64(expire)), key...)
}

// splitExpiryKey is its inverse.
func splitExpiryKey(buf []byte) (expire int64, key []byte, err error) {
	if len(buf) < 8 {
		return 0, nil, errRecord
	}
	return int64(binary.BigEndian.Uint64(buf)), buf[8:], nil
}
