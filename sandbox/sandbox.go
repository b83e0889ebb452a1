// SPDX-License-Identifier: Apache-2.0

// Package sandbox makes pods out of Linux namespaces: the network namespace of
// every pod and node, and the processes of containers. It is the only code that
// mounts.
//
// # What it owns, and how it remembers
//
// Everything lies below one runtime directory:
//
//	boot                       the boot that the records below belong to
//	netns/                     a tmpfs of the lab's own; NAME pins a network namespace
//	netns/.uts, .ipc           what the containers of a pod share besides
//	sandboxes/ID/spec.json     a pod
//	sandboxes/ID/p/NAME.N/     try N of its container NAME: process.json names its
//	                           shim, init.json its first process, exit.json its end
//
// Records are written before what they describe can outlive the daemon, so the
// directory alone is enough: [Open] after kill -9 finds pods and processes as they
// are, and [Destroy] needs no daemon. A process is known by pid and start time,
// a namespace by its pin. Nothing is ever looked for by name.
//
// # What lives where
//
// A pod without processes (a built-in server) is nothing but its namespace. A
// container's process has a shim beside it, see package reexec, which outlives the
// daemon. Its root is a file system of its own, made for it and gone with it.
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// Errors of Exec and Start that callers tell apart.
var (
	// ErrProgramNotFound says that the container has no such program. A shell would
	// exit with 127.
	ErrProgramNotFound = errors.New("program not found")
	// ErrProgramDenied says that the program may not be executed (126).
	ErrProgramDenied = errors.New("program cannot be executed")
	// ErrNotRunning says that the container's process has ended.
	ErrNotRunning = errors.New("container is not running")
	// ErrClosed says that the Runtime was closed.
	ErrClosed = errors.New("sandbox runtime is closed")
)

// Config says where a Runtime keeps what it owns.
type Config struct {
	// Dir is the runtime directory of the lab, on a file system that a reboot may
	// or may not clear. One Runtime at a time may use it.
	Dir string
	// Log hears about what was found and repaired; nil drops it.
	Log *slog.Logger
}

// Runtime holds the namespaces and sandboxes of a lab. It is safe for concurrent
// use.
type Runtime struct {
	dir  string
	log  *slog.Logger
	busy keyed // serialises what happens to one name

	mu     sync.Mutex
	spaces map[string]*netns.NS // open handles by name
	boxes  map[string]*Sandbox
	closed bool

	pool  *pool
	roles *roles
	tools sync.Mutex // guards making the busybox directory
}

// Open takes over what is in cfg.Dir, or starts there with nothing. Pods and
// processes that a killed daemon left are in List with their state.
func Open(cfg Config) (_ *Runtime, err error) {
	if !filepath.IsAbs(cfg.Dir) {
		return nil, fmt.Errorf("sandbox: runtime directory %q is no absolute path", cfg.Dir)
	}
	r := &Runtime{
		dir: filepath.Clean(cfg.Dir), log: cfg.Log,
		spaces: make(map[string]*netns.NS), boxes: make(map[string]*Sandbox),
	}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	// Descriptors that this process inherited (a pipe of whoever started the lab)
	// must not reach shims, which outlive it, nor containers.
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, fmt.Errorf("sandbox: keep descriptors from children: %w", err)
	}
	if err := os.MkdirAll(r.sandboxesDir(), 0o700); err != nil {
		return nil, fmt.Errorf("sandbox: %w", err)
	}
	if err := checkBoot(r.dir); err != nil {
		return nil, fmt.Errorf("sandbox: %w", err)
	}
	if err := mountPins(r.dir); err != nil {
		return nil, fmt.Errorf("sandbox: %w", err)
	}
	if err := r.adopt(); err != nil {
		return nil, errors.Join(fmt.Errorf("sandbox: %w", err), r.Close())
	}
	r.pool = startPool(r.log, newPodNetNS)
	r.roles = startRoles(r.Program())
	return r, nil
}

// Close lets go of handles and of idle namespaces. What the lab has stays on disk
// and goes on running; Done of a Process that has not ended is never closed then.
func (r *Runtime) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	boxes, spaces := r.boxes, r.spaces
	r.mu.Unlock()

	var errs []error
	if r.pool != nil {
		errs = append(errs, r.pool.stop())
	}
	if r.roles != nil {
		errs = append(errs, r.roles.stop())
	}
	for _, s := range boxes {
		s.release()
	}
	for _, ns := range spaces {
		errs = append(errs, ns.Close())
	}
	return errors.Join(errs...)
}

