// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"

	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// subjectAccessReviewKind asks what somebody may do.
func subjectAccessReviewKind() Kind {
	return asReview(Kind{
		Resource: "subjectaccessreviews", Singular: "subjectaccessreview", Kind: "SubjectAccessReview",
		GroupVersion: authorizationv1.SchemeGroupVersion,
		New:          newObject[authorizationv1.SubjectAccessReview],
	}, func(r *authorizationv1.SubjectAccessReview) field.ErrorList {
		return append(validateSubjectReview(&r.Spec), noMetadata(r.ObjectMeta)...)
	}, func(ctx context.Context, deps Deps, r *authorizationv1.SubjectAccessReview) error {
		r.Status = decide(ctx, deps, subject(&r.Spec), r.Spec.ResourceAttributes, r.Spec.NonResourceAttributes)
		return nil
	})
}
