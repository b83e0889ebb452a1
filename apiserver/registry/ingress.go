// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// ingressClassAnnotation named the class of an Ingress before there was a field.
const ingressClassAnnotation = "kubernetes.io/ingress.class"

func ingressKind() Kind {
	return Kind{
		Resource: "ingresses", Singular: "ingress", Kind: "Ingress",
		GroupVersion: networkingv1.SchemeGroupVersion, Namespaced: true,
		ShortNames:       []string{"ing"},
		New:              newObject[networkingv1.Ingress],
		NewList:          newObject[networkingv1.IngressList],
		TracksGeneration: true,
		Validate:         validates(validateIngress),
		ValidateCreate:   validates(validateIngressCreate),
		Warnings:         warns(ingressWarnings),
		Status: &StatusStrategy{Validate: validatesUpdate(func(i, _ *networkingv1.Ingress) field.ErrorList {
			return validateIngressStatus(i)
		})},
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Class", "string", "The IngressClass whose controller serves it."),
			column("Hosts", "string", "Host names of the rules, * for any."),
			column("Address", "string", "Where its load balancer is reached."),
			column("Ports", "string", "Ports of the load balancer: 443 is there when TLS is configured."),
			ageColumn,
		},
		Row: row(ingressRow),
	}
}

func ingressRow(i *networkingv1.Ingress) []any {
	class := orNone(i.Annotations[ingressClassAnnotation])
	if c := i.Spec.IngressClassName; c != nil {
		class = *c
	}
	var hosts, addresses []string
	for _, r := range i.Spec.Rules {
		if r.Host != "" {
			hosts = append(hosts, r.Host)
		}
	}
	for _, in := range i.Status.LoadBalancer.Ingress {
		addresses = append(addresses, cmp.Or(in.IP, in.Hostname))
	}
	ports := "80"
	if len(i.Spec.TLS) > 0 {
		ports = "80, 443"
	}
	return []any{i.Name, class, shortList(hosts, "*"), strings.Join(addresses, ","), ports, age(i.CreationTimestamp)}
}

func validateIngress(i *networkingv1.Ingress) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	if len(i.Spec.Rules) == 0 && i.Spec.DefaultBackend == nil {
		errs = append(errs, field.Invalid(spec, i.Spec.Rules, "either `defaultBackend` or `rules` must be specified"))
	}
	if b := i.Spec.DefaultBackend; b != nil {
		errs = append(errs, validateIngressBackend(b, spec.Child("defaultBackend"))...)
	}
	for n, r := range i.Spec.Rules {
		errs = append(errs, validateIngressRule(&r, spec.Child("rules").Index(n))...)
	}
	for n, t := range i.Spec.TLS {
		path := spec.Child("tls").Index(n)
		for h, host := range t.Hosts {
			errs = append(errs, validateHostPattern(path.Child("hosts").Index(h), host)...)
		}
		if t.SecretName != "" {
			errs = append(errs, invalidIf(path.Child("secretName"), t.SecretName, apivalidation.NameIsDNSSubdomain(t.SecretName, false))...)
		}
	}
	if c := i.Spec.IngressClassName; c != nil {
		errs = append(errs, invalidIf(spec.Child("ingressClassName"), *c, apivalidation.NameIsDNSSubdomain(*c, false))...)
	}
	return errs
}

func validateIngressCreate(i *networkingv1.Ingress) field.ErrorList {
	value, set := i.Annotations[ingressClassAnnotation]
	if c := i.Spec.IngressClassName; set && c != nil && *c != value {
		return field.ErrorList{field.Invalid(field.NewPath("annotations").Child(ingressClassAnnotation), value, "must match `ingressClassName` when both are specified")}
	}
	return nil
}

func ingressWarnings(i, old *networkingv1.Ingress) []string {
	if _, set := i.Annotations[ingressClassAnnotation]; set && old == nil {
		return []string{fmt.Sprintf("annotation %q is deprecated, please use 'spec.ingressClassName' instead", ingressClassAnnotation)}
	}
	return nil
}

// validateHostPattern accepts a DNS name, also one whose first label is a star.
func validateHostPattern(path *field.Path, host string) field.ErrorList {
	if strings.Contains(host, "*") {
		return invalidIf(path, host, utilvalidation.IsWildcardDNS1123Subdomain(host))
	}
	return invalidIf(path, host, utilvalidation.IsDNS1123Subdomain(host))
}

func notAnAddress(path *field.Path, host string) field.ErrorList {
	if _, err := netip.ParseAddr(host); err == nil {
		return field.ErrorList{field.Invalid(path, host, "must be a DNS name, not an IP address")}
	}
	return nil
}

