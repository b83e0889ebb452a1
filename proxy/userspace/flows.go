// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"sync"
)

// flows owns every goroutine of the mode: the loops that accept, and what they carry. It
// bounds how much is carried at once.
type flows struct {
	ctx    context.Context
	cancel context.CancelFunc
	slots  chan struct{}
	wg     sync.WaitGroup
}

func newFlows(limit int) *flows {
	f := &flows{slots: make(chan struct{}, limit)}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	return f
}

// take waits for a slot; false when ctx ended first.
func (f *flows) take(ctx context.Context) bool {
	select {
	case f.slots <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// tryTake takes a slot if one is free.
func (f *flows) tryTake() bool {
	select {
	case f.slots <- struct{}{}:
		return true
	default:
		return false
	}
}

// release gives a slot back.
func (f *flows) release() { <-f.slots }

func (f *flows) carrying() int { return len(f.slots) }

// end cuts all that is under way and returns when every goroutine has ended.
func (f *flows) end() {
	f.cancel()
	f.wg.Wait()
}
