// SPDX-License-Identifier: Apache-2.0

package rbac

import (
	"fmt"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// allows tells whether one rule allows the request.
func allows(r *rbacv1.PolicyRule, a authorizer.Attributes) bool {
	if !has(r.Verbs, a.GetVerb()) {
		return false
	}
	if !a.IsResourceRequest() {
		return slices.ContainsFunc(r.NonResourceURLs, func(url string) bool { return coversPath(url, a.GetPath()) })
	}
	return has(r.APIGroups, a.GetAPIGroup()) &&
		coversResource(r.Resources, a.GetResource(), a.GetSubresource()) &&
		(len(r.ResourceNames) == 0 || slices.Contains(r.ResourceNames, a.GetName()))
}

// has tells whether list holds value or the star that stands for all.
func has(list []string, value string) bool {
	return slices.ContainsFunc(list, func(s string) bool { return s == value || s == "*" })
}

// coversPath compares a path with a rule's, which may end in a star.
func coversPath(rule, path string) bool {
	if prefix, ok := strings.CutSuffix(rule, "*"); ok {
		return strings.HasPrefix(path, prefix)
	}
	return rule == path
}

// coversResource compares a resource with those of a rule: pods, pods/log, */log
// and the star for everything.
func coversResource(rule []string, resource, sub string) bool {
	name, any := resource, ""
	if sub != "" {
		name, any = resource+"/"+sub, "*/"+sub
	}
	return slices.ContainsFunc(rule, func(s string) bool { return s == "*" || s == name || (any != "" && s == any) })
}

// Describe renders a rule in one line, as messages show it.
func Describe(r rbacv1.PolicyRule) string {
	var parts []string
	add := func(name string, list []string) {
		if len(list) > 0 {
			parts = append(parts, fmt.Sprintf("%s:%q", name, list))
		}
	}
	add("APIGroups", r.APIGroups)
	add("Resources", r.Resources)
	add("NonResourceURLs", r.NonResourceURLs)
	add("ResourceNames", r.ResourceNames)
	add("Verbs", r.Verbs)
	return "{" + strings.Join(parts, ", ") + "}"
}

// compact joins rules that differ in their verbs only.
func compact(rules []rbacv1.PolicyRule) []rbacv1.PolicyRule {
	var out []rbacv1.PolicyRule
	at := map[string]int{}
	for _, r := range rules {
		verbs := r.Verbs
		r.Verbs = nil
		key := Describe(r)
		i, known := at[key]
		if !known {
			i = len(out)
			at[key] = i
			out = append(out, r)
		}
		for _, v := range verbs {
			if !slices.Contains(out[i].Verbs, v) {
				out[i].Verbs = append(out[i].Verbs, v)
			}
		}
	}
	return out
}
