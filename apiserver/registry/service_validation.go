// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// validateService checks in upstream's order, which is the order in which kubectl
// lists several errors.
func validateService(s *corev1.Service) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateTopologyAnnotations(s)
	if len(s.Spec.Ports) == 0 && !isHeadless(s) && !isExternalName(s) {
		errs = append(errs, field.Required(spec.Child("ports"), ""))
	}
	errs = append(errs, validateForType(s, spec)...)
	errs = append(errs, validateServicePorts(s.Spec.Ports, spec.Child("ports"))...)
	errs = append(errs, metav1validation.ValidateLabels(s.Spec.Selector, spec.Child("selector"))...)
	errs = append(errs, validateSessionAffinity(s, spec)...)
	errs = append(errs, validateClusterIPFields(s)...)
	for i, ip := range s.Spec.ExternalIPs {
		path := spec.Child("externalIPs").Index(i)
		if bad := utilvalidation.IsValidIPForLegacyField(path, ip, true, nil); len(bad) > 0 {
			errs = append(errs, bad...)
		} else {
			errs = append(errs, validateOrdinaryIP(path, ip)...)
		}
	}
	errs = append(errs, oneOf(s.Spec.Type, spec.Child("type"),
		corev1.ServiceTypeClusterIP, corev1.ServiceTypeExternalName, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeNodePort)...)
	errs = append(errs, validateNodePorts(s, spec.Child("ports"))...)
	errs = append(errs, duplicatePorts(s.Spec.Ports, spec.Child("ports"))...)
	errs = append(errs, validateLoadBalancerFields(s, spec)...)
	errs = append(errs, validateTrafficPolicies(s, spec)...)
	if d := s.Spec.TrafficDistribution; d != nil {
		errs = append(errs, oneOf(*d, spec.Child("trafficDistribution"),
			corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameNode, corev1.ServiceTrafficDistributionPreferSameZone)...)
	}
	return errs
}

// validateTopologyAnnotations refuses the old and the new annotation with
// different values.
func validateTopologyAnnotations(s *corev1.Service) field.ErrorList {
	hints, old := s.Annotations[corev1.DeprecatedAnnotationTopologyAwareHints]
	mode, now := s.Annotations[corev1.AnnotationTopologyMode]
	if !old || !now || hints == mode {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata", "annotations").Key(corev1.AnnotationTopologyMode), mode,
		fmt.Sprintf("must match annotations[%s] when both are specified", corev1.DeprecatedAnnotationTopologyAwareHints))}
}

func validateForType(s *corev1.Service, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	if needsNodePorts(s) && isHeadless(s) {
		errs = append(errs, field.Invalid(spec.Child("clusterIPs").Index(0), s.Spec.ClusterIP, fmt.Sprintf("may not be set to 'None' for %s services", s.Spec.Type)))
	}
	if !isExternalName(s) {
		return errs
	}
	const not = "may not be set for ExternalName services"
	if len(s.Spec.ClusterIPs) > 0 {
		errs = append(errs, field.Forbidden(spec.Child("clusterIPs"), not))
	}
	if len(s.Spec.IPFamilies) > 0 {
		errs = append(errs, field.Forbidden(spec.Child("ipFamilies"), not))
	}
	if s.Spec.IPFamilyPolicy != nil {
		errs = append(errs, field.Forbidden(spec.Child("ipFamilyPolicy"), not))
	}
	// One trailing dot marks a name that no search list is added to.
	if name := strings.TrimSuffix(s.Spec.ExternalName, "."); name == "" {
		errs = append(errs, field.Required(spec.Child("externalName"), ""))
	} else {
		errs = append(errs, invalidIf(spec.Child("externalName"), name, utilvalidation.IsDNS1123Subdomain(name))...)
	}
	return errs
}

// validateNodePorts refuses node ports where there are none, and one that two
// ports of a protocol name.
func validateNodePorts(s *corev1.Service, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, p := range s.Spec.Ports {
		if p.NodePort != 0 && s.Spec.Type == corev1.ServiceTypeClusterIP {
			errs = append(errs, field.Forbidden(path.Index(i).Child("nodePort"), "may not be used when `type` is 'ClusterIP'"))
		}
	}
	for i, p := range s.Spec.Ports {
		if p.NodePort != 0 && slices.ContainsFunc(s.Spec.Ports[:i], func(o corev1.ServicePort) bool {
			return o.NodePort == p.NodePort && o.Protocol == p.Protocol
		}) {
			errs = append(errs, field.Duplicate(path.Index(i).Child("nodePort"), p.NodePort))
		}
	}
	return errs
}

