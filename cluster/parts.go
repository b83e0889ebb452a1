// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"github.com/kplab/kplab/apiserver"
	"github.com/kplab/kplab/controller"
	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/iptables"
)

// fabricConfig is the address plan as the fabric needs it.
func (l *Lab) fabricConfig() node.FabricConfig {
	n := l.cfg.Networking
	cfg := node.FabricConfig{Runtime: l.runtime, Subnet: n.NodeSubnet, Outside: n.Outside, MTU: n.MTU, Log: l.log.With("part", "fabric")}
	for _, c := range l.cfg.Nodes {
		cfg.Nodes = append(cfg.Nodes, node.Peer{Name: c.Name, IP: c.Address, PodCIDR: c.PodCIDR})
	}
	return cfg
}

// startControllers makes every controller. They run once the informers do, in
// awaitReady: a handler that registers late would miss the first list.
func (l *Lab) startControllers(context.Context) (string, error) {
	cfg := l.ClientConfig("system:kube-controller-manager", "system:masters")
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return "", err
	}
	meta, err := metadata.NewForConfig(metadata.ConfigFor(cfg))
	if err != nil {
		return "", err
	}
	recorders := controller.NewRecorders(l.loops.ctx, client)
	l.loops.run("events", func(ctx context.Context) error {
		<-ctx.Done()
		recorders.Close()
		return nil
	})
	master := l.cfg.APINode()
	all := controller.All(controller.Deps{
		Client:    client,
		Metadata:  meta,
		Informers: l.informers,
		Recorder:  recorders.For,
		Log:       l.log,
		Config: controller.Config{
			ClusterDomain: l.cfg.Networking.DNSDomain,
			APIAddresses:  []netip.AddrPort{netip.AddrPortFrom(master.Address, apiPortInside)},
			ServiceCIDR:   l.cfg.Networking.ServiceSubnet,
			CACert:        l.api.ServingAuthority(),
		},
	})
	for _, c := range all {
		l.witnesses = append(l.witnesses, c.Witness())
		l.loops.run(c.Name(), c.Run)
	}
	return fmt.Sprintf("%d of them", len(all)), nil
}

// startNodes makes each node's kubelet.
func (l *Lab) startNodes(context.Context) (string, error) {
	for _, n := range l.cfg.Nodes {
		cfg, err := l.nodeConfig(n)
		if err != nil {
			return "", err
		}
		made, err := node.New(cfg)
		if err != nil {
			return "", fmt.Errorf("node %s: %w", n.Name, err)
		}
		l.nodes = append(l.nodes, made)
		l.witnesses = append(l.witnesses, made.Witness())
		l.loops.run("node "+n.Name, made.Run)
	}
	return fmt.Sprintf("%d kubelets", len(l.nodes)), nil
}

func (l *Lab) nodeConfig(n NodeConfig) (node.Config, error) {
	user := "system:node:" + n.Name
	client, err := kubernetes.NewForConfig(l.ClientConfig(user, "system:nodes", "system:masters"))
	if err != nil {
		return node.Config{}, err
	}
	cert, err := l.api.IssueServing(user, []string{n.Name}, addrs(n.Address))
	if err != nil {
		return node.Config{}, err
	}
	net := l.cfg.Networking
	return node.Config{
		Name:         n.Name,
		IP:           netip.PrefixFrom(n.Address, net.NodeSubnet.Bits()),
		PodCIDR:      n.PodCIDR,
		ControlPlane: n.Role == ControlPlane,
		Labels:       n.Labels,
		ClusterCIDR:  net.PodSubnet,
		ServiceCIDR:  net.ServiceSubnet,
		DNS:          node.DNS{Server: nth(net.ServiceSubnet, 10), Domain: net.DNSDomain},
		Client:       client,
		Informers:    l.informers,
		Runtime:      l.runtime,
		Fabric:       l.fabric,
		StateDir:     l.nodeStateDir(n.Name),
		RuntimeDir:   filepath.Join(l.paths.Runtime, "nodes", n.Name),
		KubeletTLS: &tls.Config{
			Certificates: []tls.Certificate{cert},
			ClientAuth:   tls.RequireAndVerifyClientCert,
			ClientCAs:    l.api.ClientAuthorities(),
			MinVersion:   tls.VersionTLS12,
		},
		Version:           version,
		KubernetesVersion: apiserver.KubernetesVersion,
		Log:               l.log.With("node", n.Name),
	}, nil
}

