// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	clienttesting "k8s.io/client-go/testing"

	"github.com/kplab/kplab/internal/nettest"
)

func TestBuiltInPodBecomesReady(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("web", "nginx:latest"))
	p := h.until("web", "ready", isReady)
	if p.Status.PodIP != "10.244.0.2" || p.Status.HostIP != nodeIP.String() || p.Status.StartTime == nil {
		t.Errorf("status is %+v", p.Status)
	}
	st := status0(p)
	if !strings.HasPrefix(st.ContainerID, "kplab://") || st.ImageID == "" || st.RestartCount != 0 || st.Started == nil || !*st.Started {
		t.Errorf("container status is %+v", st)
	}
	if st.Resources == nil || st.User == nil || st.User.Linux.UID != 0 || !slices.Equal(st.User.Linux.SupplementalGroups, []int64{0}) {
		t.Errorf("container status is %+v", st)
	}
	for _, kind := range []corev1.PodConditionType{corev1.PodInitialized, corev1.ContainersReady, corev1.PodScheduled, corev1.PodReadyToStartContainers} {
		if c := condition(&p.Status, kind); c == nil || c.Status != corev1.ConditionTrue {
			t.Errorf("condition %s is %+v", kind, c)
		}
	}
	nettest.Eventually(t, patience, "an answer", func() error {
		res, body, err := h.fetch(p.Status.PodIP)
		if err != nil {
			return err
		}
		if res.Header.Get("X-Kplab-Pod") != "web" || res.Header.Get("X-Kplab-Node") != "n1" || res.Header.Get("X-Kplab-Client") != nodeIP.String() {
			t.Errorf("headers are %v", res.Header)
		}
		if !strings.Contains(body, "Welcome to nginx!") {
			t.Errorf("page is %q", body)
		}
		return nil
	})
	events := h.recorded()
	for _, want := range []string{`Pulled Container image "nginx:latest" already present on machine and can be accessed by the pod`, "Created Container created", "Started Container started"} {
		if !hasEvent(events, want) {
			t.Errorf("no event %q in %v", want, events)
		}
	}
	writes := 0
	for _, a := range h.client.Actions() {
		if a.Matches("update", "pods/status") {
			writes++
		}
	}
	if writes != 1 {
		t.Errorf("the way to Ready took %d status writes, want 1", writes)
	}
	if !strings.Contains(h.log(p), "GET / HTTP/1.1") {
		t.Errorf("no access log: %q", h.log(p))
	}
}

func TestProcessRunsToItsEnd(t *testing.T) {
	h := newHarness(t)
	p := newTestPod("job", "busybox", "sh", "-c", `echo "hello from $HOSTNAME"; echo oops >&2; echo bye > /dev/termination-log; exit 3`)
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	p.Spec.Containers[0].TerminationMessagePath = "/dev/termination-log"
	h.create(p)
	p = h.until("job", "failed", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed })
	st := status0(p).State.Terminated
	if st == nil || st.ExitCode != 3 || st.Reason != "Error" || st.Message != "bye" {
		t.Errorf("terminated state is %+v", st)
	}
	if text := h.log(p); !strings.Contains(text, "hello from job") || !strings.Contains(text, "oops") {
		t.Errorf("log is %q", text)
	}
	nettest.Eventually(t, patience, "the sandbox to be gone", func() error {
		if n := len(h.runtime.List()); n != 0 {
			return fmt.Errorf("%d sandboxes", n)
		}
		return nil
	})
	ok := newTestPod("fine", "busybox", "true")
	ok.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
	h.create(ok)
	p = h.until("fine", "succeeded", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodSucceeded })
	if c := condition(&p.Status, corev1.PodReady); c == nil || c.Status != corev1.ConditionFalse || c.Reason != "PodCompleted" {
		t.Errorf("ready condition is %+v", c)
	}
}

func TestCrashLoop(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("crash", "busybox", "sh", "-c", "exit 1"))
	p := h.until("crash", "backing off", func(p *corev1.Pod) bool {
		w := status0(p).State.Waiting
		return w != nil && w.Reason == "CrashLoopBackOff"
	})
	st := status0(p)
	if st.RestartCount != 1 {
		t.Errorf("restart count is %d, want 1: the first restart comes at once", st.RestartCount)
	}
	if !strings.Contains(st.State.Waiting.Message, "back-off 10s restarting failed container=main pod=crash_default(uid-crash)") {
		t.Errorf("message is %q", st.State.Waiting.Message)
	}
	if st.LastTerminationState.Terminated == nil || st.LastTerminationState.Terminated.ExitCode != 1 {
		t.Errorf("last state is %+v", st.LastTerminationState)
	}
	if p.Status.Phase != corev1.PodRunning {
		t.Errorf("phase is %s, want Running", p.Status.Phase)
	}
	if events := h.recorded(); !hasEvent(events, "BackOff Back-off restarting failed container main in pod crash_default(uid-crash)") {
		t.Errorf("events are %v", events)
	}
}

