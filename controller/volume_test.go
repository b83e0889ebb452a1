// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/internal/nettest"
)

func (b *bench) volume(name, size, class string, opts ...func(*corev1.PersistentVolume)) {
	b.t.Helper()
	v := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: amounts("storage=" + size), StorageClassName: class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/srv/" + name}},
		},
	}
	for _, o := range opts {
		o(v)
	}
	if _, err := b.client.CoreV1().PersistentVolumes().Create(b.t.Context(), v, metav1.CreateOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

func claimSpec(size, class string) corev1.PersistentVolumeClaimSpec {
	return corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: &class,
		Resources: corev1.VolumeResourceRequirements{Requests: amounts("storage=" + size)},
	}
}

func (b *bench) claim(name, size, class string, opts ...func(*corev1.PersistentVolumeClaim)) {
	b.t.Helper()
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: claimSpec(size, class)}
	for _, o := range opts {
		o(c)
	}
	if _, err := b.client.CoreV1().PersistentVolumeClaims("default").Create(b.t.Context(), c, metav1.CreateOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

// claimIs waits for "Bound big 5Gi" or "Pending  0".
func (b *bench) claimIs(name, want string) {
	b.t.Helper()
	nettest.Eventually(b.t, patience, "claim "+name+" "+want, func() error {
		c, err := b.client.CoreV1().PersistentVolumeClaims("default").Get(b.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got := fmt.Sprintf("%s %s %s", c.Status.Phase, c.Spec.VolumeName, c.Status.Capacity.Storage()); got != want {
			return fmt.Errorf("%s", got)
		}
		return nil
	})
}

func (b *bench) volumeIs(name string, want corev1.PersistentVolumePhase) {
	b.t.Helper()
	nettest.Eventually(b.t, patience, "volume "+name+" "+string(want), func() error {
		v, err := b.client.CoreV1().PersistentVolumes().Get(b.t.Context(), name, metav1.GetOptions{})
		if err == nil && v.Status.Phase != want {
			err = fmt.Errorf("%s", v.Status.Phase)
		}
		return err
	})
}

func (b *bench) dropClaim(name string) {
	b.t.Helper()
	if err := b.client.CoreV1().PersistentVolumeClaims("default").Delete(b.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

func usesClaim(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "data", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name},
		}})
	}
}

// unscheduled waits for the scheduler's word about a pod.
func (b *bench) unscheduled(name, want string) {
	b.t.Helper()
	nettest.Eventually(b.t, patience, "pod "+name+" is refused", func() error {
		pod, err := b.client.CoreV1().Pods("default").Get(b.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable && c.Message == want {
				return nil
			}
		}
		return fmt.Errorf("phase %s, conditions %+v", pod.Status.Phase, pod.Status.Conditions)
	})
	b.event(name, "FailedScheduling", want)
}

func (b *bench) onNode(name, want string) {
	b.t.Helper()
	nettest.Eventually(b.t, patience, "pod "+name+" is placed", func() error {
		pod, err := b.client.CoreV1().Pods("default").Get(b.t.Context(), name, metav1.GetOptions{})
		if err == nil && (pod.Spec.NodeName == "" || (want != "" && pod.Spec.NodeName != want)) {
			err = fmt.Errorf("on %q", pod.Spec.NodeName)
		}
		return err
	})
}

func onlyOn(node string) func(*corev1.PersistentVolume) {
	return func(v *corev1.PersistentVolume) {
		v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
		}}}}
	}
}

