// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"
)

func statefulSetKind() Kind {
	return Kind{
		Resource: "statefulsets", Singular: "statefulset", Kind: "StatefulSet",
		GroupVersion: appsv1.SchemeGroupVersion, Namespaced: true,
		ShortNames: []string{"sts"}, Categories: []string{"all"},
		New:              newObject[appsv1.StatefulSet],
		NewList:          newObject[appsv1.StatefulSetList],
		Name:             apivalidation.NameIsDNSLabel,
		Default:          forObject(defaultStatefulSet),
		TracksGeneration: true,
		Validate:         validates(validateStatefulSet),
		ValidateUpdate:   validatesUpdate(validateStatefulSetUpdate),
		Warnings: warns(func(s, old *appsv1.StatefulSet) []string {
			if old != nil {
				return templateWarnings(s, &s.Spec.Template, &old.Spec.Template)
			}
			out := templateWarnings(s, &s.Spec.Template, nil)
			if len(s.Spec.VolumeClaimTemplates) == 0 {
				return out
			}
			return append(out, "spec.volumeClaimTemplates: kplab provisions no volumes: the pods stay Pending until there are PersistentVolumes for their claims")
		}),
		Status: &StatusStrategy{Validate: validatesUpdate(validateStatefulSetStatus)},
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Ready", "string", "How many of the wanted pods are ready."),
			ageColumn,
			wideColumn("Containers", "Names of the containers in the pod template."),
			wideColumn("Images", "Images of the containers in the pod template."),
		},
		Row: row(func(s *appsv1.StatefulSet) []any {
			containers := templateCells(&s.Spec.Template, s.Spec.Selector)[:2]
			ready := fmt.Sprintf("%d/%d", s.Status.ReadyReplicas, ptr.Deref(s.Spec.Replicas, 1))
			return append([]any{s.Name, ready, age(s.CreationTimestamp)}, containers...)
		}),
		SubresourceTypes: scaleTypes(),
		Subresources: func(store *Store, _ Deps) map[string]rest.Storage {
			return map[string]rest.Storage{"scale": newScaleREST(store, appsv1.SchemeGroupVersion, func(s *appsv1.StatefulSet) scaled {
				return scaled{&s.Spec.Replicas, s.Status.Replicas, s.Spec.Selector}
			})}
		},
	}
}

func defaultStatefulSet(s *appsv1.StatefulSet) {
	setIfZero(&s.Spec.PodManagementPolicy, appsv1.OrderedReadyPodManagement)
	setIfZero(&s.Spec.UpdateStrategy.Type, appsv1.RollingUpdateStatefulSetStrategyType)
	if s.Spec.UpdateStrategy.Type == appsv1.RollingUpdateStatefulSetStrategyType {
		setDefault(&s.Spec.UpdateStrategy.RollingUpdate, appsv1.RollingUpdateStatefulSetStrategy{})
		setDefault(&s.Spec.UpdateStrategy.RollingUpdate.Partition, 0)
		setDefault(&s.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable, intstr.FromInt32(1))
	}
	setDefault(&s.Spec.PersistentVolumeClaimRetentionPolicy, appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{})
	setIfZero(&s.Spec.PersistentVolumeClaimRetentionPolicy.WhenDeleted, appsv1.RetainPersistentVolumeClaimRetentionPolicyType)
	setIfZero(&s.Spec.PersistentVolumeClaimRetentionPolicy.WhenScaled, appsv1.RetainPersistentVolumeClaimRetentionPolicyType)
	setDefault(&s.Spec.Replicas, 1)
	setDefault(&s.Spec.RevisionHistoryLimit, 10)
	for i := range s.Spec.VolumeClaimTemplates {
		claim := &s.Spec.VolumeClaimTemplates[i]
		claim.APIVersion, claim.Kind = "v1", "PersistentVolumeClaim"
		defaultClaim(claim)
	}
	defaultPodSpec(&s.Spec.Template.Spec)
}

