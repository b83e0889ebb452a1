// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
)

const (
	// resultBuffer is how many decoded events wait for the receiver.
	resultBuffer = 100
	// watchBatch is how many events are taken from the log at a time.
	watchBatch = 128
)

// watchExpired is the API's text for a watch from a revision that is forgotten.
const watchExpired = "The resourceVersion for the provided watch is too old."

// watcher is one watch: a place in the event log that moves on. It holds no
// queue, so a slow receiver costs nothing but its own delay, and writers never
// wait for it; when the log is cut off behind its place, the watch ends with
// 410 Expired and the client lists again.
type watcher struct {
	store  *Store
	scope  scope
	opts   storage.ListOptions
	since  uint64 // resource version that was asked for
	all    bool   // the predicate lets everything through
	result chan watch.Event
	ctx    context.Context
	cancel context.CancelFunc
	more   chan struct{} // size 1: there is something to do

	// The place, guarded by db.mu. behind: events in scope may follow pos. A
	// watch that is not behind is at the newest revision whatever pos says, so
	// one to which nothing happens can never be overtaken by the end of the log.
	pos    uint64
	behind bool

	progress atomic.Bool   // a progress notification is due
	told     atomic.Uint64 // newest revision that the receiver was told
}

// Watch implements storage.Interface.
func (s *Store) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	key, err := s.prepareKey(key, opts.Recursive)
	if err != nil {
		return nil, err
	}
	since, err := s.versioner.ParseResourceVersion(opts.ResourceVersion)
	if err != nil {
		return nil, err
	}
	w := &watcher{
		store:  s,
		scope:  scope{key, opts.Recursive},
		opts:   opts,
		all:    opts.Predicate.Empty(),
		since:  since,
		pos:    since,
		behind: true,
		result: make(chan watch.Event, resultBuffer),
		more:   make(chan struct{}, 1),
	}
	initial, bookmark := w.wantsInitial(since)
	w.ctx, w.cancel = context.WithCancel(ctx)
	db := s.db
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.closed {
		w.cancel()
		return nil, ErrClosed
	}
	if since == 0 && !initial {
		w.pos = db.state.rev // from now on
	}
	db.watchers[w] = struct{}{}
	if opts.ProgressNotify && w.pos < db.state.rev && db.progressAt.IsZero() {
		db.progressAt = db.opts.Clock.Now().Add(db.opts.ProgressInterval)
		db.ringAlarm()
	}
	db.wg.Add(1)
	go w.run(initial, bookmark)
	// Registered is as ready as a watch gets; flow control can let go.
	utilflowcontrol.WatchInitialized(ctx)
	return w, nil
}

// wantsInitial says whether the watch begins with what is there, and whether a
// bookmark marks the end of that (KEP-3157).
func (w *watcher) wantsInitial(since uint64) (initial, bookmark bool) {
	send := w.opts.SendInitialEvents
	if !utilfeature.DefaultFeatureGate.Enabled(features.WatchList) {
		return since == 0, false
	}
	if send == nil {
		return since == 0, false
	}
	return *send, *send && w.opts.Predicate.AllowWatchBookmarks
}

// Stop implements watch.Interface.
func (w *watcher) Stop() { w.cancel() }

// ResultChan implements watch.Interface. It is closed when the watch has ended.
func (w *watcher) ResultChan() <-chan watch.Event { return w.result }

// wake makes the watch look at the log. It never blocks.
func (w *watcher) wake() {
	select {
	case w.more <- struct{}{}:
	default:
	}
}

// passed notes an event that was just published; the caller holds db.mu.
func (w *watcher) passed(e *event) {
	if e.rev <= w.pos || !w.scope.has(e.key) {
		return
	}
	if !w.behind {
		w.behind, w.pos = true, e.rev-1
	}
	w.wake()
}

// next takes the next events and moves the place behind them. pos is the place
// then; behind says that there may be more.
func (w *watcher) next() (events []*event, pos uint64, behind bool, err error) {
	db := w.store.db
	db.mu.Lock()
	defer db.mu.Unlock()
	if !w.behind || w.pos >= db.state.rev {
		w.pos, w.behind = max(w.pos, db.state.rev), false
		return nil, w.pos, false, nil
	}
	if w.pos < db.state.compacted {
		return nil, w.pos, true, errCompacted
	}
	if all, ok := db.ring.after(max(w.pos, firstRevision)); ok {
		events, w.pos = pick(all, w.pos, w.scope, watchBatch)
	} else {
		from := w.pos
		db.mu.Unlock()
		events, pos, err = db.eventsFromDisk(db.view, from, w.scope, watchBatch)
		db.mu.Lock()
		if err != nil {
			return nil, from, true, err
		}
		w.pos = pos
	}
	w.behind = w.pos < db.state.rev
	return events, w.pos, w.behind, nil
}

// moveTo sets the place.
func (w *watcher) moveTo(pos uint64) {
	db := w.store.db
	db.mu.Lock()
	defer db.mu.Unlock()
	w.pos, w.behind = pos, true
}

// wantProgress makes a watch that asked for it report that it has come to rev,
// unless it has said so already.
func (w *watcher) wantProgress(rev uint64) {
	if w.opts.ProgressNotify && w.told.Load() < rev {
		w.progress.Store(true)
		w.wake()
	}
}

// run is the goroutine of the watch.
func (w *watcher) run(initial, bookmark bool) {
	db := w.store.db
	defer db.wg.Done()
	defer close(w.result)
	defer func() {
		db.mu.Lock()
		delete(db.watchers, w)
		db.mu.Unlock()
		w.cancel()
	}()
	stop := context.AfterFunc(db.ctx, w.cancel)
	defer stop()
	if err := w.follow(initial, bookmark); err != nil && w.ctx.Err() == nil {
		w.send(errorEvent(err))
	}
}

