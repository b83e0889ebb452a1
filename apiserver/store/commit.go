// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"errors"
	"fmt"
	"maps"

	bolt "go.etcd.io/bbolt"
)

// writer is the only goroutine that writes. It takes all ops that wait, commits
// them in one transaction, tells the watchers, and then answers. While it waits
// for the disk the next ops gather: the slower the disk, the larger the batches.
func (db *DB) writer() {
	defer db.wg.Done()
	for {
		batch := db.queue.take()
		if batch == nil {
			return
		}
		err := db.commit(batch)
		if errors.Is(err, ErrNoSpace) && len(batch) > 1 {
			// What does not fit may be one op; the others, a delete maybe, do
			// not fail with it.
			for _, o := range batch {
				if err := db.commit([]*op{o}); err != nil {
					o.err = err
				}
			}
		} else if err != nil {
			for _, o := range batch {
				o.err = err
			}
		}
		for _, o := range batch {
			close(o.done)
		}
	}
}

// commit does all of batch in one transaction, or nothing of it. The answers to
// single ops (conflict, rev) count only when it returns nil.
func (db *DB) commit(batch []*op) error {
	db.writing.Lock()
	defer db.writing.Unlock()
	if err := db.mend(); err != nil {
		return err
	}
	if err := db.beginJournal(); err != nil {
		db.life.Lock()
		db.broken = db.readError(err)
		db.life.Unlock()
		return db.readError(err)
	}
	t := &transaction{db: db, state: db.state, tallies: map[string]tally{}}
	panicked, err := guard(func() error { return t.run(batch) })
	if err == nil && t.dirty {
		err = db.makeDurable(batch, t.size)
	}
	if !t.dirty && !panicked {
		// Nothing reached the file: it was rolled back by us, or never begun.
		return db.readError(err)
	}
	if db.afterSync != nil {
		err = db.afterSync(err)
	}
	if err == nil {
		if db.commits.Add(1)%releaseEvery == 0 {
			db.release(t.size)
		}
		db.publish(t.events, t.state, t.tallies, t.expiry)
		return nil
	}
	// bbolt promises nothing about what it holds in memory after a failed
	// commit, and whether the meta page went out is anybody's guess. The
	// file knows.
	err = db.readError(err)
	rev := db.state.rev
	db.life.Lock()
	db.broken = err
	if t.stuck {
		db.bolt = nil // Close would wait for the transaction for ever
	}
	db.life.Unlock()
	if again := db.mend(); again != nil {
		return errors.Join(err, again)
	}
	if t.state.rev > rev && db.state.rev == t.state.rev {
		return nil // it did go out, and mend has confirmed and published it
	}
	return err
}

// mend opens the file anew when the last commit failed, and checks it as Open
// does. When the file turns out to be ahead of what was published, it
// makes one more commit to be sure that this is durable, and publishes it.
func (db *DB) mend() error {
	db.life.Lock()
	if db.broken == nil {
		db.life.Unlock()
		return nil
	}
	db.life.Unlock()
	if err := db.shutFile(); err != nil {
		db.opts.Log.Debug("closing a file whose commit failed", "path", db.path, "err", err)
	}
	st, tallies, expiry, err := db.open()
	if err == nil && st.rev < db.state.rev {
		err = corrupt(db.path, "it is at revision %d, but revision %d was reached before", st.rev, db.state.rev)
	}
	var events []*event
	if err == nil && st.rev > db.state.rev {
		_, err = guard(func() error {
			return db.bolt.Update(func(tx *bolt.Tx) error { return putState(tx, st) })
		})
		if err == nil && db.journal != nil {
			err = db.journal.checkpoint(db.bolt)
		}
		if err == nil {
			events, _, err = db.eventsFromDisk(db.viewOnce, db.state.rev, everything, int(st.rev-db.state.rev))
		}
	}
	err = db.readError(err)
	db.life.Lock()
	db.broken = err
	db.life.Unlock()
	if err != nil {
		return err
	}
	db.opts.Log.Info("store file was opened anew after a failed write", "path", db.path, "revision", st.rev)
	db.publish(events, st, tallies, expiry)
	return nil
}

