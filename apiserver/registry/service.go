// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

func serviceKind() Kind {
	k := Kind{
		Resource: "services", Singular: "service", Kind: "Service",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		WatchCache: true,
		ShortNames: []string{"svc"}, Categories: []string{"all"},
		New:     newObject[corev1.Service],
		NewList: newObject[corev1.ServiceList],
		// A Service may be named like any DNS label since 1.37; before, it had
		// to begin with a letter.
		Name:                apivalidation.NameIsDNSLabel,
		Default:             forObject(defaultService),
		PrepareForUpdate:    onUpdate(prepareServiceUpdate),
		Validate:            validates(validateService),
		ValidateUpdate:      validatesUpdate(validateServiceUpdate),
		Warnings:            warns(serviceWarnings),
		AllowCreateOnUpdate: true,
		Status: &StatusStrategy{
			Prepare:  onUpdate(prepareServiceStatus),
			Validate: validatesUpdate(validateServiceStatus),
		},
		Subresources:     serviceSubresources,
		SubresourceTypes: map[schema.GroupVersion][]runtime.Object{corev1.SchemeGroupVersion: {&corev1.ServiceProxyOptions{}}},
		AddToScheme:      addOptions(&corev1.ServiceProxyOptions{}),
		Columns:          serviceColumns(),
		Row:              row(serviceRow),
		FieldLabels:      []string{"spec.clusterIP", "spec.type"},
		Fields: fieldsOf(func(s *corev1.Service) fields.Set {
			return fields.Set{"spec.clusterIP": s.Spec.ClusterIP, "spec.type": string(s.Spec.Type)}
		}),
	}
	k.Wrap = wrapService(k)
	return k
}

// The functions below ask what a Service is. They take the type as written: an
// unknown one is none of them, and validation refuses it later.

func isHeadless(s *corev1.Service) bool { return s.Spec.ClusterIP == corev1.ClusterIPNone }

func isLoadBalancer(s *corev1.Service) bool { return s.Spec.Type == corev1.ServiceTypeLoadBalancer }

func isExternalName(s *corev1.Service) bool { return s.Spec.Type == corev1.ServiceTypeExternalName }

func needsClusterIP(s *corev1.Service) bool {
	return s.Spec.Type == corev1.ServiceTypeClusterIP || needsNodePorts(s)
}

func needsNodePorts(s *corev1.Service) bool {
	return s.Spec.Type == corev1.ServiceTypeNodePort || isLoadBalancer(s)
}

func needsHealthCheckNodePort(s *corev1.Service) bool {
	return isLoadBalancer(s) && s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// externallyAccessible tells whether clients outside the cluster can reach it,
// which is when externalTrafficPolicy means anything.
func externallyAccessible(s *corev1.Service) bool {
	return needsNodePorts(s) || s.Spec.Type == corev1.ServiceTypeClusterIP && len(s.Spec.ExternalIPs) > 0
}

func defaultService(s *corev1.Service) {
	spec := &s.Spec
	if spec.SessionAffinity == "" {
		spec.SessionAffinity = corev1.ServiceAffinityNone
	}
	switch c := spec.SessionAffinityConfig; {
	case spec.SessionAffinity == corev1.ServiceAffinityNone:
		// Dropped, not refused: who turns the affinity off need not know of it.
		spec.SessionAffinityConfig = nil
	case spec.SessionAffinity == corev1.ServiceAffinityClientIP && (c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil):
		spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
			ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(corev1.DefaultClientIPServiceAffinitySeconds)},
		}
	}
	if spec.Type == "" {
		spec.Type = corev1.ServiceTypeClusterIP
	}
	for i := range spec.Ports {
		p := &spec.Ports[i]
		if p.Protocol == "" {
			p.Protocol = corev1.ProtocolTCP
		}
		if p.TargetPort == intstr.FromInt32(0) || p.TargetPort == intstr.FromString("") {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	if externallyAccessible(s) && spec.ExternalTrafficPolicy == "" {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	}
	if spec.InternalTrafficPolicy == nil && needsClusterIP(s) {
		spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyCluster)
	}
	if isLoadBalancer(s) && spec.AllocateLoadBalancerNodePorts == nil {
		spec.AllocateLoadBalancerNodePorts = ptr.To(true)
	}
	defaultIPMode(s)
}

