// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nfnl"
	"github.com/kplab/kplab/proxy"
)

// Layout says how Services are put into the table.
type Layout string

const (
	// LayoutUpstream is kube-proxy's: a chain with a map for each Service port.
	LayoutUpstream Layout = "upstream"
	// LayoutCompact is one map for all endpoints; see compact.go.
	LayoutCompact Layout = "compact"
)

// Layouts lists the layouts, the default one first.
func Layouts() []Layout { return []Layout{LayoutUpstream, LayoutCompact} }

// ParseLayout reads the name of a layout; empty is the default.
func ParseLayout(name string) (Layout, error) {
	if name == "" {
		return LayoutUpstream, nil
	}
	for _, l := range Layouts() {
		if string(l) == name {
			return l, nil
		}
	}
	return "", fmt.Errorf("unknown layout %q of proxy mode nftables: it is %s or %s", name, LayoutUpstream, LayoutCompact)
}

// Options says where a Mode works and how.
type Options struct {
	// NetNS is the node's network namespace; nil means the current one. It stays
	// the caller's to close.
	NetNS *netns.NS
	// Layout is LayoutUpstream when empty.
	Layout Layout
	// Probed says that somebody has found out already that the kernel can do all
	// of this (Detect).
	Probed bool
	// MaxBatch limits the bytes of one transaction; 0 means what the socket takes.
	MaxBatch int
}

// Mode is the nftables mode of one node.
type Mode struct {
	opts Options

	mu   sync.Mutex // guards last, which Render uses
	last map[corev1.IPFamily]*ruleset

	applied map[family]*state // what the kernel has; absent: unknown
	conn    *nfnl.Conn        // see dial
	// For Metrics.
	syncFailures, cleanupFailures int
}

// New returns the mode. It touches nothing.
func New(opts Options) *Mode {
	if opts.Layout == "" {
		opts.Layout = LayoutUpstream
	}
	return &Mode{opts: opts, last: map[corev1.IPFamily]*ruleset{}, applied: map[family]*state{}}
}

// Name implements proxy.Mode.
func (m *Mode) Name() string { return "nftables" }

// Layout is the layout that the mode writes.
func (m *Mode) Layout() Layout { return m.opts.Layout }

// Form implements proxy.Former.
func (m *Mode) Form() string { return string(m.opts.Layout) }

// Render implements proxy.Mode.
func (m *Mode) Render(s *proxy.Snapshot) (proxy.Program, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := &Program{mode: m}
	for _, f := range s.Families {
		r := newRuleset(s, f, baseFor(s, f, m.opts.Layout), m.last[f])
		m.last[f] = r
		p.rulesets = append(p.rulesets, r)
	}
	return p, nil
}

// Reset implements proxy.Resetter.
func (m *Mode) Reset() { clear(m.applied) }

// Program is a rendered snapshot: one table for each family.
type Program struct {
	mode     *Mode
	rulesets []*ruleset
}

// String implements proxy.Program: input for nft -f. Each table is replaced as a
// whole, so that loading it twice gives the same.
func (p *Program) String() string {
	var b strings.Builder
	for _, r := range p.rulesets {
		r.text(&b)
	}
	return b.String()
}

// Service is the part of the text that belongs to one Service, all its ports: its
// chains, and its elements in the maps that all Services share.
func (p *Program) Service(namespace, name string) string {
	var b strings.Builder
	for _, r := range p.rulesets {
		r.serviceText(&b, func(o *proxy.ServicePort) bool { return o.Namespace == namespace && o.Name == name })
	}
	return b.String()
}

// dial gives the mode's socket. It is kept: when one is closed, the kernel waits
// until all that was deleted through it can be seen by no packet any more, which
// takes longer than most changes.
func (m *Mode) dial() (*nfnl.Conn, error) {
	if m.conn != nil {
		return m.conn, nil
	}
	conn, err := nfnl.Dial(m.opts.NetNS)
	if err != nil {
		return nil, err
	}
	if m.opts.MaxBatch > 0 {
		conn.SetLimit(m.opts.MaxBatch)
	}
	m.conn = conn
	return conn, nil
}

// Close implements proxy.Closer. The mode may be used again afterwards.
func (m *Mode) Close() {
	if m.conn != nil {
		m.conn.Close()
		m.conn = nil
	}
}

// Apply implements proxy.Program.
func (p *Program) Apply(ctx context.Context) error {
	m := p.mode
	for _, r := range p.rulesets {
		if err := ctx.Err(); err != nil {
			return err
		}
		next, err := m.apply(r)
		if err != nil {
			// Whatever the kernel has now, it is not what was remembered.
			m.syncFailures++
			delete(m.applied, r.family)
			m.Close()
			return err
		}
		m.applied[r.family] = next
	}
	return nil
}

// Intact implements proxy.Checker. As long as nobody has changed any rule of the
// namespace since the last full look, the kernel's generation number is answer
// enough.
func (m *Mode) Intact(context.Context) (bool, error) {
	for _, st := range m.applied {
		if err := m.check(st); errors.Is(err, errDiffers) {
			return false, nil
		} else if err != nil {
			return false, err
		}
	}
	return true, nil
}
