// SPDX-License-Identifier: Apache-2.0

package endpointslice

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/loop"
)

// bench is the controller over caches that the test fills, so that each sync is
// the test's own step.
type bench struct {
	t       *testing.T
	c       *Controller
	client  *fake.Clientset
	factory informers.SharedInformerFactory
	events  *record.FakeRecorder
	writes  int // of slices
	fail    error
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{t: t, client: fake.NewClientset(), events: record.NewFakeRecorder(100)}
	made, generation := 0, int64(0)
	b.client.PrependReactor("*", "endpointslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if a.GetVerb() == "list" || a.GetVerb() == "watch" || a.GetVerb() == "get" {
			return false, nil, nil
		}
		if b.fail != nil {
			return true, nil, b.fail
		}
		b.writes++
		// A server gives names, and counts generations.
		if c, ok := a.(clienttesting.CreateAction); ok && a.GetVerb() == "create" {
			s := c.GetObject().(*discoveryv1.EndpointSlice)
			made++
			s.Name, s.UID = fmt.Sprintf("%s%03d", s.GenerateName, made), types.UID(fmt.Sprint("slice", made))
		}
		if u, ok := a.(clienttesting.UpdateAction); ok && a.GetVerb() != "delete" {
			generation++
			u.GetObject().(*discoveryv1.EndpointSlice).Generation = generation
		}
		return false, nil, nil
	})
	b.factory = informers.NewSharedInformerFactory(b.client, 0)
	b.c = New(loop.Deps{Client: b.client, Informers: b.factory, Recorder: func(string) record.EventRecorder { return b.events }})
	for zone, names := range map[string][]string{"a": {"n1", "n2"}, "b": {"n3"}} {
		for _, name := range names {
			b.put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelTopologyZone: zone}}})
		}
	}
	return b
}

// put puts an object into the cache of its kind.
func (b *bench) put(obj runtime.Object) {
	b.t.Helper()
	core := b.factory.Core().V1()
	var err error
	switch o := obj.(type) {
	case *corev1.Service:
		err = core.Services().Informer().GetIndexer().Add(o)
	case *corev1.Pod:
		err = core.Pods().Informer().GetIndexer().Add(o)
	case *corev1.Node:
		err = core.Nodes().Informer().GetIndexer().Add(o)
	default:
		b.t.Fatalf("a %T", obj)
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) forget(pod *corev1.Pod) {
	b.t.Helper()
	if err := b.factory.Core().V1().Pods().Informer().GetIndexer().Delete(pod); err != nil {
		b.t.Fatal(err)
	}
}

// sync lets the controller look at the Service web once, and its cache catch up.
// It returns the slices, by name.
func (b *bench) sync() []discoveryv1.EndpointSlice {
	b.t.Helper()
	if err := b.c.sync(b.t.Context(), loop.Key{Namespace: "ns", Name: "web"}); err != nil && b.fail == nil {
		b.t.Fatal(err)
	}
	list, err := b.client.DiscoveryV1().EndpointSlices("ns").List(b.t.Context(), metav1.ListOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	var cached []any
	for i := range list.Items {
		cached = append(cached, &list.Items[i])
	}
	if err := b.factory.Discovery().V1().EndpointSlices().Informer().GetIndexer().Replace(cached, ""); err != nil {
		b.t.Fatal(err)
	}
	slices.SortFunc(list.Items, func(x, y discoveryv1.EndpointSlice) int { return strings.Compare(x.Name, y.Name) })
	return list.Items
}

func service(change ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "ns", UID: "svc", Labels: map[string]string{"team": "a"}, CreationTimestamp: metav1.Now()},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.9", ClusterIPs: []string{"10.96.0.9"}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Selector: map[string]string{"app": "web"},
			Ports:    []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(8080)}},
		},
	}
	for _, f := range change {
		f(s)
	}
	return s
}

func pod(n int, change ...func(*corev1.Pod)) *corev1.Pod {
	ip := fmt.Sprintf("10.244.%d.%d", n/200, n%200+1)
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("p%04d", n), Namespace: "ns", UID: types.UID(fmt.Sprint("pod", n)), Labels: map[string]string{"app": "web"}},
		Spec:       corev1.PodSpec{NodeName: []string{"n1", "n2", "n3"}[n%3]},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}},
		},
	}
	for _, f := range change {
		f(p)
	}
	return p
}

func notReady(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }

