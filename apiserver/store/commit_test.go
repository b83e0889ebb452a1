// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"

	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
)

// Writes that come while a commit is under way share the next one, and each
// gets its own answer.
func TestWaitingWritesShareACommit(t *testing.T) {
	db := openDB(t, Options{})
	s := pods(db)
	reached, release := shut(db)
	w := mustWatch(t, s, storage.ListOptions{ResourceVersion: "1"})

	const writers = 64
	var wg sync.WaitGroup
	wg.Go(func() { mustCreate(t, s, "first") })
	<-reached
	var mu sync.Mutex
	revs := map[string]bool{}
	for i := range writers {
		wg.Go(func() {
			p := mustCreate(t, s, fmt.Sprintf("pod-%02d", i))
			mu.Lock()
			defer mu.Unlock()
			revs[p.ResourceVersion] = true
		})
	}
	waitQueued(t, db, writers)
	// In the same batch: one that finds the key taken, by a neighbour or by what
	// is there, and one for a key that is not there.
	var exists, missing error
	wg.Go(func() {
		exists = s.Create(context.Background(), podKey("first"), podNamed("first"), nil, 0)
	})
	wg.Go(func() {
		_, missing = relabel(context.Background(), s, "nobody", "x") // fails at the read, without a write
	})
	waitQueued(t, db, writers+1)
	if got := db.Revision(); got != firstRevision {
		t.Errorf("revision %d is visible before the commit is done", got)
	}
	release()
	wg.Wait()
	if got := db.commits.Load(); got != 2 {
		t.Errorf("%d commits for 1 + %d writes, want 2", got, writers)
	}
	if len(revs) != writers {
		t.Errorf("%d writers got %d revisions", writers, len(revs))
	}
	if !storage.IsExist(exists) {
		t.Errorf("creating an existing pod: %v", exists)
	}
	if !storage.IsNotFound(missing) {
		t.Errorf("updating a missing pod: %v", missing)
	}
	for rev := 2; rev <= writers+2; rev++ {
		e := <-w.ResultChan()
		if got := e.Object.(*example.Pod).ResourceVersion; got != strconv.Itoa(rev) {
			t.Fatalf("event at revision %s, want %d: out of order", got, rev)
		}
	}
}

// Two writes to one key in one batch: the second sees the first.
func TestSameKeyTwiceInABatch(t *testing.T) {
	db := openDB(t, Options{NoFsync: true})
	reached, release := shut(db)
	s := pods(db)
	var wg sync.WaitGroup
	wg.Go(func() { mustCreate(t, s, "first") })
	<-reached
	errs := make([]error, 2)
	for i := range errs {
		wg.Go(func() { errs[i] = s.Create(context.Background(), podKey("a"), podNamed("a"), nil, 0) })
	}
	waitQueued(t, db, 2)
	release()
	wg.Wait()
	if (errs[0] == nil) == (errs[1] == nil) || !storage.IsExist(errors.Join(errs...).(interface{ Unwrap() []error }).Unwrap()[0]) {
		t.Errorf("want one success and one conflict, got %v", errs)
	}
}

// A batch in which nothing is written does not touch the file.
func TestConflictsDoNotCommit(t *testing.T) {
	db := openDB(t, Options{NoFsync: true})
	s := pods(db)
	mustCreate(t, s, "a")
	before, rev := db.commits.Load(), db.Revision()
	for range 3 {
		if err := s.Create(context.Background(), podKey("a"), podNamed("a"), nil, 0); !storage.IsExist(err) {
			t.Fatal(err)
		}
	}
	mustRelabel(t, s, "a", "x")
	same := mustRelabel(t, s, "a", "x")
	if got := db.Revision(); got != rev+1 || same.ResourceVersion != strconv.FormatUint(got, 10) {
		t.Errorf("revision %d and pod at %s, want both %d: an update without a change is not a write", got, same.ResourceVersion, rev+1)
	}
	if got := db.commits.Load(); got != before+1 {
		t.Errorf("%d commits, want 1", got-before)
	}
}

