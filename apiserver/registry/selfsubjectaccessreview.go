// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"

	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// selfSubjectAccessReviewKind asks what the asker may do: kubectl auth can-i.
func selfSubjectAccessReviewKind() Kind {
	return asReview(Kind{
		Resource: "selfsubjectaccessreviews", Singular: "selfsubjectaccessreview", Kind: "SelfSubjectAccessReview",
		GroupVersion: authorizationv1.SchemeGroupVersion,
		New:          newObject[authorizationv1.SelfSubjectAccessReview],
	}, func(r *authorizationv1.SelfSubjectAccessReview) field.ErrorList {
		return append(validateAttributes(r.Spec.ResourceAttributes, r.Spec.NonResourceAttributes), noMetadata(r.ObjectMeta)...)
	}, func(ctx context.Context, deps Deps, r *authorizationv1.SelfSubjectAccessReview) error {
		u, err := asker(ctx)
		if err == nil {
			r.Status = decide(ctx, deps, u, r.Spec.ResourceAttributes, r.Spec.NonResourceAttributes)
		}
		return err
	})
}
