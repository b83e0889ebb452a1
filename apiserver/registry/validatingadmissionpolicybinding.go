// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"slices"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// validatingAdmissionPolicyBindingKind is stored only, as the policies are.
func validatingAdmissionPolicyBindingKind() Kind {
	return Kind{
		Resource: "validatingadmissionpolicybindings", Singular: "validatingadmissionpolicybinding", Kind: "ValidatingAdmissionPolicyBinding",
		GroupVersion: admissionv1.SchemeGroupVersion,
		Categories:   []string{"api-extensions"},
		New:          newObject[admissionv1.ValidatingAdmissionPolicyBinding], NewList: newObject[admissionv1.ValidatingAdmissionPolicyBindingList],
		TracksGeneration: true,
		Default: forObject(func(b *admissionv1.ValidatingAdmissionPolicyBinding) {
			defaultMatchResources(b.Spec.MatchResources)
		}),
		Validate: validates(validateAdmissionPolicyBinding),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("PolicyName", "string", "The policy that is applied."),
			column("ParamRef", "string", "The parameters with which it is."),
			ageColumn,
		},
		Row: row(func(b *admissionv1.ValidatingAdmissionPolicyBinding) []any {
			return []any{b.Name, b.Spec.PolicyName, paramRefText(b.Spec.ParamRef), age(b.CreationTimestamp)}
		}),
	}
}

func paramRefText(r *admissionv1.ParamRef) string {
	switch {
	case r != nil && r.Name != "" && r.Namespace != "":
		return r.Namespace + "/" + r.Name
	case r != nil && r.Name != "":
		return "*/" + r.Name
	case r != nil && r.Selector != nil:
		return r.Selector.String()
	}
	return "<unset>"
}

func validateAdmissionPolicyBinding(b *admissionv1.ValidatingAdmissionPolicyBinding) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateBindingFrame(b.Spec.PolicyName, b.Spec.ParamRef, b.Spec.MatchResources, spec)
	return append(errs, validateActions(b.Spec.ValidationActions, spec.Child("validationActions"))...)
}

// validateBindingFrame checks what the bindings of both sorts of policies have in common.
func validateBindingFrame(name string, params *admissionv1.ParamRef, match *admissionv1.MatchResources, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	if path := spec.Child("policyName"); name == "" {
		errs = append(errs, field.Required(path, ""))
	} else {
		errs = append(errs, invalidIf(path, name, apivalidation.NameIsDNSSubdomain(name, false))...)
	}
	if r, path := params, spec.Child("paramRef"); r != nil {
		switch {
		case r.Name == "" && r.Selector == nil:
			errs = append(errs, field.Required(path, "one of name or selector must be specified"))
		case r.Name != "" && r.Selector != nil:
			errs = append(errs, field.Forbidden(path.Child("name"), "name and selector are mutually exclusive"))
		}
		if action := path.Child("parameterNotFoundAction"); r.ParameterNotFoundAction == nil {
			errs = append(errs, field.Required(action, ""))
		} else {
			errs = append(errs, oneOf(*r.ParameterNotFoundAction, action, admissionv1.AllowAction, admissionv1.DenyAction)...)
		}
	}
	if match != nil {
		errs = append(errs, validateMatchResources(match, spec.Child("matchResources"))...)
	}
	return errs
}

func validateActions(actions []admissionv1.ValidationAction, path *field.Path) field.ErrorList {
	if len(actions) == 0 {
		return field.ErrorList{field.Required(path, "at least one validation action is required")}
	}
	var errs field.ErrorList
	for i, a := range actions {
		errs = append(errs, oneOf(a, path.Index(i), admissionv1.Audit, admissionv1.Deny, admissionv1.Warn)...)
		if slices.Contains(actions[:i], a) {
			errs = append(errs, field.Duplicate(path.Index(i), a))
		}
	}
	if slices.Contains(actions, admissionv1.Deny) && slices.Contains(actions, admissionv1.Warn) {
		errs = append(errs, field.Invalid(path, actions, "must not contain both Deny and Warn (repeating the same validation failure information in the API response and headers serves no purpose)"))
	}
	return errs
}
