// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// What one EndpointSlice may hold.
const (
	maxSliceEndpoints    = 1000
	maxSlicePorts        = 100
	maxEndpointAddresses = 100
	maxEndpointTopology  = 16
	maxEndpointHints     = 8
)

func endpointSliceKind() Kind {
	return Kind{
		Resource: "endpointslices", Singular: "endpointslice", Kind: "EndpointSlice",
		GroupVersion: discoveryv1.SchemeGroupVersion, Namespaced: true,
		WatchCache:       true,
		New:              newObject[discoveryv1.EndpointSlice],
		NewList:          newObject[discoveryv1.EndpointSliceList],
		Default:          forObject(defaultEndpointSlice),
		PrepareForCreate: onCreate(func(_ context.Context, s *discoveryv1.EndpointSlice) { s.Generation = 1 }),
		PrepareForUpdate: onUpdate(countSliceChange),
		Validate:         validates(validateEndpointSlice),
		ValidateUpdate:   validatesUpdate(validateEndpointSliceUpdate),
		Warnings:         warns(endpointSliceWarnings),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("AddressType", "string", "What the addresses are: IPv4, IPv6 or FQDN."),
			column("Ports", "string", "The ports of every endpoint in the slice."),
			column("Endpoints", "string", "The addresses of the endpoints, ready or not."),
			ageColumn,
		},
		Row: row(func(s *discoveryv1.EndpointSlice) []any {
			var ports, addresses []string
			for _, p := range s.Ports {
				ports = append(ports, slicePortText(p))
			}
			for _, e := range s.Endpoints {
				addresses = append(addresses, e.Addresses...)
			}
			const unset = "<unset>"
			return []any{s.Name, string(s.AddressType), shortList(ports, unset), shortList(addresses, unset), age(s.CreationTimestamp)}
		}),
	}
}

func slicePortText(p discoveryv1.EndpointPort) string {
	switch {
	case p.Port != nil:
		return strconv.Itoa(int(*p.Port))
	case p.Name != nil && *p.Name != "":
		return *p.Name
	}
	return "*" // all ports
}

// defaultEndpointSlice fills in two pointers that clients dereference without
// looking, kubectl describe among them.
func defaultEndpointSlice(s *discoveryv1.EndpointSlice) {
	for i := range s.Ports {
		setDefault(&s.Ports[i].Name, "")
		setDefault(&s.Ports[i].Protocol, corev1.ProtocolTCP)
	}
}

// countSliceChange makes the generation count what consumers look at, since a
// slice has no spec: all but the metadata, and the labels.
func countSliceChange(_ context.Context, s, old *discoveryv1.EndpointSlice) {
	if s.AddressType != old.AddressType ||
		!equality.Semantic.DeepEqual(s.Endpoints, old.Endpoints) ||
		!equality.Semantic.DeepEqual(s.Ports, old.Ports) ||
		!equality.Semantic.DeepEqual(s.Labels, old.Labels) {
		s.Generation = old.Generation + 1
	}
}

func validateEndpointSlice(s *discoveryv1.EndpointSlice) field.ErrorList {
	path := field.NewPath("addressType")
	var errs field.ErrorList
	if s.AddressType == "" {
		errs = append(errs, field.Required(path, ""))
	} else {
		errs = append(errs, oneOf(s.AddressType, path, discoveryv1.AddressTypeFQDN, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6)...)
	}
	errs = append(errs, validateSliceEndpoints(s)...)
	return append(errs, validateSlicePorts(s.Ports, field.NewPath("ports"))...)
}

func validateEndpointSliceUpdate(s, old *discoveryv1.EndpointSlice) field.ErrorList {
	return apivalidation.ValidateImmutableField(s.AddressType, old.AddressType, field.NewPath("addressType"))
}

