// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/dryrun"

	"github.com/kplab/kplab/apiserver/allocator"
)

// serviceREST is the storage of Services. Around each write it keeps the account
// of what the Service takes: begun before the store reads, settled when the
// store's answer is known. The hooks in between (begin) do the allocation.
//
// Hooks alone could not do it. An update's finish function runs before the
// write, which may still lose to another one and start over.
type serviceREST struct {
	kindREST
	alloc *serviceAllocator
}

var (
	_ rest.StandardStorage    = &serviceREST{}
	_ rest.ShortNamesProvider = &serviceREST{}
)

func wrapService(k Kind) func(store *Store, deps Deps) rest.Storage {
	return func(store *Store, deps Deps) rest.Storage {
		a := newServiceAllocator(store, deps)
		store.BeginCreate = func(ctx context.Context, obj runtime.Object, o *metav1.CreateOptions) (registry.FinishFunc, error) {
			return a.begin(ctx, obj.(*corev1.Service), nil, dryrun.IsDryRun(o.DryRun))
		}
		store.BeginUpdate = func(ctx context.Context, obj, old runtime.Object, o *metav1.UpdateOptions) (registry.FinishFunc, error) {
			return a.begin(ctx, obj.(*corev1.Service), old.(*corev1.Service), dryrun.IsDryRun(o.DryRun))
		}
		store.AfterDelete = func(obj runtime.Object, o *metav1.DeleteOptions) {
			if o == nil || !dryrun.IsDryRun(o.DryRun) {
				a.deleted(obj.(*corev1.Service))
			}
		}
		return &serviceREST{kindREST{store, k}, a}
	}
}

// Create implements rest.Creater.
func (r *serviceREST) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc, options *metav1.CreateOptions) (runtime.Object, error) {
	w, err := r.alloc.open(ctx)
	if err != nil {
		return nil, err
	}
	out, err := r.Store.Create(context.WithValue(ctx, serviceWriteKey{}, w), obj, validate, options)
	r.alloc.close(w, out, err)
	return out, err
}

// Update implements rest.Updater.
func (r *serviceREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc, update rest.ValidateObjectUpdateFunc, forceCreate bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	w, err := r.alloc.open(ctx)
	if err != nil {
		return nil, false, err
	}
	out, created, err := r.Store.Update(context.WithValue(ctx, serviceWriteKey{}, w), name, info, create, update, forceCreate, options)
	r.alloc.close(w, out, err)
	return out, created, err
}

// Taken lists the cluster IPs and node ports in use and who has them, for
// people who debug an allocation.
func (r *serviceREST) Taken(ctx context.Context) ([]allocator.Entry, error) {
	if _, err := r.alloc.open(ctx); err != nil {
		return nil, err
	}
	return r.alloc.book.Taken(), nil
}

// CheckServiceRanges tells what is wrong with the ranges of deps, so that a
// server can refuse to start; without it every write of a Service fails.
func CheckServiceRanges(deps Deps) error {
	_, _, err := newBook(deps)
	return err
}

// newBook makes an empty account of the configured ranges and lists
// them, the one of the default family first.
func newBook(deps Deps) (*allocator.Book, []allocator.IPRange, error) {
	first, err := allocator.NewIPRange(deps.ServiceCIDR)
	if err != nil {
		return nil, nil, err
	}
	ranges := []allocator.IPRange{first}
	if deps.SecondaryServiceCIDR.IsValid() {
		second, err := allocator.NewIPRange(deps.SecondaryServiceCIDR)
		if err != nil {
			return nil, nil, err
		}
		if first.Is4() == second.Is4() {
			return nil, nil, fmt.Errorf("the service address ranges %s and %s are of one family; give one of IPv4 and one of IPv6", first.Prefix(), second.Prefix())
		}
		ranges = append(ranges, second)
	}
	ports, err := allocator.NewPortRange(int32(deps.NodePortRange.Base), int32(deps.NodePortRange.Base+deps.NodePortRange.Size-1))
	if err != nil {
		return nil, nil, err
	}
	return allocator.NewBook(allocator.Config{IPs: ranges, Ports: ports}), ranges, nil
}

// serviceWriteKey finds the serviceWrite of a request in its context.
type serviceWriteKey struct{}

