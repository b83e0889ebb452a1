// SPDX-License-Identifier: Apache-2.0

package registry

import (
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func csiStorageCapacityKind() Kind {
	return Kind{
		Resource: "csistoragecapacities", Singular: "csistoragecapacity", Kind: "CSIStorageCapacity",
		GroupVersion: storagev1.SchemeGroupVersion, Namespaced: true,
		New: newObject[storagev1.CSIStorageCapacity], NewList: newObject[storagev1.CSIStorageCapacityList],
		Validate: validates(validateCSIStorageCapacity),
		ValidateUpdate: validatesUpdate(func(c, old *storagev1.CSIStorageCapacity) field.ErrorList {
			errs := apivalidation.ValidateImmutableField(c.NodeTopology, old.NodeTopology, field.NewPath("nodeTopology"))
			return append(errs, apivalidation.ValidateImmutableField(c.StorageClassName, old.StorageClassName, field.NewPath("storageClassName"))...)
		}),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("StorageClassName", "string", "The class whose volumes the capacity is for."),
			column("Capacity", "string", "How much there is."),
		},
		Row: row(func(c *storagev1.CSIStorageCapacity) []any {
			capacity := "<unset>"
			if c.Capacity != nil {
				capacity = c.Capacity.String()
			}
			return []any{c.Name, c.StorageClassName, capacity}
		}),
	}
}

func validateCSIStorageCapacity(c *storagev1.CSIStorageCapacity) field.ErrorList {
	class := field.NewPath("storageClassName")
	errs := invalidIf(class, c.StorageClassName, apivalidation.NameIsDNSSubdomain(c.StorageClassName, false))
	if c.NodeTopology != nil {
		errs = append(errs, validateSelector(c.NodeTopology, field.NewPath("nodeTopology"))...)
	}
	for name, q := range map[string]*resource.Quantity{"capacity": c.Capacity, "maximumVolumeSize": c.MaximumVolumeSize} {
		if q != nil {
			errs = append(errs, notNegativeQuantity(field.NewPath(name), *q)...)
		}
	}
	return errs
}

func notNegativeQuantity(path *field.Path, q resource.Quantity) field.ErrorList {
	if q.Sign() >= 0 {
		return nil
	}
	return field.ErrorList{field.Invalid(path, q.String(), apivalidation.IsNegativeErrorMsg)}
}
