// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/internal/nettest"
)

func unstructuredOf(object map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: object}
}

func TestWhatEveryClusterHas(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	check := func() {
		t.Helper()
		for _, ns := range []string{"default", "kube-system", "kube-public", "kube-node-lease"} {
			if _, err := b.client.CoreV1().ServiceAccounts(ns).Get(ctx, "default", metav1.GetOptions{}); err != nil {
				t.Error(err)
			}
			cm, err := b.client.CoreV1().ConfigMaps(ns).Get(ctx, "kube-root-ca.crt", metav1.GetOptions{})
			if err != nil || cm.Data["ca.crt"] != "CERTIFICATE" {
				t.Errorf("%v, %v", cm, err)
			}
		}
		svc, err := b.client.CoreV1().Services("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if svc.Spec.ClusterIP != "10.96.0.1" || svc.Spec.Ports[0].Port != 443 || svc.Spec.Ports[0].TargetPort.IntVal != 6443 || svc.Labels["provider"] != "kubernetes" {
			t.Errorf("got %+v", svc.Spec)
		}
		e, err := b.client.CoreV1().Endpoints("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		if err != nil || e.Subsets[0].Addresses[0].IP != "10.0.0.131" || e.Subsets[0].Ports[0].Port != 6443 {
			t.Errorf("%+v, %v", e, err)
		}
		slice, err := b.client.DiscoveryV1().EndpointSlices("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		if err != nil || slice.Endpoints[0].Addresses[0] != "10.0.0.131" || *slice.Ports[0].Port != 6443 {
			t.Errorf("%+v, %v", slice, err)
		}
	}
	t.Run("A15", func(*testing.T) { check() })
	for what, remove := range map[string]func() error{
		"service": func() error {
			return b.client.CoreV1().Services("default").Delete(ctx, "kubernetes", metav1.DeleteOptions{})
		},
		"endpoints": func() error {
			return b.client.CoreV1().Endpoints("default").Delete(ctx, "kubernetes", metav1.DeleteOptions{})
		},
		"slice": func() error {
			return b.client.DiscoveryV1().EndpointSlices("default").Delete(ctx, "kubernetes", metav1.DeleteOptions{})
		},
		"account": func() error {
			return b.client.CoreV1().ServiceAccounts("default").Delete(ctx, "default", metav1.DeleteOptions{})
		},
		"config map": func() error {
			_, err := b.client.CoreV1().ConfigMaps("default").Patch(ctx, "kube-root-ca.crt", types.MergePatchType, []byte(`{"data":{"ca.crt":"FORGED"}}`), metav1.PatchOptions{})
			return err
		},
	} {
		if err := remove(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		b.settle()
		check()
	}
}

func TestNamespaceIsEmptiedBeforeItGoes(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	if _, err := b.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	d := deployment("web", 2)
	d.Namespace = "shop"
	b.create(d)
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "held", Finalizers: []string{"example.com/hold"}}}
	if _, err := b.client.CoreV1().ConfigMaps("shop").Create(ctx, cm, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	if n := len(b.pods("shop", "")); n != 2 {
		t.Fatalf("%d pods", n)
	}
	if err := b.client.CoreV1().Namespaces().Delete(ctx, "shop", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, patience, "only the held object is left, and the conditions say so", func() error {
		ns, err := b.client.CoreV1().Namespaces().Get(ctx, "shop", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range ns.Status.Conditions {
			if c.Type == corev1.NamespaceFinalizersRemaining && strings.Contains(c.Message, "example.com/hold in 1 resource instances") {
				if n := len(b.pods("shop", "")); n > 0 {
					return fmt.Errorf("%d pods", n)
				}
				return nil
			}
		}
		return fmt.Errorf("conditions: %+v", ns.Status.Conditions)
	})
	if _, err := b.client.CoreV1().ConfigMaps("shop").Patch(ctx, "held", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, patience, "the namespace goes", func() error {
		ns, err := b.client.CoreV1().Namespaces().Get(ctx, "shop", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("still there: %v, %w", ns.Status, err)
	})
	b.settle()
}

func TestUnschedulablePodWaitsForRoom(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "picky"},
		Spec: corev1.PodSpec{
			NodeSelector: map[string]string{"disk": "ssd"},
			Containers:   []corev1.Container{{Name: "c", Image: "pause"}},
		},
	}
	if _, err := b.client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	got, err := b.client.CoreV1().Pods("default").Get(ctx, "picky", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 node(s) didn't match Pod's node affinity/selector."
	if c := got.Status.Conditions; len(c) == 0 || c[0].Type != corev1.PodScheduled || c[0].Reason != "Unschedulable" || c[0].Message != want {
		t.Fatalf("got %+v", c)
	}
	nettest.Eventually(t, patience, "the event is told", func() error {
		events, err := b.client.CoreV1().Events("default").List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=picky,reason=FailedScheduling"})
		if err == nil && (len(events.Items) == 0 || events.Items[0].Message != want) {
			err = fmt.Errorf("%d events", len(events.Items))
		}
		return err
	})
	if _, err := b.client.CoreV1().Nodes().Patch(ctx, "node2", types.MergePatchType, []byte(`{"metadata":{"labels":{"disk":"ssd"}}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	if got, err = b.client.CoreV1().Pods("default").Get(ctx, "picky", metav1.GetOptions{}); err != nil || got.Spec.NodeName != "node2" {
		t.Fatalf("on %q, %v", got.Spec.NodeName, err)
	}
	for _, c := range got.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue {
			t.Errorf("bound, and PodScheduled is %s", c.Status)
		}
	}
	// Cordon: the taint follows.
	if _, err := b.client.CoreV1().Nodes().Patch(ctx, "node2", types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	node, err := b.client.CoreV1().Nodes().Get(ctx, "node2", metav1.GetOptions{})
	if err != nil || len(node.Spec.Taints) != 1 || node.Spec.Taints[0].Key != corev1.TaintNodeUnschedulable {
		t.Fatalf("%+v, %v", node.Spec.Taints, err)
	}
}

// A new set of controllers over a settled cluster finds nothing to do.
func TestRestartWritesNothing(t *testing.T) {
	b := newBench(t)
	b.create(deployment("web", 3))
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if _, err := b.client.CoreV1().Services("default").Create(t.Context(), svc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.rolledOut("web")
	b.setImage("nginx:2")
	b.rolledOut("web")
	b.settle()
	// A deletion is the newest thing that happened to a kind: no event names it later.
	if _, err := b.client.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "brief"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := b.client.CoreV1().ConfigMaps("default").Delete(t.Context(), "brief", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	b.halt()
	before := b.revisions()
	b.start()
	b.settle()
	if after := b.revisions(); after != before {
		t.Fatalf("written by nobody's wish:\n%s\n%s", before, after)
	}
}

func TestBurstIsSpreadAndFast(t *testing.T) {
	b := newBench(t)
	const n = 500
	t0 := time.Now()
	b.create(deployment("burst", n))
	nettest.Eventually(t, 2*patience, "all are ready", func() error {
		if got := b.get("burst").Status.ReadyReplicas; got != n {
			return fmt.Errorf("%d ready", got)
		}
		return nil
	})
	took := time.Since(t0)
	t.Logf("%d pods in %v, %.0f a second", n, took.Round(time.Millisecond), n/took.Seconds())
	b.settle()
	if got := perNode(b.pods("default", "app=burst")); got["node1"] != n/2 || got["node2"] != n/2 {
		t.Fatalf("spread: %v", got)
	}
}
