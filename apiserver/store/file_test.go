// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
)

// sample makes a file with a bit of everything and returns its bytes.
func sample(tb testing.TB, objects int) []byte {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "store.db")
	db, err := Open(path, Options{NoFsync: true})
	if err != nil {
		tb.Fatal(err)
	}
	s := pods(db)
	for i := range objects {
		name := fmt.Sprintf("pod-%04d", i)
		if err := s.Create(tb.Context(), podKey(name), fatPod(name, 300), nil, uint64(3600*(i%2))); err != nil {
			tb.Fatal(err)
		}
		if i%3 == 0 {
			mustRelabel(tb, s, name, "x")
		}
		if i%7 == 0 {
			mustDelete(tb, s, name)
		}
	}
	if err := s.Create(tb.Context(), podKey("fat"), fatPod("fat", 30_000), nil, 0); err != nil {
		tb.Fatal(err)
	}
	if err := db.Close(); err != nil {
		tb.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	return data
}

// use opens the file and does everything once. It returns the first error.
func use(path string) (err error) {
	db, err := Open(path, Options{NoFsync: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	s := pods(db)
	if _, err := list(s, ""); err != nil {
		return err
	}
	if _, err := list(s, "100"); err != nil && !strings.Contains(err.Error(), listExpired) {
		return err
	}
	if _, _, err := db.eventsFromDisk(db.view, 1, everything, 10_000); err != nil {
		return err
	}
	ctx, cancel := contextWithPatience()
	defer cancel()
	for i := range 5 {
		name := fmt.Sprintf("new-%d", i)
		if err := s.Create(ctx, podKey(name), fatPod(name, 500), nil, 100); err != nil {
			return err
		}
		if _, err := relabel(ctx, s, name, "y"); err != nil {
			return err
		}
		if err := remove(ctx, s, name); err != nil {
			return err
		}
	}
	return db.Close()
}

// within fails the test when fn hangs.
func within(t *testing.T, what string, fn func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- fn() }()
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		t.Fatalf("%s: still not done after %v", what, patience)
		return nil
	}
}

// However a file is damaged, the answer is ErrCorrupt with the path and
// advice, or nothing is wrong where it matters. Never a panic, never for ever.
func TestDamagedFile(t *testing.T) {
	data := sample(t, 150)
	const pageSize = 4096
	pages := len(data) / pageSize
	damage := map[string]func([]byte) []byte{}
	each := func(kind string, n int, harm func(r *rand.Rand, b []byte) []byte) {
		for i := range n * long(20) {
			damage[fmt.Sprintf("%s %d", kind, i)] = func(b []byte) []byte {
				return harm(rand.New(rand.NewSource(int64(i))), b)
			}
		}
	}
	flip := func(r *rand.Rand, b []byte, within int) {
		for range 3 {
			b[r.Intn(pages)*pageSize+r.Intn(within)] ^= 1 << r.Intn(8)
		}
	}
	page := func(r *rand.Rand, b []byte) []byte {
		at := r.Intn(pages) * pageSize
		return b[at : at+pageSize]
	}
	each("bits flipped", 75, func(r *rand.Rand, b []byte) []byte { flip(r, b, pageSize); return b })
	// Most of a page is values; the structure is in front.
	each("bits flipped in front", 75, func(r *rand.Rand, b []byte) []byte { flip(r, b, 200); return b })
	each("page zeroed", 30, func(r *rand.Rand, b []byte) []byte { clear(page(r, b)); return b })
	each("page of noise", 30, func(r *rand.Rand, b []byte) []byte { r.Read(page(r, b)); return b })
	each("page twice", 30, func(r *rand.Rand, b []byte) []byte { copy(page(r, b), page(r, b)); return b })
	each("cut short", 30, func(r *rand.Rand, b []byte) []byte { return b[:r.Intn(len(b)-1)+1] })
	damage["loop of pages"] = func(b []byte) []byte {
		for p := 2; p < pages; p++ {
			page := b[p*pageSize:]
			if binary.LittleEndian.Uint16(page[8:]) == flagBranch {
				binary.LittleEndian.PutUint64(page[boltPageHeader+8:], uint64(p))
			}
		}
		return b
	}
	damage["another kind of file"] = func([]byte) []byte { return bytes.Repeat([]byte("not a store\n"), 5000) }
	found := 0
	path := filepath.Join(t.TempDir(), "store.db")
	for name, harm := range damage {
		if err := os.WriteFile(path, harm(bytes.Clone(data)), 0o600); err != nil {
			t.Fatal(err)
		}
		err := within(t, name, func() error { return use(path) })
		if err == nil {
			continue
		}
		found++
		if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
		if !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "--fresh") {
			t.Errorf("%s: %q lacks the path or advice", name, err)
		}
	}
	t.Logf("%d of %d damages were noticed", found, len(damage))
	if found < len(damage)/4 {
		t.Errorf("only %d of %d damages were noticed", found, len(damage))
	}
}

