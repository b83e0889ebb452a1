// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/kplab/kplab/internal/nettest"
)

const loop = "while :; do sleep 1; done"

// TestMissingProgram: a program that is not there fails an attempt, which counts.
func TestMissingProgram(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("absent", "busybox", "no-such-program"))
	p := h.until("absent", "counted", func(p *corev1.Pod) bool {
		st := status0(p)
		return st.RestartCount >= 1 && st.State.Waiting != nil && st.State.Waiting.Reason == "CrashLoopBackOff"
	})
	last := status0(p).LastTerminationState.Terminated
	if last == nil || last.ExitCode != 128 || last.Reason != "StartError" || !strings.Contains(last.Message, "no-such-program") || last.StartedAt.Unix() != 0 {
		t.Errorf("the last attempt is %+v", last)
	}
	never := newTestPod("never", "busybox", "/etc")
	never.Spec.RestartPolicy = corev1.RestartPolicyNever
	h.create(never)
	p = h.until("never", "failed", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed })
	if st := status0(p); st.State.Terminated == nil || st.State.Terminated.Reason != "StartError" || st.RestartCount != 0 {
		t.Errorf("the status is %+v", st)
	}
	h.delete("absent", 0)
	h.untilGone("absent")
}

// TestActiveDeadline: a pod that is active for too long ends.
func TestActiveDeadline(t *testing.T) {
	h := newHarness(t)
	p := newTestPod("late", "busybox", "sh", "-c", loop)
	p.Spec.ActiveDeadlineSeconds, p.Spec.TerminationGracePeriodSeconds = new(int64), new(int64)
	*p.Spec.ActiveDeadlineSeconds = 1
	h.create(p)
	p = h.until("late", "ended", func(p *corev1.Pod) bool {
		return p.Status.Phase == corev1.PodFailed && status0(p).State.Terminated != nil
	})
	if p.Status.Reason != "DeadlineExceeded" || !hasEvent(h.recorded(), "DeadlineExceeded Pod was active") {
		t.Errorf("status is %+v", p.Status)
	}
}

// TestEmptyDirLimits: medium Memory is a directory of its own that ends with the pod,
// and a volume that holds more than it may ends the pod.
func TestEmptyDirLimits(t *testing.T) {
	h := newHarness(t)
	limit := resource.MustParse("64Ki")
	p := newTestPod("full", "busybox", "sh", "-c", "dd if=/dev/zero of=/cache/f bs=1024 count=128; "+loop)
	p.Spec.TerminationGracePeriodSeconds = new(int64)
	p.Spec.Volumes = []corev1.Volume{{Name: "cache", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: &limit}}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "cache", MountPath: "/cache"}}
	h.create(p)
	file := filepath.Join(h.dir, "run", "memory", string(p.UID), "cache", "f")
	nettest.Eventually(t, patience, "the file in memory", func() error {
		_, err := os.Stat(file)
		return err
	})
	p = h.until("full", "evicted", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed })
	if p.Status.Reason != "Evicted" || !strings.Contains(p.Status.Message, `Usage of EmptyDir volume "cache" exceeds the limit "64Ki"`) {
		t.Errorf("status is %+v", p.Status)
	}
	h.delete("full", 0)
	h.untilGone("full")
	nettest.Eventually(t, patience, "no memory left", func() error {
		entries, err := os.ReadDir(filepath.Dir(filepath.Dir(filepath.Dir(file))))
		if err == nil && len(entries) > 0 {
			return os.ErrExist
		}
		return err
	})
}

// TestFSGroup: volumes of the pod belong to its group, so that a process that is not
// root can write emptyDir and read what the API gives it.
func TestFSGroup(t *testing.T) {
	h := newHarness(t)
	group, user, secret := int64(4321), int64(1234), int32(0o400)
	p := newTestPod("grouped", "busybox", "sh", "-c", "id -G; cat /meta/name; touch /data/f; stat -L -c '%g %a' /data /data/f /meta/name; "+loop)
	p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: &group, RunAsUser: &user, RunAsGroup: &user}
	p.Spec.Volumes = []corev1.Volume{
		{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "meta", VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{DefaultMode: &secret, Items: []corev1.DownwardAPIVolumeFile{
			{Path: "name", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}},
		}}}},
	}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}, {Name: "meta", MountPath: "/meta"}}
	h.create(p)
	h.eventuallyLog(p, "1234 4321\ngrouped4321 2777\n4321 644\n4321 440\n")
}
