// SPDX-License-Identifier: Apache-2.0

package registry

import (
	networkingv1 "k8s.io/api/networking/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxIngressController is the length of a controller's name, in bytes.
const maxIngressController = 250

func ingressClassKind() Kind {
	return Kind{
		Resource: "ingressclasses", Singular: "ingressclass", Kind: "IngressClass",
		GroupVersion: networkingv1.SchemeGroupVersion,
		New:          newObject[networkingv1.IngressClass], NewList: newObject[networkingv1.IngressClassList],
		TracksGeneration: true,
		Default: forObject(func(c *networkingv1.IngressClass) {
			if p := c.Spec.Parameters; p != nil {
				setDefault(&p.Scope, networkingv1.IngressClassParametersReferenceScopeCluster)
			}
		}),
		Validate: validates(validateIngressClass),
		ValidateUpdate: validatesUpdate(func(c, old *networkingv1.IngressClass) field.ErrorList {
			return apivalidation.ValidateImmutableField(c.Spec.Controller, old.Spec.Controller, field.NewPath("spec", "controller"))
		}),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Controller", "string", "The controller that serves the class."),
			column("Parameters", "string", "An object with further settings for the controller."),
			ageColumn,
		},
		Row: row(func(c *networkingv1.IngressClass) []any {
			parameters := "<none>"
			if p := c.Spec.Parameters; p != nil {
				parameters = p.Kind
				if p.APIGroup != nil && *p.APIGroup != "" {
					parameters += "." + *p.APIGroup
				}
				parameters += "/" + p.Name
			}
			return []any{c.Name, c.Spec.Controller, parameters, age(c.CreationTimestamp)}
		}),
	}
}

func validateIngressClass(c *networkingv1.IngressClass) field.ErrorList {
	path := field.NewPath("spec", "controller")
	var errs field.ErrorList
	if name := c.Spec.Controller; name == "" {
		errs = append(errs, field.Required(path, ""))
	} else {
		if len(name) > maxIngressController {
			errs = append(errs, field.TooLong(path, "", maxIngressController))
		}
		errs = append(errs, utilvalidation.IsDomainPrefixedPath(path, name)...)
	}
	if p := c.Spec.Parameters; p != nil {
		errs = append(errs, validateClassParameters(p, field.NewPath("spec", "parameters"))...)
	}
	return errs
}

func validateClassParameters(p *networkingv1.IngressClassParametersReference, path *field.Path) field.ErrorList {
	const cluster, namespaced = networkingv1.IngressClassParametersReferenceScopeCluster, networkingv1.IngressClassParametersReferenceScopeNamespace
	var errs field.ErrorList
	if p.APIGroup != nil {
		errs = append(errs, invalidIf(path.Child("apiGroup"), *p.APIGroup, utilvalidation.IsDNS1123Subdomain(*p.APIGroup))...)
	}
	errs = append(errs, requiredSegment(path.Child("kind"), p.Kind)...)
	errs = append(errs, requiredSegment(path.Child("name"), p.Name)...)
	namespace := path.Child("namespace")
	switch {
	case p.Scope == nil:
		return append(errs, field.Required(path.Child("scope"), ""))
	case *p.Scope == namespaced && p.Namespace == nil:
		return append(errs, field.Required(namespace, "`parameters.scope` is set to 'Namespace'"))
	case *p.Scope == namespaced:
		return append(errs, invalidIf(namespace, *p.Namespace, apivalidation.ValidateNamespaceName(*p.Namespace, false))...)
	case *p.Scope == cluster && p.Namespace != nil:
		return append(errs, field.Forbidden(namespace, "`parameters.scope` is set to 'Cluster'"))
	}
	return append(errs, oneOf(*p.Scope, path.Child("scope"), cluster, namespaced)...)
}