func validateSliceEndpoints(s *discoveryv1.EndpointSlice) field.ErrorList {
	path := field.NewPath("endpoints")
	if n := len(s.Endpoints); n > maxSliceEndpoints {
		return field.ErrorList{field.TooMany(path, n, maxSliceEndpoints)}
	}
	var errs field.ErrorList
	for i, e := range s.Endpoints {
		path := path.Index(i)
		addresses := path.Child("addresses")
		if n := len(e.Addresses); n == 0 {
			errs = append(errs, field.Required(addresses, "must contain at least 1 address"))
		} else if n > maxEndpointAddresses {
			errs = append(errs, field.TooMany(addresses, n, maxEndpointAddresses))
		}
		for j, a := range e.Addresses {
			errs = append(errs, validateSliceAddress(s.AddressType, a, addresses.Index(j))...)
		}
		if e.NodeName != nil {
			errs = append(errs, invalidIf(path.Child("nodeName"), *e.NodeName, utilvalidation.IsDNS1123Subdomain(*e.NodeName))...)
		}
		if n := len(e.DeprecatedTopology); n > maxEndpointTopology {
			errs = append(errs, field.TooMany(path.Child("deprecatedTopology"), n, maxEndpointTopology))
		}
		errs = append(errs, metav1validation.ValidateLabels(e.DeprecatedTopology, path.Child("deprecatedTopology"))...)
		if e.Hostname != nil {
			errs = append(errs, invalidIf(path.Child("hostname"), *e.Hostname, utilvalidation.IsDNS1123Label(*e.Hostname))...)
		}
		if h := e.Hints; h != nil {
			var zones, nodes []string
			for _, z := range h.ForZones {
				zones = append(zones, z.Name)
			}
			for _, n := range h.ForNodes {
				nodes = append(nodes, n.Name)
			}
			errs = append(errs, validateHints(path.Child("hints", "forZones"), zones)...)
			errs = append(errs, validateHints(path.Child("hints", "forNodes"), nodes)...)
		}
	}
	return errs
}

func validateSliceAddress(kind discoveryv1.AddressType, address string, path *field.Path) field.ErrorList {
	family, text := corev1.IPv4Protocol, "must be an IPv4 address"
	switch kind {
	case discoveryv1.AddressTypeIPv4:
	case discoveryv1.AddressTypeIPv6:
		family, text = corev1.IPv6Protocol, "must be an IPv6 address"
	case discoveryv1.AddressTypeFQDN:
		return utilvalidation.IsFullyQualifiedDomainName(path, address)
	default:
		return nil
	}
	if errs := utilvalidation.IsValidIPForLegacyField(path, address, true, nil); len(errs) > 0 {
		return errs
	}
	if familyOf(address) != family {
		return field.ErrorList{field.Invalid(path, address, text)}
	}
	return validateOrdinaryIP(path, address)
}

// validateHints checks the names of zones or nodes that should use an endpoint.
func validateHints(path *field.Path, names []string) field.ErrorList {
	if len(names) > maxEndpointHints {
		return field.ErrorList{field.TooMany(path, len(names), maxEndpointHints)}
	}
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, name := range names {
		path := path.Index(i).Child("name")
		if name == "" {
			errs = append(errs, field.Required(path, ""))
		} else if seen[name] {
			errs = append(errs, field.Duplicate(path, name))
		}
		seen[name] = true
		errs = append(errs, invalidIf(path, name, utilvalidation.IsValidLabelValue(name))...)
	}
	return errs
}

func validateSlicePorts(ports []discoveryv1.EndpointPort, path *field.Path) field.ErrorList {
	if n := len(ports); n > maxSlicePorts {
		return field.ErrorList{field.TooMany(path, n, maxSlicePorts)}
	}
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, p := range ports {
		path := path.Index(i)
		name := ptr.Deref(p.Name, "")
		if name != "" {
			errs = append(errs, invalidIf(path.Child("name"), name, utilvalidation.IsDNS1123Label(name))...)
		}
		// Here the empty name counts as well: a slice has at most one of it.
		if seen[name] {
			errs = append(errs, field.Duplicate(path.Child("name"), name))
		}
		seen[name] = true
		errs = append(errs, validateTransport(path.Child("protocol"), ptr.Deref(p.Protocol, ""))...)
		if p.Port != nil {
			errs = append(errs, invalidIf(path.Child("port"), *p.Port, utilvalidation.IsValidPortNum(int(*p.Port)))...)
		}
		if p.AppProtocol != nil {
			errs = append(errs, invalidIf(path.Child("appProtocol"), *p.AppProtocol, utilvalidation.IsQualifiedName(*p.AppProtocol))...)
		}
	}
	return errs
}

func endpointSliceWarnings(s, _ *discoveryv1.EndpointSlice) []string {
	if s.AddressType == discoveryv1.AddressTypeFQDN {
		return []string{"addressType: FQDN endpoints are deprecated"}
	}
	var w []string
	for i, e := range s.Endpoints {
		for j, a := range e.Addresses {
			w = append(w, utilvalidation.GetWarningsForIP(field.NewPath("endpoints").Index(i).Child("addresses").Index(j), a)...)
		}
	}
	return w
}
