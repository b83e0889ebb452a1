// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"
)

func intOrString(n int32) intstr.IntOrString { return intstr.FromInt32(n) }

func same(a, b any) bool { return equality.Semantic.DeepEqual(a, b) }

// TestServiceChanges patches one Service and looks at the result.
func TestServiceChanges(t *testing.T) {
	const nodePort = "type: NodePort\nselector: {app: web}\nports: [{port: 80}]"
	const lbLocal = "type: LoadBalancer\nexternalTrafficPolicy: Local\nselector: {app: web}\nports: [{port: 80}]"
	setType := func(typ corev1.ServiceType) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.Type = typ }
	}
	for _, tc := range []struct {
		id, spec string
		change   func(s *corev1.Service)
		refused  string
		// check sees the Service before and after.
		check func(s, old *corev1.Service) error
	}{
		{id: "B01", spec: web, change: func(s *corev1.Service) { s.Spec.ClusterIP = "10.96.0.99" },
			refused: `Service "x" is invalid: spec.clusterIPs[0]: Invalid value: ["10.96.0.99"]: may not change once set`},
		{id: "B02", spec: web, change: func(s *corev1.Service) { s.Spec.ClusterIP = "None" },
			refused: `Service "x" is invalid: spec.clusterIPs[0]: Invalid value: ["None"]: may not change once set`},
		{id: "B03", spec: "clusterIP: None\n" + web, change: func(s *corev1.Service) { s.Spec.ClusterIP = "10.96.0.99" },
			refused: `spec.clusterIPs[0]: Invalid value: ["10.96.0.99"]: may not change once set`},
		{id: "B04", spec: web, change: func(s *corev1.Service) { s.Spec.ClusterIP = "" },
			check: func(s, old *corev1.Service) error { return sameSpec(s, old) }},
		{id: "B04 both", spec: web, change: func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil },
			check: func(s, old *corev1.Service) error { return sameSpec(s, old) }},
		{id: "B05", spec: web, change: setType(corev1.ServiceTypeNodePort), check: func(s, old *corev1.Service) error {
			if s.Spec.ClusterIP != old.Spec.ClusterIP || s.Spec.Ports[0].NodePort < 30086 || s.Spec.ExternalTrafficPolicy != "Cluster" {
				return fmt.Errorf("%+v", s.Spec)
			}
			return nil
		}},
		{id: "B06", spec: nodePort, change: setType(corev1.ServiceTypeClusterIP), check: func(s, old *corev1.Service) error {
			if s.Spec.ClusterIP != old.Spec.ClusterIP || s.Spec.Ports[0].NodePort != 0 || s.Spec.ExternalTrafficPolicy != "" {
				return fmt.Errorf("%+v", s.Spec)
			}
			return nil
		}},
		{id: "B07", spec: nodePort, change: func(s *corev1.Service) {
			s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeClusterIP, 30001
		}, refused: "spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"},
		{id: "B08", spec: web, change: func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "a.example"
		}, check: func(s, _ *corev1.Service) error {
			if s.Spec.ClusterIP != "" || s.Spec.ClusterIPs != nil || s.Spec.IPFamilies != nil || s.Spec.IPFamilyPolicy != nil || len(s.Spec.Selector) != 1 || len(s.Spec.Ports) != 1 {
				return fmt.Errorf("%+v", s.Spec)
			}
			return nil
		}},
		{id: "B08 headless", spec: "clusterIP: None\n" + web, change: func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "a.example"
		}, check: func(s, _ *corev1.Service) error {
			if s.Spec.ClusterIP != "" || s.Spec.ClusterIPs != nil {
				return fmt.Errorf("%+v", s.Spec)
			}
			return nil
		}},
		{id: "B09", spec: "type: ExternalName\nexternalName: a.example\nports: [{port: 80}]", change: setType(corev1.ServiceTypeClusterIP), check: func(s, _ *corev1.Service) error {
			if s.Spec.ClusterIP == "" || len(s.Spec.ClusterIPs) != 1 || len(s.Spec.IPFamilies) != 1 || s.Spec.ExternalName != "a.example" {
				return fmt.Errorf("%+v", s.Spec)
			}
			return nil
		}},
		{id: "B12", spec: "type: LoadBalancer\nloadBalancerClass: x/y\nallocateLoadBalancerNodePorts: false\nports: [{port: 80}]", change: setType(corev1.ServiceTypeClusterIP), check: func(s, _ *corev1.Service) error {
			if s.Spec.LoadBalancerClass != nil || s.Spec.AllocateLoadBalancerNodePorts != nil || s.Spec.ExternalTrafficPolicy != "" || len(s.Status.LoadBalancer.Ingress) > 0 {
				return fmt.Errorf("%+v %+v", s.Spec, s.Status)
			}
			return nil
		}},
		{id: "B13", spec: lbLocal, change: func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = "Cluster" }, check: func(s, old *corev1.Service) error {
			if s.Spec.HealthCheckNodePort != 0 || s.Spec.Ports[0].NodePort != old.Spec.Ports[0].NodePort {
				return fmt.Errorf("%+v", s.Spec)
			}
			return nil
		}},
		{id: "B14", spec: lbLocal, change: func(s *corev1.Service) { s.Spec.HealthCheckNodePort = 30001 },
			refused: `Service "x" is invalid: spec.healthCheckNodePort: Forbidden: field is immutable`},
		{id: "B16", spec: "type: LoadBalancer\nports: [{port: 80}]", change: func(s *corev1.Service) { s.Spec.LoadBalancerClass = ptr.To("x/y") },
			refused: `Service "x" is invalid: spec.loadBalancerClass: Invalid value: "x/y": may not change once set`},
		{id: "B20", spec: nodePort, change: func(s *corev1.Service) { s.Spec.Ports[0].Protocol = "UDP" }, check: func(s, old *corev1.Service) error {
			if s.Spec.Ports[0].NodePort != old.Spec.Ports[0].NodePort {
				return fmt.Errorf("%+v", s.Spec)
			}
			return nil
		}},
		{id: "B21", spec: lbLocal, change: func(s *corev1.Service) { s.Status.LoadBalancer.Ingress = nil }, check: func(s, old *corev1.Service) error {
			if !same(s.Status, old.Status) || len(old.Status.LoadBalancer.Ingress) != 1 {
				return fmt.Errorf("%+v", s.Status)
			}
			return nil
		}},
		{id: "A19", spec: lbLocal, change: func(s *corev1.Service) {
			s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.IPFamilies, s.Spec.IPFamilyPolicy = "", nil, nil, nil
			s.Spec.HealthCheckNodePort, s.Spec.Ports[0].NodePort = 0, 0
		}, check: func(s, old *corev1.Service) error { return sameSpec(s, old) }},
		{id: "A19 new port first", spec: "type: NodePort\nports: [{name: a, port: 80}, {name: b, port: 81}]", change: func(s *corev1.Service) {
			s.Spec.Ports = []corev1.ServicePort{{Name: "c", Port: 82}, {Name: "b", Port: 81}, {Name: "a", Port: 80}}
		}, check: func(s, old *corev1.Service) error {
			p, o := s.Spec.Ports, old.Spec.Ports
			if p[2].NodePort != o[0].NodePort || p[1].NodePort != o[1].NodePort || p[0].NodePort == 0 {
				return fmt.Errorf("%+v, before %+v", p, o)
			}
			return nil
		}},
		{id: "affinity off", spec: web + "\nsessionAffinity: ClientIP", change: func(s *corev1.Service) { s.Spec.SessionAffinity = "None" }, check: func(s, _ *corev1.Service) error {
			if s.Spec.SessionAffinityConfig != nil {
				return fmt.Errorf("%+v", s.Spec.SessionAffinityConfig)
			}
			return nil
		}},
		{id: "K10", spec: "type: LoadBalancer\nports: [{port: 80}]", change: func(s *corev1.Service) { s.Spec.AllocateLoadBalancerNodePorts = ptr.To(false) }, check: func(s, old *corev1.Service) error {
			if s.Spec.Ports[0].NodePort != old.Spec.Ports[0].NodePort {
				return fmt.Errorf("%+v", s.Spec)
			}
			return nil
		}},
		{id: "E03 update", spec: nodePort, change: func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 30011 },
			refused: "spec.ports[0].nodePort: Invalid value: 30011: provided port is already allocated"},
	} {
		t.Run(tc.id, func(t *testing.T) {
			b := newServiceBench(t)
			b.mustCreate("other", "type: NodePort\nports: [{port: 80, nodePort: 30011}]")
			b.mustCreate("x", tc.spec)
			old := b.get("services", "x").(*corev1.Service)
			if isLoadBalancer(old) {
				old.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.10"}}
				out, err := b.put("services/status", old)
				if err != nil {
					t.Fatal(err)
				}
				old = out.(*corev1.Service)
				if mode := old.Status.LoadBalancer.Ingress[0].IPMode; mode == nil || *mode != corev1.LoadBalancerIPModeVIP {
					t.Errorf("K02: ipMode is %v", mode)
				}
			}
			before := b.taken()
			s, err := b.tryPatch("x", tc.change)
			if tc.refused != "" {
				wantError(t, err, tc.refused)
				if after := b.taken(); !slices.Equal(before, after) {
					t.Errorf("A17: taken before %q, after %q", before, after)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := tc.check(s, old); err != nil {
				t.Error(err)
			}
			b.agree()
		})
	}
}

func sameSpec(s, old *corev1.Service) error {
	if !same(s.Spec, old.Spec) {
		return fmt.Errorf("changed to %+v\nfrom %+v", s.Spec, old.Spec)
	}
	if s.ResourceVersion != old.ResourceVersion {
		return errors.New("a change of nothing got a new resourceVersion")
	}
	return nil
}

// agree checks that what is taken is what is stored: nothing leaks and nothing is
// given out that a restart would not know of.
func (b serviceBench) agree() {
	b.t.Helper()
	fresh := newServiceAllocator(b.storages["services"].(*serviceREST).Store, serviceDeps("10.96.0.0/12", 30000, 2768))
	if _, err := fresh.open(b.ctx()); err != nil {
		b.t.Fatal(err)
	}
	var derived []string
	for _, e := range fresh.book.Taken() {
		derived = append(derived, e.String())
	}
	if got := b.taken(); !slices.Equal(got, derived) {
		b.t.Errorf("taken %q\nstored %q", got, derived)
	}
}

// TestServiceReleases lets another Service take what a change gave back.
func TestServiceReleases(t *testing.T) {
	b := newServiceBench(t)
	b.mustCreate("a", "type: NodePort\nclusterIP: 10.96.0.50\nports: [{port: 80, nodePort: 32223}]")
	_, err := b.tryCreate("b", "type: NodePort\nports: [{port: 80, nodePort: 32223}]")
	wantError(t, err, `Service "b" is invalid: spec.ports[0].nodePort: Invalid value: 32223: provided port is already allocated`)
	_, err = b.tryCreate("b", "type: NodePort\nports: [{port: 80, protocol: UDP, nodePort: 32223}]")
	wantError(t, err, "provided port is already allocated") // E07

	b.mustPatch("a", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP })
	b.mustCreate("b", "type: NodePort\nports: [{port: 80, nodePort: 32223}]") // B06
	b.mustPatch("a", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "a.example"
	})
	b.mustCreate("c", web+"\nclusterIP: 10.96.0.50") // B08
	b.remove("services", "c")
	b.mustCreate("d", web+"\nclusterIP: 10.96.0.50") // A16
	_, err = b.tryCreate("e", "type: NodePort\nclusterIP: 10.96.0.51\nports: [{port: 80, nodePort: 32223}]")
	wantError(t, err, "provided port is already allocated")
	b.mustCreate("f", web+"\nclusterIP: 10.96.0.51") // A17

	lb := b.mustCreate("g", "type: LoadBalancer\nexternalTrafficPolicy: Local\nports: [{port: 80}]")
	health := lb.Spec.HealthCheckNodePort
	b.mustPatch("g", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = "Cluster" })
	b.mustCreate("h", fmt.Sprintf("type: NodePort\nports: [{port: 80, nodePort: %d}]", health)) // B13
	b.agree()
}