// TestClaimsAreBound to volumes that people made; pods wait for it, and say so.
func TestClaimsAreBound(t *testing.T) {
	b := newBench(t)
	if err := b.pod("early", "", "", usesClaim("data")); err != nil {
		t.Fatal(err)
	}
	b.unscheduled("early", `0/3 nodes are available: persistentvolumeclaim "data" not found.`)
	b.claim("data", "2Gi", "")
	b.unscheduled("early", "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.")
	b.event("data", "FailedBinding", "no persistent volumes available for this claim and no storage class is set")

	b.volume("small", "1Gi", "")
	b.volume("other", "5Gi", "fast")
	b.volumeIs("small", corev1.VolumeAvailable)
	b.claimIs("data", "Pending  0")
	b.volume("big", "5Gi", "", onlyOn("node2"))
	b.claimIs("data", "Bound big 5Gi")
	b.volumeIs("big", corev1.VolumeBound)
	b.onNode("early", "node2")
	b.settle()

	// The smallest one that does, and one that is asked for by name.
	b.volume("mid", "3Gi", "")
	b.volumeIs("mid", corev1.VolumeAvailable)
	b.claim("next", "1Gi", "")
	b.claimIs("next", "Bound small 1Gi")
	b.claim("named", "1Gi", "fast", func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "mid" })
	b.event("named", "VolumeMismatch", `Cannot bind to requested volume "mid": storageClassName does not match`)
	b.claim("named2", "1Gi", "", func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "mid" })
	b.claimIs("named2", "Bound mid 3Gi")
	b.claim("late", "1Gi", "", func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "mid" })
	b.event("late", "FailedBinding", `volume "mid" already bound to a different claim.`)
	// A volume that names its claim waits for it.
	b.volume("kept", "9Gi", "", func(v *corev1.PersistentVolume) {
		v.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "mine"}
	})
	b.volumeIs("kept", corev1.VolumeAvailable)
	b.claim("mine", "1Gi", "")
	b.claimIs("mine", "Bound kept 9Gi")
	b.claim("nowhere", "1Gi", "gold")
	b.event("nowhere", "ProvisioningFailed", `storageclass.storage.k8s.io "gold" not found`)

	// What becomes of a volume without its claim.
	b.dropClaim("next")
	b.volumeIs("small", corev1.VolumeReleased)
	b.volume("tmp", "20Gi", "", func(v *corev1.PersistentVolume) {
		v.Spec.PersistentVolumeReclaimPolicy, v.Spec.HostPath.Path = corev1.PersistentVolumeReclaimDelete, "/tmp/x"
	})
	b.claim("brief", "15Gi", "")
	b.claimIs("brief", "Bound tmp 20Gi")
	b.dropClaim("brief")
	b.gone("tmp")
	// A volume in use stays, unless somebody takes its protection off.
	if err := b.client.CoreV1().PersistentVolumes().Delete(t.Context(), "kept", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	b.volumeIs("kept", corev1.VolumeBound)
	b.claimIs("mine", "Bound kept 9Gi")
	if _, err := b.client.CoreV1().PersistentVolumes().Patch(t.Context(), "kept", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.claimIs("mine", "Lost kept 0")
	b.settle()

	// A claim in use stays until its pod is gone.
	b.dropClaim("data")
	b.settle()
	b.claimIs("data", "Bound big 5Gi")
	if err := b.client.CoreV1().Pods("default").Delete(t.Context(), "early", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.volumeIs("big", corev1.VolumeReleased)
	if err := b.client.CoreV1().PersistentVolumes().Delete(t.Context(), "big", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.gone("big")
	b.settle()
}

// gone waits until a volume is no more.
func (b *bench) gone(volume string) {
	b.t.Helper()
	nettest.Eventually(b.t, patience, "volume "+volume+" goes", func() error {
		v, err := b.client.CoreV1().PersistentVolumes().Get(b.t.Context(), volume, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is %s, %w", v.Status.Phase, err)
	})
}

// TestClaimsWaitForTheirPod when the class says so, and get volumes of its node.
func TestClaimsWaitForTheirPod(t *testing.T) {
	b := newBench(t)
	class := &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: "local"}, Provisioner: "kubernetes.io/no-provisioner",
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
	}
	if _, err := b.client.StorageV1().StorageClasses().Create(t.Context(), class, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.volume("a", "1Gi", "local", onlyOn("node1"))
	b.volume("b", "1Gi", "local", onlyOn("node2"))
	b.claim("data", "1Gi", "local")
	b.event("data", "WaitForFirstConsumer", "waiting for first consumer to be created before binding")
	b.settle()
	b.claimIs("data", "Pending  0")
	elsewhere := func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "node2"} }
	if err := b.pod("p", "", "", usesClaim("data"), elsewhere); err != nil {
		t.Fatal(err)
	}
	b.onNode("p", "node2")
	b.claimIs("data", "Bound b 1Gi")
	// The next one wants node2 as well, and its volume is taken.
	b.claim("more", "1Gi", "local")
	if err := b.pod("q", "", "", usesClaim("more"), elsewhere); err != nil {
		t.Fatal(err)
	}
	b.unscheduled("q", "0/3 nodes are available: 1 node(s) didn't find available persistent volumes to bind, 1 node(s) didn't match Pod's node affinity/selector, 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }.")
	// A pod with a bound claim follows its volume, or does not run.
	if err := b.pod("r", "", "", usesClaim("data"), func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "node1"} }); err != nil {
		t.Fatal(err)
	}
	b.unscheduled("r", "0/3 nodes are available: 1 node(s) didn't match PersistentVolume's node affinity, 1 node(s) didn't match Pod's node affinity/selector, 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }.")
	b.settle()
}

// TestStatefulSetKeepsItsVolumes: each pod has its own, and the next of its name too.
func TestStatefulSetKeepsItsVolumes(t *testing.T) {
	b := newBench(t)
	b.volume("v0", "1Gi", "")
	b.volume("v1", "1Gi", "")
	b.makeStatefulSet("nginx", 2, func(s *appsv1.StatefulSet) {
		s.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: claimSpec("1Gi", "")}}
	})
	b.statefulSetDone()
	had := map[string]string{}
	for _, name := range []string{"data-web-0", "data-web-1"} {
		c, err := b.client.CoreV1().PersistentVolumeClaims("default").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil || c.Status.Phase != corev1.ClaimBound {
			t.Fatalf("%v, %+v", err, c.Status)
		}
		had[name] = c.Spec.VolumeName
	}
	if had["data-web-0"] == had["data-web-1"] {
		t.Errorf("one volume for two: %v", had)
	}
	if err := b.client.CoreV1().Pods("default").Delete(t.Context(), "web-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.statefulSetDone()
	b.podsAre("web-0=nginx web-1=nginx")
	b.claimIs("data-web-0", "Bound "+had["data-web-0"]+" 1Gi")
}
