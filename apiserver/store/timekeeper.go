// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"time"

	bolt "go.etcd.io/bbolt"
)

const (
	// expireBatch is how many objects end in one go.
	expireBatch = 256
	// expireRetry is the pause after a failure to delete what has ended.
	expireRetry = time.Second
)

// ringAlarm makes the timekeeper look at the clock again. It never blocks.
func (db *DB) ringAlarm() {
	select {
	case db.alarm <- struct{}{}:
	default:
	}
}

// timekeeper deletes objects when their time is up and sends progress
// notifications. It sleeps until the next of both is due, for ever when there is none.
func (db *DB) timekeeper() {
	defer db.wg.Done()
	var retry time.Time
	for {
		db.mu.RLock()
		due := db.progressAt
		if db.nextExpiry != 0 {
			at := time.UnixMilli(db.nextExpiry)
			if at.Before(retry) {
				at = retry
			}
			if due.IsZero() || at.Before(due) {
				due = at
			}
		}
		db.mu.RUnlock()
		if !db.sleepUntil(due) {
			return
		}
		now := db.opts.Clock.Now()
		db.sendProgress(now)
		if now.Before(retry) {
			continue
		}
		retry = time.Time{}
		if err := db.expire(now); err != nil && db.ctx.Err() == nil {
			db.opts.Log.Warn("objects whose time is up cannot be deleted", "path", db.path, "err", err)
			retry = now.Add(expireRetry)
		}
	}
}

// sleepUntil waits for due (zero = for ever) or the alarm. It is false when the
// DB is closing.
func (db *DB) sleepUntil(due time.Time) bool {
	var timeout <-chan time.Time
	if !due.IsZero() {
		left := due.Sub(db.opts.Clock.Now())
		if left <= 0 {
			return db.ctx.Err() == nil
		}
		t := db.opts.Clock.NewTimer(left)
		defer t.Stop()
		timeout = t.C()
	}
	select {
	case <-db.ctx.Done():
		return false
	case <-db.alarm:
	case <-timeout:
	}
	return true
}

// sendProgress tells the watches that asked for it how far the DB is.
func (db *DB) sendProgress(now time.Time) {
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.progressAt.IsZero() || now.Before(db.progressAt) {
		return
	}
	db.progressAt = time.Time{}
	for w := range db.watchers {
		w.wantProgress(db.state.rev)
	}
}

// expire deletes the objects that end by now.
func (db *DB) expire(now time.Time) error {
	dueBy := now.UnixMilli()
	for {
		db.mu.RLock()
		next := db.nextExpiry
		db.mu.RUnlock()
		if next == 0 || next > dueBy {
			return nil
		}
		var keys []string
		err := db.view(func(tx *bolt.Tx) error {
			keys = nil
			b := tx.Bucket(bucketExpiry)
			if b == nil {
				return nil
			}
			cur := b.Cursor()
			for k, _ := cur.First(); k != nil && len(keys) < expireBatch; k, _ = cur.Next() {
				at, key, err := splitExpiryKey(k)
				if err != nil {
					return err
				}
				if at > dueBy {
					break
				}
				keys = append(keys, string(key))
			}
			return nil
		})
		if err != nil {
			return err
		}
		ops := make([]*op, len(keys))
		for i, k := range keys {
			ops[i] = &op{kind: opExpire, key: k, prefix: db.prefixOf(k), dueBy: dueBy, done: make(chan struct{})}
		}
		if len(ops) == 0 {
			return nil
		}
		if err := db.queue.put(ops...); err != nil {
			return err
		}
		ended := 0
		for _, o := range ops {
			<-o.done // the writer answers everything it has been given
			switch {
			case o.err != nil:
				err = o.err
			case !o.conflict:
				ended++
			}
		}
		if err != nil {
			return err
		}
		if ended == 0 { // all changed in between, or the index is wrong: no busy loop
			return fmt.Errorf("none of %d objects that are due could be deleted", len(ops))
		}
	}
}

// prefixOf finds the resource that key belongs to among those ever written.
func (db *DB) prefixOf(key string) string {
	db.mu.RLock()
	defer db.mu.RUnlock()
	for prefix := range db.tallies {
		if len(key) > len(prefix) && key[:len(prefix)] == prefix {
			return prefix
		}
	}
	return ""
}
