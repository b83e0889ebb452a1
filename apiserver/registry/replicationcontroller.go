// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"maps"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"
)

func replicationControllerKind() Kind {
	return Kind{
		Resource: "replicationcontrollers", Singular: "replicationcontroller", Kind: "ReplicationController",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		ShortNames: []string{"rc"}, Categories: []string{"all"},
		New:              newObject[corev1.ReplicationController],
		NewList:          newObject[corev1.ReplicationControllerList],
		Default:          forObject(defaultReplicationController),
		TracksGeneration: true,
		OrphanByDefault:  true,
		Validate:         validates(validateReplicationController),
		Warnings:         warnsOfTemplate(func(rc *corev1.ReplicationController) *corev1.PodTemplateSpec { return rc.Spec.Template }),
		Status:           &StatusStrategy{Validate: validatesUpdate(validateReplicationControllerStatus)},
		Columns:          replicaColumns(),
		Row: row(func(r *corev1.ReplicationController) []any {
			cells := []any{
				r.Name, int64(ptr.Deref(r.Spec.Replicas, 1)), int64(r.Status.Replicas), int64(r.Status.ReadyReplicas),
				age(r.CreationTimestamp),
			}
			template := ptr.Deref(r.Spec.Template, corev1.PodTemplateSpec{})
			return append(cells, templateCells(&template, mapSelector(r.Spec.Selector))...)
		}),
		FieldLabels: []string{"status.replicas"},
		Fields: fieldsOf(func(r *corev1.ReplicationController) fields.Set {
			return fields.Set{"status.replicas": strconv.Itoa(int(r.Status.Replicas))}
		}),
		SubresourceTypes: scaleTypes(),
		Subresources: func(store *Store, _ Deps) map[string]rest.Storage {
			return map[string]rest.Storage{"scale": newScaleREST(store, corev1.SchemeGroupVersion, func(r *corev1.ReplicationController) scaled {
				return scaled{&r.Spec.Replicas, r.Status.Replicas, mapSelector(r.Spec.Selector)}
			})}
		},
	}
}

// mapSelector is the selector of the old shape in the new one.
func mapSelector(m map[string]string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: m}
}

func defaultReplicationController(r *corev1.ReplicationController) {
	if t := r.Spec.Template; t != nil {
		if len(t.Labels) > 0 {
			if len(r.Spec.Selector) == 0 {
				r.Spec.Selector = maps.Clone(t.Labels)
			}
			if len(r.Labels) == 0 {
				r.Labels = maps.Clone(t.Labels)
			}
		}
		defaultPodSpec(&t.Spec)
	}
	setDefault(&r.Spec.Replicas, 1)
}

func validateReplicationController(r *corev1.ReplicationController) field.ErrorList {
	spec := field.NewPath("spec")
	errs := notNegative(spec.Child("minReadySeconds"), r.Spec.MinReadySeconds)
	if len(r.Spec.Selector) == 0 {
		errs = append(errs, field.Required(spec.Child("selector"), ""))
	}
	if r.Spec.Replicas == nil {
		errs = append(errs, field.Required(spec.Child("replicas"), ""))
	} else {
		errs = append(errs, notNegative(spec.Child("replicas"), *r.Spec.Replicas)...)
	}
	template := spec.Child("template")
	if r.Spec.Template == nil {
		return append(errs, field.Required(template, ""))
	}
	if len(r.Spec.Selector) > 0 && !labels.SelectorFromSet(r.Spec.Selector).Matches(labels.Set(r.Spec.Template.Labels)) {
		errs = append(errs, field.Invalid(template.Child("metadata", "labels"), r.Spec.Template.Labels, "`selector` does not match template `labels`"))
	}
	errs = append(errs, validatePodTemplate(r.Spec.Template, template, corev1.RestartPolicyAlways)...)
	return append(errs, noDeadline(r.Spec.Template, "ReplicationController", spec)...)
}

func validateReplicationControllerStatus(r, _ *corev1.ReplicationController) field.ErrorList {
	s := &r.Status
	errs := apivalidation.ValidateNonnegativeField(s.ObservedGeneration, field.NewPath("status", "observedGeneration"))
	errs = append(errs, validateCounters(counter{"replicas", s.Replicas},
		counter{"fullyLabeledReplicas", s.FullyLabeledReplicas}, counter{"readyReplicas", s.ReadyReplicas}, counter{"availableReplicas", s.AvailableReplicas})...)
	return append(errs, availableWithinReady(s.AvailableReplicas, s.ReadyReplicas)...)
}
