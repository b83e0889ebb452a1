// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// validatingAdmissionPolicyKind is stored only: no expression is evaluated.
func validatingAdmissionPolicyKind() Kind {
	return Kind{
		Resource: "validatingadmissionpolicies", Singular: "validatingadmissionpolicy", Kind: "ValidatingAdmissionPolicy",
		GroupVersion: admissionv1.SchemeGroupVersion,
		Categories:   []string{"api-extensions"},
		New:          newObject[admissionv1.ValidatingAdmissionPolicy], NewList: newObject[admissionv1.ValidatingAdmissionPolicyList],
		TracksGeneration: true,
		Default: forObject(func(p *admissionv1.ValidatingAdmissionPolicy) {
			setDefault(&p.Spec.FailurePolicy, admissionv1.Fail)
			defaultMatchResources(p.Spec.MatchConstraints)
		}),
		Validate: validates(validateAdmissionPolicy),
		Warnings: warns(func(_, old *admissionv1.ValidatingAdmissionPolicy) []string {
			return noEffect(old == nil, "validating admission policies are stored and not applied")
		}),
		Status: &StatusStrategy{},
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Validations", "integer", "How many expressions it has."),
			column("ParamKind", "string", "The kind of its parameters."),
			ageColumn,
		},
		Row: row(func(p *admissionv1.ValidatingAdmissionPolicy) []any {
			return []any{p.Name, int64(len(p.Spec.Validations)), paramKindText(p.Spec.ParamKind), age(p.CreationTimestamp)}
		}),
	}
}

func paramKindText(k *admissionv1.ParamKind) string {
	if k == nil {
		return "<unset>"
	}
	return k.APIVersion + "/" + k.Kind
}

func defaultMatchResources(m *admissionv1.MatchResources) {
	if m == nil {
		return
	}
	setDefault(&m.MatchPolicy, admissionv1.Equivalent)
	setDefault(&m.NamespaceSelector, metav1.LabelSelector{})
	setDefault(&m.ObjectSelector, metav1.LabelSelector{})
	for _, rules := range [][]admissionv1.NamedRuleWithOperations{m.ResourceRules, m.ExcludeResourceRules} {
		for i := range rules {
			setDefault(&rules[i].Scope, admissionv1.AllScopes)
		}
	}
}

func validateAdmissionPolicy(p *admissionv1.ValidatingAdmissionPolicy) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validatePolicyFrame(p.Spec.FailurePolicy, p.Spec.ParamKind, p.Spec.MatchConstraints, p.Spec.MatchConditions, spec)
	if len(p.Spec.Validations) == 0 && len(p.Spec.AuditAnnotations) == 0 {
		const why = "validations or auditAnnotations must contain at least one item"
		errs = append(errs, field.Required(spec.Child("validations"), why), field.Required(spec.Child("auditAnnotations"), why))
	}
	for i, v := range p.Spec.Validations {
		path := spec.Child("validations").Index(i)
		if strings.TrimSpace(v.Expression) == "" {
			errs = append(errs, field.Required(path.Child("expression"), "expression is not specified"))
		}
		if r := v.Reason; r != nil {
			errs = append(errs, oneOf(*r, path.Child("reason"), metav1.StatusReasonUnauthorized, metav1.StatusReasonForbidden,
				metav1.StatusReasonInvalid, metav1.StatusReasonRequestEntityTooLarge)...)
		}
	}
	return errs
}

// validatePolicyFrame checks what validating and mutating policies have in common.
func validatePolicyFrame(failure *admissionv1.FailurePolicyType, params *admissionv1.ParamKind, match *admissionv1.MatchResources, conditions []admissionv1.MatchCondition, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	if failure != nil {
		errs = append(errs, oneOf(*failure, spec.Child("failurePolicy"), admissionv1.Fail, admissionv1.Ignore)...)
	}
	if k := params; k != nil {
		path := spec.Child("paramKind")
		if k.APIVersion == "" {
			errs = append(errs, field.Required(path.Child("apiVersion"), ""))
		}
		if k.Kind == "" {
			errs = append(errs, field.Required(path.Child("kind"), ""))
		}
	}
	if constraints := spec.Child("matchConstraints"); match == nil {
		errs = append(errs, field.Required(constraints, ""))
	} else {
		errs = append(errs, validateMatchResources(match, constraints)...)
		if len(match.ResourceRules) == 0 {
			errs = append(errs, field.Required(constraints.Child("resourceRules"), ""))
		}
	}
	return append(errs, validateMatchConditions(conditions, spec.Child("matchConditions"))...)
}

func validateMatchResources(m *admissionv1.MatchResources, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if p := m.MatchPolicy; p != nil {
		errs = append(errs, oneOf(*p, path.Child("matchPolicy"), admissionv1.Equivalent, admissionv1.Exact)...)
	}
	if s := m.NamespaceSelector; s != nil {
		errs = append(errs, validateSelector(s, path.Child("namespaceSelector"))...)
	}
	if s := m.ObjectSelector; s != nil {
		errs = append(errs, validateSelector(s, path.Child("objectSelector"))...)
	}
	for i, r := range m.ResourceRules {
		errs = append(errs, validateAdmissionRule(r.RuleWithOperations, path.Child("resourceRules").Index(i))...)
	}
	for i, r := range m.ExcludeResourceRules {
		errs = append(errs, validateAdmissionRule(r.RuleWithOperations, path.Child("excludeResourceRules").Index(i))...)
	}
	return errs
}
