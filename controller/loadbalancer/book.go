// SPDX-License-Identifier: Apache-2.0

package loadbalancer

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/loop"
)

// Annotations of a Service with which a person chooses. The names of MetalLB mean the
// same, so that a manifest written for it works.
const (
	// AnnotationIPs lists the wanted addresses, at most one a family.
	AnnotationIPs = "kplab/loadBalancerIPs"
	// AnnotationShare is a word of one's own: Services with the same may share an
	// address.
	AnnotationShare = "kplab/allow-shared-ip"
)

// annotation reads a Service's annotation under our name or one of MetalLB's.
func annotation(svc *corev1.Service, name string) string {
	for _, prefix := range []string{"kplab/", "metallb.io/", "metallb.universe.tf/"} {
		if v := svc.Annotations[prefix+strings.TrimPrefix(name, "kplab/")]; v != "" {
			return v
		}
	}
	return ""
}

// tenant is what matters of a Service for who may live at an address with it.
type tenant struct {
	key   loop.Key
	addrs []netip.Addr
	// share is the sharing key; empty for a Service that wants to be alone.
	share string
	ports []string // "80/TCP"
	// backend is empty for policy Cluster, else the pods that traffic is for: the
	// same node has to announce the address for all who share it.
	backend string
}

func tenantOf(svc *corev1.Service) *tenant {
	t := &tenant{key: loop.KeyOf(svc), share: annotation(svc, AnnotationShare)}
	for _, p := range svc.Spec.Ports {
		t.ports = append(t.ports, fmt.Sprintf("%d/%s", p.Port, p.Protocol))
	}
	if svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		t.backend = svc.Namespace + ": " + labels.Set(svc.Spec.Selector).String()
	}
	return t
}

// conflict says why two Services cannot share an address; nil when they can.
func (t *tenant) conflict(o *tenant) error {
	switch {
	case t.share == "" || t.share != o.share:
		return fmt.Errorf("used by Service %s; two Services share an address when both have the annotation %s with the same value", o.key, AnnotationShare)
	case slices.ContainsFunc(t.ports, func(p string) bool { return slices.Contains(o.ports, p) }):
		both := t.ports[slices.IndexFunc(t.ports, func(p string) bool { return slices.Contains(o.ports, p) })]
		return fmt.Errorf("used by Service %s, which has port %s as well", o.key, both)
	case t.backend != o.backend:
		return fmt.Errorf("used by Service %s; Services with externalTrafficPolicy Local share an address only with those that have it too and select the same pods", o.key)
	}
	return nil
}

// book knows who has which address. It is derived from the Services' status and from
// what was written a moment ago; there is no other record that could disagree.
type book struct{ tenants map[loop.Key]*tenant }

func newBook() *book { return &book{tenants: map[loop.Key]*tenant{}} }

// hold notes what a Service has; with no address it is forgotten. It reports whether
// an address became free.
func (b *book) hold(t *tenant) (freed bool) {
	old := b.tenants[t.key]
	if len(t.addrs) == 0 {
		delete(b.tenants, t.key)
	} else {
		b.tenants[t.key] = t
	}
	return old != nil && slices.ContainsFunc(old.addrs, func(a netip.Addr) bool { return !slices.Contains(t.addrs, a) })
}

// free says why t cannot have a; nil when it can.
func (b *book) free(t *tenant, a netip.Addr, nodes map[netip.Addr]string) error {
	if node := nodes[a]; node != "" {
		return fmt.Errorf("address %s is that of node %s", a, node)
	}
	for _, key := range slices.SortedFunc(maps.Keys(b.tenants), compareKeys) {
		o := b.tenants[key]
		if key == t.key || !slices.Contains(o.addrs, a) {
			continue
		}
		if err := t.conflict(o); err != nil {
			return fmt.Errorf("address %s is %w", a, err)
		}
	}
	return nil
}

func compareKeys(a, b loop.Key) int { return strings.Compare(a.String(), b.String()) }