// portIdentity is a port reduced to what must be unique, in the form in which
// upstream's message shows it: its internal type, which has no JSON names.
type portIdentity struct {
	Name        string
	Protocol    corev1.Protocol
	AppProtocol *string
	Port        int32
	TargetPort  intstr.IntOrString
	NodePort    int32
}

func duplicatePorts(ports []corev1.ServicePort, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[portIdentity]bool{}
	for i, p := range ports {
		id := portIdentity{Protocol: p.Protocol, Port: p.Port}
		if seen[id] {
			errs = append(errs, field.Duplicate(path.Index(i), id))
		}
		seen[id] = true
	}
	return errs
}

func validateServicePorts(ports []corev1.ServicePort, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	names := map[string]bool{}
	for i, p := range ports {
		path := path.Index(i)
		errs = append(errs, validateServicePortName(path.Child("name"), p.Name, len(ports) > 1, names)...)
		errs = append(errs, invalidIf(path.Child("port"), p.Port, utilvalidation.IsValidPortNum(int(p.Port)))...)
		errs = append(errs, validateTransport(path.Child("protocol"), p.Protocol)...)
		errs = append(errs, validatePortNumOrName(path.Child("targetPort"), p.TargetPort)...)
		if p.AppProtocol != nil {
			errs = append(errs, invalidIf(path.Child("appProtocol"), *p.AppProtocol, utilvalidation.IsQualifiedName(*p.AppProtocol))...)
		}
	}
	return errs
}

// validateServicePortName checks the name of a port of a Service, an Endpoints or an
// EndpointSlice, and adds it to seen.
func validateServicePortName(path *field.Path, name string, required bool, seen map[string]bool) field.ErrorList {
	switch {
	case name == "" && required:
		return field.ErrorList{field.Required(path, "")}
	case name == "":
		return nil
	}
	errs := invalidIf(path, name, utilvalidation.IsDNS1123Label(name))
	if seen[name] {
		errs = append(errs, field.Duplicate(path, name))
	}
	seen[name] = true
	return errs
}

func validateTransport(path *field.Path, p corev1.Protocol) field.ErrorList {
	if p == "" {
		return field.ErrorList{field.Required(path, "")}
	}
	return oneOf(p, path, corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)
}

func validatePortNumOrName(path *field.Path, p intstr.IntOrString) field.ErrorList {
	if p.Type == intstr.String {
		return invalidIf(path, p.StrVal, utilvalidation.IsValidPortName(p.StrVal))
	}
	return invalidIf(path, p.IntValue(), utilvalidation.IsValidPortNum(p.IntValue()))
}

func validateSessionAffinity(s *corev1.Service, spec *field.Path) field.ErrorList {
	path := spec.Child("sessionAffinityConfig")
	switch c := s.Spec.SessionAffinityConfig; s.Spec.SessionAffinity {
	case "":
		return field.ErrorList{field.Required(spec.Child("sessionAffinity"), "")}
	case corev1.ServiceAffinityNone:
		if c != nil {
			return field.ErrorList{field.Forbidden(path, fmt.Sprintf("must not be set when session affinity is %s", corev1.ServiceAffinityNone))}
		}
	case corev1.ServiceAffinityClientIP:
		const most = 86400 // one day
		if c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
			return field.ErrorList{field.Required(path, fmt.Sprintf("when session affinity type is %s", corev1.ServiceAffinityClientIP))}
		}
		if t := *c.ClientIP.TimeoutSeconds; t <= 0 || t > most {
			return field.ErrorList{field.Invalid(path.Child("clientIP", "timeoutSeconds"), t, fmt.Sprintf("must be greater than 0 and less than %d", most))}
		}
	}
	return oneOf(s.Spec.SessionAffinity, spec.Child("sessionAffinity"), corev1.ServiceAffinityClientIP, corev1.ServiceAffinityNone)
}

