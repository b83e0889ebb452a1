// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
)

// Variant is the kernel interface behind the iptables tools.
type Variant = xtables.Variant

// The variants; VariantAuto takes the nft-backed tools where they are installed.
const (
	VariantAuto   = xtables.Auto
	VariantNFT    = xtables.NFT
	VariantLegacy = xtables.Legacy
)

// ErrNoTools means that the iptables tools are not installed; the message says
// what to install.
var ErrNoTools = xtables.ErrNoTools

// Options says where a Mode works and with what.
type Options struct {
	// NetNS is the node's network namespace; nil means the current one. It stays
	// the caller's to close.
	NetNS *netns.NS
	// Exec runs the tools; nil means inside NetNS.
	Exec execx.Runner
	// LockFile is the legacy tools' lock. Give each node its own: the default is
	// one for the whole machine.
	LockFile string
	// Variant picks the tools; VariantAuto prefers the nft-backed ones.
	Variant Variant
	// Features are what the kernel can do, when somebody has found it out
	// already (Detect); nil means that Probe will.
	Features *Features
	// Journal is a file in which a changed sysctl's old value is kept, so that
	// Cleanup can restore it after a crash; empty means memory only.
	Journal string
}

// Features are the optional abilities of kernel and tools.
type Features struct {
	// Variant and its tools were found to work.
	Variant Variant
	found   bool   // by Detect, so infix is right
	infix   string // of the tools' names
	// NFAcct: packet counter objects can be made and matched (nfnetlink_acct).
	NFAcct bool
	// RandomFully: MASQUERADE takes a random source port (iptables 1.6.2).
	RandomFully bool
	// TCPLiberal: conntrack takes out-of-window packets for valid
	// (nf_conntrack_tcp_be_liberal), so that nothing INVALID has to be dropped.
	TCPLiberal bool
}

// DefaultFeatures is what Render assumes before Probe has run: what every
// machine of the last years can do, without the counters.
func DefaultFeatures() Features { return Features{Variant: VariantNFT, RandomFully: true} }

// Mode is the iptables mode of one node.
type Mode struct {
	opts Options
	exec execx.Runner

	mu       sync.Mutex // guards features and known, which Render uses
	features *Features
	known    map[corev1.IPFamily]*rendered

	tool    *xtables.Tool
	applied map[corev1.IPFamily]*ruleset // what the kernel has; absent: unknown
	checked map[corev1.IPFamily]uint32   // the generation in which all of it was read back
	sysctl  sysctlState
	yielded proxy.Chains // see Yield
	tallies tallies
}

// rendered is the blocks of the last rendering, for the next.
type rendered struct {
	settings settings
	blocks   map[*proxy.ServicePort]*block
}

// New returns the mode. It touches nothing.
func New(opts Options) *Mode {
	m := &Mode{opts: opts, exec: opts.Exec, features: opts.Features, known: map[corev1.IPFamily]*rendered{}, applied: map[corev1.IPFamily]*ruleset{}, checked: map[corev1.IPFamily]uint32{}, tallies: tallies{written: map[corev1.IPFamily]map[string]int{}}}
	if m.exec == nil {
		m.exec = execx.Host()
		if opts.NetNS != nil {
			m.exec = execx.In(opts.NetNS)
		}
	}
	return m
}

// Name implements proxy.Mode.
func (m *Mode) Name() string { return "iptables" }

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
		set := settingsFor(s, family, features)
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

// Text is the ruleset of one family as input for iptables-restore or
// ip6tables-restore, with --noflush to keep what others have in the tables.
func (p *Program) Text(family corev1.IPFamily) string {
	var b strings.Builder
	for _, r := range p.rulesets {
		if r.family == family {
			for _, t := range tables {
				r.text(&b, t)
			}
		}
	}
	return b.String()
}

// String implements proxy.Program. With one family the text can be loaded as it
// is; with two, each part names its own tool.
func (p *Program) String() string {
	var b strings.Builder
	for _, r := range p.rulesets {
		tool := "iptables-restore"
		if r.v6() {
			tool = "ip6tables-restore"
		}
		fmt.Fprintf(&b, "# %s rules; load with: %s --noflush\n", r.family, tool)
		b.WriteString(p.Text(r.family))
	}
	return b.String()
}

// Service is the part of the text that belongs to one Service, all its ports:
// its chains, and its rules in the chains that all Services share.
func (p *Program) Service(namespace, name string) string {
	var b strings.Builder
	for _, r := range p.rulesets {
		for i, o := range r.owners {
			if o.Namespace != namespace || o.Name != name {
				continue
			}
			for h := range hubs {
				b.WriteString(r.blocks[i].hubs[h])
			}
			for j := len(r.blocks[i].chains) - 1; j >= 0; j-- {
				b.WriteString(r.blocks[i].chains[j].text)
			}
		}
	}
	return b.String()
}

// Apply implements proxy.Program.
func (p *Program) Apply(ctx context.Context) error {
	m := p.mode
	m.tallies.full = false
	clear(m.tallies.written)
	if err := m.prepare(ctx, p); err != nil {
		return err
	}
	for _, r := range p.rulesets {
		if err := m.apply(ctx, r); err != nil {
			// Whatever the kernel has now, it is not what was remembered.
			delete(m.applied, r.family)
			return err
		}
		m.applied[r.family] = r
	}
	return nil
}

// prepare makes what the rules lean on: the tools, the counters, the sysctl.
func (m *Mode) prepare(ctx context.Context, p *Program) error {
	if err := m.haveTool(ctx); err != nil {
		return err
	}
	for _, r := range p.rulesets {
		if m.applied[r.family] != nil {
			continue
		}
		if r.nfacct {
			if err := m.createAccts(); err != nil {
				return err
			}
		}
		if r.localhost {
			// Packets from 127.0.0.1 that were translated leave the loopback link:
			// the kernel takes them for martians unless this is set.
			if err := m.setRouteLocalnet(); err != nil {
				return err
			}
		}
	}
	return nil
}

// haveTool finds the tools, unless Detect or an earlier call has.
func (m *Mode) haveTool(ctx context.Context) error {
	if m.tool != nil {
		return nil
	}
	m.mu.Lock()
	f := m.features
	m.mu.Unlock()
	if f != nil && f.found {
		m.tool = xtables.New(m.exec, f.Variant, f.infix, m.opts.LockFile)
		return nil
	}
	want := m.opts.Variant
	if want == VariantAuto && f != nil {
		want = f.Variant
	}
	t, err := xtables.Find(ctx, m.exec, want, m.opts.LockFile)
	if err != nil {
		return err
	}
	m.tool = t
	return nil
}

func (m *Mode) createAccts() error {
	c, err := dialNFNL(m.opts.NetNS)
	if err != nil {
		return err
	}
	defer c.Close()
	for _, name := range []string{acctInvalidDropped, acctLocalhost} {
		if err := c.createAcct(name); err != nil {
			return err
		}
	}
	return nil
}

// Intact implements proxy.Checker by counting what the kernel has: a canary alone
// would outlive `iptables -F`, which empties chains and keeps them.
func (m *Mode) Intact(ctx context.Context) (bool, error) {
	for family, r := range m.applied {
		now, err := m.generation()
		if err != nil {
			return false, err
		}
		if now != 0 && now == m.checked[family] {
			continue // nobody has changed anything since
		}
		if err := m.readBackAll(ctx, r); errors.Is(err, errDiffers) {
			return false, nil
		} else if err != nil {
			return false, err
		}
	}
	return true, nil
}
