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
func openFile(path string, opts Options) (*bolt.DB, error) {
	fresh := false
	hook := func(name string, flag int, mode os.FileMode) (*os.File, error) {
		f, err := os.OpenFile(name, flag, mode)
		if err != nil {
			return nil, err
		}
		if fresh, err = prepare(f, opts.LockTimeout); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return f, nil
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
			return nil, corrupt(path, "%w", err)
		}
		return b, err
	}
	b, err := open(mapSize)
	if errors.Is(err, syscall.ENOMEM) {
		b, err = open(0) // address space is limited: map as much as there is
	}
	if err != nil {
		if fresh {
			// A half-made file would be taken for a corrupt one the next time.
			_ = os.Truncate(path, 0)
		}
		return nil, fileError(path, err)
	}
	b.AllocSize = growBy
	if fresh && !opts.NoFsync {
		if err := syncDir(filepath.Dir(path)); err != nil {
			return nil, errors.Join(fileError(path, err), b.Close())
		}
	}
	return b, nil
}

// prepare locks f and checks what is in it. fresh: the file is empty. bbolt
// locks the same open file again afterwards, which changes nothing.
func prepare(f *os.File, timeout time.Duration) (fresh bool, err error) {
	if err := lock(f, timeout); err != nil {
		return false, err
	}
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	if !info.Mode().IsRegular() {
		return false, fmt.Errorf("is not a regular file (%v)", info.Mode().Type())
	}
	size := info.Size()
	if size == 0 {
		return true, nil
	}
	file, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return false, fmt.Errorf("mapping it: %w", err)
	}
	var zeros bool
	_, err = guard(func() error { // a fault is a disk that cannot be read
		err := checkFile(file)
		zeros = err != nil && onlyZeros(file)
		return err
	})
	if unmapErr := unix.Munmap(file); unmapErr != nil {
		return false, unmapErr
	}
	switch {
	case zeros:
		return true, f.Truncate(0)
	case err != nil:
		return false, corrupt(f.Name(), "%w", err)
	}
	return false, nil
}

func lock(f *os.File, timeout time.Duration) error {
	for deadline := time.Now().Add(timeout); ; time.Sleep(lockPoll) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil || !errors.Is(err, syscall.EWOULDBLOCK) {
			return err
		}
		if time.Now().After(deadline) {
			return berrors.ErrTimeout
		}
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
