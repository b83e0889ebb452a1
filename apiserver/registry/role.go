// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func roleKind() Kind {
	return Kind{
		Resource: "roles", Singular: "role", Kind: "Role",
		GroupVersion: rbacv1.SchemeGroupVersion, Namespaced: true,
		New: newObject[rbacv1.Role], NewList: newObject[rbacv1.RoleList],
		Name: roleName,
		Validate: validates(func(r *rbacv1.Role) field.ErrorList {
			return validateRules(r.Rules, true)
		}),
		Columns: roleColumns(),
		Row:     row(func(r *rbacv1.Role) []any { return roleRow(&r.ObjectMeta) }),
	}
}

// roleName accepts every name that can be a part of a URL's path; names of
// roles have colons.
func roleName(name string, _ bool) []string { return content.IsPathSegmentName(name) }

func roleColumns() []metav1.TableColumnDefinition {
	return []metav1.TableColumnDefinition{
		nameColumn,
		column("Created At", "date", "When it was made."),
	}
}

func roleRow(m *metav1.ObjectMeta) []any {
	return []any{m.Name, m.CreationTimestamp.UTC().Format(time.RFC3339)}
}

func validateRules(rules []rbacv1.PolicyRule, namespaced bool) field.ErrorList {
	var errs field.ErrorList
	for i, r := range rules {
		path := field.NewPath("rules").Index(i)
		if len(r.Verbs) == 0 {
			errs = append(errs, field.Required(path.Child("verbs"), "verbs must contain at least one value"))
		}
		if urls := path.Child("nonResourceURLs"); len(r.NonResourceURLs) > 0 {
			if namespaced {
				errs = append(errs, field.Invalid(urls, r.NonResourceURLs, "namespaced rules cannot apply to non-resource URLs"))
			}
			if len(r.APIGroups)+len(r.Resources)+len(r.ResourceNames) > 0 {
				errs = append(errs, field.Invalid(urls, r.NonResourceURLs, "rules cannot apply to both regular resources and non-resource URLs"))
			}
			continue
		}
		if len(r.APIGroups) == 0 {
			errs = append(errs, field.Required(path.Child("apiGroups"), "resource rules must supply at least one api group"))
		}
		if len(r.Resources) == 0 {
			errs = append(errs, field.Required(path.Child("resources"), "resource rules must supply at least one resource"))
		}
	}
	return errs
}