// A caller that gives up while it waits leaves nothing behind.
func TestGivingUpInTheQueue(t *testing.T) {
	db := openDB(t, Options{NoFsync: true})
	reached, release := shut(db)
	s := pods(db)
	var wg sync.WaitGroup
	wg.Go(func() { mustCreate(t, s, "first") })
	<-reached
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.Create(ctx, podKey("late"), podNamed("late"), nil, 0) }()
	waitQueued(t, db, 1)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	release()
	wg.Wait()
	if names, err := list(s, ""); err != nil || fmt.Sprint(names) != "[first]" {
		t.Errorf("%v, %v", names, err)
	}
}

// Close lets those finish who wait, and turns away who comes later.
func TestCloseWithWritesWaiting(t *testing.T) {
	db := openDB(t, Options{NoFsync: true})
	reached, release := shut(db)
	s := pods(db)
	w := mustWatch(t, s, storage.ListOptions{ResourceVersion: "1"})
	var wg sync.WaitGroup
	wg.Go(func() { mustCreate(t, s, "first") })
	<-reached
	wg.Go(func() { mustCreate(t, s, "second") })
	waitQueued(t, db, 1)
	wg.Go(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	<-db.ctx.Done() // Close has begun
	if err := s.Create(context.Background(), podKey("late"), podNamed("late"), nil, 0); !errors.Is(err, ErrClosed) {
		t.Errorf("write after Close: %v", err)
	}
	release()
	wg.Wait()
	for range w.ResultChan() { // events or none, but it ends
	}
	if _, err := list(s, ""); !errors.Is(err, ErrClosed) {
		t.Errorf("list after Close: %v", err)
	}
	if _, err := s.Watch(context.Background(), "/pods/", storage.ListOptions{Recursive: true}); !errors.Is(err, ErrClosed) {
		t.Errorf("watch after Close: %v", err)
	}
	again := pods(openAt(t, db.path, Options{}))
	if names, err := list(again, ""); err != nil || fmt.Sprint(names) != "[first second]" {
		t.Errorf("after opening again: %v, %v", names, err)
	}
}

// A commit that failed at the very end, with the meta page written: the file is
// opened anew, what is in it counts, and nobody hears of anything twice.
func TestFailureAfterTheMetaPage(t *testing.T) {
	db := openDB(t, Options{NoFsync: true})
	s := pods(db)
	mustCreate(t, s, "a")
	w := mustWatch(t, s, storage.ListOptions{ResourceVersion: "2"})
	failed := 0
	db.afterSync = func(err error) error {
		if failed++; failed == 1 && err == nil {
			return errors.New("the disk said no")
		}
		return err
	}
	mustCreate(t, s, "b") // the answer is right: it is in the file
	mustCreate(t, s, "c")
	want(t, w, "ADDED b@3")
	want(t, w, "ADDED c@4")
	if names, err := list(s, ""); err != nil || fmt.Sprint(names) != "[a b c]" {
		t.Errorf("%v, %v", names, err)
	}
	if got := s.db.tally("/pods/"); got.count != 3 || got.newest != 4 {
		t.Errorf("tally %+v", got)
	}
}

// All writes are seen by a watch, each once and in order, whoever writes.
func TestManyWritersOneOrder(t *testing.T) {
	db := openDB(t, Options{NoFsync: true, ringEvents: 16})
	s := pods(db)
	w := mustWatch(t, s, storage.ListOptions{ResourceVersion: "1"})
	const writers, each = 16, 25
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			name := fmt.Sprintf("pod-%d", i)
			mustCreate(t, s, name)
			for n := range each - 2 {
				mustRelabel(t, s, name, strconv.Itoa(n))
			}
			mustDelete(t, s, name)
		})
	}
	for rev := 2; rev < 2+writers*each; rev++ {
		e := <-w.ResultChan()
		p, ok := e.Object.(*example.Pod)
		if !ok || p.ResourceVersion != strconv.Itoa(rev) {
			t.Fatalf("event %v where revision %d is expected", describe(e, true), rev)
		}
	}
	wg.Wait()
	if got := db.Revision(); got != 1+writers*each {
		t.Errorf("revision %d", got)
	}
	if got := db.NewestRevision("/pods"); got != db.Revision() {
		t.Errorf("newest revision %d of %d: deletions count too", got, db.Revision())
	}
	t.Logf("%d writes in %d commits", writers*each, db.commits.Load())
}