// serviceWrite is one request that writes a Service.
type serviceWrite struct {
	// txn belongs to the newest attempt; nil before the first.
	txn                  *allocator.Txn
	uid, namespace, name string
	dryRun               bool
}

// start begins an attempt and gives up the one before it, which lost to another
// write or to a name that was taken.
func (w *serviceWrite) start(book *allocator.Book, s *corev1.Service, dryRun bool) {
	if w.txn != nil {
		w.txn.End()
	}
	w.uid, w.namespace, w.name, w.dryRun = string(s.UID), s.Namespace, s.Name, dryRun
	if dryRun {
		w.txn = book.BeginDryRun(ownerOf(s))
	} else {
		w.txn = book.Begin(ownerOf(s))
	}
}

func ownerOf(s *corev1.Service) allocator.Owner {
	return allocator.Owner{UID: string(s.UID), Namespace: s.Namespace, Name: s.Name}
}

// valuesOf is what a Service takes out of the ranges.
func valuesOf(s *corev1.Service) allocator.Values {
	var v allocator.Values
	for _, text := range s.Spec.ClusterIPs {
		if ip, err := netip.ParseAddr(text); err == nil {
			v.IPs = append(v.IPs, ip.Unmap())
		}
	}
	for _, p := range s.Spec.Ports {
		if p.NodePort != 0 && !slices.Contains(v.Ports, p.NodePort) {
			v.Ports = append(v.Ports, p.NodePort)
		}
	}
	if s.Spec.HealthCheckNodePort != 0 {
		v.Ports = append(v.Ports, s.Spec.HealthCheckNodePort)
	}
	return v
}

func recordOf(s *corev1.Service) allocator.Record {
	// Revisions are decimal numbers; an object without one was not stored.
	revision, _ := strconv.ParseUint(s.ResourceVersion, 10, 64)
	return allocator.Record{Owner: ownerOf(s), Revision: revision, Values: valuesOf(s)}
}

// begin runs in the store's hooks, when the field manager has recorded who set
// what: what is filled in here has no manager. old is nil on create. The returned
// function does nothing, since only close knows what became of the write.
func (a *serviceAllocator) begin(ctx context.Context, s, old *corev1.Service, dryRun bool) (registry.FinishFunc, error) {
	w, ok := ctx.Value(serviceWriteKey{}).(*serviceWrite)
	if !ok {
		return nil, apierrors.NewInternalError(errors.New("a Service was written past its own storage; write it through the API"))
	}
	if old != nil {
		adoptAllocated(s, old)
	}
	alignClusterIPs(s, old)
	if old != nil {
		dropUnneeded(s, old)
	}
	if err := a.completeFamilies(s, old); err != nil {
		return nil, err
	}
	// An update needs the identity of what is stored, the object may lack it.
	w.start(a.book, cmp.Or(old, s), dryRun)
	if err := a.allocate(w.txn, s, old); err != nil {
		// Nothing was written, so nothing is to be settled.
		w.txn.End()
		w.txn = nil
		return nil, err
	}
	return func(context.Context, bool) {}, nil
}

// allocate reserves what s asks for and what it lacks, and writes the latter
// into it.
func (a *serviceAllocator) allocate(txn *allocator.Txn, s, old *corev1.Service) error {
	var before allocator.Values
	if old != nil {
		before = valuesOf(old)
		now := valuesOf(s)
		txn.Keep(allocator.Values{IPs: common(before.IPs, now.IPs), Ports: common(before.Ports, now.Ports)})
	}
	if err := a.allocateIPs(txn, s, old); err != nil {
		return err
	}
	if err := a.allocateNodePorts(txn, s, old, before.Ports); err != nil {
		return err
	}
	return a.allocateHealthCheckNodePort(txn, s, before.Ports)
}

func common[T comparable](a, b []T) []T {
	var both []T
	for _, v := range a {
		if slices.Contains(b, v) {
			both = append(both, v)
		}
	}
	return both
}

