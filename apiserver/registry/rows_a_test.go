// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"
)

// TestRowsA is about allocation, defaults and uniqueness.
func TestRowsA(t *testing.T) {
	runServiceCases(t, []serviceCase{
		{row: "A01", spec: web, want: func(s, _ *corev1.Service) error {
			ip := s.Spec.ClusterIP
			want := corev1.ServiceSpec{
				Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip},
				Selector:   map[string]string{"app": "web"},
				IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: ptr.To(corev1.IPFamilyPolicySingleStack),
				InternalTrafficPolicy: ptr.To(corev1.ServiceInternalTrafficPolicyCluster),
				SessionAffinity:       corev1.ServiceAffinityNone,
				Ports:                 []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(80)}},
			}
			return check(ip != "" && same(s.Spec, want) && same(s.Status, corev1.ServiceStatus{}), "%+v %+v", s.Spec, s.Status)
		}},
		{row: "A02", do: func(t *testing.T, b serviceBench) {
			var ips []netip.Addr
			for i := range 50 {
				ips = append(ips, netip.MustParseAddr(b.mustCreate(fmt.Sprint("s", i), web).Spec.ClusterIP))
			}
			if low := slices.MinFunc(ips, netip.Addr.Compare); low.Less(netip.MustParseAddr("10.96.1.1")) || slices.IsSortedFunc(ips, netip.Addr.Compare) {
				t.Errorf("lowest %s, all %v", low, ips)
			}
		}},
		{row: "A03 /24", deps: serviceDeps("10.96.0.0/24", 2768), do: func(t *testing.T, b serviceBench) {
			for i := range 100 {
				if ip := b.mustCreate(fmt.Sprint("s", i), web).Spec.ClusterIP; netip.MustParseAddr(ip).Less(netip.MustParseAddr("10.96.0.17")) {
					t.Errorf("%s is one of the first 16", ip)
				}
			}
		}},
		{row: "A03 /28", deps: serviceDeps("10.96.0.0/28", 2768), do: func(t *testing.T, b serviceBench) {
			for i := range 14 {
				b.mustCreate(fmt.Sprint("s", i), web)
			}
		}},
		{row: "A04", deps: serviceDeps("10.96.0.0/27", 2768), do: func(t *testing.T, b serviceBench) {
			for i := range 14 {
				if ip := b.mustCreate(fmt.Sprint("s", i), web).Spec.ClusterIP; netip.MustParseAddr(ip).Less(netip.MustParseAddr("10.96.0.17")) {
					t.Errorf("%s is in the lower band, the upper one has room", ip)
				}
			}
			if ip := b.mustCreate("x", web).Spec.ClusterIP; !netip.MustParseAddr(ip).Less(netip.MustParseAddr("10.96.0.17")) {
				t.Errorf("%s was given out twice", ip)
			}
		}},
		{row: "A05", spec: web + "\nclusterIP: 10.96.0.50", want: func(s, _ *corev1.Service) error {
			return check(s.Spec.ClusterIP == "10.96.0.50" && slices.Equal(s.Spec.ClusterIPs, []string{"10.96.0.50"}), "%q, %q", s.Spec.ClusterIP, s.Spec.ClusterIPs)
		}},
		{row: "A06", spec: web + "\nclusterIP: 10.96.0.10",
			refused: `Service "x" is invalid: spec.clusterIPs: Invalid value: ["10.96.0.10"]: failed to allocate IP 10.96.0.10: provided IP is already allocated`},
		{row: "A07", spec: web + "\nclusterIP: 10.0.0.9",
			refused: `Service "x" is invalid: spec.clusterIPs: Invalid value: ["10.0.0.9"]: failed to allocate IP 10.0.0.9: the provided network does not match the current range`},
		{row: "A08", spec: web + "\nclusterIP: 10.96.0.x",
			refused: `Service "x" is invalid: spec.clusterIPs[0]: Invalid value: "10.96.0.x": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)`},
		{row: "A08 leading zeros", spec: web + "\nclusterIP: 010.96.0.1",
			refused: `spec.clusterIPs[0]: Invalid value: "010.96.0.1": must not have leading 0s`},
		{row: "A09 network", spec: web + "\nclusterIP: 10.96.0.0", refused: `failed to allocate IP 10.96.0.0: the provided network does not match the current range`},
		{row: "A09 broadcast", spec: web + "\nclusterIP: 10.111.255.255", refused: `failed to allocate IP 10.111.255.255: the provided network does not match the current range`},
		{row: "A10", deps: serviceDeps("10.96.0.0/30", 2768), do: func(t *testing.T, b serviceBench) {
			b.mustCreate("a", web)
			b.mustCreate("b", web)
			_, err := b.tryCreate("x", web)
			wantError(t, err, "Internal error occurred: failed to allocate a serviceIP: range is full")
			if !apierrors.IsInternalError(err) {
				t.Errorf("%v is not a 500", err)
			}
			b.remove("services", "a")
			b.mustCreate("x", web)
		}},
		{row: "A16", do: func(_ *testing.T, b serviceBench) {
			b.mustCreate("a", web+"\nclusterIP: 10.96.0.50")
			b.remove("services", "a")
			b.mustCreate("b", web+"\nclusterIP: 10.96.0.50")
		}},
		{row: "A17", do: func(t *testing.T, b serviceBench) {
			_, err := b.tryCreate("a", "type: NodePort\nclusterIP: 10.96.0.51\nports: [{port: 80, nodePort: 80}]")
			wantError(t, err, "provided port is not in the valid range")
			b.mustCreate("b", web+"\nclusterIP: 10.96.0.51")
		}},
		{row: "A18", do: dryRuns},
		{row: "A19", spec: lbLocal, then: func(s *corev1.Service) {
			s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.IPFamilies, s.Spec.IPFamilyPolicy = "", nil, nil, nil
			s.Spec.HealthCheckNodePort, s.Spec.Ports[0].NodePort = 0, 0
		}, want: unchanged},
		{row: "A19 new port first", spec: "type: NodePort\nports: [{name: a, port: 80}, {name: b, port: 81}]", then: func(s *corev1.Service) {
			s.Spec.Ports = []corev1.ServicePort{{Name: "c", Port: 82}, {Name: "b", Port: 81}, {Name: "a", Port: 80}}
		}, want: func(s, old *corev1.Service) error {
			p, o := s.Spec.Ports, old.Spec.Ports
			return check(p[2].NodePort == o[0].NodePort && p[1].NodePort == o[1].NodePort && p[0].NodePort != 0, "%+v, before %+v", p, o)
		}},
		{row: "A21", do: func(t *testing.T, b serviceBench) {
			b.mustCreate("1svc", web)
			_, err := b.tryCreate(strings.Repeat("a", 64), web)
			wantError(t, err, "metadata.name", "must be no more than 63 characters")
		}},
		{row: "A22", spec: "selector: {app: web}\nports: []", refused: `Service "x" is invalid: spec.ports: Required value`},
		{row: "A23", spec: "clusterIP: None\nports: []\nselector: {app: web}", want: func(s, _ *corev1.Service) error {
			return check(s.Spec.ClusterIP == "None" && slices.Equal(s.Spec.ClusterIPs, []string{"None"}) && len(s.Spec.IPFamilies) == 1, "%+v", s.Spec)
		}},
		{row: "A24", spec: "ports: [{port: 80, name: http}, {port: 443}]", refused: `Service "x" is invalid: spec.ports[1].name: Required value`},
		{row: "A25", spec: "ports: [{port: 80, name: http}, {port: 443, name: http}]", refused: `Service "x" is invalid: spec.ports[1].name: Duplicate value: "http"`},
		{row: "A26", spec: "ports: [{port: 80, name: a}, {port: 80, name: b}]",
			refused: `Service "x" is invalid: spec.ports[1]: Duplicate value: {"Name":"","Protocol":"TCP","AppProtocol":null,"Port":80,"TargetPort":0,"NodePort":0}`},
		{row: "A27", spec: "ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53}]"},
		{row: "A28", spec: "ports: [{port: 80, protocol: ICMP}]",
			refused: `Service "x" is invalid: spec.ports[0].protocol: Unsupported value: "ICMP": supported values: "SCTP", "TCP", "UDP"`},
		{row: "A29", spec: "ports: [{port: 70000, targetPort: 80}]", refused: `Service "x" is invalid: spec.ports[0].port: Invalid value: 70000: must be between 1 and 65535, inclusive`},
		{row: "A29 zero", spec: "ports: [{port: 0, targetPort: 80}]", refused: `spec.ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive`},
		// Both the port and the target port that follows it are out of range.
		{row: "A29 two errors", spec: "ports: [{port: 70000}]",
			refused: `Service "x" is invalid: [spec.ports[0].port: Invalid value: 70000: must be between 1 and 65535, inclusive, spec.ports[0].targetPort: Invalid value: 70000: must be between 1 and 65535, inclusive]`},
		{row: "A30", spec: "ports: [{port: 80, targetPort: a-name-that-is-too-long}]",
			refused: `Service "x" is invalid: spec.ports[0].targetPort: Invalid value: "a-name-that-is-too-long": must be no more than 15 characters`},
		{row: "A30 upper case", spec: "ports: [{port: 80, targetPort: HTTP}]",
			refused: `spec.ports[0].targetPort: Invalid value: "HTTP": must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)`},
		{row: "A30 no letter", spec: "ports: [{port: 80, targetPort: '1234'}]",
			refused: `spec.ports[0].targetPort: Invalid value: "1234": must contain at least one letter (a-z)`},
		{row: "A31", spec: "type: Foo\nports: [{port: 80}]",
			refused: `spec.type: Unsupported value: "Foo": supported values: "ClusterIP", "ExternalName", "LoadBalancer", "NodePort"`},
		{row: "A32", spec: "ports: [{port: 80, nodePort: 30080}]",
			refused: "Service \"x\" is invalid: spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"},
		{row: "A33", spec: "type: NodePort\nclusterIP: None\nports: [{port: 80}]",
			refused: `Service "x" is invalid: spec.clusterIPs[0]: Invalid value: "None": may not be set to 'None' for NodePort services`},
		{row: "A33 LoadBalancer", spec: "type: LoadBalancer\nclusterIP: None\nports: [{port: 80}]",
			refused: `spec.clusterIPs[0]: Invalid value: "None": may not be set to 'None' for LoadBalancer services`},
		{row: "A34", spec: web + "\nexternalTrafficPolicy: Local",
			refused: `Service "x" is invalid: spec.externalTrafficPolicy: Invalid value: "Local": may only be set for externally-accessible services`},
		{row: "A34 with externalIPs", spec: web + "\nexternalIPs: [203.0.113.7]\nexternalTrafficPolicy: Local", warned: []string{externalIPsDeprecated}},
		{row: "A34 value", spec: "type: NodePort\nports: [{port: 80}]\nexternalTrafficPolicy: Global",
			refused: `spec.externalTrafficPolicy: Unsupported value: "Global": supported values: "Cluster", "Local"`},
		{row: "A34 internal", spec: web + "\ninternalTrafficPolicy: Near", refused: `spec.internalTrafficPolicy: Unsupported value: "Near": supported values: "Cluster", "Local"`},
		{row: "A35", spec: web + "\nloadBalancerSourceRanges: [10.0.0.0/8]",
			refused: "Service \"x\" is invalid: spec.LoadBalancerSourceRanges: Forbidden: may only be used when `type` is 'LoadBalancer'"},
		{row: "A35 annotation", spec: web, annotations: map[string]string{corev1.AnnotationLoadBalancerSourceRangesKey: "10.0.0.0/8"},
			refused: "metadata.annotations[service.beta.kubernetes.io/load-balancer-source-ranges]: Forbidden: may only be used when `type` is 'LoadBalancer'"},
		{row: "A35 no range", spec: "type: LoadBalancer\nports: [{port: 80}]\nloadBalancerSourceRanges: [10.0.0.0]",
			refused: `spec.LoadBalancerSourceRanges[0]: Invalid value: "10.0.0.0": must be a valid CIDR value`},
		{row: "A35 padded", spec: "type: LoadBalancer\nports: [{port: 80}]\nloadBalancerSourceRanges: [' 10.0.0.0/8 ']"},
		{row: "A36 allocate", spec: web + "\nallocateLoadBalancerNodePorts: false", refused: "spec.allocateLoadBalancerNodePorts: Forbidden: may only be used when `type` is 'LoadBalancer'"},
		{row: "A36 class", spec: web + "\nloadBalancerClass: x/y", refused: "spec.loadBalancerClass: Forbidden: may only be used when `type` is 'LoadBalancer'"},
		// The defaults drop the configuration before validation could refuse it.
		{row: "A37", spec: web + "\nsessionAffinity: None\nsessionAffinityConfig: {clientIP: {timeoutSeconds: 5}}", want: func(s, _ *corev1.Service) error {
			return check(s.Spec.SessionAffinityConfig == nil, "%+v", s.Spec.SessionAffinityConfig)
		}},
		{row: "A37 turned off", spec: web + "\nsessionAffinity: ClientIP", then: func(s *corev1.Service) { s.Spec.SessionAffinity = "None" }, want: func(s, _ *corev1.Service) error {
			return check(s.Spec.SessionAffinityConfig == nil, "%+v", s.Spec.SessionAffinityConfig)
		}},
		{row: "A37 value", spec: web + "\nsessionAffinity: Cookie", refused: `spec.sessionAffinity: Unsupported value: "Cookie": supported values: "ClientIP", "None"`},
		{row: "A38 zero", spec: web + "\nsessionAffinity: ClientIP\nsessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}",
			refused: `Service "x" is invalid: spec.sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value: 0: must be greater than 0 and less than 86400`},
		{row: "A38 more than a day", spec: web + "\nsessionAffinity: ClientIP\nsessionAffinityConfig: {clientIP: {timeoutSeconds: 86401}}",
			refused: `spec.sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value: 86401: must be greater than 0 and less than 86400`},
		{row: "A38 a day", spec: web + "\nsessionAffinity: ClientIP\nsessionAffinityConfig: {clientIP: {timeoutSeconds: 86400}}"},
		{row: "A38 default", spec: web + "\nsessionAffinity: ClientIP", want: func(s, _ *corev1.Service) error {
			return check(*s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds == 10800, "%+v", s.Spec.SessionAffinityConfig.ClientIP)
		}},
		{row: "A39", spec: web + "\ntrafficDistribution: Fast",
			refused: `Service "x" is invalid: spec.trafficDistribution: Unsupported value: "Fast": supported values: "PreferClose", "PreferSameNode", "PreferSameZone"`},
		{row: "A39 PreferClose", spec: web + "\ntrafficDistribution: PreferClose",
			warned: []string{`spec.trafficDistribution: "PreferClose" is deprecated; use "PreferSameZone"`}},
		{row: "A39 PreferSameNode", spec: web + "\ntrafficDistribution: PreferSameNode"},
		{row: "A41", do: func(t *testing.T, b serviceBench) {
			b.mustCreate("x", web)
			stale := b.get("services", "x").(*corev1.Service)
			b.mustPatch("x", func(s *corev1.Service) { s.Labels = map[string]string{"a": "b"} })
			stale.Labels = map[string]string{"a": "c"}
			_, err := b.put("services", stale)
			wantError(t, err, `Operation cannot be fulfilled on services "x": the object has been modified; please apply your changes to the latest version and try again`)
			if !apierrors.IsConflict(err) {
				t.Errorf("%v is not a 409", err)
			}
		}},
	})
}

