// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	bolt "go.etcd.io/bbolt"
)

// verify reads everything in a file and notes in r what does not fit together.
// The error is for what cannot be read at all.
func verify(tx *bolt.Tx, r *Report, each func(Object) error) error {
	for err := range tx.Check() {
		r.problem("bbolt: %v", err)
	}
	if k, _ := tx.Cursor().First(); k == nil {
		r.Revision = firstRevision
		return nil
	}
	for _, name := range allBuckets() {
		if tx.Bucket(name) == nil {
			r.problem("bucket %q is missing", name)
		}
	}
	st, err := stateOf(tx)
	if err != nil {
		return fmt.Errorf("the record of the newest revision: %w", err)
	}
	r.Revision, r.After = st.rev, st.compacted
	v := &verifier{tx: tx, report: r, state: st, last: map[string]lastChange{}}
	v.log()
	v.objects(each)
	v.expiry()
	v.tallies()
	return nil
}

// lastChange is the newest change of a key in the event log.
type lastChange struct {
	rev     uint64
	deleted bool
}

// verifier compares the buckets of one file with each other.
type verifier struct {
	tx     *bolt.Tx
	report *Report
	state  state

	last map[string]lastChange
	ends int // objects that have an end
	sums map[string]tally
}

// log follows the event log: consecutive revisions up to the newest, and each
// change of a key follows the one before it.
func (v *verifier) log() {
	size := uint64(0)
	next := max(v.state.compacted, firstRevision) + 1
	v.each(bucketLog, func(k, val []byte) {
		size += uint64(len(k) + len(val))
		if len(k) != 8 {
			v.report.problem("event log: %x is no revision", k)
			return
		}
		rev := binary.BigEndian.Uint64(k)
		if rev != next {
			v.report.problem("event log: revision %d where %d is expected", rev, next)
		}
		next = rev + 1
		c, err := decodeChange(k, val)
		if err != nil {
			v.report.problem("event log: change %d: %v", rev, err)
			return
		}
		if was, known := v.last[c.key]; known && c.prevRev != was.follows() {
			v.report.problem("event log: change %d of %q follows revision %d, not %d", rev, c.key, c.prevRev, was.follows())
		}
		v.last[c.key] = lastChange{rev, c.deleted}
	})
	if next != v.state.rev+1 {
		v.report.problem("event log: it ends at revision %d, the newest is %d", next-1, v.state.rev)
	}
	if size != v.state.logBytes {
		v.report.problem("event log: it has %d bytes, not %d", size, v.state.logBytes)
	}
}

// follows is what the next change of the key has to name as its predecessor.
func (c lastChange) follows() uint64 {
	if c.deleted {
		return 0
	}
	return c.rev
}

// objects reads every object, and counts them for the tallies.
func (v *verifier) objects(each func(Object) error) {
	v.sums = map[string]tally{}
	v.each(bucketTallies, func(k, _ []byte) { v.sums[string(k)] = tally{} })
	v.each(bucketObjects, func(k, val []byte) {
		v.report.Objects++
		key := string(k)
		rec, err := decodeRecord(k, val)
		if err != nil {
			v.report.problem("object %q: %v", k, err)
			delete(v.last, key)
			return
		}
		v.object(key, rec)
		if each == nil {
			return
		}
		if err := each(Object{Key: key, Revision: rec.rev, Value: bytes.Clone(rec.value)}); err != nil {
			v.report.problem("object %q: %v", k, err)
		}
	})
	for _, key := range slices.Sorted(maps.Keys(v.last)) {
		if was := v.last[key]; !was.deleted {
			v.report.problem("object %q is missing: it was written at revision %d", key, was.rev)
		}
	}
}

// object compares one object with the event log and the expiry bucket.
func (v *verifier) object(key string, rec record) {
	if rec.rev > v.state.rev {
		v.report.problem("object %q is of revision %d, the newest is %d", key, rec.rev, v.state.rev)
	}
	was, known := v.last[key]
	switch {
	case known && was.deleted:
		v.report.problem("object %q is there, but was deleted at revision %d", key, was.rev)
	case known && was.rev != rec.rev, !known && rec.rev > max(v.state.compacted, firstRevision):
		v.report.problem("object %q is of revision %d, its last change in the event log of %d", key, rec.rev, was.rev)
	}
	delete(v.last, key)
	if rec.expire != 0 {
		v.ends++
		if b := v.tx.Bucket(bucketExpiry); b != nil && b.Get(expiryKey(rec.expire, []byte(key))) == nil {
			v.report.problem("object %q has an end that is not in the expiry bucket", key)
		}
	}
	for prefix, sum := range v.sums {
		if (scope{prefix, true}).has(key) {
			sum.count++
			sum.bytes += uint64(len(rec.value))
			v.sums[prefix] = sum
		}
	}
}

// expiry counts: every object with an end was found there already.
func (v *verifier) expiry() {
	n := 0
	v.each(bucketExpiry, func(_, _ []byte) { n++ })
	if n != v.ends {
		v.report.problem("%d entries in the expiry bucket, %d objects with an end", n, v.ends)
	}
}

func (v *verifier) tallies() {
	v.each(bucketTallies, func(k, val []byte) {
		t, err := decodeTally(k, val)
		if err != nil {
			v.report.problem("tally of %q: %v", k, err)
			return
		}
		if sum := v.sums[string(k)]; sum.count != t.count || sum.bytes != t.bytes {
			v.report.problem("tally of %q says %d objects of %d bytes, there are %d of %d", k, t.count, t.bytes, sum.count, sum.bytes)
		}
		if t.newest > v.state.rev {
			v.report.problem("tally of %q is at revision %d, the newest is %d", k, t.newest, v.state.rev)
		}
	})
}

// each calls fn for every pair in a bucket. A bucket that is missing has been
// reported.
func (v *verifier) each(bucket []byte, fn func(k, val []byte)) {
	b := v.tx.Bucket(bucket)
	if b == nil {
		return
	}
	cur := b.Cursor()
	for k, val := cur.First(); k != nil; k, val = cur.Next() {
		fn(k, val)
	}
}
