// SPDX-License-Identifier: Apache-2.0

package replicaset

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/kplab/kplab/controller/loop"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

type podOption func(*corev1.Pod)

func pod(name string, opts ...podOption) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: types.UID(name), CreationTimestamp: metav1.NewTime(start)},
		Spec:       corev1.PodSpec{NodeName: "n"},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
	readySince(start)(p)
	for _, o := range opts {
		o(p)
	}
	return p
}

func readySince(at time.Time) podOption {
	return func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(at)}}
	}
}

func TestLeastNeeded(t *testing.T) {
	// In the order in which they should go.
	order := []*corev1.Pod{
		pod("a-unassigned", func(p *corev1.Pod) { p.Spec.NodeName = ""; p.Status.Phase = corev1.PodPending }),
		pod("b-pending", func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }),
		pod("c-unknown", func(p *corev1.Pod) { p.Status.Phase = corev1.PodUnknown }),
		pod("d-not-ready", func(p *corev1.Pod) { p.Status.Conditions = nil }),
		pod("e-cheap", func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.PodDeletionCost: "-5"} }),
		pod("f-crowded"),
		pod("g-ready-late", readySince(start.Add(time.Hour))),
		pod("h-restarted", func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: 3}}
		}),
		pod("i-young", func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(start.Add(time.Minute)) }),
		pod("j-plain"),
		pod("k-dear", func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.PodDeletionCost: "5"} }),
	}
	ranks := map[types.UID]int{"f-crowded": 2}
	shuffled := make([]*corev1.Pod, 0, len(order))
	for i := range order {
		shuffled = append(shuffled, order[(i*7)%len(order)])
	}
	var got []string
	for n := 1; n < len(order); n++ {
		victims := leastNeeded(shuffled, ranks, n)
		got = append(got, victims[n-1].Name)
	}
	for i, name := range got {
		if name != order[i].Name {
			t.Fatalf("order is %s", strings.Join(got, ", "))
		}
	}
	if all := leastNeeded(shuffled, ranks, 99); len(all) != len(order) {
		t.Fatalf("got %d", len(all))
	}
}

func set(replicas int32) *appsv1.ReplicaSet {
	return &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "ns", UID: "rs", Generation: 2},
		Spec: appsv1.ReplicaSetSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web", "v": "1"}}},
		},
	}
}

func TestNewStatus(t *testing.T) {
	r := set(4)
	r.Spec.MinReadySeconds = 10
	labelled := func(p *corev1.Pod) { p.Labels = map[string]string{"app": "web", "v": "1"} }
	pods := []*corev1.Pod{
		pod("old", labelled),
		pod("fresh", labelled, readySince(start.Add(53*time.Second))),
		pod("other", func(p *corev1.Pod) { p.Labels = map[string]string{"app": "web"} }, readySince(start.Add(55*time.Second))),
		pod("down", labelled, func(p *corev1.Pod) { p.Status.Conditions = nil }),
	}
	status, wait := newStatus(r, pods, nil, start.Add(time.Minute))
	if status.Replicas != 4 || status.FullyLabeledReplicas != 3 || status.ReadyReplicas != 3 || status.AvailableReplicas != 1 || status.ObservedGeneration != 2 {
		t.Fatalf("got %+v", status)
	}
	if wait != 3*time.Second {
		t.Fatalf("looks again after %v", wait)
	}
	status, _ = newStatus(r, pods[:1], errors.New("quota"), start)
	if len(status.Conditions) != 1 || status.Conditions[0].Reason != "FailedCreate" {
		t.Fatalf("got %+v", status.Conditions)
	}
	r.Status = status
	if status, _ = newStatus(r, pods, nil, start); len(status.Conditions) != 0 {
		t.Fatalf("the failure stays: %+v", status.Conditions)
	}
}

// A cache that does not show the new pods yet must not lead to more of them, and a
// refused create must not be tried for all of them.
func TestExpectationsAndSlowStart(t *testing.T) {
	client := fake.NewClientset()
	n, refuse := 0, false
	client.PrependReactor("create", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		n++
		if refuse {
			return true, nil, errors.New("no room")
		}
		p := a.(clienttesting.CreateAction).GetObject().(*corev1.Pod).DeepCopy()
		p.Name = fmt.Sprint(p.GenerateName, n)
		return true, p, nil
	})
	factory := informers.NewSharedInformerFactory(client, 0) // never started: the cache stays as it is
	c := New(loop.Deps{Client: client, Informers: factory})
	r := set(20)
	if err := factory.Apps().V1().ReplicaSets().Informer().GetIndexer().Add(r); err != nil {
		t.Fatal(err)
	}
	key := loop.KeyOf(r)
	if err := c.sync(t.Context(), key); err != nil && !strings.Contains(err.Error(), "not found") {
		t.Fatal(err)
	}
	if n != 20 {
		t.Fatalf("%d pods were created", n)
	}
	for range 3 {
		_ = c.sync(t.Context(), key)
	}
	if n != 20 {
		t.Fatalf("%d pods were created on a cache that lags", n)
	}
	for range 20 {
		c.pods.Handle(nil, pod("", func(p *corev1.Pod) { p.OwnerReferences = []metav1.OwnerReference{*c.pods.Ref(r)} }), func(loop.Key) {}, nil)
	}
	refuse, n = true, 0
	if err := c.sync(t.Context(), key); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Fatalf("got %v", err)
	}
	if n != 1 {
		t.Fatalf("a refusing API was asked %d times", n)
	}
	if !c.pods.Trusted(r.UID) {
		t.Fatal("pods that were never made are still expected")
	}
}
