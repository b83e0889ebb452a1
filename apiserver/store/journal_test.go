// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"fmt"
	"math/rand"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// A power cut loses any of the pages that were written since the last sync, in any
// order. What was acknowledged is there all the same.
func TestPowerCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	db := openAt(t, path, Options{})
	s := pods(db)
	var names []string
	create := func(n int) {
		for range n {
			name := fmt.Sprintf("pod-%03d", len(names))
			mustCreate(t, s, name)
			names = append(names, name)
		}
	}
	create(40)
	// What the disk has for certain is what it has after a checkpoint.
	db.writing.Lock()
	err := db.journal.checkpoint(db.bolt)
	db.writing.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	generation := db.journal.generation
	synced := readFile(t, path)
	create(40)
	mustDelete(t, s, "pod-000")
	mustRelabel(t, s, "pod-001", "changed")
	if err := db.Compact(t.Context(), 20); err != nil {
		t.Fatal(err)
	}
	create(20)
	names = names[1:]
	if db.journal.generation != generation {
		t.Fatal("the journal was full: the test tests nothing")
	}
	written, journal := readFile(t, path), readFile(t, journalPath(path))
	rev, damaged := db.Revision(), 0
	for seed := range int64(30) {
		r := rand.New(rand.NewSource(seed))
		cut := filepath.Join(t.TempDir(), "store.db")
		writeFile(t, cut, afterCut(r, synced, written))
		if _, err := checkFile(readFile(t, cut)); err != nil {
			damaged++
		}
		writeFile(t, journalPath(cut), journal)
		again := openAt(t, cut, Options{})
		mustHold(t, pods(again), names)
		if got := again.Revision(); got != rev {
			t.Errorf("seed %d: revision %d, want %d", seed, got, rev)
		}
		mustCreate(t, pods(again), "later")
		if err := again.Close(); err != nil {
			t.Error(err)
		}
		checkWhole(t, cut)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	if damaged == 0 {
		t.Error("no cut did any harm: the test tests nothing")
	}
	t.Logf("%d of 30 files were useless without their journal", damaged)
}

// afterCut mixes pages of what was synced with pages of what was written since.
func afterCut(r *rand.Rand, synced, written []byte) []byte {
	const page = 4096
	out := bytes.Clone(written)
	for at := 0; at < len(out); at += page {
		if r.Intn(2) == 0 {
			continue
		}
		end := min(at+page, len(out))
		clear(out[at:end])
		if at < len(synced) {
			copy(out[at:end], synced[at:])
		}
	}
	return out
}

func readFile(tb testing.TB, path string) []byte {
	tb.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	return data
}

func writeFile(tb testing.TB, path string, data []byte) {
	tb.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		tb.Fatal(err)
	}
}

// A journal whose last entry was cut off in the middle ends before it.
func TestTornEntry(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	db := openAt(t, path, Options{})
	for _, name := range []string{"a", "b", "c"} {
		mustCreate(t, pods(db), name)
	}
	file, journal, end := readFile(t, path), readFile(t, journalPath(path)), db.journal.next
	for lost := int64(4); lost < 40; lost += 3 { // it ends with three zeros
		cut := filepath.Join(t.TempDir(), "store.db")
		writeFile(t, cut, file)
		torn := bytes.Clone(journal)
		clear(torn[end-lost : end])
		writeFile(t, journalPath(cut), torn)
		// "c" was not acknowledged by a process that died in the middle of it.
		mustHold(t, pods(openAt(t, cut, Options{})), []string{"a", "b"})
	}
}

// An older file that somebody put in the place of the one that the journal belongs to is
// refused, and not mixed with it.
func TestJournalOfAnotherFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	db := openAt(t, path, Options{})
	mustCreate(t, pods(db), "a")
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	backup := readFile(t, path)
	db = openAt(t, path, Options{})
	for i := range 20 {
		mustCreate(t, pods(db), fmt.Sprintf("b-%d", i))
	}
	journal := readFile(t, journalPath(path))
	elsewhere := filepath.Join(t.TempDir(), "store.db")
	writeFile(t, elsewhere, backup)
	writeFile(t, journalPath(elsewhere), journal)
	if other, err := Open(elsewhere, Options{}); err == nil {
		t.Errorf("opened, at revision %d", other.Revision())
		_ = other.Close()
	} else {
		t.Log(err)
	}
	if !bytes.Equal(readFile(t, elsewhere), backup) {
		t.Error("the file was changed")
	}
}

// A file that was written with a journal can be opened without fsync, and the reverse.
func TestJournalComesAndGoes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	db := openAt(t, path, Options{})
	mustCreate(t, pods(db), "a")
	mustCreate(t, pods(db), "b")
	// A crash: the files as they are.
	cut := filepath.Join(t.TempDir(), "store.db")
	writeFile(t, cut, readFile(t, path))
	writeFile(t, journalPath(cut), readFile(t, journalPath(path)))
	fast := openAt(t, cut, Options{NoFsync: true})
	mustHold(t, pods(fast), []string{"a", "b"})
	if _, err := os.Stat(journalPath(cut)); !os.IsNotExist(err) {
		t.Errorf("the journal is still there: %v", err)
	}
	mustCreate(t, pods(fast), "c")
	if err := fast.Close(); err != nil {
		t.Fatal(err)
	}
	safe := openAt(t, cut, Options{})
	mustCreate(t, pods(safe), "d")
	mustHold(t, pods(safe), []string{"a", "b", "c", "d"})
}

// Whatever is in an entry, reading it ends, and what is read means the same when it is
// written again.
func FuzzDecodeBatch(f *testing.F) {
	f.Add(encodeBatch([]*op{
		{kind: opPut, key: "/pods/a", prefix: "/pods/", value: []byte("v"), expire: 12, keepExpire: true},
		{kind: opDelete, key: "/pods/b"}, {kind: opCompact, compactTo: 7},
	}, 9))
	f.Add([]byte{})
	f.Add(bytes.Repeat([]byte{0xff}, 40))
	f.Fuzz(func(t *testing.T, data []byte) {
		batch, first, err := decodeBatch(data)
		if err != nil {
			return
		}
		same, firstAgain, err := decodeBatch(encodeBatch(batch, first))
		if err != nil || firstAgain != first || len(same) != len(batch) {
			t.Fatalf("%d ops from %d, then %d from %d, %v", len(batch), first, len(same), firstAgain, err)
		}
		for i := range batch {
			if batch[i].kind == opExpire {
				continue // written as a deletion
			}
			if !reflect.DeepEqual(batch[i], same[i]) {
				t.Fatalf("op %+v, then %+v", batch[i], same[i])
			}
		}
	})
}