func leaving(p *corev1.Pod) { now := metav1.Now(); p.DeletionTimestamp = &now }

// TestRowsI is about what is in slices.
func TestRowsI(t *testing.T) {
	for _, tc := range []struct {
		row string
		run func(t *testing.T, b *bench)
	}{
		{"I01", func(t *testing.T, b *bench) {
			b.put(service())
			b.put(pod(1))
			s := b.sync()[0]
			owner := metav1.GetControllerOf(&s)
			if s.GenerateName != "web-" || s.Labels[discoveryv1.LabelServiceName] != "web" || s.Labels[discoveryv1.LabelManagedBy] != "endpointslice-controller.k8s.io" ||
				s.Labels["team"] != "a" || owner == nil || owner.Kind != "Service" || owner.UID != "svc" {
				t.Errorf("%+v", s.ObjectMeta)
			}
			if _, headless := s.Labels[corev1.IsHeadlessService]; headless {
				t.Error("marked as headless")
			}
		}},
		{"I01 headless", func(t *testing.T, b *bench) {
			b.put(service(func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"} }))
			b.put(pod(1))
			if v, ok := b.sync()[0].Labels[corev1.IsHeadlessService]; !ok || v != "" {
				t.Errorf("label %q, %t", v, ok)
			}
		}},
		{"I02", func(t *testing.T, b *bench) {
			b.put(service())
			b.put(pod(2))
			e := b.sync()[0].Endpoints[0]
			if len(e.Addresses) != 1 || e.Addresses[0] != "10.244.0.3" || *e.NodeName != "n3" || *e.Zone != "b" || e.Hostname != nil ||
				e.TargetRef.Kind != "Pod" || e.TargetRef.Name != "p0002" || e.TargetRef.Namespace != "ns" || e.TargetRef.UID != "pod2" {
				t.Errorf("%+v", e)
			}
		}},
		{"I02 conditions", func(t *testing.T, b *bench) {
			for _, c := range []struct {
				name    string
				publish bool
				change  []func(*corev1.Pod)
				want    string // ready serving terminating
			}{
				{"ready", false, nil, "true true false"},
				{"not ready", false, []func(*corev1.Pod){notReady}, "false false false"},
				{"ready and leaving", false, []func(*corev1.Pod){leaving}, "false true true"},
				{"not ready and leaving", false, []func(*corev1.Pod){notReady, leaving}, "false false true"},
				{"not ready, published", true, []func(*corev1.Pod){notReady}, "true false false"},
				{"leaving, published", true, []func(*corev1.Pod){leaving}, "true true true"},
			} {
				b.put(service(func(s *corev1.Service) { s.Spec.PublishNotReadyAddresses = c.publish }))
				b.put(pod(1, c.change...))
				got := b.sync()[0].Endpoints[0].Conditions
				if text := fmt.Sprint(*got.Ready, " ", *got.Serving, " ", *got.Terminating); text != c.want {
					t.Errorf("%s: %s, want %s", c.name, text, c.want)
				}
			}
		}},
		{"I02 finished", func(t *testing.T, b *bench) {
			b.put(service())
			b.put(pod(1, func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }))
			b.put(pod(2, func(p *corev1.Pod) { p.Status.PodIP, p.Status.PodIPs = "", nil }))
			if s := b.sync(); len(s[0].Endpoints) != 0 {
				t.Errorf("%+v", s[0].Endpoints)
			}
		}},
		{"I03", func(t *testing.T, b *bench) {
			b.put(service(func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"} }))
			b.put(pod(1, func(p *corev1.Pod) { p.Spec.Hostname, p.Spec.Subdomain = "web-0", "web" }))
			b.put(pod(2, func(p *corev1.Pod) { p.Spec.Hostname, p.Spec.Subdomain = "web-1", "other" }))
			got := map[string]string{}
			for _, e := range b.sync()[0].Endpoints {
				got[e.TargetRef.Name] = ptr.Deref(e.Hostname, "-")
			}
			if got["p0001"] != "web-0" || got["p0002"] != "-" {
				t.Errorf("%v", got)
			}
		}},
		{"I04", func(t *testing.T, b *bench) {
			b.put(service())
			for i := range 250 {
				b.put(pod(i))
			}
			all := map[string]bool{}
			list := b.sync()
			for _, s := range list {
				if len(s.Endpoints) > 100 {
					t.Errorf("%s holds %d", s.Name, len(s.Endpoints))
				}
				for _, e := range s.Endpoints {
					all[e.Addresses[0]] = true
				}
			}
			if len(list) != 3 || len(all) != 250 {
				t.Errorf("%d slices, %d addresses", len(list), len(all))
			}
		}},
		{"I05", func(t *testing.T, b *bench) {
			b.put(service())
			for i := range 200 {
				b.put(pod(i))
			}
			first := b.sync()
			// Thirty leave one slice and ten are new: that slice alone is written.
			for _, e := range first[0].Endpoints[:30] {
				b.forget(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: e.TargetRef.Name}})
			}
			for i := range 10 {
				b.put(pod(500 + i))
			}
			b.writes = 0
			after := b.sync()
			if b.writes != 1 || len(after) != 2 || len(after[0].Endpoints) != 80 || len(after[1].Endpoints) != 100 {
				t.Errorf("%d writes, %d slices, %d and %d endpoints", b.writes, len(after), len(after[0].Endpoints), len(after[1].Endpoints))
			}
			// Half empty slices are not joined.
			for _, s := range after {
				for _, e := range s.Endpoints[:50] {
					b.forget(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: e.TargetRef.Name}})
				}
			}
			if after = b.sync(); len(after) != 2 {
				t.Errorf("%d slices", len(after))
			}
		}},
		{"I06", func(t *testing.T, b *bench) {
			b.put(service())
			s := b.sync()
			if len(s) != 1 || len(s[0].Endpoints) != 0 || len(s[0].Ports) != 0 {
				t.Errorf("%+v", s)
			}
			b.put(pod(1))
			if s = b.sync(); len(s) != 1 || len(s[0].Endpoints) != 1 {
				t.Errorf("%+v", s)
			}
		}},
		{"I10", func(t *testing.T, b *bench) {
			b.put(service())
			for i := range 1200 {
				b.put(pod(i))
			}
			count := 0
			for _, s := range b.sync() {
				count += len(s.Endpoints)
			}
			if count != 1200 {
				t.Errorf("the slices hold %d", count)
			}
		}},
		{"I12", func(t *testing.T, b *bench) {
			b.put(service())
			b.put(pod(1, notReady))
			b.sync()
			at := metav1.NewTime(time.Now().Add(time.Minute).Truncate(time.Second))
			b.put(pod(1, func(p *corev1.Pod) { p.Status.Conditions[0].LastTransitionTime = at }))
			if got, want := b.sync()[0].Annotations[corev1.EndpointsLastChangeTriggerTime], at.UTC().Format(time.RFC3339Nano); got != want {
				t.Errorf("%q, want %q", got, want)
			}
		}},
		{"I13", func(t *testing.T, b *bench) {
			b.put(service())
			b.put(pod(1))
			b.sync()
			b.put(service(func(s *corev1.Service) {
				s.Labels = map[string]string{"tier": "front", discoveryv1.LabelServiceName: "forged", discoveryv1.LabelManagedBy: "forged"}
			}))
			got := b.sync()[0].Labels
			if got["tier"] != "front" || got["team"] != "" || got[discoveryv1.LabelServiceName] != "web" || got[discoveryv1.LabelManagedBy] != ManagedBy {
				t.Errorf("%v", got)
			}
		}},
		{"I14", func(t *testing.T, b *bench) {
			b.put(service(func(s *corev1.Service) { s.Spec.IPFamilies = append(s.Spec.IPFamilies, corev1.IPv6Protocol) }))
			b.put(pod(1, func(p *corev1.Pod) { p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: "fd00::1"}) }))
			got := map[discoveryv1.AddressType]string{}
			for _, s := range b.sync() {
				got[s.AddressType] = s.Endpoints[0].Addresses[0]
			}
			if len(got) != 2 || got["IPv4"] != "10.244.0.2" || got["IPv6"] != "fd00::1" {
				t.Errorf("%v", got)
			}
		}},
		{"I15", func(t *testing.T, b *bench) {
			gone := func(s *corev1.Service) { now := metav1.Now(); s.DeletionTimestamp = &now }
			b.put(service(gone))
			b.put(pod(1))
			if s := b.sync(); len(s) != 0 {
				t.Errorf("new slices of a Service that goes: %+v", s)
			}
			b.put(service())
			b.sync()
			// What it has is kept true until it is gone.
			b.put(service(gone))
			b.put(pod(1, notReady))
			if s := b.sync(); len(s) != 1 || *s[0].Endpoints[0].Conditions.Ready {
				t.Errorf("%+v", s)
			}
		}},
		{"I16", func(t *testing.T, b *bench) {
			b.put(service())
			b.put(pod(1))
			b.sync()
			b.put(service(func(s *corev1.Service) { s.UID = "again" }))
			s := b.sync()
			if owner := metav1.GetControllerOf(&s[0]); len(s) != 1 || owner.UID != "again" {
				t.Errorf("%+v", s)
			}
		}},
		{"I17", func(t *testing.T, b *bench) {
			b.put(service())
			b.put(pod(1))
			forged := b.sync()[0].DeepCopy()
			forged.Endpoints[0].Addresses[0] = "10.0.0.66"
			if _, err := b.client.DiscoveryV1().EndpointSlices("ns").Update(t.Context(), forged, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			b.sync() // the cache catches up
			if s := b.sync(); len(s) != 1 || s[0].Endpoints[0].Addresses[0] != "10.244.0.2" {
				t.Errorf("%+v", s)
			}
		}},
		{"I18", func(t *testing.T, b *bench) {
			b.put(service(func(s *corev1.Service) {
				s.Spec.Ports = []corev1.ServicePort{
					{Name: "web", Port: 80, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(8080), AppProtocol: ptr.To("kubernetes.io/h2c")},
					{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP, TargetPort: intstr.FromInt32(5353)},
				}
			}))
			b.put(pod(1))
			got := map[string]string{}
			for _, p := range b.sync()[0].Ports {
				got[*p.Name] = fmt.Sprint(*p.Port, " ", *p.Protocol, " ", ptr.Deref(p.AppProtocol, "-"))
			}
			if got["web"] != "8080 TCP kubernetes.io/h2c" || got["dns"] != "5353 UDP -" {
				t.Errorf("%v", got)
			}
		}},
		{"I20", func(t *testing.T, b *bench) {
			b.put(service())
			b.put(pod(1))
			b.fail = errors.New("no more room")
			b.sync()
			select {
			case e := <-b.events.Events:
				if !strings.HasPrefix(e, "Warning FailedToUpdateEndpointSlices Error updating Endpoint Slices for Service ns/web: ") || !strings.Contains(e, "no more room") {
					t.Errorf("%q", e)
				}
			default:
				t.Error("no event")
			}
		}},
		{"B17", func(t *testing.T, b *bench) {
			b.put(service())
			b.put(pod(1))
			b.sync()
			b.put(service(func(s *corev1.Service) { s.Spec.Ports[0].Name = "web" }))
			if s := b.sync(); len(s) != 1 || *s[0].Ports[0].Name != "web" || len(s[0].Endpoints) != 1 {
				t.Errorf("%+v", s)
			}
		}},
		{"B18", func(t *testing.T, b *bench) {
			b.put(service())
			b.put(pod(1))
			b.put(pod(2, func(p *corev1.Pod) { p.Labels["app"] = "b" }))
			b.sync()
			b.put(service(func(s *corev1.Service) { s.Spec.Selector["app"] = "b" }))
			if s := b.sync(); len(s[0].Endpoints) != 1 || s[0].Endpoints[0].TargetRef.Name != "p0002" {
				t.Errorf("%+v", s)
			}
		}},
		{"B19", func(t *testing.T, b *bench) {
			b.put(service())
			b.put(pod(1))
			before := b.sync()
			b.put(service(func(s *corev1.Service) { s.Spec.Selector = nil }))
			b.put(pod(1, notReady))
			b.writes = 0
			if s := b.sync(); b.writes != 0 || len(s) != len(before) || !*s[0].Endpoints[0].Conditions.Ready {
				t.Errorf("%d writes, %+v", b.writes, s)
			}
		}},
		// The controller leaves the slices of a Service that becomes an
		// ExternalName; a proxy does not look at them.
		{"B08 slices", func(t *testing.T, b *bench) {
			b.put(service())
			b.put(pod(1))
			b.sync()
			b.put(service(func(s *corev1.Service) {
				s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "a.example"
			}))
			b.writes = 0
			if s := b.sync(); b.writes != 0 || len(s) != 1 {
				t.Errorf("%d writes, %d slices", b.writes, len(s))
			}
		}},
	} {
		t.Run(tc.row, func(t *testing.T) { tc.run(t, newBench(t)) })
	}
}
