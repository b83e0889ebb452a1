// SPDX-License-Identifier: Apache-2.0

package svcindex

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"

	"github.com/kplab/kplab/controller/loop"
)

func indexOf(tb testing.TB, services ...*corev1.Service) cache.Indexer {
	tb.Helper()
	informer := informers.NewSharedInformerFactory(fake.NewClientset(), 0).Core().V1().Services().Informer()
	for range 2 { // several controllers ask for it
		if err := Add(informer); err != nil {
			tb.Fatal(err)
		}
	}
	for _, s := range services {
		if err := informer.GetIndexer().Add(s); err != nil {
			tb.Fatal(err)
		}
	}
	return informer.GetIndexer()
}

func svc(namespace, name string, pairs ...string) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	for i := 0; i < len(pairs); i += 2 {
		if s.Spec.Selector == nil {
			s.Spec.Selector = map[string]string{}
		}
		s.Spec.Selector[pairs[i]] = pairs[i+1]
	}
	return s
}

func sorted(keys []loop.Key) string {
	var out []string
	for _, k := range keys {
		out = append(out, k.Name)
	}
	slices.Sort(out)
	return fmt.Sprint(out)
}

func pod(labels map[string]string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u", Labels: labels}}
}

func TestConcerned(t *testing.T) {
	index := indexOf(t, svc("ns", "all", "app", "web"), svc("ns", "v1", "app", "web", "v", "1"), svc("ns", "v2", "app", "web", "v", "2"),
		svc("ns", "none"), svc("other", "far", "app", "web"))
	one, two := pod(map[string]string{"app": "web", "v": "1", "x": "y"}), pod(map[string]string{"app": "web", "v": "2"})
	for _, tc := range []struct {
		name     string
		old, cur *corev1.Pod
		want     string
	}{
		{"new", nil, one, "[all v1]"},
		{"gone", one, nil, "[all v1]"},
		{"moved from one to the other", one, two, "[all v1 v2]"},
		{"nothing that shows", one, func() *corev1.Pod {
			p := one.DeepCopy()
			p.Annotations = map[string]string{"a": "b"}
			p.Status.Phase = corev1.PodRunning
			return p
		}(), "[]"},
		{"got its address", one, func() *corev1.Pod { p := one.DeepCopy(); p.Status.PodIP = "10.0.0.1"; return p }(), "[all v1]"},
		{"is being deleted", one, func() *corev1.Pod { p := one.DeepCopy(); now := metav1.Now(); p.DeletionTimestamp = &now; return p }(), "[all v1]"},
		{"finished", one, func() *corev1.Pod { p := one.DeepCopy(); p.Status.Phase = corev1.PodFailed; return p }(), "[all v1]"},
		{"no labels", nil, pod(nil), "[]"},
	} {
		if got := sorted(Concerned(index, tc.old, tc.cur)); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}

// Ten thousand Services must not make a pod's event slow.
func BenchmarkConcerned(b *testing.B) {
	var services []*corev1.Service
	for i := range 10000 {
		services = append(services, svc("ns", fmt.Sprint("s", i), "app", fmt.Sprint("app", i)))
	}
	index, p := indexOf(b, services...), pod(map[string]string{"app": "app77", "x": "y"})
	for b.Loop() {
		Concerned(index, nil, p)
	}
}
