// SPDX-License-Identifier: Apache-2.0

package registry

import (
	storagev1 "k8s.io/api/storage/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// volumeAttributesClassKind is stored only: there is no driver that would change a volume.
func volumeAttributesClassKind() Kind {
	return Kind{
		Resource: "volumeattributesclasses", Singular: "volumeattributesclass", Kind: "VolumeAttributesClass",
		GroupVersion: storagev1.SchemeGroupVersion,
		ShortNames:   []string{"vac"},
		New:          newObject[storagev1.VolumeAttributesClass], NewList: newObject[storagev1.VolumeAttributesClassList],
		Validate: validates(func(c *storagev1.VolumeAttributesClass) field.ErrorList {
			var errs field.ErrorList
			if path := field.NewPath("driverName"); c.DriverName == "" {
				errs = append(errs, field.Required(path, ""))
			} else {
				errs = append(errs, validateDriverName(c.DriverName, path)...)
			}
			if len(c.Parameters) == 0 {
				errs = append(errs, field.Required(field.NewPath("parameters"), "must contain at least one key/value pair"))
			}
			return errs
		}),
		ValidateUpdate: validatesUpdate(func(c, old *storagev1.VolumeAttributesClass) field.ErrorList {
			errs := apivalidation.ValidateImmutableField(c.DriverName, old.DriverName, field.NewPath("driverName"))
			return append(errs, apivalidation.ValidateImmutableField(c.Parameters, old.Parameters, field.NewPath("parameters"))...)
		}),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("DriverName", "string", "The driver that the class is for."),
			ageColumn,
		},
		Row: row(func(c *storagev1.VolumeAttributesClass) []any {
			return []any{c.Name, c.DriverName, age(c.CreationTimestamp)}
		}),
	}
}
