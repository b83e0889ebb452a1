// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
	storeerr "k8s.io/apiserver/pkg/storage/errors"
)

// Read returns an object of another kind than the one a request is about. The
// watch cache answers; when it does not have the object (yet), the storage.
// namespace is "" for kinds without one. Errors are API errors that name the
// object that was read.
func Read[T any](ctx context.Context, lookup func(string) *Store, resource, namespace, name string) (T, error) {
	var zero T
	store, ctx, err := elsewhere(ctx, lookup, resource, namespace)
	if err != nil {
		return zero, err
	}
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

// List is Read for all objects of a kind that a selector matches, of one namespace
// or with "" of all. T is the kind's list.
func List[T any](ctx context.Context, lookup func(string) *Store, resource, namespace string, selector labels.Selector) (T, error) {
	var zero T
	store, ctx, err := elsewhere(ctx, lookup, resource, namespace)
	if err != nil {
		return zero, err
	}
	obj, err := store.List(ctx, &internalversion.ListOptions{LabelSelector: selector, ResourceVersion: "0"})
	if err != nil {
		return zero, err
	}
	out, ok := obj.(T)
	if !ok {
		return zero, apierrors.NewInternalError(errNotA("list of "+resource, obj))
	}
	return out, nil
}

// Change edits an object of another kind than the one a request is about, as it is
// stored, past admission and validation. change may be called again when another write
// came between. Its error is returned as it is, and nothing is written; nothing is
// written with dryRun, either.
func Change[T runtime.Object](ctx context.Context, lookup func(string) *Store, resource, namespace, name string, dryRun bool, change func(T) error) error {
	store, ctx, err := elsewhere(ctx, lookup, resource, namespace)
	if err != nil {
		return err
	}
	key, err := store.KeyFunc(ctx, name)
	if err != nil {
		return err
	}
	var refused error
	err = store.Storage.GuaranteedUpdate(ctx, key, store.New(), false, nil, storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
		stored, ok := obj.(T)
		if !ok {
			return nil, apierrors.NewInternalError(errNotA(store.SingularQualifiedResource.Resource, obj))
		}
		refused = change(stored)
		return stored, refused
	}), dryRun, nil)
	if refused != nil || err == nil {
		return refused
	}
	return storeerr.InterpretUpdateError(err, store.DefaultQualifiedResource, name)
}

// elsewhere returns the store of another kind and a request's context for it: a
// store names in its errors the resource that the request is about.
func elsewhere(ctx context.Context, lookup func(string) *Store, resource, namespace string) (*Store, context.Context, error) {
	store := lookup(resource)
	if store == nil {
		return nil, nil, apierrors.NewInternalError(fmt.Errorf("no %s are served", resource))
	}
	gr := store.DefaultQualifiedResource
	ctx = request.WithRequestInfo(ctx, &request.RequestInfo{IsResourceRequest: true, APIGroup: gr.Group, Resource: gr.Resource})
	return store, request.WithNamespace(ctx, namespace), nil
}