func validateStatefulSet(s *appsv1.StatefulSet) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	switch s.Spec.PodManagementPolicy {
	case appsv1.OrderedReadyPodManagement, appsv1.ParallelPodManagement:
	default:
		errs = append(errs, field.Invalid(spec.Child("podManagementPolicy"), s.Spec.PodManagementPolicy,
			fmt.Sprintf("must be '%s' or '%s'", appsv1.OrderedReadyPodManagement, appsv1.ParallelPodManagement)))
	}
	errs = append(errs, validateStatefulSetStrategy(&s.Spec.UpdateStrategy, spec.Child("updateStrategy"))...)
	if p := s.Spec.PersistentVolumeClaimRetentionPolicy; p != nil {
		path := spec.Child("persistentVolumeClaimRetentionPolicy")
		const keep, drop = appsv1.RetainPersistentVolumeClaimRetentionPolicyType, appsv1.DeletePersistentVolumeClaimRetentionPolicyType
		errs = append(errs, oneOf(p.WhenDeleted, path.Child("whenDeleted"), keep, drop)...)
		errs = append(errs, oneOf(p.WhenScaled, path.Child("whenScaled"), keep, drop)...)
	}
	if s.Spec.Ordinals != nil {
		errs = append(errs, notNegative(spec.Child("ordinals.start"), s.Spec.Ordinals.Start)...)
	}
	if n := s.Spec.RevisionHistoryLimit; n != nil {
		errs = append(errs, notNegative(spec.Child("revisionHistoryLimit"), *n)...)
	}
	// The claim templates become volumes of the pods.
	template := s.Spec.Template.DeepCopy()
	for _, claim := range s.Spec.VolumeClaimTemplates {
		template.Spec.Volumes = append(withoutVolume(template.Spec.Volumes, claim.Name), corev1.Volume{
			Name:         claim.Name,
			VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim.Name}},
		})
	}
	errs = append(errs, validateReplicated("statefulset", s.Spec.Replicas, s.Spec.MinReadySeconds, s.Spec.Selector, template)...)
	return append(errs, noDeadline(&s.Spec.Template, "StatefulSet", spec)...)
}

// withoutVolume returns volumes but for the one of that name.
func withoutVolume(volumes []corev1.Volume, name string) []corev1.Volume {
	var out []corev1.Volume
	for _, v := range volumes {
		if v.Name != name {
			out = append(out, v)
		}
	}
	return out
}

func validateStatefulSetStrategy(s *appsv1.StatefulSetUpdateStrategy, path *field.Path) field.ErrorList {
	rolling := path.Child("rollingUpdate")
	switch s.Type {
	case appsv1.OnDeleteStatefulSetStrategyType:
		if s.RollingUpdate != nil {
			return field.ErrorList{field.Invalid(rolling, s.RollingUpdate,
				fmt.Sprintf("only allowed for updateStrategy '%s'", appsv1.RollingUpdateStatefulSetStrategyType))}
		}
	case appsv1.RollingUpdateStatefulSetStrategyType:
		if s.RollingUpdate == nil {
			return nil
		}
		errs := notNegative(rolling.Child("partition"), ptr.Deref(s.RollingUpdate.Partition, 0))
		if n := s.RollingUpdate.MaxUnavailable; n != nil {
			limit := rolling.Child("maxUnavailable")
			errs = append(errs, validateIntOrPercent(*n, limit)...)
			if isZero(*n) {
				errs = append(errs, field.Invalid(limit, *n, "cannot be 0"))
			}
			errs = append(errs, atMost100Percent(*n, limit)...)
		}
		return errs
	default:
		return field.ErrorList{field.Invalid(path, s,
			fmt.Sprintf("must be '%s' or '%s'", appsv1.RollingUpdateStatefulSetStrategyType, appsv1.OnDeleteStatefulSetStrategyType))}
	}
	return nil
}

func validateStatefulSetUpdate(s, old *appsv1.StatefulSet) field.ErrorList {
	same := s.Spec.DeepCopy()
	same.Replicas, same.Ordinals, same.Template = old.Spec.Replicas, old.Spec.Ordinals, old.Spec.Template
	same.UpdateStrategy, same.RevisionHistoryLimit = old.Spec.UpdateStrategy, old.Spec.RevisionHistoryLimit
	same.PersistentVolumeClaimRetentionPolicy = old.Spec.PersistentVolumeClaimRetentionPolicy
	same.MinReadySeconds = old.Spec.MinReadySeconds
	if equality.Semantic.DeepEqual(*same, old.Spec) {
		return nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("spec"), "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden")}
}

func validateStatefulSetStatus(s, old *appsv1.StatefulSet) field.ErrorList {
	st, path := &s.Status, field.NewPath("status")
	errs := validateCounters(counter{"replicas", st.Replicas},
		counter{"readyReplicas", st.ReadyReplicas}, counter{"currentReplicas", st.CurrentReplicas},
		counter{"updatedReplicas", st.UpdatedReplicas}, counter{"availableReplicas", st.AvailableReplicas})
	errs = append(errs, apivalidation.ValidateNonnegativeField(st.ObservedGeneration, path.Child("observedGeneration"))...)
	if st.AvailableReplicas > st.ReadyReplicas {
		errs = append(errs, field.Invalid(path.Child("availableReplicas"), st.AvailableReplicas, "cannot be greater than status.readyReplicas"))
	}
	return append(errs, validateCollisions(st.CollisionCount, old.Status.CollisionCount)...)
}