// validateClusterIPFields checks clusterIP, clusterIPs, ipFamilies and
// ipFamilyPolicy against each other, not against what the cluster has. The
// allocator runs it too, before it relies on them.
func validateClusterIPFields(s *corev1.Service) field.ErrorList {
	if isExternalName(s) {
		return nil // validateServiceType refuses all of them
	}
	spec := field.NewPath("spec")
	path := spec.Child("clusterIPs")
	ips := s.Spec.ClusterIPs
	var errs field.ErrorList
	if s.Spec.ClusterIP == "" && len(ips) > 0 {
		errs = append(errs, field.Invalid(path, ips, "must be empty when `clusterIP` is not specified"))
	}
	if s.Spec.ClusterIP != "" && (len(ips) == 0 || ips[0] != s.Spec.ClusterIP) {
		errs = append(errs, field.Invalid(path, ips, "first value must match `clusterIP`"))
	}
	for i, f := range s.Spec.IPFamilies {
		errs = append(errs, oneOf(f, spec.Child("ipFamilies").Index(i), corev1.IPv4Protocol, corev1.IPv6Protocol)...)
		if slices.Contains(s.Spec.IPFamilies[:i], f) {
			errs = append(errs, field.Duplicate(spec.Child("ipFamilies").Index(i), f))
		}
	}
	if p := s.Spec.IPFamilyPolicy; p != nil {
		errs = append(errs, oneOf(*p, spec.Child("ipFamilyPolicy"),
			corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicyRequireDualStack, corev1.IPFamilyPolicySingleStack)...)
	}
	if len(ips) > 2 {
		errs = append(errs, field.Invalid(path, ips, "may only hold up to 2 values"))
	}
	bad := false
	for i, ip := range ips {
		if i == 0 && ip == corev1.ClusterIPNone {
			if len(ips) > 1 {
				bad = true
				errs = append(errs, field.Invalid(path, ips, "'None' must be the first and only value"))
			}
			continue
		}
		if e := utilvalidation.IsValidIPForLegacyField(path.Index(i), ip, true, nil); len(e) > 0 {
			bad = true
			errs = append(errs, e...)
		}
	}
	// With an address that is none, what follows would only mislead.
	if bad || len(ips) == 0 || ips[0] == corev1.ClusterIPNone {
		return errs
	}
	if len(ips) > 1 && familyOf(ips[0]) == familyOf(ips[1]) {
		errs = append(errs, field.Invalid(path, ips, "may specify no more than one IP for each IP family"))
	}
	for i, ip := range ips {
		if i < len(s.Spec.IPFamilies) && familyOf(ip) != s.Spec.IPFamilies[i] {
			errs = append(errs, field.Invalid(path.Index(i), ip, fmt.Sprintf("expected an %s value as indicated by `ipFamilies[%d]`", s.Spec.IPFamilies[i], i)))
		}
	}
	return errs
}

