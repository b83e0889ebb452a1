// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// mutatingAdmissionPolicyKind is stored only: no expression is evaluated.
func mutatingAdmissionPolicyKind() Kind {
	return Kind{
		Resource: "mutatingadmissionpolicies", Singular: "mutatingadmissionpolicy", Kind: "MutatingAdmissionPolicy",
		GroupVersion: admissionv1.SchemeGroupVersion,
		Categories:   []string{"api-extensions"},
		New:          newObject[admissionv1.MutatingAdmissionPolicy], NewList: newObject[admissionv1.MutatingAdmissionPolicyList],
		TracksGeneration: true,
		Default: forObject(func(p *admissionv1.MutatingAdmissionPolicy) {
			setDefault(&p.Spec.FailurePolicy, admissionv1.Fail)
			defaultMatchResources(p.Spec.MatchConstraints)
		}),
		Validate: validates(validateMutatingPolicy),
		Warnings: warns(func(_, old *admissionv1.MutatingAdmissionPolicy) []string {
			return noEffect(old == nil, "mutating admission policies are stored and not applied")
		}),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Mutations", "integer", "How many changes it makes."),
			column("ParamKind", "string", "The kind of its parameters."),
			ageColumn,
		},
		Row: row(func(p *admissionv1.MutatingAdmissionPolicy) []any {
			return []any{p.Name, int64(len(p.Spec.Mutations)), paramKindText(p.Spec.ParamKind), age(p.CreationTimestamp)}
		}),
	}
}

func validateMutatingPolicy(p *admissionv1.MutatingAdmissionPolicy) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validatePolicyFrame(p.Spec.FailurePolicy, p.Spec.ParamKind, p.Spec.MatchConstraints, p.Spec.MatchConditions, spec)
	if path := spec.Child("reinvocationPolicy"); p.Spec.ReinvocationPolicy == "" {
		errs = append(errs, field.Required(path, ""))
	} else {
		errs = append(errs, oneOf(p.Spec.ReinvocationPolicy, path, admissionv1.NeverReinvocationPolicy, admissionv1.IfNeededReinvocationPolicy)...)
	}
	if len(p.Spec.Mutations) == 0 {
		errs = append(errs, field.Required(spec.Child("mutations"), "mutations must contain at least one item"))
	}
	for i, m := range p.Spec.Mutations {
		errs = append(errs, validateMutation(m, spec.Child("mutations").Index(i))...)
	}
	return errs
}

func validateMutation(m admissionv1.Mutation, path *field.Path) field.ErrorList {
	var expression string
	var child *field.Path
	var other bool
	switch m.PatchType {
	case "":
		return field.ErrorList{field.Required(path.Child("patchType"), "")}
	case admissionv1.PatchTypeApplyConfiguration:
		child, other = path.Child("applyConfiguration"), m.JSONPatch != nil
		if m.ApplyConfiguration != nil {
			expression = m.ApplyConfiguration.Expression
		}
	case admissionv1.PatchTypeJSONPatch:
		child, other = path.Child("jsonPatch"), m.ApplyConfiguration != nil
		if m.JSONPatch != nil {
			expression = m.JSONPatch.Expression
		}
	default:
		return oneOf(m.PatchType, path.Child("patchType"), admissionv1.PatchTypeApplyConfiguration, admissionv1.PatchTypeJSONPatch)
	}
	var errs field.ErrorList
	if other {
		errs = append(errs, field.Invalid(path, m.PatchType, "must have no other patch than that of its patchType"))
	}
	if strings.TrimSpace(expression) == "" {
		errs = append(errs, field.Required(child.Child("expression"), "expression is not specified"))
	}
	return errs
}
