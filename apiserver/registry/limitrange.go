// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func limitRangeKind() Kind {
	return Kind{
		Resource: "limitranges", Singular: "limitrange", Kind: "LimitRange",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		ShortNames: []string{"limits"},
		New:        newObject[corev1.LimitRange], NewList: newObject[corev1.LimitRangeList],
		Default: forObject(func(l *corev1.LimitRange) {
			for i := range l.Spec.Limits {
				defaultLimit(&l.Spec.Limits[i])
			}
		}),
		Validate: validates(validateLimitRange),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Created At", "date", "When it was made."),
		},
		Row: row(func(l *corev1.LimitRange) []any {
			return []any{l.Name, l.CreationTimestamp.UTC().Format(time.RFC3339)}
		}),
	}
}

// defaultLimit derives what a container gets that says nothing: limits from the
// maximum, requests from the limits, else from the minimum.
func defaultLimit(i *corev1.LimitRangeItem) {
	if i.Type != corev1.LimitTypeContainer {
		return
	}
	fill := func(to *corev1.ResourceList, from corev1.ResourceList) {
		if *to == nil {
			*to = corev1.ResourceList{}
		}
		for name, q := range from {
			if _, said := (*to)[name]; !said {
				(*to)[name] = q.DeepCopy()
			}
		}
	}
	fill(&i.Default, i.Max)
	fill(&i.DefaultRequest, i.Default)
	fill(&i.DefaultRequest, i.Min)
}

func validateLimitRange(l *corev1.LimitRange) field.ErrorList {
	var errs field.ErrorList
	seen := sets.New[corev1.LimitType]()
	for i := range l.Spec.Limits {
		limit, path := &l.Spec.Limits[i], field.NewPath("spec", "limits").Index(i)
		errs = append(errs, invalidIf(path.Child("type"), limit.Type, validation.IsQualifiedName(string(limit.Type)))...)
		if seen.Has(limit.Type) {
			errs = append(errs, field.Duplicate(path.Child("type"), limit.Type))
		}
		seen.Insert(limit.Type)
		if limit.Type == corev1.LimitTypePod {
			if len(limit.Default) > 0 {
				errs = append(errs, field.Forbidden(path.Child("default"), "may not be specified when `type` is 'Pod'"))
			}
			if len(limit.DefaultRequest) > 0 {
				errs = append(errs, field.Forbidden(path.Child("defaultRequest"), "may not be specified when `type` is 'Pod'"))
			}
		}
		errs = append(errs, validateLimit(limit, path)...)
	}
	return errs
}

// validateLimit checks min <= defaultRequest <= default <= max.
func validateLimit(l *corev1.LimitRangeItem, path *field.Path) field.ErrorList {
	lists := []struct {
		field, what string
		list        corev1.ResourceList
	}{
		{"min", "min value", l.Min}, {"defaultRequest", "default request value", l.DefaultRequest},
		{"default", "default value", l.Default}, {"max", "max value", l.Max},
	}
	names := sets.New[corev1.ResourceName]()
	for _, low := range lists {
		names.Insert(slices.Collect(maps.Keys(low.list))...)
	}
	var errs field.ErrorList
	for _, name := range slices.Sorted(maps.Keys(names)) {
		for i, low := range lists {
			a, ok := low.list[name]
			if !ok {
				continue
			}
			for _, high := range lists[i+1:] {
				if b, ok := high.list[name]; ok && a.Cmp(b) > 0 {
					errs = append(errs, field.Invalid(path.Child(low.field).Key(string(name)), a.String(),
						fmt.Sprintf("%s %s is greater than %s %s", low.what, a.String(), high.what, b.String())))
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(l.MaxLimitRequestRatio)) {
		if ratio := l.MaxLimitRequestRatio[name]; ratio.AsApproximateFloat64() < 1 {
			errs = append(errs, field.Invalid(path.Child("maxLimitRequestRatio").Key(string(name)), ratio.String(), fmt.Sprintf("ratio %s is less than 1", ratio.String())))
		}
	}
	return errs
}
