// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"maps"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/names"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// Storages are the REST storages to install, by group version and by path
// ("pods", "pods/log").
type Storages map[schema.GroupVersion]map[string]rest.Storage

// Build makes the storages of kinds. getter says where objects are kept; it is
// asked once for each kind. Build sets deps.Lookup and returns it, too.
func Build(kinds []Kind, scheme *runtime.Scheme, getter generic.RESTOptionsGetter, deps Deps) (Storages, func(resource string) *Store, error) {
	stores := map[string]*Store{}
	deps.Lookup = func(resource string) *Store { return stores[resource] }
	deps.serviceRanges = &serviceRanges{}
	out := Storages{}
	for _, k := range kinds {
		if k.Virtual != nil {
			out.add(k.GroupVersion, map[string]rest.Storage{k.Resource: k.Virtual(deps)})
			continue
		}
		store, err := newStore(k, scheme, getter, deps)
		if err != nil {
			return nil, nil, fmt.Errorf("build the store of %s: %w", k.Resource, err)
		}
		stores[k.Resource] = store
		paths := map[string]rest.Storage{k.Resource: kindREST{store, k}}
		if k.Wrap != nil {
			paths[k.Resource] = k.Wrap(store, deps)
		}
		if k.Status != nil {
			paths[k.Resource+"/status"] = newStatusREST(store, k, scheme)
		}
		if k.Subresources != nil {
			for name, s := range k.Subresources(store, deps) {
				paths[k.Resource+"/"+name] = s
			}
		}
		out.add(k.GroupVersion, paths)
		for _, v := range k.Views {
			out.add(v.GroupVersion, map[string]rest.Storage{k.Resource: paths[k.Resource]})
			if k.Status != nil {
				out.add(v.GroupVersion, map[string]rest.Storage{k.Resource + "/status": paths[k.Resource+"/status"]})
			}
		}
	}
	return out, deps.Lookup, nil
}

func (s Storages) add(gv schema.GroupVersion, paths map[string]rest.Storage) {
	if s[gv] == nil {
		s[gv] = map[string]rest.Storage{}
	}
	maps.Copy(s[gv], paths)
}

func newStore(k Kind, scheme *runtime.Scheme, getter generic.RESTOptionsGetter, deps Deps) (*Store, error) {
	base := strategy{scheme, names.SimpleNameGenerator, k}
	gr := schema.GroupResource{Group: k.GroupVersion.Group, Resource: k.Resource}
	store := &Store{
		NewFunc:                   k.New,
		NewListFunc:               k.NewList,
		DefaultQualifiedResource:  gr,
		SingularQualifiedResource: schema.GroupResource{Group: gr.Group, Resource: k.Singular},
		CreateStrategy:            base,
		UpdateStrategy:            base,
		DeleteStrategy:            base,
		ResetFieldsStrategy:       base,
		TableConvertor:            newTableConvertor(k),
	}
	if k.Graceful != nil {
		store.DeleteStrategy = gracefulStrategy{base}
		// The watchers of a deletion want the object as it was, as upstream
		// gives it for kinds that linger.
		store.ReturnDeletedObject = true
	}
	if k.TTL > 0 {
		seconds := uint64(k.TTL.Seconds())
		store.TTLFunc = func(runtime.Object, uint64, bool) (uint64, error) { return seconds, nil }
	}
	if k.Hooks != nil {
		h := k.Hooks(deps)
		store.BeginCreate, store.BeginUpdate = h.BeginCreate, h.BeginUpdate
		store.AfterCreate, store.AfterUpdate, store.AfterDelete = h.AfterCreate, h.AfterUpdate, h.AfterDelete
	}
	attrs := attributes(k)
	store.PredicateFunc = func(label labels.Selector, field fields.Selector) storage.SelectionPredicate {
		p := storage.SelectionPredicate{Label: label, Field: field, GetAttrs: attrs}
		if k.IndexedField != "" {
			p.IndexFields = []string{k.IndexedField}
		}
		return p
	}
	options := &generic.StoreOptions{RESTOptions: getter, AttrFunc: attrs}
	if k.IndexedField != "" {
		options.TriggerFunc = storage.IndexerFuncs{k.IndexedField: func(obj runtime.Object) string {
			return k.Fields(obj)[k.IndexedField]
		}}
	}
	return store, store.CompleteWithOptions(options)
}

// attributes returns the function that tells the labels and the selectable
// fields of an object.
func attributes(k Kind) storage.AttrFunc {
	return func(obj runtime.Object) (labels.Set, fields.Set, error) {
		m, err := meta.Accessor(obj)
		if err != nil {
			return nil, nil, err
		}
		set := fields.Set{}
		if k.Fields != nil {
			set = k.Fields(obj)
		}
		set["metadata.name"] = m.GetName()
		if k.Namespaced {
			set["metadata.namespace"] = m.GetNamespace()
		}
		return labels.Set(m.GetLabels()), set, nil
	}
}

// kindREST adds to a store the names by which kubectl may call a kind.
type kindREST struct {
	*registry.Store
	kind Kind
}

// ShortNames implements rest.ShortNamesProvider.
func (r kindREST) ShortNames() []string { return r.kind.ShortNames }

// Categories implements rest.CategoriesProvider.
func (r kindREST) Categories() []string { return r.kind.Categories }

// statusREST serves the /status subresource from the store of the kind.
type statusREST struct{ store *registry.Store }

var (
	_ rest.Patcher             = statusREST{}
	_ rest.ResetFieldsStrategy = statusREST{}
)

func newStatusREST(store *registry.Store, k Kind, scheme *runtime.Scheme) statusREST {
	s := *store
	st := statusStrategy{strategy{scheme, names.SimpleNameGenerator, k}}
	s.UpdateStrategy = st
	s.ResetFieldsStrategy = st
	s.BeginCreate, s.BeginUpdate = nil, nil
	return statusREST{&s}
}

func (r statusREST) New() runtime.Object { return r.store.New() }

// Destroy does nothing: the store belongs to the main resource.
func (r statusREST) Destroy() {}

func (r statusREST) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	return r.store.Get(ctx, name, options)
}

func (r statusREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc, update rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	// A subresource never creates its object, not even by server-side apply.
	return r.store.Update(ctx, name, info, create, update, false, options)
}

func (r statusREST) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return r.store.GetResetFields()
}

func (r statusREST) ConvertToTable(ctx context.Context, object, options runtime.Object) (*metav1.Table, error) {
	return r.store.ConvertToTable(ctx, object, options)
}
