// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"maps"
	"slices"

	"github.com/kplab/kplab/internal/gate"
	"github.com/kplab/kplab/internal/settle"
	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/proxy"
)

// station is what runs of one node in this process, and how it can be held up.
type station struct {
	node  *node.Node
	proxy *proxy.Proxy // nil until it is made
	// api is the way of the node's kubelet to the API; intake is what it hears from
	// there, work all that it does.
	api          *apiGate
	intake, work *gate.Gate
	// ends ends the runs, each waits; the last begun is the first ended.
	ends []func()
	// fault is what was last written of the node's own faults; nil when unknown.
	fault *node.NodeFault
}

func newStation() *station {
	return &station{api: &apiGate{}, intake: &gate.Gate{}, work: &gate.Gate{}}
}

// freeze stops the node's kubelet where it stands, or only cuts it off from the API.
func (s *station) freeze(paused, cut bool) {
	set(&s.api.hold, paused)
	set(s.work, paused)
	set(s.intake, paused || cut)
}

// let makes what still waits at a gate end, for a node whose runs were told to end.
func (s *station) let() {
	s.api.refused.Store(true)
	s.freeze(false, false)
}

func set(g *gate.Gate, closed bool) {
	if closed {
		g.Close()
	} else {
		g.Open()
	}
}

// running returns the nodes that run, by name.
func (l *Lab) running() map[string]*station {
	l.proxyMu.Lock()
	defer l.proxyMu.Unlock()
	return maps.Clone(l.stations)
}

// nodeConfigs returns the settings of the nodes as they are now.
func (l *Lab) nodeConfigs() []NodeConfig {
	l.proxyMu.Lock()
	defer l.proxyMu.Unlock()
	return slices.Clone(l.cfg.Nodes)
}

func (l *Lab) hasNode(name string) bool {
	return slices.ContainsFunc(l.nodeConfigs(), func(n NodeConfig) bool { return n.Name == name })
}

// nodeWitnesses returns the witnesses of the nodes and proxies that can move: nobody
// waits for one that a fault holds.
func (l *Lab) nodeWitnesses() (out []*settle.Witness) {
	stations := l.running()
	for _, name := range slices.Sorted(maps.Keys(stations)) {
		s := stations[name]
		if _, paused := l.faults.on(name, NodePaused); !paused && l.apiStopped() == "" {
			out = append(out, s.node.Witness(), s.node.Announcements())
		}
		if s.proxy != nil && s.proxy.Status().Hold == proxy.Free {
			out = append(out, s.proxy.Witness())
		}
	}
	return out
}

// proxyOf returns the proxy of a node; nil when there is none.
func (l *Lab) proxyOf(name string) *proxy.Proxy {
	l.proxyMu.Lock()
	defer l.proxyMu.Unlock()
	return l.proxies[name]
}
