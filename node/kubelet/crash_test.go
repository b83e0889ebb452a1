// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox"
)

// A daemon that ends without a word leaves pods that the next one takes over: the
// same addresses, the same processes, the servers open again, nothing restarted.
func TestNextDaemonAdopts(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("web", "nginx"))
	h.create(newTestPod("loop", "busybox", "sh", "-c", "while :; do sleep 1; done"))
	h.create(newTestPod("ends", "busybox", "sh", "-c", "while [ ! -e /tmp/end ]; do sleep 0.1; done; exit 7"))
	h.create(newTestPod("doomed", "nginx"))
	before := map[string]*corev1.Pod{}
	for _, name := range []string{"web", "loop", "ends", "doomed"} {
		before[name] = h.until(name, "ready", isReady)
	}
	pid := func(name string) int {
		t.Helper()
		procs := h.runtime.Get("uid-" + name).Processes()
		if len(procs) != 1 {
			t.Fatalf("%s has %d processes", name, len(procs))
		}
		return procs[0].Pid()
	}
	loop := pid("loop")
	h.stop()
	// While no daemon runs, one process ends and one pod is deleted.
	r, err := sandbox.Open(sandbox.Config{Dir: filepath.Join(h.dir, "run")})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Get("uid-ends").Exec(context.Background(), sandbox.ExecSpec{Container: "main", Args: []string{"touch", "/tmp/end"}}); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if err := h.client.CoreV1().Pods("default").Delete(context.Background(), "doomed", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}

	h.start()
	<-h.kubelet.started
	h.until("ends", "restarted", func(p *corev1.Pod) bool { return status0(p).RestartCount == 1 && status0(p).State.Running != nil })
	p, _ := h.get("ends")
	if last := status0(p).LastTerminationState.Terminated; last == nil || last.ExitCode != 7 {
		t.Errorf("last state is %+v, want exit code 7", last)
	}
	nettest.Eventually(t, patience, "nginx to answer again", func() error {
		_, _, err := h.fetch(before["web"].Status.PodIP)
		return err
	})
	for _, name := range []string{"web", "loop"} {
		p := h.until(name, "ready", isReady)
		was, is := status0(before[name]), status0(p)
		if p.Status.PodIP != before[name].Status.PodIP || is.ContainerID != was.ContainerID || is.RestartCount != 0 || !is.State.Running.StartedAt.Equal(&was.State.Running.StartedAt) {
			t.Errorf("%s was %+v, is %+v", name, was, is)
		}
	}
	if now := pid("loop"); now != loop {
		t.Errorf("the process is %d, was %d", now, loop)
	}
	if h.runtime.Get("uid-doomed") != nil {
		t.Error("the sandbox of a pod that was deleted meanwhile is there")
	}
	// The adopted pods can be ended.
	for _, name := range []string{"web", "loop", "ends"} {
		h.delete(name, 0)
		h.untilGone(name)
	}
}

// After a reboot nothing is left but the API's objects: pods are made anew.
func TestRebootMakesPodsAnew(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("web", "nginx"))
	h.create(newTestPod("loop", "busybox", "sh", "-c", "while :; do sleep 1; done"))
	done := newTestPod("done", "busybox", "true")
	done.Spec.RestartPolicy = corev1.RestartPolicyNever
	h.create(done)
	was := status0(h.until("web", "ready", isReady))
	h.until("loop", "ready", isReady)
	h.until("done", "over", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodSucceeded })
	h.stop()
	if err := sandbox.Destroy(context.Background(), filepath.Join(h.dir, "run")); err != nil {
		t.Fatal(err)
	}
	h.recorded()
	h.start()
	for _, name := range []string{"web", "loop"} {
		p := h.until(name, "restarted and ready", func(p *corev1.Pod) bool { return isReady(p) && status0(p).RestartCount == 1 })
		last := status0(p).LastTerminationState.Terminated
		if last == nil || last.ExitCode != 255 || last.Reason != "Unknown" {
			t.Errorf("%s: last state is %+v", name, last)
		}
	}
	p, _ := h.get("web")
	if status0(p).ContainerID == was.ContainerID {
		t.Error("the container is a new one with the old ID")
	}
	if p, _ := h.get("done"); p.Status.Phase != corev1.PodSucceeded || status0(p).RestartCount != 0 {
		t.Errorf("a pod that was over is %+v", p.Status)
	}
	if !hasEvent(h.recorded(), "SandboxChanged") {
		t.Error("no event SandboxChanged")
	}
	nettest.Eventually(t, patience, "nginx to answer", func() error {
		_, _, err := h.fetch(p.Status.PodIP)
		return err
	})
	if n := len(h.runtime.List()); n != 2 {
		t.Error(fmt.Errorf("%d sandboxes, want 2", n))
	}
}
