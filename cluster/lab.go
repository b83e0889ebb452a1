// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/kplab/kplab/apiserver"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/settle"
	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/proxy"
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
	nodes   []*node.Node
	proxies map[string]*proxy.Proxy

	client    kubernetes.Interface
	informers informers.SharedInformerFactory
	witnesses []*settle.Witness
	// startRevision is the newest revision when this process opened the store.
	startRevision uint64

	// The parts run in three groups, because they stop in the opposite order:
	// nodes and proxies first, the API that they write to last.
	serving, loops *group
}

// Start starts the lab of cfg below paths and returns when every node is ready
// and every proxy has written its rules. progress, which may be nil, is told of
// each step. What a killed daemon left at the same paths is taken over.
//
// On an error everything that Start began has ended; what it made on the host is
// still there for Destroy to remove, or for another Start to take over.
func Start(ctx context.Context, cfg Config, paths Paths, log *slog.Logger, progress Progress) (*Lab, error) {
	if progress == nil {
		progress = func(Event) {}
	}
	l := &Lab{cfg: cfg, paths: paths, log: log, since: time.Now(), proxies: map[string]*proxy.Proxy{}}
	ready, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready after %s", readyTimeout))
	defer cancel()
	for _, s := range l.steps() {
		began := time.Now()
		detail, err := s.run(ready)
		e := Event{Step: s.name, Detail: detail, Took: time.Since(began)}
		if err != nil {
			e.Error = err.Error()
			progress(e)
			return nil, errors.Join(fmt.Errorf("%s: %w", s.name, err), l.Stop(context.WithoutCancel(ctx)))
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
		{"settle", l.awaitReady},
	}
}

func (l *Lab) openSandbox(context.Context) (string, error) {
	for _, dir := range []string{l.paths.State, l.paths.Runtime} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return "", err
		}
	}
	r, err := sandbox.Open(sandbox.Config{Dir: l.paths.Runtime, Log: l.log.With("part", "sandbox")})
	if err != nil {
		return "", err
	}
	l.runtime = r
	if n := len(r.List()); n > 0 {
		return fmt.Sprintf("%d pods taken over", n), nil
	}
	return "namespaces below " + l.paths.Runtime, nil
}

// wireNetwork makes the fabric, the nodes' namespaces and the client outside.
func (l *Lab) wireNetwork(ctx context.Context) (string, error) {
	n := l.cfg.Networking
	fabric, err := node.NewFabric(ctx, l.fabricConfig())
	if err != nil {
		return "", err
	}
	l.fabric = fabric
	return fmt.Sprintf("%d nodes and outside on %s", len(l.cfg.Nodes), n.NodeSubnet), nil
}

// startAPI opens the store and serves on the host's loopback and in the
// namespace of the control-plane node.
func (l *Lab) startAPI(ctx context.Context) (string, error) {
	kept, err := readSettings(l.paths)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	host, err := listenHost(ctx, kept.APIPort)
	if err != nil {
		return "", err
	}
	l.apiPort = host.Addr().(*net.TCPAddr).Port
	inside, err := l.listenInside(ctx)
	if err != nil {
		host.Close()
		return "", err
	}
	master := l.cfg.APINode()
	masterNS, err := l.NetNS(master.Name)
	if err != nil {
		return "", errors.Join(err, host.Close(), inside.Close())
	}
	l.api, err = apiserver.New(apiserver.Config{
		StateDir:    l.paths.State,
		Listeners:   []net.Listener{host, inside},
		ServiceCIDR: l.cfg.Networking.ServiceSubnet,
		ServerNames: []string{master.Name, "kubernetes.default.svc." + l.cfg.Networking.DNSDomain},
		ServerIPs:   addrs(hostAddress, master.Address),
		NoFsync:     l.cfg.Disposable,
		Version:     version,
		KubeletDial: func(ctx context.Context, _, addr string) (net.Conn, error) { return masterNS.Dial(ctx, "tcp", addr) },
		Log:         l.log.With("part", "apiserver"),
	})
	if err != nil {
		return "", errors.Join(err, host.Close(), inside.Close())
	}
	l.startRevision = l.api.Revision()
	l.serving = newGroup()
	l.serving.run("API server", l.api.Run)
	if err := l.serving.await(ctx, l.api.Ready); err != nil {
		return "", err
	}
	if l.client, err = kubernetes.NewForConfig(l.ClientConfig("system:kplab", "system:masters")); err != nil {
		return "", err
	}
	l.informers = informers.NewSharedInformerFactory(l.client, 0)
	l.loops = newGroup()
	if err := l.writeKubeconfig(); err != nil {
		return "", err
	}
	return l.serverURL(), writeJSON(l.paths.Settings(), settings{Config: l.cfg, APIPort: l.apiPort}, 0o600)
}

