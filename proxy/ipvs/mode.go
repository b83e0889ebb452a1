// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
)

// Options says where a Mode works and how.
type Options struct {
	// NetNS is the node's network namespace; nil means the current one. It stays the
	// caller's to close.
	NetNS *netns.NS
	// Exec runs the iptables tools; nil means inside NetNS.
	Exec execx.Runner
	// Variant picks the iptables tools; LockFile is the legacy ones' lock.
	Variant  xtables.Variant
	LockFile string
	// Scheduler is that of Services which do not ask for one; empty means
	// DefaultScheduler. See Schedulers.
	Scheduler string
	// StrictARP keeps the node from answering ARP requests for the addresses of Services
	// (sysctls arp_ignore 1 and arp_announce 2).
	StrictARP bool
	// Features are what the kernel can do, when somebody has found it out already
	// (Detect); nil means that Probe will.
	Features *Features
	// Journal is a file in which is kept what a later process needs for Cleanup; empty
	// means memory only.
	Journal string
}

// Features are the optional abilities of kernel and tools.
type Features struct {
	// Variant and Infix name the iptables tools that were found.
	Variant xtables.Variant
	Infix   string
	// RandomFully: MASQUERADE takes a random source port.
	RandomFully bool
	// IPVSMatch: iptables can ask for the virtual server of a packet (xt_ipvs). Without
	// it a node in no source range still reaches load balancer addresses.
	IPVSMatch bool
}

// DefaultFeatures is what Render assumes before Probe has run: what stock kernels have.
func DefaultFeatures() Features {
	return Features{Variant: xtables.NFT, Infix: "-nft", RandomFully: true, IPVSMatch: true}
}

// Mode is the ipvs mode of one node.
type Mode struct {
	opts Options
	exec execx.Runner

	mu       sync.Mutex // guards features and known, which Render uses
	features *Features
	known    map[corev1.IPFamily]*rendered

	tool    *xtables.Tool
	applied map[corev1.IPFamily]*state // what the kernel has; absent: unknown
	record  *record                    // nil: not read yet

	yielded  proxy.Chains // see Yield
	draining bool
}

// rendered is the blocks of the last rendering, for the next.
type rendered struct {
	settings settings
	blocks   map[*proxy.ServicePort]*block
}

// New returns the mode. It touches nothing.
func New(opts Options) *Mode {
	if opts.Scheduler == "" {
		opts.Scheduler = DefaultScheduler
	}
	m := &Mode{opts: opts, exec: opts.Exec, features: opts.Features, known: map[corev1.IPFamily]*rendered{}, applied: map[corev1.IPFamily]*state{}}
	if m.exec == nil {
		m.exec = execx.Host()
		if opts.NetNS != nil {
			m.exec = execx.In(opts.NetNS)
		}
	}
	return m
}

// Name implements proxy.Mode.
func (m *Mode) Name() string { return "ipvs" }

// Render implements proxy.Mode.
func (m *Mode) Render(s *proxy.Snapshot) (proxy.Program, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	features := DefaultFeatures()
	if m.features != nil {
		features = *m.features
	}
	p := &Program{mode: m}
	for _, family := range s.Families {
		set := settingsFor(s, family, m.opts.Scheduler, features)
		var known map[*proxy.ServicePort]*block
		if last := m.known[family]; last != nil && last.settings == set {
			known = last.blocks
		}
		r := newRuleset(s, set, known)
		next := make(map[*proxy.ServicePort]*block, len(r.blocks))
		for i, b := range r.blocks {
			next[r.owners[i]] = b
		}
		m.known[family] = &rendered{settings: set, blocks: next}
		p.rulesets = append(p.rulesets, r)
	}
	return p, nil
}

// Reset implements proxy.Resetter.
func (m *Mode) Reset() { clear(m.applied) }

// Program is a rendered snapshot: one ruleset for each family.
type Program struct {
	mode     *Mode
	rulesets []*ruleset
}

// Apply implements proxy.Program. It also takes out the real servers that were left at
// weight 0 and whose last connection has ended; so call it from time to time.
func (p *Program) Apply(ctx context.Context) error {
	m := p.mode
	if err := m.haveTool(ctx); err != nil {
		return err
	}
	k, err := openKernel(m.opts.NetNS)
	if err != nil {
		return err
	}
	defer k.close()
	if len(m.applied) == 0 {
		if err := m.setSysctls(); err != nil {
			return err
		}
	}
	for _, r := range p.rulesets {
		next, err := m.apply(ctx, k, r)
		if err != nil {
			// Whatever the kernel has now, it is not what was remembered.
			delete(m.applied, r.family)
			return err
		}
		m.applied[r.family] = next
	}
	return nil
}

// haveTool finds the iptables tools, unless Detect or an earlier call has.
func (m *Mode) haveTool(ctx context.Context) error {
	if m.tool != nil {
		return nil
	}
	m.mu.Lock()
	f := m.features
	m.mu.Unlock()
	if f != nil {
		m.tool = xtables.New(m.exec, f.Variant, f.Infix, m.opts.LockFile)
		return nil
	}
	t, err := xtables.Find(ctx, m.exec, m.opts.Variant, m.opts.LockFile)
	if err != nil {
		return err
	}
	m.tool = t
	return nil
}
