// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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
		Hooks: func(deps Deps) Hooks {
			if deps.ClusterRoleWritten == nil {
				return Hooks{}
			}
			// The hooks have no context; what they start must not end with the
			// client's patience anyway.
			written := func() { deps.ClusterRoleWritten(context.Background()) }
			return Hooks{
				AfterCreate: func(runtime.Object, *metav1.CreateOptions) { written() },
				AfterUpdate: func(runtime.Object, *metav1.UpdateOptions) { written() },
				AfterDelete: func(runtime.Object, *metav1.DeleteOptions) { written() },
			}
		},
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
