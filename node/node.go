// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/kplab/kplab/cni"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/pace"
	"github.com/kplab/kplab/internal/rtnl"
	"github.com/kplab/kplab/internal/settle"
	"github.com/kplab/kplab/node/announce"
	"github.com/kplab/kplab/node/kubelet"
	"github.com/kplab/kplab/node/netpolicy"
)

// minInterval is the pause between two looks at the routes or the Node object. It
// makes one look of the events of one change and no more: pending looks hold up
// everybody who waits for the lab to settle, and one that finds all in order is
// four reads, or none.
const minInterval = 20 * time.Millisecond

// Node is one simulated node.
type Node struct {
	cfg     Config
	log     *slog.Logger
	member  *Member
	network *cni.Network
	kubelet *kubelet.Kubelet
	// announcer answers for load balancer addresses.
	announcer *announce.Announcer
	// policies enforces NetworkPolicies for the node's pods.
	policies *netpolicy.Enforcer

	nodes       cache.SharedIndexInformer
	nodesSynced cache.InformerSynced
	nodesHandle cache.ResourceEventHandlerRegistration
	nodesFrom   string // the revision that the handler began with
	heals       *pace.Runner
	statuses    *pace.Runner
	witness     *settle.Witness
	events      record.EventBroadcaster
	recorder    record.EventRecorder

	mu      sync.Mutex
	failing map[string]error // by what fails; see note
}

// New returns a node. It registers its event handlers, so it has to be called
// before the informers start. The node's namespace, links and routes are there when
// it returns.
func New(cfg Config) (*Node, error) {
	cfg.setDefaults()
	switch {
	case cfg.Name == "":
		return nil, errors.New("a node needs a name")
	case cfg.Fabric == nil || cfg.Runtime == nil:
		return nil, fmt.Errorf("node %s needs a fabric and a sandbox runtime", cfg.Name)
	case !cfg.IP.IsValid():
		return nil, fmt.Errorf("node %s: address %q is no IP address with its prefix", cfg.Name, cfg.IP)
	case !cfg.PodCIDR.IsValid() || cfg.PodCIDR.Addr().Is4() != cfg.IP.Addr().Is4():
		return nil, fmt.Errorf("node %s: pod range %q is no prefix of the family of its address %s", cfg.Name, cfg.PodCIDR, cfg.IP.Addr())
	case cfg.SecondaryIP.IsValid() != cfg.SecondaryPodCIDR.IsValid(), cfg.SecondaryIP.IsValid() &&
		(cfg.SecondaryIP.Addr().Is4() == cfg.IP.Addr().Is4() || cfg.SecondaryPodCIDR.Addr().Is4() == cfg.IP.Addr().Is4()):
		return nil, fmt.Errorf("node %s: the second address %q and the second pod range %q have to be of another family than %s", cfg.Name, cfg.SecondaryIP, cfg.SecondaryPodCIDR, cfg.IP.Addr())
	case cfg.StateDir == "":
		return nil, fmt.Errorf("node %s needs a directory", cfg.Name)
	}
	n := &Node{cfg: cfg, log: cfg.Log.With("node", cfg.Name), failing: map[string]error{}}
	n.nodes = cfg.Informers.Core().V1().Nodes().Informer()
	n.heals = pace.New(pace.Config{
		Name: "routes of " + cfg.Name, MinInterval: minInterval, RetryInterval: 2 * time.Second, MaxInterval: time.Minute,
	}, n.noted("links and routes", n.heal))
	n.statuses = pace.New(pace.Config{
		Name: "status of " + cfg.Name, MinInterval: minInterval, RetryInterval: 2 * time.Second, MaxInterval: reportEvery,
	}, n.noted("Node object", n.register))
	n.witness = settle.NewWitness("node/"+cfg.Name, n.pending)
	n.witness.Observe("nodes", "0")
	on := func(obj any) {
		if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = gone.Obj
		}
		m, err := meta.Accessor(obj)
		if err != nil {
			return
		}
		if m.GetName() == cfg.Name {
			n.statuses.Kick()
		} else {
			n.heals.Kick()
		}
		n.witness.Observe("nodes", m.GetResourceVersion())
	}
	n.nodesFrom = n.nodes.LastSyncResourceVersion()
	reg, err := n.nodes.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: on, UpdateFunc: func(_, obj any) { on(obj) }, DeleteFunc: on,
	})
	if err != nil {
		return nil, fmt.Errorf("listen to nodes: %w", err)
	}
	n.nodesSynced, n.nodesHandle = reg.HasSynced, reg
	// An event that cannot be written any more (the API stops before the nodes do) is
	// no news for the person in front of the terminal.
	n.events = record.NewBroadcaster(record.WithContext(klog.NewContext(context.Background(), logr.Discard())))
	n.recorder = n.events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "kubelet", Host: cfg.Name})
	if err := n.setUp(); err != nil {
		return nil, errors.Join(fmt.Errorf("set up node %s: %w", cfg.Name, err), n.Close())
	}
	return n, nil
}

