// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

const (
	// systemPriority begins the names of the classes that every cluster has.
	systemPriority = "system-"
	// maxUserPriority is the highest priority of all other classes.
	maxUserPriority = 1000000000
)

// SystemPriorityClasses are the classes that every cluster has, by name.
func SystemPriorityClasses() map[string]int32 {
	return map[string]int32{"system-cluster-critical": 2000000000, "system-node-critical": 2000001000}
}

func priorityClassKind() Kind {
	return Kind{
		Resource: "priorityclasses", Singular: "priorityclass", Kind: "PriorityClass",
		GroupVersion: schedulingv1.SchemeGroupVersion,
		ShortNames:   []string{"pc"},
		New:          newObject[schedulingv1.PriorityClass],
		NewList:      newObject[schedulingv1.PriorityClassList],
		Default: forObject(func(p *schedulingv1.PriorityClass) {
			setDefault(&p.PreemptionPolicy, corev1.PreemptLowerPriority)
		}),
		PrepareForCreate: onCreate(func(_ context.Context, p *schedulingv1.PriorityClass) { p.Generation = 1 }),
		Validate:         validates(validatePriorityClass),
		ValidateUpdate: validatesUpdate(func(p, old *schedulingv1.PriorityClass) field.ErrorList {
			const immutable = "may not be changed in an update."
			var errs field.ErrorList
			if p.Value != old.Value {
				errs = append(errs, field.Forbidden(field.NewPath("value"), immutable))
			}
			if ptr.Deref(p.PreemptionPolicy, "") != ptr.Deref(old.PreemptionPolicy, "") {
				errs = append(errs, field.Invalid(field.NewPath("preemptionPolicy"), p.PreemptionPolicy, "field is immutable"))
			}
			return errs
		}),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Value", "integer", "The priority of its pods."),
			column("Global-Default", "boolean", "Whether pods without a class get this one."),
			ageColumn,
			column("PreemptionPolicy", "string", "Whether its pods may push others away."),
		},
		Row: row(func(p *schedulingv1.PriorityClass) []any {
			return []any{p.Name, int64(p.Value), p.GlobalDefault, age(p.CreationTimestamp), string(ptr.Deref(p.PreemptionPolicy, ""))}
		}),
	}
}

func validatePriorityClass(p *schedulingv1.PriorityClass) field.ErrorList {
	var errs field.ErrorList
	if strings.HasPrefix(p.Name, systemPriority) {
		value, known := SystemPriorityClasses()[p.Name]
		why := ""
		switch {
		case !known:
			why = fmt.Sprintf("%v is not a known system priority class", p.Name)
		case value != p.Value:
			why = fmt.Sprintf("value of %v PriorityClass must be %v", p.Name, value)
		case p.GlobalDefault:
			why = fmt.Sprintf("globalDefault of %v PriorityClass must be %v", p.Name, false)
		}
		if why != "" {
			errs = append(errs, field.Forbidden(field.NewPath("metadata", "name"),
				"priority class names with '"+systemPriority+"' prefix are reserved for system use only. error: "+why))
		}
	} else if p.Value > maxUserPriority {
		errs = append(errs, field.Forbidden(field.NewPath("value"), fmt.Sprintf("maximum allowed value of a user defined priority is %v", maxUserPriority)))
	}
	if p.PreemptionPolicy != nil {
		errs = append(errs, oneOf(*p.PreemptionPolicy, field.NewPath("preemptionPolicy"), corev1.PreemptLowerPriority, corev1.PreemptNever)...)
	}
	return errs
}
