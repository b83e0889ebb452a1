// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	bolt "go.etcd.io/bbolt"
	"k8s.io/utils/clock"
)

// Names of the buckets; README.md says what is in them. They are made by the
// first write, so that opening a new file costs one sync and not three.
var (
	bucketMeta    = []byte("meta")
	bucketObjects = []byte("objects")
	bucketLog     = []byte("log")
	bucketExpiry  = []byte("expiry")
	bucketTallies = []byte("tallies")

	keyState = []byte("state")
)

func allBuckets() [][]byte {
	return [][]byte{bucketMeta, bucketObjects, bucketLog, bucketExpiry, bucketTallies}
}

// firstRevision is the revision of an empty DB. It is not 0, because 0 means
// "any revision" in the API; etcd begins at 1 too.
const firstRevision = 1

// Options of a DB. The zero value is what a lab uses.
type Options struct {
	// NoFsync answers writes without waiting for the disk. A killed process
	// still loses nothing; a power cut or a kernel crash may damage the file.
	NoFsync bool
	// LockTimeout is how long Open waits for another process to let go of the
	// file. Default 500 ms.
	LockTimeout time.Duration
	// LogEvents is how many changes the event log keeps, on disk. Watches and
	// exact lists can go back that far; older ones get 410 Expired. A change is
	// kept by count, not by age. Default 10,000.
	LogEvents int
	// LogBytes is the same bound in bytes; the tighter one counts. Default 16 MiB.
	LogBytes int64
	// ProgressInterval is the time after a write within which watches that
	// asked for progress notifications are told the new revision, whatever
	// was written. Default 5 s, as kube-apiserver sets for etcd.
	ProgressInterval time.Duration
	// Clock is the source of time for expiry and progress. Default the real one.
	Clock clock.Clock
	// Log gets what no caller can be told. Default none.
	Log *slog.Logger

	// ringEvents and ringBytes bound the part of the event log in memory.
	ringEvents, ringBytes int
}

