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

// SystemPriorityClasses are the classes that every cluster has, complete and valid.
// The objects are the caller's.
func SystemPriorityClasses() []*schedulingv1.PriorityClass {
	class := func(name string, value int32, description string) *schedulingv1.PriorityClass {
		return &schedulingv1.PriorityClass{
			ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 1}, Value: value, Description: description,
			PreemptionPolicy: ptr.To(corev1.PreemptLowerPriority),
		}
	}
	return []*schedulingv1.PriorityClass{
		class("system-node-critical", 2000001000, "Used for system critical pods that must not be moved from their current node."),
		class("system-cluster-critical", 2000000000, "Used for system critical pods that must run in the cluster, but can be moved to another node if necessary."),
	}
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
		if err := isSystemPriority(p); err != nil {
			errs = append(errs, field.Forbidden(field.NewPath("metadata", "name"),
				"priority class names with '"+systemPriority+"' prefix are reserved for system use only. error: "+err.Error()))
		}
	} else if p.Value > maxUserPriority {
		errs = append(errs, field.Forbidden(field.NewPath("value"), fmt.Sprintf("maximum allowed value of a user defined priority is %v", maxUserPriority)))
	}
	if p.PreemptionPolicy != nil {
		errs = append(errs, oneOf(*p.PreemptionPolicy, field.NewPath("preemptionPolicy"), corev1.PreemptLowerPriority, corev1.PreemptNever)...)
	}
	return errs
}

// isSystemPriority is nil for a class that every cluster has.
func isSystemPriority(p *schedulingv1.PriorityClass) error {
	for _, known := range SystemPriorityClasses() {
		switch {
		case known.Name != p.Name:
		case known.Value != p.Value:
			return fmt.Errorf("value of %v PriorityClass must be %v", p.Name, known.Value)
		case p.GlobalDefault:
			return fmt.Errorf("globalDefault of %v PriorityClass must be %v", p.Name, false)
		default:
			return nil
		}
	}
	return fmt.Errorf("%v is not a known system priority class", p.Name)
}
