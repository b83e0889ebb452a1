// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"strings"
	"syscall"

	berrors "go.etcd.io/bbolt/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What can be wrong with the file behind a DB. Each is found with errors.Is
// in the errors that Open and the storage methods return; the error itself is
// then a *FileError with the path and what to do next.
var (
	// ErrCorrupt: the file is damaged, cut short, or not a store file.
	ErrCorrupt = errors.New("store file is corrupt")
	// ErrLocked: another process has the file open.
	ErrLocked = errors.New("store file is in use by another process")
	// ErrNoSpace: the disk, a quota, a file size limit or the address space
	// is used up. The write that got it changed nothing.
	ErrNoSpace = errors.New("no space left for the store file")
	// ErrReadOnly: this user, or the file system, does not let the file be
	// opened for writing, or made.
	ErrReadOnly = errors.New("store file cannot be written")
	// ErrFormat: the file is sound, but written by a version that this one
	// does not know.
	ErrFormat = errors.New("store file has an unknown format")
	// ErrClosed: the DB is closed, or closing.
	ErrClosed = errors.New("store is closed")
)

// Answers of the read path that the storage methods turn into API errors.
var (
	// errCompacted: the asked revision is older than the event log.
	errCompacted = errors.New("revision is compacted")
	// errFuture: the asked revision does not exist yet.
	errFuture = errors.New("revision is in the future")
)

// FileError is a failure of the file behind a DB.
type FileError struct {
	// Kind is ErrCorrupt, ErrLocked, ErrNoSpace, ErrReadOnly, ErrFormat, or nil
	// for any other failure (an I/O error).
	Kind error
	// Path is the file.
	Path string
	// Err is what was seen.
	Err error
}

// Error names the file, what was seen and what to do next.
func (e *FileError) Error() string {
	switch {
	case errors.Is(e.Kind, ErrCorrupt):
		return fmt.Sprintf("%v: %s: %v: move the file away, or start the lab with --fresh, which deletes it", e.Kind, e.Path, e.Err)
	case errors.Is(e.Kind, ErrLocked):
		return fmt.Sprintf("%v: %s: %v: stop the other process first", e.Kind, e.Path, e.Err)
	case errors.Is(e.Kind, ErrNoSpace):
		return fmt.Sprintf("%v: %s: %v: nothing was changed; free some space and repeat", e.Kind, e.Path, e.Err)
	case errors.Is(e.Kind, ErrReadOnly):
		return fmt.Sprintf("%v: %s: %v: make the file and its directory writable for this user, or keep the state elsewhere", e.Kind, e.Path, e.Err)
	case errors.Is(e.Kind, ErrFormat):
		return fmt.Sprintf("%v: %s: %v: use the version that wrote it, or start the lab with --fresh, which deletes it", e.Kind, e.Path, e.Err)
	default:
		return fmt.Sprintf("store file %s: %v", e.Path, e.Err)
	}
}

// Unwrap gives both the kind and the cause to errors.Is and errors.As.
func (e *FileError) Unwrap() []error {
	if e.Kind == nil {
		return []error{e.Err}
	}
	return []error{e.Kind, e.Err}
}

// Status makes the error readable for API clients: without it the API server
// logs every such failure as an unknown error type. It is the interface
// apierrors.APIStatus.
func (e *FileError) Status() metav1.Status {
	return metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    http.StatusInternalServerError,
		Reason:  metav1.StatusReasonInternalError,
		Message: e.Error(),
	}
}

// fileError sorts err into a *FileError. An error that is one already, or that
// says nothing about the file, comes back unchanged.
func fileError(path string, err error) error {
	var fe *FileError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &fe), errors.Is(err, ErrClosed):
		return err
	case errors.Is(err, berrors.ErrTimeout):
		return &FileError{Kind: ErrLocked, Path: path, Err: err}
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrChecksum), errors.Is(err, berrors.ErrVersionMismatch):
		return &FileError{Kind: ErrCorrupt, Path: path, Err: err}
	case errors.Is(err, syscall.EROFS), errors.Is(err, fs.ErrPermission):
		return &FileError{Kind: ErrReadOnly, Path: path, Err: err}
	case isNoSpace(err):
		return &FileError{Kind: ErrNoSpace, Path: path, Err: err}
	default:
		return &FileError{Path: path, Err: err}
	}
}

// corrupt is a *FileError of kind ErrCorrupt.
func corrupt(path, format string, args ...any) error {
	return &FileError{Kind: ErrCorrupt, Path: path, Err: fmt.Errorf(format, args...)}
}

// isNoSpace reports whether err means that the file cannot grow. bbolt formats
// some system errors with %s, so that errors.Is cannot see them; hence the
// look at the text, with the words taken from the system error itself.
func isNoSpace(err error) bool {
	for _, no := range []syscall.Errno{syscall.ENOSPC, syscall.EFBIG, syscall.EDQUOT, syscall.ENOMEM} {
		if errors.Is(err, no) || strings.Contains(err.Error(), no.Error()) {
			return true
		}
	}
	return errors.Is(err, berrors.ErrMaxSizeReached)
}
