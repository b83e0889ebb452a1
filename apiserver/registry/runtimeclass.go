// SPDX-License-Identifier: Apache-2.0

package registry

import (
	nodev1 "k8s.io/api/node/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// runtimeClassKind is the choice of a container runtime. A lab has one, so that
// the objects have no effect.
func runtimeClassKind() Kind {
	return Kind{
		Resource: "runtimeclasses", Singular: "runtimeclass", Kind: "RuntimeClass",
		GroupVersion: nodev1.SchemeGroupVersion,
		New:          newObject[nodev1.RuntimeClass], NewList: newObject[nodev1.RuntimeClassList],
		Validate: validates(validateRuntimeClass),
		ValidateUpdate: validatesUpdate(func(c, old *nodev1.RuntimeClass) field.ErrorList {
			return apivalidation.ValidateImmutableField(c.Handler, old.Handler, field.NewPath("handler"))
		}),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Handler", "string", "The configuration of the container runtime."),
			ageColumn,
		},
		Row: row(func(c *nodev1.RuntimeClass) []any {
			return []any{c.Name, c.Handler, age(c.CreationTimestamp)}
		}),
	}
}

func validateRuntimeClass(c *nodev1.RuntimeClass) field.ErrorList {
	handler := field.NewPath("handler")
	errs := invalidIf(handler, c.Handler, utilvalidation.IsDNS1123Label(c.Handler))
	if c.Overhead != nil {
		for name, q := range c.Overhead.PodFixed {
			path := field.NewPath("overhead", "podFixed").Key(string(name))
			errs = append(errs, invalidIf(path, string(name), utilvalidation.IsQualifiedName(string(name)))...)
			errs = append(errs, notNegativeQuantity(path, q)...)
		}
	}
	if c.Scheduling != nil {
		path := field.NewPath("scheduling")
		errs = append(errs, metavalidation.ValidateLabels(c.Scheduling.NodeSelector, path.Child("nodeSelector"))...)
		errs = append(errs, validateTolerations(c.Scheduling.Tolerations, path.Child("tolerations"))...)
	}
	return errs
}
