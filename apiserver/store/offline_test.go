// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
	"k8s.io/apiserver/pkg/storage"
)

func mustInspect(tb testing.TB, path string) *Report {
	tb.Helper()
	r, err := Inspect(path, nil)
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

// comeAndGo makes n pods of 2 kB and deletes all but the first.
func comeAndGo(t *testing.T, path string, n int) {
	t.Helper()
	db, err := Open(path, Options{NoFsync: true, LogEvents: 100})
	if err != nil {
		t.Fatal(err)
	}
	s := pods(db)
	for i := range n {
		name := fmt.Sprintf("pod-%05d", i)
		if err := s.Create(t.Context(), podKey(name), fatPod(name, 2000), nil, 0); err != nil && (i > 0 || !storage.IsExist(err)) {
			t.Fatal(err)
		}
	}
	for i := 1; i < n; i++ {
		mustDelete(t, s, fmt.Sprintf("pod-%05d", i))
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	checkWhole(t, path)
}

// What is free in the file is used again; Rewrite gives it back.
func TestFreeSpace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	comeAndGo(t, path, 1200)
	first := mustInspect(t, path)
	if first.Used > first.Size/4 {
		t.Errorf("%d of %d bytes are in use with 1 object and 100 events", first.Used, first.Size)
	}
	for range 3 {
		comeAndGo(t, path, 1200)
	}
	before := mustInspect(t, path)
	if before.Size > first.Size+growBy {
		t.Errorf("%d bytes after the first time, %d after the fourth: free pages are not used", first.Size, before.Size)
	}
	was, now, err := Rewrite(path)
	if err != nil {
		t.Fatal(err)
	}
	if now.Size > before.Used+before.Used/2 || now.Size > before.Size/4 {
		t.Errorf("%d bytes, of which %d used, became %d", was.Size, was.Used, now.Size)
	}
	if info, err := os.Stat(path); err != nil || info.Size() != now.Size || info.Mode().Perm() != 0o600 {
		t.Errorf("the file is %v, %v; the report says %d bytes", info, err, now.Size)
	}
	db := openAt(t, path, Options{NoFsync: true, LogEvents: 100})
	if db.Revision() != before.Revision || db.compactRevision() != before.After {
		t.Errorf("revisions %d to %d became %d to %d", before.After, before.Revision, db.compactRevision(), db.Revision())
	}
	w := mustWatch(t, pods(db), storage.ListOptions{ResourceVersion: fmt.Sprint(before.Revision - 1), Predicate: storage.Everything})
	want(t, w, fmt.Sprintf("DELETED pod-01199@%d", before.Revision))
	mustHold(t, pods(db), []string{"pod-00000"})
	mustCreate(t, pods(db), "z")
}

// A file that is not to be rewritten is left as it is.
func TestRewriteRefuses(t *testing.T) {
	dir := smallDisk(t, 6<<20)
	path := filepath.Join(dir, "store.db")
	db, err := Open(path, Options{NoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	names := make([]string, 400)
	for i := range names {
		names[i] = fmt.Sprintf("pod-%03d", i)
		if err := pods(db).Create(t.Context(), podKey(names[i]), fatPod(names[i], 3000), nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	free := fill(t, dir, 100<<10)
	if _, _, err := Rewrite(path); !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), "free some space") {
		t.Errorf("on a full disk: %v", err)
	}
	if _, err := os.Stat(path + CompactSuffix); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the copy is left behind: %v", err)
	}
	checkWhole(t, path)
	free()
	if _, _, err := Rewrite(path); err != nil {
		t.Error(err)
	}
	if err := os.Truncate(path, 8192); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Rewrite(path); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a damaged file: %v", err)
	}
	if _, _, err := Rewrite(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

// Every kind of disagreement in a file whose pages are sound is found.
func TestInspectFindsWhatDoesNotAgree(t *testing.T) {
	data := sample(t, 40)
	key := []byte("/pods/ns/pod-0001")
	rewrite := func(tx *bolt.Tx, change func(*record)) error {
		b := tx.Bucket(bucketObjects)
		rec, err := decodeRecord(key, b.Get(key))
		if err != nil {
			return err
		}
		change(&rec)
		raw, _ := rec.encode(key)
		return b.Put(key, raw)
	}
	restate := func(tx *bolt.Tx, change func(*state)) error {
		st, err := stateOf(tx)
		if err != nil {
			return err
		}
		change(&st)
		return putState(tx, st)
	}
	for _, c := range []struct {
		want string
		harm func(tx *bolt.Tx) error
	}{
		{"is missing: it was written at revision", func(tx *bolt.Tx) error { return tx.Bucket(bucketObjects).Delete(key) }},
		{"record is damaged", func(tx *bolt.Tx) error { return tx.Bucket(bucketObjects).Put(key, []byte("half a record")) }},
		{"its last change in the event log of", func(tx *bolt.Tx) error { return rewrite(tx, func(r *record) { r.rev-- }) }},
		{"the newest is", func(tx *bolt.Tx) error { return rewrite(tx, func(r *record) { r.rev += 1000 }) }},
		{"is not in the expiry bucket", func(tx *bolt.Tx) error { return rewrite(tx, func(r *record) { r.expire++ }) }},
		{"tally of", func(tx *bolt.Tx) error { return rewrite(tx, func(r *record) { r.value = append(r.value, 'x') }) }},
		{"entries in the expiry bucket", func(tx *bolt.Tx) error { return tx.Bucket(bucketExpiry).Put(expiryKey(1, []byte("/x")), []byte{}) }},
		{"event log: revision", func(tx *bolt.Tx) error { return tx.Bucket(bucketLog).Delete(revKey(7)) }},
		{"event log: it ends at", func(tx *bolt.Tx) error { return restate(tx, func(s *state) { s.rev++ }) }},
		{"event log: it has", func(tx *bolt.Tx) error { return restate(tx, func(s *state) { s.logBytes++ }) }},
		{"bucket \"tallies\" is missing", func(tx *bolt.Tx) error { return tx.DeleteBucket(bucketTallies) }},
		{"newest revision", func(tx *bolt.Tx) error { return tx.Bucket(bucketMeta).Delete(keyState) }},
	} {
		path := filepath.Join(t.TempDir(), "store.db")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if r := mustInspect(t, path); len(r.Problems) > 0 || r.Objects == 0 || r.Used == 0 || r.Used > r.Size {
			t.Fatalf("before anything is wrong: %+v", r)
		}
		b, err := bolt.Open(path, 0o600, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(b.Update(c.harm), b.Close()); err != nil {
			t.Fatal(err)
		}
		if r := mustInspect(t, path); !strings.Contains(strings.Join(r.Problems, "\n"), c.want) {
			t.Errorf("want %q, found %q", c.want, r.Problems)
		}
	}
}

func TestInspectObjects(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	if err := os.WriteFile(path, sample(t, 10), 0o600); err != nil {
		t.Fatal(err)
	}
	n := 0
	r, err := Inspect(path, func(o Object) error {
		n++
		if o.Revision == 0 || len(o.Value) == 0 {
			t.Errorf("%+v", o)
		}
		if o.Key == podKey("fat") {
			return errors.New("too fat")
		}
		return nil
	})
	if err != nil || n != r.Objects || len(r.Problems) != 1 || !strings.Contains(r.Problems[0], "too fat") {
		t.Errorf("%d objects, %v, %+v", n, err, r)
	}
}

// Files in which there is nothing, or nothing that can be read.
func TestInspectOddFiles(t *testing.T) {
	dir := t.TempDir()
	for name, data := range map[string][]byte{"empty": nil, "zeros": make([]byte, 4*4096)} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if r := mustInspect(t, path); r.Objects != 0 || r.Revision != firstRevision || len(r.Problems) > 0 {
			t.Errorf("%s: %+v", name, r)
		}
	}
	path := filepath.Join(dir, "garbage")
	if err := os.WriteFile(path, []byte(strings.Repeat("not a store\n", 5000)), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := mustInspect(t, path); len(r.Problems) != 1 || !strings.Contains(r.Problems[0], "no meta page is valid") || r.Size != 60_000 {
		t.Errorf("garbage: %+v", r)
	}
	if _, err := Inspect(filepath.Join(dir, "none"), nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("looking at a missing file made it: %v", err)
	}
}

// A file system that is mounted for reading: also root cannot write there.
func TestReadOnlyDirectory(t *testing.T) {
	dir := smallDisk(t, 4<<20)
	path := filepath.Join(dir, "store.db")
	if err := os.WriteFile(path, sample(t, 10), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{path, filepath.Join(dir, "new.db")} {
		_, err := Open(p, Options{})
		if !errors.Is(err, ErrReadOnly) || !strings.Contains(err.Error(), p) || !strings.Contains(err.Error(), "make the file and its directory writable") {
			t.Errorf("%s: %v", p, err)
		}
	}
	if r := mustInspect(t, path); r.Objects == 0 || len(r.Problems) > 0 {
		t.Errorf("looking needs no writing: %+v", r)
	}
	if _, _, err := Rewrite(path); !errors.Is(err, ErrReadOnly) {
		t.Errorf("rewrite: %v", err)
	}
}