func TestServiceDryRun(t *testing.T) {
	b := newServiceBench(t)
	before := b.taken()
	out, err := b.create("services", b.service("x", "type: NodePort\n"+web), true)
	if err != nil {
		t.Fatal(err)
	}
	if s := out.(*corev1.Service); s.Spec.ClusterIP != "10.96.0.0" || s.Spec.Ports[0].NodePort == 0 {
		t.Errorf("A18: %+v", s.Spec)
	}
	if _, err := b.create("services", b.service("x", web+"\nclusterIP: 10.96.0.10"), true); err != nil {
		t.Errorf("A18: an address in use is not detected in a dry run, got %v", err)
	}
	if _, err := b.create("services", b.service("x", "type: NodePort\nports: [{name: a, port: 80}, {name: b, port: 81}, {name: c, port: 82, nodePort: 30000}]"), true); err != nil {
		t.Errorf("A18: several ports: %v", err)
	}
	s := b.get("services", "kube-dns").(*corev1.Service)
	s.Spec.Type = corev1.ServiceTypeNodePort
	b.scheme.Default(s)
	_, _, err = b.storages["services"].(rest.Updater).Update(b.ctx(), s.Name, rest.DefaultUpdatedObjectInfo(s), nil, nil, false, &metav1.UpdateOptions{DryRun: dryRun(true)})
	if err != nil {
		t.Error(err)
	}
	_, _, err = b.storages["services"].(rest.GracefulDeleter).Delete(b.ctx(), "kube-dns", rest.ValidateAllObjectFunc, &metav1.DeleteOptions{DryRun: dryRun(true)})
	if err != nil {
		t.Error(err)
	}
	if after := b.taken(); !slices.Equal(before, after) {
		t.Errorf("taken before %q, after %q", before, after)
	}
}

