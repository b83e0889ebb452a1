// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"reflect"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage/names"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// strategy turns a Kind into the strategies of the generic registry.
type strategy struct {
	runtime.ObjectTyper
	names.NameGenerator
	kind Kind
}

// gracefulStrategy is the strategy of a kind with graceful deletion. It is a
// type of its own because the registry asks for the method by type assertion.
type gracefulStrategy struct{ strategy }

// CheckGracefulDelete implements rest.RESTGracefulDeleteStrategy.
func (s gracefulStrategy) CheckGracefulDelete(ctx context.Context, obj runtime.Object, options *metav1.DeleteOptions) bool {
	return s.kind.Graceful(ctx, obj, options)
}

var (
	_ rest.RESTCreateUpdateStrategy        = strategy{}
	_ rest.RESTGracefulDeleteStrategy      = gracefulStrategy{}
	_ rest.UpdateResetFieldsStrategy       = statusStrategy{}
	_ rest.GarbageCollectionDeleteStrategy = strategy{}
)

func (s strategy) NamespaceScoped() bool                    { return s.kind.Namespaced }
func (s strategy) AllowCreateOnUpdate(context.Context) bool { return s.kind.AllowCreateOnUpdate }
func (s strategy) AllowUnconditionalUpdate(context.Context) bool {
	return !s.kind.RequireResourceVersion
}
func (s strategy) Canonicalize(runtime.Object) {}

// DefaultGarbageCollectionPolicy implements
// rest.GarbageCollectionDeleteStrategy: dependents go with their owner, but for a few
// old kinds.
func (s strategy) DefaultGarbageCollectionPolicy(context.Context) rest.GarbageCollectionPolicy {
	if s.kind.OrphanByDefault {
		return rest.OrphanDependents
	}
	return rest.DeleteDependents
}

func (s strategy) PrepareForCreate(ctx context.Context, obj runtime.Object) {
	if s.kind.Status != nil && !s.kind.KeepStatusOnCreate {
		clearField(obj, "Status")
	}
	if m, err := meta.Accessor(obj); err == nil {
		m.SetGeneration(0)
		if s.kind.TracksGeneration {
			m.SetGeneration(1)
		}
	}
	if s.kind.PrepareForCreate != nil {
		s.kind.PrepareForCreate(ctx, obj)
	}
}

func (s strategy) PrepareForUpdate(ctx context.Context, obj, old runtime.Object) {
	if s.kind.Status != nil {
		copyField(obj, old, "Status")
	}
	if s.kind.PrepareForUpdate != nil {
		s.kind.PrepareForUpdate(ctx, obj, old)
	}
	if s.kind.TracksGeneration && !sameField(obj, old, "Spec") {
		m, err := meta.Accessor(obj)
		if err == nil {
			m.SetGeneration(m.GetGeneration() + 1)
		}
	}
}

func (s strategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	errs := s.validateMeta(obj)
	if s.kind.Validate != nil {
		errs = append(errs, s.kind.Validate(obj)...)
	}
	if s.kind.ValidateCreate != nil {
		errs = append(errs, s.kind.ValidateCreate(obj)...)
	}
	return errs
}

func (s strategy) validateMeta(obj runtime.Object) field.ErrorList {
	m, err := meta.Accessor(obj)
	if err != nil {
		return field.ErrorList{field.InternalError(field.NewPath("metadata"), err)}
	}
	name := s.kind.Name
	if name == nil {
		name = validation.NameIsDNSSubdomain
	}
	return validation.ValidateObjectMetaAccessor(m, s.kind.Namespaced, name, field.NewPath("metadata"))
}

func (s strategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	errs := s.validateMetaUpdate(obj, old)
	if s.kind.Validate != nil {
		errs = append(errs, s.kind.Validate(obj)...)
	}
	if s.kind.ValidateUpdate != nil {
		errs = append(errs, s.kind.ValidateUpdate(obj, old)...)
	}
	return errs
}

