// SPDX-License-Identifier: Apache-2.0

// Package netns is the only code that moves a thread from one network namespace
// to another.
//
// A network namespace belongs to a thread, and Go moves goroutines between
// threads as it likes. So work inside a namespace is a function handed to
// [NS.Do], which runs on a thread of its own for as long as it takes. A socket
// remembers the namespace in which it was made, so a listener or connection may
// be used from anywhere afterwards.
//
// What may not happen inside Do: starting a goroutine and expecting it to be in
// the namespace too. It runs on another thread, in the process's own namespace.
package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// NS is an open handle of a network namespace. The namespace lives at least as
// long as the handle. Its methods are safe for concurrent use; after Close they
// return an error that wraps os.ErrClosed.
type NS struct {
	file  *os.File
	path  string
	inode uint64
}

// New makes a namespace that only the returned handle holds. Its loopback link
// is down and its sysctls are those that the kernel gives a new namespace, some
// of which are copies of the host's. The calling thread stays where it is.
func New() (*NS, error) {
	var ns *NS
	err := onThread(func() error {
		h, err := vnetns.New()
		if err != nil {
			return fmt.Errorf("make a network namespace (needs CAP_SYS_ADMIN): %w", err)
		}
		ns, err = fromHandle(h, "")
		return err
	})
	if err != nil {
		return nil, err
	}
	return ns, nil
}

// Open opens the namespace at path: a bind mount that pins it, or a process's
// /proc/PID/ns/net. A file that is no network namespace is an error.
func Open(path string) (*NS, error) {
	h, err := vnetns.GetFromPath(path)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", &os.PathError{Op: "open", Path: path, Err: err})
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(h), &fs); err != nil {
		return nil, errors.Join(fmt.Errorf("statfs %s: %w", path, err), h.Close())
	}
	// A pin whose mount is gone is a plain empty file: say so here and not with
	// a bare EINVAL from a later setns.
	if fs.Type != unix.NSFS_MAGIC {
		return nil, errors.Join(fmt.Errorf("%s is no network namespace (a pin that is not mounted?)", path), h.Close())
	}
	return fromHandle(h, path)
}

// Current opens the namespace of the calling goroutine: the process's own, or
// inside Do the one that Do entered.
func Current() (*NS, error) {
	// Without the lock the goroutine could move between asking for the thread's
	// number and opening its file.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	h, err := vnetns.Get()
	if err != nil {
		return nil, fmt.Errorf("open the current network namespace: %w", err)
	}
	return fromHandle(h, "")
}

// fromHandle takes over h.
func fromHandle(h vnetns.NsHandle, path string) (*NS, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(h), &st); err != nil {
		return nil, errors.Join(fmt.Errorf("stat network namespace: %w", err), h.Close())
	}
	if path == "" {
		path = fmt.Sprintf("/proc/self/fd/%d", int(h))
	}
	return &NS{file: os.NewFile(uintptr(h), path), path: path, inode: st.Ino}, nil
}

// Do runs fn on a thread inside the namespace and returns fn's error. The thread
// goes back to where it was; one that cannot go back ends, so that no other
// goroutine ever meets it. Calls may be nested. A panic or runtime.Goexit in fn
// (t.Fatal, say) goes on in the caller.
func (n *NS) Do(fn func() error) error {
	return onThread(func() error {
		if err := n.enter(); err != nil {
			return err
		}
		return fn()
	})
}

// enter moves the current thread into the namespace.
func (n *NS) enter() error {
	// Control holds the descriptor open for the call: without it a concurrent
	// Close could hand its number to another namespace.
	raw, err := n.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("enter network namespace %s: %w", n.path, err)
	}
	var setErr error
	if err := raw.Control(func(fd uintptr) { setErr = vnetns.Set(vnetns.NsHandle(fd)) }); err != nil {
		// The only reason that Control has; its own error is no os.ErrClosed.
		return fmt.Errorf("enter network namespace %s: %w", n.path, os.ErrClosed)
	}
	if setErr != nil {
		return fmt.Errorf("enter network namespace %s: %w", n.path, setErr)
	}
	return nil
}

// Fd returns the handle's file descriptor. It is good until Close, and only for
// as long as n is referenced: a forgotten handle is closed by the collector.
func (n *NS) Fd() int { return int(n.file.Fd()) }

// Path returns the path given to Open, else /proc/self/fd/N, which is good
// inside this process until Close.
func (n *NS) Path() string { return n.path }

// Inode returns the number that identifies the namespace on this machine for as
// long as it lives. /proc/PID/ns/net of a process in it names the same number.
func (n *NS) Inode() uint64 { return n.inode }

// Close releases the handle. The namespace goes when nothing else holds it: a
// mount, a process, a socket. A second Close returns an error.
func (n *NS) Close() error { return n.file.Close() }

// onThread runs fn on a locked thread and puts the thread back into its network
// namespace afterwards, or lets it end when that fails.
func onThread(fn func() error) error {
	var out outcome
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		// On every path that does not unlock, the thread ends with the goroutine.
		orig, err := vnetns.Get()
		if err != nil {
			runtime.UnlockOSThread()
			out.returned, out.err = true, fmt.Errorf("open the current network namespace: %w", err)
			return
		}
		defer func() {
			if vnetns.Set(orig) == nil {
				runtime.UnlockOSThread()
			}
			_ = orig.Close() // a handle opened for reading: nothing to lose
		}()
		out.run(fn)
	}()
	<-done
	return out.pass()
}

// outcome carries how a function ended from one goroutine to another.
type outcome struct {
	err      error
	returned bool
	panicked any
	stack    []byte
}

// run calls fn and keeps how it ended.
func (o *outcome) run(fn func() error) {
	defer func() {
		if o.returned {
			return
		}
		// nil means Goexit: a panic(nil) recovers as a *runtime.PanicNilError.
		if o.panicked = recover(); o.panicked != nil {
			o.stack = debug.Stack()
		}
	}()
	o.err = fn()
	o.returned = true
}

// pass lets the caller end as fn did.
func (o *outcome) pass() error {
	switch {
	case o.returned:
		return o.err
	case o.panicked != nil:
		panic(fmt.Sprintf("%v\n\ninside a network namespace:\n%s", o.panicked, o.stack))
	}
	runtime.Goexit()
	return nil
}
