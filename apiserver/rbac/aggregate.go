// SPDX-License-Identifier: Apache-2.0

package rbac

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
)

// rounds is how often roles may take up each other's rules. Upstream's chain is
// two long: view is in edit, edit in admin.
const rounds = 10

// Aggregate fills in the rules of every ClusterRole that is made of others. It is
// called after each write of a ClusterRole, before the write is answered, where
// upstream has a controller that comes a moment later.
func (a *Authorizer) Aggregate(ctx context.Context) error {
	for range rounds {
		x, err := a.index(ctx)
		if err != nil {
			return err
		}
		changed := false
		for _, r := range x.sortedClusterRoles() {
			if r.AggregationRule == nil {
				continue
			}
			rules, err := x.aggregated(r)
			if err != nil {
				return err
			}
			if equality.Semantic.DeepEqual(rules, r.Rules) {
				continue
			}
			if err := a.setRules(ctx, r.Name, rules); err != nil {
				return err
			}
			changed = true
		}
		if !changed {
			return nil
		}
	}
	return nil
}

func (x *index) sortedClusterRoles() []*rbacv1.ClusterRole {
	out := make([]*rbacv1.ClusterRole, 0, len(x.clusterRoles))
	for _, r := range x.clusterRoles {
		out = append(out, r)
	}
	slices.SortFunc(out, func(p, q *rbacv1.ClusterRole) int { return cmp.Compare(p.Name, q.Name) })
	return out
}

// aggregated returns the rules of all roles that r's selectors select, in the
// order of their names, each once.
func (x *index) aggregated(r *rbacv1.ClusterRole) ([]rbacv1.PolicyRule, error) {
	var out []rbacv1.PolicyRule
	for _, s := range r.AggregationRule.ClusterRoleSelectors {
		selector, err := metav1.LabelSelectorAsSelector(&s)
		if err != nil {
			return nil, fmt.Errorf("aggregate clusterrole %s: %w", r.Name, err)
		}
		for _, other := range x.sortedClusterRoles() {
			if other.Name == r.Name || !selector.Matches(labels.Set(other.Labels)) {
				continue
			}
			for _, rule := range other.Rules {
				if !slices.ContainsFunc(out, func(have rbacv1.PolicyRule) bool { return equality.Semantic.DeepEqual(have, rule) }) {
					out = append(out, rule)
				}
			}
		}
	}
	return out, nil
}

func (a *Authorizer) setRules(ctx context.Context, name string, rules []rbacv1.PolicyRule) error {
	store := a.source.Lookup(clusterRoles)
	// Not in the name of the user whose write led here.
	ctx = request.WithRequestInfo(request.WithNamespace(context.WithoutCancel(ctx), ""), &request.RequestInfo{
		IsResourceRequest: true, APIGroup: rbacv1.GroupName, APIVersion: "v1", Resource: clusterRoles, Name: name, Verb: "update",
	})
	key, err := store.KeyFunc(ctx, name)
	if err != nil {
		return fmt.Errorf("aggregate clusterrole %s: %w", name, err)
	}
	// Past the hooks of the kind, one of which has called us.
	err = store.Storage.GuaranteedUpdate(ctx, key, &rbacv1.ClusterRole{}, true, nil, func(obj runtime.Object, _ storage.ResponseMeta) (runtime.Object, *uint64, error) {
		r, ok := obj.(*rbacv1.ClusterRole)
		if !ok {
			return nil, nil, fmt.Errorf("a stored object is a %T", obj)
		}
		if r.AggregationRule != nil {
			r.Rules = rules
		}
		return r, nil, nil
	}, false, nil)
	if err != nil {
		return fmt.Errorf("aggregate clusterrole %s: %w", name, err)
	}
	return nil
}