// publish makes a commit visible and wakes the watchers that it concerns.
func (db *DB) publish(events []*event, st state, tallies map[string]tally, expiry int64) {
	db.mu.Lock()
	defer db.mu.Unlock()
	for _, e := range events {
		db.ring.push(e)
	}
	db.ring.dropThrough(st.compacted)
	db.state = st
	if db.tallies == nil {
		db.tallies = map[string]tally{}
	}
	maps.Copy(db.tallies, tallies)
	earlier := expiry != 0 && (db.nextExpiry == 0 || expiry < db.nextExpiry)
	db.nextExpiry = expiry
	progress := false
	for w := range db.watchers {
		progress = progress || w.opts.ProgressNotify
		for _, e := range events {
			w.passed(e)
		}
	}
	if progress && db.progressAt.IsZero() && len(events) > 0 {
		db.progressAt = db.opts.Clock.Now().Add(db.opts.ProgressInterval)
		earlier = true
	}
	if earlier {
		db.ringAlarm()
	}
}

// transaction is one batch on its way into the file.
type transaction struct {
	db      *DB
	state   state
	tallies map[string]tally // those that changed
	events  []*event
	expiry  int64
	dirty   bool  // a commit was tried
	size    int64 // of the file, as far as it is used
	stuck   bool  // the transaction could not be ended

	tx                    *bolt.Tx
	objects, log, expires *bolt.Bucket
}

func (t *transaction) run(batch []*op) error {
	t.db.life.RLock()
	b := t.db.bolt
	t.db.life.RUnlock()
	tx, err := b.Begin(true)
	if err != nil {
		return err
	}
	t.tx = tx
	defer func() {
		if p := recover(); p != nil {
			t.dirty = true // open the file anew, whatever it was
			t.stuck, _ = guard(tx.Rollback)
			panic(p)
		}
	}()
	changed, err := t.apply(batch)
	if err != nil || !changed {
		return errors.Join(err, tx.Rollback())
	}
	t.dirty = true
	t.size = tx.Size()
	return tx.Commit()
}

// apply does the ops one after the other, each on what those before it left.
func (t *transaction) apply(batch []*op) (changed bool, err error) {
	buckets := []struct {
		name []byte
		to   **bolt.Bucket
	}{{bucketObjects, &t.objects}, {bucketLog, &t.log}, {bucketExpiry, &t.expires}}
	for _, b := range buckets {
		if *b.to, err = t.tx.CreateBucketIfNotExists(b.name); err != nil {
			return false, err
		}
	}
	t.log.FillPercent = 1 // it only grows at the end
	compacted := t.state.compacted
	for _, o := range batch {
		o.rev, o.conflict, o.current, o.err = 0, false, nil, nil
		if err := t.do(o); err != nil {
			return false, err
		}
	}
	if len(t.events) == 0 && t.state.compacted == compacted {
		return false, nil
	}
	if err := t.trim(); err != nil {
		return false, err
	}
	if err := putState(t.tx, t.state); err != nil {
		return false, err
	}
	if t.expiry, err = firstExpiry(t.tx); err != nil {
		return false, err
	}
	b, err := t.tx.CreateBucketIfNotExists(bucketTallies)
	if err != nil {
		return false, err
	}
	for prefix, tl := range t.tallies {
		if err := b.Put([]byte(prefix), tl.encode([]byte(prefix))); err != nil {
			return false, err
		}
	}
	return true, nil
}

func putState(tx *bolt.Tx, st state) error {
	b, err := tx.CreateBucketIfNotExists(bucketMeta)
	if err != nil {
		return err
	}
	return b.Put(keyState, st.encode(keyState))
}

