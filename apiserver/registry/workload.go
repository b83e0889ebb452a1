// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// What the kinds that make pods from a template have in common.

// templateColumns are the wide columns of kinds that make pods from a template.
func templateColumns() []metav1.TableColumnDefinition {
	return []metav1.TableColumnDefinition{
		wideColumn("Containers", "Names of the containers in the pod template."),
		wideColumn("Images", "Images of the containers in the pod template."),
		wideColumn("Selector", "The label selector of the pods."),
	}
}

// replicaColumns are the columns of kinds that keep a number of pods.
func replicaColumns() []metav1.TableColumnDefinition {
	return append([]metav1.TableColumnDefinition{
		nameColumn,
		column("Desired", "integer", "How many pods there should be."),
		column("Current", "integer", "How many pods there are."),
		column("Ready", "integer", "How many pods are ready."),
		ageColumn,
	}, templateColumns()...)
}

// templateCells are the cells of templateColumns.
func templateCells(t *corev1.PodTemplateSpec, selector *metav1.LabelSelector) []any {
	var names, images []string
	for _, c := range t.Spec.Containers {
		names, images = append(names, c.Name), append(images, c.Image)
	}
	return []any{strings.Join(names, ","), strings.Join(images, ","), metav1.FormatLabelSelector(selector)}
}

// validateReplicated checks the fields that the kinds have under the same names.
func validateReplicated(what string, replicas *int32, minReady int32, selector *metav1.LabelSelector, template *corev1.PodTemplateSpec) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	if replicas != nil {
		errs = append(errs, notNegative(spec.Child("replicas"), *replicas)...)
	}
	errs = append(errs, notNegative(spec.Child("minReadySeconds"), minReady)...)
	errs = append(errs, validateTemplateSelector(what, selector, template, spec)...)
	return append(errs, validatePodTemplate(template, spec.Child("template"), corev1.RestartPolicyAlways)...)
}

// validateTemplateSelector makes sure that the pods made from the template are
// the ones that are counted.
func validateTemplateSelector(what string, selector *metav1.LabelSelector, template *corev1.PodTemplateSpec, spec *field.Path) field.ErrorList {
	path := spec.Child("selector")
	if selector == nil {
		return field.ErrorList{field.Required(path, "")}
	}
	errs := validateSelector(selector, path)
	if len(selector.MatchLabels)+len(selector.MatchExpressions) == 0 {
		return append(errs, field.Invalid(path, selector, "empty selector is invalid for "+what))
	}
	if len(errs) > 0 {
		return errs
	}
	s, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return append(errs, field.Invalid(path, selector, "invalid label selector"))
	}
	if !s.Matches(labels.Set(template.Labels)) {
		errs = append(errs, field.Invalid(spec.Child("template", "metadata", "labels"), template.Labels, "`selector` does not match template `labels`"))
	}
	return errs
}

// selectorImmutable refuses another selector: the pods of the old one would be
// nobody's.
func selectorImmutable(now, was *metav1.LabelSelector) field.ErrorList {
	return apivalidation.ValidateImmutableField(now, was, field.NewPath("spec", "selector"))
}

// validateIntOrPercent accepts numbers from 0 and percentages.
func validateIntOrPercent(v intstr.IntOrString, path *field.Path) field.ErrorList {
	if v.Type == intstr.String {
		return invalidIf(path, v, validation.IsValidPercent(v.StrVal))
	}
	return notNegative(path, v.IntVal)
}

// atMost100Percent refuses a percentage of more than all.
func atMost100Percent(v intstr.IntOrString, path *field.Path) field.ErrorList {
	if v.Type == intstr.String {
		// Of 100, a percentage is its number.
		if n, err := intstr.GetScaledValueFromIntOrPercent(&v, 100, true); err == nil && n > 100 {
			return field.ErrorList{field.Invalid(path, v, "must not be greater than 100%")}
		}
	}
	return nil
}

// noDeadline refuses a pod template whose pods would end by themselves.
func noDeadline(t *corev1.PodTemplateSpec, what string, spec *field.Path) field.ErrorList {
	if t.Spec.ActiveDeadlineSeconds == nil {
		return nil
	}
	return field.ErrorList{field.Forbidden(spec.Child("template", "spec", "activeDeadlineSeconds"),
		"activeDeadlineSeconds in "+what+" is not Supported")}
}

// controllerText names an owner as kubectl does: statefulset.apps/web.
func controllerText(ref *metav1.OwnerReference) string {
	kind := strings.ToLower(ref.Kind)
	if gv, err := schema.ParseGroupVersion(ref.APIVersion); err == nil && gv.Group != "" {
		kind += "." + gv.Group
	}
	return kind + "/" + ref.Name
}

// validateCollisions makes sure that the counter of name collisions only grows.
func validateCollisions(now, was *int32) field.ErrorList {
	path, n := field.NewPath("status", "collisionCount"), ptr.Deref(now, 0)
	errs := notNegative(path, n)
	if n < ptr.Deref(was, 0) {
		errs = append(errs, field.Invalid(path, n, "cannot be decremented"))
	}
	return errs
}

// counter is one counter of a status.
type counter struct {
	name  string
	value int32
}

// validateCounters checks that no counter is negative, and that none exceeds the
// first one, which counts all replicas.
func validateCounters(all counter, rest ...counter) field.ErrorList {
	status := field.NewPath("status")
	errs := notNegative(status.Child(all.name), all.value)
	for _, c := range rest {
		errs = append(errs, notNegative(status.Child(c.name), c.value)...)
		if c.value > all.value {
			errs = append(errs, field.Invalid(status.Child(c.name), c.value, "cannot be greater than status.replicas"))
		}
	}
	return errs
}

// availableWithinReady is the rule that only a ready pod can be available.
func availableWithinReady(available, ready int32) field.ErrorList {
	if available <= ready {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("status", "availableReplicas"), available, "cannot be greater than readyReplicas")}
}
