// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

func networkPolicyKind() Kind {
	return Kind{
		Resource: "networkpolicies", Singular: "networkpolicy", Kind: "NetworkPolicy",
		GroupVersion: networkingv1.SchemeGroupVersion, Namespaced: true,
		ShortNames: []string{"netpol"},
		New:        newObject[networkingv1.NetworkPolicy], NewList: newObject[networkingv1.NetworkPolicyList],
		Default:          forObject(defaultNetworkPolicy),
		TracksGeneration: true,
		Validate:         validates(validateNetworkPolicy),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Pod-Selector", "string", "The pods that the policy is about."),
			ageColumn,
		},
		Row: row(func(p *networkingv1.NetworkPolicy) []any {
			return []any{p.Name, metav1.FormatLabelSelector(&p.Spec.PodSelector), age(p.CreationTimestamp)}
		}),
	}
}

func defaultNetworkPolicy(p *networkingv1.NetworkPolicy) {
	if len(p.Spec.PolicyTypes) == 0 {
		// A policy is always about what comes in, and about what goes out when
		// it says anything of it.
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
		if len(p.Spec.Egress) > 0 {
			p.Spec.PolicyTypes = append(p.Spec.PolicyTypes, networkingv1.PolicyTypeEgress)
		}
	}
	ports := func(ports []networkingv1.NetworkPolicyPort) {
		for i := range ports {
			setDefault(&ports[i].Protocol, corev1.ProtocolTCP)
		}
	}
	for i := range p.Spec.Ingress {
		ports(p.Spec.Ingress[i].Ports)
	}
	for i := range p.Spec.Egress {
		ports(p.Spec.Egress[i].Ports)
	}
}

func validateNetworkPolicy(p *networkingv1.NetworkPolicy) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateSelector(&p.Spec.PodSelector, spec.Child("podSelector"))
	for i, r := range p.Spec.Ingress {
		errs = append(errs, validatePolicyRule(r.Ports, r.From, spec.Child("ingress").Index(i), "from")...)
	}
	for i, r := range p.Spec.Egress {
		errs = append(errs, validatePolicyRule(r.Ports, r.To, spec.Child("egress").Index(i), "to")...)
	}
	types := spec.Child("policyTypes")
	if len(p.Spec.PolicyTypes) > 2 {
		return append(errs, field.Invalid(types, &p.Spec.PolicyTypes, "may not specify more than two policyTypes"))
	}
	for i, t := range p.Spec.PolicyTypes {
		if t != networkingv1.PolicyTypeIngress && t != networkingv1.PolicyTypeEgress {
			errs = append(errs, field.NotSupported(types.Index(i), t, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}))
		}
	}
	return errs
}

func validatePolicyRule(ports []networkingv1.NetworkPolicyPort, peers []networkingv1.NetworkPolicyPeer, path *field.Path, direction string) field.ErrorList {
	var errs field.ErrorList
	for i, p := range ports {
		errs = append(errs, validatePolicyPort(p, path.Child("ports").Index(i))...)
	}
	for i, p := range peers {
		errs = append(errs, validatePolicyPeer(p, path.Child(direction).Index(i))...)
	}
	return errs
}

func validatePolicyPort(p networkingv1.NetworkPolicyPort, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	switch proto := ptr.Deref(p.Protocol, corev1.ProtocolTCP); proto {
	case corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP:
	default:
		errs = append(errs, field.NotSupported(path.Child("protocol"), proto, []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}))
	}
	end := path.Child("endPort")
	if p.Port == nil {
		if p.EndPort != nil {
			errs = append(errs, field.Invalid(end, *p.EndPort, "may not be specified when `port` is not specified"))
		}
		return errs
	}
	if p.EndPort != nil && p.Port.Type == intstr.String {
		errs = append(errs, field.Invalid(end, *p.EndPort, "may not be specified when `port` is non-numeric"))
	}
	errs = append(errs, validatePortNumOrName(path.Child("port"), *p.Port)...)
	if p.EndPort != nil && p.Port.Type == intstr.Int {
		if *p.EndPort < p.Port.IntVal {
			errs = append(errs, field.Invalid(end, *p.EndPort, "must be greater than or equal to `port`"))
		}
		errs = append(errs, invalidIf(end, *p.EndPort, utilvalidation.IsValidPortNum(int(*p.EndPort)))...)
	}
	return errs
}

func validatePolicyPeer(p networkingv1.NetworkPolicyPeer, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	selects := p.PodSelector != nil || p.NamespaceSelector != nil
	if p.PodSelector != nil {
		errs = append(errs, validateSelector(p.PodSelector, path.Child("podSelector"))...)
	}
	if p.NamespaceSelector != nil {
		errs = append(errs, validateSelector(p.NamespaceSelector, path.Child("namespaceSelector"))...)
	}
	if p.IPBlock != nil {
		errs = append(errs, validateIPBlock(p.IPBlock, path.Child("ipBlock"))...)
	}
	switch {
	case !selects && p.IPBlock == nil:
		errs = append(errs, field.Required(path, "must specify a peer"))
	case selects && p.IPBlock != nil:
		errs = append(errs, field.Forbidden(path, "may not specify both ipBlock and another peer"))
	}
	return errs
}

func validateIPBlock(b *networkingv1.IPBlock, path *field.Path) field.ErrorList {
	cidr := path.Child("cidr")
	if b.CIDR == "" {
		return field.ErrorList{field.Required(cidr, "")}
	}
	errs := utilvalidation.IsValidCIDRForLegacyField(cidr, b.CIDR, true, nil)
	whole, err := netip.ParsePrefix(b.CIDR)
	if err != nil {
		return errs
	}
	for i, e := range b.Except {
		path := path.Child("except").Index(i)
		errs = append(errs, utilvalidation.IsValidCIDRForLegacyField(path, e, true, nil)...)
		part, err := netip.ParsePrefix(e)
		if err == nil && (!whole.Contains(part.Addr()) || whole.Bits() >= part.Bits()) {
			errs = append(errs, field.Invalid(path, e, "must be a strict subset of `cidr`"))
		}
	}
	return errs
}
