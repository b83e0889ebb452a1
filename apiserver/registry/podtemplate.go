// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func podTemplateKind() Kind {
	return Kind{
		Resource: "podtemplates", Singular: "podtemplate", Kind: "PodTemplate",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		New: newObject[corev1.PodTemplate], NewList: newObject[corev1.PodTemplateList],
		Default:          forObject(func(p *corev1.PodTemplate) { defaultPodSpec(&p.Template.Spec) }),
		PrepareForCreate: onCreate(func(_ context.Context, p *corev1.PodTemplate) { p.Generation = 1 }),
		PrepareForUpdate: onUpdate(func(_ context.Context, p, old *corev1.PodTemplate) {
			if !equality.Semantic.DeepEqual(p.Template, old.Template) {
				p.Generation = old.Generation + 1
			}
		}),
		Validate: validates(func(p *corev1.PodTemplate) field.ErrorList {
			return validatePodTemplate(&p.Template, field.NewPath("template"))
		}),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Containers", "string", "Names of the containers in the pod template."),
			column("Images", "string", "Images of the containers in the pod template."),
			column("Pod Labels", "string", "The labels of the pods."),
		},
		Row: row(func(p *corev1.PodTemplate) []any {
			podLabels := "<none>"
			if len(p.Template.Labels) > 0 {
				podLabels = labels.FormatLabels(p.Template.Labels)
			}
			return append(append([]any{p.Name}, templateCells(&p.Template, nil)[:2]...), podLabels)
		}),
	}
}