// familyOf is the family of an address that has been validated.
func familyOf(ip string) corev1.IPFamily {
	if a, err := netip.ParseAddr(ip); err == nil && a.Unmap().Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

func validateLoadBalancerFields(s *corev1.Service, spec *field.Path) field.ErrorList {
	errs := validateSourceRanges(s, spec)
	if p := s.Spec.AllocateLoadBalancerNodePorts; p != nil && !isLoadBalancer(s) {
		errs = append(errs, field.Forbidden(spec.Child("allocateLoadBalancerNodePorts"), onlyLoadBalancer))
	} else if p == nil && isLoadBalancer(s) {
		errs = append(errs, field.Required(spec.Child("allocateLoadBalancerNodePorts"), ""))
	}
	if c := s.Spec.LoadBalancerClass; c != nil && !isLoadBalancer(s) {
		errs = append(errs, field.Forbidden(spec.Child("loadBalancerClass"), onlyLoadBalancer))
	} else if c != nil {
		errs = append(errs, invalidIf(spec.Child("loadBalancerClass"), *c, utilvalidation.IsQualifiedName(*c))...)
	}
	return errs
}

const onlyLoadBalancer = "may only be used when `type` is 'LoadBalancer'"

// validateSourceRanges checks the field or, without it, the annotation that was
// before the field.
func validateSourceRanges(s *corev1.Service, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	if ranges := s.Spec.LoadBalancerSourceRanges; len(ranges) > 0 {
		// The capital letter is upstream's.
		path := spec.Child("LoadBalancerSourceRanges")
		if !isLoadBalancer(s) {
			errs = append(errs, field.Forbidden(path, onlyLoadBalancer))
		}
		for i, cidr := range ranges {
			errs = append(errs, utilvalidation.IsValidCIDRForLegacyField(path.Index(i), strings.TrimSpace(cidr), true, nil)...)
		}
		return errs
	}
	annotation, ok := s.Annotations[corev1.AnnotationLoadBalancerSourceRangesKey]
	if !ok {
		return nil
	}
	path := field.NewPath("metadata", "annotations").Key(corev1.AnnotationLoadBalancerSourceRangesKey)
	if !isLoadBalancer(s) {
		errs = append(errs, field.Forbidden(path, onlyLoadBalancer))
	}
	if strings.TrimSpace(annotation) == "" {
		return errs
	}
	for _, cidr := range strings.Split(annotation, ",") {
		errs = append(errs, utilvalidation.IsValidCIDRForLegacyField(path, strings.TrimSpace(cidr), true, nil)...)
	}
	return errs
}

func validateTrafficPolicies(s *corev1.Service, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	path := spec.Child("externalTrafficPolicy")
	switch p := s.Spec.ExternalTrafficPolicy; {
	case p != "" && !externallyAccessible(s):
		errs = append(errs, field.Invalid(path, p, "may only be set for externally-accessible services"))
	case p == "" && externallyAccessible(s):
		errs = append(errs, field.Required(path, ""))
	case p != "":
		errs = append(errs, oneOf(p, path, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)...)
	}
	path = spec.Child("healthCheckNodePort")
	switch port := s.Spec.HealthCheckNodePort; {
	case !needsHealthCheckNodePort(s) && port != 0:
		errs = append(errs, field.Invalid(path, port, "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"))
	case needsHealthCheckNodePort(s):
		errs = append(errs, invalidIf(path, port, utilvalidation.IsValidPortNum(int(port)))...)
	}
	path = spec.Child("internalTrafficPolicy")
	if p := s.Spec.InternalTrafficPolicy; p != nil {
		errs = append(errs, oneOf(*p, path, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)...)
	} else if needsClusterIP(s) {
		errs = append(errs, field.Required(path, ""))
	}
	return errs
}

func validateServiceUpdate(s, old *corev1.Service) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateClusterIPUpdate(s, old, spec)
	if isLoadBalancer(old) && isLoadBalancer(s) {
		was, now := old.Spec.LoadBalancerClass, s.Spec.LoadBalancerClass
		if (was == nil) != (now == nil) || was != nil && *was != *now {
			errs = append(errs, field.Invalid(spec.Child("loadBalancerClass"), now, "may not change once set"))
		}
	}
	if needsHealthCheckNodePort(old) && needsHealthCheckNodePort(s) && s.Spec.HealthCheckNodePort != old.Spec.HealthCheckNodePort {
		errs = append(errs, field.Forbidden(spec.Child("healthCheckNodePort"), "field is immutable"))
	}
	return errs
}

// validateClusterIPUpdate lets a Service gain and lose its second address, and
// keep the first for as long as it has one. That the policy agrees was checked
// before the allocation.
func validateClusterIPUpdate(s, old *corev1.Service, spec *field.Path) field.ErrorList {
	if isExternalName(s) || isExternalName(old) {
		return nil
	}
	const fixed = "may not change once set"
	var errs field.ErrorList

	path, now, was := spec.Child("clusterIPs"), s.Spec.ClusterIPs, old.Spec.ClusterIPs
	switch {
	case len(was) == 0:
	case len(now) == 0:
		errs = append(errs, field.Invalid(path.Index(0), now, "primary clusterIP can not be unset"))
	case now[0] != was[0]:
		errs = append(errs, field.Invalid(path.Index(0), now, fixed))
	case len(now) > 1 && len(was) > 1 && now[1] != was[1]:
		errs = append(errs, field.Invalid(path.Index(1), now, fixed))
	}

	// A headless Service without a selector has no addresses to keep, it may be
	// of any family at any time.
	if isHeadless(s) != isHeadless(old) || isHeadless(s) && len(s.Spec.Selector) == 0 {
		return errs
	}
	families, wasFamilies := s.Spec.IPFamilies, old.Spec.IPFamilies
	path = spec.Child("ipFamilies")
	switch {
	case len(wasFamilies) == 0:
	case len(families) == 0:
		errs = append(errs, field.Invalid(path.Index(0), families, "primary ipFamily can not be unset"))
	case families[0] != wasFamilies[0]:
		errs = append(errs, field.Invalid(path.Index(0), families, fixed))
	case len(families) > 1 && len(wasFamilies) > 1 && families[1] != wasFamilies[1]:
		errs = append(errs, field.Invalid(path.Index(1), families, fixed))
	}
	return errs
}