func defaultIPMode(s *corev1.Service) {
	if !isLoadBalancer(s) {
		return
	}
	for i := range s.Status.LoadBalancer.Ingress {
		if ing := &s.Status.LoadBalancer.Ingress[i]; ing.IP != "" && ing.IPMode == nil {
			ing.IPMode = ptr.To(corev1.LoadBalancerIPModeVIP)
		}
	}
}

// prepareServiceUpdate drops the status of a load balancer that is none any
// more; everything else that a change of type drops is in dropUnneeded, since
// the allocation has to know of it.
func prepareServiceUpdate(_ context.Context, s, old *corev1.Service) {
	if isLoadBalancer(old) && !isLoadBalancer(s) {
		s.Status.LoadBalancer = corev1.LoadBalancerStatus{}
	}
}

func prepareServiceStatus(_ context.Context, s, _ *corev1.Service) {
	// Defaults ran before the stored spec was put under the new status, so
	// that they may not have seen the type.
	defaultIPMode(s)
}

// adoptAllocated fills in, from the stored Service, what a client left out that
// was allocated: a manifest that is applied again, or a PUT of one, need not
// repeat addresses and ports. Node ports are matched by the port's name.
func adoptAllocated(s, old *corev1.Service) {
	if needsClusterIP(old) && needsClusterIP(s) {
		if s.Spec.ClusterIP == "" {
			s.Spec.ClusterIP = old.Spec.ClusterIP
		}
		if len(s.Spec.ClusterIPs) == 0 && s.Spec.ClusterIP == old.Spec.ClusterIP {
			s.Spec.ClusterIPs = slices.Clone(old.Spec.ClusterIPs)
		}
	}
	if needsNodePorts(old) && needsNodePorts(s) {
		byName := map[string]int32{}
		for _, p := range old.Spec.Ports {
			byName[p.Name] = p.NodePort
		}
		named := map[int32]bool{}
		for _, p := range s.Spec.Ports {
			named[p.NodePort] = true
		}
		for i := range s.Spec.Ports {
			p := &s.Spec.Ports[i]
			// A number that the client moved to another port is not available.
			if was := byName[p.Name]; p.NodePort == 0 && !named[was] {
				p.NodePort = was
			}
		}
	}
	if needsHealthCheckNodePort(old) && needsHealthCheckNodePort(s) && s.Spec.HealthCheckNodePort == 0 {
		s.Spec.HealthCheckNodePort = old.Spec.HealthCheckNodePort
	}
}

// alignClusterIPs makes clusterIP and clusterIPs agree when the client wrote
// only the one it knows. When it wrote both and they differ, validation says so.
// old is nil on create.
func alignClusterIPs(s, old *corev1.Service) {
	if old == nil {
		if s.Spec.ClusterIP != "" && len(s.Spec.ClusterIPs) == 0 {
			s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
		}
		return
	}
	sameOne := s.Spec.ClusterIP == old.Spec.ClusterIP
	sameList := slices.Equal(s.Spec.ClusterIPs, old.Spec.ClusterIPs)
	switch {
	case sameOne && len(s.Spec.ClusterIPs) == 0 && s.Spec.ClusterIP != "":
		s.Spec.ClusterIPs = slices.Clone(old.Spec.ClusterIPs)
	case !sameOne && sameList && s.Spec.ClusterIP == "":
		s.Spec.ClusterIPs = nil
	case !sameOne && sameList && len(s.Spec.ClusterIPs) > 0:
		s.Spec.ClusterIPs = slices.Clone(s.Spec.ClusterIPs)
		s.Spec.ClusterIPs[0] = s.Spec.ClusterIP
	case !sameOne && len(s.Spec.ClusterIPs) == 0:
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
	}
}

