// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authentication/user"
)

// selfSubjectReviewKind asks who the asker is: kubectl auth whoami.
func selfSubjectReviewKind() Kind {
	return asReview(Kind{
		Resource: "selfsubjectreviews", Singular: "selfsubjectreview", Kind: "SelfSubjectReview",
		GroupVersion: authenticationv1.SchemeGroupVersion,
		New:          newObject[authenticationv1.SelfSubjectReview],
	}, func(*authenticationv1.SelfSubjectReview) field.ErrorList { return nil }, func(ctx context.Context, _ Deps, r *authenticationv1.SelfSubjectReview) error {
		u, err := asker(ctx)
		if err == nil {
			r.CreationTimestamp = metav1.Now()
			r.Status.UserInfo = userInfo(u)
		}
		return err
	})
}

func userInfo(u user.Info) authenticationv1.UserInfo {
	out := authenticationv1.UserInfo{Username: u.GetName(), UID: u.GetUID(), Groups: u.GetGroups()}
	for k, v := range u.GetExtra() {
		if out.Extra == nil {
			out.Extra = map[string]authenticationv1.ExtraValue{}
		}
		out.Extra[k] = v
	}
	return out
}
