// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/kplab/kplab/apiserver"
	"github.com/kplab/kplab/controller"
	"github.com/kplab/kplab/internal/settle"
	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/sandbox"
)

// hostAddress is the address of the host on which a lab listens, and the only one.
var hostAddress = netip.AddrFrom4([4]byte{127, 0, 0, 1})

func (l *Lab) openSandbox(context.Context) (string, error) {
	for _, dir := range []string{l.paths.State, l.paths.Runtime, filepath.Dir(l.paths.XtablesLock(""))} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return "", err
		}
	}
	r, err := sandbox.Open(sandbox.Config{Dir: l.paths.Runtime, Log: l.log.With("part", "sandbox")})
	if err != nil {
		return "", err
	}
	l.runtime = r
	l.startFaults()
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
	detail := fmt.Sprintf("%d nodes and outside on %s", len(l.cfg.Nodes), n.NodeSubnet)
	if n.Secondary.NodeSubnet.IsValid() {
		detail += " and " + n.Secondary.NodeSubnet.String()
	}
	if n.Overlay != string(node.OverlayRoutes) {
		detail += ", overlay " + n.Overlay
	}
	if !l.faults.found {
		return detail, nil
	}
	if err := l.enforceLinks(); err != nil {
		// It is tried again once the lab runs; until then the lab says so.
		l.log.Error("faults of links are not in force", "error", err)
	}
	return detail, nil
}

// fabricConfig is the address plan as the fabric needs it.
func (l *Lab) fabricConfig() node.FabricConfig {
	n := l.cfg.Networking
	cfg := node.FabricConfig{
		Runtime: l.runtime, Subnet: n.NodeSubnet, Outside: n.Outside, MTU: n.MTU, Overlay: node.Overlay(n.Overlay),
		SecondarySubnet: n.Secondary.NodeSubnet, SecondaryOutside: n.Secondary.Outside,
	}
	cfg.Nodes = l.peers()
	return cfg
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
	listeners := append([]net.Listener{host}, inside...)
	if err != nil {
		return "", errors.Join(err, closeAll(listeners))
	}
	// The parts of the lab have a way of their own to the API, which stays open when
	// the others are closed by a fault.
	own, err := listenHost(ctx, 0)
	if err != nil {
		return "", errors.Join(err, closeAll(listeners))
	}
	l.apiHost = newStoppable(host, l.listenAgain)
	listeners = []net.Listener{own, l.apiHost}
	for _, ln := range inside {
		address := ln.Addr().String()
		stoppable := newStoppable(ln, func(ctx context.Context) (net.Listener, error) { return l.listenInsideAt(ctx, address) })
		l.apiInside = append(l.apiInside, stoppable)
		listeners = append(listeners, stoppable)
	}
	master := l.cfg.APINode()
	masterNS, err := l.runtime.NetNS(node.NSName(master.Name))
	if err != nil {
		return "", errors.Join(err, closeAll(listeners))
	}
	l.api, err = apiserver.New(apiserver.Config{
		StateDir:    l.paths.State,
		Listeners:   listeners,
		ServiceCIDR: l.cfg.Networking.ServiceSubnet, SecondaryServiceCIDR: l.cfg.Networking.Secondary.ServiceSubnet,
		ServerNames: []string{master.Name, "kubernetes.default.svc." + l.cfg.Networking.DNSDomain},
		ServerIPs:   append(l.cfg.addressesOf(master), hostAddress),
		NoFsync:     l.cfg.Disposable,
		Audit:       apiserver.Audit(l.cfg.Audit),
		Version:     version,
		KubeletDial: func(ctx context.Context, _, addr string) (net.Conn, error) { return masterNS.Dial(ctx, "tcp", addr) },
		Components:  map[string]func(context.Context) error{"scheduler": l.keepsUp("scheduler"), "controller-manager": l.keepsUp("controller-manager")},
		Log:         l.log.With("part", "apiserver"),
	})
	if err != nil {
		return "", errors.Join(err, closeAll(listeners))
	}
	l.startRevision = l.api.Revision()
	l.serving = newGroup()
	l.serving.run("API server", l.api.Run)
	if err := l.serving.await(ctx, l.api.Ready); err != nil {
		return "", err
	}
	if l.client, err = kubernetes.NewForConfig(l.api.ClientConfig("system:kplab", "system:masters")); err != nil {
		return "", err
	}
	// The first events of nodes go there; a controller makes it, too, a moment later.
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceDefault}}
	if _, err := l.client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return "", fmt.Errorf("make namespace %s: %w", ns.Name, err)
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

// listenAgain opens the API's port on the host again, the same one: kubeconfigs name it.
func (l *Lab) listenAgain(ctx context.Context) (net.Listener, error) {
	return new(net.ListenConfig).Listen(ctx, "tcp", l.apiHost.Addr().String())
}

func closeAll(listeners []net.Listener) error {
	var errs []error
	for _, ln := range listeners {
		errs = append(errs, ln.Close())
	}
	return errors.Join(errs...)
}

