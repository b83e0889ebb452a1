// SPDX-License-Identifier: Apache-2.0

package nodelifecycle

import (
	"fmt"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/internal/nettest"
)

const patience = 10 * time.Second

func TestMerge(t *testing.T) {
	now := metav1.Now()
	own := corev1.Taint{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}
	have := []corev1.Taint{own, {Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule}}
	got := merge(have, taintsFor(corev1.ConditionUnknown, true), now)
	text := ""
	for _, taint := range got {
		text += taint.Key + ":" + string(taint.Effect) + " "
	}
	want := "gpu:NoSchedule node.kubernetes.io/unreachable:NoSchedule node.kubernetes.io/unreachable:NoExecute node.kubernetes.io/unschedulable:NoSchedule "
	if text != want {
		t.Fatalf("got %s", text)
	}
	again := merge(got, taintsFor(corev1.ConditionUnknown, true), metav1.NewTime(now.Add(time.Hour)))
	if fmt.Sprint(again) != fmt.Sprint(got) {
		t.Fatal("the same taints are written anew")
	}
	if back := merge(got, taintsFor(corev1.ConditionTrue, false), now); len(back) != 1 || back[0].Key != "gpu" {
		t.Fatalf("got %v", back)
	}
}

func TestSilentNodeBecomesUnknown(t *testing.T) {
	ready := func(name string) *corev1.Node {
		return &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: "1"},
			Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
		}
	}
	lease := func(name string, n int) *coordinationv1.Lease {
		at := metav1.NewMicroTime(time.Unix(int64(n), 0))
		return &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: corev1.NamespaceNodeLease, ResourceVersion: fmt.Sprint(10 + n)},
			Spec:       coordinationv1.LeaseSpec{RenewTime: &at},
		}
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns"}, Spec: corev1.PodSpec{NodeName: "silent"},
		Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	client := fake.NewClientset(ready("silent"), ready("alive"), lease("silent", 0), lease("alive", 0), pod)
	clock := clocktesting.NewFakeClock(time.Unix(1000, 0))
	factory := informers.NewSharedInformerFactory(client, 0)
	c := New(loop.Deps{Client: client, Informers: factory, Clock: clock})
	ctx := t.Context()
	var wg sync.WaitGroup
	factory.Start(ctx.Done())
	wg.Go(func() { _ = c.Run(ctx) })
	t.Cleanup(func() { wg.Wait(); factory.Shutdown() })

	heard := func(name string) time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.heard[name] }
	planned := func() bool { c.mu.Lock(); defer c.mu.Unlock(); return len(c.planned) == 2 }
	nettest.Until(t, patience, "both nodes are watched", func() bool { return planned() && c.loop.Pending() == 0 })
	for i := 1; i <= 4; i++ {
		clock.Step(10 * time.Second)
		if _, err := client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Update(ctx, lease("alive", i), metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		nettest.Until(t, patience, "renewal is seen", func() bool { return heard("alive").Equal(clock.Now()) })
	}
	status := func(name string) (corev1.ConditionStatus, int) {
		n, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return readiness(n), len(n.Spec.Taints)
	}
	// The queue's own timer runs on the fake clock too: push it until it has fired.
	nettest.Until(t, patience, "the silent node is unknown and tainted", func() bool {
		if ready, taints := status("silent"); ready == corev1.ConditionUnknown && taints == 2 {
			return true
		}
		clock.Step(time.Millisecond)
		return false
	})
	nettest.Until(t, patience, "its pod is not ready", func() bool {
		p, err := client.CoreV1().Pods("ns").Get(ctx, "p", metav1.GetOptions{})
		return err == nil && p.Status.Conditions[0].Status == corev1.ConditionFalse
	})
	if ready, taints := status("alive"); ready != corev1.ConditionTrue || taints != 0 {
		t.Fatalf("the node that renews is %s with %d taints", ready, taints)
	}
}
