// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
)

// Object is one stored object as it lies in a file.
type Object struct {
	// Key is where it lies, "/registry/pods/default/web".
	Key string
	// Revision is that of its last change.
	Revision uint64
	// Value is the encoded object. It may be kept.
	Value []byte
}

// Report is what Inspect saw of a file.
type Report struct {
	// Size is the length of the file in bytes, Used what is in pages that hold
	// something. The rest is written over before the file grows again.
	Size, Used int64
	// Revision is the newest revision. Watches and lists can go back to After,
	// not further.
	Revision, After uint64
	// Objects is the number of objects that are stored.
	Objects int
	// Problems is what is wrong, one sentence each, at most maxProblems of them.
	Problems []string
}

// maxProblems bounds a report: a file that is damaged in one place may have
// thousands of entries that do not fit together any more.
const maxProblems = 100

func (r *Report) problem(format string, args ...any) {
	if len(r.Problems) < maxProblems {
		r.Problems = append(r.Problems, fmt.Sprintf(format, args...))
	}
}

// Inspect reads the file at path, which no process may have open, from end to
// end: its pages by our check and by bbolt's, each value's checksum, and
// whether objects, event log, expiry and tallies agree. What is wrong is in the
// report. each, which may be nil, is called for every object that can be read, in
// the order of the keys; an error from it is one more problem.
//
// Nothing is changed, but that a file that was not closed is brought up to date with its
// journal first. The error is for a file that could not be looked at: it is
// missing (fs.ErrNotExist), in use (ErrLocked) or of another version (ErrFormat).
func Inspect(path string, each func(Object) error) (*Report, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, fileError(path, err)
	}
	if err := catchUp(path); err != nil && !errors.Is(err, ErrCorrupt) {
		return nil, fileError(path, err)
	}
	r := &Report{}
	b, err := openToRead(path, r)
	if err != nil {
		return nil, err
	}
	if b == nil { // empty, or damaged so that bbolt cannot be let near it
		return r, nil
	}
	panicked, err := guard(func() error { return b.View(func(tx *bolt.Tx) error { return verify(tx, r, each) }) })
	switch {
	case errors.Is(err, ErrFormat):
		return nil, errors.Join(&FileError{Kind: ErrFormat, Path: path, Err: err}, b.Close())
	case panicked || errors.Is(err, errRecord):
		r.problem("%v", err)
	case err != nil:
		return nil, errors.Join(fileError(path, err), b.Close())
	}
	return r, fileError(path, b.Close())
}

// openToRead locks and checks the file and opens it for reading. It returns nil
// for a file in which nothing can be read, with the reason in r.
func openToRead(path string, r *Report) (*bolt.DB, error) {
	var unreadable error
	fresh := false
	b, err := bolt.Open(path, 0, &bolt.Options{
		ReadOnly: true, PreLoadFreelist: true, FreelistType: bolt.FreelistMapType,
		OpenFile: func(name string, flag int, mode os.FileMode) (*os.File, error) {
			f, used, err := openLocked(name, flag, mode, offlineLockTimeout)
			r.Used = used
			if errors.Is(err, ErrCorrupt) {
				unreadable = err
			}
			if err != nil {
				return nil, err
			}
			info, err := f.Stat()
			if err == nil && (info.Size() == 0 || used == 0) {
				fresh, err = true, errors.New("nothing is in it")
			}
			if err != nil {
				return nil, errors.Join(err, f.Close())
			}
			r.Size = info.Size()
			return f, nil
		},
	})
	var fe *FileError
	switch {
	case fresh:
		r.Revision = firstRevision
		return nil, nil
	case errors.As(unreadable, &fe):
		if info, err := os.Stat(path); err == nil {
			r.Size = info.Size()
		}
		r.problem("the file's pages: %v", fe.Err)
		return nil, nil
	case err != nil:
		return nil, fileError(path, err)
	}
	return b, nil
}

// offlineLockTimeout is short: who works on a file offline has made sure that
// nobody uses it, or wants to hear of it.
const offlineLockTimeout = 200 * time.Millisecond

// CompactSuffix is what Rewrite adds to the name of a file for its copy.
const CompactSuffix = ".compact"

// Rewrite makes the file at path, which no process may have open, as small as
// what is in it, by writing a copy beside it and putting that in its place. The
// file is checked before and the copy after; with an error the file is as it
// was. Objects, revisions and the event log stay what they are.
func Rewrite(path string) (before, after *Report, err error) {
	if before, err = Inspect(path, nil); err != nil {
		return nil, nil, err
	}
	if len(before.Problems) > 0 {
		return before, nil, corrupt(path, "%s", before.Problems[0])
	}
	info, err := os.Stat(path)
	if err != nil {
		return before, nil, fileError(path, err)
	}
	tmp := path + CompactSuffix
	defer func() {
		if err != nil {
			_ = os.Remove(tmp) // it may not be there; the error that counts is known
		}
	}()
	if before.Used > 0 {
		err = copyInto(tmp, path)
	} else {
		err = os.WriteFile(tmp, nil, info.Mode().Perm())
	}
	if err != nil {
		return before, nil, fileError(tmp, err)
	}
	if after, err = Inspect(tmp, nil); err != nil {
		return before, nil, err
	}
	if after.Revision != before.Revision || after.After != before.After || after.Objects != before.Objects || len(after.Problems) > 0 {
		return before, after, fmt.Errorf("the copy %s is not like the file %s: %+v, not %+v; the file is as it was", tmp, path, *after, *before)
	}
	if err := os.Chmod(tmp, info.Mode().Perm()); err != nil {
		return before, after, err
	}
	if err := os.Rename(tmp, path); err != nil {
		return before, after, err
	}
	return before, after, fileError(path, syncDir(filepath.Dir(path)))
}

// rewriteBatch is how many bytes of the copy are written in one transaction.
const rewriteBatch = 4 << 20

// copyInto writes what is in the file at from into a new one, and syncs it. The
// file at from is locked meanwhile.
func copyInto(to, from string) (err error) {
	src, err := openToRead(from, &Report{})
	if err != nil {
		return err
	}
	if src == nil {
		return corrupt(from, "it cannot be read any more")
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	if err := os.Remove(to); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	dst, err := bolt.Open(to, 0o600, &bolt.Options{NoSync: true, NoGrowSync: true, FreelistType: bolt.FreelistMapType})
	if err != nil {
		return err
	}
	if _, err = guard(func() error { return bolt.Compact(dst, src, rewriteBatch) }); err == nil {
		err = dst.Sync()
	}
	return errors.Join(err, dst.Close())
}
