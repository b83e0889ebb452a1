// SPDX-License-Identifier: Apache-2.0

package registry

import (
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func leaseKind() Kind {
	return Kind{
		Resource: "leases", Singular: "lease", Kind: "Lease",
		GroupVersion: coordinationv1.SchemeGroupVersion, Namespaced: true,
		WatchCache: true,
		New:        newObject[coordinationv1.Lease], NewList: newObject[coordinationv1.LeaseList],
		Validate: validates(validateLease),
		// Leader election depends on it that nobody writes without having read.
		RequireResourceVersion: true,
		AllowCreateOnUpdate:    true,
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Holder", "string", "Who holds the lease."),
			ageColumn,
		},
		Row: row(func(l *coordinationv1.Lease) []any {
			holder := ""
			if l.Spec.HolderIdentity != nil {
				holder = *l.Spec.HolderIdentity
			}
			return []any{l.Name, holder, age(l.CreationTimestamp)}
		}),
	}
}

func validateLease(l *coordinationv1.Lease) field.ErrorList {
	p := field.NewPath("spec")
	var errs field.ErrorList
	if v := l.Spec.LeaseDurationSeconds; v != nil && *v <= 0 {
		errs = append(errs, field.Invalid(p.Child("leaseDurationSeconds"), *v, "must be greater than 0"))
	}
	if v := l.Spec.LeaseTransitions; v != nil && *v < 0 {
		errs = append(errs, field.Invalid(p.Child("leaseTransitions"), *v, "must be greater than or equal to 0"))
	}
	return errs
}