// listenHost opens the API's port on the host's loopback: the one that earlier
// kubeconfigs name when it is free, else any.
func listenHost(ctx context.Context, port int) (net.Listener, error) {
	var lc net.ListenConfig
	if port != 0 {
		if ln, err := lc.Listen(ctx, "tcp", fmt.Sprintf("%s:%d", hostAddress, port)); err == nil {
			return ln, nil
		}
	}
	ln, err := lc.Listen(ctx, "tcp", hostAddress.String()+":0")
	if err != nil {
		return nil, fmt.Errorf("open the API's port on %s: %w", hostAddress, err)
	}
	return ln, nil
}

// listenInside opens :6443 in the control-plane node, so that the path from
// 10.96.0.1:443 to the API is a real one.
func (l *Lab) listenInside(ctx context.Context) (net.Listener, error) {
	n := l.cfg.APINode()
	ns, err := l.NetNS(n.Name)
	if err != nil {
		return nil, err
	}
	ln, err := ns.Listen(ctx, "tcp", fmt.Sprintf("%s:%d", n.Address, apiPortInside))
	if err != nil {
		return nil, fmt.Errorf("open the API's port on node %s: %w", n.Name, err)
	}
	return ln, nil
}

// apiPortInside is the API's port on the control-plane node, upstream's default.
const apiPortInside = 6443

func (l *Lab) serverURL() string { return fmt.Sprintf("https://%s:%d", hostAddress, l.apiPort) }

// writeKubeconfig writes the administrator's kubeconfig for the user who called
// sudo, when there is one.
func (l *Lab) writeKubeconfig() error {
	data, err := l.api.AdminKubeconfig(l.cfg.Name, l.serverURL())
	if err != nil {
		return err
	}
	path := l.paths.Kubeconfig()
	if err := writeFile(path, data, 0o600); err != nil {
		return err
	}
	if uid, gid, ok := sudoUser(); ok {
		return os.Chown(path, uid, gid)
	}
	return nil
}

// ClientConfig returns a configuration for a client in this process that acts
// as user.
func (l *Lab) ClientConfig(user string, groups ...string) *rest.Config {
	return l.api.ClientConfig(user, groups...)
}

// NetNS returns the namespace of a node, of "outside", or of a pod
// ("pod/[NAMESPACE/]NAME").
func (l *Lab) NetNS(where string) (*netns.NS, error) {
	name, err := Place{Where: where, Namespace: "default"}.resolve(l.paths)
	if err != nil {
		return nil, err
	}
	return l.runtime.NetNS(name)
}

// Wait serves the control socket until ctx ends, somebody asks the lab to stop,
// or a part fails; then it ends the lab and removes what it made on the host.
// Its state is kept.
func (l *Lab) Wait(ctx context.Context, stop context.CancelFunc) error {
	control := newGroup()
	control.run("control socket", func(ctx context.Context) error { return l.serveControl(ctx, stop) })
	var failed error
	select {
	case <-ctx.Done():
	case failed = <-l.serving.failed:
	case failed = <-l.loops.failed:
	case failed = <-control.failed:
	}
	end := context.WithoutCancel(ctx)
	return errors.Join(failed, control.stop(), l.Stop(end), l.Destroy(end))
}

// Stop ends every loop and then the API, and returns when all have ended. Pods,
// rules and namespaces stay: this is what a crash does, but clean.
func (l *Lab) Stop(context.Context) error {
	var errs []error
	if l.loops != nil {
		errs = append(errs, l.loops.stop())
	}
	if l.informers != nil {
		l.informers.Shutdown()
	}
	switch {
	case l.serving != nil:
		errs = append(errs, l.serving.stop())
	case l.api != nil:
		errs = append(errs, l.api.Close())
	}
	if l.fabric != nil {
		errs = append(errs, l.fabric.Close())
	}
	if l.runtime != nil {
		errs = append(errs, l.runtime.Close())
	}
	return errors.Join(errs...)
}

// Destroy removes the namespaces, processes and mounts of a stopped lab and its
// runtime directory.
func (l *Lab) Destroy(ctx context.Context) error { return removeRuntime(ctx, l.paths) }

// group runs functions until they are told to stop.
type group struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	// failed receives the first error of a function that was not told to stop.
	failed chan error
}

func newGroup() *group {
	ctx, cancel := context.WithCancel(context.Background())
	return &group{ctx: ctx, cancel: cancel, failed: make(chan error, 1)}
}

func (g *group) run(name string, fn func(context.Context) error) {
	g.wg.Go(func() {
		err := fn(g.ctx)
		if g.ctx.Err() != nil {
			return // told to stop; what it says of that is no failure
		}
		if err == nil {
			err = errors.New("it ended by itself")
		}
		select {
		case g.failed <- fmt.Errorf("%s: %w", name, err):
		default:
		}
	})
}

// await waits for ready, or for the first failure of the group.
func (g *group) await(ctx context.Context, ready func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- ready(ctx) }()
	select {
	case err := <-done:
		return err
	case err := <-g.failed:
		cancel()
		<-done
		return err
	}
}

// stop tells all to stop and waits until they have.
func (g *group) stop() error {
	g.cancel()
	g.wg.Wait()
	return nil
}

// nodeStateDir is where a node keeps what outlives a stop.
func (l *Lab) nodeStateDir(name string) string { return filepath.Join(l.paths.State, "nodes", name) }
