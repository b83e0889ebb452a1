// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"slices"

	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
)

// What the kinds have in common that are questions: the object that is created
// comes back with a status, and nothing is stored.

// reviewREST answers questions of one kind.
type reviewREST struct {
	kind   Kind
	answer func(ctx context.Context, obj runtime.Object) (runtime.Object, error)
}

var _ rest.Creater = reviewREST{}

// asReview makes a kind one that is answered by answer; check says what is wrong
// with the question.
func asReview[T runtime.Object](k Kind, check func(T) field.ErrorList, answer func(ctx context.Context, deps Deps, obj T) error) Kind {
	k.Virtual = func(deps Deps) rest.Storage {
		return reviewREST{k, func(ctx context.Context, obj runtime.Object) (runtime.Object, error) {
			t, ok := obj.(T)
			if !ok {
				return nil, apierrors.NewBadRequest(fmt.Sprintf("not a %s: %#v", k.Kind, obj))
			}
			if errs := check(t); len(errs) > 0 {
				return nil, apierrors.NewInvalid(schema.GroupKind{Group: k.GroupVersion.Group, Kind: k.Kind}, "", errs)
			}
			return t, answer(ctx, deps, t)
		}}
	}
	return k
}

func (r reviewREST) New() runtime.Object     { return r.kind.New() }
func (r reviewREST) Destroy()                {}
func (r reviewREST) NamespaceScoped() bool   { return r.kind.Namespaced }
func (r reviewREST) GetSingularName() string { return r.kind.Singular }

// Create implements rest.Creater.
func (r reviewREST) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc, _ *metav1.CreateOptions) (runtime.Object, error) {
	if validate != nil {
		if err := validate(ctx, obj.DeepCopyObject()); err != nil {
			return nil, err
		}
	}
	return r.answer(ctx, obj)
}

// asker is who sends the request.
func asker(ctx context.Context) (user.Info, error) {
	u, ok := request.UserFrom(ctx)
	if !ok {
		return nil, apierrors.NewBadRequest("no user present on request")
	}
	return u, nil
}

// noMetadata refuses metadata on an object that is none.
func noMetadata(m metav1.ObjectMeta) field.ErrorList {
	m.ManagedFields = nil
	if equality.Semantic.DeepEqual(m, metav1.ObjectMeta{}) {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata"), m, "must be empty")}
}

// validateAttributes wants one of the two forms of a question.
func validateAttributes(resource *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes) field.ErrorList {
	spec := field.NewPath("spec")
	switch {
	case resource != nil && path != nil:
		return field.ErrorList{field.Invalid(spec.Child("nonResourceAttributes"), path, "cannot be specified in combination with resourceAttributes")}
	case resource == nil && path == nil:
		return field.ErrorList{field.Invalid(spec.Child("resourceAttributes"), resource, "exactly one of nonResourceAttributes or resourceAttributes must be specified")}
	}
	return nil
}

// decide asks the authorizer.
func decide(ctx context.Context, deps Deps, u user.Info, resource *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes) authorizationv1.SubjectAccessReviewStatus {
	a := authorizer.AttributesRecord{User: u}
	if resource != nil {
		a.Verb, a.Namespace, a.APIGroup, a.APIVersion = resource.Verb, resource.Namespace, resource.Group, resource.Version
		a.Resource, a.Subresource, a.Name, a.ResourceRequest = resource.Resource, resource.Subresource, resource.Name, true
		setIfZero(&a.APIVersion, "*")
	} else {
		a.Verb, a.Path = path.Verb, path.Path
	}
	decision, reason, err := deps.Authorizer.Authorize(ctx, a)
	status := authorizationv1.SubjectAccessReviewStatus{
		Allowed: decision == authorizer.DecisionAllow,
		Denied:  decision == authorizer.DecisionDeny,
		Reason:  reason,
	}
	if err != nil {
		status.EvaluationError = err.Error()
	}
	return status
}

// subject is the user of whom a review asks.
func subject(s *authorizationv1.SubjectAccessReviewSpec) user.Info {
	u := &user.DefaultInfo{Name: s.User, UID: s.UID, Groups: slices.Clone(s.Groups)}
	for k, v := range s.Extra {
		if u.Extra == nil {
			u.Extra = map[string][]string{}
		}
		u.Extra[k] = v
	}
	return u
}

func validateSubjectReview(s *authorizationv1.SubjectAccessReviewSpec) field.ErrorList {
	errs := validateAttributes(s.ResourceAttributes, s.NonResourceAttributes)
	if s.User == "" && len(s.Groups) == 0 {
		errs = append(errs, field.Invalid(field.NewPath("spec", "user"), s.User, "at least one of user or group must be specified"))
	}
	return errs
}
