// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/kplab/kplab/internal/nettest"
)

// placed creates a pod on a node, as if the scheduler had put it there.
func (b *bench) placed(name, node string, tolerations ...corev1.Toleration) {
	b.t.Helper()
	_, err := b.client.CoreV1().Pods("default").Create(b.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeName: node, Tolerations: tolerations,
			Containers: []corev1.Container{{Name: "web", Image: "nginx"}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
}

// leaves waits until a pod is deleted, or on its way.
func (b *bench) leaves(name string) {
	b.t.Helper()
	nettest.Eventually(b.t, patience, "pod "+name+" leaves", func() error {
		pod, err := b.client.CoreV1().Pods("default").Get(b.t.Context(), name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err == nil && pod.DeletionTimestamp == nil {
			err = fmt.Errorf("it is %s on %q", pod.Status.Phase, pod.Spec.NodeName)
		}
		return err
	})
}

// TestTaintEviction: a NoExecute taint evicts those who do not tolerate it.
func TestTaintEviction(t *testing.T) {
	b := newBench(t)
	b.placed("soon", "node1")
	b.placed("never", "node1", corev1.Toleration{Key: "gone", Operator: corev1.TolerationOpExists})
	b.placed("elsewhere", "node2")
	b.settle()
	taint := `{"spec":{"taints":[{"key":"gone","effect":"NoExecute"}]}}`
	if _, err := b.client.CoreV1().Nodes().Patch(t.Context(), "node1", types.StrategicMergePatchType, []byte(taint), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.leaves("soon")
	// One that comes after the taint.
	b.placed("late", "node1")
	b.leaves("late")
	b.event("soon", "TaintManagerEviction", "Marking for deletion Pod default/soon")
	b.settle()
	for _, name := range []string{"never", "elsewhere"} {
		if pod, err := b.client.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{}); err != nil || pod.DeletionTimestamp != nil {
			t.Errorf("pod %s goes too: %v", name, err)
		}
	}
}

// TestPodsOfNoNode: the pods of a node that is deleted go after a while.
func TestPodsOfNoNode(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	b := newBench(t, func(b *bench) { b.clock = clock })
	b.placed("left", "node2")
	b.placed("stays", "node1")
	b.settle()
	if err := b.client.CoreV1().Nodes().Delete(t.Context(), "node2", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, patience, "the controller waits for the quarantine", func() error {
		if !clock.HasWaiters() {
			return fmt.Errorf("nobody waits")
		}
		clock.Step(41 * time.Second)
		_, err := b.client.CoreV1().Pods("default").Get(t.Context(), "left", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("pod left: %w", err)
	})
	if _, err := b.client.CoreV1().Pods("default").Get(t.Context(), "stays", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
}
