// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"fmt"
	"time"
)

// Chains names chains of iptables, by table.
type Chains map[string][]string

// Sharer is implemented by modes that have chains of the same names as another mode's,
// with other rules in them, as upstream's iptables and ipvs modes do.
type Sharer interface {
	// Chains lists the chains that the mode has while it is in force.
	Chains() Chains
	// Yield says that another mode is in force and holds these chains: Cleanup leaves
	// them as they are, and so what leads to them.
	Yield(held Chains)
}

// yield tells a mode that goes which chains belong to the one that stays.
func yield(goes, stays Mode) {
	g, ok := goes.(Sharer)
	if !ok {
		return
	}
	if s, ok := stays.(Sharer); ok {
		g.Yield(s.Chains())
	}
}

// Leaver is implemented by modes whose open connections depend on what they wrote in the
// kernel. (The connections that a Drainer carries go through this process.)
type Leaver interface {
	// Drain removes what no open connection needs and takes no new ones; the result is how many
	// connections are left. Call it again until there are none, then Cleanup, which cuts
	// those that are left.
	Drain(ctx context.Context) (open int, err error)
}

// How a mode that was left is drained.
const (
	drainEvery = time.Second
	// drainTimeout is how long open connections may go on.
	drainTimeout = time.Minute
)

// leaving is a mode that was left and still has connections.
type leaving struct {
	mode  Mode
	until time.Time
	again *time.Timer // kicks the sync loop
}

// leave takes away what a mode wrote, now or, where it drains, in time.
func (p *Proxy) leave(ctx context.Context, old Mode) error {
	if p.leaving != nil {
		// The one before has had its time: two that drain at once might share a name.
		if err := p.endDrain(ctx, "another change of the mode"); err != nil {
			return err
		}
	}
	if _, ok := old.(Leaver); !ok {
		return old.Cleanup(ctx)
	}
	p.leaving = &leaving{mode: old, until: p.clock.Now().Add(drainTimeout)}
	return p.drain(ctx)
}

// drain goes on with a mode that was left. Only the sync loop calls it.
func (p *Proxy) drain(ctx context.Context) error {
	l := p.leaving
	if l == nil {
		return nil
	}
	open, err := l.mode.(Leaver).Drain(ctx)
	if err != nil {
		return fmt.Errorf("drain mode %s: %w", l.mode.Name(), err)
	}
	if open == 0 {
		return p.endDrain(ctx, "")
	}
	if p.clock.Now().After(l.until) {
		return p.endDrain(ctx, fmt.Sprintf("%d connections after %s", open, drainTimeout))
	}
	l.again = time.AfterFunc(drainEvery, p.runner.Kick)
	return nil
}

// endDrain removes the rest. cut names why connections are cut, when some are.
func (p *Proxy) endDrain(ctx context.Context, cut string) error {
	l := p.leaving
	p.leaving = nil
	l.stop()
	if cut != "" {
		p.log.Warn("open connections of the mode before are cut", "of", l.mode.Name(), "why", cut)
	}
	err := l.mode.Cleanup(ctx)
	closeMode(l.mode)
	return err
}

func (l *leaving) stop() {
	if l != nil && l.again != nil {
		l.again.Stop()
	}
}