const externalIPsDeprecated = "spec.externalIPs is deprecated and may no longer be implemented in some clusters"

const lbLocal = "type: LoadBalancer\nexternalTrafficPolicy: Local\nselector: {app: web}\nports: [{port: 80}]"

func check(ok bool, format string, args ...any) error {
	if ok {
		return nil
	}
	return fmt.Errorf(format, args...)
}

// unchanged is the expectation that a change of nothing writes nothing.
func unchanged(s, old *corev1.Service) error {
	if !same(s.Spec, old.Spec) {
		return fmt.Errorf("changed to %+v\nfrom %+v", s.Spec, old.Spec)
	}
	if s.ResourceVersion != old.ResourceVersion {
		return errors.New("a change of nothing got a new resourceVersion")
	}
	return nil
}

func dryRuns(t *testing.T, b serviceBench) {
	b.mustCreate("kube-dns", "clusterIP: 10.96.0.10\nports: [{name: dns, port: 53, protocol: UDP}]")
	before := b.taken()
	out, err := b.create("services", b.service("x", "type: NodePort\n"+web), true)
	if err != nil {
		t.Fatal(err)
	}
	if s := out.(*corev1.Service); s.Spec.ClusterIP != "10.96.0.0" || s.Spec.Ports[0].NodePort == 0 {
		t.Errorf("%+v", s.Spec)
	}
	if _, err := b.create("services", b.service("x", web+"\nclusterIP: 10.96.0.10"), true); err != nil {
		t.Errorf("an address in use is not detected in a dry run, got %v", err)
	}
	_, err = b.create("services", b.service("x", web+"\nclusterIP: 10.0.0.9"), true)
	wantError(t, err, "failed to allocate IP 10.0.0.9: the provided IP (10.0.0.9) is not in the valid range. The range of valid IPs is 10.96.0.0/12")
	if _, err := b.create("services", b.service("x", "type: NodePort\nports: [{name: a, port: 80}, {name: b, port: 81}, {name: c, port: 82, nodePort: 30000}]"), true); err != nil {
		t.Errorf("several ports: %v", err)
	}
	if _, err := b.storages["services"].(rest.Getter).Get(b.ctx(), "x", &metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a dry run stored something: %v", err)
	}
	update := func(change func(*corev1.Service)) {
		t.Helper()
		s := b.get("services", "kube-dns").(*corev1.Service)
		change(s)
		b.scheme.Default(s)
		if _, _, err := b.storages["services"].(rest.Updater).Update(b.ctx(), s.Name, rest.DefaultUpdatedObjectInfo(runtime.Object(s)), nil, nil, false, &metav1.UpdateOptions{DryRun: dryRun(true)}); err != nil {
			t.Error(err)
		}
	}
	update(func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	update(func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "a.example"
	})
	if _, _, err := b.storages["services"].(rest.GracefulDeleter).Delete(b.ctx(), "kube-dns", rest.ValidateAllObjectFunc, &metav1.DeleteOptions{DryRun: dryRun(true)}); err != nil {
		t.Error(err)
	}
	if after := b.taken(); !slices.Equal(before, after) {
		t.Errorf("taken before %q, after %q", before, after)
	}
}