// listenInside opens :6443 on each address of the control-plane node, so that the path
// from 10.96.0.1:443 to the API is a real one. On an error it returns what is open.
func (l *Lab) listenInside(ctx context.Context) (open []net.Listener, err error) {
	for _, ip := range l.cfg.addressesOf(l.cfg.APINode()) {
		ln, err := l.listenInsideAt(ctx, netip.AddrPortFrom(ip, apiPortInside).String())
		if err != nil {
			return open, err
		}
		open = append(open, ln)
	}
	return open, nil
}

func (l *Lab) listenInsideAt(ctx context.Context, address string) (net.Listener, error) {
	n := l.cfg.APINode()
	ns, err := l.runtime.NetNS(node.NSName(n.Name))
	if err != nil {
		return nil, err
	}
	ln, err := ns.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("open the API's port on node %s: %w", n.Name, err)
	}
	return ln, nil
}

// apiPortInside is the API's port on the control-plane node, upstream's default.
const apiPortInside = 6443

// writeKubeconfig writes the administrator's kubeconfig for the user who called
// sudo, when there is one; and what tools on the lab's nodes need, where the host's
// loopback is not: a kubeconfig for the API's address there, and a kubectl.
func (l *Lab) writeKubeconfig() error {
	inside := fmt.Sprintf("https://%s:%d", l.cfg.APINode().Address, apiPortInside)
	data, err := l.api.AdminKubeconfig(l.cfg.Name, inside)
	if err != nil {
		return err
	}
	if err := writeFile(l.paths.NodeKubeconfig(), data, 0o600); err != nil {
		return err
	}
	kubectl := l.paths.NodeKubectl()
	if err := os.MkdirAll(l.paths.NodeBin(), 0o755); err != nil {
		return fmt.Errorf("make the directory of the nodes' kubectl: %w", err)
	}
	if err := os.Remove(kubectl); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("replace the nodes' kubectl: %w", err)
	}
	if err := os.Symlink(l.runtime.Program(), kubectl); err != nil {
		return fmt.Errorf("make the nodes' kubectl: %w", err)
	}
	return l.writeHostKubeconfig()
}

func (l *Lab) writeHostKubeconfig() error {
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

// startControllers makes every controller. They run once the informers do, in
// awaitReady: a handler that registers late would miss the first list.
func (l *Lab) startControllers(ctx context.Context) (string, error) {
	cfg := l.controllersAPI.through(l.api.ClientConfig("system:kube-controller-manager"))
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return "", err
	}
	meta, err := metadata.NewForConfig(metadata.ConfigFor(cfg))
	if err != nil {
		return "", err
	}
	events, err := kubernetes.NewForConfig(paced(cfg))
	if err != nil {
		return "", err
	}
	recorders := controller.NewRecorders(l.loops.ctx, events)
	l.eventRecorder = recorders.For
	l.loops.run("events", func(ctx context.Context) error {
		<-ctx.Done()
		recorders.Close()
		return nil
	})
	if err := l.keepPool(ctx); err != nil {
		return "", err
	}
	if err := l.watchDNS(); err != nil {
		return "", err
	}
	l.loops.run("faults", l.enforcing.Run)
	var api []netip.AddrPort
	for _, ip := range l.cfg.addressesOf(l.cfg.APINode()) {
		api = append(api, netip.AddrPortFrom(ip, apiPortInside))
	}
	all := controller.All(controller.Deps{
		Client:    client,
		Metadata:  meta,
		Informers: l.informers,
		Recorder:  recorders.For,
		Log:       l.log,
		Config: controller.Config{
			ClusterDomain: l.cfg.Networking.DNSDomain,
			APIAddresses:  api,
			ServiceCIDR:   l.cfg.Networking.ServiceSubnet,
			CACert:        l.api.ServingAuthority(),
			Addresses:     l.cfg.addressPlan(),
			DialOutside:   l.dialOutside(),
		},
	})
	components := map[string][]*settle.Witness{}
	for _, c := range all {
		l.witnesses = append(l.witnesses, c.Witness())
		l.loops.run(c.Name(), c.Run)
		component := "controller-manager"
		if c.Name() == "scheduler" {
			component = c.Name()
		}
		components[component] = append(components[component], c.Witness())
	}
	l.components.Store(&components)
	return fmt.Sprintf("%d of them", len(all)), nil
}

// paced returns cfg for a client that writes events: 50 a second after the first
// 100, as stock kubelets do. Without it what is said about a burst of pods costs
// more writes than the pods, at the same time.
func paced(cfg *rest.Config) *rest.Config {
	c := rest.CopyConfig(cfg)
	c.QPS, c.Burst = 50, 100
	return c
}