func TestUnknownImage(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("odd", "example.com/no/such:1"))
	p := h.until("odd", "waiting for its image", func(p *corev1.Pod) bool {
		w := status0(p).State.Waiting
		return w != nil && w.Reason == "ErrImagePull"
	})
	if msg := status0(p).State.Waiting.Message; !strings.Contains(msg, "nginx") || !strings.Contains(msg, "busybox") {
		t.Errorf("message does not list the images: %q", msg)
	}
	if p.Status.Phase != corev1.PodPending || p.Status.PodIP == "" {
		t.Errorf("status is %+v", p.Status)
	}
	events := h.recorded()
	for _, want := range []string{"Failed Failed to pull image", "Failed Error: ErrImagePull"} {
		if !hasEvent(events, want) {
			t.Errorf("no event %q in %v", want, events)
		}
	}
	h.delete("odd", 30)
	h.untilGone("odd")
}

// What kept a container from its image is said in its status and in events, and a
// name that is none is not looked for.
func TestImagesThatCannotBe(t *testing.T) {
	h := newHarness(t)
	for name, c := range map[string]struct{ image, reason, message, event string }{
		"never": {"example.com/no/such:1", "ErrImageNeverPull", `Container image "example.com/no/such:1" is not present with pull policy of Never`, "ErrImageNeverPull Container image"},
		"odd":   {"a b", "InvalidImageName", `Failed to apply default image tag "a b": couldn't parse image name "a b": invalid reference format`, "InspectFailed Failed to apply"},
	} {
		p := newTestPod(name, c.image)
		p.Spec.Containers[0].ImagePullPolicy = corev1.PullNever
		h.create(p)
		p = h.until(name, "waiting for its image", func(p *corev1.Pod) bool {
			w := status0(p).State.Waiting
			return w != nil && w.Reason == c.reason
		})
		if got := status0(p).State.Waiting.Message; got != c.message {
			t.Errorf("%s: message is %q", name, got)
		}
		if events := h.recorded(); !hasEvent(events, c.event) || !hasEvent(events, "Failed Error: "+c.reason) {
			t.Errorf("%s: events are %v", name, events)
		}
	}
}

func TestInitContainersAndSidecar(t *testing.T) {
	h := newHarness(t)
	always := corev1.ContainerRestartPolicyAlways
	p := newTestPod("ordered", "nginx")
	share := []corev1.VolumeMount{{Name: "share", MountPath: "/usr/share/nginx/html"}}
	p.Spec.Volumes = []corev1.Volume{{Name: "share", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	p.Spec.Containers[0].VolumeMounts = share
	p.Spec.InitContainers = []corev1.Container{
		{Name: "first", Image: "busybox", Command: []string{"sh", "-c", "echo one > /usr/share/nginx/html/index.html"}, VolumeMounts: share},
		{Name: "side", Image: "busybox", Command: []string{"sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1; done"}, RestartPolicy: &always},
		{Name: "second", Image: "busybox", Command: []string{"sh", "-c", "echo two >> /usr/share/nginx/html/index.html"}, VolumeMounts: share},
	}
	h.create(p)
	p = h.until("ordered", "ready", isReady)
	var body string
	nettest.Eventually(t, patience, "an answer", func() error {
		var err error
		_, body, err = h.fetch(p.Status.PodIP)
		return err
	})
	if body != "one\ntwo\n" {
		t.Errorf("page is %q, want what the init containers wrote in order", body)
	}
	for _, st := range p.Status.InitContainerStatuses {
		if !st.Ready || st.Name == "side" != (st.State.Running != nil) {
			t.Errorf("init container %s: %+v", st.Name, st)
		}
	}
	h.delete("ordered", 5)
	h.untilGone("ordered")
}

func TestDeletionServesOnAndCleansUp(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("web", "nginx"))
	p := h.until("web", "ready", isReady)
	nettest.Eventually(t, patience, "an answer", func() error { _, _, err := h.fetch(p.Status.PodIP); return err })
	h.delete("web", 30)
	start := time.Now()
	nettest.Eventually(t, patience, "the end to begin", func() error {
		if !hasEvent(h.recorded(), "Killing Stopping container main") {
			return errors.New("not yet")
		}
		return nil
	})
	if _, _, err := h.fetch(p.Status.PodIP); err != nil {
		t.Errorf("during the drain the server is gone: %v", err)
	}
	h.untilGone("web")
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("the deletion took %s", took)
	}
	var asked *metav1.DeleteOptions
	for _, a := range h.client.Actions() {
		if d, ok := a.(clienttesting.DeleteActionImpl); ok {
			asked = &d.DeleteOptions
		}
	}
	if asked == nil || asked.Preconditions == nil || *asked.Preconditions.UID != "uid-web" || *asked.GracePeriodSeconds != 0 {
		t.Errorf("delete options are %+v", asked)
	}
	if n := len(h.runtime.List()); n != 0 {
		t.Errorf("%d sandboxes are left", n)
	}
	if _, _, err := h.fetch(p.Status.PodIP); err == nil {
		t.Error("the pod still answers")
	}
}

