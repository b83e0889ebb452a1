// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func resourceQuotaKind() Kind {
	return Kind{
		Resource: "resourcequotas", Singular: "resourcequota", Kind: "ResourceQuota",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		ShortNames: []string{"quota"},
		New:        newObject[corev1.ResourceQuota], NewList: newObject[corev1.ResourceQuotaList],
		Validate: validates(func(q *corev1.ResourceQuota) field.ErrorList {
			return validateQuotaSpec(&q.Spec, field.NewPath("spec"))
		}),
		ValidateUpdate: validatesUpdate(func(q, old *corev1.ResourceQuota) field.ErrorList {
			now, was := slices.Sorted(slices.Values(q.Spec.Scopes)), slices.Sorted(slices.Values(old.Spec.Scopes))
			if slices.Equal(now, was) {
				return nil
			}
			return field.ErrorList{field.Invalid(field.NewPath("spec", "scopes"), q.Spec.Scopes, "field is immutable")}
		}),
		Status: &StatusStrategy{Validate: validatesUpdate(func(q, _ *corev1.ResourceQuota) field.ErrorList {
			status := field.NewPath("status")
			errs := validateAmounts(q.Status.Hard, status.Child("hard"))
			return append(errs, validateAmounts(q.Status.Used, status.Child("used"))...)
		})},
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Request", "string", "What may be requested, and what is."),
			column("Limit", "string", "What limits may be set, and what are."),
			ageColumn,
		},
		Row: row(func(q *corev1.ResourceQuota) []any {
			var requests, limits []string
			for _, name := range slices.Sorted(maps.Keys(q.Status.Hard)) {
				hard, used := q.Status.Hard[name], q.Status.Used[name]
				text := fmt.Sprintf("%s: %s/%s", name, used.String(), hard.String())
				if strings.HasPrefix(string(name), "limits") {
					limits = append(limits, text)
				} else {
					requests = append(requests, text)
				}
			}
			return []any{q.Name, strings.Join(requests, ", "), strings.Join(limits, ", "), age(q.CreationTimestamp)}
		}),
	}
}

func validateQuotaSpec(s *corev1.ResourceQuotaSpec, path *field.Path) field.ErrorList {
	errs := validateAmounts(s.Hard, path.Child("hard"))
	for _, scope := range s.Scopes {
		if !isQuotaScope(scope) {
			errs = append(errs, field.Invalid(path.Child("scopes"), s.Scopes, "unsupported scope"))
		}
	}
	if s.ScopeSelector == nil {
		return errs
	}
	selector := path.Child("scopeSelector")
	for _, r := range s.ScopeSelector.MatchExpressions {
		match := selector.Child("matchExpressions")
		if !isQuotaScope(r.ScopeName) {
			errs = append(errs, field.Invalid(match.Child("scopeName"), r.ScopeName, "unsupported scope"))
		}
		switch r.Operator {
		case corev1.ScopeSelectorOpIn, corev1.ScopeSelectorOpNotIn:
			if len(r.Values) == 0 {
				errs = append(errs, field.Required(match.Child("values"), "must be at least one value when `operator` is 'In' or 'NotIn' for scope selector"))
			}
		case corev1.ScopeSelectorOpExists, corev1.ScopeSelectorOpDoesNotExist:
			if len(r.Values) > 0 {
				errs = append(errs, field.Invalid(match.Child("values"), r.Values, "must be no value when `operator` is 'Exist' or 'DoesNotExist' for scope selector"))
			}
		default:
			errs = append(errs, field.Invalid(match.Child("operator"), r.Operator, "not a valid selector operator"))
		}
	}
	return errs
}

func isQuotaScope(s corev1.ResourceQuotaScope) bool {
	switch s {
	case corev1.ResourceQuotaScopeTerminating, corev1.ResourceQuotaScopeNotTerminating, corev1.ResourceQuotaScopeBestEffort,
		corev1.ResourceQuotaScopeNotBestEffort, corev1.ResourceQuotaScopePriorityClass, corev1.ResourceQuotaScopeCrossNamespacePodAffinity,
		corev1.ResourceQuotaScopeVolumeAttributesClass:
		return true
	}
	return false
}

// validateAmounts checks the names and the signs of a list of resources.
func validateAmounts(l corev1.ResourceList, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, name := range slices.Sorted(maps.Keys(l)) {
		p := path.Key(string(name))
		errs = append(errs, invalidIf(p, name, validation.IsQualifiedName(string(name)))...)
		if q := l[name]; q.Sign() < 0 {
			errs = append(errs, field.Invalid(p, q.String(), apivalidation.IsNegativeErrorMsg))
		}
	}
	return errs
}
