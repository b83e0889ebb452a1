// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"
)

func replicaSetKind() Kind {
	return Kind{
		Resource: "replicasets", Singular: "replicaset", Kind: "ReplicaSet",
		GroupVersion: appsv1.SchemeGroupVersion, Namespaced: true,
		WatchCache: true,
		ShortNames: []string{"rs"}, Categories: []string{"all"},
		New:     newObject[appsv1.ReplicaSet],
		NewList: newObject[appsv1.ReplicaSetList],
		Default: forObject(func(r *appsv1.ReplicaSet) {
			setDefault(&r.Spec.Replicas, 1)
			defaultPodSpec(&r.Spec.Template.Spec)
		}),
		TracksGeneration: true,
		Validate: validates(func(r *appsv1.ReplicaSet) field.ErrorList {
			return validateReplicated("replicaset", r.Spec.Replicas, r.Spec.MinReadySeconds, r.Spec.Selector, &r.Spec.Template)
		}),
		ValidateUpdate: validatesUpdate(func(r, old *appsv1.ReplicaSet) field.ErrorList {
			return selectorImmutable(r.Spec.Selector, old.Spec.Selector)
		}),
		Warnings: warnsOfTemplate(func(rs *appsv1.ReplicaSet) *corev1.PodTemplateSpec { return &rs.Spec.Template }),
		Status:   &StatusStrategy{Validate: validatesUpdate(validateReplicaSetStatus)},
		Columns:  replicaColumns(),
		Row: row(func(r *appsv1.ReplicaSet) []any {
			cells := []any{
				r.Name, int64(ptr.Deref(r.Spec.Replicas, 1)), int64(r.Status.Replicas), int64(r.Status.ReadyReplicas),
				age(r.CreationTimestamp),
			}
			return append(cells, templateCells(&r.Spec.Template, r.Spec.Selector)...)
		}),
		FieldLabels: []string{"status.replicas"},
		Fields: fieldsOf(func(r *appsv1.ReplicaSet) fields.Set {
			return fields.Set{"status.replicas": strconv.Itoa(int(r.Status.Replicas))}
		}),
		SubresourceTypes: scaleTypes(),
		Subresources: func(store *Store, _ Deps) map[string]rest.Storage {
			return map[string]rest.Storage{"scale": newScaleREST(store, appsv1.SchemeGroupVersion, func(r *appsv1.ReplicaSet) scaled {
				return scaled{&r.Spec.Replicas, r.Status.Replicas, r.Spec.Selector}
			})}
		},
	}
}

func validateReplicaSetStatus(r, _ *appsv1.ReplicaSet) field.ErrorList {
	s, path := &r.Status, field.NewPath("status")
	errs := apivalidation.ValidateNonnegativeField(s.ObservedGeneration, path.Child("observedGeneration"))
	errs = append(errs, validateCounters(counter{"replicas", s.Replicas},
		counter{"fullyLabeledReplicas", s.FullyLabeledReplicas}, counter{"readyReplicas", s.ReadyReplicas}, counter{"availableReplicas", s.AvailableReplicas})...)
	errs = append(errs, notNegative(path.Child("terminatingReplicas"), ptr.Deref(s.TerminatingReplicas, 0))...)
	return append(errs, availableWithinReady(s.AvailableReplicas, s.ReadyReplicas)...)
}
