// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/internal/pace"
	"github.com/kplab/kplab/internal/settle"
)

// Defaults of Config.
const (
	// DefaultMinSyncPeriod coalesces the events of one change (a Service and its
	// slice, the slices of one rollout step) and no more. kube-proxy waits one
	// second between syncs to spare big clusters; here the time to the first
	// answer matters, and --proxy-min-sync-period 1s gives upstream's rhythm.
	DefaultMinSyncPeriod = 5 * time.Millisecond
	// DefaultSyncPeriod is how often the proxy looks whether its rules are still
	// there, as in kube-proxy.
	DefaultSyncPeriod = 30 * time.Second
	// DefaultRetryPeriod is the wait after a sync that failed.
	DefaultRetryPeriod = time.Second
)

// Config says for which node a Proxy works and with what.
type Config struct {
	// NodeName is the name of the Node object; NodeIPs the node's addresses, the
	// primary one of each family first.
	NodeName string
	NodeIPs  []netip.Addr
	// ClusterCIDRs are the pods' ranges, at most one a family.
	ClusterCIDRs []netip.Prefix
	// ServiceCIDRs are the ranges of cluster addresses, for the mode and for the
	// clean-up of connection tracking after a restart.
	ServiceCIDRs []netip.Prefix
	// MasqueradeAll, NodePortAddresses and ProxyName are as in Facts;
	// NoLocalhostNodePorts turns nodePorts on 127.0.0.1 off.
	MasqueradeAll        bool
	NoLocalhostNodePorts bool
	NodePortAddresses    []string
	ProxyName            string

	// Informers gives Services, EndpointSlices and Nodes. New registers handlers
	// with it; whoever made it starts it afterwards.
	Informers informers.SharedInformerFactory
	// Mode encodes the snapshots.
	Mode Mode
	// Conntrack is the node's table; nil means that no entry is ever removed,
	// for modes that do not translate addresses.
	Conntrack ConntrackTable
	// Listen opens a listening socket in the node's namespace for the health
	// servers; nil means that there are none. HealthzAddr and MetricsAddr are
	// where they listen ("" for upstream's :10256 and 127.0.0.1:10249, "-" for
	// not at all).
	Listen                   Listener
	HealthzAddr, MetricsAddr string

	// MinSyncPeriod is the least pause between two syncs, SyncPeriod the time
	// between two looks at whether the rules are still there, RetryPeriod the
	// wait after a failed sync; 0 means the default of each.
	MinSyncPeriod, SyncPeriod, RetryPeriod time.Duration
	// Clock is the source of time; nil is the real one.
	Clock clock.WithTicker
	// Log hears about failed syncs and repairs; nil means nobody.
	Log *slog.Logger
}

// Status says how a proxy is doing.
type Status struct {
	// Mode is the mode's name.
	Mode string
	// Applied is when a sync last ended well: the kernel holds the wanted state, by
	// what this sync read back of its own changes and by the last look at all of it
	// (one every SyncPeriod); zero before the first time. Took is how long that
	// sync took.
	Applied time.Time
	Took    time.Duration
	// Revisions are the newest revisions, by resource, that the applied state
	// reflects.
	Revisions map[string]uint64
	// Queued is when the oldest change that is not applied yet arrived; zero when
	// there is none.
	Queued time.Time
	// Syncs and Failures count since the start; Repairs counts how often somebody
	// else had changed or removed rules.
	Syncs, Failures, Repairs int
	// Err is why the last sync failed; nil when it did not.
	Err error
	// Hold is what keeps the proxy from its work.
	Hold Hold
}

// Proxy keeps one node's kernel in line with the API.
type Proxy struct {
	cfg     Config
	log     *slog.Logger
	clock   clock.WithTicker
	runner  *pace.Runner
	witness *settle.Witness
	synced  []cache.InformerSynced
	listens []listening

	mu      sync.Mutex // guards the fields below
	decider *Decider
	facts   Facts
	ready   bool // the informers have delivered their first lists
	current *Snapshot
	status  Status
	// switching is a change of cfg.Mode that the sync loop has not begun. That
	// field is the loop's own; others read status.Mode.
	switching *pendingSwitch
	// holders wait for the next sync, see SetHold.
	holders []chan error

	// Only the sync loop uses these; flushed says that what the mode wrote was removed
	// for a hold.
	checked time.Time
	flushed bool
	retired []Drainer // modes of before, with connections under way
	leaving *leaving  // a mode of before that drains
	health  *healthServers
	metrics *metrics
	history History
}

