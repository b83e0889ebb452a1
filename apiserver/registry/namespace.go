// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	storeerr "k8s.io/apiserver/pkg/storage/errors"
	"k8s.io/apiserver/pkg/util/dryrun"
)

func namespaceKind() Kind {
	return Kind{
		Resource: "namespaces", Singular: "namespace", Kind: "Namespace",
		GroupVersion: corev1.SchemeGroupVersion,
		WatchCache:   true,
		ShortNames:   []string{"ns"},
		New:          newObject[corev1.Namespace], NewList: newObject[corev1.NamespaceList],
		Name:    apivalidation.ValidateNamespaceName,
		Default: forObject(defaultNamespace),
		PrepareForCreate: onCreate(func(_ context.Context, ns *corev1.Namespace) {
			ns.Status.Phase = corev1.NamespaceActive
			// Its content is deleted before it is, by a controller that then
			// takes the finalizer away.
			if !slices.Contains(ns.Spec.Finalizers, corev1.FinalizerKubernetes) {
				ns.Spec.Finalizers = append(ns.Spec.Finalizers, corev1.FinalizerKubernetes)
			}
		}),
		PrepareForUpdate: onUpdate(func(_ context.Context, ns, old *corev1.Namespace) {
			ns.Spec.Finalizers = old.Spec.Finalizers
		}),
		Validate: validates(func(ns *corev1.Namespace) field.ErrorList {
			var errs field.ErrorList
			for i, f := range ns.Spec.Finalizers {
				errs = append(errs, invalidIf(field.NewPath("spec", "finalizers").Index(i), string(f), validation.IsQualifiedName(string(f)))...)
			}
			return errs
		}),
		Status: &StatusStrategy{Validate: validatesUpdate(func(ns, _ *corev1.Namespace) field.ErrorList {
			p := field.NewPath("status", "phase")
			if ns.DeletionTimestamp.IsZero() {
				return oneOf(ns.Status.Phase, p, corev1.NamespaceActive)
			}
			return oneOf(ns.Status.Phase, p, corev1.NamespaceTerminating)
		})},
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Status", "string", "Active, or Terminating while its content is deleted."),
			ageColumn,
		},
		Row: row(func(ns *corev1.Namespace) []any {
			return []any{ns.Name, string(ns.Status.Phase), age(ns.CreationTimestamp)}
		}),
		// name is an old alias that clients still use.
		FieldLabels: []string{"status.phase", "name"},
		Fields: fieldsOf(func(ns *corev1.Namespace) fields.Set {
			return fields.Set{"status.phase": string(ns.Status.Phase), "name": ns.Name}
		}),
		Wrap: func(store *Store, _ Deps) rest.Storage {
			// The object is gone only when nothing finalizes it any more.
			store.ShouldDeleteDuringUpdate = func(_ context.Context, _ string, obj, _ runtime.Object) bool {
				ns, ok := obj.(*corev1.Namespace)
				return ok && len(ns.Spec.Finalizers) == 0
			}
			return namespaceREST{kindREST{store, Kind{ShortNames: []string{"ns"}}}}
		},
		Subresources: func(store *Store, _ Deps) map[string]rest.Storage {
			s := *store
			if base, ok := store.UpdateStrategy.(strategy); ok {
				s.UpdateStrategy = finalizeStrategy{base}
			}
			s.ResetFieldsStrategy = nil
			return map[string]rest.Storage{"finalize": finalizeREST{&s}}
		},
	}
}

// defaultNamespace sets the label by which selectors can name a namespace.
func defaultNamespace(ns *corev1.Namespace) {
	if ns.Name == "" || ns.Labels[corev1.LabelMetadataName] == ns.Name {
		return
	}
	if ns.Labels == nil {
		ns.Labels = map[string]string{}
	}
	ns.Labels[corev1.LabelMetadataName] = ns.Name
}

// namespaceREST deletes in two steps: first the namespace is marked, and when
// its finalizers are gone the object is deleted.
type namespaceREST struct{ kindREST }

var _ rest.Storage = namespaceREST{}

// DeleteCollection hides the store's: namespaces are deleted one by one, since
// each takes all its content with it.
func (r namespaceREST) DeleteCollection() {}

// Delete implements rest.GracefulDeleter.
func (r namespaceREST) Delete(ctx context.Context, name string, validate rest.ValidateObjectFunc, options *metav1.DeleteOptions) (runtime.Object, bool, error) {
	obj, err := r.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return nil, false, err
	}
	ns, ok := obj.(*corev1.Namespace)
	if !ok {
		return nil, false, apierrors.NewInternalError(errNotA("namespace", obj))
	}
	if options == nil {
		options = &metav1.DeleteOptions{}
	}
	if options.Preconditions == nil {
		options.Preconditions = &metav1.Preconditions{}
	}
	if options.Preconditions.UID == nil {
		options.Preconditions.UID = &ns.UID
	} else if *options.Preconditions.UID != ns.UID {
		return nil, false, apierrors.NewConflict(schema.GroupResource{Resource: "namespaces"}, name, errUID(*options.Preconditions.UID, ns.UID))
	}
	if ns.DeletionTimestamp.IsZero() {
		out, err := r.markTerminating(ctx, name, validate, options)
		return out, false, err
	}
	if len(ns.Spec.Finalizers) > 0 {
		return ns, false, nil
	}
	return r.Store.Delete(ctx, name, validate, options)
}

// markTerminating sets deletionTimestamp, phase and the finalizers that the
// propagation policy asks for.
func (r namespaceREST) markTerminating(ctx context.Context, name string, validate rest.ValidateObjectFunc, options *metav1.DeleteOptions) (runtime.Object, error) {
	key, err := r.KeyFunc(ctx, name)
	if err != nil {
		return nil, err
	}
	pre := storage.Preconditions{UID: options.Preconditions.UID, ResourceVersion: options.Preconditions.ResourceVersion}
	out := &corev1.Namespace{}
	err = r.Storage.GuaranteedUpdate(ctx, key, out, false, &pre, storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
		ns, ok := obj.(*corev1.Namespace)
		if !ok {
			return nil, errNotA("namespace", obj)
		}
		if validate != nil {
			if err := validate(ctx, ns); err != nil {
				return nil, err
			}
		}
		if ns.DeletionTimestamp.IsZero() {
			now := metav1.NewTime(time.Now())
			ns.DeletionTimestamp = &now
		}
		ns.Status.Phase = corev1.NamespaceTerminating
		ns.Finalizers = slices.DeleteFunc(ns.Finalizers, func(f string) bool {
			return f == metav1.FinalizerOrphanDependents
		})
		if p := options.PropagationPolicy; p != nil && *p == metav1.DeletePropagationOrphan {
			ns.Finalizers = append(ns.Finalizers, metav1.FinalizerOrphanDependents)
		}
		return ns, nil
	}), dryrun.IsDryRun(options.DryRun), nil)
	if err != nil {
		err = storeerr.InterpretGetError(err, schema.GroupResource{Resource: "namespaces"}, name)
		err = storeerr.InterpretUpdateError(err, schema.GroupResource{Resource: "namespaces"}, name)
		return nil, err
	}
	return out, nil
}

// finalizeREST changes spec.finalizers, which the main resource may not.
type finalizeREST struct{ store *Store }

var _ rest.Updater = finalizeREST{}

func (finalizeREST) New() runtime.Object { return &corev1.Namespace{} }
func (finalizeREST) Destroy()            {}

func (r finalizeREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc, update rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	return r.store.Update(ctx, name, info, create, update, false, options)
}

type finalizeStrategy struct{ strategy }

func (s finalizeStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	copyField(obj, old, "Status")
}
