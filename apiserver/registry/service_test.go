// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
)

// serviceBench is a bench for Services with typed calls.
type serviceBench struct{ *bench }

// newServiceBench has kube-dns on 10.96.0.10, as a lab does.
func newServiceBench(t testing.TB) serviceBench {
	b := serviceBench{newBench(t, serviceDeps("10.96.0.0/12", 30000, 2768), serviceKind())}
	b.mustCreate("kube-dns", "clusterIP: 10.96.0.10\nports: [{name: dns, port: 53, protocol: UDP}]")
	return b
}

// service is a Service from the body of its spec.
func (b serviceBench) service(name, spec string) *corev1.Service {
	b.t.Helper()
	manifest := "metadata: {name: " + name + ", namespace: default}\nspec:\n  " + strings.ReplaceAll(spec, "\n", "\n  ")
	return b.parse("services", manifest).(*corev1.Service)
}

func (b serviceBench) tryCreate(name, spec string) (*corev1.Service, error) {
	b.t.Helper()
	out, err := b.create("services", b.service(name, spec), false)
	if err != nil {
		return nil, err
	}
	return out.(*corev1.Service), nil
}

func (b serviceBench) mustCreate(name, spec string) *corev1.Service {
	b.t.Helper()
	s, err := b.tryCreate(name, spec)
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

func (b serviceBench) tryPatch(name string, change func(*corev1.Service)) (*corev1.Service, error) {
	b.t.Helper()
	out, err := b.patch("services", name, func(obj runtime.Object) { change(obj.(*corev1.Service)) })
	if err != nil {
		return nil, err
	}
	return out.(*corev1.Service), nil
}

func (b serviceBench) mustPatch(name string, change func(*corev1.Service)) *corev1.Service {
	b.t.Helper()
	s, err := b.tryPatch(name, change)
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

// taken lists what the allocator has given out.
func (b serviceBench) taken() []string {
	b.t.Helper()
	entries, err := b.storages["services"].(*serviceREST).Taken(b.ctx())
	if err != nil {
		b.t.Fatal(err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.String())
	}
	return all
}

const web = "selector: {app: web}\nports: [{port: 80}]"

// TestServiceRefused creates Services that are not acceptable.
func TestServiceRefused(t *testing.T) {
	b := newServiceBench(t)
	for _, tc := range []struct{ id, spec, want string }{
		{"A06", web + "\nclusterIP: 10.96.0.10", `Service "x" is invalid: spec.clusterIPs: Invalid value: ["10.96.0.10"]: failed to allocate IP 10.96.0.10: provided IP is already allocated`},
		{"A07", web + "\nclusterIP: 10.0.0.9", `spec.clusterIPs: Invalid value: ["10.0.0.9"]: failed to allocate IP 10.0.0.9: the provided IP (10.0.0.9) is not in the valid range`},
		{"A08", web + "\nclusterIP: 10.96.0.x", `Service "x" is invalid: spec.clusterIPs[0]: Invalid value: "10.96.0.x": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)`},
		{"A08 leading zeros", web + "\nclusterIP: 010.96.0.1", `spec.clusterIPs[0]: Invalid value: "010.96.0.1": must not have leading 0s`},
		{"A09 network", web + "\nclusterIP: 10.96.0.0", `failed to allocate IP 10.96.0.0:`},
		{"A09 broadcast", web + "\nclusterIP: 10.111.255.255", `failed to allocate IP 10.111.255.255:`},
		{"A22", "selector: {app: web}\nports: []", `Service "x" is invalid: spec.ports: Required value`},
		{"A24", "ports: [{port: 80, name: http}, {port: 443}]", `Service "x" is invalid: spec.ports[1].name: Required value`},
		{"A25", "ports: [{port: 80, name: http}, {port: 443, name: http}]", `Service "x" is invalid: spec.ports[1].name: Duplicate value: "http"`},
		{"A26", "ports: [{port: 80, name: a}, {port: 80, name: b}]", `Service "x" is invalid: spec.ports[1]: Duplicate value: {"Name":"","Protocol":"TCP","AppProtocol":null,"Port":80,"TargetPort":0,"NodePort":0}`},
		{"A28", "ports: [{port: 80, protocol: ICMP}]", `Service "x" is invalid: spec.ports[0].protocol: Unsupported value: "ICMP": supported values: "SCTP", "TCP", "UDP"`},
		{"A29", "ports: [{port: 70000, targetPort: 80}]", `Service "x" is invalid: spec.ports[0].port: Invalid value: 70000: must be between 1 and 65535, inclusive`},
		{"A29 zero", "ports: [{port: 0, targetPort: 80}]", `spec.ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive`},
		{"A30", "ports: [{port: 80, targetPort: a-name-that-is-too-long}]", `Service "x" is invalid: spec.ports[0].targetPort: Invalid value: "a-name-that-is-too-long": must be no more than 15 characters`},
		{"A30 case", "ports: [{port: 80, targetPort: HTTP}]", `spec.ports[0].targetPort: Invalid value: "HTTP":`},
		{"A31", "type: Foo\nports: [{port: 80}]", `spec.type: Unsupported value: "Foo": supported values: "ClusterIP", "ExternalName", "LoadBalancer", "NodePort"`},
		{"A32", "ports: [{port: 80, nodePort: 30080}]", "Service \"x\" is invalid: spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"},
		{"A33", "type: NodePort\nclusterIP: None\nports: [{port: 80}]", `Service "x" is invalid: spec.clusterIPs[0]: Invalid value: "None": may not be set to 'None' for NodePort services`},
		{"A33 LoadBalancer", "type: LoadBalancer\nclusterIP: None\nports: [{port: 80}]", `spec.clusterIPs[0]: Invalid value: "None": may not be set to 'None' for LoadBalancer services`},
		{"A34", web + "\nexternalTrafficPolicy: Local", `Service "x" is invalid: spec.externalTrafficPolicy: Invalid value: "Local": may only be set for externally-accessible services`},
		{"A35", web + "\nloadBalancerSourceRanges: [10.0.0.0/8]", "Service \"x\" is invalid: spec.LoadBalancerSourceRanges: Forbidden: may only be used when `type` is 'LoadBalancer'"},
		{"A36 allocate", web + "\nallocateLoadBalancerNodePorts: false", "spec.allocateLoadBalancerNodePorts: Forbidden: may only be used when `type` is 'LoadBalancer'"},
		{"A36 class", web + "\nloadBalancerClass: x/y", "spec.loadBalancerClass: Forbidden: may only be used when `type` is 'LoadBalancer'"},
		{"A37", web + "\nsessionAffinity: None\nsessionAffinityConfig: {clientIP: {timeoutSeconds: 5}}", `Service "x" is invalid: spec.sessionAffinityConfig: Forbidden: must not be set when session affinity is None`},
		{"A38 zero", web + "\nsessionAffinity: ClientIP\nsessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}", `Service "x" is invalid: spec.sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value: 0: must be greater than 0 and less than 86400`},
		{"A38 day", web + "\nsessionAffinity: ClientIP\nsessionAffinityConfig: {clientIP: {timeoutSeconds: 86401}}", `spec.sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value: 86401:`},
		{"affinity value", web + "\nsessionAffinity: Cookie", `spec.sessionAffinity: Unsupported value: "Cookie": supported values: "ClientIP", "None"`},
		{"A39", web + "\ntrafficDistribution: Fast", `Service "x" is invalid: spec.trafficDistribution: Unsupported value: "Fast": supported values: "PreferClose", "PreferSameNode", "PreferSameZone"`},
		{"B10", "type: ExternalName\nexternalName: a.example\nclusterIP: 10.96.0.77", `Service "x" is invalid: spec.clusterIPs: Forbidden: may not be set for ExternalName services`},
		{"B10 families", "type: ExternalName\nexternalName: a.example\nipFamilies: [IPv4]", `spec.ipFamilies: Forbidden: may not be set for ExternalName services`},
		{"B10 policy", "type: ExternalName\nexternalName: a.example\nipFamilyPolicy: SingleStack", `spec.ipFamilyPolicy: Forbidden: may not be set for ExternalName services`},
		{"B11 empty", "type: ExternalName", `Service "x" is invalid: spec.externalName: Required value`},
		{"B11 bad", "type: ExternalName\nexternalName: a_b", `spec.externalName: Invalid value: "a_b": a lowercase RFC 1123 subdomain must consist of`},
		{"B15", "type: NodePort\nhealthCheckNodePort: 30500\nports: [{port: 80}]", "Service \"x\" is invalid: spec.healthCheckNodePort: Invalid value: 30500: may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"},
		{"E04", "type: NodePort\nports: [{port: 80, nodePort: 25565}]", `Service "x" is invalid: spec.ports[0].nodePort: Invalid value: 25565: provided port is not in the valid range. The range of valid ports is 30000-32767`},
		{"E06", "type: NodePort\nports: [{name: a, port: 80, nodePort: 30053}, {name: b, port: 81, nodePort: 30053}]", `Service "x" is invalid: spec.ports[1].nodePort: Duplicate value: 30053`},
		{"J15", "ports: [{port: 80}]", ""},
		{"K26 loopback", web + "\nexternalIPs: [127.0.0.1]", `spec.externalIPs[0]: Invalid value: "127.0.0.1": may not be in the loopback range (127.0.0.0/8, ::1/128)`},
		{"K26 link-local", web + "\nexternalIPs: [169.254.3.4]", `spec.externalIPs[0]: Invalid value: "169.254.3.4": may not be in the link-local range (169.254.0.0/16, fe80::/10)`},
		{"K26 unspecified", web + "\nexternalIPs: [0.0.0.0]", `spec.externalIPs[0]: Invalid value: "0.0.0.0": may not be unspecified (0.0.0.0)`},
		{"K26 multicast", web + "\nexternalIPs: [224.0.0.5]", `spec.externalIPs[0]: Invalid value: "224.0.0.5": may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)`},
		{"K26 no address", web + "\nexternalIPs: [name]", `spec.externalIPs[0]: Invalid value: "name": must be a valid IP address`},
		{"source ranges", "type: LoadBalancer\nports: [{port: 80}]\nloadBalancerSourceRanges: [10.0.0.0]", `spec.LoadBalancerSourceRanges[0]: Invalid value: "10.0.0.0": must be a valid CIDR value`},
		{"policy value", "type: NodePort\nports: [{port: 80}]\nexternalTrafficPolicy: Global", `spec.externalTrafficPolicy: Unsupported value: "Global": supported values: "Cluster", "Local"`},
		{"internal policy value", web + "\ninternalTrafficPolicy: Near", `spec.internalTrafficPolicy: Unsupported value: "Near": supported values: "Cluster", "Local"`},
		{"kubelet port", "type: LoadBalancer\nports: [{port: 10250}]", `may not expose port 10250 externally since it is used by kubelet`},
		{"health check port twice", "type: LoadBalancer\nexternalTrafficPolicy: Local\nhealthCheckNodePort: 30777\nports: [{port: 80, nodePort: 30777}]", `failed to allocate requested HealthCheck NodePort 30777: provided port is already allocated`},
		{"P02", web + "\nipFamilyPolicy: RequireDualStack", `Service "x" is invalid: spec.ipFamilyPolicy: Invalid value: "RequireDualStack": this cluster is not configured for dual-stack services`},
		{"P03", web + "\nipFamilies: [IPv6]", `Service "x" is invalid: spec.ipFamilies[0]: Invalid value: "IPv6": not configured on this cluster`},
		{"P05", web + "\nipFamilyPolicy: SingleStack\nclusterIP: 10.96.0.7\nclusterIPs: [10.96.0.7, 'fd00::7']", `spec.ipFamilyPolicy: Invalid value: "SingleStack": must be 'RequireDualStack' or 'PreferDualStack' when multiple cluster IPs are specified`},
		{"P06", web + "\nclusterIP: 10.96.0.7\nclusterIPs: [10.96.0.7, 10.96.0.8]", `Service "x" is invalid: spec.clusterIPs: Invalid value: ["10.96.0.7","10.96.0.8"]: may specify no more than one IP for each IP family`},
		{"P07", web + "\nclusterIP: 10.96.0.7\nclusterIPs: [10.96.0.7, 'fd00::7', 10.96.0.8]", `Service "x" is invalid: spec.clusterIPs: Invalid value: ["10.96.0.7","fd00::7","10.96.0.8"]: may only hold up to 2 values`},
		{"P08", web + "\nclusterIP: 10.96.0.7\nclusterIPs: [10.96.0.8]", "Service \"x\" is invalid: spec.clusterIPs: Invalid value: [\"10.96.0.8\"]: first value must match `clusterIP`"},
		{"P14", web + "\nclusterIP: 10.96.0.7\nipFamilies: [IPv6]", "Service \"x\" is invalid: spec.clusterIPs[0]: Invalid value: \"10.96.0.7\": expected an IPv6 value as indicated by `ipFamilies[0]`"},
	} {
		t.Run(tc.id, func(t *testing.T) {
			if tc.want == "" {
				s := b.service("x", tc.spec)
				s.Annotations = map[string]string{corev1.DeprecatedAnnotationTopologyAwareHints: "auto", corev1.AnnotationTopologyMode: "Disabled"}
				_, err := b.create("services", s, false)
				wantError(t, err, "metadata.annotations[service.kubernetes.io/topology-mode]: Invalid value: \"Disabled\": must match annotations[service.kubernetes.io/topology-aware-hints] when both are specified")
				return
			}
			_, err := b.tryCreate("x", tc.spec)
			wantError(t, err, tc.want)
			if !apierrors.IsInvalid(err) {
				t.Errorf("the answer is %v, want 422", apierrors.ReasonForError(err))
			}
		})
	}
	if got := b.taken(); len(got) != 1 {
		t.Errorf("A17: failed creates left %q", got)
	}
}

// TestServiceAccepted creates Services that are acceptable and looks at what is
// stored.
func TestServiceAccepted(t *testing.T) {
	b := newServiceBench(t)
	for _, tc := range []struct {
		id, spec string
		check    func(t *testing.T, s *corev1.Service)
	}{
		{"A01", web, func(t *testing.T, s *corev1.Service) {
			ip := s.Spec.ClusterIP
			want := corev1.ServiceSpec{
				Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip},
				Selector:   map[string]string{"app": "web"},
				IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: ptr.To(corev1.IPFamilyPolicySingleStack),
				InternalTrafficPolicy: ptr.To(corev1.ServiceInternalTrafficPolicyCluster),
				SessionAffinity:       corev1.ServiceAffinityNone,
				Ports:                 []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP, TargetPort: intOrString(80)}},
			}
			if ip == "" || !same(s.Spec, want) || !same(s.Status, corev1.ServiceStatus{}) {
				t.Errorf("stored: %+v\n%+v", s.Spec, s.Status)
			}
		}},
		{"A05", web + "\nclusterIP: 10.96.0.50", func(t *testing.T, s *corev1.Service) {
			if s.Spec.ClusterIP != "10.96.0.50" || !slices.Equal(s.Spec.ClusterIPs, []string{"10.96.0.50"}) {
				t.Errorf("%q, %q", s.Spec.ClusterIP, s.Spec.ClusterIPs)
			}
		}},
		{"A23", "clusterIP: None\nports: []\nselector: {app: web}", func(t *testing.T, s *corev1.Service) {
			if s.Spec.ClusterIP != "None" || !slices.Equal(s.Spec.ClusterIPs, []string{"None"}) || len(s.Spec.IPFamilies) != 1 {
				t.Errorf("%+v", s.Spec)
			}
		}},
		{"A27", "ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53}]", nil},
		{"A38 default", web + "\nsessionAffinity: ClientIP", func(t *testing.T, s *corev1.Service) {
			if got := *s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds; got != 10800 {
				t.Errorf("timeout %d", got)
			}
		}},
		{"A34 with externalIPs", web + "\nexternalIPs: [203.0.113.7]\nexternalTrafficPolicy: Local", nil},
		{"B11 trailing dot", "type: ExternalName\nexternalName: a.example.", func(t *testing.T, s *corev1.Service) {
			if s.Spec.ClusterIP != "" || s.Spec.ClusterIPs != nil || s.Spec.IPFamilies != nil || s.Spec.IPFamilyPolicy != nil {
				t.Errorf("an ExternalName got addresses: %+v", s.Spec)
			}
		}},
		{"E02", "type: NodePort\nports: [{port: 80, nodePort: 32223}]", func(t *testing.T, s *corev1.Service) {
			if s.Spec.Ports[0].NodePort != 32223 || s.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyCluster {
				t.Errorf("%+v", s.Spec)
			}
		}},
		{"E05", "type: NodePort\nports: [{name: a, port: 53, protocol: UDP}, {name: b, port: 53}, {name: c, port: 54}]", func(t *testing.T, s *corev1.Service) {
			p := s.Spec.Ports
			if p[0].NodePort < 30086 || p[0].NodePort != p[1].NodePort || p[2].NodePort == p[0].NodePort {
				t.Errorf("node ports %d, %d, %d", p[0].NodePort, p[1].NodePort, p[2].NodePort)
			}
		}},
		{"E05 one given", "type: NodePort\nports: [{name: a, port: 53, protocol: UDP}, {name: b, port: 53, nodePort: 30007}]", func(t *testing.T, s *corev1.Service) {
			if p := s.Spec.Ports; p[0].NodePort != 30007 {
				t.Errorf("node ports %d, %d", p[0].NodePort, p[1].NodePort)
			}
		}},
		{"F13", "type: ExternalName\nexternalName: a.example\ninternalTrafficPolicy: Local", nil},
		{"K09", "type: LoadBalancer\nallocateLoadBalancerNodePorts: false\nports: [{name: a, port: 80}, {name: b, port: 81, nodePort: 30999}]", func(t *testing.T, s *corev1.Service) {
			if p := s.Spec.Ports; p[0].NodePort != 0 || p[1].NodePort != 30999 {
				t.Errorf("node ports %d, %d", p[0].NodePort, p[1].NodePort)
			}
		}},
		{"K18", "type: LoadBalancer\nports: [{name: a, port: 80}, {name: b, port: 80, protocol: UDP}]", nil},
		{"L01", "type: LoadBalancer\nexternalTrafficPolicy: Local\nports: [{port: 80}]", func(t *testing.T, s *corev1.Service) {
			if s.Spec.HealthCheckNodePort < 30086 || s.Spec.HealthCheckNodePort == s.Spec.Ports[0].NodePort || !*s.Spec.AllocateLoadBalancerNodePorts {
				t.Errorf("%+v", s.Spec)
			}
		}},
		{"P01", web + "\nipFamilyPolicy: PreferDualStack", func(t *testing.T, s *corev1.Service) {
			if *s.Spec.IPFamilyPolicy != corev1.IPFamilyPolicyPreferDualStack || len(s.Spec.IPFamilies) != 1 || len(s.Spec.ClusterIPs) != 1 {
				t.Errorf("%+v", s.Spec)
			}
		}},
		{"P13", "clusterIP: None\nports: [{port: 80}]", func(t *testing.T, s *corev1.Service) {
			if *s.Spec.IPFamilyPolicy != corev1.IPFamilyPolicyRequireDualStack || !slices.Equal(s.Spec.IPFamilies, []corev1.IPFamily{"IPv4", "IPv6"}) {
				t.Errorf("%v %v", *s.Spec.IPFamilyPolicy, s.Spec.IPFamilies)
			}
		}},
	} {
		t.Run(tc.id, func(t *testing.T) {
			s, err := b.tryCreate("x", tc.spec)
			if err != nil {
				t.Fatal(err)
			}
			defer b.remove("services", "x")
			if tc.check != nil {
				tc.check(t, s)
			}
			if again := b.get("services", "x").(*corev1.Service); !same(again.Spec, s.Spec) {
				t.Errorf("reads back as %+v", again.Spec)
			}
		})
	}
	if got := b.taken(); len(got) != 1 {
		t.Errorf("A16: the deletions left %q", got)
	}
}

