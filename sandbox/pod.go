// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// Sandbox is a pod: a network namespace and what runs in it. It is safe for
// concurrent use.
type Sandbox struct {
	runtime *Runtime
	spec    Spec
	dir     string
	ns      *netns.NS

	mu       sync.Mutex
	procs    []*Process // in order of container and attempt
	gone     bool
	sessions map[*session]context.CancelCauseFunc
	live     sync.WaitGroup // of sessions
}

// Spec returns what the sandbox was made from.
func (s *Sandbox) Spec() Spec { return s.spec }

// NetNS returns the pod's own network namespace, also when its processes live in
// another. The handle is the sandbox's: it is closed by Remove.
func (s *Sandbox) NetNS() *netns.NS { return s.ns }

// Dir returns the sandbox's directory, where other parts may keep files of the
// pod that should go with it. Names that begin with "p" or end with ".json" are
// the sandbox's own.
func (s *Sandbox) Dir() string { return s.dir }

// pins returns the pins that belong to the sandbox.
func (s *Sandbox) pins() []string {
	at := func(parts ...string) string {
		return filepath.Join(append([]string{s.runtime.dir, pinsName}, parts...)...)
	}
	return []string{at(podPrefix + s.spec.ID), at(utsName, s.spec.ID), at(ipcName, s.spec.ID)}
}

// make makes a new sandbox. On an error the caller clears what is there.
func (s *Sandbox) make() error {
	if err := os.MkdirAll(filepath.Join(s.dir, processDirs), 0o700); err != nil {
		return err
	}
	if err := writeRecord(filepath.Join(s.dir, specFile), s.spec); err != nil {
		return err
	}
	ns, err := s.runtime.pool.take()
	if err != nil {
		return err
	}
	s.ns, err = pinNetNS(ns, s.pins()[0])
	return err
}

// load finds a sandbox on disk.
func (s *Sandbox) load(id string) error {
	if err := readRecord(filepath.Join(s.dir, specFile), &s.spec); err != nil {
		return err
	}
	if s.spec.ID != id {
		return fmt.Errorf("its record is of %q", s.spec.ID)
	}
	var err error
	if s.ns, err = openPin(s.pins()[0]); err != nil {
		return err
	}
	return s.loadProcesses()
}

// release ends the sessions of Exec and lets go of the processes' handles.
func (s *Sandbox) release() {
	s.mu.Lock()
	procs := s.procs
	s.gone = true
	for _, cancel := range s.sessions {
		cancel(ErrNotRunning)
	}
	s.mu.Unlock()
	s.live.Wait()
	for _, p := range procs {
		p.release()
	}
}

// Processes returns the container processes that have been started, those that
// have ended included, in order of container and attempt. Of a container's ended
// processes the last two are kept.
func (s *Sandbox) Processes() []*Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.procs)
}

// add puts a process into its place.
func (s *Sandbox) add(p *Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.procs = append(s.procs, p)
	slices.SortFunc(s.procs, func(a, b *Process) int {
		if c := strings.Compare(a.container, b.container); c != 0 {
			return c
		}
		return a.attempt - b.attempt
	})
}

// newest returns the last attempt of a container, or nil.
func (s *Sandbox) newest(container string) *Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found *Process
	for _, p := range s.procs {
		if p.container == container {
			found = p
		}
	}
	return found
}

// sharedNamespaces makes sure that the pod has the namespaces which its containers
// share besides the network: host name and System V IPC. A pod of built-in servers
// only never needs them. The caller holds the pod's lock.
func (s *Sandbox) sharedNamespaces() (uts, ipc string, err error) {
	pins := s.pins()
	uts, ipc = pins[1], pins[2]
	missing := false
	for _, p := range []string{uts, ipc} {
		switch mounted, err := isMountPoint(p); {
		case errors.Is(err, os.ErrNotExist) || err == nil && !mounted:
			missing = true
		case err != nil:
			return "", "", err
		}
	}
	if !missing {
		return uts, ipc, nil
	}
	done := make(chan error)
	go func() {
		// The thread has left the process's namespaces and is of no more use: it
		// ends with this goroutine, which never unlocks it.
		runtime.LockOSThread()
		done <- pinShared(s.spec.Hostname, uts, ipc)
	}()
	return uts, ipc, <-done
}

// pinShared moves the thread into new namespaces and pins them.
func pinShared(hostname, uts, ipc string) error {
	if err := unix.Unshare(unix.CLONE_NEWUTS | unix.CLONE_NEWIPC); err != nil {
		return fmt.Errorf("make the pod's shared namespaces: %w", err)
	}
	if err := unix.Sethostname([]byte(hostname)); err != nil {
		return fmt.Errorf("set the host name %q: %w", hostname, err)
	}
	for path, kind := range map[string]string{uts: "uts", ipc: "ipc"} {
		if err := unpin(path); err != nil {
			return err
		}
		if err := bind("/proc/thread-self/ns/"+kind, path); err != nil {
			return err
		}
	}
	return nil
}
