// SPDX-License-Identifier: Apache-2.0

package proxytest

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/proxy"
)

// Mode is a mode under test.
type Mode struct {
	// Name is the mode's name; Variant tells apart several forms of one mode.
	Name, Variant string
	// Needs are the features, by the names that nettest has for them, without which
	// the mode cannot be tried: then its rows are n/a, with what the probe says.
	Needs []string
	// New makes the mode of one node.
	New func(tb testing.TB, node *netns.NS) proxy.Mode
	// NodePortAddresses is as in proxy.Facts.
	NodePortAddresses []string
}

// String names the mode in test names.
func (m Mode) String() string {
	if m.Variant == "" {
		return m.Name
	}
	return m.Name + "-" + m.Variant
}

// Lab is a topology whose nodes run a mode.
type Lab struct {
	*Topology
	// Mode is the name of the mode under test, for rows in which modes differ.
	Mode  string
	nodes []*labNode
	// nodePorts says where nodePorts answer.
	nodePorts []string
	// Zones are the nodes' zones, by name.
	Zones map[string]string
	// change, which a row may set, changes the facts that nodes decide with.
	change func(*proxy.Facts)
	// reason is why the row that runs does not apply to the mode.
	reason string
	// variant is the mode's, for rows that run its tools.
	variant string
}

type labNode struct {
	host    *Host
	mode    proxy.Mode
	table   proxy.ConntrackTable
	current *proxy.Snapshot
	// nodePorts says where nodePorts answer.
	nodePorts []string
}

// NewLab builds a topology and gives each node a mode of its own. Cleanup of the
// modes runs before the namespaces go, and must succeed twice.
func NewLab(t *testing.T, m Mode) *Lab {
	t.Helper()
	return newLab(t, m, m)
}

// newLab gives the two nodes modes that may differ; rows go by the first.
func newLab(t *testing.T, m, second Mode) *Lab {
	t.Helper()
	for _, feature := range slices.Concat(m.Needs, second.Needs) {
		nettest.Need(t, feature)
	}
	lab := &Lab{Topology: NewTopology(t), Mode: m.Name, nodePorts: m.NodePortAddresses, variant: m.Variant, Zones: map[string]string{"n1": "a", "n2": "b"}}
	for i, h := range []*Host{lab.N1, lab.N2} {
		its := [2]Mode{m, second}[i]
		n := &labNode{host: h, mode: its.New(t, h.NS), table: proxy.NewConntrack(h.NS), nodePorts: its.NodePortAddresses}
		if err := n.mode.Probe(t.Context()); err != nil {
			t.Fatalf("probe: %v", err)
		}
		lab.nodes = append(lab.nodes, n)
		ctx := context.WithoutCancel(t.Context())
		t.Cleanup(func() {
			for range 2 {
				if err := n.mode.Cleanup(ctx); err != nil {
					t.Errorf("clean up %s: %v", h.Name, err)
				}
			}
			if c, ok := n.mode.(proxy.Closer); ok {
				c.Close()
			}
		})
	}
	return lab
}

// Apply makes both nodes serve exactly these objects, and returns when the rules
// are read back and stale entries are gone.
func (l *Lab) Apply(tb testing.TB, services []*corev1.Service, slices ...*discoveryv1.EndpointSlice) {
	tb.Helper()
	// Rows apply an empty state as their clean-up, when their own context ended.
	ctx := context.WithoutCancel(tb.Context())
	for _, n := range l.nodes {
		facts := proxy.Facts{
			NodeName: n.host.Name, NodeIPs: []netip.Addr{n.host.IP}, Zone: l.Zones[n.host.Name],
			ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix(ClusterCIDR)}, LocalhostNodePorts: true,
			ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix(ServiceCIDR)}, NodePortAddresses: n.nodePorts,
		}
		if l.change != nil {
			l.change(&facts)
		}
		s := proxy.Decide(facts, services, slices)
		p, err := n.mode.Render(s)
		if err != nil {
			tb.Fatalf("render for %s: %v", n.host.Name, err)
		}
		if err := p.Apply(ctx); err != nil {
			tb.Fatalf("apply on %s: %v", n.host.Name, err)
		}
		if _, err := proxy.CleanConntrack(ctx, n.table, n.current, s, []netip.Prefix{netip.MustParsePrefix(ServiceCIDR)}, n.mode); err != nil {
			tb.Fatalf("conntrack on %s: %v", n.host.Name, err)
		}
		n.current = s
	}
}

