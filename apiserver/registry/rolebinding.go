// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func roleBindingKind() Kind {
	return Kind{
		Resource: "rolebindings", Singular: "rolebinding", Kind: "RoleBinding",
		GroupVersion: rbacv1.SchemeGroupVersion, Namespaced: true,
		New: newObject[rbacv1.RoleBinding], NewList: newObject[rbacv1.RoleBindingList],
		Name:    roleName,
		Default: forObject(func(b *rbacv1.RoleBinding) { defaultBinding(&b.RoleRef, b.Subjects) }),
		Validate: validates(func(b *rbacv1.RoleBinding) field.ErrorList {
			return validateBinding(b.RoleRef, b.Subjects, true)
		}),
		ValidateUpdate: validatesUpdate(func(b, old *rbacv1.RoleBinding) field.ErrorList {
			return sameRoleRef(b.RoleRef, old.RoleRef)
		}),
		Columns: bindingColumns(),
		Row: row(func(b *rbacv1.RoleBinding) []any {
			return bindingRow(&b.ObjectMeta, b.RoleRef, b.Subjects)
		}),
	}
}

// defaultBinding fills in the API groups, which have but one sensible value.
func defaultBinding(ref *rbacv1.RoleRef, subjects []rbacv1.Subject) {
	setIfZero(&ref.APIGroup, rbacv1.GroupName)
	for i := range subjects {
		if k := subjects[i].Kind; k == rbacv1.UserKind || k == rbacv1.GroupKind {
			setIfZero(&subjects[i].APIGroup, rbacv1.GroupName)
		}
	}
}

func bindingColumns() []metav1.TableColumnDefinition {
	return []metav1.TableColumnDefinition{
		nameColumn,
		column("Role", "string", "The role whose rights are given."),
		ageColumn,
		wideColumn("Users", "The users who get them."),
		wideColumn("Groups", "The groups that get them."),
		wideColumn("ServiceAccounts", "The service accounts that get them."),
	}
}

func bindingRow(m *metav1.ObjectMeta, ref rbacv1.RoleRef, subjects []rbacv1.Subject) []any {
	var users, groups, accounts []string
	for _, s := range subjects {
		switch s.Kind {
		case rbacv1.UserKind:
			users = append(users, s.Name)
		case rbacv1.GroupKind:
			groups = append(groups, s.Name)
		case rbacv1.ServiceAccountKind:
			accounts = append(accounts, s.Namespace+"/"+s.Name)
		}
	}
	const sep = ", "
	return []any{
		m.Name, ref.Kind + "/" + ref.Name, age(m.CreationTimestamp),
		strings.Join(users, sep), strings.Join(groups, sep), strings.Join(accounts, sep),
	}
}

func validateBinding(ref rbacv1.RoleRef, subjects []rbacv1.Subject, namespaced bool) field.ErrorList {
	path := field.NewPath("roleRef")
	errs := oneOf(ref.APIGroup, path.Child("apiGroup"), rbacv1.GroupName)
	kinds := []string{"ClusterRole"}
	if namespaced {
		kinds = []string{"Role", "ClusterRole"}
	}
	errs = append(errs, among(ref.Kind, path.Child("kind"), kinds...)...)
	errs = append(errs, requiredSegment(path.Child("name"), ref.Name)...)
	for i, s := range subjects {
		errs = append(errs, validateSubject(s, namespaced, field.NewPath("subjects").Index(i))...)
	}
	return errs
}

// among is oneOf for messages that list the values in an order of their own.
func among(value string, path *field.Path, allowed ...string) field.ErrorList {
	for _, a := range allowed {
		if value == a {
			return nil
		}
	}
	return field.ErrorList{field.NotSupported(path, value, allowed)}
}

func validateSubject(s rbacv1.Subject, namespaced bool, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	name, group := path.Child("name"), path.Child("apiGroup")
	if s.Name == "" {
		errs = append(errs, field.Required(name, ""))
	}
	switch s.Kind {
	case rbacv1.ServiceAccountKind:
		if s.Name != "" {
			errs = append(errs, invalidIf(name, s.Name, apivalidation.ValidateServiceAccountName(s.Name, false))...)
		}
		errs = append(errs, among(s.APIGroup, group, "")...)
		if !namespaced && s.Namespace == "" {
			errs = append(errs, field.Required(path.Child("namespace"), ""))
		}
	case rbacv1.UserKind, rbacv1.GroupKind:
		if s.Name == "" {
			errs = append(errs, field.Invalid(name, s.Name, strings.ToLower(s.Kind)+" name cannot be empty"))
		}
		errs = append(errs, among(s.APIGroup, group, rbacv1.GroupName)...)
	default:
		errs = append(errs, among(s.Kind, path.Child("kind"), rbacv1.ServiceAccountKind, rbacv1.UserKind, rbacv1.GroupKind)...)
	}
	return errs
}

// sameRoleRef refuses another role: who may add subjects to a binding may not
// thereby change what all of them get.
func sameRoleRef(now, was rbacv1.RoleRef) field.ErrorList {
	if now == was {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("roleRef"), now, "cannot change roleRef")}
}
