// SPDX-License-Identifier: Apache-2.0

package rbac

import (
	"context"
	"fmt"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/kplab/kplab/apiserver/registry"
)

// The kinds that say who may do what.
const (
	roles               = "roles"
	clusterRoles        = "clusterroles"
	roleBindings        = "rolebindings"
	clusterRoleBindings = "clusterrolebindings"
)

// revisions are the newest revisions of the four kinds.
type revisions struct{ roles, clusterRoles, roleBindings, clusterRoleBindings uint64 }

// grant is one subject of one binding: that it has the rules of a role.
type grant struct {
	// why is the binding in words.
	why   string
	rules []rbacv1.PolicyRule
	// missing is the error when the role does not exist.
	missing error
}

// index is what the four kinds say, by subject. It never changes.
type index struct {
	at revisions

	roles        map[string]*rbacv1.Role // by namespace/name
	clusterRoles map[string]*rbacv1.ClusterRole
	// grants are those of one namespace, "" for everywhere, by subject.
	grants map[string]map[string][]grant

	roleBindings        []*rbacv1.RoleBinding
	clusterRoleBindings []*rbacv1.ClusterRoleBinding
}

// load reads the kinds that have changed since old and builds the index anew.
func load(ctx context.Context, lookup func(string) *registry.Store, at revisions, old *index) (*index, error) {
	x := &index{at: at}
	if old != nil {
		x.roles, x.clusterRoles, x.roleBindings, x.clusterRoleBindings = old.roles, old.clusterRoles, old.roleBindings, old.clusterRoleBindings
	}
	if old == nil || old.at.roles != at.roles {
		list, err := all[*rbacv1.Role](ctx, lookup, roles)
		if err != nil {
			return nil, err
		}
		x.roles = map[string]*rbacv1.Role{}
		for _, r := range list {
			x.roles[r.Namespace+"/"+r.Name] = r
		}
	}
	if old == nil || old.at.clusterRoles != at.clusterRoles {
		list, err := all[*rbacv1.ClusterRole](ctx, lookup, clusterRoles)
		if err != nil {
			return nil, err
		}
		x.clusterRoles = map[string]*rbacv1.ClusterRole{}
		for _, r := range list {
			x.clusterRoles[r.Name] = r
		}
	}
	var err error
	if old == nil || old.at.roleBindings != at.roleBindings {
		if x.roleBindings, err = all[*rbacv1.RoleBinding](ctx, lookup, roleBindings); err != nil {
			return nil, err
		}
	}
	if old == nil || old.at.clusterRoleBindings != at.clusterRoleBindings {
		if x.clusterRoleBindings, err = all[*rbacv1.ClusterRoleBinding](ctx, lookup, clusterRoleBindings); err != nil {
			return nil, err
		}
	}
	x.build()
	return x, nil
}

// all reads every object of a kind.
func all[T runtime.Object](ctx context.Context, lookup func(string) *registry.Store, resource string) ([]T, error) {
	store := lookup(resource)
	if store == nil {
		return nil, fmt.Errorf("read %s: they are not served", resource)
	}
	list, err := store.List(request.WithNamespace(ctx, metav1.NamespaceAll), &internalversion.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", resource, err)
	}
	var out []T
	err = meta.EachListItem(list, func(obj runtime.Object) error {
		item, ok := obj.(T)
		if !ok {
			return fmt.Errorf("read %s: a stored object is a %T", resource, obj)
		}
		out = append(out, item)
		return nil
	})
	return out, err
}

func (x *index) build() {
	x.grants = map[string]map[string][]grant{}
	for _, b := range x.clusterRoleBindings {
		rules, missing := x.rulesOf(b.RoleRef, "")
		for _, s := range b.Subjects {
			x.add("", s, grant{
				why:   fmt.Sprintf("ClusterRoleBinding %q of %s %q to %s", b.Name, b.RoleRef.Kind, b.RoleRef.Name, describeSubject(s, "")),
				rules: rules, missing: missing,
			})
		}
	}
	for _, b := range x.roleBindings {
		rules, missing := x.rulesOf(b.RoleRef, b.Namespace)
		for _, s := range b.Subjects {
			x.add(b.Namespace, s, grant{
				why:   fmt.Sprintf("RoleBinding %q of %s %q to %s", b.Name+"/"+b.Namespace, b.RoleRef.Kind, b.RoleRef.Name, describeSubject(s, b.Namespace)),
				rules: rules, missing: missing,
			})
		}
	}
}

func (x *index) add(namespace string, s rbacv1.Subject, g grant) {
	if x.grants[namespace] == nil {
		x.grants[namespace] = map[string][]grant{}
	}
	key := subjectKey(s, namespace)
	x.grants[namespace][key] = append(x.grants[namespace][key], g)
}

func userKey(name string) string  { return "user:" + name }
func groupKey(name string) string { return "group:" + name }

func subjectKey(s rbacv1.Subject, namespace string) string {
	switch s.Kind {
	case rbacv1.GroupKind:
		return groupKey(s.Name)
	case rbacv1.ServiceAccountKind:
		return userKey(serviceaccount.MakeUsername(accountNamespace(s, namespace), s.Name))
	}
	return userKey(s.Name)
}

func accountNamespace(s rbacv1.Subject, namespace string) string {
	if s.Namespace != "" {
		return s.Namespace
	}
	return namespace
}

func describeSubject(s rbacv1.Subject, namespace string) string {
	if s.Kind == rbacv1.ServiceAccountKind {
		return fmt.Sprintf("%s %q", s.Kind, s.Name+"/"+accountNamespace(s, namespace))
	}
	return fmt.Sprintf("%s %q", s.Kind, s.Name)
}

// rulesOf returns the rules of the role that a binding refers to.
func (x *index) rulesOf(ref rbacv1.RoleRef, namespace string) ([]rbacv1.PolicyRule, error) {
	switch ref.Kind {
	case "ClusterRole":
		if r, ok := x.clusterRoles[ref.Name]; ok {
			return r.Rules, nil
		}
		return nil, notFound(clusterRoles, ref.Name)
	case "Role":
		if r, ok := x.roles[namespace+"/"+ref.Name]; ok {
			return r.Rules, nil
		}
		return nil, notFound(roles, ref.Name)
	}
	return nil, fmt.Errorf("unsupported role reference kind: %q", ref.Kind)
}
