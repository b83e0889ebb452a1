// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/sandbox/reexec"
)

// Process is a container's first process, running or ended. It is safe for
// concurrent use.
type Process struct {
	container string
	attempt   int
	terminal  bool
	dir       string
	shim      reexec.ID
	init      reexec.InitRecord
	done      chan struct{}
	cgroups   []string // what keeps it to its limits
	unlimited error    // why nothing does

	mu   sync.Mutex
	exit *Exit

	watch   *os.File // pidfd of the shim; nil when it has ended
	watcher sync.WaitGroup
}

// Container returns the container's name.
func (p *Process) Container() string { return p.container }

// Attempt returns which start of the container this is, from 0.
func (p *Process) Attempt() int { return p.attempt }

// Pid returns the process's number on the host.
func (p *Process) Pid() int { return p.init.Pid }

// StartedAt returns when the container's program took over.
func (p *Process) StartedAt() time.Time { return p.init.StartedAt }

// LimitError says why the process is not kept to the limits of its spec, nil when it
// is. It wraps ErrNoController where the host has nothing to do it with.
func (p *Process) LimitError() error { return p.unlimited }

// Done is closed when the process has ended and Exit knows how.
func (p *Process) Done() <-chan struct{} { return p.done }

// Exit returns how the process ended; false while it runs.
func (p *Process) Exit() (Exit, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.exit == nil {
		return Exit{}, false
	}
	return *p.exit, true
}

// Signal sends a signal to the process. As the first of its process namespace it
// gets only those that it handles, and SIGKILL. A process that has ended is an
// error that wraps os.ErrProcessDone.
func (p *Process) Signal(sig syscall.Signal) error {
	err := p.init.Signal(sig)
	if errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal container %s: %w", p.container, os.ErrProcessDone)
	}
	return err
}

// startWatch finds out whether the process runs and, if so, waits for its end in a
// goroutine that ends then or with release. It takes no thread: the kernel's
// descriptor of a process is a file that becomes readable.
func (p *Process) startWatch() error {
	fd, err := p.shim.Open()
	if errors.Is(err, unix.ESRCH) {
		p.ended()
		return nil
	}
	if err != nil {
		return err
	}
	p.watch = os.NewFile(uintptr(fd), "pidfd")
	raw, err := p.watch.SyscallConn()
	if err != nil {
		return errors.Join(err, p.watch.Close())
	}
	p.watcher.Go(func() {
		readable := false
		err := raw.Read(func(fd uintptr) bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			readable = err == nil && n > 0
			return readable
		})
		if err == nil && readable {
			p.ended()
			_ = p.watch.Close() // release may have been faster
		}
	})
	return nil
}

// ended learns how the process ended, now that its shim has.
func (p *Process) ended() {
	// The shim is this process's child unless an earlier daemon started it; then
	// the call fails and somebody else collects it.
	_, _ = unix.Wait4(p.shim.Pid, nil, unix.WNOHANG, nil)
	var r reexec.ExitRecord
	exit := Exit{Code: 128 + int(unix.SIGKILL), Signal: int(unix.SIGKILL), At: time.Now()}
	if err := readRecord(filepath.Join(p.dir, reexec.ExitFile), &r); err == nil {
		exit = Exit{Code: r.Code, Signal: r.Signal, At: r.At}
	} else if errors.Is(err, os.ErrNotExist) {
		// The shim was killed, and the kernel killed the process with it.
		_ = writeRecord(filepath.Join(p.dir, reexec.ExitFile), reexec.ExitRecord{Code: exit.Code, Signal: exit.Signal, At: exit.At})
	}
	exit.OutOfMemory = outOfMemory(p.cgroups)
	_ = removeCgroups(p.dir) // tried again with the record
	p.mu.Lock()
	p.exit = &exit
	p.mu.Unlock()
	close(p.done)
}

// release stops watching. The process is left alone.
func (p *Process) release() {
	if p.watch != nil {
		_ = p.watch.Close() // wakes the watcher; a second close only fails
		p.watcher.Wait()
	}
}

// running says whether the process has not ended.
func (p *Process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// loadProcesses finds the processes on disk.
func (s *Sandbox) loadProcesses() error {
	entries, err := os.ReadDir(filepath.Join(s.dir, processDirs))
	if err != nil {
		return err
	}
	for _, e := range entries {
		dir := filepath.Join(s.dir, processDirs, e.Name())
		var rec processRecord
		var started reexec.InitRecord
		err := readRecord(filepath.Join(dir, processFile), &rec)
		if err == nil {
			err = readRecord(filepath.Join(dir, reexec.InitFile), &started)
		}
		if errors.Is(err, os.ErrNotExist) {
			// The daemon died while it started this one, and its caller never heard
			// of it.
			ctx, cancel := killDeadline()
			err = errors.Join(killAll(ctx, []reexec.ID{rec.Shim}), removeCgroups(dir), os.RemoveAll(dir))
			cancel()
			if err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		p := &Process{
			container: rec.Container, attempt: rec.Attempt, terminal: rec.Terminal,
			dir: dir, shim: rec.Shim, init: started, done: make(chan struct{}),
		}
		if p.cgroups, err = recordedCgroups(dir); err != nil {
			return err
		}
		if err := p.startWatch(); err != nil {
			return err
		}
		s.add(p)
	}
	return nil
}

// killPatience bounds the wait for killed processes to end. Only the kernel can
// hold one up after SIGKILL.
const killPatience = 10 * time.Second

// killDeadline is for callers without a context of their own.
func killDeadline() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), killPatience)
}

// killAll kills processes and waits until all of them have ended. The first
// process of a process namespace ends after every other one in it.
func killAll(ctx context.Context, ids []reexec.ID) error {
	var open []int
	defer func() {
		for _, fd := range open {
			_ = unix.Close(fd)
		}
	}()
	var errs []error
	for _, id := range ids {
		fd, err := id.Open()
		if errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		open = append(open, fd)
		if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("kill process %d: %w", id.Pid, err))
		}
	}
	for i, fd := range open {
		if err := awaitExit(ctx, fd); err != nil {
			errs = append(errs, fmt.Errorf("process %d of %d: %w", i+1, len(open), err))
		}
	}
	for _, id := range ids {
		_, _ = unix.Wait4(id.Pid, nil, unix.WNOHANG, nil) // fails unless it was a child of ours
	}
	return errors.Join(errs...)
}

// awaitExit waits until the process of a pidfd has ended.
func awaitExit(ctx context.Context, fd int) error {
	deadline := time.Now().Add(killPatience)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	for {
		// In steps, so that a cancelled context is seen.
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100)
		switch {
		case n > 0:
			return nil
		case err != nil && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("wait for a killed process: %w", err)
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(deadline):
			return fmt.Errorf("a killed process has not ended within %v (stuck in the kernel?)", killPatience)
		}
	}
}
