// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

const (
	// Annotations that make a class the one of claims that name none.
	defaultClassAnnotation     = "storageclass.kubernetes.io/is-default-class"
	defaultClassAnnotationBeta = "storageclass.beta.kubernetes.io/is-default-class"

	maxStorageParameters     = 512
	maxStorageParameterBytes = 256 << 10
)

func storageClassKind() Kind {
	return Kind{
		Resource: "storageclasses", Singular: "storageclass", Kind: "StorageClass",
		GroupVersion: storagev1.SchemeGroupVersion,
		ShortNames:   []string{"sc"},
		New:          newObject[storagev1.StorageClass], NewList: newObject[storagev1.StorageClassList],
		Default: forObject(func(c *storagev1.StorageClass) {
			setDefault(&c.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete)
			setDefault(&c.VolumeBindingMode, storagev1.VolumeBindingImmediate)
		}),
		Validate:       validates(validateStorageClass),
		ValidateUpdate: validatesUpdate(validateStorageClassUpdate),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Provisioner", "string", "Who makes the volumes."),
			column("ReclaimPolicy", "string", "What becomes of a volume when its claim is deleted."),
			column("VolumeBindingMode", "string", "When a claim gets its volume."),
			column("AllowVolumeExpansion", "string", "Whether a claim may grow."),
			ageColumn,
		},
		Row: row(func(c *storagev1.StorageClass) []any {
			name := c.Name
			if c.Annotations[defaultClassAnnotation] == "true" || c.Annotations[defaultClassAnnotationBeta] == "true" {
				name += " (default)"
			}
			return []any{
				name, c.Provisioner, string(ptr.Deref(c.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete)),
				string(ptr.Deref(c.VolumeBindingMode, "<unset>")), ptr.Deref(c.AllowVolumeExpansion, false), age(c.CreationTimestamp),
			}
		}),
	}
}

func validateStorageClass(c *storagev1.StorageClass) field.ErrorList {
	var errs field.ErrorList
	if path := field.NewPath("provisioner"); c.Provisioner == "" {
		errs = append(errs, field.Required(path, ""))
	} else {
		errs = append(errs, invalidIf(path, c.Provisioner, utilvalidation.IsQualifiedName(strings.ToLower(c.Provisioner)))...)
	}
	errs = append(errs, validateStorageParameters(c.Parameters, field.NewPath("parameters"))...)
	if p := c.ReclaimPolicy; p != nil && *p != "" {
		errs = append(errs, oneOf(*p, field.NewPath("reclaimPolicy"), corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRetain)...)
	}
	if mode, path := c.VolumeBindingMode, field.NewPath("volumeBindingMode"); mode == nil {
		errs = append(errs, field.Required(path, ""))
	} else {
		errs = append(errs, oneOf(*mode, path, storagev1.VolumeBindingImmediate, storagev1.VolumeBindingWaitForFirstConsumer)...)
	}
	return errs
}

func validateStorageParameters(parameters map[string]string, path *field.Path) field.ErrorList {
	if len(parameters) > maxStorageParameters {
		return field.ErrorList{field.TooLong(path, "", maxStorageParameters)}
	}
	var errs field.ErrorList
	size := 0
	for k, v := range parameters {
		if k == "" {
			errs = append(errs, field.Invalid(path, k, "field can not be empty."))
		}
		size += len(k) + len(v)
	}
	if size > maxStorageParameterBytes {
		errs = append(errs, field.TooLong(path, "", maxStorageParameterBytes))
	}
	return errs
}

func validateStorageClassUpdate(c, old *storagev1.StorageClass) field.ErrorList {
	var errs field.ErrorList
	frozen := func(name string, now, was any) {
		if !equality.Semantic.DeepEqual(now, was) {
			errs = append(errs, field.Forbidden(field.NewPath(name), "updates to "+name+" are forbidden."))
		}
	}
	frozen("parameters", c.Parameters, old.Parameters)
	frozen("provisioner", c.Provisioner, old.Provisioner)
	frozen("reclaimPolicy", c.ReclaimPolicy, old.ReclaimPolicy)
	return append(errs, apivalidation.ValidateImmutableField(c.VolumeBindingMode, old.VolumeBindingMode, field.NewPath("volumeBindingMode"))...)
}
