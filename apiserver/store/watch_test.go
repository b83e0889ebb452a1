// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/kplab/kplab/internal/nettest"
)

// A watch that nobody reads holds up nothing. Beyond the ring it reads from
// disk; beyond the event log it ends with 410.
func TestSlowWatch(t *testing.T) {
	db := openDB(t, Options{NoFsync: true, LogEvents: 1000, ringEvents: 8})
	s := pods(db)
	mustCreate(t, s, "a")
	late := mustWatch(t, s, storage.ListOptions{ResourceVersion: "2"})
	for i := range 500 {
		mustRelabel(t, s, "a", fmt.Sprint(i))
	}
	for rev := 3; rev < 503; rev++ {
		want(t, late, fmt.Sprintf("MODIFIED a@%d", rev))
	}
	lost := mustWatch(t, s, storage.ListOptions{ResourceVersion: "2"})
	for i := range 2000 {
		mustRelabel(t, s, "a", fmt.Sprint("again ", i))
	}
	var got string
	for rev := 3; ; rev++ {
		if got = next(t, lost); got != fmt.Sprintf("MODIFIED a@%d", rev) {
			break
		}
	}
	if got != "ERROR Expired" {
		t.Errorf("the watch that was left behind got %q", got)
	}
	want(t, lost, "closed")
}

// A watch to which nothing happens is not left behind by what happens to others.
func TestIdleWatchDoesNotExpire(t *testing.T) {
	db := openDB(t, Options{NoFsync: true, LogEvents: 10, ringEvents: 5})
	s := pods(db)
	mustCreate(t, s, "a")
	idle := mustWatch(t, s, storage.ListOptions{ResourceVersion: "2"})
	nettest.Eventually(t, patience, "the watch has begun", func() error {
		db.mu.RLock()
		defer db.mu.RUnlock()
		for w := range db.watchers {
			if w.behind {
				return fmt.Errorf("it is at %d", w.pos)
			}
		}
		return nil
	})
	for range 100 {
		bump(t, db)
	}
	mustRelabel(t, s, "a", "x")
	want(t, idle, "MODIFIED a@103")
}

func TestWatchTooOld(t *testing.T) {
	db := openDB(t, Options{NoFsync: true})
	s := pods(db)
	mustCreate(t, s, "a")
	mustCreate(t, s, "b")
	if err := db.Compact(t.Context(), 3); err != nil {
		t.Fatal(err)
	}
	w := mustWatch(t, s, storage.ListOptions{ResourceVersion: "2"})
	want(t, w, "ERROR Expired")
	want(t, w, "closed")
	w = mustWatch(t, s, storage.ListOptions{ResourceVersion: "3"})
	mustCreate(t, s, "c")
	want(t, w, "ADDED c@4")
}

// Progress: on request, when the revision is asked for, and some time after
// a write; and nothing at all while nobody writes.
func TestProgress(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	db := openDB(t, Options{NoFsync: true, Clock: clock, ProgressInterval: time.Minute})
	s := pods(db)
	mustCreate(t, s, "a")
	w := mustWatch(t, s, storage.ListOptions{ResourceVersion: "2", ProgressNotify: true})
	deaf := mustWatch(t, s, storage.ListOptions{ResourceVersion: "2"})
	if clock.HasWaiters() {
		t.Error("a timer runs, but there is nothing to report")
	}
	if err := s.RequestWatchProgress(t.Context()); err != nil {
		t.Fatal(err)
	}
	want(t, w, "BOOKMARK @2")
	if err := s.RequestWatchProgress(t.Context()); err != nil { // the answer to a request always comes
		t.Fatal(err)
	}
	want(t, w, "BOOKMARK @2")
	bump(t, db)
	if rev, err := s.GetCurrentResourceVersion(t.Context()); err != nil || rev != 3 {
		t.Fatal(rev, err)
	}
	want(t, w, "BOOKMARK @3")
	bump(t, db)
	bump(t, db)
	nettest.Eventually(t, patience, "the timekeeper waits", func() error {
		if !clock.HasWaiters() {
			return fmt.Errorf("it does not")
		}
		return nil
	})
	clock.Step(time.Minute)
	want(t, w, "BOOKMARK @5")
	mustCreate(t, s, "b")
	want(t, w, "ADDED b@6")
	want(t, deaf, "ADDED b@6")
	nettest.Eventually(t, patience, "the timekeeper waits", func() error {
		if !clock.HasWaiters() {
			return fmt.Errorf("it does not")
		}
		return nil
	})
	clock.Step(time.Minute) // nothing to tell: the event did
	mustCreate(t, s, "c")
	want(t, w, "ADDED c@7")
}

