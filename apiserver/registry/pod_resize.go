// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"
)

// resizeREST says that the resources of a running pod cannot be changed: no kubelet
// here would follow, and a spec that nobody follows is a lie. A change that changes
// nothing is taken.
type resizeREST struct{ store *Store }

var _ rest.Patcher = resizeREST{}

func (r resizeREST) New() runtime.Object { return r.store.New() }
func (resizeREST) Destroy()              {}

// Get implements rest.Getter.
func (r resizeREST) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	return r.store.Get(ctx, name, options)
}

// Update implements rest.Updater.
func (r resizeREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, _ rest.ValidateObjectFunc, _ rest.ValidateObjectUpdateFunc, _ bool, _ *metav1.UpdateOptions) (runtime.Object, bool, error) {
	obj, err := r.store.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return nil, false, err
	}
	updated, err := info.UpdatedObject(ctx, obj)
	if err != nil {
		return nil, false, err
	}
	was, ok := obj.(*corev1.Pod)
	now, okNow := updated.(*corev1.Pod)
	if ok && okNow && equality.Semantic.DeepEqual(was.Spec, now.Spec) {
		return obj, false, nil
	}
	return nil, false, apierrors.NewForbidden(r.store.DefaultQualifiedResource, name,
		errors.New("pod resize is not supported: kplab's nodes do not limit what running pods use; delete the pod and make it with other resources"))
}