// allocateIPs gives s one address for each of its families. Addresses that old
// had are left as they are: whether they may differ is validation's business.
func (a *serviceAllocator) allocateIPs(txn *allocator.Txn, s, old *corev1.Service) error {
	if !needsClusterIP(s) || isHeadless(s) || old != nil && isHeadless(old) {
		return nil
	}
	had := 0
	if old != nil {
		had = len(old.Spec.ClusterIPs)
	}
	ips := slices.Clone(s.Spec.ClusterIPs)
	for i := had; i < max(len(ips), len(s.Spec.IPFamilies)); i++ {
		if i < len(ips) {
			// Validated by completeFamilies.
			ip, err := netip.ParseAddr(ips[i])
			if err == nil {
				err = txn.IP(ip)
			}
			if err != nil {
				return invalidService(s, field.Invalid(field.NewPath("spec", "clusterIPs"), s.Spec.ClusterIPs, fmt.Sprintf("failed to allocate IP %s: %v", ips[i], err)))
			}
			continue
		}
		ip, err := txn.NextIP(s.Spec.IPFamilies[i] == corev1.IPv4Protocol)
		if err != nil {
			return apierrors.NewInternalError(fmt.Errorf("failed to allocate a serviceIP: %w", err))
		}
		ips = append(ips, ip.String())
	}
	s.Spec.ClusterIPs = ips
	if s.Spec.ClusterIP == "" && len(ips) > 0 {
		s.Spec.ClusterIP = ips[0]
	}
	return nil
}

// allocateNodePorts checks the node ports that s names and fills in the others.
// A number belongs to one Service, whatever the protocol; inside of a new one,
// ports of the same number and different protocols share one. A Service that is
// changed gets one for each port, as upstream's.
func (a *serviceAllocator) allocateNodePorts(txn *allocator.Txn, s, old *corev1.Service, before []int32) error {
	if !needsNodePorts(s) {
		return nil
	}
	ports := s.Spec.Ports
	// All that are named come first, so that no pick takes one of them.
	for i, p := range ports {
		if p.NodePort == 0 || slices.Contains(before, p.NodePort) {
			continue
		}
		if err := txn.Port(p.NodePort); err != nil {
			return invalidService(s, field.Invalid(field.NewPath("spec", "ports").Index(i).Child("nodePort"), p.NodePort, err.Error()))
		}
	}
	if isLoadBalancer(s) && s.Spec.AllocateLoadBalancerNodePorts != nil && !*s.Spec.AllocateLoadBalancerNodePorts {
		return nil
	}
	for i := range ports {
		p := &ports[i]
		if p.NodePort != 0 {
			continue
		}
		if old == nil {
			if p.NodePort = sharedNodePort(ports, i); p.NodePort != 0 {
				continue
			}
		}
		port, err := txn.NextPort()
		if err != nil {
			return apierrors.NewInternalError(fmt.Errorf("failed to allocate a nodePort: %w", err))
		}
		p.NodePort = port
	}
	return nil
}

// sharedNodePort is the node port of another port with the number of ports[i],
// when its protocol differs; 0 when there is none.
func sharedNodePort(ports []corev1.ServicePort, i int) int32 {
	for _, o := range ports {
		if o.Port == ports[i].Port && o.Protocol != ports[i].Protocol && o.NodePort != 0 {
			return o.NodePort
		}
	}
	return 0
}

func (a *serviceAllocator) allocateHealthCheckNodePort(txn *allocator.Txn, s *corev1.Service, before []int32) error {
	port := s.Spec.HealthCheckNodePort
	if !needsHealthCheckNodePort(s) || port != 0 && slices.Contains(before, port) {
		return nil
	}
	if port == 0 {
		picked, err := txn.NextPort()
		if err != nil {
			return apierrors.NewInternalError(fmt.Errorf("failed to allocate a HealthCheck NodePort: %w", err))
		}
		s.Spec.HealthCheckNodePort = picked
		return nil
	}
	err := txn.Port(port)
	// The allocator lets one owner have a number twice; the node cannot.
	if slices.ContainsFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.NodePort == port }) {
		err = allocator.ErrPortTaken
	}
	if err != nil {
		// Not a 422 but a 500, as upstream's.
		return apierrors.NewInternalError(fmt.Errorf("failed to allocate requested HealthCheck NodePort %d: %w", port, err))
	}
	return nil
}

func invalidService(s *corev1.Service, errs ...*field.Error) error {
	return apierrors.NewInvalid(schema.GroupKind{Kind: "Service"}, s.Name, errs)
}
