// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
)

// Defaults of Options.
const (
	// DefaultUDPIdle is kube-proxy's --udp-timeout of old.
	DefaultUDPIdle = 250 * time.Millisecond
	// DefaultMaxFlows bounds what the process carries for one node: each connection
	// takes two sockets and two goroutines.
	DefaultMaxFlows = 8192
)

// Options says where a Mode works and with what.
type Options struct {
	// NetNS is the node's network namespace; nil means the current one. It stays the
	// caller's to close.
	NetNS *netns.NS
	// Exec runs the tools; nil means inside NetNS.
	Exec execx.Runner
	// LockFile is the legacy tools' lock. Give each node its own: the default is one
	// for the whole machine.
	LockFile string
	// Variant picks the tools; xtables.Auto prefers the nft-backed ones.
	Variant xtables.Variant
	// Probed says that somebody has found out already that the kernel can do all of
	// this (Detect).
	Probed bool
	// UDPIdle is how long a UDP client may be silent before its backend is forgotten;
	// 0 means DefaultUDPIdle. An answer that takes longer is lost.
	UDPIdle time.Duration
	// MaxFlows is how many connections and UDP clients may be under way at once; 0
	// means DefaultMaxFlows. More connections wait, more datagrams are lost.
	MaxFlows int
	// Log hears about ports that somebody else holds, and at debug level about
	// backends that do not answer; nil means nobody.
	Log *slog.Logger
}

// portID names a Service port in one family.
type portID struct {
	proxy.ServicePortName
	family corev1.IPFamily
}

// Mode is the userspace mode of one node.
type Mode struct {
	opts Options
	exec execx.Runner
	log  *slog.Logger

	mu sync.Mutex // guards proxyPorts, which Render uses
	// proxyPorts is the port of each Service port that was rendered, owners the same
	// the other way round.
	proxyPorts map[portID]uint16
	owners     map[portOwner]portID

	tool    *xtables.Tool
	applied map[corev1.IPFamily]*ruleset // what the kernel has; absent: unknown
	checked map[corev1.IPFamily]uint32   // the generation in which it was read back
	servers map[portID]*server
	held    map[portOwner]*held // nodePorts, open so that nobody else takes them
	flows   *flows              // nil while nothing listens
}

// portOwner is a port number as the kernel gives it out.
type portOwner struct {
	family   corev1.IPFamily
	protocol corev1.Protocol
	port     uint16
}

// New returns the mode. It touches nothing.
func New(opts Options) *Mode {
	if opts.UDPIdle == 0 {
		opts.UDPIdle = DefaultUDPIdle
	}
	if opts.MaxFlows == 0 {
		opts.MaxFlows = DefaultMaxFlows
	}
	m := &Mode{
		opts: opts, exec: opts.Exec, log: opts.Log, proxyPorts: map[portID]uint16{}, owners: map[portOwner]portID{},
		applied: map[corev1.IPFamily]*ruleset{}, checked: map[corev1.IPFamily]uint32{}, servers: map[portID]*server{}, held: map[portOwner]*held{},
	}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	if m.exec == nil {
		m.exec = execx.Host()
		if opts.NetNS != nil {
			m.exec = execx.In(opts.NetNS)
		}
	}
	return m
}

// Name implements proxy.Mode.
func (m *Mode) Name() string { return "userspace" }

// Render implements proxy.Mode.
func (m *Mode) Render(s *proxy.Snapshot) (proxy.Program, error) {
	if err := m.givePorts(s); err != nil {
		return nil, err
	}
	p := &Program{mode: m, snapshot: s}
	p.render(nil)
	return p, nil
}

// render writes the rules of each family; busy are the Service ports whose nodePort
// somebody else holds.
func (p *Program) render(busy map[portID]bool) {
	p.mode.mu.Lock()
	defer p.mode.mu.Unlock()
	p.rulesets = nil
	for _, family := range p.snapshot.Families {
		p.rulesets = append(p.rulesets, newRuleset(p.snapshot, family, p.mode.proxyPorts, busy))
	}
}

// served says whether the mode can carry a Service port at all. It never could SCTP.
func served(p *proxy.ServicePort) bool {
	return p.Protocol == corev1.ProtocolTCP || p.Protocol == corev1.ProtocolUDP
}

// givePorts gives each Service port that has none a proxy port.
func (m *Mode) givePorts(s *proxy.Snapshot) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range s.Services {
		if !served(p) {
			continue
		}
		if id := idOf(p); m.proxyPorts[id] == 0 {
			if !m.givePort(id, preferredPort(id)) {
				return fmt.Errorf("no port from %d to %d is left for Service %s: mode userspace needs one for each Service port; use another mode", firstPort, firstPort+ports-1, p.ServicePortName)
			}
		}
	}
	return nil
}

