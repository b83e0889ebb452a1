// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// scaled is what a Scale shows of an object.
type scaled struct {
	replicas **int32
	current  int32
	selector *metav1.LabelSelector
}

// scaleTypes are the types that the /scale subresource needs in the scheme.
func scaleTypes() map[schema.GroupVersion][]runtime.Object {
	return map[schema.GroupVersion][]runtime.Object{autoscalingv1.SchemeGroupVersion: {&autoscalingv1.Scale{}}}
}

// scaleREST serves /scale: an autoscaling/v1 Scale is read from the object and
// its spec.replicas written into it.
type scaleREST struct {
	store *Store
	gv    schema.GroupVersion
	view  func(obj runtime.Object) scaled
	table tableConvertor
}

var (
	_ rest.Patcher                  = &scaleREST{}
	_ rest.GroupVersionKindProvider = &scaleREST{}
)

func newScaleREST[T runtime.Object](store *Store, gv schema.GroupVersion, view func(T) scaled) *scaleREST {
	return &scaleREST{
		store: store, gv: gv,
		view: func(obj runtime.Object) scaled { return view(obj.(T)) },
		table: tableConvertor{
			columns: []metav1.TableColumnDefinition{
				nameColumn,
				column("Desired", "integer", "How many replicas are wanted."),
				column("Available", "integer", "How many replicas there are."),
				ageColumn,
			},
			row: row(func(s *autoscalingv1.Scale) []any {
				return []any{s.Name, int64(s.Spec.Replicas), int64(s.Status.Replicas), age(s.CreationTimestamp)}
			}),
		},
	}
}

// New implements rest.Storage.
func (r *scaleREST) New() runtime.Object { return &autoscalingv1.Scale{} }

// Destroy does nothing: the store belongs to the main resource.
func (r *scaleREST) Destroy() {}

// GroupVersionKind implements rest.GroupVersionKindProvider.
func (r *scaleREST) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind {
	return autoscalingv1.SchemeGroupVersion.WithKind("Scale")
}

// ConvertToTable implements rest.TableConvertor.
func (r *scaleREST) ConvertToTable(ctx context.Context, object, options runtime.Object) (*metav1.Table, error) {
	return r.table.ConvertToTable(ctx, object, options)
}

// Get implements rest.Getter.
func (r *scaleREST) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	obj, err := r.store.Get(ctx, name, options)
	if err != nil {
		return nil, err
	}
	return r.scale(obj)
}

// Update implements rest.Updater.
func (r *scaleREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, _ rest.ValidateObjectFunc, validate rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	admit := func(ctx context.Context, obj, old runtime.Object) error {
		if validate == nil {
			return nil
		}
		now, err := r.scale(obj)
		if err != nil {
			return err
		}
		was, err := r.scale(old)
		if err != nil {
			return err
		}
		return validate(ctx, now, was)
	}
	// A subresource never creates its object.
	obj, _, err := r.store.Update(ctx, name, scaleInfo{r, info}, nil, admit, false, options)
	if err != nil {
		return nil, false, err
	}
	s, err := r.scale(obj)
	return s, false, err
}

// scale shows obj as a Scale.
func (r *scaleREST) scale(obj runtime.Object) (*autoscalingv1.Scale, error) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, err
	}
	v := r.view(obj)
	selector, err := metav1.LabelSelectorAsSelector(v.selector)
	if err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("selector of %s: %w", m.GetName(), err))
	}
	return &autoscalingv1.Scale{
		ObjectMeta: metav1.ObjectMeta{
			Name: m.GetName(), Namespace: m.GetNamespace(), UID: m.GetUID(),
			ResourceVersion: m.GetResourceVersion(), CreationTimestamp: m.GetCreationTimestamp(),
		},
		Spec:   autoscalingv1.ScaleSpec{Replicas: ptr.Deref(*v.replicas, 0)},
		Status: autoscalingv1.ScaleStatus{Replicas: v.current, Selector: selector.String()},
	}, nil
}

// scaleInfo turns the update of a Scale into the update of its object.
type scaleInfo struct {
	rest *scaleREST
	info rest.UpdatedObjectInfo
}

// Preconditions implements rest.UpdatedObjectInfo.
func (i scaleInfo) Preconditions() *metav1.Preconditions { return i.info.Preconditions() }

// UpdatedObject implements rest.UpdatedObjectInfo.
func (i scaleInfo) UpdatedObject(ctx context.Context, old runtime.Object) (runtime.Object, error) {
	r := i.rest
	obj := old.DeepCopyObject()
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, err
	}
	// Who owns spec.replicas of the object owns spec.replicas of the Scale, and
	// the other way round.
	owners := managedfields.NewScaleHandler(m.GetManagedFields(), r.gv, managedfields.ResourcePathMappings{
		r.gv.String(): fieldpath.MakePathOrDie("spec", "replicas"),
	})
	was, err := r.scale(obj)
	if err != nil {
		return nil, err
	}
	if was.ManagedFields, err = owners.ToSubresource(); err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("managed fields of the scale of %s: %w", was.Name, err))
	}
	updated, err := i.info.UpdatedObject(ctx, was)
	if err != nil {
		return nil, err
	}
	now, ok := updated.(*autoscalingv1.Scale)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("a Scale is wanted here, got %T", updated))
	}
	if errs := validateScale(now, was); len(errs) > 0 {
		return nil, apierrors.NewInvalid(schema.GroupKind{Group: autoscalingv1.GroupName, Kind: "Scale"}, was.Name, errs)
	}
	*r.view(obj).replicas = ptr.To(now.Spec.Replicas)
	// A Scale that carries a version makes the update conditional on it.
	m.SetResourceVersion(now.ResourceVersion)
	entries, err := owners.ToParent(now.ManagedFields)
	if err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("managed fields of %s: %w", was.Name, err))
	}
	m.SetManagedFields(entries)
	return obj, nil
}

func validateScale(now, was *autoscalingv1.Scale) field.ErrorList {
	errs := notNegative(field.NewPath("spec", "replicas"), now.Spec.Replicas)
	// An empty name or namespace means the one of the URL.
	if now.Name != "" && now.Name != was.Name {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), now.Name, "field is immutable"))
	}
	if now.Namespace != "" && now.Namespace != was.Namespace {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "namespace"), now.Namespace, "field is immutable"))
	}
	return errs
}
