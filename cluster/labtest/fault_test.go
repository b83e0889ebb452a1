// SPDX-License-Identifier: Apache-2.0

package labtest_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/cluster/labtest"
	"github.com/kplab/kplab/internal/nettest"
)

// TestHeldNodes holds a node in each way and gives it a pod: the pod waits, and starts
// when the node is let go.
func TestHeldNodes(t *testing.T) {
	lab := labtest.Start(t, labtest.Options{Nodes: 2})
	lab.Settle()
	ctx := context.Background()
	pods := lab.Client.CoreV1().Pods("default")
	for i, hold := range []struct {
		what string
		do   func()
	}{
		{"paused", func() { lab.OnNode("node1", cluster.PauseNode) }},
		{"the API stopped for it", func() { lab.Break(cluster.Fault{Kind: cluster.APIStopped, From: cluster.FromNodes}) }},
		{"its link down", func() { lab.SetLink("node1", cluster.LinkFaults{Down: true}) }},
		{"cut off from the control plane", func() { lab.SetLink("node1", cluster.LinkFaults{To: "master", Drop: "out"}) }},
		{"killed", func() { lab.OnNode("node1", cluster.KillNode) }},
		{"stopped", func() { lab.OnNode("node1", cluster.StopNode) }},
	} {
		hold.do()
		name := fmt.Sprintf("pod-%d", i)
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
			NodeName: "node1", Containers: []corev1.Container{{Name: "c", Image: "nginx"}},
		}}
		if _, err := pods.Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		lab.Settle()
		got, err := pods.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got.Status.PodIP != "" || len(got.Status.ContainerStatuses) > 0 {
			t.Errorf("%s, and the node starts a pod: %+v", hold.what, got.Status)
		}
		lab.Mend()
		nettest.Eventually(t, 30*time.Second, "the pod to start after the node was "+hold.what, func() error {
			got, err := pods.Get(ctx, name, metav1.GetOptions{})
			if err == nil && got.Status.Phase != corev1.PodRunning {
				err = fmt.Errorf("it is %+v", got.Status)
			}
			return err
		})
	}
}

// TestStoppedAPI stops the API for all: nobody gets in, the nodes stay, and it comes back.
func TestStoppedAPI(t *testing.T) {
	lab := labtest.Start(t, labtest.Options{Nodes: 2})
	lab.Settle()
	ctx := context.Background()
	lab.Break(cluster.Fault{Kind: cluster.APIStopped})
	if _, err := lab.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a stopped API answers %v, want a refusal", err)
	}
	if out, err := lab.TryExec("node1", "curl", "-sSk", "-m", "5", "https://10.0.0.131:6443/healthz"); err == nil || !strings.Contains(err.Error(), "(7)") {
		t.Errorf("a stopped API answers a node: %q, %v; want a refusal", out, err)
	}
	lab.Mend()
	if out := lab.Exec("node1", "curl", "-sSk", "-m", "5", "https://10.0.0.131:6443/healthz"); !strings.Contains(out, "ok") {
		t.Errorf("the API is back, and says %q", out)
	}
	nodes, err := lab.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil || len(nodes.Items) != 2 {
		t.Fatalf("%d nodes, %v", len(nodes.Items), err)
	}
	lab.Settle()
}
