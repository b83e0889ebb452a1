// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// localSubjectAccessReviewKind asks what somebody may do in one namespace.
func localSubjectAccessReviewKind() Kind {
	return asReview(Kind{
		Resource: "localsubjectaccessreviews", Singular: "localsubjectaccessreview", Kind: "LocalSubjectAccessReview",
		GroupVersion: authorizationv1.SchemeGroupVersion, Namespaced: true,
		New: newObject[authorizationv1.LocalSubjectAccessReview],
	}, validateLocalReview, func(ctx context.Context, deps Deps, r *authorizationv1.LocalSubjectAccessReview) error {
		if namespace := request.NamespaceValue(ctx); namespace != r.Spec.ResourceAttributes.Namespace {
			return apierrors.NewBadRequest(fmt.Sprintf("spec.resourceAttributes.namespace must match namespace: %v", namespace))
		}
		r.Status = decide(ctx, deps, subject(&r.Spec), r.Spec.ResourceAttributes, nil)
		return nil
	})
}

func validateLocalReview(r *authorizationv1.LocalSubjectAccessReview) field.ErrorList {
	errs := validateSubjectReview(&r.Spec)
	m := r.ObjectMeta
	m.Namespace = ""
	errs = append(errs, noMetadata(m)...)
	if a := r.Spec.ResourceAttributes; a != nil && a.Namespace != r.Namespace {
		errs = append(errs, field.Invalid(field.NewPath("spec", "resourceAttributes", "namespace"), a.Namespace, "must match metadata.namespace"))
	}
	if a := r.Spec.NonResourceAttributes; a != nil {
		errs = append(errs, field.Invalid(field.NewPath("spec", "nonResourceAttributes"), a, "disallowed on this kind of request"))
	}
	return errs
}