// Serve applies one Service with one slice, all of whose ports lead to 8080.
func (l *Lab) Serve(tb testing.TB, svc *corev1.Service, eps ...discoveryv1.Endpoint) {
	tb.Helper()
	l.Apply(tb, []*corev1.Service{svc}, Slice(svc, []int32{8080}, eps...))
}

func (l *Lab) userspace() bool { return l.Mode == "userspace" }

// seen is the source address that a backend sees of a pod whose packets are not
// masqueraded: its own, but where the node's proxy makes a connection of its own.
func (l *Lab) seen(pod *Host) netip.Addr {
	if pod.Node == l.N2.Name {
		return l.seenVia(pod, l.N2)
	}
	return l.seenVia(pod, l.N1)
}

// seenVia is seen for a client that comes by a certain node.
func (l *Lab) seenVia(client, node *Host) netip.Addr {
	if l.userspace() {
		return node.IP
	}
	return client.IP
}

// nobody is how a connection to a Service without endpoints ends.
func (l *Lab) nobody() string {
	if l.userspace() {
		return Closed // the proxy accepts before it knows
	}
	return Refused
}

// notIn ends a row that a mode has no answer to, with the reason.
func (l *Lab) notIn(t *testing.T, mode, reason string) {
	t.Helper()
	if l.Mode == mode {
		l.reason = reason
		t.Skip(reason)
	}
}

// onlyIn ends a row that is about one mode in all others.
func (l *Lab) onlyIn(t *testing.T, mode string) {
	t.Helper()
	if l.Mode != mode {
		l.reason = "about mode " + mode
		t.Skip(l.reason)
	}
}

// Row is one line of the contract.
type Row struct {
	// ID is the row's number in the table of observable behaviour.
	ID, Title string
	Run       func(t *testing.T, l *Lab)
	// Long keeps the row for the long run.
	Long bool
}

// want checks one reply: who answered, with which source seen.
func want(t *testing.T, what string, r Reply, peer netip.Addr, backends ...*Host) {
	t.Helper()
	if r.Outcome == Silence && r.again != nil {
		r = r.again()
	}
	if r.Outcome != Answered {
		t.Errorf("%s: %s, want an answer", what, r)
		return
	}
	found := len(backends) == 0
	for _, b := range backends {
		found = found || b.Name == r.Backend
	}
	if !found {
		t.Errorf("%s: %s answered, want one of %v", what, r.Backend, names(backends))
	}
	if peer.IsValid() && r.Peer.Addr() != peer {
		t.Errorf("%s: %s saw %s as its client, want %s", what, r.Backend, r.Peer.Addr(), peer)
	}
}

// wantOutcome checks how an attempt ended.
func wantOutcome(t *testing.T, what string, r Reply, outcome string) {
	t.Helper()
	if r.Outcome != outcome {
		t.Errorf("%s: %s, want %s", what, r, outcome)
	}
}

// spread counts who answers n connections.
func spread(t *testing.T, from *Host, to string, n int) map[string]int {
	t.Helper()
	out := map[string]int{}
	for range n {
		r := from.TCP(to)
		if r.Outcome == Silence {
			r = r.again()
		}
		if r.Outcome != Answered {
			t.Fatalf("connection to %s: %s", to, r)
		}
		out[r.Backend]++
	}
	return out
}

func names(hs []*Host) []string {
	var out []string
	for _, h := range hs {
		out = append(out, h.Name)
	}
	return out
}
