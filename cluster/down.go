// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/sandbox"
)

// stopTimeout is how long a daemon may take to stop by itself before it is
// killed; what it owns is removed from its records either way.
const stopTimeout = 10 * time.Second

// DownOptions choose how much Down removes and proves.
type DownOptions struct {
	// Prove compares the host with its snapshot from before the lab began.
	Prove bool
	// Purge deletes the kept state.
	Purge bool
}

// DownResult is what Down did.
type DownResult struct {
	Name string `json:"name"`
	// Said is the outcome as one sentence.
	Said  string `json:"said"`
	Proof *Proof `json:"proof,omitempty"`
}

// Down ends the lab called name and removes everything that it made on the host,
// whether its daemon runs, was killed, or never was. What is removed is what the
// lab's records name, never what a pattern matches.
func Down(ctx context.Context, name string, opts DownOptions) (r DownResult, err error) {
	r.Name = name
	if err := ValidateName(name); err != nil {
		return r, err
	}
	if err := needRoot("down"); err != nil {
		return r, err
	}
	paths := PathsOf(name)
	_, statErr := os.Stat(paths.Runtime)
	found := statErr == nil
	// A daemon that stops removes its runtime directory, this file with it.
	before, beforeErr := loadHost(paths.HostBefore())
	owned := ownedBy(paths)
	if err := stopDaemon(ctx, name, paths); err != nil {
		return r, err
	}
	held, err := acquireFromDying(ctx, paths.Lock)
	if err != nil {
		return r, fmt.Errorf("lab %q: %w in another process that does not answer; see %s", name, err, paths.Log())
	}
	defer func() { err = errors.Join(err, held.release()) }()
	if err := Remove(ctx, paths); err != nil {
		return r, fmt.Errorf("lab %q: %w", name, err)
	}
	r.Said = fmt.Sprintf("lab %q is down; its state is kept in %s", name, paths.State)
	if !found {
		r.Said = fmt.Sprintf("lab %q does not run: nothing to remove", name)
	}
	if opts.Purge {
		if err := os.RemoveAll(paths.State); err != nil {
			return r, fmt.Errorf("lab %q: delete its state: %w", name, err)
		}
		r.Said = fmt.Sprintf("lab %q is down and its state is deleted", name)
	}
	if opts.Prove && found {
		if beforeErr != nil {
			return r, fmt.Errorf("lab %q is down, but there is nothing to compare with: %w", name, beforeErr)
		}
		if r.Proof, err = prove(ctx, paths, before, owned); err != nil {
			return r, fmt.Errorf("lab %q is down, but the proof failed: %w", name, err)
		}
	}
	return r, nil
}

// prove compares until the host is as it was, or for a second: the kernel ends
// a namespace after the call that dropped it has returned.
func prove(ctx context.Context, paths Paths, before HostState, owned Owned) (*Proof, error) {
	deadline := time.Now().Add(time.Second)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for ; ; <-tick.C {
		now, err := ReadHost(paths, owned)
		if err != nil {
			return nil, err
		}
		p := &Proof{Facts: map[string]int{}, Changed: before.Compare(now)}
		p.Loaded = slices.DeleteFunc(slices.Clone(now[factModules]), func(m string) bool { return slices.Contains(before[factModules], m) })
		for name, lines := range now {
			p.Facts[name] = len(lines)
		}
		p.Facts[factNamespaces] = len(owned.Namespaces)
		if len(p.Changed) == 0 || time.Now().After(deadline) || ctx.Err() != nil {
			return p, ctx.Err()
		}
	}
}

// stopDaemon asks a running daemon to end, and kills it when it does not.
func stopDaemon(ctx context.Context, name string, paths Paths) error {
	d, running := readDaemon(paths.Daemon())
	if !running {
		return nil
	}
	fd, err := unix.PidfdOpen(d.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	} else if err != nil {
		return fmt.Errorf("lab %q: watch its daemon, pid %d: %w", name, d.PID, err)
	}
	defer func() { _ = unix.Close(fd) }() // was only read
	// The pid may have been reused between the two calls; the descriptor cannot.
	if again, still := readDaemon(paths.Daemon()); !still || again != d {
		return nil
	}
	// Politely first; SIGTERM ends a start that is under way, too.
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
		if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("lab %q: end its daemon, pid %d: %w", name, d.PID, err)
		}
		if ended, err := awaitExit(ctx, fd, stopTimeout); err != nil {
			return fmt.Errorf("lab %q: wait for its daemon, pid %d: %w", name, d.PID, err)
		} else if ended {
			return nil
		}
	}
	return fmt.Errorf("lab %q: its daemon, pid %d, does not end", name, d.PID)
}

// awaitExit waits until the process of a pidfd has ended, or for the timeout.
func awaitExit(ctx context.Context, fd int, timeout time.Duration) (ended bool, err error) {
	const step = 50 * time.Millisecond // between two looks at ctx
	for deadline := time.Now().Add(timeout); time.Now().Before(deadline); {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(step.Milliseconds()))
		switch {
		case n > 0:
			return true, nil
		case err != nil && !errors.Is(err, unix.EINTR):
			return false, err
		case ctx.Err() != nil:
			return false, ctx.Err()
		}
	}
	return false, nil
}

// Remove removes from the host what the records of a lab that does not run name:
// its processes, namespaces and mounts, and its runtime directory. The lab's state
// is kept. What is gone already is success.
func Remove(ctx context.Context, paths Paths) error {
	if err := sandbox.Destroy(ctx, paths.Runtime); err != nil {
		return fmt.Errorf("remove its namespaces and processes: %w", err)
	}
	if err := os.RemoveAll(paths.Runtime); err != nil {
		return fmt.Errorf("remove its runtime directory: %w", err)
	}
	return nil
}
