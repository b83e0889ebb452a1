// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/iptables"
	"github.com/kplab/kplab/proxy/ipvs"
	"github.com/kplab/kplab/proxy/nftables"
	"github.com/kplab/kplab/proxy/userspace"
)

// startProxies makes each node's Service proxy.
func (l *Lab) startProxies(ctx context.Context) (string, error) {
	var said []string
	for _, n := range l.cfg.Nodes {
		if _, off := l.off(n.Name); off {
			continue
		}
		if err := l.startProxy(ctx, n); err != nil {
			return "", err
		}
		mode, _ := l.modeOf(n)
		say, runs := l.cfg.ProxyOf(n).String(), mode.Name()
		switch {
		case runs != l.cfg.ProxyOf(n).Mode:
			say = runs + " in place of " + say
		case runs == "userspace":
			say += " (removed upstream in 1.26)"
		case runs == "ipvs":
			say += " (deprecated upstream)"
		}
		if !slices.Contains(said, say) {
			said = append(said, say)
			if w := ModeWarning(runs); w != "" {
				l.log.Warn(w, "part", "proxy")
			}
		}
	}
	if err := l.watchHistory(); err != nil {
		return "", err
	}
	return "mode " + strings.Join(said, ", "), nil
}

// startProxy makes and runs the proxy of a node that runs.
func (l *Lab) startProxy(ctx context.Context, n NodeConfig) error {
	want := l.cfg.ProxyOf(n)
	mode, err := l.newMode(ctx, n.Name, want)
	if err != nil {
		return err
	}
	ns, err := l.runtime.NetNS(node.NSName(n.Name))
	if err != nil {
		return err
	}
	p, err := proxy.New(proxy.Config{
		NodeName:          n.Name,
		NodeIPs:           l.cfg.addressesOf(n),
		ClusterCIDRs:      l.cfg.podSubnets(),
		ServiceCIDRs:      l.cfg.serviceSubnets(),
		NodePortAddresses: nodePortAddresses(want.Mode),
		Informers:         l.informers,
		Mode:              mode,
		Conntrack:         proxy.NewConntrack(ns),
		Listen:            ns.Listen,
		Log:               l.partLogs.tee(l.log.With("part", "proxy"), partProxy+"/"+n.Name),
	})
	if err != nil {
		return err
	}
	if err := p.SetHold(ctx, l.holdOf(n.Name)); err != nil {
		return err
	}
	l.proxyMu.Lock()
	l.proxies[n.Name], l.modes[n.Name] = p, mode
	s := l.stations[n.Name]
	s.proxy = p
	l.proxyMu.Unlock()
	s.runs(l.loops.runApart("proxy of node "+n.Name, p.Run))
	l.eventRecorder("kube-proxy").Event(nodeRef(n.Name), corev1.EventTypeNormal, "Starting", "")
	l.announce(n.Name, mode)
	return nil
}

// String names the mode, and the layout or the scheduler where it is not the mode's
// default.
func (p ProxyConfig) String() string {
	if p.IPVS.Scheduler != "" && p.IPVS.Scheduler != ipvs.DefaultScheduler {
		return p.Mode + "/" + p.IPVS.Scheduler
	}
	if p.NFTLayout == "" || p.NFTLayout == string(nftables.LayoutUpstream) {
		return p.Mode
	}
	return p.Mode + "/" + p.NFTLayout
}

// newMode makes a mode for one node. What the kernel can do is found out once for
// all nodes, when the first of them needs it.
func (l *Lab) newMode(ctx context.Context, nodeName string, want ProxyConfig) (proxy.Mode, error) {
	l.proxyMu.Lock()
	defer l.proxyMu.Unlock()
	var err error
	if want.Mode == "ipvs" {
		if err = l.findIPVS(ctx, want.IPVS.Scheduler); err != nil && want.IPVS.Fallback {
			// The words of kube-proxy before 1.20 or so, which tutorials quote.
			l.log.Warn("Can't use ipvs proxier, trying iptables proxier", "part", "proxy", "node", nodeName, "reason", err)
			want, err = ProxyConfig{Mode: "iptables"}, nil
		} else if err != nil {
			return nil, refuseIPVS(err)
		}
	}
	switch {
	case want.Mode == "iptables" && l.features == nil:
		var f iptables.Features
		if f, err = iptables.Detect(ctx, iptables.VariantAuto); err == nil {
			l.features = &f
		}
	case want.Mode == "nftables" && !l.nftProbed:
		err = nftables.Detect(ctx)
		l.nftProbed = err == nil
	case want.Mode == "userspace" && !l.userspaceProbed:
		err = userspace.Detect(ctx, xtables.Auto)
		l.userspaceProbed = err == nil
	}
	if err != nil {
		return nil, err
	}
	ns, err := l.runtime.NetNS(node.NSName(nodeName))
	if err != nil {
		return nil, err
	}
	return proxyModes()[want.Mode](ModeOptions{
		NetNS:           ns,
		Features:        l.features,
		LockFile:        l.paths.XtablesLock(node.NSName(nodeName)),
		Journal:         filepath.Join(l.nodeRuntimeDir(nodeName), "proxy.json"),
		NFTLayout:       nftables.Layout(want.NFTLayout),
		NFTProbed:       l.nftProbed,
		UserspaceProbed: l.userspaceProbed,
		Log:             l.log.With("part", "proxy", "node", nodeName, "mode", want.Mode),
		IPVS:            want.IPVS,
		IPVSFeatures:    l.ipvsFeatures[want.IPVS.Scheduler],
	}), nil
}