// follow delivers events until the watch ends; the error is for the receiver.
func (w *watcher) follow(initial, bookmark bool) error {
	if initial {
		if err := w.sendInitial(bookmark); err != nil {
			return err
		}
	}
	for w.ctx.Err() == nil {
		// Taken before the log is read: whoever asks later is answered later.
		progress := w.progress.Swap(false)
		events, pos, behind, err := w.next()
		if errors.Is(err, errCompacted) {
			return apierrors.NewResourceExpired(watchExpired)
		}
		if err != nil {
			return err
		}
		for _, e := range events {
			if err := w.deliver(e); err != nil {
				return err
			}
		}
		switch {
		case progress && behind:
			w.progress.Store(true)
		case progress:
			if err := w.sendBookmark(pos, false); err != nil {
				return err
			}
		}
		if behind {
			continue
		}
		select {
		case <-w.more:
		case <-w.ctx.Done():
		}
	}
	return nil
}

// sendInitial delivers all that is there as ADDED events, then the bookmark if
// one is wanted, and sets the place of the watch to the revision of that.
func (w *watcher) sendInitial(bookmark bool) error {
	p, err := w.store.db.snapshot(w.scope, "", 0, 0, false)
	if err != nil {
		return err
	}
	if w.since > p.rev {
		retry := int(wait.Jitter(time.Second, 3).Seconds())
		return storage.NewTooLargeResourceVersionError(w.since, p.rev, retry)
	}
	w.moveTo(p.rev)
	for i := range p.items {
		it := &p.items[i]
		obj, err := w.store.decodeNew(it.key, it.value, it.rev)
		it.value = nil // a long list takes long; let go of what is done
		if err != nil {
			return err
		}
		if w.matches(obj) && !w.send(watch.Event{Type: watch.Added, Object: obj}) {
			return nil
		}
	}
	if bookmark {
		return w.sendBookmark(p.rev, true)
	}
	return nil
}

// sendBookmark reports that everything up to pos is delivered.
func (w *watcher) sendBookmark(pos uint64, initialEnd bool) error {
	obj := w.store.newFunc()
	if err := w.store.versioner.UpdateObject(obj, pos); err != nil {
		return fmt.Errorf("setting the resource version of a bookmark: %w", err)
	}
	if initialEnd {
		if err := storage.AnnotateInitialEventsEndBookmark(obj); err != nil {
			return fmt.Errorf("marking the end of the initial events: %w", err)
		}
	}
	w.told.Store(pos)
	w.send(watch.Event{Type: watch.Bookmark, Object: obj})
	return nil
}

// deliver sends what the event is to this watch, if it is anything.
func (w *watcher) deliver(e *event) error {
	kind, obj, err := w.see(e)
	if err != nil || kind == "" {
		return err
	}
	if w.opts.RecordTimestamps {
		obj = &timed{Object: obj, at: e.at}
	}
	w.told.Store(e.rev)
	w.send(watch.Event{Type: kind, Object: obj})
	return nil
}

// see decodes an event and says what it is when only objects that match are
// visible; the kind is empty when nothing is to be seen. Objects carry the
// revision of the event, deleted ones too.
func (w *watcher) see(e *event) (watch.EventType, runtime.Object, error) {
	var cur, old runtime.Object
	var err error
	if !e.deleted {
		if cur, err = w.store.decodeNew(e.key, e.value, e.rev); err != nil {
			return "", nil, err
		}
	}
	if e.prevRev != 0 && (e.deleted || !w.all) {
		if old, err = w.store.decodeNew(e.key, e.prev, e.rev); err != nil {
			if e.deleted && isMalformed(err) {
				err = deletedMalformed(err)
			}
			return "", nil, err
		}
	}
	now := cur != nil && w.matches(cur)
	before := !e.created() && (old == nil || w.matches(old))
	switch {
	case now && before:
		return watch.Modified, cur, nil
	case now:
		return watch.Added, cur, nil
	case before:
		return watch.Deleted, old, nil
	}
	return "", nil, nil
}

func (w *watcher) matches(obj runtime.Object) bool {
	if w.all {
		return true
	}
	ok, err := w.opts.Predicate.Matches(obj)
	return err == nil && ok
}

// send hands an event over; false when the watch has ended meanwhile.
func (w *watcher) send(e watch.Event) bool {
	select {
	case w.result <- e:
		return true
	case <-w.ctx.Done():
		return false
	}
}

// errorEvent is the last event of a watch that failed.
func errorEvent(err error) watch.Event {
	var known apierrors.APIStatus
	if !errors.As(err, &known) {
		known = apierrors.NewInternalError(err)
	}
	status := known.Status()
	return watch.Event{Type: watch.Error, Object: &status}
}

// timed carries the time of an event to the watch cache, which takes it off
// again (storage.ListOptions.RecordTimestamps).
type timed struct {
	runtime.Object
	at time.Time
}

var _ storage.WatchEventWithRecordTime = (*timed)(nil)

// RecordTime implements storage.WatchEventWithRecordTime.
func (t *timed) RecordTime() time.Time { return t.at }

// Unwrap implements storage.WatchEventWithRecordTime.
func (t *timed) Unwrap() runtime.Object { return t.Object }

// DeepCopyObject implements runtime.Object.
func (t *timed) DeepCopyObject() runtime.Object {
	return &timed{Object: t.Object.DeepCopyObject(), at: t.at}
}

// GetObjectMeta implements metav1.ObjectMetaAccessor, so that the reflector can
// read the resource version of what is inside.
func (t *timed) GetObjectMeta() metav1.Object {
	m, err := meta.Accessor(t.Object)
	if err != nil {
		return nil
	}
	return m
}
