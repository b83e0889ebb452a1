// SPDX-License-Identifier: Apache-2.0

package registry

import (
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func clusterRoleKind() Kind {
	return Kind{
		Resource: "clusterroles", Singular: "clusterrole", Kind: "ClusterRole",
		GroupVersion: rbacv1.SchemeGroupVersion,
		New:          newObject[rbacv1.ClusterRole], NewList: newObject[rbacv1.ClusterRoleList],
		Name:     roleName,
		Validate: validates(validateClusterRole),
		Columns:  roleColumns(),
		Row:      row(func(r *rbacv1.ClusterRole) []any { return roleRow(&r.ObjectMeta) }),
	}
}

func validateClusterRole(r *rbacv1.ClusterRole) field.ErrorList {
	errs := validateRules(r.Rules, false)
	a := r.AggregationRule
	if a == nil {
		return errs
	}
	path := field.NewPath("aggregationRule", "clusterRoleSelectors")
	if len(a.ClusterRoleSelectors) == 0 {
		return append(errs, field.Required(path, "at least one clusterRoleSelector required if aggregationRule is non-nil"))
	}
	for i := range a.ClusterRoleSelectors {
		errs = append(errs, validateSelector(&a.ClusterRoleSelectors[i], path.Index(i))...)
	}
	return errs
}