func (t *transaction) do(o *op) error {
	if o.kind == opCompact {
		if o.compactTo > t.state.rev {
			o.err = fmt.Errorf("compacting to revision %d: the newest is %d: %w", o.compactTo, t.state.rev, errFuture)
			return nil
		}
		return t.cut(o.compactTo)
	}
	key := []byte(o.key)
	var old record
	raw := t.objects.Get(key)
	if raw != nil {
		var err error
		if old, err = decodeRecord(key, raw); err != nil {
			o.err = t.db.readError(fmt.Errorf("object %q: %w", o.key, err))
			return nil // the others are not to blame
		}
		old.value = bytes.Clone(old.value) // raw dies with the next change
	}
	ok := old.rev == o.expect
	switch {
	case o.again:
		ok = true
	case o.kind == opExpire:
		ok = old.expire != 0 && old.expire <= o.dueBy
	}
	if !ok {
		o.conflict = true
		if raw != nil {
			o.current = &old
		}
		return nil
	}
	t.state.rev++
	o.rev = t.state.rev
	e := &event{rev: o.rev, key: o.key, deleted: o.kind != opPut, prevRev: old.rev, at: t.db.opts.Clock.Now()}
	if raw != nil {
		e.prev = old.value
	}
	next := record{rev: o.rev, value: o.value, expire: o.expire}
	if o.keepExpire {
		next.expire = old.expire
	}
	if e.deleted {
		next = record{}
		if err := t.objects.Delete(key); err != nil {
			return err
		}
	} else {
		var buf []byte
		buf, e.value = next.encode(key)
		if err := t.objects.Put(key, buf); err != nil {
			return err
		}
	}
	if err := t.reschedule(key, old.expire, next.expire); err != nil {
		return err
	}
	rk := revKey(o.rev)
	entry := change{key: o.key, deleted: e.deleted, prevRev: old.rev, prev: e.prev}.encode(rk)
	if err := t.log.Put(rk, entry); err != nil {
		return err
	}
	t.state.logBytes += uint64(len(rk) + len(entry))
	t.events = append(t.events, e)
	t.count(o, raw != nil, old, next)
	return nil
}

// reschedule moves the entry of key in the expiry bucket.
func (t *transaction) reschedule(key []byte, from, to int64) error {
	if from == to {
		return nil
	}
	if from != 0 {
		if err := t.expires.Delete(expiryKey(from, key)); err != nil {
			return err
		}
	}
	if to != 0 {
		return t.expires.Put(expiryKey(to, key), []byte{})
	}
	return nil
}

// count keeps the tally of the resource up to date.
func (t *transaction) count(o *op, existed bool, old, next record) {
	if o.prefix == "" {
		return
	}
	tl, ok := t.tallies[o.prefix]
	if !ok {
		tl = t.db.tallies[o.prefix]
	}
	tl.newest = o.rev
	if existed {
		tl.count--
		tl.bytes -= uint64(len(old.value))
	}
	if o.kind == opPut {
		tl.count++
		tl.bytes += uint64(len(next.value))
	}
	t.tallies[o.prefix] = tl
}

// trim keeps the event log within its bounds. A batch cuts off at most a little
// more than it adds, so no single write pays for many others.
func (t *transaction) trim() error {
	opts := t.db.opts
	for n := 2*len(t.events) + 64; n > 0; n-- {
		within := t.state.rev-t.state.compacted <= uint64(opts.LogEvents) && t.state.logBytes <= uint64(opts.LogBytes)
		if within || t.state.compacted == t.state.rev {
			return nil
		}
		if err := t.cut(t.state.compacted + 1); err != nil {
			return err
		}
	}
	return nil
}

// cut deletes the changes up to rev from the event log.
func (t *transaction) cut(rev uint64) error {
	for t.state.compacted < rev {
		k := revKey(t.state.compacted + 1)
		if v := t.log.Get(k); v != nil {
			t.state.logBytes -= uint64(len(k) + len(v))
			if err := t.log.Delete(k); err != nil {
				return err
			}
		}
		t.state.compacted++
	}
	return nil
}