func TestServiceName(t *testing.T) {
	b := newServiceBench(t)
	if _, err := b.tryCreate("1svc", web); err != nil {
		t.Errorf("A21: %v", err)
	}
	_, err := b.tryCreate(strings.Repeat("a", 64), web)
	wantError(t, err, "metadata.name", "must be no more than 63 characters")
}

func TestServiceWarnings(t *testing.T) {
	b := newServiceBench(t)
	for _, tc := range []struct{ id, spec, want string }{
		{"D10", "clusterIP: None\nports: [{port: 80}]\nsessionAffinity: ClientIP", "spec.SessionAffinity is ignored for headless services"},
		{"J04", web + "\ntrafficDistribution: PreferClose", `spec.trafficDistribution: "PreferClose" is deprecated; use "PreferSameZone"`},
		{"K25", web + "\nexternalIPs: [203.0.113.7]", "spec.externalIPs is deprecated and may no longer be implemented in some clusters"},
		{"B09", web + "\nexternalName: a.example", `spec.externalName is ignored when spec.type is not "ExternalName"`},
		{"headless externalIPs", "clusterIP: None\nports: [{port: 80}]\nexternalIPs: [203.0.113.7]", "spec.externalIPs is ignored for headless services"},
		{"ExternalName externalIPs", "type: ExternalName\nexternalName: a.example\nexternalIPs: [203.0.113.7]", `spec.externalIPs is ignored when spec.type is "ExternalName"`},
		{"K17", "type: LoadBalancer\nports: [{port: 80}]\nloadBalancerIP: anything", ""},
	} {
		t.Run(tc.id, func(t *testing.T) {
			b.warnings.take()
			b.mustCreate("x", tc.spec)
			b.remove("services", "x")
			var want []string
			if tc.want != "" {
				want = []string{tc.want}
			}
			if got := b.warnings.take(); !slices.Equal(got, want) {
				t.Errorf("warnings %q, want %q", got, want)
			}
		})
	}
	t.Run("J15", func(t *testing.T) {
		s := b.service("x", web)
		s.Annotations = map[string]string{corev1.DeprecatedAnnotationTopologyAwareHints: "auto"}
		if _, err := b.create("services", s, false); err != nil {
			t.Fatal(err)
		}
		want := "annotation service.kubernetes.io/topology-aware-hints is deprecated, please use service.kubernetes.io/topology-mode instead"
		if got := b.warnings.take(); !slices.Equal(got, []string{want}) {
			t.Errorf("warnings %q", got)
		}
	})
}