func validateIngressRule(r *networkingv1.IngressRule, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if r.Host != "" {
		host := path.Child("host")
		errs = append(errs, notAnAddress(host, r.Host)...)
		errs = append(errs, validateHostPattern(host, r.Host)...)
	}
	if r.HTTP == nil {
		return errs
	}
	paths := path.Child("http", "paths")
	if len(r.HTTP.Paths) == 0 {
		errs = append(errs, field.Required(paths, ""))
	}
	for i, p := range r.HTTP.Paths {
		errs = append(errs, validateIngressPath(&p, paths.Index(i))...)
	}
	return errs
}

func validateIngressPath(p *networkingv1.HTTPIngressPath, path *field.Path) field.ErrorList {
	if p.PathType == nil {
		return field.ErrorList{field.Required(path.Child("pathType"), "pathType must be specified")}
	}
	var errs field.ErrorList
	at := path.Child("path")
	invalid := func(why string) { errs = append(errs, field.Invalid(at, p.Path, why)) }
	exact := *p.PathType != networkingv1.PathTypeImplementationSpecific
	errs = append(errs, oneOf(*p.PathType, path.Child("pathType"), networkingv1.PathTypeExact, networkingv1.PathTypePrefix, networkingv1.PathTypeImplementationSpecific)...)
	if len(errs) == 0 && !strings.HasPrefix(p.Path, "/") && (exact || p.Path != "") {
		invalid("must be an absolute path")
	}
	if len(errs) == 0 && exact {
		for _, part := range []string{"//", "/./", "/../", "%2f", "%2F"} {
			if strings.Contains(p.Path, part) {
				invalid(fmt.Sprintf("must not contain '%s'", part))
			}
		}
		for _, end := range []string{"/..", "/."} {
			if strings.HasSuffix(p.Path, end) {
				invalid(fmt.Sprintf("cannot end with '%s'", end))
			}
		}
	}
	return append(errs, validateIngressBackend(&p.Backend, path.Child("backend"))...)
}

func validateIngressBackend(b *networkingv1.IngressBackend, path *field.Path) field.ErrorList {
	switch {
	case b.Resource != nil && b.Service != nil:
		return field.ErrorList{field.Invalid(path, "", "cannot set both resource and service backends")}
	case b.Resource != nil:
		return validateLocalReference(b.Resource, path.Child("resource"))
	case b.Service != nil:
		return validateIngressService(b.Service, path)
	}
	return field.ErrorList{field.Invalid(path, "", "resource or service backend is required")}
}

func validateIngressService(s *networkingv1.IngressServiceBackend, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if name := path.Child("service", "name"); s.Name == "" {
		errs = append(errs, field.Required(name, ""))
	} else {
		errs = append(errs, invalidIf(name, s.Name, apivalidation.NameIsDNSLabel(s.Name, false))...)
	}
	port := path.Child("service", "port")
	switch {
	case s.Port.Name != "" && s.Port.Number != 0:
		return append(errs, field.Invalid(path, "", "cannot set both port name & port number"))
	case s.Port.Name != "":
		return append(errs, invalidIf(port.Child("name"), s.Port.Name, utilvalidation.IsValidPortName(s.Port.Name))...)
	case s.Port.Number != 0:
		return append(errs, invalidIf(port.Child("number"), s.Port.Number, utilvalidation.IsValidPortNum(int(s.Port.Number)))...)
	}
	return append(errs, field.Required(path, "port name or number is required"))
}

func validateLocalReference(r *corev1.TypedLocalObjectReference, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if r.APIGroup != nil {
		errs = append(errs, invalidIf(path.Child("apiGroup"), *r.APIGroup, utilvalidation.IsDNS1123Subdomain(*r.APIGroup))...)
	}
	errs = append(errs, requiredSegment(path.Child("kind"), r.Kind)...)
	return append(errs, requiredSegment(path.Child("name"), r.Name)...)
}

// requiredSegment wants a value that can be a part of a URL's path.
func requiredSegment(path *field.Path, value string) field.ErrorList {
	if value == "" {
		return field.ErrorList{field.Required(path, "")}
	}
	return invalidIf(path, value, content.IsPathSegmentName(value))
}

func validateIngressStatus(i *networkingv1.Ingress) field.ErrorList {
	var errs field.ErrorList
	for n, in := range i.Status.LoadBalancer.Ingress {
		path := field.NewPath("status", "loadBalancer", "ingress").Index(n)
		if in.IP != "" {
			errs = append(errs, utilvalidation.IsValidIPForLegacyField(path.Child("ip"), in.IP, true, nil)...)
		}
		if in.Hostname != "" {
			host := path.Child("hostname")
			errs = append(errs, invalidIf(host, in.Hostname, utilvalidation.IsDNS1123Subdomain(in.Hostname))...)
			errs = append(errs, notAnAddress(host, in.Hostname)...)
		}
	}
	return errs
}
