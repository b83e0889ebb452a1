// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// serviceBench is a bench for Services with typed calls.
type serviceBench struct{ *bench }

// newServiceBench has kube-dns on 10.96.0.10, as a lab does.
func newServiceBench(tb testing.TB) serviceBench {
	tb.Helper()
	b := serviceBench{newBench(tb, serviceDeps("10.96.0.0/12", 2768), serviceKind())}
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

func TestServiceWarnings(t *testing.T) {
	b := newServiceBench(t)
	for _, tc := range []struct{ id, spec, want string }{
		{"D10", "clusterIP: None\nports: [{port: 80}]\nsessionAffinity: ClientIP", "spec.SessionAffinity is ignored for headless services"},
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
