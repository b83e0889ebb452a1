// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// pendingSwitch is a change of the mode that the sync loop is asked for.
type pendingSwitch struct {
	to                Mode
	nodePortAddresses []string
	done              chan error // has room for the answer
}

// Switch makes a running proxy use another mode, with NodePortAddresses as in
// Config. It returns when the kernel holds the new mode's rules, read back, and
// what the old one wrote is gone. In between both are there, so no connection is
// refused, and conntrack keeps its hooks, so none is cut. When the new mode cannot
// do it, the old one stays and the error says why.
func (p *Proxy) Switch(ctx context.Context, to Mode, nodePortAddresses []string) error {
	if err := p.Held(); err != nil {
		return err
	}
	if err := to.Probe(ctx); err != nil {
		return fmt.Errorf("proxy of node %s: mode %s: %w", p.cfg.NodeName, to.Name(), err)
	}
	s := &pendingSwitch{to: to, nodePortAddresses: nodePortAddresses, done: make(chan error, 1)}
	p.mu.Lock()
	if p.switching != nil {
		p.mu.Unlock()
		return fmt.Errorf("proxy of node %s: another change of its mode is under way; try again", p.cfg.NodeName)
	}
	p.switching = s
	p.mu.Unlock()
	p.runner.Kick()
	select {
	case err := <-s.done:
		if err != nil {
			return fmt.Errorf("proxy of node %s: change to mode %s: %w", p.cfg.NodeName, to.Name(), err)
		}
		return nil
	case <-ctx.Done():
		p.mu.Lock()
		if p.switching == s {
			p.switching = nil // not begun, and now it will not be
		}
		p.mu.Unlock()
		return fmt.Errorf("proxy of node %s: change to mode %s: %w", p.cfg.NodeName, to.Name(), context.Cause(ctx))
	}
}

// pendingMode carries out a change of the mode, if one was asked for. Only the
// sync loop calls it.
func (p *Proxy) pendingMode(ctx context.Context) {
	p.mu.Lock()
	s := p.switching
	p.switching = nil
	p.mu.Unlock()
	if s != nil {
		s.done <- p.switchMode(ctx, s)
	}
}

func (p *Proxy) switchMode(ctx context.Context, s *pendingSwitch) error {
	p.mu.Lock()
	facts := p.facts
	facts.NodePortAddresses = s.nodePortAddresses
	snapshot := p.decider.Decide(facts)
	p.mu.Unlock()
	old := p.cfg.Mode
	// Another form of the same mode owns the same tables: it takes them over.
	same := old.Name() == s.to.Name()
	if _, carries := old.(Drainer); carries && same {
		// It holds its ports and connections, and has no other form: it is made to look
		// at all of its rules again.
		s.to = old
		if r, ok := old.(Resetter); ok {
			r.Reset()
		}
	}
	if p.leaving != nil && p.leaving.mode.Name() == s.to.Name() {
		// Back to the mode that drains: it takes over what is left of itself.
		p.leaving.stop()
		closeMode(p.leaving.mode)
		p.leaving = nil
	}

	program, err := s.to.Render(snapshot)
	if err == nil {
		err = program.Apply(ctx)
	}
	if err != nil {
		if !same {
			yield(s.to, old)
			err = errors.Join(err, s.to.Cleanup(context.WithoutCancel(ctx)))
		}
		if s.to != old {
			closeMode(s.to)
		}
		if r, ok := old.(Resetter); ok {
			r.Reset()
		}
		return err
	}
	p.mu.Lock()
	p.cfg.Mode, p.facts, p.current = s.to, facts, snapshot
	p.status.Mode = s.to.Name()
	p.mu.Unlock()
	p.log = p.cfg.Log.With("node", p.cfg.NodeName, "mode", s.to.Name())
	p.log.Info(usingMode(s.to))
	p.checked = p.clock.Now()
	if !same {
		yield(old, s.to)
		err = p.leave(ctx, old)
	}
	if s.to != old && (p.leaving == nil || p.leaving.mode != old) {
		p.retire(old)
	}
	if err != nil {
		return fmt.Errorf("the new rules are in force, and of the old ones something is left: %w", err)
	}
	if !same && p.cfg.Conntrack != nil {
		// Flows of UDP clients that keep their port still lead where the old rules did.
		if _, err := CleanConntrack(ctx, p.cfg.Conntrack, nil, snapshot, p.cfg.ServiceCIDRs, s.to); err != nil {
			return fmt.Errorf("the new rules are in force, and stale UDP flows are left: %w", err)
		}
	}
	return nil
}

// retire lets go of a mode that another took over from. One that carries connections
// is kept until they have ended.
func (p *Proxy) retire(m Mode) {
	d, ok := m.(Drainer)
	if !ok {
		closeMode(m)
		return
	}
	d.Retire()
	p.retired = append(p.retired, d)
	p.closeRetired(false)
}

// closeRetired closes retired modes that carry nothing any more, or all.
func (p *Proxy) closeRetired(all bool) {
	p.retired = slices.DeleteFunc(p.retired, func(d Drainer) bool {
		if !all && d.Carrying() > 0 {
			return false
		}
		d.Close()
		return true
	})
}

// usingMode is what kube-proxy says of the mode that it uses.
func usingMode(m Mode) string { return "Using " + m.Name() + " Proxier" }

func closeMode(m Mode) {
	if c, ok := m.(Closer); ok {
		c.Close()
	}
}
