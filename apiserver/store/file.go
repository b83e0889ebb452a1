// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"
)

const (
	// mapSize is the address space that is set aside for the file. Nothing is
	// allocated, only pages that are read count; but while the file is smaller
	// bbolt never has to map it anew, which would stop all readers and can fail.
	mapSize = 1 << 30
	// growBy is how much the file grows at a time; each time costs one sync more.
	growBy = 4 << 20
	// lockPoll is the time between two tries to lock the file.
	lockPoll = 10 * time.Millisecond
)

// openFile locks, checks and opens the file, or makes it.
//
// The freelist is kept in the file (not NoFreelistSync): it costs a page or two
// a commit, but without it every open, and every failed commit, reads all
// pages of the file through the mapping, which would count as memory of the
// process from then on.
//
// A file that was not closed is put back to its last checkpoint; DB.redo does the rest.
// roomy tells whether the mapping has room for the file to grow.
func openFile(path string, opts Options) (_ *bolt.DB, roomy bool, err error) {
	fresh := false
	var opened *os.File
	hook := func(name string, flag int, mode os.FileMode) (*os.File, error) {
		f, used, err := openLocked(name, flag, mode, opts.LockTimeout)
		fresh = err == nil && used == 0
		opened = f
		return f, err
	}
	open := func(size int) (b *bolt.DB, err error) {
		panicked, err := guard(func() error {
			b, err = bolt.Open(path, 0o600, &bolt.Options{
				Timeout:         opts.LockTimeout,
				NoSync:          opts.NoFsync,
				NoGrowSync:      opts.NoFsync,
				FreelistType:    bolt.FreelistMapType,
				InitialMmapSize: size,
				OpenFile:        hook,
			})
			return err
		})
		if panicked {
			// Nobody else will, and the mapping that bbolt has left keeps the lock.
			unlocked := syscall.Flock(int(opened.Fd()), syscall.LOCK_UN)
			return nil, errors.Join(corrupt(path, "%w", err), unlocked, opened.Close())
		}
		return b, err
	}
	b, err := open(mapSize)
	roomy = true
	if errors.Is(err, syscall.ENOMEM) {
		roomy = false
		b, err = open(0) // address space is limited: map as much as there is
	}
	if err != nil {
		if fresh {
			// A half-made file would be taken for a corrupt one the next time.
			_ = os.Truncate(path, 0)
		}
		return nil, false, fileError(path, err)
	}
	b.AllocSize = growBy
	if fresh && !opts.NoFsync {
		if err := syncDir(filepath.Dir(path)); err != nil {
			return nil, false, errors.Join(fileError(path, err), b.Close())
		}
	}
	return b, roomy, nil
}

// openLocked opens a file for this process alone and checks what is in it. used
// is how many bytes are in pages that hold something; 0 means that the file is
// new. bbolt locks the same open file again afterwards, which changes nothing.
func openLocked(name string, flag int, mode os.FileMode, timeout time.Duration) (f *os.File, used int64, err error) {
	for deadline := time.Now().Add(timeout); ; {
		if f, err = os.OpenFile(name, flag, mode); err != nil {
			return nil, 0, err
		}
		if err = lock(f, deadline); err != nil {
			break
		}
		// Rewrite may have put another file in the place of the one that we
		// waited for.
		var same bool
		if same, err = isStill(f, name); same || err != nil {
			break
		}
		f.Close()
	}
	if err == nil && flag&os.O_RDWR != 0 {
		err = rewind(f)
	}
	if err == nil {
		used, err = examine(f, flag)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, used, nil
}

// isStill reports whether name is the name of the open file.
func isStill(f *os.File, name string) (bool, error) {
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	there, err := os.Stat(name)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(mine, there), err
}

// examine checks what is in f and empties a file of zeros.
func examine(f *os.File, flag int) (used int64, err error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if !info.Mode().IsRegular() {
		return 0, fmt.Errorf("is not a regular file (%v)", info.Mode().Type())
	}
	size := info.Size()
	if size == 0 {
		return 0, nil
	}
	file, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, fmt.Errorf("mapping it: %w", err)
	}
	var zeros bool
	_, err = guard(func() error { // a fault is a disk that cannot be read
		var err error
		used, err = checkFile(file)
		zeros = err != nil && onlyZeros(file)
		return err
	})
	if unmapErr := unix.Munmap(file); unmapErr != nil {
		return 0, unmapErr
	}
	switch {
	case zeros && flag&os.O_RDWR == 0:
		return 0, nil
	case zeros:
		return 0, f.Truncate(0)
	case err != nil:
		return 0, corrupt(f.Name(), "%w", err)
	}
	return used, nil
}

// lock takes the file's lock, or says with berrors.ErrTimeout that another
// process has it. The kernel cannot wait for a lock with a limit, so this asks again.
func lock(f *os.File, deadline time.Time) error {
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for ; ; <-tick.C {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil || !errors.Is(err, syscall.EWOULDBLOCK) {
			return err
		}
		if time.Now().After(deadline) {
			return berrors.ErrTimeout
		}
	}
}

// releaseEvery is how many commits pass between two calls of release.
const releaseEvery = 256

// release lets go of the pages of the mapping that were read so far; used is how much of
// the file is in use. They stay in the kernel's page cache, from where the next read
// takes them, but no longer count as memory of this process: without it a daemon that
// has written much looks as large as its file.
func (db *DB) release(used int64) {
	start := db.bolt.Info().Data
	if start == 0 || used <= 0 {
		return
	}
	// The mapping is read only and shared: nothing in it can be lost. It is asked for
	// by number, since Go's garbage collector does not know it.
	_, _, errno := syscall.Syscall(syscall.SYS_MADVISE, start, uintptr(used), unix.MADV_DONTNEED)
	if errno != 0 {
		db.opts.Log.Debug("cannot let go of the pages of the file", "path", db.path, "err", errno)
	}
}

// syncDir makes the name of a new file durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if errors.Is(err, syscall.EINVAL) {
		err = nil // not every file system knows it
	}
	return errors.Join(err, d.Close())
}