// startNodes makes each node's kubelet.
func (l *Lab) startNodes(context.Context) (string, error) {
	for _, n := range l.cfg.Nodes {
		if _, off := l.off(n.Name); off {
			continue
		}
		if err := l.startNode(n); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%d kubelets", len(l.running())), nil
}

// startNode makes and runs the kubelet of a node.
func (l *Lab) startNode(n NodeConfig) error {
	s := newStation()
	// A node that is paused, or cut off, must not say that it lives, not even once.
	_, paused := l.faults.on(n.Name, NodePaused)
	_, cut := l.cutOff(n.Name)
	set(&s.api.hold, paused)
	s.api.refused.Store(cut)
	cfg, err := l.nodeConfig(n, s)
	if err != nil {
		return err
	}
	if s.node, err = node.New(cfg); err != nil {
		return fmt.Errorf("node %s: %w", n.Name, err)
	}
	l.proxyMu.Lock()
	l.stations[n.Name] = s
	l.proxyMu.Unlock()
	s.runs(l.loops.runApart("node "+n.Name, s.node.Run))
	return nil
}

func (l *Lab) nodeConfig(n NodeConfig, s *station) (node.Config, error) {
	user := "system:node:" + n.Name
	as := s.api.through(l.api.ClientConfig(user, "system:nodes"))
	client, err := kubernetes.NewForConfig(as)
	if err != nil {
		return node.Config{}, err
	}
	events, err := kubernetes.NewForConfig(paced(as))
	if err != nil {
		return node.Config{}, err
	}
	cert, err := l.api.IssueServing(user, []string{n.Name}, l.cfg.addressesOf(n))
	if err != nil {
		return node.Config{}, err
	}
	net := l.cfg.Networking
	return node.Config{
		Name:        n.Name,
		IP:          netip.PrefixFrom(n.Address, net.NodeSubnet.Bits()),
		PodCIDR:     n.PodCIDR,
		FirstPod:    n.FirstPod,
		SecondaryIP: netip.PrefixFrom(n.Secondary.Address, net.Secondary.NodeSubnet.Bits()), SecondaryPodCIDR: n.Secondary.PodCIDR,
		ControlPlane: n.Role == ControlPlane,
		Labels:       n.Labels,
		MaxPods:      n.MaxPods,
		DNS:          node.DNS{Server: l.cfg.dnsAddress(), Domain: net.DNSDomain},
		Client:       client,
		Events:       events,
		Intake:       s.intake,
		Work:         s.work,
		Informers:    l.informers,
		Runtime:      l.runtime,
		Fabric:       l.fabric,
		StateDir:     l.nodeStateDir(n.Name),
		CNIConf:      l.cfg.CNI.Conf,
		CNIBinDirs:   l.cfg.CNI.Bin,
		RuntimeDir:   l.nodeRuntimeDir(n.Name),
		KubeletTLS: &tls.Config{
			Certificates: []tls.Certificate{cert},
			ClientAuth:   tls.RequireAndVerifyClientCert,
			ClientCAs:    l.api.ClientAuthorities(),
			MinVersion:   tls.VersionTLS12,
		},
		PartLog:           l.partLog(n.Name),
		Version:           version,
		KubernetesVersion: apiserver.KubernetesVersion,
		Log:               l.log,
	}, nil
}

// awaitReady starts the informers and waits until the nodes are ready and
// everything has come to rest.
func (l *Lab) awaitReady(ctx context.Context) (string, error) {
	l.informers.StartWithContext(l.loops.ctx)
	var dns error
	err := l.loops.await(ctx, func(ctx context.Context) error {
		if err := l.informers.WaitForCacheSyncWithContext(ctx).AsError(); err != nil {
			return err
		}
		if err := l.awaitNodes(ctx); err != nil {
			return err
		}
		if err := l.ensureSystemPods(ctx); err != nil {
			return err
		}
		dns = l.awaitDNS(ctx)
		if err := l.Settle(ctx); err != nil || !l.faults.found {
			return err
		}
		// Now that all is as it was, what was broken is broken again.
		if err := l.enforceAgain(ctx); err != nil {
			l.log.Error("faults are not in force; trying again", "error", err)
			l.enforcing.Kick()
		}
		return nil
	})
	if err == nil {
		err = l.openControl(ctx)
	}
	if err != nil {
		return "", err
	}
	detail := fmt.Sprintf("revision %d", l.api.Revision())
	if dns != nil {
		detail += "; " + dns.Error()
	}
	return detail, nil
}

// awaitNodes waits until every node that runs is registered and ready.
func (l *Lab) awaitNodes(ctx context.Context) error {
	tick := time.NewTicker(settleInterval)
	defer tick.Stop()
	for {
		var waiting []string
		for name := range l.running() {
			if l.canReport(name) && !l.nodeReady(name) {
				waiting = append(waiting, name)
			}
		}
		if len(waiting) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("nodes %v are not ready: %w", waiting, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

func (l *Lab) nodeReady(name string) bool {
	n, err := l.informers.Core().V1().Nodes().Lister().Get(name)
	return err == nil && slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// nodeStateDir is where a node keeps what outlives a stop.
func (l *Lab) nodeStateDir(name string) string { return filepath.Join(l.paths.State, "nodes", name) }
