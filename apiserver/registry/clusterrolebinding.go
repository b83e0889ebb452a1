// SPDX-License-Identifier: Apache-2.0

package registry

import (
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func clusterRoleBindingKind() Kind {
	return Kind{
		Resource: "clusterrolebindings", Singular: "clusterrolebinding", Kind: "ClusterRoleBinding",
		GroupVersion: rbacv1.SchemeGroupVersion,
		New:          newObject[rbacv1.ClusterRoleBinding], NewList: newObject[rbacv1.ClusterRoleBindingList],
		Name:    roleName,
		Default: forObject(func(b *rbacv1.ClusterRoleBinding) { defaultBinding(&b.RoleRef, b.Subjects) }),
		Validate: validates(func(b *rbacv1.ClusterRoleBinding) field.ErrorList {
			return validateBinding(b.RoleRef, b.Subjects, false)
		}),
		ValidateUpdate: validatesUpdate(func(b, old *rbacv1.ClusterRoleBinding) field.ErrorList {
			return sameRoleRef(b.RoleRef, old.RoleRef)
		}),
		Columns: bindingColumns(),
		Row: row(func(b *rbacv1.ClusterRoleBinding) []any {
			return bindingRow(&b.ObjectMeta, b.RoleRef, b.Subjects)
		}),
	}
}
