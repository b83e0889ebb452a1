// SPDX-License-Identifier: Apache-2.0

package endpoints

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func service(ports ...corev1.ServicePort) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "ns", Labels: map[string]string{"team": "a"}},
		Spec: corev1.ServiceSpec{
			ClusterIP: "10.96.0.9", IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Selector: map[string]string{"app": "web"}, Ports: ports,
		},
	}
}

func pod(name, ip string, ready bool, opts ...func(*corev1.Pod)) *corev1.Pod {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: types.UID(name)},
		Spec: corev1.PodSpec{NodeName: "n1", Containers: []corev1.Container{{
			Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}},
		}}},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status}},
		},
	}
	for _, o := range opts {
		o(p)
	}
	return p
}

func named(name, target string) corev1.ServicePort {
	return corev1.ServicePort{Name: name, Port: 80, Protocol: corev1.ProtocolTCP, TargetPort: intstr.Parse(target)}
}

// show prints subsets shortly: ready | not ready @ ports.
func show(subsets []corev1.EndpointSubset) string {
	out := ""
	for _, s := range subsets {
		for _, a := range s.Addresses {
			out += a.IP + " "
		}
		out += "| "
		for _, a := range s.NotReadyAddresses {
			out += a.IP + " "
		}
		out += "@"
		for _, p := range s.Ports {
			out += fmt.Sprintf(" %s:%d", p.Name, p.Port)
		}
		out += "; "
	}
	return out
}

func TestSubsets(t *testing.T) {
	now := metav1.Now()
	terminating := func(p *corev1.Pod) { p.DeletionTimestamp = &now }
	finished := func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }
	other := func(p *corev1.Pod) { p.Spec.Containers[0].Ports[0].ContainerPort = 9090 }
	nameless := func(p *corev1.Pod) { p.Spec.Containers[0].Ports = nil }
	pods := []*corev1.Pod{
		pod("c", "10.0.0.10", true), pod("a", "10.0.0.2", true), pod("b", "10.0.0.3", false),
		pod("t", "10.0.0.4", true, terminating), pod("f", "10.0.0.5", true, finished), pod("x", "", false),
	}
	publish := service(named("", "80"))
	publish.Spec.PublishNotReadyAddresses = true
	headless := service()
	headless.Spec.ClusterIP = corev1.ClusterIPNone
	six := service(named("", "80"))
	six.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol}
	for _, tc := range []struct {
		name string
		svc  *corev1.Service
		pods []*corev1.Pod
		want string
	}{
		{"sorted, not ready apart, leaving and finished ones out", service(named("", "80")), pods, "10.0.0.2 10.0.0.10 | 10.0.0.3 @ :80; "},
		{"not ready published", publish, pods, "10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.10 | @ :80; "},
		{"named port, two numbers", service(named("web", "http")), []*corev1.Pod{pod("a", "10.0.0.2", true), pod("b", "10.0.0.3", true, other)},
			"10.0.0.2 | @ web:8080; 10.0.0.3 | @ web:9090; "},
		{"named port that a pod lacks", service(named("web", "http"), named("raw", "81")), []*corev1.Pod{pod("a", "10.0.0.2", true, nameless)}, "10.0.0.2 | @ raw:81; "},
		{"no port at all", service(named("web", "http")), []*corev1.Pod{pod("a", "10.0.0.2", true, nameless)}, ""},
		{"headless without ports", headless, []*corev1.Pod{pod("a", "10.0.0.2", true)}, "10.0.0.2 | @; "},
		{"second family only", six, []*corev1.Pod{pod("a", "10.0.0.2", true, func(p *corev1.Pod) {
			p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: "fd00::2"})
		})}, "fd00::2 | @ :80; "},
	} {
		if got := show(subsets(tc.svc, tc.pods)); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestTruncatePrefersReady(t *testing.T) {
	var pods []*corev1.Pod
	for i := range 1200 {
		pods = append(pods, pod(fmt.Sprintf("p%04d", i), fmt.Sprintf("10.1.%d.%d", i/250, i%250+1), i < 900))
	}
	count := func(out *corev1.Endpoints) (ready, notReady int) {
		for _, s := range out.Subsets {
			ready += len(s.Addresses)
			notReady += len(s.NotReadyAddresses)
		}
		return ready, notReady
	}
	svc := service(named("", "80"))
	out := build(svc, pods, nil, time.Time{})
	t.Run("I11", func(t *testing.T) {
		if ready, notReady := count(out); ready != 900 || notReady != 100 || out.Annotations[corev1.EndpointsOverCapacity] != "truncated" {
			t.Errorf("%d ready, %d not, %v", ready, notReady, out.Annotations)
		}
	})
	for _, p := range pods {
		p.Status.Conditions[0].Status = corev1.ConditionTrue
	}
	// Two subsets share the quota.
	svc = service(named("web", "http"))
	for i := range pods {
		if i%3 == 0 {
			pods[i].Spec.Containers[0].Ports[0].ContainerPort = 9090
		}
	}
	out = build(svc, pods, out, time.Time{})
	t.Run("I10", func(t *testing.T) {
		if ready, notReady := count(out); ready != 1000 || notReady != 0 || len(out.Subsets) != 2 || out.Annotations[corev1.EndpointsOverCapacity] != "truncated" {
			t.Errorf("%d ready, %d not, %d subsets, %v", ready, notReady, len(out.Subsets), out.Annotations)
		}
	})
	out = build(svc, pods[:10], out, time.Time{})
	if _, still := out.Annotations[corev1.EndpointsOverCapacity]; still {
		t.Fatal("says truncated still")
	}
}

func TestBuildAndSame(t *testing.T) {
	svc := service(named("", "80"))
	pods := []*corev1.Pod{pod("a", "10.0.0.2", true)}
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	first := build(svc, pods, nil, at)
	if first.Labels["team"] != "a" || first.Annotations[corev1.EndpointsLastChangeTriggerTime] != "2026-01-02T03:04:05.000000006Z" {
		t.Fatalf("got %+v", first.ObjectMeta)
	}
	if !same(first, build(svc, pods, first, time.Time{})) {
		t.Fatal("nothing changed, but it would be written")
	}
	svc.Labels["team"] = "b"
	if same(first, build(svc, pods, first, time.Time{})) {
		t.Fatal("a label is not copied")
	}
	svc.Spec.ClusterIP = corev1.ClusterIPNone
	if _, ok := build(svc, pods, first, at).Labels[corev1.IsHeadlessService]; !ok {
		t.Fatal("headless is not marked")
	}
}