// A file that was damaged under a running DB: reads say so, the process lives.
func TestDamageWhileOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	if err := os.WriteFile(path, sample(t, 150), 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := Open(path, Options{NoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()                 // what it says of a file without its end is not the point
	if err := os.Truncate(path, 3*4096); err != nil { // reading beyond is a SIGBUS
		t.Fatal(err)
	}
	s := pods(db)
	if _, err := list(s, ""); !errors.Is(err, ErrCorrupt) {
		t.Errorf("list: %v", err)
	}
	if err := s.Create(t.Context(), podKey("a"), podNamed("a"), nil, 0); !errors.Is(err, ErrCorrupt) {
		t.Errorf("create: %v", err)
	}
	if err := s.Create(t.Context(), podKey("a"), podNamed("a"), nil, 0); !errors.Is(err, ErrCorrupt) {
		t.Errorf("create again: %v", err)
	}
}

func TestLocked(t *testing.T) {
	db := openDB(t, Options{})
	start := time.Now()
	_, err := Open(db.path, Options{LockTimeout: 100 * time.Millisecond})
	if !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), db.path) {
		t.Errorf("opening it twice: %v", err)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	mustCreate(t, pods(db), "a") // the first is not disturbed
}

func TestUnknownFormat(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	b, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = b.Update(func(tx *bolt.Tx) error {
		for _, name := range [][]byte{bucketObjects, bucketLog, bucketExpiry, bucketTallies} {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		m, err := tx.CreateBucket(bucketMeta)
		if err != nil {
			return err
		}
		raw := state{rev: 7}.encode(keyState)
		raw[checksumLen] = formatVersion + 1
		return m.Put(keyState, seal(keyState, raw))
	})
	if err := errors.Join(err, b.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path, Options{}); !errors.Is(err, ErrFormat) {
		t.Errorf("error %v", err)
	}
}

// What a power cut right after the file was made may leave.
func TestFileOfZeros(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	if err := os.WriteFile(path, make([]byte, 4*4096), 0o600); err != nil {
		t.Fatal(err)
	}
	mustCreate(t, pods(openAt(t, path, Options{})), "a")
}

func TestOpenOnWhatIsNotAFile(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{dir, filepath.Join(dir, "no", "such", "directory", "store.db"), "/dev/null"} {
		_, err := Open(path, Options{})
		if err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestConfigMistakes(t *testing.T) {
	db := openDB(t, Options{NoFsync: true})
	for name, cfg := range map[string]Config{
		"no prefix": {Codec: exampleCodec(), NewFunc: newPod},
		"slash":     {Codec: exampleCodec(), NewFunc: newPod, Prefix: "/"},
		"no codec":  {NewFunc: newPod, Prefix: "/pods"},
		"no new":    {Codec: exampleCodec(), Prefix: "/pods"},
	} {
		s := db.NewStore(cfg)
		if err := s.ReadinessCheck(); err == nil {
			t.Errorf("%s: ready", name)
		}
		if err := s.Create(t.Context(), podKey("a"), podNamed("a"), nil, 0); err == nil || !strings.Contains(err.Error(), "Config.") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
