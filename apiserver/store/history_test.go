// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand"
	"path/filepath"
	"slices"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
)

// model is the history of a DB, kept in the simplest way: all of it.
type model struct {
	now    map[string]string
	states map[uint64]map[string]string // key → value, at each revision
	events []string
}

func (m *model) changed(rev uint64, desc string) {
	m.states[rev] = maps.Clone(m.now)
	m.events = append(m.events, desc)
}

// scribble makes random writes, in db and in the model.
func (m *model) scribble(t *testing.T, db *DB, r *rand.Rand, n int) {
	t.Helper()
	for range n {
		key := fmt.Sprintf("/things/%c/%d", 'a'+r.Intn(3), r.Intn(8))
		rec, _, err := db.get(key)
		if err != nil {
			t.Fatal(err)
		}
		o := &op{key: key, prefix: "/things/"}
		if rec != nil {
			o.expect = rec.rev
		}
		if rec != nil && r.Intn(3) == 0 {
			o.kind = opDelete
		} else {
			o.value = fmt.Appendf(nil, "value %d %0*d", r.Int(), 1+r.Intn(200), 0)
		}
		if err := db.submit(context.Background(), o); err != nil || o.conflict {
			t.Fatal(err, o.conflict)
		}
		if o.kind == opDelete {
			delete(m.now, key)
		} else {
			m.now[key] = string(o.value)
		}
		m.changed(o.rev, describeEvent(&event{rev: o.rev, key: key, deleted: o.kind == opDelete, value: o.value}))
	}
}

func describeEvent(e *event) string {
	return fmt.Sprintf("%d %s deleted=%v value=%q", e.rev, e.key, e.deleted, e.value)
}

// check compares every revision that db remembers with the model.
func (m *model) check(t *testing.T, db *DB) {
	t.Helper()
	first := max(db.compactRevision(), firstRevision)
	for rev := first; rev <= db.Revision(); rev++ {
		for _, sc := range []scope{{"/things/", true}, {"/things/b/", true}, {"/things/a/3", false}} {
			for _, size := range []int64{0, 3} {
				got := map[string]string{}
				var order []string
				for from := ""; ; {
					p, err := db.snapshot(sc, from, size, rev, true)
					if err != nil {
						t.Fatalf("snapshot at %d: %v", rev, err)
					}
					if p.rev != rev {
						t.Fatalf("snapshot at %d says it is of %d", rev, p.rev)
					}
					for _, it := range p.items {
						got[it.key] = string(it.value)
						order = append(order, it.key)
					}
					if p.more != (p.left > int64(len(p.items))) {
						t.Fatalf("snapshot at %d: %d items, %d left, more=%v", rev, len(p.items), p.left, p.more)
					}
					if !p.more {
						break
					}
					from = p.items[len(p.items)-1].key + "\x00"
				}
				wanted := map[string]string{}
				for k, v := range m.states[rev] {
					if sc.has(k) {
						wanted[k] = v
					}
				}
				if !maps.Equal(got, wanted) || !slices.IsSorted(order) || len(order) != len(got) {
					t.Fatalf("%v at %d in pages of %d:\n got %v\nwant %v", sc, rev, size, order, slices.Sorted(maps.Keys(wanted)))
				}
			}
		}
	}
	// Events, from disk and in pieces.
	var got []string
	for pos := first; pos < db.Revision(); {
		events, next, err := db.eventsFromDisk(db.view, pos, everything, 7)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			got = append(got, describeEvent(e))
		}
		pos = next
	}
	if wanted := m.events[first-firstRevision:]; !slices.Equal(got, wanted) {
		t.Fatalf("events after %d:\n got %q\nwant %q", first, got, wanted)
	}
}

