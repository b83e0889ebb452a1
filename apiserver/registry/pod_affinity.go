// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func validatePodAffinity(a *corev1.Affinity, p *field.Path) field.ErrorList {
	if a == nil {
		return nil
	}
	var errs field.ErrorList
	if na := a.NodeAffinity; na != nil {
		np := p.Child("nodeAffinity")
		if required := na.RequiredDuringSchedulingIgnoredDuringExecution; required != nil {
			errs = append(errs, validateNodeSelector(required, np.Child("requiredDuringSchedulingIgnoredDuringExecution"))...)
		}
		for i, t := range na.PreferredDuringSchedulingIgnoredDuringExecution {
			tp := np.Child("preferredDuringSchedulingIgnoredDuringExecution").Index(i)
			errs = append(errs, validateWeight(t.Weight, tp)...)
			errs = append(errs, validateNodeTerm(&t.Preference, tp.Child("preference"))...)
		}
	}
	if pa := a.PodAffinity; pa != nil {
		errs = append(errs, validatePodTerms(pa.RequiredDuringSchedulingIgnoredDuringExecution, pa.PreferredDuringSchedulingIgnoredDuringExecution, p.Child("podAffinity"))...)
	}
	if pa := a.PodAntiAffinity; pa != nil {
		errs = append(errs, validatePodTerms(pa.RequiredDuringSchedulingIgnoredDuringExecution, pa.PreferredDuringSchedulingIgnoredDuringExecution, p.Child("podAntiAffinity"))...)
	}
	return errs
}

func validateWeight(weight int32, p *field.Path) field.ErrorList {
	if weight < 1 || weight > 100 {
		return field.ErrorList{field.Invalid(p.Child("weight"), weight, "must be in the range 1-100")}
	}
	return nil
}

func validateNodeSelector(s *corev1.NodeSelector, p *field.Path) field.ErrorList {
	if len(s.NodeSelectorTerms) == 0 {
		return field.ErrorList{field.Required(p.Child("nodeSelectorTerms"), "must have at least one node selector term")}
	}
	var errs field.ErrorList
	for i := range s.NodeSelectorTerms {
		errs = append(errs, validateNodeTerm(&s.NodeSelectorTerms[i], p.Child("nodeSelectorTerms").Index(i))...)
	}
	return errs
}

func validateNodeTerm(t *corev1.NodeSelectorTerm, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, r := range t.MatchExpressions {
		errs = append(errs, validateRequirement(r, p.Child("matchExpressions").Index(i))...)
	}
	for i, r := range t.MatchFields {
		rp := p.Child("matchFields").Index(i)
		errs = append(errs, oneOf(r.Key, rp.Child("key"), "metadata.name")...)
		errs = append(errs, oneOf(r.Operator, rp.Child("operator"), corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn)...)
		if len(r.Values) != 1 {
			errs = append(errs, field.Required(rp.Child("values"), "must be only one value when `operator` is 'In' or 'NotIn' for node field selector"))
		}
	}
	return errs
}

func validateRequirement(r corev1.NodeSelectorRequirement, p *field.Path) field.ErrorList {
	errs := invalidIf(p.Child("key"), r.Key, validation.IsQualifiedName(r.Key))
	switch r.Operator {
	case corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn:
		if len(r.Values) == 0 {
			errs = append(errs, field.Required(p.Child("values"), "must be specified when `operator` is 'In' or 'NotIn'"))
		}
	case corev1.NodeSelectorOpExists, corev1.NodeSelectorOpDoesNotExist:
		if len(r.Values) > 0 {
			errs = append(errs, field.Forbidden(p.Child("values"), "may not be specified when `operator` is 'Exists' or 'DoesNotExist'"))
		}
	case corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt:
		if len(r.Values) != 1 {
			errs = append(errs, field.Required(p.Child("values"), "must be specified single value when `operator` is 'Lt' or 'Gt'"))
		} else if _, err := strconv.ParseInt(r.Values[0], 10, 64); err != nil {
			errs = append(errs, field.Invalid(p.Child("values").Index(0), r.Values[0], "must be an integer"))
		}
	default:
		errs = append(errs, field.Invalid(p.Child("operator"), r.Operator, "not a valid selector operator"))
	}
	return errs
}

func validatePodTerms(required []corev1.PodAffinityTerm, preferred []corev1.WeightedPodAffinityTerm, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i := range required {
		errs = append(errs, validatePodTerm(&required[i], p.Child("requiredDuringSchedulingIgnoredDuringExecution").Index(i))...)
	}
	for i := range preferred {
		tp := p.Child("preferredDuringSchedulingIgnoredDuringExecution").Index(i)
		errs = append(errs, validateWeight(preferred[i].Weight, tp)...)
		errs = append(errs, validatePodTerm(&preferred[i].PodAffinityTerm, tp.Child("podAffinityTerm"))...)
	}
	return errs
}

func validatePodTerm(t *corev1.PodAffinityTerm, p *field.Path) field.ErrorList {
	errs := validateSelector(t.LabelSelector, p.Child("labelSelector"))
	errs = append(errs, validateSelector(t.NamespaceSelector, p.Child("namespaceSelector"))...)
	for i, ns := range t.Namespaces {
		errs = append(errs, invalidIf(p.Child("namespaces").Index(i), ns, validation.IsDNS1123Label(ns))...)
	}
	if t.TopologyKey == "" {
		return append(errs, field.Required(p.Child("topologyKey"), "can not be empty"))
	}
	return append(errs, invalidIf(p.Child("topologyKey"), t.TopologyKey, validation.IsQualifiedName(t.TopologyKey))...)
}
