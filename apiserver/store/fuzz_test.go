// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"reflect"
	"testing"
)

// What is written can be read, whatever the key and the value.
func FuzzRoundTrip(f *testing.F) {
	f.Add("/pods/ns/a", []byte("value"), uint64(7), int64(0), uint64(6), false)
	f.Add("/pods/ns/a", []byte{}, uint64(1)<<63, int64(1893456000000), uint64(0), false)
	f.Add("", []byte(nil), uint64(2), int64(1), uint64(1), true)
	f.Add("/\x00\xff", bytes.Repeat([]byte{0xff}, 300), ^uint64(0), int64(1)<<62, uint64(3), true)
	f.Fuzz(func(t *testing.T, key string, value []byte, rev uint64, expire int64, prevRev uint64, deleted bool) {
		k := []byte(key)
		if rev != 0 && expire >= 0 {
			in := record{rev: rev, expire: expire, value: value}
			buf, kept := in.encode(k)
			out, err := decodeRecord(k, buf)
			if err != nil || out.rev != in.rev || out.expire != in.expire || !bytes.Equal(out.value, value) || !bytes.Equal(kept, value) {
				t.Fatalf("record %+v: %+v, %q, %v", in, out, kept, err)
			}
			if _, err := decodeRecord(append(k, 'x'), buf); err == nil {
				t.Fatal("a record is taken for that of another key")
			}
		}
		c := change{key: key, deleted: deleted && prevRev != 0, prevRev: prevRev}
		if prevRev != 0 {
			c.prev = value
		}
		rk := revKey(rev)
		got, err := decodeChange(rk, c.encode(rk))
		if err != nil || got.key != c.key || got.deleted != c.deleted || got.prevRev != c.prevRev || !bytes.Equal(got.prev, c.prev) {
			t.Fatalf("change %+v: %+v, %v", c, got, err)
		}
		tl := tally{newest: rev, count: prevRev, bytes: uint64(len(value))}
		if got, err := decodeTally(k, tl.encode(k)); err != nil || got != tl {
			t.Fatalf("tally %+v: %+v, %v", tl, got, err)
		}
		if rev != 0 {
			st := state{rev: rev, compacted: min(rev, prevRev), logBytes: prevRev}
			if got, err := decodeState(keyState, st.encode(keyState)); err != nil || got != st {
				t.Fatalf("state %+v: %+v, %v", st, got, err)
			}
		}
		at, who, err := splitExpiryKey(expiryKey(expire, k))
		if err != nil || at != expire || string(who) != key {
			t.Fatalf("expiry key: %d, %q, %v", at, who, err)
		}
	})
}

// Nothing that may be in a bucket makes the decoders panic, and what they accept
// has one meaning only.
func FuzzDecode(f *testing.F) {
	rec, _ := record{rev: 3, value: []byte("v")}.encode([]byte("k"))
	for _, b := range [][]byte{
		{}, {1}, rec[checksumLen:],
		change{key: "k", prevRev: 2, prev: []byte("p")}.encode([]byte("k"))[checksumLen:],
		state{rev: 9, compacted: 3}.encode([]byte("k"))[checksumLen:],
		tally{newest: 4, count: 2, bytes: 8}.encode([]byte("k"))[checksumLen:],
		bytes.Repeat([]byte{0xff}, 12),
	} {
		f.Add("k", b)
	}
	f.Fuzz(func(t *testing.T, key string, payload []byte) {
		k := []byte(key)
		buf := seal(k, append(make([]byte, checksumLen), payload...))
		if r, err := decodeRecord(k, buf); err == nil {
			enc, _ := r.encode(k)
			if again, err := decodeRecord(k, enc); err != nil || !reflect.DeepEqual(r, again) {
				t.Fatalf("record %+v: %+v, %v", r, again, err)
			}
		}
		if c, err := decodeChange(k, buf); err == nil {
			if again, err := decodeChange(k, c.encode(k)); err != nil || !reflect.DeepEqual(c, again) {
				t.Fatalf("change %+v: %+v, %v", c, again, err)
			}
		}
		if s, err := decodeState(k, buf); err == nil && s.compacted > s.rev {
			t.Fatalf("state %+v", s)
		}
		_, _ = decodeTally(k, buf)
		_, _, _ = splitExpiryKey(payload)
		for i := range buf[:checksumLen] { // and a wrong checksum is noticed
			buf[i] ^= 1
			if _, err := decodeRecord(k, buf); err == nil {
				t.Fatal("a wrong checksum is accepted")
			}
			buf[i] ^= 1
		}
	})
}

// The check of a file ends, without a panic, whatever the file.
func FuzzCheckFile(f *testing.F) {
	data := sample(f, 30)
	f.Add(data)
	f.Add(data[:4096])
	f.Add(data[:len(data)/2])
	f.Add([]byte("not a store"))
	f.Fuzz(func(t *testing.T, data []byte) {
		_, _ = checkFile(data)
	})
}