// Every revision in the event log can be listed as it was, and its events told,
// also by the next process, and after the log was cut off.
func TestHistoryAgainstAModel(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	r := rand.New(rand.NewSource(1))
	m := &model{now: map[string]string{}, states: map[uint64]map[string]string{firstRevision: {}}}
	opts := Options{NoFsync: true, LogEvents: 150}
	for range 3 {
		db, err := Open(path, opts)
		if err != nil {
			t.Fatal(err)
		}
		m.scribble(t, db, r, 80)
		m.check(t, db)
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
	db := openAt(t, path, opts)
	m.check(t, db)
	if c := db.compactRevision(); c != db.Revision()-150 {
		t.Errorf("the log is cut off at %d of %d, want 150 before", c, db.Revision())
	}
	if err := db.Compact(t.Context(), db.Revision()-20); err != nil {
		t.Fatal(err)
	}
	m.check(t, db)
	if err := db.Compact(t.Context(), db.Revision()+1); !errors.Is(err, errFuture) {
		t.Errorf("compacting into the future: %v", err)
	}
	if err := db.Compact(t.Context(), 3); err != nil {
		t.Errorf("compacting what is compacted: %v", err)
	}
	if _, err := db.snapshot(everything, "", 0, db.compactRevision()-1, false); !errors.Is(err, errCompacted) {
		t.Errorf("before the log: %v", err)
	}
	if _, err := db.snapshot(everything, "", 0, db.Revision()+1, false); !errors.Is(err, errFuture) {
		t.Errorf("after the log: %v", err)
	}
}

func TestLogIsBoundedByBytes(t *testing.T) {
	db := openDB(t, Options{NoFsync: true, LogBytes: 4096})
	s := pods(db)
	mustCreate(t, s, "a")
	for i := range 100 {
		mustRelabel(t, s, "a", fmt.Sprint(i))
	}
	if db.state.logBytes > 4096 {
		t.Errorf("%d bytes", db.state.logBytes)
	}
	if n := db.Revision() - db.compactRevision(); n == 0 || n > 40 {
		t.Errorf("%d events are kept", n)
	}
}

func TestOpenAgainKeepsRevisionsAndEvents(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	db, err := Open(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	s := pods(db)
	if db.Revision() != firstRevision || db.NewestRevision("/pods") != 0 {
		t.Errorf("an empty DB is at %d, pods at %d", db.Revision(), db.NewestRevision("/pods"))
	}
	mustCreate(t, s, "a")       // 2
	mustCreate(t, s, "b")       // 3
	mustRelabel(t, s, "a", "x") // 4
	mustDelete(t, s, "b")       // 5
	bump(t, db)                 // 6
	mustCreate(t, s, "c")       // 7
	mustDelete(t, s, "c")       // 8
	bump(t, db)                 // 9
	w := mustWatch(t, s, storage.ListOptions{ResourceVersion: "7"})
	want(t, w, "DELETED c@8")
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	want(t, w, "closed")

	db = openAt(t, path, Options{})
	s = pods(db)
	if got := db.Revision(); got != 9 {
		t.Errorf("revision %d", got)
	}
	for _, prefix := range []string{"/pods", "pods", "/pods/"} {
		if got := db.NewestRevision(prefix); got != 8 {
			t.Errorf("newest revision of %q is %d, want 8, the deletion", prefix, got)
		}
	}
	// A client that was away during the restart goes on where it was.
	w = mustWatch(t, s, storage.ListOptions{ResourceVersion: "3"})
	want(t, w, "MODIFIED a@4")
	want(t, w, "DELETED b@5")
	want(t, w, "ADDED c@7")
	want(t, w, "DELETED c@8")
	mustCreate(t, s, "d")
	want(t, w, "ADDED d@10")
	for rv, names := range map[string]string{"1": "[]", "3": "[a b]", "5": "[a]", "7": "[a c]", "": "[a d]"} {
		if got, err := list(s, rv); err != nil || fmt.Sprint(got) != names {
			t.Errorf("at %q: %v, %v, want %s", rv, got, err, names)
		}
	}
}

// A list in pages stays at its revision while others write, and says so when
// it cannot any more, with a token to go on with.
func TestPagesAtOneRevision(t *testing.T) {
	db := openDB(t, Options{NoFsync: true})
	s := pods(db)
	for _, name := range []string{"a", "b", "c", "d"} {
		mustCreate(t, s, name)
	}
	read := func(token string) (*example.PodList, error) {
		l := &example.PodList{}
		return l, s.GetList(t.Context(), "/pods/", storage.ListOptions{Recursive: true, Predicate: storage.SelectionPredicate{
			Label: labels.Everything(), Field: fields.Everything(), Limit: 2, Continue: token,
		}}, l)
	}
	first, err := read("")
	if err != nil || len(first.Items) != 2 || first.RemainingItemCount == nil || *first.RemainingItemCount != 2 {
		t.Fatalf("%v, %+v", err, first)
	}
	mustDelete(t, s, "c")
	mustCreate(t, s, "bb")
	second, err := read(first.Continue)
	if err != nil || len(second.Items) != 2 || second.Items[0].Name != "c" || second.ResourceVersion != first.ResourceVersion {
		t.Fatalf("%v, %+v", err, second)
	}
	if err := db.Compact(t.Context(), db.Revision()); err != nil {
		t.Fatal(err)
	}
	_, err = read(first.Continue)
	var status *apierrors.StatusError
	if !apierrors.IsResourceExpired(err) || !errors.As(err, &status) || status.ErrStatus.Continue == "" {
		t.Fatalf("after the compaction: %v", err)
	}
	rest, err := read(status.ErrStatus.Continue)
	if err != nil || len(rest.Items) != 2 || rest.Items[0].Name != "bb" || rest.Items[1].Name != "d" {
		t.Fatalf("with the token from the error: %v, %+v", err, rest)
	}
}