// dropUnneeded clears the fields that the old type needed, the new one does not,
// and the client did not touch: they were most likely filled in by the server. A
// field that the client changed stays, so that validation can refuse it.
func dropUnneeded(s, old *corev1.Service) {
	spec, was := &s.Spec, &old.Spec
	if needsClusterIP(old) && !needsClusterIP(s) {
		if spec.ClusterIP == was.ClusterIP && slices.Equal(spec.ClusterIPs, was.ClusterIPs) {
			spec.ClusterIP, spec.ClusterIPs = "", nil
		}
		if slices.Equal(spec.IPFamilies, was.IPFamilies) {
			spec.IPFamilies = nil
		}
		if equality.Semantic.DeepEqual(spec.IPFamilyPolicy, was.IPFamilyPolicy) {
			spec.IPFamilyPolicy = nil
		}
	}
	if needsNodePorts(old) && !needsNodePorts(s) && !nodePortsChanged(s, old) {
		for i := range spec.Ports {
			spec.Ports[i].NodePort = 0
		}
	}
	if needsHealthCheckNodePort(old) && !needsHealthCheckNodePort(s) && spec.HealthCheckNodePort == was.HealthCheckNodePort {
		spec.HealthCheckNodePort = 0
	}
	if externallyAccessible(old) && !externallyAccessible(s) && spec.ExternalTrafficPolicy == was.ExternalTrafficPolicy {
		spec.ExternalTrafficPolicy = ""
	}
	if isLoadBalancer(old) && !isLoadBalancer(s) {
		if equality.Semantic.DeepEqual(spec.AllocateLoadBalancerNodePorts, was.AllocateLoadBalancerNodePorts) {
			spec.AllocateLoadBalancerNodePorts = nil
		}
		if equality.Semantic.DeepEqual(spec.LoadBalancerClass, was.LoadBalancerClass) {
			spec.LoadBalancerClass = nil
		}
	}
}

// nodePortsChanged tells whether s names a node port that old does not have.
func nodePortsChanged(s, old *corev1.Service) bool {
	for _, p := range s.Spec.Ports {
		if p.NodePort != 0 && !slices.ContainsFunc(old.Spec.Ports, func(o corev1.ServicePort) bool { return o.NodePort == p.NodePort }) {
			return true
		}
	}
	return false
}

func serviceWarnings(s, _ *corev1.Service) []string {
	var w []string
	spec := field.NewPath("spec")
	if _, ok := s.Annotations[corev1.DeprecatedAnnotationTopologyAwareHints]; ok {
		w = append(w, fmt.Sprintf("annotation %s is deprecated, please use %s instead",
			corev1.DeprecatedAnnotationTopologyAwareHints, corev1.AnnotationTopologyMode))
	}
	for i, ip := range s.Spec.ClusterIPs {
		if ip != "" && ip != corev1.ClusterIPNone {
			w = append(w, utilvalidation.GetWarningsForIP(spec.Child("clusterIPs").Index(i), ip)...)
		}
	}
	headless := isHeadless(s) && s.Spec.Type == corev1.ServiceTypeClusterIP
	if headless {
		if s.Spec.LoadBalancerIP != "" {
			w = append(w, "spec.loadBalancerIP is ignored for headless services")
		}
		if len(s.Spec.ExternalIPs) > 0 {
			w = append(w, "spec.externalIPs is ignored for headless services")
		}
		if s.Spec.SessionAffinity != corev1.ServiceAffinityNone {
			w = append(w, "spec.SessionAffinity is ignored for headless services")
		}
	}
	for i, ip := range s.Spec.ExternalIPs {
		w = append(w, utilvalidation.GetWarningsForIP(spec.Child("externalIPs").Index(i), ip)...)
	}
	switch {
	case len(s.Spec.ExternalIPs) == 0 || headless:
	case isExternalName(s):
		w = append(w, fmt.Sprintf("spec.externalIPs is ignored when spec.type is %q", corev1.ServiceTypeExternalName))
	default:
		w = append(w, "spec.externalIPs is deprecated and may no longer be implemented in some clusters")
	}
	if ip := s.Spec.LoadBalancerIP; ip != "" {
		// The field is free text, only an address can be written badly.
		if _, err := netip.ParseAddr(ip); err == nil {
			w = append(w, utilvalidation.GetWarningsForIP(spec.Child("loadBalancerIP"), ip)...)
		}
	}
	for i, cidr := range s.Spec.LoadBalancerSourceRanges {
		w = append(w, utilvalidation.GetWarningsForCIDR(spec.Child("loadBalancerSourceRanges").Index(i), strings.TrimSpace(cidr))...)
	}
	if !isExternalName(s) && s.Spec.ExternalName != "" {
		w = append(w, fmt.Sprintf("spec.externalName is ignored when spec.type is not %q", corev1.ServiceTypeExternalName))
	}
	if d := s.Spec.TrafficDistribution; d != nil && *d == corev1.ServiceTrafficDistributionPreferClose {
		w = append(w, fmt.Sprintf("spec.trafficDistribution: %q is deprecated; use %q", *d, corev1.ServiceTrafficDistributionPreferSameZone))
	}
	return w
}
