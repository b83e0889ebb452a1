// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

func persistentVolumeKind() Kind {
	return Kind{
		Resource: "persistentvolumes", Singular: "persistentvolume", Kind: "PersistentVolume",
		GroupVersion: corev1.SchemeGroupVersion,
		ShortNames:   []string{"pv"},
		New:          newObject[corev1.PersistentVolume],
		NewList:      newObject[corev1.PersistentVolumeList],
		Default: forObject(func(v *corev1.PersistentVolume) {
			setIfZero(&v.Status.Phase, corev1.VolumePending)
			setIfZero(&v.Spec.PersistentVolumeReclaimPolicy, corev1.PersistentVolumeReclaimRetain)
			setDefault(&v.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
			if h := v.Spec.HostPath; h != nil {
				setDefault(&h.Type, corev1.HostPathUnset)
			}
		}),
		PrepareForCreate: onCreate(func(_ context.Context, v *corev1.PersistentVolume) {
			v.Status.Phase, v.Status.LastPhaseTransitionTime = corev1.VolumePending, ptr.To(metav1.Now())
			addFinalizer(v, "kubernetes.io/pv-protection")
		}),
		Validate:       validates(validateVolume),
		ValidateUpdate: validatesUpdate(validateVolumeUpdate),
		Status:         &StatusStrategy{},
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Capacity", "string", "How much it holds."),
			column("Access Modes", "string", "How it may be mounted."),
			column("Reclaim Policy", "string", "What becomes of it when its claim goes."),
			column("Status", "string", "Available, Bound, Released, Failed or Pending."),
			column("Claim", "string", "The claim it is bound to."),
			column("StorageClass", "string", "Which kind of storage it is."),
			column("VolumeAttributesClass", "string", "Which attributes it has."),
			column("Reason", "string", "Why it is in this state."),
			ageColumn,
			wideColumn("VolumeMode", "Filesystem or Block."),
		},
		Row: row(func(v *corev1.PersistentVolume) []any {
			claim := ""
			if ref := v.Spec.ClaimRef; ref != nil {
				claim = ref.Namespace + "/" + ref.Name
			}
			phase := string(v.Status.Phase)
			if v.DeletionTimestamp != nil {
				phase = "Terminating"
			}
			class, ok := v.Annotations[corev1.BetaStorageClassAnnotation]
			if !ok {
				class = v.Spec.StorageClassName
			}
			return []any{
				v.Name, quantityText(v.Spec.Capacity), accessModes(v.Spec.AccessModes), string(v.Spec.PersistentVolumeReclaimPolicy),
				phase, claim, class, ptr.Deref(v.Spec.VolumeAttributesClassName, "<unset>"), v.Status.Reason,
				age(v.CreationTimestamp), volumeMode(v.Spec.VolumeMode),
			}
		}),
	}
}

func validateVolume(v *corev1.PersistentVolume) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateAccessModes(v.Spec.AccessModes, spec.Child("accessModes"))
	capacity := spec.Child("capacity")
	switch size, ok := v.Spec.Capacity[corev1.ResourceStorage]; {
	case len(v.Spec.Capacity) == 0:
		errs = append(errs, field.Required(capacity, ""))
	case !ok || len(v.Spec.Capacity) > 1:
		errs = append(errs, field.NotSupported(capacity, v.Spec.Capacity, []corev1.ResourceName{corev1.ResourceStorage}))
	case size.Sign() <= 0:
		errs = append(errs, field.Invalid(capacity.Key(string(corev1.ResourceStorage)), size.String(), "must be greater than zero"))
	}
	errs = append(errs, oneOf(v.Spec.PersistentVolumeReclaimPolicy, spec.Child("persistentVolumeReclaimPolicy"),
		corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRecycle, corev1.PersistentVolumeReclaimRetain)...)
	switch n := countPointers(&v.Spec.PersistentVolumeSource); {
	case n == 0:
		errs = append(errs, field.Required(spec, "must specify a volume type"))
	case n > 1:
		errs = append(errs, field.Forbidden(spec, "may not specify more than 1 volume type"))
	}
	if h := v.Spec.HostPath; h != nil {
		path := spec.Child("hostPath", "path")
		if h.Path == "" {
			errs = append(errs, field.Required(path, ""))
		}
		errs = append(errs, validateNoBacksteps(h.Path, path)...)
	}
	if l := v.Spec.Local; l != nil {
		if l.Path == "" {
			errs = append(errs, field.Required(spec.Child("local", "path"), ""))
		}
		if v.Spec.NodeAffinity == nil {
			errs = append(errs, field.Required(spec.Child("nodeAffinity"), "Local volume requires node affinity"))
		}
	}
	if a := v.Spec.NodeAffinity; a != nil {
		path := spec.Child("nodeAffinity", "required")
		if a.Required == nil {
			errs = append(errs, field.Required(path, "must specify required node constraints"))
		} else {
			errs = append(errs, validateNodeSelector(a.Required, path)...)
		}
	}
	errs = append(errs, validateStorageClassName(&v.Spec.StorageClassName, spec.Child("storageClassName"))...)
	return append(errs, validateVolumeMode(v.Spec.VolumeMode, spec.Child("volumeMode"))...)
}

func validateVolumeUpdate(v, old *corev1.PersistentVolume) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	if !equality.Semantic.DeepEqual(v.Spec.PersistentVolumeSource, old.Spec.PersistentVolumeSource) {
		errs = append(errs, field.Forbidden(spec.Child("persistentvolumesource"), "spec.persistentvolumesource is immutable after creation"))
	}
	errs = append(errs, apivalidation.ValidateImmutableField(v.Spec.VolumeMode, old.Spec.VolumeMode, spec.Child("volumeMode"))...)
	if old.Spec.NodeAffinity != nil {
		errs = append(errs, apivalidation.ValidateImmutableField(v.Spec.NodeAffinity, old.Spec.NodeAffinity, spec.Child("nodeAffinity"))...)
	}
	return errs
}
