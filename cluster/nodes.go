// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/internal/gate"
	"github.com/kplab/kplab/internal/settle"
	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/sandbox"
)

// station is what runs of one node in this process, and how it can be held up.
type station struct {
	node  *node.Node
	proxy *proxy.Proxy // nil until it is made
	// api is the way of the node's kubelet to the API; intake is what it hears from
	// there, work all that it does.
	api          *apiGate
	intake, work *gate.Gate
	// cancels tell the runs to end, ends wait until they have.
	cancels, ends []func()
	// fault is what was last written of the node's own faults; nil when unknown.
	fault *node.NodeFault
}

func newStation() *station {
	return &station{api: &apiGate{}, intake: &gate.Gate{}, work: &gate.Gate{}}
}

// runs takes note of how a run of the node is ended.
func (s *station) runs(cancel, end func()) {
	s.cancels, s.ends = append(s.cancels, cancel), append(s.ends, end)
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
		if l.canReport(name) {
			out = append(out, s.node.Witness(), s.node.Announcements(), s.node.Policies())
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

// NodeAction is what can be done to a node.
type NodeAction string

// The actions. Stop is a shutdown: kubelet and proxy end, processes are asked to, then
// the power goes. Kill is a power cut. Pause freezes kubelet and proxy; rules and pods
// stay. Start and Resume end all three.
const (
	StopNode   NodeAction = "stop"
	KillNode   NodeAction = "kill"
	PauseNode  NodeAction = "pause"
	StartNode  NodeAction = "start"
	ResumeNode NodeAction = "resume"
)

// nodeFaults are the faults of a whole node; it has at most one of them.
var nodeFaults = map[NodeAction]FaultKind{StopNode: NodeStopped, KillNode: NodeKilled, PauseNode: NodePaused}

// ActOnNode does something to a node and returns when it is done; a node that is to run
// is ready then. What is so already is success.
func (l *Lab) ActOnNode(ctx context.Context, name string, action NodeAction) error {
	if !l.hasNode(name) {
		return fmt.Errorf("no node is called %q", name)
	}
	kind, hurts := nodeFaults[action]
	if !hurts && action != StartNode && action != ResumeNode {
		return fmt.Errorf("node %s: cannot %q it", name, action)
	}
	if kind == NodeStopped || kind == NodeKilled {
		if err := l.notControlPlane(name, action); err != nil {
			return err
		}
	}
	err := l.changeFaults(ctx, func(list []Fault) ([]Fault, error) {
		out := slices.DeleteFunc(slices.Clone(list), func(f Fault) bool {
			return f.Node == name && f.Kind != kind && (f.Kind == NodePaused || f.Kind == NodeStopped || f.Kind == NodeKilled)
		})
		f := Fault{Kind: kind, Node: name}
		f.setDefaults()
		if hurts && !slices.ContainsFunc(out, func(had Fault) bool { return had.ID == f.ID }) {
			out = append(out, f)
		}
		return out, nil
	})
	if err != nil || hurts {
		return err
	}
	return l.awaitNode(ctx, name)
}

// notControlPlane refuses what would take the API's own namespace away.
func (l *Lab) notControlPlane(name string, action NodeAction) error {
	if name != l.cfg.APINode().Name {
		return nil
	}
	return fmt.Errorf("node %s is the control plane, which a lab cannot %s; `kplab fault add api-stopped` stops its API, `kplab node pause %s` its kubelet and proxy", name, action, name)
}

// canReport tells whether a node that runs can say how it is.
func (l *Lab) canReport(name string) bool {
	_, paused := l.faults.on(name, NodePaused)
	_, cut := l.cutOff(name)
	return !paused && !cut
}

// awaitNode waits until a node is ready, unless it cannot say so.
func (l *Lab) awaitNode(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready after %s", readyTimeout))
	defer cancel()
	tick := time.NewTicker(settleInterval)
	defer tick.Stop()
	for l.canReport(name) && !l.nodeReady(name) {
		select {
		case <-ctx.Done():
			return fmt.Errorf("node %s runs, and is not ready: %w; see `kplab kubectl describe node %s`", name, context.Cause(ctx), name)
		case <-tick.C:
		}
	}
	return nil
}

// nodeState is what a node does, in one word.
func (l *Lab) nodeState(name string) string {
	f, _ := l.faults.on(name, NodeKilled, NodeStopped, NodePaused)
	switch f.Kind {
	case NodeKilled:
		return "killed"
	case NodeStopped:
		return "stopped"
	case NodePaused:
		return "paused"
	}
	return "running"
}

// off returns the fault that keeps a node from running.
func (l *Lab) off(name string) (Fault, bool) { return l.faults.on(name, NodeKilled, NodeStopped) }

// enforceNodes starts the nodes that should run and ends those that should not.
func (l *Lab) enforceNodes(ctx context.Context) error {
	l.setProxyMu.Lock()
	defer l.setProxyMu.Unlock()
	var errs []error
	for _, n := range l.nodeConfigs() {
		f, off := l.off(n.Name)
		s := l.running()[n.Name]
		switch {
		case off && !l.cleared[n.Name]:
			errs = append(errs, l.powerOff(ctx, n.Name, s, f.Kind == NodeStopped))
		case !off && s == nil:
			errs = append(errs, l.powerOn(ctx, n))
		}
	}
	return errors.Join(errs...)
}

// stopGrace is how long processes may take to end when their node is shut down.
const stopGrace = 3 * time.Second

// powerOff ends a node: nothing of it is left in the kernel, and of what it had in
// memory. Volumes and logs of its pods are its disk, and stay; the API is told nothing.
// s is nil when nothing of it runs in this process.
func (l *Lab) powerOff(ctx context.Context, name string, s *station, gently bool) error {
	if s != nil {
		// From here on nobody hears of the node, and it starts nothing anew.
		s.api.refused.Store(true)
		s.work.Close()
	}
	if gently {
		l.askToEnd(ctx, name)
	}
	for _, p := range l.processesOf(name) {
		_ = p.Signal(syscall.SIGKILL) // an error says that it has ended
	}
	errs := []error{l.fabric.Detach(name)}
	if s != nil {
		s.end()
		l.proxyMu.Lock()
		delete(l.stations, name)
		delete(l.proxies, name)
		delete(l.modes, name)
		l.proxyMu.Unlock()
	}
	for _, sb := range l.runtime.List() {
		if sb.Spec().Node == name {
			errs = append(errs, l.runtime.Remove(ctx, sb.Spec().ID))
		}
	}
	errs = append(errs,
		l.runtime.RemoveNetNS(ctx, node.NSName(name)),
		os.RemoveAll(l.nodeRuntimeDir(name)))
	l.fabric.SetNodes(l.peers())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("node %s: take it down: %w", name, err)
	}
	l.cleared[name] = true
	return nil
}

// askToEnd tells the processes of a node's pods to end, and waits for them a little.
func (l *Lab) askToEnd(ctx context.Context, name string) {
	ctx, cancel := context.WithTimeout(ctx, stopGrace)
	defer cancel()
	var asked []*sandbox.Process
	for _, p := range l.processesOf(name) {
		if p.Signal(syscall.SIGTERM) == nil { // an error says that it has ended
			asked = append(asked, p)
		}
	}
	for _, p := range asked {
		select {
		case <-p.Done():
		case <-ctx.Done():
			return
		}
	}
}

// processesOf returns the processes of a node's pods.
func (l *Lab) processesOf(name string) (all []*sandbox.Process) {
	for _, sb := range l.runtime.List() {
		if sb.Spec().Node == name {
			all = append(all, sb.Processes()...)
		}
	}
	return all
}

// end ends what runs of the node, and waits for it.
func (s *station) end() {
	for _, cancel := range s.cancels {
		cancel()
	}
	s.let()
	for _, end := range slices.Backward(s.ends) {
		end()
	}
}

// powerOn starts a node that does not run.
func (l *Lab) powerOn(ctx context.Context, n NodeConfig) error {
	if l.loops.ctx.Err() != nil {
		return errors.New("the lab ends")
	}
	delete(l.cleared, n.Name)
	l.fabric.SetNodes(l.peers())
	err := l.startNode(n)
	if err == nil {
		err = l.startProxy(ctx, n)
	}
	if err == nil {
		return nil
	}
	return errors.Join(fmt.Errorf("start node %s: %w", n.Name, err), l.powerOff(context.WithoutCancel(ctx), n.Name, l.running()[n.Name], false))
}

// peers are the nodes as the fabric knows them.
func (l *Lab) peers() (out []node.Peer) {
	for _, n := range l.nodeConfigs() {
		_, off := l.off(n.Name)
		out = append(out, node.Peer{
			Name: n.Name, IP: n.Address, PodCIDR: n.PodCIDR, SecondaryIP: n.Secondary.Address, SecondaryPodCIDR: n.Secondary.PodCIDR, Off: off,
		})
	}
	return out
}

// nodeRuntimeDir is where a node keeps what goes with its namespaces.
func (l *Lab) nodeRuntimeDir(name string) string {
	return filepath.Join(l.paths.Runtime, "nodes", name)
}

// maxNodes is how many places for a node are tried.
const maxNodes = 250

// AddNode adds a node to a running lab and returns when it is ready. What n leaves out
// is the first that is free: a name (node1, node2, …), an address, a block of pod
// addresses. The next start has the node as well.
func (l *Lab) AddNode(ctx context.Context, n NodeConfig) (NodeConfig, error) {
	l.faults.changing.Lock()
	defer l.faults.changing.Unlock()
	l.setProxyMu.Lock()
	defer l.setProxyMu.Unlock()
	cfg, n, err := l.withNode(n)
	if err != nil {
		return n, err
	}
	if err := l.keepNodes(cfg.Nodes); err != nil {
		return n, err
	}
	err = l.loops.await(ctx, func(ctx context.Context) error {
		if err := l.powerOn(ctx, n); err != nil {
			return err
		}
		// Faults of every node are this one's, too.
		return errors.Join(l.enforceNode(ctx, n.Name, l.running()[n.Name], l.dnsServers()), l.enforceLinks(), l.awaitNode(ctx, n.Name))
	})
	if err != nil {
		return n, errors.Join(err, l.dropNode(context.WithoutCancel(ctx), n.Name))
	}
	return n, nil
}

// withNode returns the settings with one more node in the first place that is free.
func (l *Lab) withNode(n NodeConfig) (Config, NodeConfig, error) {
	have := l.nodeConfigs()
	if n.Role == ControlPlane {
		return l.cfg, n, errors.New("a lab has one control plane, and cannot get another")
	}
	named := func(name string) bool {
		return slices.ContainsFunc(have, func(had NodeConfig) bool { return had.Name == name })
	}
	for i := 1; n.Name == ""; i++ {
		if name := fmt.Sprintf("node%d", i); !named(name) {
			n.Name = name
		}
	}
	if named(n.Name) {
		return l.cfg, n, fmt.Errorf("a node is called %s already", n.Name)
	}
	var fault error
	for i := range maxNodes {
		// What SetDefaults gives the node in place i, if nobody has it.
		try := l.cfg
		try.Nodes = make([]NodeConfig, i+1)
		try.Nodes[i] = n
		try.SetDefaults(0)
		placed := try.Nodes[i]
		try.Nodes = append(slices.Clone(have), placed)
		err := errors.Join(append(try.validateNodes(), try.LoadBalancer.validate(try.addressPlan()))...)
		if err == nil && placed.Proxy != (ProxyConfig{}) {
			placed.Proxy.validate("the node's proxy", func(format string, args ...any) { err = fmt.Errorf(format, args...) })
		}
		if err == nil {
			return try, placed, nil
		}
		if fault == nil || i == len(have) {
			fault = err
		}
		if !placed.Address.IsValid() || !placed.PodCIDR.IsValid() {
			break
		}
	}
	return l.cfg, n, fmt.Errorf("node %s: no place for it: %w", n.Name, fault)
}

// keepNodes makes these the nodes of the lab, now and after the next start.
func (l *Lab) keepNodes(nodes []NodeConfig) error {
	l.proxyMu.Lock()
	defer l.proxyMu.Unlock()
	next := l.cfg
	next.Nodes = slices.Clone(nodes)
	if err := writeJSON(l.paths.Settings(), settings{Config: next, APIPort: l.apiPort}, 0o600); err != nil {
		return fmt.Errorf("keep the lab's settings: %w", err)
	}
	l.cfg.Nodes = next.Nodes
	return nil
}

// RemoveNode takes a node away for good: its power goes, and its object with it, as when
// a cloud takes a machine back. The controllers do the rest: its pods are failed and
// deleted when the node has been gone for 40 seconds. Drain it before, to move them in
// good order.
func (l *Lab) RemoveNode(ctx context.Context, name string) error {
	if !l.hasNode(name) {
		return fmt.Errorf("no node is called %q", name)
	}
	if err := l.notControlPlane(name, "remove"); err != nil {
		return err
	}
	l.faults.changing.Lock()
	defer l.faults.changing.Unlock()
	l.setProxyMu.Lock()
	defer l.setProxyMu.Unlock()
	if err := l.dropNode(ctx, name); err != nil {
		return err
	}
	left := slices.DeleteFunc(l.Faults(), func(f Fault) bool { return f.Node == name || f.Link != nil && f.Link.To == name })
	l.faults.set(left)
	return errors.Join(l.faults.save(left), l.enforceLinks(), l.faults.done(left))
}

// dropNode ends a node and forgets it.
func (l *Lab) dropNode(ctx context.Context, name string) error {
	// First the settings: a crash in between leaves a node that nobody starts.
	if err := l.keepNodes(slices.DeleteFunc(l.nodeConfigs(), func(n NodeConfig) bool { return n.Name == name })); err != nil {
		return err
	}
	err := l.powerOff(ctx, name, l.running()[name], false)
	delete(l.cleared, name)
	if gone := l.client.CoreV1().Nodes().Delete(ctx, name, metav1.DeleteOptions{}); gone != nil && !apierrors.IsNotFound(gone) {
		err = errors.Join(err, fmt.Errorf("delete the Node object %s: %w", name, gone))
	}
	return errors.Join(err, os.RemoveAll(l.nodeStateDir(name)))
}
