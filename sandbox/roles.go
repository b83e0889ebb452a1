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
	// work is received by the thread, which runs what it got; early holds the
	// roles to start ahead. Nobody sends while it holds the lock.
	work  chan func()
	early chan string
	quit  chan struct{}
	done  sync.WaitGroup

	mu    sync.Mutex
	ready map[string]*reexec.Role
}

func startRoles(program string) *roles {
	r := &roles{
		program: program, work: make(chan func()), early: make(chan string, 8), quit: make(chan struct{}),
		ready: make(map[string]*reexec.Role),
	}
	r.done.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		r.serve()
	})
	return r
}

// serve is the thread's loop. Who waits for a process comes before a process for
// which nobody waits yet.
func (r *roles) serve() {
	for {
		select {
		case f := <-r.work:
			f()
			continue
		default:
		}
		select {
		case f := <-r.work:
			f()
		case role := <-r.early:
			r.prepare(role)
		case <-r.quit:
			return
		}
	}
}

// submit hands f to the thread, which runs it when submit returned nil.
func (r *roles) submit(f func()) error {
	select {
	case r.work <- f:
		return nil
	case <-r.quit:
		return ErrClosed
	}
}

// take returns a process in a role that waits for work. The caller owns it.
func (r *roles) take(role string) (*reexec.Role, error) {
	r.mu.Lock()
	waiting := r.ready[role]
	delete(r.ready, role)
	r.mu.Unlock()
	if waiting != nil {
		return waiting, nil
	}
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
	return waiting, err
}

// ahead starts a process in a role for the next take. It is called when the
// present one is under way, so as not to take the processor from it. It never
// waits: with many asking at once, some go without, and take starts its own.
func (r *roles) ahead(role string) {
	select {
	case r.early <- role:
	default:
	}
}

// prepare starts a process in a role unless one waits already. When it cannot be
// started, take tries again and says why that fails.
func (r *roles) prepare(role string) {
	r.mu.Lock()
	enough := r.ready[role] != nil
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

// stop ends the thread and the processes that wait.
func (r *roles) stop() error {
	close(r.quit)
	r.done.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, p := range r.ready {
		errs = append(errs, p.Drop())
	}
	clear(r.ready)
	return errors.Join(errs...)
}