// pending counts what the node's loops and its kubelet have not finished.
func (n *Node) pending() int {
	count := n.heals.Pending() + n.statuses.Pending()
	if n.kubelet != nil {
		count += n.kubelet.Pending()
	}
	return count
}

// Witness tells how far the node has come, its kubelet included. Probes and
// back-offs that wait for their time are not pending work.
func (n *Node) Witness() *settle.Witness { return n.witness }

// Announcements tells how far the node has come with the addresses of load balancers
// that it answers for.
func (n *Node) Announcements() *settle.Witness { return n.announcer.Witness() }

// Policies tells how far the node has come with NetworkPolicies.
func (n *Node) Policies() *settle.Witness { return n.policies.Witness() }

// Err says why the node cannot do its work now: what failed last and has not
// succeeded since, of its links and routes, its Node object and its Lease. nil
// means that all is well, or has not been tried.
func (n *Node) Err() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var errs []error
	for _, what := range slices.Sorted(maps.Keys(n.failing)) {
		errs = append(errs, n.failing[what])
	}
	return errors.Join(errs...)
}

// noted is fn with its outcome noted.
func (n *Node) noted(what string, fn func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		err := fn(ctx)
		n.note(ctx, slog.LevelError, what, err)
		return err
	}
}

// note keeps how something went that is tried again for ever, for Err, and logs
// each failure that is not the same as the one before.
func (n *Node) note(ctx context.Context, level slog.Level, what string, err error) {
	if ctx.Err() != nil {
		return // the node stops; what fails now is no news
	}
	n.mu.Lock()
	before := n.failing[what]
	if err == nil {
		delete(n.failing, what)
	} else {
		n.failing[what] = err
	}
	n.mu.Unlock()
	switch {
	case err == nil && before != nil:
		n.log.Info(what + " right again")
	case err != nil && (before == nil || before.Error() != err.Error()):
		n.log.Log(ctx, level, what+" not as it should be; trying again", "error", err)
	}
}

// NS returns the node's namespace.
func (n *Node) NS() *netns.NS { return n.member.NS }

