// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

func setType(typ corev1.ServiceType) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.Type = typ }
}

func toExternalName(s *corev1.Service) {
	s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "a.example"
}

// TestRowsB is about fields that may not change, and those that a change of type
// wipes.
func TestRowsB(t *testing.T) {
	const nodePort = "type: NodePort\n" + web
	runServiceCases(t, []serviceCase{
		{row: "B01", spec: web, then: func(s *corev1.Service) { s.Spec.ClusterIP = "10.96.0.99" },
			refused: `Service "x" is invalid: spec.clusterIPs[0]: Invalid value: ["10.96.0.99"]: may not change once set`},
		{row: "B02", spec: web, then: func(s *corev1.Service) { s.Spec.ClusterIP = "None" },
			refused: `Service "x" is invalid: spec.clusterIPs[0]: Invalid value: ["None"]: may not change once set`},
		{row: "B03", spec: "clusterIP: None\n" + web, then: func(s *corev1.Service) { s.Spec.ClusterIP = "10.96.0.99" },
			refused: `spec.clusterIPs[0]: Invalid value: ["10.96.0.99"]: may not change once set`},
		{row: "B04", spec: web, then: func(s *corev1.Service) { s.Spec.ClusterIP = "" }, want: unchanged},
		{row: "B04 both", spec: web, then: func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil }, want: unchanged},
		{row: "B05", spec: web, then: setType(corev1.ServiceTypeNodePort), want: func(s, old *corev1.Service) error {
			return check(s.Spec.ClusterIP == old.Spec.ClusterIP && s.Spec.Ports[0].NodePort >= 30086 && s.Spec.ExternalTrafficPolicy == "Cluster", "%+v", s.Spec)
		}},
		{row: "B05 two protocols", spec: "ports: [{name: a, port: 53, protocol: UDP}, {name: b, port: 53}]", then: setType(corev1.ServiceTypeNodePort), want: func(s, _ *corev1.Service) error {
			// Only a Service that is created shares the number (E05).
			return check(s.Spec.Ports[0].NodePort != s.Spec.Ports[1].NodePort && s.Spec.Ports[1].NodePort != 0, "%+v", s.Spec.Ports)
		}},
		{row: "B06", spec: nodePort, then: setType(corev1.ServiceTypeClusterIP), want: func(s, old *corev1.Service) error {
			return check(s.Spec.ClusterIP == old.Spec.ClusterIP && s.Spec.Ports[0].NodePort == 0 && s.Spec.ExternalTrafficPolicy == "", "%+v", s.Spec)
		}},
		{row: "B06 released", do: func(_ *testing.T, b serviceBench) {
			b.mustCreate("a", "type: NodePort\nports: [{port: 80, nodePort: 32223}]")
			b.mustPatch("a", setType(corev1.ServiceTypeClusterIP))
			b.mustCreate("b", "type: NodePort\nports: [{port: 80, nodePort: 32223}]")
		}},
		{row: "B06 policy with externalIPs", spec: nodePort + "\nexternalIPs: [203.0.113.7]", then: setType(corev1.ServiceTypeClusterIP),
			warned: []string{externalIPsDeprecated}, want: func(s, _ *corev1.Service) error {
				return check(s.Spec.ExternalTrafficPolicy == "Cluster", "%+v", s.Spec)
			}},
		{row: "B06 policy changed, too", spec: nodePort, then: func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeClusterIP, "Local"
		}, refused: `spec.externalTrafficPolicy: Invalid value: "Local": may only be set for externally-accessible services`},
		{row: "B07", spec: nodePort, then: func(s *corev1.Service) {
			s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeClusterIP, 30001
		}, refused: "spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"},
		{row: "B08", spec: web, then: toExternalName, want: func(s, _ *corev1.Service) error {
			return check(s.Spec.ClusterIP == "" && s.Spec.ClusterIPs == nil && s.Spec.IPFamilies == nil && s.Spec.IPFamilyPolicy == nil &&
				len(s.Spec.Selector) == 1 && len(s.Spec.Ports) == 1, "%+v", s.Spec)
		}},
		{row: "B08 released", do: func(_ *testing.T, b serviceBench) {
			b.mustCreate("a", web+"\nclusterIP: 10.96.0.50")
			b.mustPatch("a", toExternalName)
			b.mustCreate("b", web+"\nclusterIP: 10.96.0.50")
		}},
		{row: "B08 headless", spec: "clusterIP: None\n" + web, then: toExternalName, want: func(s, _ *corev1.Service) error {
			return check(s.Spec.ClusterIP == "" && s.Spec.ClusterIPs == nil, "%+v", s.Spec)
		}},
		{row: "B09", spec: "type: ExternalName\nexternalName: a.example\nports: [{port: 80}]", then: setType(corev1.ServiceTypeClusterIP),
			warned: []string{`spec.externalName is ignored when spec.type is not "ExternalName"`}, want: func(s, _ *corev1.Service) error {
				return check(s.Spec.ClusterIP != "" && len(s.Spec.ClusterIPs) == 1 && len(s.Spec.IPFamilies) == 1 && s.Spec.ExternalName == "a.example", "%+v", s.Spec)
			}},
		{row: "B10", spec: "type: ExternalName\nexternalName: a.example\nclusterIP: 10.96.0.77",
			refused: `Service "x" is invalid: spec.clusterIPs: Forbidden: may not be set for ExternalName services`},
		{row: "B10 families", spec: "type: ExternalName\nexternalName: a.example\nipFamilies: [IPv4]",
			refused: `spec.ipFamilies: Forbidden: may not be set for ExternalName services`},
		{row: "B10 policy", spec: "type: ExternalName\nexternalName: a.example\nipFamilyPolicy: SingleStack",
			refused: `spec.ipFamilyPolicy: Forbidden: may not be set for ExternalName services`},
		{row: "B11", spec: "type: ExternalName", refused: `Service "x" is invalid: spec.externalName: Required value`},
		{row: "B11 bad", spec: "type: ExternalName\nexternalName: a_b", refused: `spec.externalName: Invalid value: "a_b": a lowercase RFC 1123 subdomain must consist of`},
		{row: "B11 trailing dot", spec: "type: ExternalName\nexternalName: a.example.", want: func(s, _ *corev1.Service) error {
			return check(s.Spec.ClusterIP == "" && s.Spec.ClusterIPs == nil && s.Spec.IPFamilies == nil && s.Spec.IPFamilyPolicy == nil && s.Spec.InternalTrafficPolicy == nil, "%+v", s.Spec)
		}},
		{row: "B11 two trailing dots", spec: "type: ExternalName\nexternalName: a.example..", refused: `spec.externalName: Invalid value: "a.example."`},
		{row: "B12", do: func(t *testing.T, b serviceBench) {
			b.mustCreate("x", "type: LoadBalancer\nloadBalancerClass: x/y\nallocateLoadBalancerNodePorts: false\nports: [{port: 80}]")
			s := b.get("services", "x").(*corev1.Service)
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.10"}}
			if _, err := b.put("services/status", s); err != nil {
				t.Fatal(err)
			}
			s = b.mustPatch("x", setType(corev1.ServiceTypeClusterIP))
			if s.Spec.LoadBalancerClass != nil || s.Spec.AllocateLoadBalancerNodePorts != nil || s.Spec.ExternalTrafficPolicy != "" || len(s.Status.LoadBalancer.Ingress) > 0 {
				t.Errorf("%+v %+v", s.Spec, s.Status)
			}
		}},
		{row: "B13", spec: lbLocal, then: func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = "Cluster" }, want: func(s, old *corev1.Service) error {
			return check(s.Spec.HealthCheckNodePort == 0 && s.Spec.Ports[0].NodePort == old.Spec.Ports[0].NodePort, "%+v", s.Spec)
		}},
		{row: "B13 released", do: func(_ *testing.T, b serviceBench) {
			health := b.mustCreate("a", lbLocal).Spec.HealthCheckNodePort
			b.mustPatch("a", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = "Cluster" })
			b.mustCreate("b", fmt.Sprintf("type: NodePort\nports: [{port: 80, nodePort: %d}]", health))
		}},
		{row: "B14", spec: lbLocal, then: func(s *corev1.Service) { s.Spec.HealthCheckNodePort = 30001 },
			refused: `Service "x" is invalid: spec.healthCheckNodePort: Forbidden: field is immutable`},
		{row: "B15", spec: "type: NodePort\nhealthCheckNodePort: 30500\nports: [{port: 80}]",
			refused: "Service \"x\" is invalid: spec.healthCheckNodePort: Invalid value: 30500: may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"},
		{row: "B15 taken", spec: lbLocal + "\nhealthCheckNodePort: 30011", code: 500,
			refused: "Internal error occurred: failed to allocate requested HealthCheck NodePort 30011: provided port is already allocated"},
		{row: "B15 its own node port", spec: "type: LoadBalancer\nexternalTrafficPolicy: Local\nhealthCheckNodePort: 30777\nports: [{port: 80, nodePort: 30777}]", code: 500,
			refused: "failed to allocate requested HealthCheck NodePort 30777: provided port is already allocated"},
		{row: "B16", spec: "type: LoadBalancer\nports: [{port: 80}]", then: func(s *corev1.Service) { s.Spec.LoadBalancerClass = ptr.To("x/y") },
			refused: `Service "x" is invalid: spec.loadBalancerClass: Invalid value: "x/y": may not change once set`},
		{row: "B16 with the type", spec: web, then: func(s *corev1.Service) {
			s.Spec.Type, s.Spec.LoadBalancerClass = corev1.ServiceTypeLoadBalancer, ptr.To("x/y")
		}},
		{row: "B20", spec: nodePort, then: func(s *corev1.Service) { s.Spec.Ports[0].Protocol = "UDP" }, want: func(s, old *corev1.Service) error {
			return check(s.Spec.Ports[0].NodePort == old.Spec.Ports[0].NodePort, "%+v", s.Spec)
		}},
		{row: "B21", do: func(t *testing.T, b serviceBench) {
			b.mustCreate("x", lbLocal)
			s := b.get("services", "x").(*corev1.Service)
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.10"}}
			s.Spec.ExternalTrafficPolicy = "Cluster"
			out, err := b.put("services/status", s)
			if err != nil {
				t.Fatal(err)
			}
			s = out.(*corev1.Service)
			if s.Spec.ExternalTrafficPolicy != "Local" || s.Spec.HealthCheckNodePort == 0 || len(s.Status.LoadBalancer.Ingress) != 1 {
				t.Errorf("after a write of the status: %+v %+v", s.Spec, s.Status)
			}
			s = b.mustPatch("x", func(s *corev1.Service) { s.Status = corev1.ServiceStatus{} })
			if len(s.Status.LoadBalancer.Ingress) != 1 {
				t.Errorf("after a write of the main resource: %+v", s.Status)
			}
		}},
	})
}

