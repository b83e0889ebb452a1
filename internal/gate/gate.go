// SPDX-License-Identifier: Apache-2.0

// Package gate lets somebody hold up goroutines that pass a point, and let them go on.
//
// It is how a part of a lab is frozen without a process of its own to stop: the loops
// of a node pass a gate before each piece of work, and wait there while it is closed.
package gate

import (
	"context"
	"sync"
)

// Gate is a point that goroutines pass. The zero value is open, and so is a nil Gate
// for ever. It is safe for concurrent use.
type Gate struct {
	mu   sync.Mutex
	shut chan struct{} // nil while the gate is open; closed when it opens
}

// Close makes those wait who come from now on. Closing twice is closing once.
func (g *Gate) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut == nil {
		g.shut = make(chan struct{})
	}
}

// Open lets everybody pass who waits, and who comes later.
func (g *Gate) Open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut != nil {
		close(g.shut)
		g.shut = nil
	}
}

// Closed tells whether the gate is closed now.
func (g *Gate) Closed() bool { return g.waiting() != nil }

// Wait returns nil once the gate is open, at once when it is, and why ctx ended when
// that comes first.
func (g *Gate) Wait(ctx context.Context) error {
	for {
		shut := g.waiting()
		if shut == nil {
			return nil
		}
		select {
		case <-shut:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (g *Gate) waiting() chan struct{} {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.shut
}
