// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

	"github.com/kplab/kplab/apiserver"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/pace"
	"github.com/kplab/kplab/internal/settle"
	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/iptables"
	"github.com/kplab/kplab/proxy/ipvs"
	"github.com/kplab/kplab/sandbox"
)

// readyTimeout is how long a start may take before it is given up. A lab starts
// in about a second; a machine that swaps or traces it takes longer.
const readyTimeout = 60 * time.Second

// Lab is a running lab in this process.
type Lab struct {
	cfg   Config
	paths Paths
	log   *slog.Logger
	since time.Time

	runtime *sandbox.Runtime
	fabric  *node.Fabric
	api     *apiserver.Server
	apiPort int
	// setProxyMu is held while modes or nodes change; proxyMu guards the fields below
	// and the nodes and proxy settings in cfg, which that changes.
	setProxyMu, proxyMu sync.Mutex
	stations            map[string]*station     // the nodes that run, by name
	cleared             map[string]bool         // the nodes that are off and of which nothing is left; setProxyMu's
	proxies             map[string]*proxy.Proxy // by node
	modes               map[string]proxy.Mode   // by node
	features            *iptables.Features      // nil when nobody has looked
	nftProbed           bool
	userspaceProbed     bool
	// ipvsFeatures is likewise, by scheduler: its module is one of the things tried.
	ipvsFeatures map[string]*ipvs.Features
	// eventRecorder makes events as a component.
	eventRecorder func(component string) record.EventRecorder

	partLogs  partLogs
	client    kubernetes.Interface
	informers informers.SharedInformerFactory
	witnesses []*settle.Witness
	// components are the witnesses of the controllers, by the component that they
	// would be part of elsewhere; nil before they are made.
	components atomic.Pointer[map[string][]*settle.Witness]
	history    apiHistory
	// startRevision is the newest revision when this process opened the store.
	startRevision uint64

	// The parts run in two groups, because they stop in the opposite order:
	// controllers, nodes and proxies first, the API that they write to last.
	serving, loops *group
	// faults are what is broken on purpose; enforcing keeps it so where it could not
	// be done at once, or has to follow what moves.
	faults    *faultBook
	enforcing *pace.Runner
	// What a stopped API is closed by: its ports, and the way of the controllers.
	apiHost        *stoppable
	apiInside      []*stoppable
	controllersAPI *apiGate
	// control is the socket that kplab's other commands ask at.
	control net.Listener
}

// Start starts the lab of cfg below paths and returns when every node is ready
// and every proxy has written its rules. progress, which may be nil, is told of
// each step. What a killed daemon left at the same paths is taken over.
//
// On an error everything that Start began has ended; what it made on the host is
// still there for [Remove], or for another Start to take over.
func Start(ctx context.Context, cfg Config, paths Paths, log *slog.Logger, progress Progress) (*Lab, error) {
	if progress == nil {
		progress = func(Event) {}
	}
	l := &Lab{cfg: cfg, paths: paths, log: log, since: time.Now(), stations: map[string]*station{}, cleared: map[string]bool{}, proxies: map[string]*proxy.Proxy{}, modes: map[string]proxy.Mode{}, ipvsFeatures: map[string]*ipvs.Features{}, controllersAPI: &apiGate{}}
	ready, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready after %s", readyTimeout))
	defer cancel()
	for _, s := range l.steps() {
		began := time.Now()
		detail, err := s.run(ready)
		e := Event{Step: s.name, Detail: detail, Took: time.Since(began)}
		if err != nil {
			e.Error = err.Error()
			progress(e)
			return nil, errors.Join(fmt.Errorf("%s: %w", s.name, err), l.Stop())
		}
		progress(e)
	}
	progress(Event{Step: "ready", Detail: fmt.Sprintf("API at %s", l.serverURL()), Took: time.Since(l.since)})
	return l, nil
}

// step is one part of a start. run returns one line on what was done.
type step struct {
	name string
	run  func(context.Context) (string, error)
}

// steps is the ordered list of the parts of a lab. Each needs those before it.
func (l *Lab) steps() []step {
	return []step{
		{"sandbox", l.openSandbox},
		{"network", l.wireNetwork},
		{"api", l.startAPI},
		{"controllers", l.startControllers},
		{"nodes", l.startNodes},
		{"proxy", l.startProxies},
		{"dns", l.startDNS},
		{"settle", l.awaitReady},
	}
}

func (l *Lab) serverURL() string { return fmt.Sprintf("https://%s:%d", hostAddress, l.apiPort) }

// ClientConfig returns a configuration for a client in this process that acts
// as user. It reaches the API at the port that kubectl uses.
func (l *Lab) ClientConfig(user string, groups ...string) *rest.Config {
	cfg := l.api.ClientConfig(user, groups...)
	cfg.Host = l.serverURL()
	return cfg
}

// NetNS returns the namespace of a node, of "outside", or of a pod
// ("pod/[NAMESPACE/]NAME").
func (l *Lab) NetNS(where string) (*netns.NS, error) {
	name, _, err := Place{Where: where, Namespace: "default"}.resolve(l.paths)
	if err != nil {
		return nil, err
	}
	return l.runtime.NetNS(name)
}

// Wait serves the control socket until ctx ends or a part fails; then it ends the
// lab and removes what it made on the host. Its state is kept.
func (l *Lab) Wait(ctx context.Context) error {
	control := newGroup()
	control.run("control socket", l.serveControl)
	var failed error
	select {
	case <-ctx.Done():
	case failed = <-l.serving.failed:
	case failed = <-l.loops.failed:
	case failed = <-control.failed:
	}
	end := context.WithoutCancel(ctx)
	control.stop()
	return errors.Join(failed, l.Stop(), Remove(end, l.paths))
}

// Stop ends every loop and then the API, and returns when all have ended. Pods,
// rules and namespaces stay: this is what a crash does, but clean.
func (l *Lab) Stop() error {
	var errs []error
	if l.control != nil {
		// Whoever served it has closed it already; that is the state wanted.
		_ = l.control.Close()
	}
	if l.loops != nil {
		l.loops.cancel()
		for _, s := range l.running() {
			s.let()
		}
		l.loops.stop()
	}
	if l.informers != nil {
		l.informers.Shutdown()
	}
	if l.serving != nil {
		l.serving.stop()
	}
	if l.fabric != nil {
		errs = append(errs, l.fabric.Close())
	}
	if l.runtime != nil {
		errs = append(errs, l.runtime.Close())
	}
	return errors.Join(errs...)
}
