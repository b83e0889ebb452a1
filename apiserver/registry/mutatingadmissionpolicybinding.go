// SPDX-License-Identifier: Apache-2.0

package registry

import (
	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// mutatingAdmissionPolicyBindingKind is stored only, as the policies are.
func mutatingAdmissionPolicyBindingKind() Kind {
	return Kind{
		Resource: "mutatingadmissionpolicybindings", Singular: "mutatingadmissionpolicybinding", Kind: "MutatingAdmissionPolicyBinding",
		GroupVersion: admissionv1.SchemeGroupVersion,
		Categories:   []string{"api-extensions"},
		New:          newObject[admissionv1.MutatingAdmissionPolicyBinding], NewList: newObject[admissionv1.MutatingAdmissionPolicyBindingList],
		TracksGeneration: true,
		Default: forObject(func(b *admissionv1.MutatingAdmissionPolicyBinding) {
			defaultMatchResources(b.Spec.MatchResources)
		}),
		Validate: validates(func(b *admissionv1.MutatingAdmissionPolicyBinding) field.ErrorList {
			return validateBindingFrame(b.Spec.PolicyName, b.Spec.ParamRef, b.Spec.MatchResources, field.NewPath("spec"))
		}),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("PolicyName", "string", "The policy that is applied."),
			column("ParamRef", "string", "The parameters with which it is."),
			ageColumn,
		},
		Row: row(func(b *admissionv1.MutatingAdmissionPolicyBinding) []any {
			return []any{b.Name, b.Spec.PolicyName, paramRefText(b.Spec.ParamRef), age(b.CreationTimestamp)}
		}),
	}
}
