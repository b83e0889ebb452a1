// SPDX-License-Identifier: Apache-2.0

// Package loop is the frame that all controllers share: a queue of keys fed by
// informers, a few workers that make the object behind a key true, retries, and
// the account of what is still owed.
//
// A controller is one struct around a [Loop]. Its New subscribes to informers with
// [Watch]; each handler does no more than [Loop.Add] the keys that the event may
// concern. Its sync function reads the caches, decides, and writes what differs.
// It returns an error to be called again later, and [Loop.After] to be called again
// at a known time.
package loop

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/internal/settle"
)

// Retries start at retryFirst and double up to retryMax. A lab is small, so the
// longest pause is shorter than in a big cluster.
const (
	retryFirst = 5 * time.Millisecond
	retryMax   = 10 * time.Second
)

// Options make a Loop.
type Options[K comparable] struct {
	// Name is the controller's name.
	Name string
	// Workers is how many keys are worked on at the same time; never the same key
	// twice. 0 means 1.
	Workers int
	// Sync makes the thing behind a key true. An error means a retry.
	Sync func(ctx context.Context, key K) error
	// Deps is where the clock and the logger come from.
	Deps Deps
}

// Loop is a queue of keys, its workers, and its witness.
type Loop[K comparable] struct {
	name    string
	workers int
	sync    func(context.Context, K) error
	queue   workqueue.TypedRateLimitingInterface[K]
	clock   clock.WithTicker
	log     *slog.Logger
	witness *settle.Witness
	sources []source

	mu   sync.Mutex
	seq  uint64
	owed map[K]uint64 // keys queued, in hand, or waiting for a retry → when they were last asked for
	// refused are the keys whose last sync the API forbade (a quota is used up, say).
	// They are tried again and not owed: nobody knows when, if ever, it succeeds.
	refused map[K]bool
}

// source is one subscription to an informer.
type source struct {
	resource string
	informer cache.SharedIndexInformer
	synced   cache.DoneChecker
	err      error
}

// New returns a loop that does nothing until Run.
func New[K comparable](o Options[K]) *Loop[K] {
	d := o.Deps.WithDefaults()
	l := &Loop[K]{
		name:    o.Name,
		workers: max(o.Workers, 1),
		sync:    o.Sync,
		clock:   d.Clock,
		log:     d.Log.With("controller", o.Name),
		owed:    map[K]uint64{},
		refused: map[K]bool{},
	}
	l.queue = workqueue.NewTypedRateLimitingQueueWithConfig(
		workqueue.NewTypedItemExponentialFailureRateLimiter[K](retryFirst, retryMax),
		workqueue.TypedRateLimitingQueueConfig[K]{Clock: d.Clock},
	)
	l.witness = settle.NewWitness(o.Name, l.Pending)
	return l
}

// Name returns the controller's name.
func (l *Loop[K]) Name() string { return l.name }

// Witness returns the account of how far the loop has come.
func (l *Loop[K]) Witness() *settle.Witness { return l.witness }

// Log returns the controller's logger.
func (l *Loop[K]) Log() *slog.Logger { return l.log }

// Add asks for a sync of key that begins after this call.
func (l *Loop[K]) Add(key K) {
	l.mu.Lock()
	l.seq++
	l.owed[key] = l.seq
	l.mu.Unlock()
	l.queue.Add(key)
}

// After asks for a sync of key when d has passed. It does not count as pending:
// nothing is owed before that time.
func (l *Loop[K]) After(key K, d time.Duration) { l.queue.AddAfter(key, d) }

// Pending returns how many keys are queued, in hand, or waiting for a retry. What the
// API refused is not among them.
func (l *Loop[K]) Pending() int {
	// The queue counts as well: it holds keys whose time of After has come.
	queued := l.queue.Len()
	l.mu.Lock()
	defer l.mu.Unlock()
	return max(queued, len(l.owed))
}

// RetryRefused asks for a sync of every key that the API refused, since the reason may
// be gone.
func (l *Loop[K]) RetryRefused() {
	l.mu.Lock()
	keys := slices.Collect(maps.Keys(l.refused))
	l.mu.Unlock()
	for _, key := range keys {
		l.Add(key)
	}
}

// judge takes note of whether the API refused what a sync wanted, and returns that.
func (l *Loop[K]) judge(key K, err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !apierrors.IsForbidden(err) {
		delete(l.refused, key)
		return false
	}
	l.refused[key] = true
	return true
}

// begin takes note that key is in hand. The returned mark is for end.
func (l *Loop[K]) begin(key K) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seq++
	l.owed[key] = l.seq
	return l.seq
}