func (s strategy) validateMetaUpdate(obj, old runtime.Object) field.ErrorList {
	m, err := meta.Accessor(obj)
	if err != nil {
		return field.ErrorList{field.InternalError(field.NewPath("metadata"), err)}
	}
	o, err := meta.Accessor(old)
	if err != nil {
		return field.ErrorList{field.InternalError(field.NewPath("metadata"), err)}
	}
	return validation.ValidateObjectMetaAccessorUpdate(m, o, field.NewPath("metadata"))
}

func (s strategy) WarningsOnCreate(_ context.Context, obj runtime.Object) []string {
	if s.kind.Warnings == nil {
		return nil
	}
	return s.kind.Warnings(obj, nil)
}

func (s strategy) WarningsOnUpdate(_ context.Context, obj, old runtime.Object) []string {
	if s.kind.Warnings == nil {
		return nil
	}
	return s.kind.Warnings(obj, old)
}

// GetResetFields implements rest.ResetFieldsStrategy: a server-side apply of
// the main resource does not own status.
func (s strategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	if s.kind.Status == nil {
		return nil
	}
	return resetIn(s.kind, fieldpath.NewSet(fieldpath.MakePathOrDie("status")))
}

// statusStrategy is the update strategy of the /status subresource.
type statusStrategy struct{ strategy }

func (s statusStrategy) PrepareForUpdate(ctx context.Context, obj, old runtime.Object) {
	copyField(obj, old, "Spec")
	m, err := meta.Accessor(obj)
	if err != nil {
		return
	}
	o, err := meta.Accessor(old)
	if err != nil {
		return
	}
	m.SetLabels(o.GetLabels())
	m.SetOwnerReferences(o.GetOwnerReferences())
	m.SetDeletionTimestamp(o.GetDeletionTimestamp())
	if s.kind.Status.Prepare != nil {
		s.kind.Status.Prepare(ctx, obj, old)
	}
}

func (s statusStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	errs := s.validateMetaUpdate(obj, old)
	if s.kind.Status.Validate != nil {
		errs = append(errs, s.kind.Status.Validate(obj, old)...)
	}
	return errs
}

func (s statusStrategy) WarningsOnUpdate(context.Context, runtime.Object, runtime.Object) []string {
	return nil
}

// AllowCreateOnUpdate is false: a status belongs to an object that exists.
func (s statusStrategy) AllowCreateOnUpdate(context.Context) bool { return false }

// GetResetFields implements rest.ResetFieldsStrategy: the status subresource
// owns neither spec nor labels.
func (s statusStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return resetIn(s.kind, fieldpath.NewSet(
		fieldpath.MakePathOrDie("spec"),
		fieldpath.MakePathOrDie("metadata", "labels"),
		fieldpath.MakePathOrDie("metadata", "ownerReferences"),
	))
}

func resetIn(k Kind, set *fieldpath.Set) map[fieldpath.APIVersion]*fieldpath.Set {
	return map[fieldpath.APIVersion]*fieldpath.Set{fieldpath.APIVersion(k.GroupVersion.String()): set}
}

// The three functions below reach a top-level field of an API object by name.
// Every kind with a spec or a status calls them so; a kind that has no such
// field (a ConfigMap has no Spec) is left alone.

func clearField(obj runtime.Object, name string) {
	if f := reflect.ValueOf(obj).Elem().FieldByName(name); f.IsValid() {
		f.SetZero()
	}
}

func copyField(dst, src runtime.Object, name string) {
	d, s := reflect.ValueOf(dst).Elem().FieldByName(name), reflect.ValueOf(src).Elem().FieldByName(name)
	if d.IsValid() && s.IsValid() {
		d.Set(s)
	}
}

func sameField(a, b runtime.Object, name string) bool {
	x, y := reflect.ValueOf(a).Elem().FieldByName(name), reflect.ValueOf(b).Elem().FieldByName(name)
	return !x.IsValid() || equality.Semantic.DeepEqual(x.Interface(), y.Interface())
}
