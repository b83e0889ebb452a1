// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/kplab/kplab/internal/nettest"
)

// smallDisk mounts a file system of size bytes. TestMain has given the tests a
// mount namespace of their own.
func smallDisk(t *testing.T, size int) string {
	t.Helper()
	nettest.NeedRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("kplab-test", dir, "tmpfs", 0, fmt.Sprintf("size=%d", size)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// fill takes all but keep bytes of the disk; the function gives them back.
func fill(t *testing.T, dir string, keep int) (free func()) {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, "filler")
	size := max(0, int(st.Bavail)*int(st.Bsize)-keep)
	if err := os.WriteFile(name, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(name); err != nil {
			t.Error(err)
		}
	}
}

func fatPod(name string, size int) *example.Pod {
	p := podNamed(name)
	p.Annotations = map[string]string{"fat": strings.Repeat("x", size)}
	return p
}

// writeUntilFull creates pods until that fails, and names those that are there.
func writeUntilFull(t *testing.T, s *Store, size int) []string {
	t.Helper()
	var names []string
	for i := range 10_000 {
		name := fmt.Sprintf("pod-%05d", i)
		err := s.Create(context.Background(), podKey(name), fatPod(name, size), nil, 0)
		if err == nil {
			names = append(names, name)
			continue
		}
		if !errors.Is(err, ErrNoSpace) {
			t.Fatalf("after %d writes: %v", i, err)
		}
		if !strings.Contains(err.Error(), s.db.path) {
			t.Errorf("%q does not name the file", err)
		}
		return names
	}
	t.Fatal("the disk never got full")
	return nil
}

func mustHold(t *testing.T, s *Store, names []string) {
	t.Helper()
	if got, err := list(s, ""); err != nil || fmt.Sprint(got) != fmt.Sprint(names) {
		t.Errorf("%d pods, %v, want %d", len(got), err, len(names))
	}
}

func TestFullDisk(t *testing.T) {
	dir := smallDisk(t, 4<<20)
	db := openAt(t, filepath.Join(dir, "store.db"), Options{})
	s := pods(db)
	w := mustWatch(t, s, storage.ListOptions{ResourceVersion: "1"})
	free := fill(t, dir, 400<<10)

	names := writeUntilFull(t, s, 2000)
	if len(names) < 10 {
		t.Fatalf("only %d writes fitted", len(names))
	}
	rev := db.Revision()
	if want := uint64(len(names) + 1); rev != want {
		t.Errorf("revision %d, want %d: the failed write counts", rev, want)
	}
	mustHold(t, s, names) // reads work
	for range 20 {        // and it stays so
		if err := s.Create(t.Context(), podKey("more"), fatPod("more", 1_000_000), nil, 0); !errors.Is(err, ErrNoSpace) {
			t.Fatal(err)
		}
	}
	mustHold(t, s, names)
	if db.Revision() != rev {
		t.Errorf("failed writes moved the revision to %d", db.Revision())
	}

	free()
	mustCreate(t, s, "z")
	names = append(names, "z")
	mustHold(t, s, names)
	for i, name := range names {
		want(t, w, fmt.Sprintf("ADDED %s@%d", name, i+2))
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	mustHold(t, pods(openAt(t, db.path, Options{})), names)
}

// The one write that does not fit does not take those down that came with it.
func TestFullDiskFailsOnlyWhatDoesNotFit(t *testing.T) {
	dir := smallDisk(t, 8<<20)
	db := openAt(t, filepath.Join(dir, "store.db"), Options{})
	s := pods(db)
	mustCreate(t, s, "warm")
	fill(t, dir, 500<<10)
	reached, release := shut(db)
	var wg sync.WaitGroup
	wg.Go(func() { mustCreate(t, s, "first") })
	<-reached
	var fat error
	wg.Go(func() { fat = s.Create(context.Background(), podKey("fat"), fatPod("fat", 1<<20), nil, 0) })
	waitQueued(t, db, 1)
	for _, name := range []string{"a", "b"} {
		wg.Go(func() { mustCreate(t, s, name) })
	}
	waitQueued(t, db, 3)
	release()
	wg.Wait()
	if !errors.Is(fat, ErrNoSpace) {
		t.Errorf("the fat one: %v", fat)
	}
	mustHold(t, s, []string{"a", "b", "first", "warm"})
}

// A disk that is full when the file is made leaves nothing that the next start
// takes for a damaged file.
func TestFullDiskAtFirstOpen(t *testing.T) {
	dir := smallDisk(t, 1<<20)
	path := filepath.Join(dir, "store.db")
	free := fill(t, dir, 4096)
	if db, err := Open(path, Options{}); !errors.Is(err, ErrNoSpace) {
		t.Fatalf("opened %v, %v", db, err)
	}
	free()
	mustCreate(t, pods(openAt(t, path, Options{})), "a")
}

// A file size limit (ulimit -f) is one more way to be full.
func TestFileSizeLimit(t *testing.T) {
	db := openDB(t, Options{NoFsync: true})
	s := pods(db)
	mustCreate(t, s, "a")
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &before); err != nil {
		t.Fatal(err)
	}
	limited := before
	limited.Cur = 1 << 20
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &limited); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &before); err != nil {
			t.Error(err)
		}
	}()
	err := s.Create(t.Context(), podKey("fat"), fatPod("fat", 2<<20), nil, 0)
	if !errors.Is(err, ErrNoSpace) {
		t.Errorf("beyond the limit: %v", err)
	}
	mustHold(t, s, []string{"a"})
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &before); err != nil {
		t.Fatal(err)
	}
	if err := s.Create(t.Context(), podKey("fat"), fatPod("fat", 2<<20), nil, 0); err != nil {
		t.Error(err)
	}
	mustHold(t, s, []string{"a", "fat"})
}

// bbolt reports some of these as text only.
func TestNoSpaceIsRecognised(t *testing.T) {
	for _, no := range []syscall.Errno{syscall.ENOSPC, syscall.EFBIG, syscall.EDQUOT, syscall.ENOMEM} {
		for _, err := range []error{&os.PathError{Op: "write", Err: no}, errors.New("mmap allocate error: " + no.Error())} {
			if got := fileError("/x", err); !errors.Is(got, ErrNoSpace) {
				t.Errorf("%v is taken for %v", err, got)
			}
		}
	}
	if got := fileError("/x", syscall.EIO); errors.Is(got, ErrNoSpace) || !errors.Is(got, syscall.EIO) {
		t.Errorf("EIO is taken for %v", got)
	}
}
