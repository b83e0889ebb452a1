// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// selfSubjectRulesReviewKind asks for all that the asker may do in a namespace:
// kubectl auth can-i --list.
func selfSubjectRulesReviewKind() Kind {
	return asReview(Kind{
		Resource: "selfsubjectrulesreviews", Singular: "selfsubjectrulesreview", Kind: "SelfSubjectRulesReview",
		GroupVersion: authorizationv1.SchemeGroupVersion,
		New:          newObject[authorizationv1.SelfSubjectRulesReview],
	}, func(*authorizationv1.SelfSubjectRulesReview) field.ErrorList { return nil }, listRules)
}

func listRules(ctx context.Context, deps Deps, r *authorizationv1.SelfSubjectRulesReview) error {
	u, err := asker(ctx)
	if err != nil {
		return err
	}
	if r.Spec.Namespace == "" {
		return apierrors.NewBadRequest("no namespace on request")
	}
	resources, paths, incomplete, err := deps.Authorizer.RulesFor(ctx, u, r.Spec.Namespace)
	r.Status = authorizationv1.SubjectRulesReviewStatus{
		ResourceRules: []authorizationv1.ResourceRule{}, NonResourceRules: []authorizationv1.NonResourceRule{}, Incomplete: incomplete,
	}
	for _, rule := range resources {
		r.Status.ResourceRules = append(r.Status.ResourceRules, authorizationv1.ResourceRule{
			Verbs: rule.GetVerbs(), APIGroups: rule.GetAPIGroups(), Resources: rule.GetResources(), ResourceNames: rule.GetResourceNames(),
		})
	}
	for _, rule := range paths {
		r.Status.NonResourceRules = append(r.Status.NonResourceRules, authorizationv1.NonResourceRule{
			Verbs: rule.GetVerbs(), NonResourceURLs: rule.GetNonResourceURLs(),
		})
	}
	if err != nil {
		r.Status.EvaluationError = err.Error()
	}
	return nil
}
