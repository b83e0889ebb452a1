// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/kplab/kplab/controller"
	"github.com/kplab/kplab/controller/loadbalancer"
	"github.com/kplab/kplab/node"
)

// LoadBalancerConfig holds the settings of the load balancer.
type LoadBalancerConfig struct {
	// Pool is the addresses for Services: prefixes, ranges (FIRST-LAST) and single
	// addresses of the node network, separated by commas. Empty means that there is
	// no load balancer, and EXTERNAL-IP stays <pending>.
	Pool string `json:"pool,omitempty"`
}

func (c LoadBalancerConfig) validate(plan controller.AddressPlan) error {
	if c.Pool == "" {
		return nil
	}
	if _, err := loadbalancer.ParsePool(c.Pool, plan); err != nil {
		return fmt.Errorf("loadBalancer.pool: %w", err)
	}
	return nil
}

// addressPlan is what is taken of the lab's ranges.
func (c *Config) addressPlan() controller.AddressPlan {
	n := c.Networking
	plan := controller.AddressPlan{
		NodeSubnets: []netip.Prefix{n.NodeSubnet}, PodSubnets: []netip.Prefix{n.PodSubnet},
		ServiceSubnets: []netip.Prefix{n.ServiceSubnet}, Taken: map[netip.Addr]string{n.Outside: "the client outside"},
	}
	if second := n.Secondary; second.NodeSubnet.IsValid() {
		plan.NodeSubnets = append(plan.NodeSubnets, second.NodeSubnet)
		plan.PodSubnets = append(plan.PodSubnets, second.PodSubnet)
		plan.ServiceSubnets = append(plan.ServiceSubnets, second.ServiceSubnet)
		plan.Taken[second.Outside] = "the client outside"
	}
	fabric := node.FabricConfig{Subnet: n.NodeSubnet, Outside: n.Outside, SecondarySubnet: n.Secondary.NodeSubnet, SecondaryOutside: n.Secondary.Outside}
	for _, k := range c.Nodes {
		plan.Taken[k.Address] = "node " + k.Name
		if k.Secondary.Address.IsValid() {
			plan.Taken[k.Secondary.Address] = "node " + k.Name
		}
		fabric.Nodes = append(fabric.Nodes, node.Peer{Name: k.Name, IP: k.Address, SecondaryIP: k.Secondary.Address})
	}
	for _, ip := range fabric.Routers() {
		plan.Taken[ip] = "the router of the node network"
	}
	return plan
}

// dialOutside connects from the client outside, as a load balancer in front of the
// cluster would.
func (l *Lab) dialOutside() controller.Dialer {
	ns, err := l.runtime.NetNS(node.OutsideNS)
	if err != nil {
		return nil // a lab without it
	}
	return ns.Dial
}

// poolObject is the pool as the API has it.
func poolObject(pool string) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: loadbalancer.ConfigMap, Namespace: loadbalancer.Namespace},
		Data:       map[string]string{loadbalancer.PoolKey: pool},
	}
}

// keepPool makes the pool of the API that of the settings.
func (l *Lab) keepPool(ctx context.Context) error {
	api := l.client.CoreV1().ConfigMaps(loadbalancer.Namespace)
	pool := l.cfg.LoadBalancer.Pool
	have, err := api.Get(ctx, loadbalancer.ConfigMap, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err) && pool == "":
		return nil
	case apierrors.IsNotFound(err):
		// In a new lab the namespace is made by a controller that does not run yet.
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: loadbalancer.Namespace}}
		if _, err := l.client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("make namespace %s: %w", loadbalancer.Namespace, err)
		}
		_, err = api.Create(ctx, poolObject(pool), metav1.CreateOptions{})
	case err != nil:
	case pool == "":
		err = api.Delete(ctx, loadbalancer.ConfigMap, metav1.DeleteOptions{})
	case !maps.Equal(have.Data, poolObject(pool).Data):
		have.Data = poolObject(pool).Data
		_, err = api.Update(ctx, have, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("write the load balancer's pool: %w", err)
	}
	return nil
}

// SetLoadBalancer gives the running lab a pool, or with "" takes it away. Services
// keep addresses that the new pool has too. The settings are kept for the next start.
func (l *Lab) SetLoadBalancer(ctx context.Context, pool string) error {
	want := LoadBalancerConfig{Pool: pool}
	l.proxyMu.Lock()
	if err := want.validate(l.cfg.addressPlan()); err != nil {
		l.proxyMu.Unlock()
		return err
	}
	before := l.cfg.LoadBalancer
	l.cfg.LoadBalancer = want
	err := l.keepPool(ctx)
	if err != nil {
		l.cfg.LoadBalancer = before
	} else {
		err = writeJSON(l.paths.Settings(), settings{Config: l.cfg, APIPort: l.apiPort}, 0o600)
	}
	l.proxyMu.Unlock()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	return l.Settle(ctx)
}

// LoadBalancerStatus says what the load balancer has and gave.
type LoadBalancerStatus struct {
	// Pool is what is in force; empty when there is no load balancer.
	Pool string `json:"pool"`
	// Size is how many addresses the pool has, IPv4 and IPv6 together.
	Size     string                `json:"size,omitempty"`
	Services []loadbalancer.Holder `json:"services"`
}

// LoadBalancer returns how the load balancer is now.
func (l *Lab) LoadBalancer() LoadBalancerStatus {
	// The listers read memory; they have no errors to give but "not found".
	services, _ := l.informers.Core().V1().Services().Lister().List(labels.Everything())
	s := LoadBalancerStatus{Services: slices.Clip(loadbalancer.Holders(services))}
	if s.Services == nil {
		s.Services = []loadbalancer.Holder{}
	}
	m, err := l.informers.Core().V1().ConfigMaps().Lister().ConfigMaps(loadbalancer.Namespace).Get(loadbalancer.ConfigMap)
	if err != nil {
		return s
	}
	s.Pool = m.Data[loadbalancer.PoolKey]
	l.proxyMu.Lock()
	plan := l.cfg.addressPlan()
	l.proxyMu.Unlock()
	if p, err := loadbalancer.ParsePool(s.Pool, plan); err == nil {
		n := p.Size(corev1.IPv4Protocol)
		s.Size = n.Add(n, p.Size(corev1.IPv6Protocol)).String()
	}
	return s
}

// LoadBalancer asks the daemon for [Lab.LoadBalancer].
func (c *Client) LoadBalancer(ctx context.Context) (LoadBalancerStatus, error) {
	var s LoadBalancerStatus
	return s, c.call(ctx, http.MethodGet, "/lb", &s)
}

// SetLoadBalancer is [Lab.SetLoadBalancer] of the running lab.
func (c *Client) SetLoadBalancer(ctx context.Context, pool string) error {
	return c.call(ctx, http.MethodPost, "/lb?"+url.Values{"pool": {pool}}.Encode(), nil)
}

// DefaultPool is the pool for a person who names none: the last 16 addresses of the
// node network, or "" where that is too small or they are taken.
func (c *Config) DefaultPool() string {
	subnet := c.Networking.NodeSubnet
	if subnet.Bits() > 26 {
		return ""
	}
	pool := netip.PrefixFrom(nth(subnet, 1<<(32-subnet.Bits())-16), 28).String()
	if (LoadBalancerConfig{Pool: pool}).validate(c.addressPlan()) != nil {
		return ""
	}
	return pool
}