func TestServiceColumns(t *testing.T) {
	b := newServiceBench(t)
	status := func(ingress ...corev1.LoadBalancerIngress) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Status.LoadBalancer.Ingress = ingress }
	}
	for _, tc := range []struct {
		id, spec string
		change   func(*corev1.Service)
		want     string // type, cluster IP, external IP, ports, selector
	}{
		{"Q01 ClusterIP", web + "\nclusterIP: 10.96.0.7", nil, "ClusterIP 10.96.0.7 <none> 80/TCP app=web"},
		{"headless", "clusterIP: None", nil, "ClusterIP None <none> <none> <none>"},
		{"A27", "clusterIP: 10.96.0.7\nports: [{name: a, port: 53, protocol: UDP}, {name: b, port: 53}]", nil, "ClusterIP 10.96.0.7 <none> 53/UDP,53/TCP <none>"},
		{"E02", web + "\ntype: NodePort\nclusterIP: 10.96.0.7", func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 32223 }, "NodePort 10.96.0.7 <none> 80:32223/TCP app=web"},
		{"K01", web + "\ntype: LoadBalancer\nclusterIP: 10.96.0.7", nil, "LoadBalancer 10.96.0.7 <pending> 80/TCP app=web"},
		{"K02", web + "\ntype: LoadBalancer\nclusterIP: 10.96.0.7", status(corev1.LoadBalancerIngress{IP: "203.0.113.10"}), "LoadBalancer 10.96.0.7 203.0.113.10 80/TCP app=web"},
		{"K03", web + "\ntype: LoadBalancer\nclusterIP: 10.96.0.7", status(corev1.LoadBalancerIngress{Hostname: "b.example"}, corev1.LoadBalancerIngress{Hostname: "a.long.name.example"}, corev1.LoadBalancerIngress{Hostname: "c.example"}), "LoadBalancer 10.96.0.7 a.long.name.example,b.example,c.example 80/TCP app=web"},
		{"K27", web + "\nclusterIP: 10.96.0.7\nexternalIPs: [203.0.113.7, 203.0.113.6]", nil, "ClusterIP 10.96.0.7 203.0.113.7,203.0.113.6 80/TCP app=web"},
		{"K27 LoadBalancer", web + "\ntype: LoadBalancer\nclusterIP: 10.96.0.7\nexternalIPs: [203.0.113.7]", status(corev1.LoadBalancerIngress{IP: "203.0.113.10"}), "LoadBalancer 10.96.0.7 203.0.113.10,203.0.113.7 80/TCP app=web"},
		{"N26", "type: ExternalName\nexternalName: a.example", nil, "ExternalName <none> a.example <none> <none>"},
		{"N26 with ports", "type: ExternalName\nexternalName: a.example\nports: [{port: 80}]", nil, "ExternalName <none> a.example 80/TCP <none>"},
	} {
		t.Run(tc.id, func(t *testing.T) {
			s := b.service("x", tc.spec)
			alignClusterIPs(s, nil)
			if tc.change != nil {
				tc.change(s)
			}
			c := b.table("services", s)
			got := fmt.Sprint(c["Type"], " ", c["Cluster-IP"], " ", c["External-IP"], " ", c["Port(s)"], " ", c["Selector"])
			if got != tc.want || c["Age"] != "<unknown>" {
				t.Errorf("row %q, want %q", got, tc.want)
			}
		})
	}
}