// New registers with the informers and returns a proxy that does nothing until
// Run.
func New(cfg Config) (*Proxy, error) {
	switch {
	case cfg.NodeName == "":
		return nil, errors.New("proxy: no node name")
	case len(cfg.NodeIPs) == 0:
		return nil, fmt.Errorf("proxy of node %s: no node address", cfg.NodeName)
	case cfg.Mode == nil:
		return nil, fmt.Errorf("proxy of node %s: no mode", cfg.NodeName)
	case cfg.Informers == nil:
		return nil, fmt.Errorf("proxy of node %s: no informers", cfg.NodeName)
	}
	if cfg.MinSyncPeriod == 0 {
		cfg.MinSyncPeriod = DefaultMinSyncPeriod
	}
	if cfg.SyncPeriod == 0 {
		cfg.SyncPeriod = DefaultSyncPeriod
	}
	if cfg.RetryPeriod == 0 {
		cfg.RetryPeriod = DefaultRetryPeriod
	}
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p := &Proxy{
		cfg: cfg, clock: cfg.Clock, log: cfg.Log.With("node", cfg.NodeName, "mode", cfg.Mode.Name()),
		decider: NewDecider(),
		facts: Facts{
			NodeName: cfg.NodeName, NodeIPs: cfg.NodeIPs, ClusterCIDRs: cfg.ClusterCIDRs, ServiceCIDRs: cfg.ServiceCIDRs, MasqueradeAll: cfg.MasqueradeAll,
			LocalhostNodePorts: !cfg.NoLocalhostNodePorts, NodePortAddresses: cfg.NodePortAddresses, ProxyName: cfg.ProxyName,
		},
		status:  Status{Mode: cfg.Mode.Name()},
		metrics: newMetrics(),
	}
	p.health = newHealthServers(p)
	p.runner = pace.New(pace.Config{
		Name: "proxy of " + cfg.NodeName, MinInterval: cfg.MinSyncPeriod, RetryInterval: cfg.RetryPeriod,
		MaxInterval: cfg.SyncPeriod, Clock: cfg.Clock, OnError: p.failed,
	}, p.sync)
	p.witness = settle.NewWitness("proxy/"+cfg.NodeName, p.pending)
	return p, p.subscribe()
}

// subscribe registers the event handlers. Each puts the object into the decider,
// kicks the loop, and only then tells the witness.
func (p *Proxy) subscribe() error {
	add := func(resource string, informer cache.SharedIndexInformer, set, del func(obj any) bool) error {
		handle := func(obj any, fn func(any) bool) {
			if tomb, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = tomb.Obj
			}
			p.mu.Lock()
			changed := fn(obj)
			if changed && p.status.Queued.IsZero() {
				p.status.Queued = p.clock.Now()
			}
			p.mu.Unlock()
			if changed {
				p.metrics.changed(resource, triggerTime(obj))
				p.runner.Kick()
			}
			if m, ok := obj.(interface{ GetResourceVersion() string }); ok {
				p.witness.Observe(resource, m.GetResourceVersion())
			}
		}
		// A proxy that begins later than the informers gets what they have; what was
		// deleted before no event will tell.
		from := informer.LastSyncResourceVersion()
		reg, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(obj any) { handle(obj, set) },
			UpdateFunc: func(_, obj any) { handle(obj, set) },
			DeleteFunc: func(obj any) { handle(obj, del) },
		})
		if err != nil {
			return fmt.Errorf("proxy of node %s: watch %s: %w", p.cfg.NodeName, resource, err)
		}
		p.witness.Observe(resource, "0")
		p.synced = append(p.synced, reg.HasSynced)
		p.listens = append(p.listens, listening{informer, reg, resource, from})
		return nil
	}
	core := p.cfg.Informers.Core().V1()
	return errors.Join(
		add("services", core.Services().Informer(),
			func(obj any) bool { p.decider.SetService(obj.(*corev1.Service)); return true },
			func(obj any) bool {
				s := obj.(*corev1.Service)
				p.decider.DeleteService(s.Namespace, s.Name)
				return true
			}),
		add("endpointslices", p.cfg.Informers.Discovery().V1().EndpointSlices().Informer(),
			func(obj any) bool { p.decider.SetSlice(obj.(*discoveryv1.EndpointSlice)); return true },
			func(obj any) bool {
				s := obj.(*discoveryv1.EndpointSlice)
				p.decider.DeleteSlice(s.Namespace, s.Name)
				return true
			}),
		add("nodes", core.Nodes().Informer(),
			func(obj any) bool { return p.setNode(obj.(*corev1.Node)) },
			func(any) bool { return false }),
	)
}