// setUp finds the node's namespace, or makes it when the fabric's configuration
// does not name the node, and makes its pod network and its kubelet.
func (n *Node) setUp() error {
	n.member = n.cfg.Fabric.Member(NSName(n.cfg.Name))
	if n.member == nil {
		m, err := n.cfg.Fabric.attachNode(context.Background(), n.cfg.peer())
		if err != nil {
			return err
		}
		n.member = m
	}
	// Others note things there too, the node's proxy among them.
	if err := os.MkdirAll(n.cfg.RuntimeDir, 0o755); err != nil {
		return fmt.Errorf("make the node's directory: %w", err)
	}
	confDir := filepath.Join(n.cfg.StateDir, "cni", "net.d")
	err := cni.WriteConflist(confDir, cni.Conflist{
		Subnet: n.cfg.PodCIDR, RangeStart: n.cfg.FirstPod, NodeIP: n.cfg.IP.Addr(), MTU: n.cfg.Fabric.PodMTU(),
		SecondarySubnet: n.cfg.SecondaryPodCIDR, SecondaryNodeIP: n.cfg.SecondaryIP.Addr(),
		DataDir: filepath.Join(n.cfg.RuntimeDir, "cni", "addresses"), Template: n.cfg.CNIConf,
	})
	if err != nil {
		return err
	}
	network, err := cni.Load(cni.Config{
		ConfDir: confDir, StateDir: filepath.Join(n.cfg.RuntimeDir, "cni", "cache"), BinDirs: n.cfg.CNIBinDirs,
		NodeNS: n.member.NS, Log: n.log,
	})
	if err != nil {
		return err
	}
	n.network = network
	var dns []netip.Addr
	if n.cfg.DNS.Server.IsValid() {
		dns = append(dns, n.cfg.DNS.Server)
	}
	n.kubelet, err = kubelet.New(kubelet.Config{
		NodeName: n.cfg.Name, NodeIP: n.cfg.IP.Addr(), SecondaryNodeIP: n.cfg.SecondaryIP.Addr(), NodeNS: n.member.NS,
		Client: n.cfg.Client, Informers: n.cfg.Informers,
		Recorder: n.recorder,
		Intake:   n.cfg.Intake, Work: n.cfg.Work,
		Runtime: n.cfg.Runtime, Network: network, Witness: n.witness, Dir: filepath.Join(n.cfg.StateDir, "kubelet"),
		MemoryDir:  filepath.Join(n.cfg.RuntimeDir, "memory"),
		NodeNSName: NSName(n.cfg.Name), ClusterDNS: dns, ClusterDomain: n.cfg.DNS.Domain, PartLog: n.cfg.PartLog, Log: n.cfg.Log,
	})
	if err != nil {
		return err
	}
	n.announcer, err = announce.New(announce.Config{
		NodeName: n.cfg.Name, NS: n.member.NS, Link: uplink, Informers: n.cfg.Informers, Log: n.cfg.Log,
		Recorder: n.events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "loadbalancer-speaker", Host: n.cfg.Name}),
	})
	if err != nil {
		return err
	}
	n.policies, err = netpolicy.New(netpolicy.Config{NodeName: n.cfg.Name, NS: n.member.NS, Informers: n.cfg.Informers, Log: n.cfg.Log})
	return err
}

// Close closes the handles of a node that never ran; Run does it at its end. Links,
// routes and pods stay.
func (n *Node) Close() error {
	if n.network == nil {
		return nil
	}
	err := n.network.Close()
	n.network = nil
	return err
}

// Run registers the node, keeps its Lease, its Node object and its routes, runs its
// pods and answers the API server, until ctx ends or one of these fails for good.
// It returns when all of it has ended; links, routes, namespaces and processes
// stay.
func (n *Node) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	n.events.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: n.cfg.Events.CoreV1().Events("")})
	defer n.events.Shutdown()
	n.event("Starting", "Starting kubelet.")

	parts := []struct {
		what string
		run  func(context.Context) error
	}{
		{"listen to nodes", n.listen},
		{"keep the routes", n.heals.Run},
		{"watch the kernel", func(ctx context.Context) error { return rtnl.Watch(ctx, n.member.NS, n.heals.Kick) }},
		{"keep the Node object", n.statuses.Run},
		{"keep the lease", n.heartbeat},
		{"run pods", n.kubelet.Run},
		{"announce load balancer addresses", n.announcer.Run},
		{"enforce network policies", n.policies.Run},
	}
	if n.cfg.KubeletTLS != nil {
		parts = append(parts, struct {
			what string
			run  func(context.Context) error
		}{"answer the API server", func(ctx context.Context) error { return n.kubelet.Serve(ctx, n.cfg.KubeletTLS) }})
	}
	n.statuses.Kick()
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		errs []error
	)
	for _, part := range parts {
		wg.Go(func() {
			err := part.run(ctx)
			if err == nil || ctx.Err() != nil {
				return
			}
			mu.Lock()
			errs = append(errs, fmt.Errorf("node %s: %s: %w", n.cfg.Name, part.what, err))
			mu.Unlock()
			cancel()
		})
	}
	wg.Wait()
	return errors.Join(append(errs, n.Close())...)
}

// listen ends the subscription to nodes with ctx: the informers may go on without this
// node. A node that begins later than they tells its witness where it came in.
func (n *Node) listen(ctx context.Context) error {
	if cache.WaitForCacheSync(ctx.Done(), n.nodesSynced) {
		n.witness.Observe("nodes", n.nodesFrom)
	}
	<-ctx.Done()
	return n.nodes.RemoveEventHandler(n.nodesHandle)
}

// kernelVersion returns what `uname -r` prints.
func kernelVersion() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}