func validateServiceStatus(s, _ *corev1.Service) field.ErrorList {
	status := field.NewPath("status")
	errs := metav1validation.ValidateConditions(s.Status.Conditions, status.Child("conditions"))
	path := status.Child("loadBalancer", "ingress")
	if !isLoadBalancer(s) {
		if len(s.Status.LoadBalancer.Ingress) > 0 {
			errs = append(errs, field.Forbidden(path, "may only be used when `spec.type` is \"LoadBalancer\""))
		}
		return errs
	}
	for i, ing := range s.Status.LoadBalancer.Ingress {
		path := path.Index(i)
		if ing.IP != "" {
			errs = append(errs, utilvalidation.IsValidIPForLegacyField(path.Child("ip"), ing.IP, true, nil)...)
		}
		switch {
		case ing.IP != "" && ing.IPMode == nil:
			errs = append(errs, field.Required(path.Child("ipMode"), "must be specified when `ip` is set"))
		case ing.IP == "" && ing.IPMode != nil:
			errs = append(errs, field.Forbidden(path.Child("ipMode"), "may not be specified when `ip` is not set"))
		case ing.IPMode != nil:
			errs = append(errs, oneOf(*ing.IPMode, path.Child("ipMode"), corev1.LoadBalancerIPModeProxy, corev1.LoadBalancerIPModeVIP)...)
		}
		if ing.Hostname != "" {
			errs = append(errs, invalidIf(path.Child("hostname"), ing.Hostname, utilvalidation.IsDNS1123Subdomain(ing.Hostname))...)
			if _, err := netip.ParseAddr(ing.Hostname); err == nil {
				errs = append(errs, field.Invalid(path.Child("hostname"), ing.Hostname, "must be a DNS name, not an IP address"))
			}
		}
		for j, p := range ing.Ports {
			errs = append(errs, validateIngressPort(path.Child("ports").Index(j), p)...)
		}
	}
	return errs
}

func validateIngressPort(path *field.Path, p corev1.PortStatus) field.ErrorList {
	errs := invalidIf(path.Child("port"), p.Port, utilvalidation.IsValidPortNum(int(p.Port)))
	errs = append(errs, validateTransport(path.Child("protocol"), p.Protocol)...)
	if p.Error != nil {
		errs = append(errs, invalidIf(path.Child("error"), *p.Error, utilvalidation.IsQualifiedName(*p.Error))...)
	}
	return errs
}

// validateOrdinaryIP refuses addresses that mean something else on every node:
// traffic to them would never reach what the writer has in mind.
func validateOrdinaryIP(path *field.Path, ip string) field.ErrorList {
	a, err := netip.ParseAddr(ip)
	if err != nil {
		return nil // the caller has said so already
	}
	a = a.Unmap()
	var why string
	switch {
	case a.IsUnspecified():
		why = fmt.Sprintf("may not be unspecified (%s)", ip)
	case a.IsLoopback():
		why = "may not be in the loopback range (127.0.0.0/8, ::1/128)"
	case a.IsLinkLocalUnicast():
		why = "may not be in the link-local range (169.254.0.0/16, fe80::/10)"
	case a.IsLinkLocalMulticast():
		why = "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"
	default:
		return nil
	}
	return field.ErrorList{field.Invalid(path, ip, why)}
}

// notNegative refuses numbers below zero.
func notNegative(path *field.Path, value int32) field.ErrorList {
	return apivalidation.ValidateNonnegativeField(int64(value), path)
}