// findIPVS tries once what mode ipvs needs.
func (l *Lab) findIPVS(ctx context.Context, scheduler string) error {
	if l.ipvsFeatures[scheduler] != nil {
		return nil
	}
	f, err := ipvs.Detect(ctx, xtables.Auto, scheduler)
	if err == nil {
		l.ipvsFeatures[scheduler] = &f
	}
	return err
}

// refuseIPVS says what to do where mode ipvs cannot work.
func refuseIPVS(err error) error {
	return fmt.Errorf("proxy mode ipvs does not work on this machine: take mode iptables or nftables, or let nodes run iptables in its place with --ipvs-fallback; `kplab doctor` lists all that it needs: %w", err)
}

// ipvsDeprecated is what kube-proxy 1.37 says when it starts in mode ipvs.
const ipvsDeprecated = "The ipvs proxier has been deprecated and will be disabled by default in Kubernetes 1.40 and removed in Kubernetes 1.43. Migrate to the 'nftables' proxier instead."

// announce makes an event of the node when it begins to use a mode that kube-proxy makes
// one for.
func (l *Lab) announce(nodeName string, mode proxy.Mode) {
	if mode.Name() != "ipvs" {
		return
	}
	l.eventRecorder("kube-proxy").Event(nodeRef(nodeName), corev1.EventTypeWarning, "IPVSDeprecation", ipvsDeprecated)
}

// nodeRef is what events of a node's kube-proxy are about: as upstream, by the name.
func nodeRef(name string) *corev1.ObjectReference {
	return &corev1.ObjectReference{Kind: "Node", Name: name, UID: types.UID(name)}
}

// SetProxy changes the mode of a node's proxy, or with nodeName "" of all nodes,
// while the lab runs: see [proxy.Proxy.Switch]. The settings are kept, so that the
// next start has them too.
func (l *Lab) SetProxy(ctx context.Context, nodeName string, want ProxyConfig) error {
	return l.setProxy(ctx, nodeName, want, nil)
}

// ProveProxy is SetProxy, and says what the change did to the kernel of each node.
func (l *Lab) ProveProxy(ctx context.Context, nodeName string, want ProxyConfig) (string, error) {
	var b strings.Builder
	err := l.setProxy(ctx, nodeName, want, &b)
	return b.String(), err
}

func (l *Lab) setProxy(ctx context.Context, nodeName string, want ProxyConfig, proofs *strings.Builder) error {
	var fault error
	want.validate("proxy", func(format string, args ...any) { fault = fmt.Errorf(format, args...) })
	if fault != nil {
		return fault
	}
	if nodeName != "" && !l.hasNode(nodeName) {
		return fmt.Errorf("no node is called %q", nodeName)
	}
	l.setProxyMu.Lock()
	defer l.setProxyMu.Unlock()
	// All or none: a proxy that is held would refuse when others have changed.
	for _, n := range l.nodeConfigs() {
		if p := l.proxyOf(n.Name); p != nil && (nodeName == "" || n.Name == nodeName) {
			if err := p.Held(); err != nil {
				return err
			}
		}
	}
	for i, n := range l.nodeConfigs() {
		if nodeName != "" && n.Name != nodeName {
			continue
		}
		p := l.proxyOf(n.Name)
		if p == nil {
			// It is off, and starts in the new mode.
			l.proxyMu.Lock()
			l.cfg.Nodes[i].Proxy = want
			l.proxyMu.Unlock()
			continue
		}
		mode, err := l.newMode(ctx, n.Name, want)
		if err != nil {
			return err
		}
		var before kernelState
		_, was := l.modeOf(n)
		if proofs != nil {
			if before, err = l.kernelStateOf(ctx, n.Name); err != nil {
				return err
			}
		}
		err = l.loops.await(ctx, func(ctx context.Context) error {
			return p.Switch(ctx, mode, nodePortAddresses(want.Mode))
		})
		if p.Status().Mode == mode.Name() {
			// Also when something of the old mode is left.
			l.proxyMu.Lock()
			l.modes[n.Name], l.cfg.Nodes[i].Proxy = mode, want
			l.proxyMu.Unlock()
			l.announce(n.Name, mode)
		}
		if err != nil {
			return err
		}
		if proofs != nil {
			after, err := l.kernelStateOf(ctx, n.Name)
			if err != nil {
				return err
			}
			proofs.WriteString(proof(n.Name, was, want, before, after))
		}
	}
	l.proxyMu.Lock()
	defer l.proxyMu.Unlock()
	if nodeName == "" {
		l.cfg.Proxy = want
		for i := range l.cfg.Nodes {
			l.cfg.Nodes[i].Proxy = ProxyConfig{}
		}
	}
	if err := writeJSON(l.paths.Settings(), settings{Config: l.cfg, APIPort: l.apiPort}, 0o600); err != nil {
		return fmt.Errorf("the mode is changed, and will not be after the next start: keep the settings: %w", err)
	}
	return nil
}

// modeOf is the mode that a node's proxy uses, and its settings.
func (l *Lab) modeOf(n NodeConfig) (proxy.Mode, ProxyConfig) {
	l.proxyMu.Lock()
	defer l.proxyMu.Unlock()
	for i := range l.cfg.Nodes {
		if l.cfg.Nodes[i].Name == n.Name {
			n = l.cfg.Nodes[i]
		}
	}
	return l.modes[n.Name], l.cfg.ProxyOf(n)
}
