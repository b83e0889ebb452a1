// SPDX-License-Identifier: Apache-2.0

package rbac

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/kplab/kplab/apiserver/registry"
)

// Source is where the roles and bindings are read from.
type Source struct {
	// Lookup returns the store of a kind by its plural name.
	Lookup func(resource string) *registry.Store
	// Newest returns the newest revision in which anything of a kind was
	// written, deletions included.
	Newest func(resource string) uint64
}

// Authorizer answers by what is stored. It implements authorizer.Authorizer and
// authorizer.RuleResolver.
type Authorizer struct {
	// AuthorizerFunc is the stock treatment of conditional authorization,
	// which RBAC has none of.
	authorizer.AuthorizerFunc

	source Source
	mu     sync.Mutex // held while an index is built
	now    atomic.Pointer[index]
}

var (
	_ authorizer.Authorizer   = (*Authorizer)(nil)
	_ authorizer.RuleResolver = (*Authorizer)(nil)
)

// New returns an authorizer that reads from source at the first question.
func New(source Source) *Authorizer {
	a := &Authorizer{source: source}
	a.AuthorizerFunc = a.authorize
	return a
}

// index returns what is stored now.
func (a *Authorizer) index(ctx context.Context) (*index, error) {
	fresh := func() (*index, revisions) {
		at := revisions{a.source.Newest(roles), a.source.Newest(clusterRoles), a.source.Newest(roleBindings), a.source.Newest(clusterRoleBindings)}
		return a.now.Load(), at
	}
	if x, at := fresh(); x != nil && x.at == at {
		return x, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	old, at := fresh()
	if old != nil && old.at == at {
		return old, nil
	}
	// A write in the meantime makes what is read newer than at, which only
	// means that it is read once more.
	x, err := load(ctx, a.source.Lookup, at, old)
	if err != nil {
		return nil, err
	}
	a.now.Store(x)
	return x, nil
}

func (a *Authorizer) authorize(ctx context.Context, attrs authorizer.Attributes) (authorizer.Decision, string, error) {
	if isPrivileged(attrs.GetUser()) {
		return authorizer.DecisionAllow, "", nil
	}
	x, err := a.index(ctx)
	if err != nil {
		return authorizer.DecisionNoOpinion, "", err
	}
	var missing []error
	why := ""
	x.visit(attrs.GetUser(), attrs.GetNamespace(), func(g grant) bool {
		if g.missing != nil {
			missing = append(missing, g.missing)
		}
		if slices.ContainsFunc(g.rules, func(r rbacv1.PolicyRule) bool { return allows(&r, attrs) }) {
			why = g.why
		}
		return why == ""
	})
	if why != "" {
		return authorizer.DecisionAllow, "RBAC: allowed by " + why, nil
	}
	if len(missing) > 0 {
		return authorizer.DecisionNoOpinion, fmt.Sprintf("RBAC: %v", utilerrors.NewAggregate(missing)), nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// isPrivileged tells whether the user may do everything, whatever is stored.
func isPrivileged(u user.Info) bool {
	return u != nil && slices.Contains(u.GetGroups(), user.SystemPrivilegedGroup)
}

// visit calls f for every grant to the user in namespace, those that are valid
// everywhere first, until f returns false.
func (x *index) visit(u user.Info, namespace string, f func(grant) bool) {
	if u == nil {
		return
	}
	scopes := []string{""}
	if namespace != "" {
		scopes = append(scopes, namespace)
	}
	for _, scope := range scopes {
		grants := x.grants[scope]
		if len(grants) == 0 {
			continue
		}
		for _, g := range grants[userKey(u.GetName())] {
			if !f(g) {
				return
			}
		}
		for _, name := range u.GetGroups() {
			for _, g := range grants[groupKey(name)] {
				if !f(g) {
					return
				}
			}
		}
	}
}

// rules returns all rules that the user has in namespace, and an error for each
// binding whose role does not exist.
func (a *Authorizer) rules(ctx context.Context, u user.Info, namespace string) ([]rbacv1.PolicyRule, []error, error) {
	x, err := a.index(ctx)
	if err != nil {
		return nil, nil, err
	}
	var out []rbacv1.PolicyRule
	var missing []error
	x.visit(u, namespace, func(g grant) bool {
		if g.missing != nil {
			missing = append(missing, g.missing)
		}
		out = append(out, g.rules...)
		return true
	})
	return out, missing, nil
}

// RulesFor implements authorizer.RuleResolver.
func (a *Authorizer) RulesFor(ctx context.Context, u user.Info, namespace string) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	var resources []authorizer.ResourceRuleInfo
	var paths []authorizer.NonResourceRuleInfo
	if isPrivileged(u) {
		star := []string{"*"}
		resources = append(resources, &authorizer.DefaultResourceRuleInfo{Verbs: star, APIGroups: star, Resources: star})
		paths = append(paths, &authorizer.DefaultNonResourceRuleInfo{Verbs: star, NonResourceURLs: star})
	}
	rules, missing, err := a.rules(ctx, u, namespace)
	for _, r := range rules {
		if len(r.Resources) > 0 {
			resources = append(resources, &authorizer.DefaultResourceRuleInfo{Verbs: r.Verbs, APIGroups: r.APIGroups, Resources: r.Resources, ResourceNames: r.ResourceNames})
		}
		if len(r.NonResourceURLs) > 0 {
			paths = append(paths, &authorizer.DefaultNonResourceRuleInfo{Verbs: r.Verbs, NonResourceURLs: r.NonResourceURLs})
		}
	}
	return resources, paths, false, errors.Join(append(missing, err)...)
}

func notFound(resource, name string) error {
	// Upstream names the kind here in the singular.
	singular := resource[:len(resource)-1]
	return apierrors.NewNotFound(schema.GroupResource{Group: rbacv1.GroupName, Resource: singular}, name)
}
