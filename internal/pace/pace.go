// SPDX-License-Identifier: Apache-2.0

// Package pace runs one function at a bounded rate: at once after the first kick,
// then at most every so often however many kicks arrive, again after an error, and
// at the latest after a longest pause.
//
// It is the one loop of every part that makes a whole state true: events only kick,
// the function reads the state and applies it.
package pace

import (
	"context"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

// defaultRetry is the pause after an error when Config names none. It keeps a
// function that fails at once from spinning.
const defaultRetry = time.Second

// Config bounds the rate of a Runner.
type Config struct {
	// Name says in messages whose runner this is.
	Name string
	// MinInterval is the pause kept between the end of one run and the start of
	// the next. Kicks that arrive meanwhile become one run. 0 means no pause.
	MinInterval time.Duration
	// RetryInterval is the pause between a failed run and the next try. A kick
	// brings the try forward to MinInterval. 0 means one second.
	RetryInterval time.Duration
	// MaxInterval starts a run when none has ended for that long, kicked or not.
	// 0 means never: the loop costs nothing while nothing happens.
	MaxInterval time.Duration
	// Clock is the source of time; nil is the real one.
	Clock clock.WithTicker
	// OnError hears the error of each failed run, from the runner's goroutine and
	// before the retry is planned. nil drops it: the retry happens all the same.
	OnError func(error)
}

// Runner calls its function as often as its Config allows. Its methods are safe
// for concurrent use; the function never runs twice at the same time.
type Runner struct {
	cfg  Config
	fn   func(context.Context) error
	wake chan struct{}

	mu      sync.Mutex
	kicked  bool // a run was asked for and has not begun
	running bool
	failed  bool // the last run failed and its retry has not begun
}

// New returns a runner for fn. Nothing happens before Run is called; kicks that
// come earlier are kept.
func New(cfg Config, fn func(context.Context) error) *Runner {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	if cfg.RetryInterval <= 0 {
		cfg.RetryInterval = defaultRetry
	}
	return &Runner{cfg: cfg, fn: fn, wake: make(chan struct{}, 1)}
}

// Name returns the name given in the Config.
func (r *Runner) Name() string { return r.cfg.Name }

// Kick asks for a run that begins after this call. It never blocks.
func (r *Runner) Kick() {
	r.mu.Lock()
	r.kicked = true
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default: // a wake-up is already on its way, and it will see kicked
	}
}

// Pending returns 0 when no run is asked for, under way, or owed after an error,
// and else how many of the three hold.
func (r *Runner) Pending() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, owed := range []bool{r.kicked, r.running, r.failed} {
		if owed {
			n++
		}
	}
	return n
}

// Run calls the function as it is due, until ctx ends, and returns nil then. A run
// that is under way when ctx ends is waited for; the function gets the same ctx.
// Call Run once.
func (r *Runner) Run(ctx context.Context) error {
	lastEnd := r.cfg.Clock.Now()
	ranBefore := false
	for {
		due, planned := r.next(lastEnd, ranBefore)
		if ctx.Err() != nil {
			return nil
		}
		if planned {
			if wait := due.Sub(r.cfg.Clock.Now()); wait > 0 {
				if !r.sleep(ctx, wait) {
					continue // kicked, or ctx ended: plan again
				}
			}
			r.once(ctx)
			lastEnd, ranBefore = r.cfg.Clock.Now(), true
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-r.wake:
		}
	}
}

// next says when the next run is due, if one is planned at all.
func (r *Runner) next(lastEnd time.Time, ranBefore bool) (time.Time, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.kicked && !ranBefore:
		return lastEnd, true
	case r.kicked:
		return lastEnd.Add(r.cfg.MinInterval), true
	case r.failed:
		return lastEnd.Add(max(r.cfg.RetryInterval, r.cfg.MinInterval)), true
	case r.cfg.MaxInterval > 0:
		return lastEnd.Add(max(r.cfg.MaxInterval, r.cfg.MinInterval)), true
	}
	return time.Time{}, false
}

// sleep waits for d and reports whether it passed undisturbed. A kick disturbs it
// because a run may now be due earlier.
func (r *Runner) sleep(ctx context.Context, d time.Duration) bool {
	timer := r.cfg.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-r.wake:
		return false
	case <-timer.C():
		return true
	}
}

// once runs the function and records how it went.
func (r *Runner) once(ctx context.Context) {
	// From here on a kick asks for another run: this one may have read the state
	// before the change that the kick stands for.
	r.mu.Lock()
	r.kicked, r.failed, r.running = false, false, true
	r.mu.Unlock()

	err := r.fn(ctx)
	if err != nil && ctx.Err() == nil && r.cfg.OnError != nil {
		r.cfg.OnError(err)
	}

	r.mu.Lock()
	r.running, r.failed = false, err != nil
	r.mu.Unlock()
}
