// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"fmt"
	"slices"

	bolt "go.etcd.io/bbolt"
)

// item is one stored object of a page.
type item struct {
	key   string
	rev   uint64
	value []byte
}

// page is a part of the objects in a scope, as of one revision.
type page struct {
	items []item
	rev   uint64
	more  bool  // there are objects behind the last item
	left  int64 // objects from the start of the page to the end of the scope; only when counted
}

// snapshot reads the objects in scope whose key is at least from, in the order
// of their keys, at most limit of them (0 = all), as they were at revision at
// (0 = now). With count it also counts those behind the page.
//
// The state at an older revision is the state now with the changes since taken
// back: of every key that changed, the first change after that revision
// says what was there.
//
// Everything is copied out of the transaction before it is decoded: decoding
// takes long, and while a transaction is open its pages cannot be reused.
func (db *DB) snapshot(sc scope, from string, limit int64, at uint64, count bool) (page, error) {
	var p page
	err := db.view(func(tx *bolt.Tx) error {
		st, err := stateOf(tx)
		if err != nil {
			return err
		}
		p = page{rev: st.rev}
		if at > st.rev {
			return errFuture
		}
		var before map[string]change
		if at != 0 && at < st.rev {
			if at < st.compacted {
				return errCompacted
			}
			p.rev = at
			if before, err = changedSince(tx, at, sc, from); err != nil {
				return err
			}
		}
		return walkObjects(tx, sc, from, before, func(key, raw []byte, old *change) (bool, error) {
			if limit > 0 && int64(len(p.items)) == limit {
				p.more = true
				p.left++
				return count, nil
			}
			it := item{key: string(key)}
			if old != nil {
				it.rev, it.value = old.prevRev, bytes.Clone(old.prev)
			} else {
				rec, err := decodeRecord(key, raw)
				if err != nil {
					return false, fmt.Errorf("object %q: %w", key, err)
				}
				it.rev, it.value = rec.rev, bytes.Clone(rec.value)
			}
			p.items = append(p.items, it)
			p.left++
			return true, nil
		})
	})
	return p, err
}

// changedSince collects, for every key in scope that changed after revision at,
// its first change after it.
func changedSince(tx *bolt.Tx, at uint64, sc scope, from string) (map[string]change, error) {
	before := map[string]change{}
	err := walkLog(tx, at, func(_ uint64, c change) (bool, error) {
		if sc.has(c.key) && c.key >= from {
			if _, known := before[c.key]; !known {
				before[c.key] = c
			}
		}
		return true, nil
	})
	return before, err
}

// walkObjects calls fn for the objects in scope from key from on, in order, until
// it returns false. A key in before is taken from there: old is then the change
// that overwrote what is asked for, raw is not to be used.
func walkObjects(tx *bolt.Tx, sc scope, from string, before map[string]change, fn func(key, raw []byte, old *change) (bool, error)) error {
	from = max(from, sc.key)
	// gone: keys to take from before, in order, those that are no longer there too.
	gone := make([]string, 0, len(before))
	for k := range before {
		gone = append(gone, k)
	}
	slices.Sort(gone)

	var k, v []byte
	next := func() (_, _ []byte) { return nil, nil }
	if b := tx.Bucket(bucketObjects); b != nil {
		cur := b.Cursor()
		k, v = cur.Seek([]byte(from))
		next = cur.Next
	}
	for {
		live := k != nil && sc.hasBytes(k)
		if !live && len(gone) == 0 {
			return nil
		}
		var more bool
		var err error
		if len(gone) > 0 && (!live || gone[0] <= string(k)) {
			c := before[gone[0]]
			same := live && gone[0] == string(k)
			key := []byte(gone[0])
			gone = gone[1:]
			more = true
			if c.prevRev != 0 { // else it did not exist then
				more, err = fn(key, nil, &c)
			}
			if same {
				k, v = next()
			}
		} else {
			more, err = fn(k, v, nil)
			k, v = next()
		}
		if err != nil || !more {
			return err
		}
	}
}

// get reads one object; nil means that it is not there. rev is the
// revision of the DB at that moment.
func (db *DB) get(key string) (it *record, rev uint64, err error) {
	err = db.view(func(tx *bolt.Tx) error {
		it = nil
		st, err := stateOf(tx)
		if err != nil {
			return err
		}
		rev = st.rev
		rec, found, err := currentOf(tx, []byte(key))
		if err != nil || !found {
			return err
		}
		it = &record{rev: rec.rev, expire: rec.expire, value: bytes.Clone(rec.value)}
		return nil
	})
	return it, rev, err
}