// end takes note that key is done, unless it was asked for again since begin.
func (l *Loop[K]) end(key K, mark uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.owed[key] == mark {
		delete(l.owed, key)
	}
}

// Run waits until the caches that the loop reads hold what the API had, then works
// until ctx ends and the keys in hand are done. It returns nil then, and an error
// only when a subscription failed.
func (l *Loop[K]) Run(ctx context.Context) error {
	defer l.queue.ShutDown()
	for _, s := range l.sources {
		if s.err != nil {
			return s.err
		}
	}
	for _, s := range l.sources {
		select {
		case <-ctx.Done():
			return nil
		case <-s.synced.Done():
			// The first list stands for every revision up to its own, deletions
			// included, whose objects no event will ever name.
			l.witness.Observe(s.resource, s.informer.GetIndexer().LastStoreSyncResourceVersion())
		}
	}
	var workers sync.WaitGroup
	for range l.workers {
		workers.Go(func() {
			for l.next(ctx) {
			}
		})
	}
	<-ctx.Done()
	l.queue.ShutDown()
	workers.Wait()
	return nil
}

// next works on one key; false means that the queue is closed.
func (l *Loop[K]) next(ctx context.Context) bool {
	key, closed := l.queue.Get()
	if closed {
		return false
	}
	mark := l.begin(key)
	err := l.sync(ctx, key)
	refused := l.judge(key, err)
	switch {
	case err == nil:
		l.queue.Forget(key)
	case ctx.Err() != nil:
		// Shutting down: the next process starts from what is stored.
	default:
		level := slog.LevelWarn
		if apierrors.IsConflict(err) || IsStale(err) {
			level = slog.LevelDebug // the cache is a moment behind; ordinary
		}
		l.log.Log(ctx, level, "sync failed; it is tried again", "key", key, "tries", l.queue.NumRequeues(key)+1, "err", err)
		l.queue.AddRateLimited(key)
	}
	l.queue.Done(key)
	if err == nil || refused {
		l.end(key, mark)
	}
	return true
}

// Watch subscribes l to an informer. fn is called for every event: old is nil when
// the object is new to the cache, cur is nil when it has gone (old is then its last
// known state). fn only puts keys into the loop's queue; it must not block.
//
// Call Watch before the informer's factory starts or after, but before Run.
func Watch[T interface {
	comparable
	metav1.Object
}, K comparable](l *Loop[K], resource string, informer cache.SharedIndexInformer, fn func(old, cur T)) {
	var none T
	l.witness.Observe(resource, "0")
	registration, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if cur, ok := obj.(T); ok {
				fn(none, cur)
				l.witness.Observe(resource, cur.GetResourceVersion())
			}
		},
		UpdateFunc: func(before, after any) {
			old, ok := before.(T)
			cur, ok2 := after.(T)
			if ok && ok2 {
				fn(old, cur)
				l.witness.Observe(resource, cur.GetResourceVersion())
			}
		},
		DeleteFunc: func(obj any) {
			lost := false
			if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj, lost = tombstone.Obj, true
			}
			old, ok := obj.(T)
			if !ok {
				return
			}
			fn(old, none)
			l.witness.Observe(resource, old.GetResourceVersion())
			if lost {
				// The deletion itself was missed and a new list showed it: that
				// list's revision stands for the deletion's.
				l.witness.Observe(resource, informer.GetIndexer().LastStoreSyncResourceVersion())
			}
		},
	})
	s := source{resource: resource, informer: informer, err: err}
	if err == nil {
		s.synced = registration.HasSyncedChecker()
	}
	l.sources = append(l.sources, s)
}

// staleError says that a cache has not caught up with this process's own writes.
type staleError struct{ what string }

func (e staleError) Error() string { return "cache is behind: " + e.what }

// Stale returns an error that asks for a quiet retry because a cache has not caught
// up yet.
func Stale(what string) error { return staleError{what} }

// IsStale reports whether err was made by Stale.
func IsStale(err error) bool {
	var stale staleError
	return errors.As(err, &stale)
}

// Key identifies a namespaced object; Namespace is empty for others.
type Key struct{ Namespace, Name string }

// KeyOf returns the key of obj.
func KeyOf(obj metav1.Object) Key { return Key{obj.GetNamespace(), obj.GetName()} }

// String returns "namespace/name", or the name alone.
func (k Key) String() string {
	if k.Namespace == "" {
		return k.Name
	}
	return k.Namespace + "/" + k.Name
}
