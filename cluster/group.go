// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// group runs functions until they are told to stop.
type group struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	// failed receives the first error of a function that was not told to stop.
	failed chan error
}

func newGroup() *group {
	ctx, cancel := context.WithCancel(context.Background())
	return &group{ctx: ctx, cancel: cancel, failed: make(chan error, 1)}
}

func (g *group) run(name string, fn func(context.Context) error) {
	g.wg.Go(func() {
		err := fn(g.ctx)
		if g.ctx.Err() != nil {
			return // told to stop; what it says of that is no failure
		}
		if errors.Is(err, errEnded) {
			return
		}
		if err == nil {
			err = errors.New("it ended by itself")
		}
		select {
		case g.failed <- fmt.Errorf("%s: %w", name, err):
		default:
		}
	})
}

// runApart is run for a function that can be ended before the others: cancel tells it to
// stop, and end waits until it has.
func (g *group) runApart(name string, fn func(context.Context) error) (cancel, end func()) {
	ctx, cancel := context.WithCancel(g.ctx)
	done := make(chan struct{})
	g.run(name, func(context.Context) error {
		defer close(done)
		err := fn(ctx)
		if ctx.Err() != nil {
			return errEnded // what it says of that is no failure
		}
		return err
	})
	return cancel, func() {
		cancel()
		<-done
	}
}

// errEnded is what a function of runApart returns that was told to stop.
var errEnded = errors.New("it was ended")

// await waits for ready, or for the first failure of the group.
func (g *group) await(ctx context.Context, ready func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var answer error
	done := make(chan struct{})
	go func() {
		defer close(done)
		answer = ready(ctx)
	}()
	select {
	case <-done:
		return answer
	case err := <-g.failed:
		cancel()
		<-done // what it says of being told to end is not why
		return err
	}
}

// stop tells all to stop and waits until they have.
func (g *group) stop() {
	g.cancel()
	g.wg.Wait()
}