// TestRowsE is about node ports.
func TestRowsE(t *testing.T) {
	runServiceCases(t, []serviceCase{
		{row: "E01", do: func(t *testing.T, b serviceBench) {
			var ports []int32
			for i := range 50 {
				ports = append(ports, b.mustCreate(fmt.Sprint("s", i), "type: NodePort\n"+web).Spec.Ports[0].NodePort)
			}
			if low := slices.Min(ports); low < 30086 || slices.IsSorted(ports) {
				t.Errorf("lowest %d, all %v", low, ports)
			}
		}},
		{row: "E02", spec: "type: NodePort\nports: [{port: 80, nodePort: 32223}]", want: func(s, _ *corev1.Service) error {
			return check(s.Spec.Ports[0].NodePort == 32223 && s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyCluster, "%+v", s.Spec)
		}},
		{row: "E03", spec: "type: NodePort\nports: [{port: 80, nodePort: 30011}]",
			refused: `Service "x" is invalid: spec.ports[0].nodePort: Invalid value: 30011: provided port is already allocated`},
		{row: "E03 update", spec: "type: NodePort\n" + web, then: func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 30011 },
			refused: "spec.ports[0].nodePort: Invalid value: 30011: provided port is already allocated"},
		{row: "E04", spec: "type: NodePort\nports: [{port: 80, nodePort: 25565}]",
			refused: `Service "x" is invalid: spec.ports[0].nodePort: Invalid value: 25565: provided port is not in the valid range. The range of valid ports is 30000-32767`},
		{row: "E05", spec: "type: NodePort\nports: [{name: a, port: 53, protocol: UDP}, {name: b, port: 53}, {name: c, port: 54}]", want: func(s, _ *corev1.Service) error {
			p := s.Spec.Ports
			return check(p[0].NodePort >= 30086 && p[0].NodePort == p[1].NodePort && p[2].NodePort != p[0].NodePort, "%+v", p)
		}},
		{row: "E05 one given", spec: "type: NodePort\nports: [{name: a, port: 53, protocol: UDP}, {name: b, port: 53, nodePort: 30007}]", want: func(s, _ *corev1.Service) error {
			return check(s.Spec.Ports[0].NodePort == 30007, "%+v", s.Spec.Ports)
		}},
		{row: "E06", spec: "type: NodePort\nports: [{name: a, port: 80, nodePort: 30053}, {name: b, port: 81, nodePort: 30053}]",
			refused: `Service "x" is invalid: spec.ports[1].nodePort: Duplicate value: 30053`},
		{row: "E07", spec: "type: NodePort\nports: [{port: 80, protocol: UDP, nodePort: 30011}]",
			refused: "spec.ports[0].nodePort: Invalid value: 30011: provided port is already allocated"},
		{row: "E08", deps: serviceDeps("10.96.0.0/12", 2), do: func(t *testing.T, b serviceBench) {
			b.mustCreate("a", "type: NodePort\n"+web)
			b.mustCreate("b", "type: NodePort\n"+web)
			s := b.service("x", "type: NodePort\n"+web)
			_, err := b.create("services", s, false)
			wantError(t, err, "Internal error occurred: failed to allocate a nodePort: range is full")
			b.remove("services", "a")
			b.mustCreate("x", "type: NodePort\n"+web)
		}},
	})
}
