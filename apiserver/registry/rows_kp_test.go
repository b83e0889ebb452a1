// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// TestRowsK is about load balancers and external IPs.
func TestRowsK(t *testing.T) {
	runServiceCases(t, []serviceCase{
		{row: "K09", spec: "type: LoadBalancer\nallocateLoadBalancerNodePorts: false\nports: [{name: a, port: 80}, {name: b, port: 81, nodePort: 30999}]", want: func(s, _ *corev1.Service) error {
			return check(s.Spec.Ports[0].NodePort == 0 && s.Spec.Ports[1].NodePort == 30999, "%+v", s.Spec.Ports)
		}},
		{row: "K10", spec: "type: LoadBalancer\nports: [{port: 80}]", then: func(s *corev1.Service) { s.Spec.AllocateLoadBalancerNodePorts = ptr.To(false) }, want: func(s, old *corev1.Service) error {
			return check(s.Spec.Ports[0].NodePort == old.Spec.Ports[0].NodePort, "%+v", s.Spec.Ports)
		}},
		{row: "K10 removed", spec: "type: LoadBalancer\nallocateLoadBalancerNodePorts: false\nports: [{name: a, port: 80}, {name: b, port: 81, nodePort: 30999}]", then: func(s *corev1.Service) {
			s.Spec.Ports = s.Spec.Ports[:1]
		}, want: func(s, _ *corev1.Service) error { return check(s.Spec.Ports[0].NodePort == 0, "%+v", s.Spec.Ports) }},
		{row: "K18", spec: "type: LoadBalancer\nports: [{name: a, port: 80}, {name: b, port: 80, protocol: UDP}]"},
		{row: "K18 status", do: func(t *testing.T, b serviceBench) {
			b.mustCreate("x", "type: LoadBalancer\nports: [{name: a, port: 80}, {name: b, port: 80, protocol: UDP}]")
			s := b.get("services", "x").(*corev1.Service)
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.1", Ports: []corev1.PortStatus{
				{Port: 80, Protocol: "TCP"}, {Port: 80, Protocol: "UDP", Error: ptr.To("example.com/no-udp")},
			}}}
			out, err := b.put("services/status", s)
			if err != nil {
				t.Fatal(err)
			}
			if got := out.(*corev1.Service).Status.LoadBalancer.Ingress[0].Ports; len(got) != 2 || *got[1].Error != "example.com/no-udp" {
				t.Errorf("%+v", got)
			}
			s = out.(*corev1.Service)
			s.Status.LoadBalancer.Ingress[0].Ports[1].Error = ptr.To("no udp")
			_, err = b.put("services/status", s)
			wantError(t, err, `status.loadBalancer.ingress[0].ports[1].error: Invalid value: "no udp"`)
		}},
		{row: "K20", do: refusedStatus(corev1.LoadBalancerIngress{IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)},
			"status.loadBalancer.ingress[0].ipMode: Forbidden: may not be specified when `ip` is not set")},
		{row: "K20 value", do: refusedStatus(corev1.LoadBalancerIngress{IP: "203.0.113.1", IPMode: ptr.To(corev1.LoadBalancerIPMode("Nat"))},
			`status.loadBalancer.ingress[0].ipMode: Unsupported value: "Nat": supported values: "Proxy", "VIP"`)},
		{row: "K20 address as name", do: refusedStatus(corev1.LoadBalancerIngress{Hostname: "203.0.113.1"},
			"status.loadBalancer.ingress[0].hostname: Invalid value: \"203.0.113.1\": must be a DNS name, not an IP address")},
		{row: "K20 no address", do: refusedStatus(corev1.LoadBalancerIngress{IP: "lb"},
			`status.loadBalancer.ingress[0].ip: Invalid value: "lb": must be a valid IP address`)},
		{row: "K20 default", do: func(t *testing.T, b serviceBench) {
			b.mustCreate("x", "type: LoadBalancer\n"+web)
			s := b.get("services", "x").(*corev1.Service)
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.10"}}
			out, err := b.put("services/status", s)
			if err != nil {
				t.Fatal(err)
			}
			if mode := out.(*corev1.Service).Status.LoadBalancer.Ingress[0].IPMode; mode == nil || *mode != corev1.LoadBalancerIPModeVIP {
				t.Errorf("ipMode %v", mode)
			}
		}},
		{row: "K20 no load balancer", do: func(t *testing.T, b serviceBench) {
			b.mustCreate("x", web)
			s := b.get("services", "x").(*corev1.Service)
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}
			_, err := b.put("services/status", s)
			wantError(t, err, "status.loadBalancer.ingress: Forbidden: may only be used when `spec.type` is \"LoadBalancer\"")
		}},
		{row: "K25", spec: web + "\nexternalIPs: [203.0.113.7]", warned: []string{externalIPsDeprecated}},
		{row: "K25 update", spec: web, then: func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.7"} }, warned: []string{externalIPsDeprecated}},
		{row: "K25 headless", spec: "clusterIP: None\nports: [{port: 80}]\nexternalIPs: [203.0.113.7]", warned: []string{"spec.externalIPs is ignored for headless services"}},
		{row: "K25 ExternalName", spec: "type: ExternalName\nexternalName: a.example\nexternalIPs: [203.0.113.7]", warned: []string{`spec.externalIPs is ignored when spec.type is "ExternalName"`}},
		{row: "K26 loopback", spec: web + "\nexternalIPs: [127.0.0.1]",
			refused: `spec.externalIPs[0]: Invalid value: "127.0.0.1": may not be in the loopback range (127.0.0.0/8, ::1/128)`, warned: nil},
		{row: "K26 link-local", spec: web + "\nexternalIPs: [169.254.3.4]",
			refused: `spec.externalIPs[0]: Invalid value: "169.254.3.4": may not be in the link-local range (169.254.0.0/16, fe80::/10)`},
		{row: "K26 unspecified", spec: web + "\nexternalIPs: [0.0.0.0]", refused: `spec.externalIPs[0]: Invalid value: "0.0.0.0": may not be unspecified (0.0.0.0)`},
		{row: "K26 multicast", spec: web + "\nexternalIPs: [224.0.0.5]",
			refused: `spec.externalIPs[0]: Invalid value: "224.0.0.5": may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)`},
		// Other multicast addresses are not refused.
		{row: "K26 wide multicast", spec: web + "\nexternalIPs: [239.1.2.3]", warned: []string{externalIPsDeprecated}},
		{row: "K26 no address", spec: web + "\nexternalIPs: [name]", refused: `spec.externalIPs[0]: Invalid value: "name": must be a valid IP address`},
		{row: "K27", do: rowOf(web+"\nclusterIP: 10.96.0.7\nexternalIPs: [203.0.113.7, 203.0.113.6]", "203.0.113.7,203.0.113.6")},
		{row: "K27 NodePort", do: rowOf(web+"\ntype: NodePort\nexternalIPs: [203.0.113.7]", "203.0.113.7")},
		{row: "K27 LoadBalancer", do: rowOf(web+"\ntype: LoadBalancer\nexternalIPs: [203.0.113.7]", "203.0.113.10,203.0.113.7", corev1.LoadBalancerIngress{IP: "203.0.113.10"})},
	})
}

