// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"net/netip"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// serviceCIDRKind is the record of the ranges of cluster IPs. A lab's range is
// fixed when it is made: the object kubernetes says which it is, and further
// ones are stored but give no addresses.
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
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes", Generation: 1},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: cidrs},
		Status: networkingv1.ServiceCIDRStatus{Conditions: []metav1.Condition{{
			Type: networkingv1.ServiceCIDRConditionReady, Status: metav1.ConditionTrue,
			LastTransitionTime: metav1.Now(), Message: "Kubernetes Service CIDR is ready",
		}}},
	}
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
