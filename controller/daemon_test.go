// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/internal/nettest"
)

func (b *bench) daemonSet() *appsv1.DaemonSet {
	b.t.Helper()
	set, err := b.client.AppsV1().DaemonSets("default").Get(b.t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return set
}

func (b *bench) patchDaemonSet(patch string) {
	b.t.Helper()
	if _, err := b.client.AppsV1().DaemonSets("default").Patch(b.t.Context(), "web", types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) daemonSetDone() {
	b.t.Helper()
	b.done("DaemonSet", func() (runtime.Object, error) { return b.daemonSet(), nil })
	b.settle()
}

// daemons says on which nodes the pods of app web are, with their images.
func (b *bench) daemons() string {
	b.t.Helper()
	var out []string
	for _, pod := range b.pods("default", "app=web") {
		out = append(out, pod.Spec.NodeName+"="+pod.Spec.Containers[0].Image)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func (b *bench) daemonsAre(want string) {
	b.t.Helper()
	b.settle()
	nettest.Eventually(b.t, patience, "the daemons "+want, func() error {
		if got := b.daemons(); got != want {
			return fmt.Errorf("daemons %s", got)
		}
		return nil
	})
}

// TestDaemonSet: a pod on each node that is not tainted, new nodes included; nodes are
// chosen by labels and tolerations; an update goes node by node and can be undone.
func TestDaemonSet(t *testing.T) {
	b := newBench(t)
	set := &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default"},
		Spec:       appsv1.DaemonSetSpec{Selector: webSelector(), Template: webTemplate("one")},
	}
	if _, err := b.client.AppsV1().DaemonSets("default").Create(t.Context(), set, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.daemonSetDone()
	b.daemonsAre("node1=one node2=one")
	got := b.daemonSet()
	if s := got.Status; s.DesiredNumberScheduled != 2 || s.CurrentNumberScheduled != 2 || s.NumberReady != 2 || s.NumberAvailable != 2 ||
		s.UpdatedNumberScheduled != 2 || s.NumberMisscheduled != 0 || s.NumberUnavailable != 0 {
		t.Errorf("status %+v", s)
	}
	pod := b.pods("default", "app=web")[0]
	if pod.Labels["pod-template-generation"] != "1" || pod.Labels["controller-revision-hash"] == "" || strings.Contains(pod.Labels["controller-revision-hash"], "web-") {
		t.Errorf("labels %v", pod.Labels)
	}
	b.addNode("node3")
	b.daemonsAre("node1=one node2=one node3=one")

	// A node that is drained keeps its daemon.
	if _, err := b.client.CoreV1().Nodes().Patch(t.Context(), "node3", types.StrategicMergePatchType, []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.daemonsAre("node1=one node2=one node3=one")
	b.patchDaemonSet(`{"spec":{"template":{"spec":{"tolerations":[{"operator":"Exists"}]}}}}`)
	b.daemonSetDone()
	b.daemonsAre("master=one node1=one node2=one node3=one")

	b.kubelet.unready.Store("broken", true)
	b.patchDaemonSet(imagePatch("broken"))
	nettest.Eventually(t, patience, "one broken daemon", func() error {
		if n := strings.Count(b.daemons(), "broken"); n != 1 {
			return fmt.Errorf("%s", b.daemons())
		}
		return nil
	})
	b.settle()
	if n := strings.Count(b.daemons(), "broken"); n != 1 {
		t.Errorf("a broken update goes on: %s", b.daemons())
	}
	if s := b.daemonSet().Status; s.UpdatedNumberScheduled != 1 || s.NumberUnavailable != 1 {
		t.Errorf("status %+v", s)
	}
	b.rollBack("DaemonSet", b.daemonSet(), 0)
	b.daemonSetDone()
	b.daemonsAre("master=one node1=one node2=one node3=one")
	if got := b.revisionsOf(); got != "[1 3 4]" {
		t.Errorf("revisions %s", got)
	}

	b.patchDaemonSet(`{"spec":{"template":{"spec":{"nodeSelector":{"kubernetes.io/hostname":"node2"}}}}}`)
	b.daemonSetDone()
	b.daemonsAre("node2=one")
	policy := metav1.DeletePropagationForeground
	if err := b.client.AppsV1().DaemonSets("default").Delete(t.Context(), "web", metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
		t.Fatal(err)
	}
	b.daemonsAre("")
	nettest.Eventually(t, patience, "the set to go", func() error {
		list, err := b.client.AppsV1().DaemonSets("default").List(t.Context(), metav1.ListOptions{})
		if err != nil || len(list.Items) > 0 {
			return fmt.Errorf("%w, %d left", err, len(list.Items))
		}
		return nil
	})
}

// TestDaemonSetSurge: with maxSurge a node has the new pod before it loses the old.
func TestDaemonSetSurge(t *testing.T) {
	b := newBench(t)
	set := &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default"},
		Spec:       appsv1.DaemonSetSpec{Selector: webSelector(), Template: webTemplate("one")},
	}
	if _, err := b.client.AppsV1().DaemonSets("default").Create(t.Context(), set, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.daemonSetDone()
	b.patchDaemonSet(`{"spec":{"updateStrategy":{"rollingUpdate":{"maxSurge":1,"maxUnavailable":0}}}}`)
	b.kubelet.unready.Store("slow", true)
	b.patchDaemonSet(imagePatch("slow"))
	b.daemonsAre("node1=one node1=slow node2=one")
	ready := func(node string) {
		t.Helper()
		for _, pod := range b.pods("default", "app=web") {
			if pod.Spec.NodeName == node && pod.Spec.Containers[0].Image == "slow" {
				b.ready(pod.Name)
			}
		}
	}
	ready("node1")
	b.daemonsAre("node1=slow node2=one node2=slow")
	ready("node2")
	b.daemonsAre("node1=slow node2=slow")
	b.daemonSetDone()
}
