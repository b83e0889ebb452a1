// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/kplab/kplab/apiserver/allocator"
)

// serviceCIDRKind is the ranges of cluster IPs (KEP-1880). The object kubernetes says
// which range the lab was made with; further ones give addresses from when they are
// Ready until their deletion is asked for.
func serviceCIDRKind() Kind {
	return Kind{
		Resource: "servicecidrs", Singular: "servicecidr", Kind: "ServiceCIDR",
		GroupVersion: networkingv1.SchemeGroupVersion,
		New:          newObject[networkingv1.ServiceCIDR], NewList: newObject[networkingv1.ServiceCIDRList],
		TracksGeneration: true,
		ValidateCreate: validates(func(c *networkingv1.ServiceCIDR) field.ErrorList {
			return validateCIDRs(c.Spec.CIDRs, field.NewPath("spec", "cidrs"))
		}),
		ValidateUpdate: validatesUpdate(validateServiceCIDRUpdate),
		Status:         &StatusStrategy{},
		Hooks: func(deps Deps) Hooks {
			changed := func(runtime.Object) { deps.serviceRanges.changed() }
			return Hooks{
				AfterCreate: func(obj runtime.Object, _ *metav1.CreateOptions) { changed(obj) },
				AfterUpdate: func(obj runtime.Object, _ *metav1.UpdateOptions) { changed(obj) },
				AfterDelete: func(obj runtime.Object, _ *metav1.DeleteOptions) { changed(obj) },
			}
		},
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("CIDRs", "string", "The ranges, one for each IP family."),
			ageColumn,
		},
		Row: row(func(c *networkingv1.ServiceCIDR) []any {
			return []any{c.Name, strings.Join(c.Spec.CIDRs, ","), age(c.CreationTimestamp)}
		}),
	}
}

// serviceCIDRFinalizer keeps a ServiceCIDR for as long as a Service has an address
// that only it holds; its controller removes it.
const serviceCIDRFinalizer = "networking.k8s.io/service-cidr-finalizer"

// DefaultServiceCIDR is the object for the ranges that a lab was made with.
// Those that are not valid are left out.
func DefaultServiceCIDR(ranges ...netip.Prefix) *networkingv1.ServiceCIDR {
	var cidrs []string
	for _, r := range ranges {
		if r.IsValid() {
			cidrs = append(cidrs, r.Masked().String())
		}
	}
	return &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{
			Name: "kubernetes", Generation: 1,
			Finalizers: []string{serviceCIDRFinalizer},
		},
		Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs},
		Status: networkingv1.ServiceCIDRStatus{Conditions: []metav1.Condition{{
			Type: networkingv1.ServiceCIDRConditionReady, Status: metav1.ConditionTrue,
			LastTransitionTime: metav1.Now(), Message: "Kubernetes Service CIDR is ready",
		}}},
	}
}

// serviceRanges tells the allocator of Services that a ServiceCIDR was written, so
// that it reads them again before the next write of a Service.
type serviceRanges struct{ stale atomic.Bool }

func (r *serviceRanges) changed() { r.stale.Store(true) }

// takeChange tells whether there was a change since the last call.
func (r *serviceRanges) takeChange() bool { return r.stale.CompareAndSwap(true, false) }

// rangesOf are the ranges of those cidrs that give addresses: Ready, and not being
// deleted. The oldest come first.
func rangesOf(cidrs []networkingv1.ServiceCIDR) []allocator.IPRange {
	slices.SortStableFunc(cidrs, func(a, b networkingv1.ServiceCIDR) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	var ranges []allocator.IPRange
	for _, c := range cidrs {
		if c.DeletionTimestamp != nil || !meta.IsStatusConditionTrue(c.Status.Conditions, networkingv1.ServiceCIDRConditionReady) {
			continue
		}
		for _, text := range c.Spec.CIDRs {
			prefix, err := netip.ParsePrefix(text)
			if err != nil {
				continue // validation lets none pass
			}
			// One that holds no address, a /32, gives none.
			if r, err := allocator.NewIPRange(prefix); err == nil {
				ranges = append(ranges, r)
			}
		}
	}
	return ranges
}

func validateCIDRs(cidrs []string, path *field.Path) field.ErrorList {
	if len(cidrs) == 0 {
		return field.ErrorList{field.Required(path, "at least one CIDR required")}
	}
	if len(cidrs) > 2 {
		return field.ErrorList{field.Invalid(path, cidrs, "may only hold up to 2 values")}
	}
	var errs field.ErrorList
	families := map[bool]bool{}
	for i, c := range cidrs {
		errs = append(errs, utilvalidation.IsValidCIDR(path.Index(i), c)...)
		if p, err := netip.ParsePrefix(c); err == nil {
			if families[p.Addr().Is4()] {
				errs = append(errs, field.Invalid(path, cidrs, "may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64"))
			}
			families[p.Addr().Is4()] = true
		}
	}
	return errs
}

// validateServiceCIDRUpdate allows one change: a second family is added.
func validateServiceCIDRUpdate(c, old *networkingv1.ServiceCIDR) field.ErrorList {
	path := field.NewPath("spec", "cidrs")
	now, was := c.Spec.CIDRs, old.Spec.CIDRs
	grows := len(was) == 1 && len(now) == 2
	if !grows && len(now) != len(was) {
		return field.ErrorList{field.Invalid(path, now, apivalidation.FieldImmutableErrorMsg)}
	}
	var errs field.ErrorList
	for i := range was {
		if now[i] != was[i] {
			errs = append(errs, field.Invalid(path.Index(i), now[i], apivalidation.FieldImmutableErrorMsg))
		}
	}
	if grows {
		errs = append(errs, validateCIDRs(now, path)...)
	}
	return errs
}
