// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
)

// event is one change as watchers see it. Events are shared: nobody changes one
// after it was published.
type event struct {
	rev     uint64
	key     string
	deleted bool
	value   []byte // what the key holds from rev on; nil when deleted
	prevRev uint64 // revision before; 0 = the key was not there
	prev    []byte // value before
	at      time.Time
}

func (e *event) created() bool { return !e.deleted && e.prevRev == 0 }

// eventOverhead is what an event costs in memory besides its bytes.
const eventOverhead = 160

func (e *event) size() int { return eventOverhead + len(e.key) + len(e.value) + len(e.prev) }

// scope is what a list or a watch is about: one key, or all below a prefix that
// ends in a slash.
type scope struct {
	key       string
	recursive bool
}

func (s scope) has(key string) bool {
	if s.recursive {
		return strings.HasPrefix(key, s.key)
	}
	return key == s.key
}

// hasBytes is has without an allocation.
func (s scope) hasBytes(key []byte) bool {
	if s.recursive && len(key) > len(s.key) {
		key = key[:len(s.key)]
	}
	return string(key) == s.key
}

// everything is the scope of all keys.
var everything = scope{recursive: true}

// ring is the newest part of the event log in memory: consecutive revisions.
// Every revision has exactly one event.
type ring struct {
	events              []*event
	bytes               int
	maxEvents, maxBytes int
}

func (r *ring) push(e *event) {
	r.events = append(r.events, e)
	r.bytes += e.size()
	for len(r.events) > r.maxEvents || (r.bytes > r.maxBytes && len(r.events) > 1) {
		r.drop()
	}
}

// drop forgets the oldest event.
func (r *ring) drop() {
	r.bytes -= r.events[0].size()
	r.events[0] = nil
	r.events = r.events[1:]
}

// dropThrough forgets all events up to rev.
func (r *ring) dropThrough(rev uint64) {
	for len(r.events) > 0 && r.events[0].rev <= rev {
		r.drop()
	}
}

// after returns the events after revision pos; ok is false when the ring does
// not reach back that far.
func (r *ring) after(pos uint64) (events []*event, ok bool) {
	if len(r.events) == 0 || r.events[0].rev > pos+1 {
		return nil, false
	}
	return r.events[pos+1-r.events[0].rev:], true
}

// pick returns up to limit of the events that are in scope, and the revision up to
// which everything was looked at, which may be beyond the last event returned.
func pick(all []*event, pos uint64, sc scope, limit int) (events []*event, next uint64) {
	for _, e := range all {
		if sc.has(e.key) {
			if len(events) == limit {
				break
			}
			events = append(events, e)
		}
		pos = e.rev
	}
	return events, pos
}

// eventsFromDisk is pick from the file, for one who is further behind than the
// ring reaches. errCompacted: pos is older than the event log.
func (db *DB) eventsFromDisk(view viewFunc, pos uint64, sc scope, limit int) (events []*event, next uint64, err error) {
	err = view(func(tx *bolt.Tx) error {
		events, next = nil, pos
		st, err := stateOf(tx)
		if err != nil {
			return err
		}
		if pos < st.compacted {
			return errCompacted
		}
		now := db.opts.Clock.Now()
		// missing: put events whose value is still to be found, by key. The log
		// holds what was before each change, so the value of an event is in the
		// next change of its key, or in the object itself.
		missing := map[string]*event{}
		full := false
		err = walkLog(tx, pos, func(rev uint64, c change) (bool, error) {
			if !sc.has(c.key) {
				if full {
					return len(missing) > 0, nil
				}
				next = rev
				return true, nil
			}
			if e := missing[c.key]; e != nil {
				if c.prevRev != e.rev {
					return false, fmt.Errorf("change %d of %q follows %d, not %d: %w", rev, c.key, c.prevRev, e.rev, errRecord)
				}
				e.value = bytes.Clone(c.prev)
				delete(missing, c.key)
			}
			if full = full || len(events) == limit; full {
				return len(missing) > 0, nil
			}
			e := &event{rev: rev, key: c.key, deleted: c.deleted, prevRev: c.prevRev, prev: bytes.Clone(c.prev), at: now}
			events, next = append(events, e), rev
			if c.deleted {
				return true, nil
			}
			rec, found, err := currentOf(tx, []byte(c.key))
			if err != nil {
				return false, err
			}
			if found && rec.rev == rev {
				e.value = bytes.Clone(rec.value)
			} else {
				missing[c.key] = e
			}
			return true, nil
		})
		if err == nil && len(missing) > 0 {
			err = fmt.Errorf("%d values after revision %d are lost: %w", len(missing), pos, errRecord)
		}
		return err
	})
	return events, next, err
}

// stateOf reads the state inside of a transaction.
func stateOf(tx *bolt.Tx) (state, error) {
	b := tx.Bucket(bucketMeta)
	if b == nil {
		return state{rev: firstRevision}, nil
	}
	return decodeState(keyState, b.Get(keyState))
}

// currentOf reads the object at key. Its value dies with tx.
func currentOf(tx *bolt.Tx, key []byte) (rec record, found bool, err error) {
	b := tx.Bucket(bucketObjects)
	if b == nil {
		return rec, false, nil
	}
	raw := b.Get(key)
	if raw == nil {
		return rec, false, nil
	}
	if rec, err = decodeRecord(key, raw); err != nil {
		return rec, false, fmt.Errorf("object %q: %w", key, err)
	}
	return rec, true, nil
}

// walkLog calls fn for all changes after pos until it returns false. c.prev dies
// with tx.
func walkLog(tx *bolt.Tx, pos uint64, fn func(rev uint64, c change) (bool, error)) error {
	b := tx.Bucket(bucketLog)
	if b == nil {
		return nil
	}
	cur := b.Cursor()
	want := max(pos, firstRevision) // the first revision is that of the empty DB
	for k, v := cur.Seek(revKey(pos + 1)); k != nil; k, v = cur.Next() {
		want++
		if len(k) != 8 || binary.BigEndian.Uint64(k) != want {
			return fmt.Errorf("event log: %x where revision %d is expected: %w", k, want, errRecord)
		}
		c, err := decodeChange(k, v)
		if err != nil {
			return fmt.Errorf("change %d: %w", want, err)
		}
		if more, err := fn(want, c); err != nil || !more {
			return err
		}
	}
	return nil
}
