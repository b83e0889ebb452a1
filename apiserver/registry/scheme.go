// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"
)

// NewScheme returns the scheme that knows kinds: types, defaults, field
// selectors and conversions.
func NewScheme(kinds []Kind) (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	groupVersions := map[schema.GroupVersion]bool{}
	// Every v1 type stands in for the internal version of its group, too.
	register := func(gv schema.GroupVersion, objs ...runtime.Object) {
		if !groupVersions[gv] {
			groupVersions[gv] = true
			metav1.AddToGroupVersion(s, gv)
		}
		s.AddKnownTypes(gv, objs...)
	}
	internal := func(group string, objs ...runtime.Object) {
		s.AddKnownTypes(schema.GroupVersion{Group: group, Version: runtime.APIVersionInternal}, objs...)
	}
	for _, k := range kinds {
		types := []runtime.Object{k.New()}
		if k.NewList != nil {
			types = append(types, k.NewList())
		}
		register(k.GroupVersion, types...)
		internal(k.GroupVersion.Group, types...)
		for gv, objs := range k.SubresourceTypes {
			register(gv, objs...)
			internal(gv.Group, objs...)
		}
		addDefaults(s, k)
		gvk := k.GroupVersion.WithKind(k.Kind)
		if err := s.AddFieldLabelConversionFunc(gvk, fieldLabels(k.FieldLabels, k.FieldAliases, k.Namespaced)); err != nil {
			return nil, fmt.Errorf("field labels of %s: %w", k.Resource, err)
		}
		if k.AddToScheme != nil {
			if err := k.AddToScheme(s); err != nil {
				return nil, fmt.Errorf("scheme of %s: %w", k.Resource, err)
			}
		}
		for _, v := range k.Views {
			register(v.GroupVersion, v.New(), v.NewList())
			internal(v.GroupVersion.Group, k.New(), k.NewList())
			if err := v.AddToScheme(s); err != nil {
				return nil, fmt.Errorf("scheme of %s in %s: %w", k.Resource, v.GroupVersion, err)
			}
			if err := s.AddFieldLabelConversionFunc(v.GroupVersion.WithKind(k.Kind), fieldLabels(v.FieldLabels, v.FieldAliases, k.Namespaced)); err != nil {
				return nil, fmt.Errorf("field labels of %s in %s: %w", k.Resource, v.GroupVersion, err)
			}
		}
	}
	byGroup := map[string][]schema.GroupVersion{}
	for gv := range groupVersions {
		byGroup[gv.Group] = append(byGroup[gv.Group], gv)
	}
	for _, versions := range byGroup {
		// The newest is the one that clients prefer.
		slices.SortFunc(versions, func(a, b schema.GroupVersion) int {
			return version.CompareKubeAwareVersionStrings(b.Version, a.Version)
		})
		if err := s.SetVersionPriority(versions...); err != nil {
			return nil, fmt.Errorf("version priority: %w", err)
		}
	}
	return s, nil
}

// addDefaults registers the kind's defaults for the object and for a list of
// them.
func addDefaults(s *runtime.Scheme, k Kind) {
	if k.Default == nil {
		return
	}
	s.AddTypeDefaultingFunc(k.New(), func(obj any) { k.Default(obj.(runtime.Object)) })
	s.AddTypeDefaultingFunc(k.NewList(), func(obj any) {
		// The error would be the callback's, which returns none.
		_ = meta.EachListItem(obj.(runtime.Object), func(item runtime.Object) error {
			k.Default(item)
			return nil
		})
	})
}

// fieldLabels returns the function that checks a field selector's label. An
// unknown one is an error of the client (400), as upstream words it.
func fieldLabels(known []string, aliases map[string]string, namespaced bool) runtime.FieldLabelConversionFunc {
	return func(label, value string) (string, string, error) {
		if to, ok := aliases[label]; ok {
			return to, value, nil
		}
		if label == "metadata.name" || (namespaced && label == "metadata.namespace") || slices.Contains(known, label) {
			return label, value, nil
		}
		return "", "", fmt.Errorf("field label not supported: %s", label)
	}
}