// requested returns the addresses that the Service asks for.
func requested(svc *corev1.Service) ([]netip.Addr, error) {
	text, from := annotation(svc, AnnotationIPs), "annotation "+AnnotationIPs
	if ip := svc.Spec.LoadBalancerIP; ip != "" {
		if text != "" && text != ip {
			return nil, fmt.Errorf("spec.loadBalancerIP wants %s and the annotation %s; give one of them", ip, text)
		}
		text, from = ip, "spec.loadBalancerIP"
	}
	var out []netip.Addr
	for _, word := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' }) {
		a, err := netip.ParseAddr(word)
		if err != nil {
			return nil, fmt.Errorf("%s %q: no IP address", from, word)
		}
		if slices.ContainsFunc(out, func(o netip.Addr) bool { return familyOf(o) == familyOf(a) }) {
			return nil, fmt.Errorf("%s %q: more than one address of a family", from, text)
		}
		if !slices.Contains(svc.Spec.IPFamilies, familyOf(a)) {
			return nil, fmt.Errorf("%s %s: the Service has no %s", from, a, familyOf(a))
		}
		out = append(out, a)
	}
	return out, nil
}

// assign chooses the addresses of a Service, one for each of its families: what it
// asks for, else what it has, else one that it may share, else the lowest free one.
// nodes are the nodes' own addresses, which nobody gets.
func (b *book) assign(svc *corev1.Service, pool Pool, nodes map[netip.Addr]string) ([]netip.Addr, error) {
	wanted, err := requested(svc)
	if err != nil {
		return nil, err
	}
	t := tenantOf(svc)
	may := func(a netip.Addr) error { return errors.Join(pool.check(a), b.free(t, a, nodes)) }
	var out []netip.Addr
	for _, family := range svc.Spec.IPFamilies {
		ofFamily := func(a netip.Addr) bool { return familyOf(a) == family }
		if i := slices.IndexFunc(wanted, ofFamily); i >= 0 {
			if err := may(wanted[i]); err != nil {
				return nil, err
			}
			out = append(out, wanted[i])
			continue
		}
		if i := slices.IndexFunc(current(svc), ofFamily); i >= 0 && may(current(svc)[i]) == nil {
			out = append(out, current(svc)[i])
			continue
		}
		a, err := b.pick(t, pool, family, may)
		switch {
		case err == nil:
			out = append(out, a)
		case len(svc.Spec.IPFamilies) > 1 && pool.Size(family).Sign() == 0 && ptr.Deref(svc.Spec.IPFamilyPolicy, corev1.IPFamilyPolicySingleStack) != corev1.IPFamilyPolicyRequireDualStack:
			// The other family may have one.
		default:
			return nil, err
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("the pool %s has no address of the Service's families", pool)
	}
	return out, nil
}

// pick finds an address that nobody asked for by name.
func (b *book) pick(t *tenant, pool Pool, family corev1.IPFamily, may func(netip.Addr) error) (netip.Addr, error) {
	if t.share != "" {
		for _, key := range slices.SortedFunc(maps.Keys(b.tenants), compareKeys) {
			for _, a := range b.tenants[key].addrs {
				if key != t.key && b.tenants[key].share == t.share && familyOf(a) == family && may(a) == nil {
					return a, nil
				}
			}
		}
	}
	for a := range pool.addresses(family) {
		if may(a) == nil {
			return a, nil
		}
	}
	size := pool.Size(family)
	if size.Sign() == 0 {
		return netip.Addr{}, fmt.Errorf("the pool %s has no %s addresses", pool, family)
	}
	return netip.Addr{}, fmt.Errorf("the pool %s has no free %s address: all %s are in use; delete a Service or enlarge it with `kplab lb enable --pool`", pool, family, size)
}

// current returns the addresses in the Service's status.
func current(svc *corev1.Service) []netip.Addr {
	var out []netip.Addr
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if a, err := netip.ParseAddr(in.IP); err == nil {
			out = append(out, a)
		}
	}
	return out
}
