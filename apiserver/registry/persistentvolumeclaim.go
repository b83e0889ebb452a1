// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/diff"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

func persistentVolumeClaimKind() Kind {
	return Kind{
		Resource: "persistentvolumeclaims", Singular: "persistentvolumeclaim", Kind: "PersistentVolumeClaim",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		ShortNames: []string{"pvc"},
		New:        newObject[corev1.PersistentVolumeClaim],
		NewList:    newObject[corev1.PersistentVolumeClaimList],
		Default:    forObject(defaultClaim),
		PrepareForCreate: onCreate(func(_ context.Context, c *corev1.PersistentVolumeClaim) {
			c.Status.Phase = corev1.ClaimPending
			addFinalizer(c, "kubernetes.io/pvc-protection")
		}),
		Validate: validates(func(c *corev1.PersistentVolumeClaim) field.ErrorList {
			return validateClaimSpec(&c.Spec, field.NewPath("spec"))
		}),
		ValidateUpdate: validatesUpdate(validateClaimUpdate),
		Status:         &StatusStrategy{},
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Status", "string", "Pending, Bound or Lost."),
			column("Volume", "string", "The volume it is bound to."),
			column("Capacity", "string", "How much the volume holds."),
			column("Access Modes", "string", "How the volume may be mounted."),
			column("StorageClass", "string", "Which kind of storage is wanted."),
			column("VolumeAttributesClass", "string", "Which attributes are wanted."),
			ageColumn,
			wideColumn("VolumeMode", "Filesystem or Block."),
		},
		Row: row(func(c *corev1.PersistentVolumeClaim) []any {
			phase := string(c.Status.Phase)
			if c.DeletionTimestamp != nil {
				phase = "Terminating"
			}
			capacity, modes := "", ""
			if c.Spec.VolumeName != "" {
				capacity, modes = quantityText(c.Status.Capacity), accessModes(c.Status.AccessModes)
			}
			return []any{
				c.Name, phase, c.Spec.VolumeName, capacity, modes, claimClass(c),
				ptr.Deref(c.Spec.VolumeAttributesClassName, "<unset>"), age(c.CreationTimestamp), volumeMode(c.Spec.VolumeMode),
			}
		}),
	}
}

// addFinalizer keeps an object that is in use from going, as upstream's plugin
// StorageObjectInUseProtection does. The binder takes it off.
func addFinalizer(obj metav1.Object, finalizer string) {
	if have := obj.GetFinalizers(); !slices.Contains(have, finalizer) {
		obj.SetFinalizers(append(have, finalizer))
	}
}

func defaultClaim(c *corev1.PersistentVolumeClaim) {
	setIfZero(&c.Status.Phase, corev1.ClaimPending)
	setDefault(&c.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
}

// claimClass is the storage class of a claim; the annotation is its older form.
func claimClass(c *corev1.PersistentVolumeClaim) string {
	if class, ok := c.Annotations[corev1.BetaStorageClassAnnotation]; ok {
		return class
	}
	return ptr.Deref(c.Spec.StorageClassName, "")
}

func quantityText(l corev1.ResourceList) string {
	q := l[corev1.ResourceStorage]
	return q.String()
}

func volumeMode(m *corev1.PersistentVolumeMode) string {
	if m == nil {
		return "<unset>"
	}
	return string(*m)
}

// accessModes are the modes in their short form, each once: "RWO,ROX".
func accessModes(modes []corev1.PersistentVolumeAccessMode) string {
	var out []string
	for _, m := range []struct {
		mode  corev1.PersistentVolumeAccessMode
		short string
	}{
		{corev1.ReadWriteOnce, "RWO"}, {corev1.ReadOnlyMany, "ROX"},
		{corev1.ReadWriteMany, "RWX"}, {corev1.ReadWriteOncePod, "RWOP"},
	} {
		if slices.Contains(modes, m.mode) {
			out = append(out, m.short)
		}
	}
	return strings.Join(out, ",")
}

func validateAccessModes(modes []corev1.PersistentVolumeAccessMode, path *field.Path) field.ErrorList {
	if len(modes) == 0 {
		return field.ErrorList{field.Required(path, "at least 1 access mode is required")}
	}
	var errs field.ErrorList
	for _, m := range modes {
		errs = append(errs, oneOf(m, path, corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOncePod)...)
	}
	if len(modes) > 1 && slices.Contains(modes, corev1.ReadWriteOncePod) {
		errs = append(errs, field.Forbidden(path, "may not use ReadWriteOncePod with other access modes"))
	}
	return errs
}

func validateVolumeMode(m *corev1.PersistentVolumeMode, path *field.Path) field.ErrorList {
	if m == nil {
		return nil
	}
	return oneOf(*m, path, corev1.PersistentVolumeBlock, corev1.PersistentVolumeFilesystem)
}

func validateStorageClassName(name *string, path *field.Path) field.ErrorList {
	if name == nil || *name == "" {
		return nil
	}
	return invalidIf(path, *name, apivalidation.NameIsDNSSubdomain(*name, false))
}

// validateClaimSpec checks the spec of a claim, and of the template of one.
func validateClaimSpec(s *corev1.PersistentVolumeClaimSpec, path *field.Path) field.ErrorList {
	errs := validateAccessModes(s.AccessModes, path.Child("accessModes"))
	errs = append(errs, validateSelector(s.Selector, path.Child("selector"))...)
	key := fmt.Sprintf("[%s]", corev1.ResourceStorage)
	resources := path.Child("resources")
	if size, ok := s.Resources.Requests[corev1.ResourceStorage]; !ok {
		errs = append(errs, field.Required(resources.Child("requests").Key(string(corev1.ResourceStorage)), ""))
	} else if size.Sign() <= 0 {
		errs = append(errs, field.Invalid(resources.Child("requests").Key(key), size.String(), "must be greater than zero"))
	}
	errs = append(errs, validateStorageClassName(s.StorageClassName, path.Child("storageClassName"))...)
	return append(errs, validateVolumeMode(s.VolumeMode, path.Child("volumeMode"))...)
}

func validateClaimUpdate(c, old *corev1.PersistentVolumeClaim) field.ErrorList {
	spec := field.NewPath("spec")
	same := c.Spec.DeepCopy()
	if old.Spec.VolumeName == "" && same.VolumeName != "" {
		same.VolumeName = "" // bound now
	}
	if old.Spec.StorageClassName == nil && old.Spec.VolumeName == "" {
		same.StorageClassName = nil
	}
	same.VolumeAttributesClassName = old.Spec.VolumeAttributesClassName
	if old.Status.Phase == corev1.ClaimBound {
		same.Resources.Requests = old.Spec.Resources.Requests
	}
	var errs field.ErrorList
	if !equality.Semantic.DeepEqual(*same, old.Spec) {
		errs = append(errs, field.Forbidden(spec, fmt.Sprintf("spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims\n%v", diff.Diff(old.Spec, *same))))
	}
	now, was := c.Spec.Resources.Requests[corev1.ResourceStorage], old.Spec.Resources.Requests[corev1.ResourceStorage]
	if now.Cmp(was) < 0 {
		errs = append(errs, field.Forbidden(spec.Child("resources", "requests", "storage"), "field can not be less than previous value"))
	}
	return append(errs, apivalidation.ValidateImmutableField(c.Spec.VolumeMode, old.Spec.VolumeMode, spec.Child("volumeMode"))...)
}