// givePort takes the first free number from a start on, round the range.
func (m *Mode) givePort(id portID, start uint16) bool {
	for i := range ports {
		o := portOwner{id.family, id.Protocol, uint16(firstPort + (int(start)-firstPort+i)%ports)}
		if _, taken := m.owners[o]; !taken {
			m.owners[o], m.proxyPorts[id] = id, o.port
			return true
		}
	}
	return false
}

// nextPort gives a Service port another number, since somebody holds its own.
func (m *Mode) nextPort(id portID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	old := m.proxyPorts[id]
	if !m.givePort(id, old+1) {
		return false
	}
	delete(m.owners, portOwner{id.family, id.Protocol, old})
	return true
}

// dropPorts takes the ports of Service ports back that are not wanted any more.
func (m *Mode) dropPorts(wanted map[portID]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, port := range m.proxyPorts {
		if !wanted[id] {
			delete(m.proxyPorts, id)
			delete(m.owners, portOwner{id.family, id.Protocol, port})
		}
	}
}

func (m *Mode) portOf(id portID) uint16 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.proxyPorts[id]
}

// Reset implements proxy.Resetter.
func (m *Mode) Reset() { clear(m.applied) }

// Receives implements proxy.Receiver: packets that were led to one of the listeners
// are where they should be.
func (m *Mode) Receives(protocol corev1.Protocol, at netip.AddrPort) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ours := m.owners[portOwner{proxy.FamilyOf(at.Addr()), protocol, at.Port()}]
	return ours
}

// Retire implements proxy.Drainer: the listeners close, the connections that they
// accepted go on.
func (m *Mode) Retire() { m.closeServers(nil) }

// Carrying implements proxy.Drainer: the connections and UDP clients under way.
func (m *Mode) Carrying() int {
	if m.flows == nil {
		return 0
	}
	return m.flows.carrying()
}

// Close implements proxy.Closer: listeners close and what is under way is cut. The
// rules stay, and lead to nobody until the mode is applied again.
func (m *Mode) Close() {
	m.closeServers(nil)
	if m.flows != nil {
		m.flows.end()
		m.flows = nil
	}
	// The rules are right, but nobody listens: the next Apply looks at all of it.
	m.Reset()
}

// Program is a rendered snapshot: one ruleset for each family, and who listens.
type Program struct {
	mode     *Mode
	snapshot *proxy.Snapshot
	rulesets []*ruleset
}

// String implements proxy.Program: input for iptables-restore, with --noflush to keep
// what others have in the tables. The rules alone serve nobody; a comment lists the
// ports on which a proxy has to listen.
func (p *Program) String() string {
	var b strings.Builder
	for _, r := range p.rulesets {
		tool := "iptables-restore"
		if r.family == corev1.IPv6Protocol {
			tool = "ip6tables-restore"
		}
		fmt.Fprintf(&b, "# %s rules; load with: %s --noflush\n# They lead to these ports of the proxy process:\n", r.family, tool)
		for _, l := range r.listeners {
			fmt.Fprintf(&b, "#   %s\n", l)
		}
		for _, table := range tables {
			r.text(&b, table)
		}
	}
	return b.String()
}

// Service is the part of the text that belongs to one Service, all its ports.
func (p *Program) Service(namespace, name string) string {
	var b strings.Builder
	for _, r := range p.rulesets {
		for _, l := range r.listeners {
			if l.owner.Namespace == namespace && l.owner.Name == name {
				fmt.Fprintf(&b, "# %s\n", l)
			}
		}
		for c := range chains {
			for _, l := range r.rules[c] {
				if l.owner.Namespace == namespace && l.owner.Name == name {
					b.WriteString(l.text + "\n")
				}
			}
		}
	}
	return b.String()
}

// Apply implements proxy.Program: listeners open before the rules that lead to them,
// and close after those are gone.
func (p *Program) Apply(ctx context.Context) error {
	m := p.mode
	if err := m.haveTool(ctx); err != nil {
		return err
	}
	busy, moved, err := m.open(ctx, p.snapshot)
	if err != nil {
		return err
	}
	if moved || len(busy) > 0 {
		p.render(busy)
	}
	for _, r := range p.rulesets {
		if err := m.apply(ctx, r); err != nil {
			// Whatever the kernel has now, it is not what was remembered.
			delete(m.applied, r.family)
			return err
		}
		m.applied[r.family] = r
	}
	wanted := map[portID]bool{}
	for _, s := range p.snapshot.Services {
		if served(s) {
			wanted[idOf(s)] = true
		}
	}
	m.closeServers(wanted)
	m.dropPorts(wanted)
	return nil
}

// haveTool finds the tools, unless an earlier call has.
func (m *Mode) haveTool(ctx context.Context) error {
	if m.tool != nil {
		return nil
	}
	t, err := xtables.Find(ctx, m.exec, m.opts.Variant, m.opts.LockFile)
	m.tool = t
	return err
}
