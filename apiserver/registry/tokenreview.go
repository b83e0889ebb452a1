// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"net/http"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authentication/authenticator"
)

// tokenReviewKind asks whose a bearer token is. Servers that trust the cluster's
// tokens use it.
func tokenReviewKind() Kind {
	return asReview(Kind{
		Resource: "tokenreviews", Singular: "tokenreview", Kind: "TokenReview",
		GroupVersion: authenticationv1.SchemeGroupVersion,
		New:          newObject[authenticationv1.TokenReview],
	}, func(*authenticationv1.TokenReview) field.ErrorList { return nil }, reviewToken)
}

func reviewToken(ctx context.Context, deps Deps, r *authenticationv1.TokenReview) error {
	if r.Spec.Token == "" {
		return apierrors.NewBadRequest("token is required for TokenReview in authentication")
	}
	if len(r.Spec.Audiences) > 0 {
		ctx = authenticator.WithAudiences(ctx, r.Spec.Audiences)
	}
	req := (&http.Request{Header: http.Header{"Authorization": {"Bearer " + r.Spec.Token}}}).WithContext(ctx)
	response, ok, err := deps.Authenticator.AuthenticateRequest(req)
	r.Status = authenticationv1.TokenReviewStatus{}
	if err != nil {
		r.Status.Error = err.Error()
	}
	if ok && response != nil && response.User != nil {
		r.Status.Authenticated = true
		r.Status.User = userInfo(response.User)
		r.Status.Audiences = response.Audiences
	}
	return nil
}
