// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/dryrun"
)

// Bounds of a requested token's life.
const (
	defaultTokenSeconds = 3600
	minTokenSeconds     = 600
	maxTokenSeconds     = 1 << 32
)

func serviceAccountKind() Kind {
	return Kind{
		Resource: "serviceaccounts", Singular: "serviceaccount", Kind: "ServiceAccount",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		WatchCache: true,
		ShortNames: []string{"sa"},
		New:        newObject[corev1.ServiceAccount], NewList: newObject[corev1.ServiceAccountList],
		Name: apivalidation.ValidateServiceAccountName,
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Secrets", "string", "Number of secrets that belong to the account."),
			ageColumn,
		},
		Row: row(func(s *corev1.ServiceAccount) []any {
			return []any{s.Name, int64(len(s.Secrets)), age(s.CreationTimestamp)}
		}),
		Subresources: func(store *Store, deps Deps) map[string]rest.Storage {
			return map[string]rest.Storage{"token": tokenREST{store, deps}}
		},
		SubresourceTypes: map[schema.GroupVersion][]runtime.Object{
			authenticationv1.SchemeGroupVersion: {&authenticationv1.TokenRequest{}},
		},
		AddToScheme: func(s *runtime.Scheme) error {
			s.AddTypeDefaultingFunc(&authenticationv1.TokenRequest{}, func(obj any) {
				if t, ok := obj.(*authenticationv1.TokenRequest); ok {
					setDefault(&t.Spec.ExpirationSeconds, int64(defaultTokenSeconds))
				}
			})
			return nil
		},
	}
}

// tokenREST issues tokens, for kubectl create token and for kubelets.
type tokenREST struct {
	store *Store
	deps  Deps
}

var (
	_ rest.NamedCreater             = tokenREST{}
	_ rest.GroupVersionKindProvider = tokenREST{}
)

func (tokenREST) New() runtime.Object   { return &authenticationv1.TokenRequest{} }
func (tokenREST) Destroy()              {}
func (tokenREST) NamespaceScoped() bool { return true }

// GroupVersionKind implements rest.GroupVersionKindProvider.
func (tokenREST) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind {
	return authenticationv1.SchemeGroupVersion.WithKind("TokenRequest")
}

func (r tokenREST) Create(ctx context.Context, name string, obj runtime.Object, validate rest.ValidateObjectFunc, options *metav1.CreateOptions) (runtime.Object, error) {
	t, ok := obj.(*authenticationv1.TokenRequest)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("not a TokenRequest: %T", obj))
	}
	got, err := r.store.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	account, ok := got.(*corev1.ServiceAccount)
	if !ok {
		return nil, apierrors.NewInternalError(errNotA("service account", got))
	}
	if t.Name == "" {
		t.Name = account.Name
	}
	if t.Namespace == "" {
		t.Namespace = account.Namespace
	}
	if errs := validateTokenRequest(t); len(errs) > 0 {
		return nil, apierrors.NewInvalid(schema.GroupKind{Group: authenticationv1.GroupName, Kind: "TokenRequest"}, name, errs)
	}
	if len(t.Spec.Audiences) == 0 {
		t.Spec.Audiences = []string{r.deps.Tokens.DefaultAudience()}
	}
	if validate != nil {
		if err := validate(ctx, t.DeepCopyObject()); err != nil {
			return nil, err
		}
	}
	claims := TokenClaims{Namespace: account.Namespace, Name: account.Name, UID: string(account.UID), Audiences: t.Spec.Audiences}
	if err := r.bind(ctx, t.Spec.BoundObjectRef, account, &claims); err != nil {
		return nil, err
	}
	out := t.DeepCopy()
	out.CreationTimestamp = metav1.Now()
	if dryrun.IsDryRun(options.DryRun) {
		return out, nil
	}
	token, expires, err := r.deps.Tokens.Issue(ctx, claims, time.Duration(*t.Spec.ExpirationSeconds)*time.Second)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	out.Status = authenticationv1.TokenRequestStatus{Token: token, ExpirationTimestamp: metav1.NewTime(expires)}
	return out, nil
}

func validateTokenRequest(t *authenticationv1.TokenRequest) field.ErrorList {
	p := field.NewPath("spec", "expirationSeconds")
	switch v := *t.Spec.ExpirationSeconds; {
	case v < minTokenSeconds:
		return field.ErrorList{field.Invalid(p, v, "may not specify a duration less than 10 minutes")}
	case v > maxTokenSeconds:
		return field.ErrorList{field.Invalid(p, v, "may not specify a duration larger than 2^32 seconds")}
	}
	return nil
}

// bind adds to the claims the object whose life the token shall not outlast.
func (r tokenREST) bind(ctx context.Context, ref *authenticationv1.BoundObjectReference, account *corev1.ServiceAccount, claims *TokenClaims) error {
	if ref == nil {
		return nil
	}
	resource := map[string]string{"Pod": "pods", "Secret": "secrets", "Node": "nodes"}[ref.Kind]
	if resource == "" || ref.APIVersion != "v1" {
		return apierrors.NewBadRequest(fmt.Sprintf("cannot bind token to object of type %s, Kind=%s", ref.APIVersion, ref.Kind))
	}
	var uid types.UID
	switch ref.Kind {
	case "Pod":
		pod, err := Read[*corev1.Pod](ctx, r.deps.Lookup, resource, account.Namespace, ref.Name)
		if err != nil {
			return err
		}
		if pod.Spec.ServiceAccountName != account.Name {
			return apierrors.NewBadRequest(fmt.Sprintf("cannot bind token for serviceaccount %q to pod running with different serviceaccount name.", account.Name))
		}
		uid = pod.UID
		claims.PodName, claims.PodUID, claims.NodeName = pod.Name, string(pod.UID), pod.Spec.NodeName
	case "Secret":
		secret, err := Read[*corev1.Secret](ctx, r.deps.Lookup, resource, account.Namespace, ref.Name)
		if err != nil {
			return err
		}
		uid = secret.UID
		claims.SecretName, claims.SecretUID = secret.Name, string(secret.UID)
	case "Node":
		node, err := Read[*corev1.Node](ctx, r.deps.Lookup, resource, metav1.NamespaceNone, ref.Name)
		if err != nil {
			return err
		}
		uid = node.UID
		claims.NodeName, claims.NodeUID = node.Name, string(node.UID)
	}
	if ref.UID != "" && ref.UID != uid {
		return apierrors.NewConflict(schema.GroupResource{Resource: resource}, ref.Name, errUID(ref.UID, uid))
	}
	return nil
}
