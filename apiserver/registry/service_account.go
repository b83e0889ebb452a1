// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"

	"github.com/kplab/kplab/apiserver/allocator"
)

// serviceAllocator keeps the account of cluster IPs and node ports. Nothing of it
// is on disk: a start, or the first write after it, derives it from the stored
// Services.
type serviceAllocator struct {
	store    *Store
	book     *allocator.Book
	families []corev1.IPFamily   // the first one is the default
	broken   error               // why there is no book
	fixed    []allocator.IPRange // the ranges that the lab was made with
	deps     Deps

	mu     sync.Mutex
	loaded bool
	// problems are the stored values that the load found to be wrong.
	problems []serviceProblem
	// unclear are writes of which the store could not say whether they are
	// stored. What they hold stays taken until a look at the store settles it.
	unclear []*serviceWrite
}

func newServiceAllocator(store *Store, deps Deps) *serviceAllocator {
	a := &serviceAllocator{store: store, deps: deps}
	if a.book, a.fixed, a.broken = newBook(deps); a.broken != nil {
		a.broken = apierrors.NewInternalError(fmt.Errorf("no Service can be written: %w", a.broken))
	}
	for _, r := range a.fixed {
		a.families = append(a.families, familyOf(r.Prefix().Addr().String()))
	}
	return a
}

// open begins a write. It derives the account from the store if that has not
// happened yet, and settles writes whose end was unclear.
func (a *serviceAllocator) open(ctx context.Context) (*serviceWrite, error) {
	if a.broken != nil {
		return nil, a.broken
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.deps.serviceRanges.takeChange() || !a.loaded {
		if err := a.readRanges(ctx); err != nil {
			a.deps.serviceRanges.changed()
			return nil, err
		}
	}
	if !a.loaded {
		if err := a.load(ctx); err != nil {
			return nil, err
		}
	}
	if len(a.unclear) > 0 {
		a.clear(ctx)
	}
	return &serviceWrite{}, nil
}

// readRanges makes the ranges those that the lab was made with and those of the
// ServiceCIDRs. The former need no object: without them there would be no Service
// kubernetes. The caller holds a.mu.
func (a *serviceAllocator) readRanges(ctx context.Context) error {
	cidrs := a.deps.Lookup("servicecidrs")
	if cidrs == nil {
		return nil // a server with fewer kinds, as tests make them
	}
	list, err := cidrs.List(genericapirequest.WithNamespace(ctx, metav1.NamespaceNone), &internalversion.ListOptions{})
	if err != nil {
		return err
	}
	ranges := slices.Clone(a.fixed)
	for _, r := range rangesOf(list.(*networkingv1.ServiceCIDRList).Items) {
		if !slices.ContainsFunc(ranges, func(o allocator.IPRange) bool { return o.Prefix() == r.Prefix() }) {
			ranges = append(ranges, r)
		}
	}
	a.book.SetRanges(ranges)
	return nil
}

// load derives the account from the stored Services. Of two that have the same
// value, which no server of ours lets happen, the older one keeps it. The caller
// holds a.mu.
func (a *serviceAllocator) load(ctx context.Context) error {
	list, err := a.store.List(genericapirequest.WithNamespace(ctx, metav1.NamespaceAll), &internalversion.ListOptions{})
	if err != nil {
		return err
	}
	services := list.(*corev1.ServiceList).Items
	slices.SortStableFunc(services, func(x, y corev1.Service) int {
		return cmp.Or(x.CreationTimestamp.Compare(y.CreationTimestamp.Time), strings.Compare(string(x.UID), string(y.UID)))
	})
	records := make([]allocator.Record, 0, len(services))
	for i := range services {
		records = append(records, recordOf(&services[i]))
		a.problems = append(a.problems, unreadableIPs(&services[i])...)
	}
	for _, p := range a.book.Load(records) {
		a.problems = append(a.problems, a.problemOf(p))
	}
	a.loaded = true
	return nil
}

// close settles a write by the store's answer.
func (a *serviceAllocator) close(w *serviceWrite, out runtime.Object, err error) {
	switch {
	case w.txn == nil:
	case err == nil && !w.dryRun:
		a.stored(w, out.(*corev1.Service))
	case err == nil || w.dryRun || refused(err):
		w.txn.End()
	default:
		a.mu.Lock()
		defer a.mu.Unlock()
		a.unclear = append(a.unclear, w)
	}
}

func (a *serviceAllocator) stored(w *serviceWrite, s *corev1.Service) {
	r := recordOf(s)
	w.txn.Store(r.Revision, r.Values)
}

// refused tells whether err is a definite no: an answer of the API about the
// request, as opposed to a failure on the way to the disk.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	code := status.Status().Code
	return code >= http.StatusBadRequest && code < http.StatusInternalServerError
}

// clear looks in the store what became of the unclear writes. Those that it
// cannot read stay. The caller holds a.mu.
func (a *serviceAllocator) clear(ctx context.Context) {
	const patience = 10 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var still []*serviceWrite
	for _, w := range a.unclear {
		obj, err := a.store.Get(genericapirequest.WithNamespace(ctx, w.namespace), w.name, &metav1.GetOptions{})
		switch {
		case err == nil && string(obj.(*corev1.Service).UID) == w.uid:
			a.stored(w, obj.(*corev1.Service))
		case err == nil || apierrors.IsNotFound(err):
			w.txn.End()
		default:
			still = append(still, w)
		}
	}
	a.unclear = still
}

// deleted gives back what a Service had. It waits for a load in progress, which
// may have seen the Service.
func (a *serviceAllocator) deleted(s *corev1.Service) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.loaded {
		a.book.Deleted(ownerOf(s))
	}
}
