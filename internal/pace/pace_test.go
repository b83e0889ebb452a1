// SPDX-License-Identifier: Apache-2.0

package pace

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/kplab/kplab/internal/nettest"
)

// bench drives a Runner on a clock that only moves when told to.
type bench struct {
	t      *testing.T
	clock  *clocktesting.FakeClock
	runner *Runner
	// begun gets one value per run; the run then waits for its result.
	begun  chan struct{}
	result chan error
}

const patience = 10 * time.Second

func newBench(t *testing.T, cfg Config) *bench {
	t.Helper()
	b := &bench{
		t:      t,
		clock:  clocktesting.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)),
		begun:  make(chan struct{}),
		result: make(chan error),
	}
	cfg.Clock = b.clock
	ctx, cancel := context.WithCancel(context.Background())
	b.runner = New(cfg, func(ctx context.Context) error {
		select {
		case b.begun <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		select {
		case err := <-b.result:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := b.runner.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	return b
}

func (b *bench) begins() {
	b.t.Helper()
	select {
	case <-b.begun:
	case <-time.After(patience):
		b.t.Fatal("no run began")
	}
}

func (b *bench) run(err error) {
	b.t.Helper()
	b.begins()
	b.result <- err
}

func (b *bench) until(what string, cond func() bool) {
	b.t.Helper()
	nettest.Until(b.t, patience, what, cond)
}

// step waits until the runner sleeps and then moves the clock; no run may begin
// before the last step of a wait.
func (b *bench) step(d time.Duration) {
	b.t.Helper()
	b.until("runner sleeps on its timer", b.clock.HasWaiters)
	select {
	case <-b.begun:
		b.t.Fatal("a run began too early")
	default:
	}
	b.clock.Step(d)
}

func TestFirstKickRunsAtOnce(t *testing.T) {
	b := newBench(t, Config{Name: "x", MinInterval: time.Minute})
	if b.runner.Pending() != 0 || b.runner.Name() != "x" {
		t.Fatal("fresh runner is not idle")
	}
	b.runner.Kick()
	b.begins() // the clock has not moved
	if b.runner.Pending() != 1 {
		t.Fatalf("pending while running: %d", b.runner.Pending())
	}
	b.runner.Kick()
	if b.runner.Pending() != 2 {
		t.Fatalf("pending while running and kicked: %d", b.runner.Pending())
	}
	b.result <- nil
	b.until("run ends", func() bool { return b.runner.Pending() == 1 })
	b.step(time.Minute)
	b.run(nil)
	b.until("idle", func() bool { return b.runner.Pending() == 0 })
	if b.clock.HasWaiters() {
		t.Fatal("an idle runner holds a timer")
	}
}

func TestBurstBecomesOneRun(t *testing.T) {
	b := newBench(t, Config{MinInterval: time.Minute})
	b.runner.Kick()
	b.run(nil)
	b.until("idle", func() bool { return b.runner.Pending() == 0 })
	for range 100 {
		b.runner.Kick()
	}
	b.step(59 * time.Second)
	b.step(time.Second)
	b.run(nil)
	b.until("idle", func() bool { return b.runner.Pending() == 0 })
	// Long after the pause, the next kick is at once again.
	b.clock.Step(time.Hour)
	b.runner.Kick()
	b.run(nil)
}

func TestErrorIsRetriedAndKickBringsItForward(t *testing.T) {
	var mu sync.Mutex
	var heard []error
	boom := errors.New("boom")
	b := newBench(t, Config{MinInterval: time.Second, RetryInterval: time.Minute, OnError: func(err error) {
		mu.Lock()
		heard = append(heard, err)
		mu.Unlock()
	}})
	b.runner.Kick()
	b.run(boom)
	b.until("retry owed", func() bool { return b.runner.Pending() == 1 })
	b.step(59 * time.Second)
	b.step(time.Second)
	b.run(boom)
	b.until("retry owed", func() bool { return b.runner.Pending() == 1 })
	b.until("runner sleeps", b.clock.HasWaiters)
	b.runner.Kick()
	b.until("kick planned anew", func() bool { return len(b.runner.wake) == 0 })
	b.step(time.Second)
	b.run(nil)
	b.until("idle", func() bool { return b.runner.Pending() == 0 })
	mu.Lock()
	defer mu.Unlock()
	if len(heard) != 2 || !errors.Is(heard[0], boom) {
		t.Fatalf("heard %v", heard)
	}
}

func TestMaxIntervalRunsUnasked(t *testing.T) {
	b := newBench(t, Config{MinInterval: time.Second, MaxInterval: time.Hour})
	for range 3 {
		b.step(59 * time.Minute)
		b.step(time.Minute)
		b.run(nil)
	}
}

func TestZeroRetryDoesNotSpin(t *testing.T) {
	b := newBench(t, Config{})
	b.runner.Kick()
	b.run(errors.New("boom"))
	b.step(defaultRetry / 2)
	b.step(defaultRetry / 2)
	b.run(nil)
}

func TestKickBeforeRunIsKept(t *testing.T) {
	ran := make(chan struct{}, 1)
	r := New(Config{}, func(context.Context) error { ran <- struct{}{}; return nil })
	r.Kick()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.Run(ctx) })
	select {
	case <-ran:
	case <-time.After(patience):
		t.Error("early kick was lost")
	}
	cancel()
	wg.Wait()
}
