// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// Read returns an object of another kind than the one a request is about. The
// watch cache answers; when it does not have the object (yet), the storage.
// namespace is "" for kinds without one. Errors are API errors that name the
// object that was read.
func Read[T any](ctx context.Context, lookup func(string) *Store, resource, namespace, name string) (T, error) {
	var zero T
	store := lookup(resource)
	if store == nil {
		return zero, apierrors.NewInternalError(fmt.Errorf("no %s are served", resource))
	}
	// A store names in its errors the resource that the request is about.
	gr := store.DefaultQualifiedResource
	ctx = request.WithRequestInfo(ctx, &request.RequestInfo{IsResourceRequest: true, APIGroup: gr.Group, Resource: gr.Resource})
	ctx = request.WithNamespace(ctx, namespace)
	obj, err := store.Get(ctx, name, &metav1.GetOptions{ResourceVersion: "0"})
	if apierrors.IsNotFound(err) {
		obj, err = store.Get(ctx, name, &metav1.GetOptions{})
	}
	if err != nil {
		return zero, err
	}
	out, ok := obj.(T)
	if !ok {
		return zero, apierrors.NewInternalError(errNotA(store.SingularQualifiedResource.Resource, obj))
	}
	return out, nil
}