func TestExpiry(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	db := openDB(t, Options{NoFsync: true, Clock: clock, ProgressInterval: time.Hour})
	s := pods(db)
	ctx := t.Context()
	w := mustWatch(t, s, storage.ListOptions{ResourceVersion: "1"})
	if clock.HasWaiters() {
		t.Error("a timer runs, but nothing has an end")
	}
	create := func(name string, ttl uint64) {
		t.Helper()
		if err := s.Create(ctx, podKey(name), podNamed(name), nil, ttl); err != nil {
			t.Fatal(err)
		}
	}
	create("long", 100)
	create("short", 10)
	create("kept", 10)
	create("ever", 0)
	for _, e := range []string{"ADDED long@2", "ADDED short@3", "ADDED kept@4", "ADDED ever@5"} {
		want(t, w, e)
	}
	// An update without a TTL leaves the end where it is, one with a TTL moves it.
	mustRelabel(t, s, "short", "x")
	var left int64
	ttl := uint64(200)
	err := s.GuaranteedUpdate(ctx, podKey("kept"), &example.Pod{}, false, nil,
		func(in apiruntime.Object, meta storage.ResponseMeta) (apiruntime.Object, *uint64, error) {
			left = meta.TTL
			in.(*example.Pod).Labels = map[string]string{"a": "b"}
			return in, &ttl, nil
		}, nil)
	if err != nil || left != 10 {
		t.Errorf("%v; the update was told that %d s are left, want 10", err, left)
	}
	want(t, w, "MODIFIED short@6")
	want(t, w, "MODIFIED kept@7")
	step := func(d time.Duration) {
		t.Helper()
		nettest.Eventually(t, patience, "the timekeeper waits", func() error {
			if !clock.HasWaiters() {
				return fmt.Errorf("it does not")
			}
			return nil
		})
		clock.Step(d)
	}
	step(11 * time.Second)
	want(t, w, "DELETED short@8")
	mustDelete(t, s, "long")
	want(t, w, "DELETED long@9")

	// What ends while nobody runs the DB ends at the next start.
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	clock.Step(200 * time.Second)
	db = openAt(t, db.path, Options{NoFsync: true, Clock: clock})
	s = pods(db)
	w = mustWatch(t, s, storage.ListOptions{ResourceVersion: "9"})
	want(t, w, "DELETED kept@10")
	if names, err := list(s, ""); err != nil || fmt.Sprint(names) != "[ever]" {
		t.Errorf("%v, %v", names, err)
	}
	nettest.Eventually(t, patience, "no timer is left", func() error {
		if clock.HasWaiters() {
			return fmt.Errorf("there is one")
		}
		return nil
	})
}

// Many objects that end at once are deleted in few commits.
func TestExpiryInBulk(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	db := openDB(t, Options{NoFsync: true, Clock: clock})
	s := pods(db)
	const n = 600
	for i := range n {
		name := fmt.Sprintf("pod-%03d", i)
		if err := s.Create(t.Context(), podKey(name), podNamed(name), nil, 5); err != nil {
			t.Fatal(err)
		}
	}
	before := db.commits.Load()
	nettest.Eventually(t, patience, "all are gone", func() error {
		clock.Step(time.Second)
		if c := db.tally("/pods/").count; c != 0 {
			return fmt.Errorf("%d are left", c)
		}
		return nil
	})
	if got := db.commits.Load() - before; got > n/expireBatch+1 {
		t.Errorf("%d commits", got)
	}
}

// After Close nothing runs any more, however the watches stand.
func TestCloseEndsEverything(t *testing.T) {
	ours := func() int {
		buf := make([]byte, 1<<20)
		return strings.Count(string(buf[:runtime.Stack(buf, true)]), "apiserver/store.(*")
	}
	before := ours()
	db, err := Open(t.TempDir()+"/store.db", Options{NoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	s := pods(db)
	for i := range 300 {
		mustCreate(t, s, fmt.Sprintf("pod-%03d", i))
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for i := range 20 {
		opts := storage.ListOptions{Recursive: true, Predicate: storage.Everything, ProgressNotify: true}
		if i%2 == 0 {
			opts.ResourceVersion = "1" // stuck: 300 events, nobody reads
		}
		if _, err := s.Watch(ctx, "/pods/", opts); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Errorf("closing twice: %v", err)
	}
	if got := ours(); got != before {
		t.Errorf("%d goroutine frames of ours after Close, %d before", got, before)
	}
	if n := len(db.watchers); n != 0 {
		t.Errorf("%d watches are left", n)
	}
}
