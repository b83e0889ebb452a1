// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// completeFamilies fills in ipFamilyPolicy and ipFamilies and checks them against
// the families that the cluster has. Its errors come alone, before any other
// validation: what follows would only repeat them in other words. old is nil on
// create.
func (a *serviceAllocator) completeFamilies(s, old *corev1.Service) error {
	if isExternalName(s) || keepsPreference(s, old) {
		return nil
	}
	spec := &s.Spec
	bare := isHeadless(s) && len(spec.Selector) == 0
	if spec.IPFamilyPolicy == nil {
		switch {
		case old != nil && old.Spec.IPFamilyPolicy != nil:
			// A client that does not know the field must not change it.
			spec.IPFamilyPolicy = ptr.To(*old.Spec.IPFamilyPolicy)
		case bare:
			spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyRequireDualStack)
		default:
			spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicySingleStack)
		}
	}
	if errs := validateClusterIPFields(s); len(errs) > 0 {
		return invalidService(s, errs...)
	}
	single := *spec.IPFamilyPolicy == corev1.IPFamilyPolicySingleStack
	var errs field.ErrorList
	switch {
	case old == nil:
	case single:
		trimSecond(s, old)
	default:
		errs = refuseReduction(s, old)
	}
	if errs := append(errs, a.checkPolicy(s, single)...); len(errs) > 0 {
		return invalidService(s, errs...)
	}
	a.addFamilies(s, bare, single)
	return nil
}

// keepsPreference tells whether s is a PreferDualStack Service that stays as it
// was. It is then left alone: what the cluster can do may have changed since, and
// that must not change the Service.
func keepsPreference(s, old *corev1.Service) bool {
	prefers := func(s *corev1.Service) bool {
		return s.Spec.IPFamilyPolicy != nil && *s.Spec.IPFamilyPolicy == corev1.IPFamilyPolicyPreferDualStack
	}
	return old != nil && !isExternalName(old) && prefers(s) && prefers(old) &&
		s.Spec.ClusterIP == old.Spec.ClusterIP &&
		slices.Equal(s.Spec.ClusterIPs, old.Spec.ClusterIPs) && slices.Equal(s.Spec.IPFamilies, old.Spec.IPFamilies)
}

// trimSecond drops the second address and family of a Service whose policy
// became SingleStack while the lists stayed as they were.
func trimSecond(s, old *corev1.Service) {
	if len(s.Spec.ClusterIPs) > 1 && slices.Equal(s.Spec.ClusterIPs, old.Spec.ClusterIPs) {
		s.Spec.ClusterIPs = slices.Clone(s.Spec.ClusterIPs[:1])
	}
	if len(s.Spec.IPFamilies) > 1 && slices.Equal(s.Spec.IPFamilies, old.Spec.IPFamilies) {
		s.Spec.IPFamilies = slices.Clone(s.Spec.IPFamilies[:1])
	}
}

// refuseReduction is the error of a Service that gives up its second address or
// family and does not say so in its policy.
func refuseReduction(s, old *corev1.Service) field.ErrorList {
	reduced := func(now, was int) bool { return now > 0 && now < was }
	refused := func(what string) *field.Error {
		return field.Invalid(field.NewPath("spec", "ipFamilyPolicy"), s.Spec.IPFamilyPolicy, "must be 'SingleStack' to release the secondary "+what)
	}
	var errs field.ErrorList
	if reduced(len(s.Spec.ClusterIPs), len(old.Spec.ClusterIPs)) {
		errs = append(errs, refused("cluster IP"))
	}
	if reduced(len(s.Spec.IPFamilies), len(old.Spec.IPFamilies)) {
		errs = append(errs, refused("IP family"))
	}
	return errs
}

// checkPolicy compares policy, families and addresses, and derives families from
// addresses that were given without them.
func (a *serviceAllocator) checkPolicy(s *corev1.Service, single bool) field.ErrorList {
	spec, path := &s.Spec, field.NewPath("spec")
	bare := isHeadless(s) && len(spec.Selector) == 0
	var errs field.ErrorList
	if single && len(spec.ClusterIPs) == 2 {
		errs = append(errs, field.Invalid(path.Child("ipFamilyPolicy"), spec.IPFamilyPolicy, "must be 'RequireDualStack' or 'PreferDualStack' when multiple cluster IPs are specified"))
	}
	if single && len(spec.IPFamilies) == 2 {
		errs = append(errs, field.Invalid(path.Child("ipFamilyPolicy"), spec.IPFamilyPolicy, "must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified"))
	}
	for i, ip := range spec.ClusterIPs {
		if ip == corev1.ClusterIPNone || i < len(spec.IPFamilies) {
			continue
		}
		// The address is what the client wrote, so the error is about it.
		if f := familyOf(ip); slices.Contains(a.families, f) {
			spec.IPFamilies = append(slices.Clone(spec.IPFamilies), f)
		} else {
			errs = append(errs, field.Invalid(path.Child("clusterIPs").Index(i), spec.ClusterIPs, fmt.Sprintf("%s is not configured on this cluster", f)))
		}
	}
	if len(errs) > 0 || bare {
		return errs
	}
	if *spec.IPFamilyPolicy == corev1.IPFamilyPolicyRequireDualStack && len(a.families) < 2 {
		errs = append(errs, field.Invalid(path.Child("ipFamilyPolicy"), spec.IPFamilyPolicy, "this cluster is not configured for dual-stack services"))
	}
	for i, f := range spec.IPFamilies {
		if !slices.Contains(a.families, f) {
			errs = append(errs, field.Invalid(path.Child("ipFamilies").Index(i), f, "not configured on this cluster"))
		}
	}
	return errs
}

// addFamilies gives s the default family if it has none, and the second one if
// it wants two. A headless Service without a selector gets the second even where
// the cluster has only one: nobody but its writer knows what its endpoints are.
func (a *serviceAllocator) addFamilies(s *corev1.Service, bare, single bool) {
	spec := &s.Spec
	if len(spec.IPFamilies) == 0 {
		spec.IPFamilies = []corev1.IPFamily{a.families[0]}
	}
	if single || len(spec.IPFamilies) > 1 || !bare && len(a.families) < 2 {
		return
	}
	second := corev1.IPv4Protocol
	if spec.IPFamilies[0] == corev1.IPv4Protocol {
		second = corev1.IPv6Protocol
	}
	spec.IPFamilies = append(slices.Clone(spec.IPFamilies), second)
}
