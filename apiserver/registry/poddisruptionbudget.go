// SPDX-License-Identifier: Apache-2.0

package registry

import (
	policyv1 "k8s.io/api/policy/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func podDisruptionBudgetKind() Kind {
	return Kind{
		Resource: "poddisruptionbudgets", Singular: "poddisruptionbudget", Kind: "PodDisruptionBudget",
		GroupVersion: policyv1.SchemeGroupVersion, Namespaced: true,
		ShortNames:             []string{"pdb"},
		New:                    newObject[policyv1.PodDisruptionBudget],
		NewList:                newObject[policyv1.PodDisruptionBudgetList],
		TracksGeneration:       true,
		RequireResourceVersion: true,
		Validate:               validates(validateBudget),
		Status: &StatusStrategy{Validate: validatesUpdate(func(b, _ *policyv1.PodDisruptionBudget) field.ErrorList {
			s, path := &b.Status, field.NewPath("status")
			errs := apivalidation.ValidateNonnegativeField(s.ObservedGeneration, path.Child("observedGeneration"))
			for _, c := range []counter{
				{"disruptionsAllowed", s.DisruptionsAllowed}, {"currentHealthy", s.CurrentHealthy},
				{"desiredHealthy", s.DesiredHealthy}, {"expectedPods", s.ExpectedPods},
			} {
				errs = append(errs, notNegative(path.Child(c.name), c.value)...)
			}
			return errs
		})},
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Min Available", "string", "How many pods must stay."),
			column("Max Unavailable", "string", "How many pods may be missing."),
			column("Allowed Disruptions", "integer", "How many pods may be evicted now."),
			ageColumn,
		},
		Row: row(func(b *policyv1.PodDisruptionBudget) []any {
			return []any{b.Name, orNA(b.Spec.MinAvailable), orNA(b.Spec.MaxUnavailable), int64(b.Status.DisruptionsAllowed), age(b.CreationTimestamp)}
		}),
	}
}

func orNA(v *intstr.IntOrString) string {
	if v == nil {
		return "N/A"
	}
	return v.String()
}

func validateBudget(b *policyv1.PodDisruptionBudget) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	if b.Spec.MinAvailable != nil && b.Spec.MaxUnavailable != nil {
		errs = append(errs, field.Invalid(spec, b.Spec, "minAvailable and maxUnavailable cannot be both set"))
	}
	for name, v := range map[string]*intstr.IntOrString{"minAvailable": b.Spec.MinAvailable, "maxUnavailable": b.Spec.MaxUnavailable} {
		if v != nil {
			errs = append(errs, validateIntOrPercent(*v, spec.Child(name))...)
			errs = append(errs, atMost100Percent(*v, spec.Child(name))...)
		}
	}
	errs = append(errs, validateSelector(b.Spec.Selector, spec.Child("selector"))...)
	if p := b.Spec.UnhealthyPodEvictionPolicy; p != nil {
		errs = append(errs, oneOf(*p, spec.Child("unhealthyPodEvictionPolicy"), policyv1.IfHealthyBudget, policyv1.AlwaysAllow)...)
	}
	return errs
}