// triggerTime is when the pod or Service changed that made a slice what it is, as the
// endpointslice controller notes it.
func triggerTime(obj any) time.Time {
	slice, ok := obj.(*discoveryv1.EndpointSlice)
	if !ok {
		return time.Time{}
	}
	at, err := time.Parse(time.RFC3339Nano, slice.Annotations[corev1.EndpointsLastChangeTriggerTime])
	if err != nil {
		return time.Time{}
	}
	return at
}

// listening is one subscription to an informer, and the revision that it began with.
type listening struct {
	informer cache.SharedIndexInformer
	handle   cache.ResourceEventHandlerRegistration
	resource string
	from     string
}

// unlisten ends the subscriptions: the informers may go on without this proxy.
func (p *Proxy) unlisten() {
	for _, l := range p.listens {
		if err := l.informer.RemoveEventHandler(l.handle); err != nil {
			p.log.Warn("the proxy still listens", "to", l.resource, "error", err)
		}
	}
}

// setNode takes what matters from the node's own object and reports whether it
// changed. Heartbeats come here too, of every node.
func (p *Proxy) setNode(n *corev1.Node) bool {
	if n.Name != p.cfg.NodeName {
		return false
	}
	p.health.setNode(n)
	zone := n.Labels[corev1.LabelTopologyZone]
	if zone == p.facts.Zone {
		return false
	}
	p.facts.Zone = zone
	return true
}

func (p *Proxy) pending() int {
	p.mu.Lock()
	ready := p.ready
	p.mu.Unlock()
	if !ready {
		return 1
	}
	return p.runner.Pending()
}

// Witness says how far the proxy has come: pending work is what the kernel does
// not hold yet.
func (p *Proxy) Witness() *settle.Witness { return p.witness }

// Current is the snapshot that the kernel holds; nil before the first sync.
func (p *Proxy) Current() *Snapshot {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.current
}

// Wanted decides a snapshot for the objects seen so far, applied or not.
func (p *Proxy) Wanted() *Snapshot {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.decider.Decide(p.facts)
}

// Status says how the proxy is doing.
func (p *Proxy) Status() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status
}

// Run probes the mode, waits for the informers, and keeps the kernel in line
// until ctx ends. Rules stay in the kernel afterwards: traffic goes on while a
// proxy restarts, and Mode.Cleanup removes them when they are not wanted. It
// returns nil when ctx ended, and an error when the mode cannot work here.
func (p *Proxy) Run(ctx context.Context) error {
	defer p.unlisten()
	if err := p.cfg.Mode.Probe(ctx); err != nil {
		return fmt.Errorf("proxy of node %s: mode %s: %w", p.cfg.NodeName, p.cfg.Mode.Name(), err)
	}
	if !cache.WaitForCacheSync(ctx.Done(), p.synced...) {
		return nil
	}
	for _, l := range p.listens {
		p.witness.Observe(l.resource, l.from)
	}
	p.checked = p.clock.Now()
	p.log.Info(usingMode(p.cfg.Mode))
	p.runner.Kick()
	p.mu.Lock()
	p.ready = true
	p.mu.Unlock()
	var wg sync.WaitGroup
	if p.cfg.Listen != nil {
		wg.Go(func() { p.health.run(ctx) })
	}
	err := p.runner.Run(ctx)
	wg.Wait()
	p.leaving.stop()
	closeMode(p.cfg.Mode)
	p.closeRetired(true)
	return err
}