// refusedStatus writes ingress into the status of a load balancer.
func refusedStatus(ingress corev1.LoadBalancerIngress, want string) func(*testing.T, serviceBench) {
	return func(t *testing.T, b serviceBench) {
		b.mustCreate("x", "type: LoadBalancer\n"+web)
		s := b.get("services", "x").(*corev1.Service)
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{ingress}
		_, err := b.put("services/status", s)
		wantError(t, err, want)
	}
}

// rowOf compares the External-IP cell.
func rowOf(spec, want string, ingress ...corev1.LoadBalancerIngress) func(*testing.T, serviceBench) {
	return func(t *testing.T, b serviceBench) {
		s := b.service("x", spec)
		s.Status.LoadBalancer.Ingress = ingress
		if got := b.table("services", s)["External-IP"]; got != want {
			t.Errorf("EXTERNAL-IP %q, want %q", got, want)
		}
	}
}

// TestRowsP is about the fields of dual-stack Services, on clusters with one
// family and with two.
func TestRowsP(t *testing.T) {
	dual := serviceDeps("10.96.0.0/16", 2768)
	dual.SecondaryServiceCIDR = netip.MustParsePrefix("fd00:96::/112")
	six := serviceDeps("fd00:96::/112", 2768)
	six.SecondaryServiceCIDR = netip.MustParsePrefix("10.96.0.0/16")
	const requireDual = web + "\nipFamilyPolicy: RequireDualStack"
	families := func(want ...corev1.IPFamily) func(s, old *corev1.Service) error {
		return func(s, old *corev1.Service) error {
			for i, ip := range s.Spec.ClusterIPs {
				if i >= len(want) || familyOf(ip) != want[i] {
					return fmt.Errorf("addresses %v, want %v", s.Spec.ClusterIPs, want)
				}
			}
			first := old == nil || old.Spec.ClusterIP == s.Spec.ClusterIP
			return check(slices.Equal(s.Spec.IPFamilies, want) && len(s.Spec.ClusterIPs) == len(want) && s.Spec.ClusterIP == s.Spec.ClusterIPs[0] && first, "%+v", s.Spec)
		}
	}
	policy := func(p corev1.IPFamilyPolicy) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.IPFamilyPolicy = ptr.To(p) }
	}
	runServiceCases(t, []serviceCase{
		{row: "P01", spec: web + "\nipFamilyPolicy: PreferDualStack", want: func(s, _ *corev1.Service) error {
			return check(*s.Spec.IPFamilyPolicy == corev1.IPFamilyPolicyPreferDualStack && len(s.Spec.IPFamilies) == 1 && len(s.Spec.ClusterIPs) == 1, "%+v", s.Spec)
		}},
		{row: "P02", spec: requireDual,
			refused: `Service "x" is invalid: spec.ipFamilyPolicy: Invalid value: "RequireDualStack": this cluster is not configured for dual-stack services`},
		{row: "P03", spec: web + "\nipFamilies: [IPv6]", refused: `Service "x" is invalid: spec.ipFamilies[0]: Invalid value: "IPv6": not configured on this cluster`},
		{row: "P03 by address", spec: web + "\nclusterIP: 'fd00::7'", refused: `spec.clusterIPs[0]: Invalid value: ["fd00::7"]: IPv6 is not configured on this cluster`},
		{row: "P04", deps: dual, do: dualCase(serviceCase{spec: requireDual, want: families("IPv4", "IPv6")})},
		{row: "P04 IPv6 first", deps: dual, do: dualCase(serviceCase{spec: requireDual + "\nipFamilies: [IPv6]", want: families("IPv6", "IPv4")})},
		{row: "P04 IPv6 cluster", deps: six, do: dualCase(serviceCase{spec: requireDual, want: families("IPv6", "IPv4")})},
		{row: "P04 prefers", deps: dual, do: dualCase(serviceCase{spec: web + "\nipFamilyPolicy: PreferDualStack", want: families("IPv4", "IPv6")})},
		{row: "P04 default is single", deps: dual, do: dualCase(serviceCase{spec: web, want: families("IPv4")})},
		{row: "P04 named", deps: dual, do: dualCase(serviceCase{spec: requireDual + "\nclusterIP: 10.96.0.70\nclusterIPs: [10.96.0.70, 'fd00:96::70']", want: families("IPv4", "IPv6")})},
		{row: "P05", spec: web + "\nipFamilyPolicy: SingleStack\nclusterIP: 10.96.0.7\nclusterIPs: [10.96.0.7, 'fd00::7']",
			refused: `spec.ipFamilyPolicy: Invalid value: "SingleStack": must be 'RequireDualStack' or 'PreferDualStack' when multiple cluster IPs are specified`},
		{row: "P05 families", deps: dual, do: dualCase(serviceCase{spec: web + "\nipFamilies: [IPv4, IPv6]",
			refused: `spec.ipFamilyPolicy: Invalid value: "SingleStack": must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified`})},
		{row: "P06", spec: web + "\nclusterIP: 10.96.0.7\nclusterIPs: [10.96.0.7, 10.96.0.8]",
			refused: `Service "x" is invalid: spec.clusterIPs: Invalid value: ["10.96.0.7","10.96.0.8"]: may specify no more than one IP for each IP family`},
		{row: "P07", spec: web + "\nclusterIP: 10.96.0.7\nclusterIPs: [10.96.0.7, 'fd00::7', 10.96.0.8]",
			refused: `Service "x" is invalid: spec.clusterIPs: Invalid value: ["10.96.0.7","fd00::7","10.96.0.8"]: may only hold up to 2 values`},
		{row: "P08", spec: web + "\nclusterIP: 10.96.0.7\nclusterIPs: [10.96.0.8]",
			refused: "Service \"x\" is invalid: spec.clusterIPs: Invalid value: [\"10.96.0.8\"]: first value must match `clusterIP`"},
		{row: "P09", deps: dual, do: dualCase(serviceCase{spec: web, then: policy(corev1.IPFamilyPolicyPreferDualStack), want: families("IPv4", "IPv6")})},
		{row: "P09 named", deps: dual, do: dualCase(serviceCase{spec: web, then: func(s *corev1.Service) {
			policy(corev1.IPFamilyPolicyRequireDualStack)(s)
			s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, "fd00:96::70")
		}, want: func(s, _ *corev1.Service) error {
			return check(len(s.Spec.ClusterIPs) == 2 && s.Spec.ClusterIPs[1] == "fd00:96::70" && len(s.Spec.IPFamilies) == 2, "%+v", s.Spec)
		}})},
		{row: "P10", deps: dual, do: dualCase(serviceCase{spec: requireDual, then: policy(corev1.IPFamilyPolicySingleStack), want: families("IPv4")})},
		{row: "P10 released", deps: dual, do: func(_ *testing.T, b serviceBench) {
			b.mustCreate("a", requireDual+"\nclusterIP: 10.96.0.70\nclusterIPs: [10.96.0.70, 'fd00:96::70']")
			b.mustPatch("a", policy(corev1.IPFamilyPolicySingleStack))
			b.mustCreate("b", web+"\nclusterIP: 'fd00:96::70'")
		}},
		{row: "P11", deps: dual, do: dualCase(serviceCase{spec: requireDual, then: func(s *corev1.Service) {
			s.Spec.ClusterIPs = s.Spec.ClusterIPs[:1]
		}, refused: `Service "x" is invalid: spec.ipFamilyPolicy: Invalid value: "RequireDualStack": must be 'SingleStack' to release the secondary cluster IP`})},
		{row: "P11 families", deps: dual, do: dualCase(serviceCase{spec: requireDual, then: func(s *corev1.Service) {
			s.Spec.IPFamilies = s.Spec.IPFamilies[:1]
		}, refused: `spec.ipFamilyPolicy: Invalid value: "RequireDualStack": must be 'SingleStack' to release the secondary IP family`})},
		{row: "P11 second changed", deps: dual, do: dualCase(serviceCase{spec: requireDual, then: func(s *corev1.Service) {
			s.Spec.ClusterIPs[1] = "fd00:96::99"
		}, refused: `spec.clusterIPs[1]: Invalid value: `})},
		{row: "P12", deps: dual, do: dualCase(serviceCase{spec: requireDual, then: func(s *corev1.Service) {
			slices.Reverse(s.Spec.IPFamilies)
			slices.Reverse(s.Spec.ClusterIPs)
			s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
		}, refused: "spec.ipFamilies[0]: Invalid value: [\"IPv6\",\"IPv4\"]: may not change once set"})},
		{row: "P13", spec: "clusterIP: None\nports: [{port: 80}]", want: func(s, _ *corev1.Service) error {
			return check(*s.Spec.IPFamilyPolicy == corev1.IPFamilyPolicyRequireDualStack && slices.Equal(s.Spec.IPFamilies, []corev1.IPFamily{"IPv4", "IPv6"}), "%+v", s.Spec)
		}},
		{row: "P14", spec: web + "\nclusterIP: 10.96.0.7\nipFamilies: [IPv6]",
			refused: "Service \"x\" is invalid: spec.clusterIPs[0]: Invalid value: \"10.96.0.7\": expected an IPv6 value as indicated by `ipFamilies[0]`"},
	})
}

// dualCase runs a case without the two Services that a lab's have before it: they
// have addresses of one family.
func dualCase(tc serviceCase) func(*testing.T, serviceBench) {
	return func(t *testing.T, b serviceBench) { tc.run(t, b) }
}
