// SPDX-License-Identifier: Apache-2.0

package registry

import (
	appsv1 "k8s.io/api/apps/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func controllerRevisionKind() Kind {
	return Kind{
		Resource: "controllerrevisions", Singular: "controllerrevision", Kind: "ControllerRevision",
		GroupVersion: appsv1.SchemeGroupVersion, Namespaced: true,
		New:     newObject[appsv1.ControllerRevision],
		NewList: newObject[appsv1.ControllerRevisionList],
		Validate: validates(func(r *appsv1.ControllerRevision) field.ErrorList {
			var errs field.ErrorList
			if r.Data.Raw == nil && r.Data.Object == nil {
				errs = append(errs, field.Required(field.NewPath("data"), "data is mandatory"))
			}
			return append(errs, apivalidation.ValidateNonnegativeField(r.Revision, field.NewPath("revision"))...)
		}),
		ValidateUpdate: validatesUpdate(func(r, old *appsv1.ControllerRevision) field.ErrorList {
			return apivalidation.ValidateImmutableField(r.Data, old.Data, field.NewPath("data"))
		}),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Controller", "string", "The object whose template this is."),
			column("Revision", "string", "Its place among the others, the newest the highest."),
			ageColumn,
		},
		Row: row(func(r *appsv1.ControllerRevision) []any {
			controller := "<none>"
			if ref := metav1.GetControllerOf(r); ref != nil {
				controller = controllerText(ref)
			}
			return []any{r.Name, controller, r.Revision, age(r.CreationTimestamp)}
		}),
	}
}