func (o *Options) setDefaults() {
	if o.LockTimeout <= 0 {
		o.LockTimeout = 500 * time.Millisecond
	}
	if o.LogEvents <= 0 {
		o.LogEvents = 10_000
	}
	if o.LogBytes <= 0 {
		o.LogBytes = 16 << 20
	}
	if o.ProgressInterval <= 0 {
		o.ProgressInterval = 5 * time.Second
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.ringEvents <= 0 {
		o.ringEvents = 2048
	}
	if o.ringBytes <= 0 {
		o.ringBytes = 4 << 20
	}
}

// DB is one file with the objects of all kinds and one revision counter. It is
// safe for concurrent use. NewStore gives the storage.Interface of one resource.
type DB struct {
	path string
	opts Options

	ctx    context.Context // ends when Close begins
	cancel context.CancelFunc
	wg     sync.WaitGroup // writer, timekeeper, watchers
	close  func() error   // the body of Close, once

	// life guards the handle: readers hold it shared for a transaction, the
	// writer takes it alone to open the file anew after a failed commit.
	life   sync.RWMutex
	bolt   *bolt.DB // nil after Close, and while the file cannot be opened
	broken error    // why the next write has to open the file anew first

	// journal is nil without fsync, and where there is no room for one: then bbolt
	// syncs each commit by itself. The writer's.
	journal *journal

	queue     queue
	writing   sync.Mutex    // held by the writer during a commit and what it may have to mend
	commits   atomic.Uint64 // bbolt transactions that changed something
	afterSync func(error) error

	// What readers and watchers see. Only the writer changes it, holding mu;
	// so the writer itself reads it without.
	mu         sync.RWMutex
	state      state
	tallies    map[string]tally
	ring       ring
	watchers   map[*watcher]struct{}
	closed     bool
	nextExpiry int64     // Unix milliseconds of the first object to end, 0 = none
	progressAt time.Time // when progress is due, zero = not at all
	alarm      chan struct{}
}

// Open opens the file at path, or makes it. The error is a *FileError when the
// file is the reason: ErrCorrupt, ErrLocked, ErrNoSpace, ErrReadOnly, ErrFormat.
func Open(path string, opts Options) (*DB, error) {
	opts.setDefaults()
	db := &DB{
		path:     path,
		opts:     opts,
		watchers: map[*watcher]struct{}{},
		alarm:    make(chan struct{}, 1),
		ring:     ring{maxEvents: opts.ringEvents, maxBytes: opts.ringBytes},
	}
	db.queue.init()
	var err error
	if db.state, db.tallies, db.nextExpiry, err = db.open(); err != nil {
		return nil, err
	}
	db.ctx, db.cancel = context.WithCancel(context.Background())
	db.close = sync.OnceValue(db.shutDown)
	announceProgressSupport(db.ctx)
	db.wg.Add(2)
	go db.writer()
	go db.timekeeper()
	return db, nil
}

// open opens the file, brings it up to date with its journal, and reads what is kept
// in memory. Readers see the file when all of that is done. When it fails, nothing is
// open.
func (db *DB) open() (st state, tallies map[string]tally, expiry int64, err error) {
	b, roomy, err := openFile(db.path, db.opts)
	if err != nil {
		return st, nil, 0, err
	}
	view := func(fn func(tx *bolt.Tx) error) error {
		_, err := guard(func() error { return b.View(fn) })
		return err
	}
	j, err := db.startJournal(b, roomy)
	if err == nil {
		st, tallies, expiry, err = db.load(view)
	}
	if err == nil && j != nil {
		var done bool
		if done, err = db.redo(j, b, st, tallies); err == nil && done {
			st, tallies, expiry, err = db.load(view)
		}
	}
	if err == nil && j != nil && (db.opts.NoFsync || !roomy) {
		err = j.retire(b, db.opts.NoFsync)
		j = nil
	}
	if err != nil {
		if j != nil {
			err = errors.Join(err, j.close()) // before the file, which waits for the pin
		}
		_, closed := guard(b.Close)
		return st, nil, 0, errors.Join(db.readError(err), closed)
	}
	db.life.Lock()
	db.bolt, db.journal = b, j
	db.life.Unlock()
	return st, tallies, expiry, nil
}

// shutFile closes the file and its journal as they are. Readers wait, and find nothing.
func (db *DB) shutFile() error {
	db.life.Lock()
	defer db.life.Unlock()
	var errs []error
	if db.journal != nil {
		errs = append(errs, db.journal.close())
		db.journal = nil
	}
	if db.bolt != nil {
		_, err := guard(db.bolt.Close)
		errs = append(errs, err)
		db.bolt = nil
	}
	return errors.Join(errs...)
}

// Close ends all watches, lets the writes that are waiting finish, and closes
// the file. It returns when everything that belongs to the DB has ended. Calls
// that come later get ErrClosed.
func (db *DB) Close() error { return db.close() }

func (db *DB) shutDown() error {
	db.mu.Lock()
	db.closed = true
	db.mu.Unlock()
	db.queue.shut()
	db.cancel()
	db.wg.Wait()
	db.life.Lock()
	defer db.life.Unlock()
	db.broken = ErrClosed
	if db.bolt == nil {
		return nil
	}
	var errs []error
	if j := db.journal; j != nil {
		// Failing that, the next one to open the file has more to do.
		if j.next != 0 {
			errs = append(errs, j.finish(db.bolt))
		}
		errs = append(errs, j.close())
		db.journal = nil
	}
	errs = append(errs, db.bolt.Close())
	db.bolt = nil
	return fileError(db.path, errors.Join(errs...))
}

// Path is the file.
func (db *DB) Path() string { return db.path }

// Revision is the newest revision, of whatever kind.
func (db *DB) Revision() uint64 {
	db.mu.RLock()
	defer db.mu.RUnlock()
	return db.state.rev
}

// NewestRevision is the newest revision of anything under the resource prefix
// of a Store (Config.Prefix), deletions included; 0 when nothing was ever there.
// It survives a restart.
func (db *DB) NewestRevision(prefix string) uint64 {
	db.mu.RLock()
	defer db.mu.RUnlock()
	return db.tallies[cleanPrefix(prefix)].newest
}

// tally is what is known about a resource prefix.
func (db *DB) tally(prefix string) tally {
	db.mu.RLock()
	defer db.mu.RUnlock()
	return db.tallies[prefix]
}

// compactRevision is the revision before the first one in the event log.
func (db *DB) compactRevision() uint64 {
	db.mu.RLock()
	defer db.mu.RUnlock()
	return db.state.compacted
}

// Compact forgets the event log up to and including rev. Lists at older
// revisions and watches from them then get 410 Expired. The log is also
// bounded by itself (Options.LogEvents), so nobody needs to call this.
func (db *DB) Compact(ctx context.Context, rev uint64) error {
	return db.submit(ctx, &op{kind: opCompact, compactTo: rev})
}

// cleanPrefix gives a resource prefix its one form: slashes at both ends.
func cleanPrefix(prefix string) string {
	return "/" + strings.Trim(prefix, "/") + "/"
}

// load reads what is kept in memory.
func (db *DB) load(view viewFunc) (st state, tallies map[string]tally, expiry int64, err error) {
	err = view(func(tx *bolt.Tx) error {
		st, tallies, expiry = state{rev: firstRevision}, map[string]tally{}, 0
		// The first write makes all buckets. One that is missing later was not
		// empty, it has lost its name.
		if k, _ := tx.Cursor().First(); k == nil {
			return nil
		}
		for _, name := range allBuckets() {
			if tx.Bucket(name) == nil {
				return fmt.Errorf("bucket %q is missing: %w", name, errRecord)
			}
		}
		var err error
		if st, err = stateOf(tx); err != nil {
			return fmt.Errorf("state: %w", err)
		}
		err = tx.Bucket(bucketTallies).ForEach(func(k, v []byte) error {
			t, err := decodeTally(k, v)
			if err != nil {
				return fmt.Errorf("tally of %q: %w", k, err)
			}
			tallies[string(k)] = t
			return nil
		})
		if err != nil {
			return err
		}
		expiry, err = firstExpiry(tx)
		return err
	})
	return st, tallies, expiry, err
}

// firstExpiry is the time in the first key of the expiry bucket, or 0.
func firstExpiry(tx *bolt.Tx) (int64, error) {
	b := tx.Bucket(bucketExpiry)
	if b == nil {
		return 0, nil
	}
	k, _ := b.Cursor().First()
	if k == nil {
		return 0, nil
	}
	at, _, err := splitExpiryKey(k)
	return at, err
}

// view runs fn in a read transaction. What fn gets from tx dies with it. fn may
// run twice, so it sets its results, it does not add to them.
//
// A damaged page makes bbolt panic or touch memory that is not there; both
// come back as ErrCorrupt. The same happens to a reader that meets the writer
// between a failed remap and opening the file anew, so the first time the
// reader waits for the writer to be done and tries again.
func (db *DB) view(fn func(tx *bolt.Tx) error) error {
	panicked, err := db.tryView(fn)
	if panicked {
		db.writing.Lock()
		db.writing.Unlock() //nolint:staticcheck // only the wait counts
		_, err = db.tryView(fn)
	}
	return err
}

// viewFunc is view or viewOnce.
type viewFunc func(fn func(tx *bolt.Tx) error) error

// viewOnce is view for the writer, which must not wait for itself.
func (db *DB) viewOnce(fn func(tx *bolt.Tx) error) error {
	_, err := db.tryView(fn)
	return err
}

func (db *DB) tryView(fn func(tx *bolt.Tx) error) (panicked bool, err error) {
	db.life.RLock()
	defer db.life.RUnlock()
	if db.bolt == nil {
		return false, db.broken
	}
	panicked, err = guard(func() error { return db.bolt.View(fn) })
	return panicked, db.readError(err)
}

// readError sorts the error of a transaction.
func (db *DB) readError(err error) error {
	switch {
	case err == nil, errors.Is(err, errCompacted), errors.Is(err, errFuture):
		return err
	case errors.Is(err, errRecord), errors.Is(err, errPanic):
		return corrupt(db.path, "%w", err)
	case errors.Is(err, ErrFormat):
		return &FileError{Kind: ErrFormat, Path: db.path, Err: err}
	default:
		return fileError(db.path, err)
	}
}

// errPanic wraps what bbolt panicked with.
var errPanic = errors.New("bbolt panicked")

// guard runs fn and turns a panic, or a fault in the mapped file, into an error.
func guard(fn func() error) (panicked bool, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			panicked, err = true, fmt.Errorf("%w: %v", errPanic, p)
		}
	}()
	return false, fn()
}
