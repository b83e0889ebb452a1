// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"github.com/kplab/kplab/dns"
	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/proxy"
)

// enforce makes everything as the list of faults says: broken where one is, right
// where none is. Doing it twice changes nothing. Callers hold faults.changing.
func (l *Lab) enforce(ctx context.Context) error {
	errs := []error{l.enforceNodes(ctx), l.enforceLinks()}
	servers := l.dnsServers()
	for name, s := range l.running() {
		errs = append(errs, l.enforceNode(ctx, name, s, servers))
	}
	errs = append(errs, l.enforceAPI(ctx))
	err := errors.Join(errs...)
	l.faults.mu.Lock()
	l.faults.failed = err
	l.faults.mu.Unlock()
	return err
}

func (l *Lab) enforceLinks() error {
	var links []node.LinkFault
	for _, f := range l.Faults() {
		if f.Kind != LinkFault {
			continue
		}
		parsed, err := f.Link.parse(f.ID, f.Node)
		if err != nil {
			return err
		}
		links = append(links, parsed)
	}
	return l.fabric.SetLinkFaults(links)
}

// enforceNode does what is on one node that runs.
func (l *Lab) enforceNode(ctx context.Context, name string, s *station, servers []netip.Addr) error {
	var want node.NodeFault
	if _, dead := l.faults.on(name, DNSDead); dead {
		want.DNS = servers
	}
	if f, limited := l.faults.on(name, ConnLimit); limited {
		want.Conns = uint32(f.Max)
	}
	errs := []error{s.setFault(l, name, want)}
	_, paused := l.faults.on(name, NodePaused)
	_, cut := l.cutOff(name)
	s.api.refused.Store(cut)
	s.freeze(paused, cut)
	if s.proxy != nil {
		errs = append(errs, s.proxy.SetHold(ctx, l.holdOf(name)))
	}
	return errors.Join(errs...)
}

// setFault writes the rules of a node's own faults unless they are written.
func (s *station) setFault(l *Lab, name string, want node.NodeFault) error {
	if s.fault != nil && s.fault.Conns == want.Conns && slices.Equal(s.fault.DNS, want.DNS) {
		return nil
	}
	ns, err := l.runtime.NetNS(node.NSName(name))
	if err == nil {
		err = node.SetNodeFault(ns, want)
	}
	if err != nil {
		s.fault = nil
		return fmt.Errorf("node %s: %w", name, err)
	}
	s.fault = &want
	return nil
}

// holdOf is how the faults hold the proxy of a node.
func (l *Lab) holdOf(name string) proxy.Hold {
	if _, flushed := l.faults.on(name, RulesFlushed); flushed {
		return proxy.Flushed
	}
	if _, frozen := l.faults.on(name, ProxyFrozen, NodePaused); frozen {
		return proxy.Frozen
	}
	if _, cut := l.cutOff(name); cut {
		return proxy.Frozen // it hears of nothing new
	}
	return proxy.Free
}

// holderOf returns the fault that holds a node's proxy.
func (l *Lab) holderOf(name string) (Fault, bool) {
	if f, held := l.faults.on(name, RulesFlushed, ProxyFrozen, NodePaused); held {
		return f, true
	}
	return l.cutOff(name)
}

// cutOff returns the fault that keeps a node's kubelet and proxy from the API: the API is
// stopped for it, or no packet gets there and back. In this process they would not need
// the network.
func (l *Lab) cutOff(name string) (Fault, bool) {
	api := l.cfg.APINode().Name
	for _, f := range l.Faults() {
		if f.Kind == APIStopped {
			return f, true
		}
		if f.Kind != LinkFault || !f.Link.cuts() || name == api {
			continue
		}
		ends := []string{f.Node, f.Link.To}
		whole := f.Link.To == "" && (f.Node == name || f.Node == api)
		if whole || slices.Contains(ends, name) && slices.Contains(ends, api) {
			return f, true
		}
	}
	return Fault{}, false
}

// apiStopped says for whom the API is stopped; "" is for nobody.
func (l *Lab) apiStopped() string {
	f, _ := l.faults.on("", APIStopped)
	return f.From
}

// leasePatience is how long the controllers stay away after the API is back while the
// nodes say that they live.
const leasePatience = 5 * time.Second

// longSilence is more than two heartbeats, and half of what makes a node NotReady.
const longSilence = 20 * time.Second

// enforceAPI stops the API's ports and the way of the controllers to it, or opens them.
func (l *Lab) enforceAPI(ctx context.Context) error {
	from := l.apiStopped()
	err := l.apiHost.set(ctx, from == FromAll)
	for _, inside := range l.apiInside {
		err = errors.Join(err, inside.set(ctx, from != ""))
	}
	if from == FromAll {
		l.controllersAPI.refused.Store(true)
		return err
	}
	if l.controllersAPI.refused.Load() {
		// Controllers that were away count the nodes' silence from before. On a
		// cluster they begin anew with their lease; here the nodes go first.
		l.awaitLeases(ctx)
		l.controllersAPI.refused.Store(false)
	}
	return err
}

// awaitLeases waits until no node at work has been silent for long.
func (l *Lab) awaitLeases(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, leasePatience)
	defer cancel()
	tick := time.NewTicker(settleInterval)
	defer tick.Stop()
	leases := l.informers.Coordination().V1().Leases().Lister().Leases(corev1.NamespaceNodeLease)
	for name := range l.running() {
		if !l.canReport(name) {
			continue
		}
		for {
			lease, err := leases.Get(name)
			if err == nil && lease.Spec.RenewTime != nil && time.Since(lease.Spec.RenewTime.Time) < longSilence {
				break
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}
}

// dnsServers returns the addresses at which cluster DNS can be asked: its Service's,
// and those of its pods.
func (l *Lab) dnsServers() []netip.Addr {
	if l.cfg.DNS.Provider == dnsNone {
		return nil
	}
	servers := []netip.Addr{l.cfg.dnsAddress()}
	ofService := labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: dns.ServiceName})
	// A lister of a cache does not fail.
	found, _ := l.informers.Discovery().V1().EndpointSlices().Lister().EndpointSlices(dns.Namespace).List(ofService)
	for _, s := range found {
		for _, e := range s.Endpoints {
			for _, text := range e.Addresses {
				if a, err := netip.ParseAddr(text); err == nil {
					servers = append(servers, a)
				}
			}
		}
	}
	slices.SortFunc(servers, netip.Addr.Compare)
	return slices.Compact(servers)
}

// watchDNS puts dns-dead in force again when cluster DNS moves to other addresses.
func (l *Lab) watchDNS() error {
	on := func(obj any) {
		if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = gone.Obj
		}
		s, ok := obj.(*discoveryv1.EndpointSlice)
		if !ok || s.Namespace != dns.Namespace || s.Labels[discoveryv1.LabelServiceName] != dns.ServiceName {
			return
		}
		if slices.ContainsFunc(l.Faults(), func(f Fault) bool { return f.Kind == DNSDead }) {
			l.enforcing.Kick()
		}
	}
	_, err := l.informers.Discovery().V1().EndpointSlices().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: on, UpdateFunc: func(_, obj any) { on(obj) }, DeleteFunc: on,
	})
	if err != nil {
		return fmt.Errorf("watch the addresses of cluster DNS: %w", err)
	}
	return nil
}