// sync makes the kernel equal to what the API says now.
func (p *Proxy) sync(ctx context.Context) (err error) {
	waiting := p.takeHolders()
	defer func() {
		for _, done := range waiting {
			done <- err
		}
	}()
	p.pendingMode(ctx)
	if held, err := p.held(ctx); held {
		return err
	}
	p.closeRetired(false)
	if err := p.drain(ctx); err != nil && ctx.Err() == nil {
		p.log.Warn("what the mode before left is not gone yet", "error", err)
	}
	start := p.clock.Now()
	// Before the lock: the witness asks pending, which takes it. What is seen here
	// is in the decider already, since handlers tell the witness last.
	revisions := p.witness.Snapshot().Revs
	p.mu.Lock()
	snapshot := p.decider.Decide(p.facts)
	before := p.current
	p.status.Syncs++
	queued := p.status.Queued
	p.status.Queued = time.Time{}
	p.mu.Unlock()
	services, endpoints, triggered := p.metrics.begin()

	if err := p.applySnapshot(ctx, before, snapshot); err != nil {
		p.metrics.failed(triggered)
		p.mu.Lock()
		if p.status.Queued.IsZero() || (!queued.IsZero() && queued.Before(p.status.Queued)) {
			p.status.Queued = queued
		}
		if p.status.Queued.IsZero() {
			p.status.Queued = start
		}
		p.mu.Unlock()
		if ctx.Err() != nil {
			// The tool was killed since the proxy stops; that is no failure of its.
			return ctx.Err()
		}
		return err
	}
	now := p.clock.Now()
	p.mu.Lock()
	p.current = snapshot
	p.status.Applied, p.status.Took, p.status.Revisions, p.status.Err = now, now.Sub(start), revisions, nil
	p.mu.Unlock()
	p.history.record(now, p.cfg.Mode, snapshot, revisions)
	p.health.update(snapshot)
	p.metrics.applied(now.Sub(start), services, endpoints, triggered, now, p.cfg.Mode)
	return nil
}

func (p *Proxy) applySnapshot(ctx context.Context, before, snapshot *Snapshot) error {
	if err := p.heal(ctx); err != nil {
		return err
	}
	program, err := p.cfg.Mode.Render(snapshot)
	if err != nil {
		return fmt.Errorf("render %s rules: %w", p.cfg.Mode.Name(), err)
	}
	if err := program.Apply(ctx); err != nil {
		return fmt.Errorf("apply %s rules: %w", p.cfg.Mode.Name(), err)
	}
	if p.cfg.Conntrack == nil {
		return nil
	}
	start := p.clock.Now()
	n, err := CleanConntrack(ctx, p.cfg.Conntrack, before, snapshot, p.cfg.ServiceCIDRs, p.cfg.Mode)
	p.metrics.cleaned(p.clock.Since(start), n)
	if n > 0 {
		p.log.Debug("stale UDP connection tracking entries deleted", "count", n)
	}
	return err
}

// heal looks once every sync period whether the rules are as written, and
// makes the next Apply write everything in that case.
func (p *Proxy) heal(ctx context.Context) error {
	checker, ok := p.cfg.Mode.(Checker)
	if !ok || p.clock.Since(p.checked) < p.cfg.SyncPeriod {
		return nil
	}
	p.checked = p.clock.Now()
	intact, err := checker.Intact(ctx)
	if err != nil {
		return fmt.Errorf("look for %s rules: %w", p.cfg.Mode.Name(), err)
	}
	if intact {
		return nil
	}
	p.mu.Lock()
	p.status.Repairs++
	p.mu.Unlock()
	p.log.Warn("rules were changed or removed by somebody else; writing again what differs")
	if r, ok := p.cfg.Mode.(Resetter); ok {
		r.Reset()
	}
	return nil
}

// failed hears about a failed sync.
func (p *Proxy) failed(err error) {
	p.mu.Lock()
	p.status.Err = err
	p.status.Failures++
	p.mu.Unlock()
	if !errors.Is(err, context.Canceled) {
		p.log.Error("sync failed; trying again", "error", err, "retry", p.cfg.RetryPeriod)
	}
}