// Destroy ends every process and removes every namespace, mount and record of the
// lab, then closes r. What is gone already is success.
func (r *Runtime) Destroy(ctx context.Context) error {
	err := r.Close()
	return errors.Join(err, Destroy(ctx, r.dir))
}

// Dir returns the runtime directory.
func (r *Runtime) Dir() string { return r.dir }

func (r *Runtime) sandboxesDir() string { return filepath.Join(r.dir, "sandboxes") }

// validName is what may name a namespace, a sandbox or a container: it becomes
// part of a path. Names that begin with a dot are the package's own.
var validName = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}$`)

func checkName(what, name string) error {
	if !validName.MatchString(name) {
		return fmt.Errorf("%s name %q: want letters, digits, '-', '_' and '.', not beginning with '.'", what, name)
	}
	return nil
}

// Create makes the sandbox of a pod: its network namespace with lo up, no other
// link, and none of the host's settings. A sandbox that exists is returned as it
// is.
func (r *Runtime) Create(ctx context.Context, spec Spec) (*Sandbox, error) {
	if err := checkName("sandbox", spec.ID); err != nil {
		return nil, err
	}
	if spec.Network != "" {
		if err := checkName("network namespace", spec.Network); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if spec.Hostname == "" {
		spec.Hostname = spec.Name
	}
	defer r.busy.lock("pod-" + spec.ID)()
	r.mu.Lock()
	s, closed := r.boxes[spec.ID], r.closed
	r.mu.Unlock()
	switch {
	case closed:
		return nil, ErrClosed
	case s != nil:
		return s, nil
	}
	s = &Sandbox{runtime: r, spec: spec, dir: filepath.Join(r.sandboxesDir(), spec.ID)}
	if err := s.make(); err != nil {
		return nil, errors.Join(fmt.Errorf("sandbox of pod %s/%s: %w", spec.Namespace, spec.Name, err), r.clear(ctx, s))
	}
	r.mu.Lock()
	r.boxes[spec.ID] = s
	r.mu.Unlock()
	return s, nil
}

// Remove kills the processes of a sandbox, waits for their end, and takes its
// namespaces and records away. The network goes with the namespace; sockets that
// other code has open in it have to be closed first, since they hold it. No
// sandbox by that ID is success.
func (r *Runtime) Remove(ctx context.Context, id string) error {
	if err := checkName("sandbox", id); err != nil {
		return err
	}
	defer r.busy.lock("pod-" + id)()
	r.mu.Lock()
	s, closed := r.boxes[id], r.closed
	r.mu.Unlock()
	switch {
	case closed:
		return ErrClosed
	case s == nil:
		return nil
	}
	if err := r.clear(ctx, s); err != nil {
		return fmt.Errorf("remove sandbox %s: %w", id, err)
	}
	r.mu.Lock()
	delete(r.boxes, id)
	r.mu.Unlock()
	return nil
}

// clear takes away everything of s that there is.
func (r *Runtime) clear(ctx context.Context, s *Sandbox) error {
	if err := killAll(ctx, processIDs(s.dir)); err != nil {
		return err
	}
	s.release()
	var errs []error
	if s.ns != nil {
		errs = append(errs, s.ns.Close())
	}
	for _, pin := range s.pins() {
		errs = append(errs, unpin(pin))
	}
	errs = append(errs, removeAllCgroups(s.dir), os.RemoveAll(s.dir))
	return errors.Join(errs...)
}

// List returns the sandboxes, in order of their IDs.
func (r *Runtime) List() []*Sandbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := make([]*Sandbox, 0, len(r.boxes))
	for _, s := range r.boxes {
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b *Sandbox) int { return strings.Compare(a.spec.ID, b.spec.ID) })
	return list
}

// Get returns the sandbox of a pod's UID, or nil.
func (r *Runtime) Get(id string) *Sandbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.boxes[id]
}

// keyed is a lock for each name.
type keyed struct {
	mu    sync.Mutex
	locks map[string]*keyLock
}

type keyLock struct {
	mu   sync.Mutex
	held int // by one, and waited for by the others
}

// lock locks a name and returns what unlocks it.
func (k *keyed) lock(name string) func() {
	k.mu.Lock()
	if k.locks == nil {
		k.locks = make(map[string]*keyLock)
	}
	l := k.locks[name]
	if l == nil {
		l = &keyLock{}
		k.locks[name] = l
	}
	l.held++
	k.mu.Unlock()
	l.mu.Lock()
	return func() {
		l.mu.Unlock()
		k.mu.Lock()
		defer k.mu.Unlock()
		if l.held--; l.held == 0 {
			delete(k.locks, name)
		}
	}
}
