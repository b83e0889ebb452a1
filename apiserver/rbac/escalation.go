// SPDX-License-Identifier: Apache-2.0

package rbac

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/component-helpers/auth/rbac/validation"
)

// Escalation refuses writes of roles and bindings by which a user would give
// away rights that the user has not. Who has the verb escalate on the role, or
// bind on the role that is bound, may do so all the same. It implements
// admission.ValidationInterface.
type Escalation struct{ authorizer *Authorizer }

var _ admission.ValidationInterface = Escalation{}

// NewEscalation returns the check by what a knows.
func NewEscalation(a *Authorizer) Escalation { return Escalation{a} }

// Handles implements admission.Interface.
func (Escalation) Handles(op admission.Operation) bool {
	return op == admission.Create || op == admission.Update
}

// Validate implements admission.ValidationInterface.
func (e Escalation) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().Group != rbacv1.GroupName || a.GetSubresource() != "" || isPrivileged(a.GetUserInfo()) {
		return nil
	}
	var err error
	switch obj := a.GetObject().(type) {
	case *rbacv1.Role:
		err = e.writeRole(ctx, a, obj.Rules, rulesOf(a.GetOldObject()))
	case *rbacv1.ClusterRole:
		if err = e.writeAggregation(ctx, a, obj); err == nil {
			err = e.writeRole(ctx, a, obj.Rules, rulesOf(a.GetOldObject()))
		}
	case *rbacv1.RoleBinding:
		old, _ := a.GetOldObject().(*rbacv1.RoleBinding)
		if old == nil || old.RoleRef != obj.RoleRef || !equality.Semantic.DeepEqual(old.Subjects, obj.Subjects) {
			err = e.writeBinding(ctx, a, obj.RoleRef)
		}
	case *rbacv1.ClusterRoleBinding:
		old, _ := a.GetOldObject().(*rbacv1.ClusterRoleBinding)
		if old == nil || old.RoleRef != obj.RoleRef || !equality.Semantic.DeepEqual(old.Subjects, obj.Subjects) {
			err = e.writeBinding(ctx, a, obj.RoleRef)
		}
	}
	if err == nil || apierrors.IsNotFound(err) {
		return err
	}
	return apierrors.NewForbidden(a.GetResource().GroupResource(), a.GetName(), err)
}

func rulesOf(obj runtime.Object) []rbacv1.PolicyRule {
	switch r := obj.(type) {
	case *rbacv1.Role:
		return r.Rules
	case *rbacv1.ClusterRole:
		return r.Rules
	}
	return nil
}

// may asks whether the user has a verb on one object of rbac.
func (e Escalation) may(ctx context.Context, u user.Info, verb, resource, namespace, name string) bool {
	decision, _, err := e.authorizer.Authorize(ctx, authorizer.AttributesRecord{
		User: u, Verb: verb, Namespace: namespace, APIGroup: rbacv1.GroupName, APIVersion: "v1",
		Resource: resource, Name: name, ResourceRequest: true,
	})
	return err == nil && decision == authorizer.DecisionAllow
}

func (e Escalation) writeRole(ctx context.Context, a admission.Attributes, rules, old []rbacv1.PolicyRule) error {
	if equality.Semantic.DeepEqual(rules, old) || e.may(ctx, a.GetUserInfo(), "escalate", a.GetResource().Resource, a.GetNamespace(), a.GetName()) {
		return nil
	}
	return e.confirm(ctx, a.GetUserInfo(), a.GetNamespace(), rules)
}

// writeAggregation wants all rights of who makes a role that will take up the
// rules of others.
func (e Escalation) writeAggregation(ctx context.Context, a admission.Attributes, r *rbacv1.ClusterRole) error {
	if r.AggregationRule == nil {
		return nil
	}
	if old, ok := a.GetOldObject().(*rbacv1.ClusterRole); ok && equality.Semantic.DeepEqual(old.AggregationRule, r.AggregationRule) {
		return nil
	}
	star := []string{"*"}
	everything := []rbacv1.PolicyRule{{Verbs: star, APIGroups: star, Resources: star}, {Verbs: star, NonResourceURLs: star}}
	if e.may(ctx, a.GetUserInfo(), "escalate", clusterRoles, "", r.Name) || e.confirm(ctx, a.GetUserInfo(), "", everything) == nil {
		return nil
	}
	return errors.New("must have cluster-admin privileges to use an aggregationRule")
}

func (e Escalation) writeBinding(ctx context.Context, a admission.Attributes, ref rbacv1.RoleRef) error {
	resource, namespace := clusterRoles, ""
	if ref.Kind == "Role" {
		resource, namespace = roles, a.GetNamespace()
	}
	// The verb bind counts in the binding's namespace, also for a ClusterRole.
	if e.may(ctx, a.GetUserInfo(), "bind", resource, a.GetNamespace(), ref.Name) {
		return nil
	}
	x, err := e.authorizer.index(ctx)
	if err != nil {
		return err
	}
	rules, err := x.rulesOf(ref, namespace)
	if err != nil {
		return err
	}
	return e.confirm(ctx, a.GetUserInfo(), a.GetNamespace(), rules)
}

// confirm is nil when the user has all of rules in namespace.
func (e Escalation) confirm(ctx context.Context, u user.Info, namespace string, rules []rbacv1.PolicyRule) error {
	have, missing, err := e.authorizer.rules(ctx, u, namespace)
	if err != nil {
		return err
	}
	covered, lacking := validation.Covers(have, rules)
	if covered {
		return nil
	}
	var texts []string
	for _, r := range compact(lacking) {
		texts = append(texts, Describe(r))
	}
	slices.Sort(texts)
	text := fmt.Sprintf("user %q (groups=%q) is attempting to grant RBAC permissions not currently held:\n%s",
		u.GetName(), u.GetGroups(), strings.Join(slices.Compact(texts), "\n"))
	if len(missing) > 0 {
		text += fmt.Sprintf("; resolution errors: %v", utilerrors.NewAggregate(missing))
	}
	return errors.New(text)
}
