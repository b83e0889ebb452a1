// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/sandbox/reexec"
)

// roles starts this program in its roles. Starting it takes most of the time of a
// container's start or an Exec, since it is large; so of each role that was used
// once, the next one is started ahead and waits.
//
// All are started by one thread, which stays: the kernel kills kplab-init when the
// daemon dies, and that bond is to a thread, while Go's threads come and go.
type roles struct {
	program string
	work    chan func()
	done    sync.WaitGroup

	mu      sync.Mutex
	ready   map[string]*reexec.Role
	stopped bool
}

func startRoles(program string) *roles {
	r := &roles{program: program, work: make(chan func(), 64), ready: make(map[string]*reexec.Role)}
	r.done.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for f := range r.work {
			f()
		}
	})
	return r
}

// submit queues f for the thread.
func (r *roles) submit(f func()) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return ErrClosed
	}
	r.work <- f
	return nil
}

// take returns a process in a role that waits for work. The caller owns it.
func (r *roles) take(role string) (*reexec.Role, error) {
	r.mu.Lock()
	waiting := r.ready[role]
	delete(r.ready, role)
	r.mu.Unlock()
	if waiting == nil {
		var err error
		finished := make(chan struct{})
		submitted := r.submit(func() {
			defer close(finished)
			waiting, err = reexec.Spawn(role, r.program)
		})
		if submitted != nil {
			return nil, submitted
		}
		<-finished
		if err != nil {
			return nil, err
		}
	}
	return waiting, nil
}

// ahead starts a process in a role for the next take. It is called when the
// present one is under way, so as not to take the processor from it.
func (r *roles) ahead(role string) {
	// When it cannot be started, or is not wanted any more, take does without.
	_ = r.submit(func() {
		r.mu.Lock()
		enough := r.ready[role] != nil || r.stopped
		r.mu.Unlock()
		if enough {
			return
		}
		waiting, err := reexec.Spawn(role, r.program)
		if err != nil {
			return
		}
		r.mu.Lock()
		r.ready[role] = waiting
		r.mu.Unlock()
	})
}

// give takes a process in a role and gives it work. record, if any, is called in
// between with its pid. One that has died while it waited is replaced.
func (r *roles) give(role string, config any, files [3]int, record func(pid int) error) (*reexec.Role, error) {
	for try := 0; ; try++ {
		p, err := r.take(role)
		if err != nil {
			return nil, err
		}
		if record != nil {
			err = record(p.Pid)
		}
		if err == nil {
			err = p.Give(config, files)
		}
		if err == nil {
			return p, nil
		}
		dropped := p.Drop()
		if !errors.Is(err, unix.EPIPE) || try > 0 {
			return nil, errors.Join(err, dropped)
		}
	}
}

// stop ends the thread and those who wait.
func (r *roles) stop() error {
	r.mu.Lock()
	r.stopped = true
	close(r.work)
	r.mu.Unlock()
	r.done.Wait()
	var errs []error
	for _, p := range r.ready {
		errs = append(errs, p.Drop())
	}
	return errors.Join(errs...)
}