func TestStubbornProcessIsKilledAfterItsGrace(t *testing.T) {
	h := newHarness(t)
	p := newTestPod("deaf", "busybox", "sh", "-c", "trap '' TERM; while :; do sleep 1; done")
	p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"sh", "-c", "echo x"}}}}
	h.create(p)
	h.until("deaf", "ready", isReady)
	start := time.Now()
	h.delete("deaf", 1)
	h.untilGone("deaf")
	if took := time.Since(start); took < time.Second {
		t.Errorf("it was killed after %s, before its grace period", took)
	}
}

func TestProbes(t *testing.T) {
	h := newHarness(t)
	p := newTestPod("probed", "busybox", "sh", "-c", "while :; do sleep 1; done")
	p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"cat", "/tmp/ready"}}}, PeriodSeconds: 1, TimeoutSeconds: 5,
	}
	h.create(p)
	h.until("probed", "running and not ready", func(p *corev1.Pod) bool { return status0(p).State.Running != nil && !status0(p).Ready })
	k := h.kubelet
	run := func(args ...string) {
		t.Helper()
		kp := k.find("default", "probed")
		code, err := k.exec(context.Background(), kp, kp.object(), &kp.object().Spec.Containers[0], execArgs{args: args})
		if err != nil || code != 0 {
			t.Fatalf("exec %v: %d, %v", args, code, err)
		}
	}
	run("touch", "/tmp/ready")
	h.until("probed", "ready", isReady)
	run("rm", "/tmp/ready")
	h.until("probed", "not ready", func(p *corev1.Pod) bool { return !isReady(p) && status0(p).RestartCount == 0 })
	nettest.Eventually(t, patience, "an event", func() error {
		if !hasEvent(h.recorded(), "Unhealthy Readiness probe failed") {
			return errors.New("none yet")
		}
		return nil
	})

	web := newTestPod("web", "nginx")
	web.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: "http", ContainerPort: 80}}
	web.Spec.Containers[0].ReadinessProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/", Port: intstr.FromString("http")}}, PeriodSeconds: 10,
	}
	web.Spec.Containers[0].StartupProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(80)}}, PeriodSeconds: 10,
	}
	start := time.Now()
	h.create(web)
	h.until("web", "ready", isReady)
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("a server that is up at once became ready after %s", took)
	}
	sick := newTestPod("sick", "nginx")
	sick.Spec.TerminationGracePeriodSeconds = new(int64)
	// Liveness is asked only of a server that listens: on a busy machine the first answer
	// would else be a refused connection, over and over.
	sick.Spec.Containers[0].StartupProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(80)}}, PeriodSeconds: 1, FailureThreshold: 60,
	}
	sick.Spec.Containers[0].LivenessProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/missing", Port: intstr.FromInt32(80)}}, PeriodSeconds: 1, FailureThreshold: 1,
	}
	h.create(sick)
	h.until("sick", "restarted", func(p *corev1.Pod) bool { return status0(p).RestartCount > 0 })
	if events := h.recorded(); !hasEvent(events, "Killing Container main failed liveness probe, will be restarted") || !hasEvent(events, "HTTP probe failed with statuscode: 404") {
		t.Errorf("events are %v", events)
	}
}

func TestHostNetwork(t *testing.T) {
	h := newHarness(t)
	p := newTestPod("host", "busybox", "sh", "-c", "ip addr show lo; while :; do sleep 1; done")
	p.Spec.HostNetwork = true
	h.create(p)
	p = h.until("host", "ready", isReady)
	if p.Status.PodIP != nodeIP.String() {
		t.Errorf("pod IP is %s, want the node's", p.Status.PodIP)
	}
	nettest.Eventually(t, patience, "the output", func() error {
		if text := h.log(p); !strings.Contains(text, nodeIP.String()) {
			return fmt.Errorf("log is %q", text)
		}
		return nil
	})
	h.delete("host", 0)
	h.untilGone("host")
}