func TestServiceRangesFull(t *testing.T) {
	b := serviceBench{newBench(t, serviceDeps("10.96.0.0/29", 30000, 3), serviceKind())}
	for i := range 6 {
		b.mustCreate(fmt.Sprint("s", i), web)
	}
	_, err := b.tryCreate("x", web)
	wantError(t, err, "Internal error occurred: failed to allocate a serviceIP: range is full")
	if !apierrors.IsInternalError(err) {
		t.Errorf("A10: %v is not a 500", err)
	}
	b.remove("services", "s0")
	for i := range 3 {
		b.mustPatch(fmt.Sprint("s", i+1), func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	}
	_, err = b.tryCreate("x", "type: NodePort\nports: [{port: 80}]")
	wantError(t, err, "Internal error occurred: failed to allocate a nodePort: range is full")
	if !apierrors.IsInternalError(err) {
		t.Errorf("E08: %v is not a 500", err)
	}
	b.mustCreate("x", web) // the failed create gave its address back
}

// TestServiceCreateByPut uses the two ways in which a PUT meets no object.
func TestServiceCreateByPut(t *testing.T) {
	b := newServiceBench(t)
	if _, err := b.put("services", b.service("x", "type: NodePort\n"+web)); err != nil {
		t.Fatal(err)
	}
	_, err := b.put("services", b.service("other", web+"\nclusterIP: 10.96.0.10"))
	wantError(t, err, "provided IP is already allocated")
	stale := b.get("services", "x").(*corev1.Service)
	b.mustPatch("x", func(s *corev1.Service) { s.Labels = map[string]string{"a": "b"} })
	stale.Labels = map[string]string{"a": "c"}
	_, err = b.put("services", stale)
	wantError(t, err, `Operation cannot be fulfilled on services "x": the object has been modified; please apply your changes to the latest version and try again`) // A41
	b.agree()
}

func TestServiceStatusRefused(t *testing.T) {
	b := newServiceBench(t)
	b.mustCreate("lb", "type: LoadBalancer\n"+web)
	for _, tc := range []struct {
		id, name string
		ingress  corev1.LoadBalancerIngress
		want     string
	}{
		{"K20", "lb", corev1.LoadBalancerIngress{IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)}, "status.loadBalancer.ingress[0].ipMode: Forbidden: may not be specified when `ip` is not set"},
		{"ipMode value", "lb", corev1.LoadBalancerIngress{IP: "203.0.113.1", IPMode: ptr.To(corev1.LoadBalancerIPMode("Nat"))}, `status.loadBalancer.ingress[0].ipMode: Unsupported value: "Nat": supported values: "Proxy", "VIP"`},
		{"address as name", "lb", corev1.LoadBalancerIngress{Hostname: "203.0.113.1"}, "status.loadBalancer.ingress[0].hostname: Invalid value: \"203.0.113.1\": must be a DNS name, not an IP address"},
		{"no load balancer", "kube-dns", corev1.LoadBalancerIngress{IP: "203.0.113.1"}, "status.loadBalancer.ingress: Forbidden: may only be used when `spec.type` is \"LoadBalancer\""},
	} {
		t.Run(tc.id, func(t *testing.T) {
			s := b.get("services", tc.name).(*corev1.Service)
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{tc.ingress}
			_, err := b.put("services/status", s)
			wantError(t, err, tc.want)
		})
	}
}