// startProxies makes each node's Service proxy.
func (l *Lab) startProxies(ctx context.Context) (string, error) {
	features, err := iptables.Detect(ctx, iptables.VariantAuto)
	if err != nil {
		return "", err
	}
	for _, n := range l.cfg.Nodes {
		ns, err := l.NetNS(n.Name)
		if err != nil {
			return "", err
		}
		mode := ProxyModes[l.cfg.Proxy.Mode](ModeOptions{
			NetNS:    ns,
			Features: &features,
			LockFile: l.paths.XtablesLock(n.Name),
			Journal:  filepath.Join(l.paths.Runtime, "nodes", n.Name, "proxy.json"),
		})
		p, err := proxy.New(proxy.Config{
			NodeName:     n.Name,
			NodeIPs:      addrs(n.Address),
			ClusterCIDRs: []netip.Prefix{l.cfg.Networking.PodSubnet},
			ServiceCIDRs: []netip.Prefix{l.cfg.Networking.ServiceSubnet},
			Informers:    l.informers,
			Mode:         mode,
			Conntrack:    proxy.NewConntrack(ns),
			Listen:       ns.Listen,
			Log:          l.log.With("part", "proxy", "node", n.Name),
		})
		if err != nil {
			return "", err
		}
		l.proxies[n.Name] = p
		l.witnesses = append(l.witnesses, p.Witness())
		l.loops.run("proxy of node "+n.Name, p.Run)
	}
	return "mode " + l.cfg.Proxy.Mode, nil
}

// awaitReady starts the informers and waits until the nodes are ready and
// everything has come to rest.
func (l *Lab) awaitReady(ctx context.Context) (string, error) {
	l.informers.StartWithContext(l.loops.ctx)
	err := l.loops.await(ctx, func(ctx context.Context) error {
		if err := l.informers.WaitForCacheSyncWithContext(ctx).AsError(); err != nil {
			return err
		}
		if err := l.awaitNodes(ctx); err != nil {
			return err
		}
		return l.Settle(ctx)
	})
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("revision %d", l.api.Revision()), nil
}

// awaitNodes waits until every node of the settings is registered and ready.
func (l *Lab) awaitNodes(ctx context.Context) error {
	tick := time.NewTicker(settleInterval)
	defer tick.Stop()
	for {
		var waiting []string
		for _, n := range l.cfg.Nodes {
			if !l.nodeReady(n.Name) {
				waiting = append(waiting, n.Name)
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

// Status returns how the lab is now.
func (l *Lab) Status() Status {
	d, _ := readDaemon(l.paths.Daemon())
	s := Status{
		Name: l.cfg.Name, PID: d.PID, API: l.serverURL(), Kubeconfig: l.paths.Kubeconfig(),
		State: l.paths.State, Runtime: l.paths.Runtime, Since: l.since, Revision: l.api.Revision(),
		ProxyModes: map[string]string{}, Outside: l.cfg.Networking.Outside.String(),
	}
	pods := map[string]int{}
	// The lister reads memory; it has no error to give.
	all, _ := l.informers.Core().V1().Pods().Lister().List(labels.Everything())
	for _, p := range all {
		pods[p.Spec.NodeName]++
	}
	s.Pods = len(all)
	for _, n := range l.cfg.Nodes {
		p := l.proxies[n.Name]
		st := p.Status()
		ps := ProxyStatus{Mode: st.Mode, Synced: st.Applied}
		if st.Err != nil {
			ps.Error = st.Err.Error()
		}
		if snap := p.Current(); snap != nil {
			ps.Services = len(snap.Services)
			for _, n := range snap.Endpoints {
				ps.Endpoints += n
			}
		}
		s.ProxyModes[n.Name] = st.Mode
		s.Nodes = append(s.Nodes, NodeStatus{
			Name: n.Name, Role: n.Role, Address: n.Address.String(), PodCIDR: n.PodCIDR.String(),
			Ready: l.nodeReady(n.Name), Pods: pods[n.Name], Proxy: ps,
		})
	}
	return s
}

// Rules renders what the proxy of a node ("" is the control plane) wants in the
// kernel, in a mode ("" is the running one), cut to one Service ("NS/NAME") when
// service is not empty.
func (l *Lab) Rules(nodeName, mode, service string) (string, error) {
	if nodeName == "" {
		nodeName = l.cfg.APINode().Name
	}
	p, ok := l.proxies[nodeName]
	if !ok {
		return "", fmt.Errorf("no node is called %q", nodeName)
	}
	if mode == "" {
		mode = l.cfg.Proxy.Mode
	}
	newMode, ok := ProxyModes[mode]
	if !ok {
		return "", fmt.Errorf("proxy mode %q: want one of %v", mode, modeNames())
	}
	snap := p.Current()
	if snap == nil {
		return "", fmt.Errorf("the proxy of node %s has not decided anything yet", nodeName)
	}
	program, err := newMode(ModeOptions{}).Render(snap)
	if err != nil {
		return "", err
	}
	if service == "" {
		return program.String(), nil
	}
	return rulesOf(program, service)
}

// serviceRules is what a program offers that can show one Service alone.
type serviceRules interface {
	Service(namespace, name string) string
}

func rulesOf(program proxy.Program, service string) (string, error) {
	namespace, name, ok := cutService(service)
	if !ok {
		return "", fmt.Errorf("service %q: want [NAMESPACE/]NAME", service)
	}
	one, ok := program.(serviceRules)
	if !ok {
		return "", errors.New("this mode cannot show one Service alone")
	}
	text := one.Service(namespace, name)
	if text == "" {
		return "", fmt.Errorf("no rules for Service %s: see `kubectl get svc -n %s %s`", service, namespace, name)
	}
	return text, nil
}
