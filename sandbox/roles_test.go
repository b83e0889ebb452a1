// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox/reexec"
)

// Many probes that end together ask for the next process while the thread is busy:
// nobody may wait for somebody who waits for him.
func TestRolesUnderPressure(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	r := startRoles("/proc/self/exe")
	busy, release := make(chan struct{}), make(chan struct{})
	if err := r.submit(func() { close(busy); <-release }); err != nil {
		t.Fatal(err)
	}
	<-busy
	var asked, all sync.WaitGroup
	for range 200 {
		asked.Add(1)
		all.Go(func() {
			asked.Done()
			r.ahead(reexec.RoleShim)
		})
	}
	for range 2 {
		asked.Add(1)
		all.Go(func() {
			asked.Done()
			p, err := r.take(reexec.RoleShim)
			if err != nil {
				t.Error(err)
			}
			if err := p.Drop(); err != nil {
				t.Error(err)
			}
		})
	}
	asked.Wait()
	close(release)
	done := make(chan struct{})
	go func() { defer close(done); all.Wait() }()
	patience := time.NewTimer(20 * time.Second)
	defer patience.Stop()
	select {
	case <-done:
	case <-patience.C:
		t.Fatal("not all that asked for a process were answered within 20 s")
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	if _, err := r.take(reexec.RoleShim); !errors.Is(err, ErrClosed) {
		t.Errorf("after the stop: %v", err)
	}
	r.ahead(reexec.RoleShim) // nobody is there, and nobody waits for it
}