// TestServiceParallel creates and deletes from many sides, and compares with a
// restart (A02, E01: random picks out of the upper bands).
func TestServiceParallel(t *testing.T) {
	b := newServiceBench(t)
	var wg sync.WaitGroup
	for w := range 64 {
		wg.Go(func() {
			for i := range 3 {
				name := fmt.Sprintf("s-%d-%d", w, i)
				s, err := b.tryCreate(name, "type: NodePort\n"+web)
				if err != nil {
					t.Error(err)
					continue
				}
				if i == 1 {
					b.remove("services", name)
				}
				if port := s.Spec.Ports[0].NodePort; port < 30086 || strings.HasPrefix(s.Spec.ClusterIP, "10.96.0.") {
					t.Errorf("%s got %s and %d", name, s.Spec.ClusterIP, port)
				}
			}
		})
	}
	wg.Wait()
	b.agree()
	seen := map[string]bool{}
	for _, line := range b.taken() {
		value, _, _ := strings.Cut(line, " ")
		if seen[value] {
			t.Errorf("%s has two owners", value)
		}
		seen[value] = true
	}
	if want := 1 + 64*2*2; len(seen) != want {
		t.Errorf("%d values are taken, want %d", len(seen), want)
	}
}

// TestServiceContended changes one Service from many sides without a version, so
// that writes lose to one another and start over with new picks.
func TestServiceContended(t *testing.T) {
	b := newServiceBench(t)
	b.mustCreate("x", web)
	types := []corev1.ServiceType{corev1.ServiceTypeNodePort, corev1.ServiceTypeClusterIP, corev1.ServiceTypeLoadBalancer}
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			for i := range 8 {
				s := b.service("x", web)
				s.Spec.Type = types[(w+i)%len(types)]
				s.Labels = map[string]string{"by": fmt.Sprintf("%d-%d", w, i)}
				if _, err := b.put("services", s); err != nil && !apierrors.IsInvalid(err) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	b.agree()
	for _, line := range b.taken() {
		if strings.Contains(line, "in flight") {
			t.Errorf("nobody writes any more: %s", line)
		}
	}
}

// TestServiceRestart closes the store and opens it again, as a crash would.
func TestServiceRestart(t *testing.T) {
	b := newServiceBench(t)
	b.mustCreate("a", "type: NodePort\n"+web)
	b.mustCreate("b", "type: LoadBalancer\nexternalTrafficPolicy: Local\n"+web)
	before := b.taken()
	if err := b.db.Close(); err != nil {
		t.Fatal(err)
	}
	again := serviceBench{openBench(t, b.path, serviceDeps("10.96.0.0/12", 30000, 2768), serviceKind())}
	if after := again.taken(); !slices.Equal(before, after) {
		t.Errorf("before %q, after %q", before, after)
	}
	_, err := again.tryCreate("x", web+"\nclusterIP: 10.96.0.10")
	wantError(t, err, "provided IP is already allocated")
}

func TestServiceRangeUnusable(t *testing.T) {
	deps := serviceDeps("10.96.0.0/32", 30000, 2768)
	if err := CheckServiceRanges(deps); err == nil {
		t.Error("a range without an address was accepted")
	}
	b := serviceBench{newBench(t, deps, serviceKind())}
	_, err := b.tryCreate("x", web)
	wantError(t, err, "no Service can be written", "holds no usable address; use a wider one")
}
