// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"fmt"
)

// Hold is what keeps a running proxy from its work. It goes on watching the API, and
// has everything to apply once it is free.
type Hold int

const (
	// Free is a proxy at work.
	Free Hold = iota
	// Frozen is one that applies nothing, as a kube-proxy that was stopped by a
	// signal: what is in the kernel stays as it is.
	Frozen
	// Flushed is one that is frozen after everything that its mode wrote was removed.
	Flushed
)

// String is the hold in one word.
func (h Hold) String() string {
	return [...]string{"free", "frozen", "flushed"}[h]
}

// SetHold holds a proxy or lets it go, and returns when the kernel is as that says:
// with Flushed the rules are gone, with Free they are all back and were read back.
// Setting what is set already is success. Before Run it only takes note.
func (p *Proxy) SetHold(ctx context.Context, h Hold) error {
	done := make(chan error, 1)
	p.mu.Lock()
	// What is flushed already is looked at again: the first try may have failed.
	same := p.status.Hold == h && h != Flushed
	p.status.Hold = h
	running := p.ready && !same
	if running {
		p.holders = append(p.holders, done)
	}
	p.mu.Unlock()
	if !running {
		return nil
	}
	p.runner.Kick()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("proxy of node %s: become %s: %w", p.cfg.NodeName, h, err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("proxy of node %s: become %s: %w", p.cfg.NodeName, h, context.Cause(ctx))
	}
}

// Held is why a proxy that is held does not change its mode.
func (p *Proxy) Held() error {
	if h := p.Status().Hold; h != Free {
		return fmt.Errorf("proxy of node %s is %s by a fault; clear that first", p.cfg.NodeName, h)
	}
	return nil
}

// takeHolders returns those who wait for the sync that begins.
func (p *Proxy) takeHolders() []chan error {
	p.mu.Lock()
	defer p.mu.Unlock()
	waiting := p.holders
	p.holders = nil
	return waiting
}

// held does what a hold asks for and tells whether there is one. Only the sync loop
// calls it.
func (p *Proxy) held(ctx context.Context) (bool, error) {
	switch p.Status().Hold {
	case Flushed:
		if p.flushed {
			return true, nil
		}
		if err := p.cfg.Mode.Cleanup(ctx); err != nil {
			return true, fmt.Errorf("remove the rules of mode %s: %w", p.cfg.Mode.Name(), err)
		}
		p.flushed = true
		p.mu.Lock()
		p.current = nil
		p.mu.Unlock()
		return true, nil
	case Frozen:
		return true, nil
	}
	if p.flushed {
		// The mode remembers what it wrote before.
		if r, ok := p.cfg.Mode.(Resetter); ok {
			r.Reset()
		}
		p.flushed = false
	}
	return false, nil
}
