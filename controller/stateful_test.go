// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/polymorphichelpers"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/internal/nettest"
)

// webTemplate is the pod template of the tests' workloads.
func webTemplate(image string) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: image}}},
	}
}

func webSelector() *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
}

func (b *bench) makeStatefulSet(image string, replicas int32, opts ...func(*appsv1.StatefulSet)) {
	b.t.Helper()
	set := &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default"},
		Spec:       appsv1.StatefulSetSpec{Replicas: &replicas, ServiceName: "front", Selector: webSelector(), Template: webTemplate(image)},
	}
	for _, o := range opts {
		o(set)
	}
	if _, err := b.client.AppsV1().StatefulSets("default").Create(b.t.Context(), set, metav1.CreateOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) statefulSet() *appsv1.StatefulSet {
	b.t.Helper()
	set, err := b.client.AppsV1().StatefulSets("default").Get(b.t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return set
}

func (b *bench) patchStatefulSet(patch string) {
	b.t.Helper()
	if _, err := b.client.AppsV1().StatefulSets("default").Patch(b.t.Context(), "web", types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

func imagePatch(image string) string {
	return `{"spec":{"template":{"spec":{"containers":[{"name":"c","image":"` + image + `"}]}}}}`
}

// podNames are the names of the pods of app web, each with its image and a mark when
// it is on its way out.
func (b *bench) podNames() string {
	b.t.Helper()
	var out []string
	for _, pod := range b.pods("default", "app=web") {
		mark := ""
		if pod.DeletionTimestamp != nil {
			mark = "-"
		}
		out = append(out, pod.Name+"="+pod.Spec.Containers[0].Image+mark)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// podsAre waits for podNames to be want, and for everything to be at rest then.
func (b *bench) podsAre(want string) {
	b.t.Helper()
	b.settle()
	nettest.Eventually(b.t, patience, "the pods "+want, func() error {
		if got := b.podNames(); got != want {
			return fmt.Errorf("pods %s", got)
		}
		return nil
	})
}

// ready says that a pod is ready now.
func (b *bench) ready(name string) {
	b.t.Helper()
	b.patchPodStatus(name, `{"status":{"conditions":[{"type":"Ready","status":"True"}]}}`)
}

func (b *bench) patchPodStatus(name, patch string) {
	b.t.Helper()
	_, err := b.client.CoreV1().Pods("default").Patch(b.t.Context(), name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	if err != nil {
		b.t.Fatal(err)
	}
}

// done waits for what kubectl rollout status waits for.
func (b *bench) done(kind string, get func() (runtime.Object, error)) {
	b.t.Helper()
	viewer, err := polymorphichelpers.StatusViewerFor(appsv1.SchemeGroupVersion.WithKind(kind).GroupKind())
	if err != nil {
		b.t.Fatal(err)
	}
	nettest.Eventually(b.t, patience, "the rollout", func() error {
		obj, err := get()
		if err != nil {
			return err
		}
		object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
		if err != nil {
			return err
		}
		text, done, err := viewer.Status(unstructuredOf(object), 0)
		if err == nil && !done {
			err = fmt.Errorf("%s", text)
		}
		return err
	})
}

func (b *bench) statefulSetDone() {
	b.t.Helper()
	b.done("StatefulSet", func() (runtime.Object, error) { return b.statefulSet(), nil })
	b.settle()
}

// rollBack does what kubectl rollout undo does.
func (b *bench) rollBack(kind string, obj runtime.Object, revision int64) {
	b.t.Helper()
	r, err := polymorphichelpers.RollbackerFor(appsv1.SchemeGroupVersion.WithKind(kind).GroupKind(), b.client)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := r.Rollback(obj, nil, revision, cmdutil.DryRunNone); err != nil {
		b.t.Fatal(err)
	}
}

// revisions are the numbers of the revisions of app web, the oldest first.
func (b *bench) revisionsOf() string {
	b.t.Helper()
	list, err := b.client.AppsV1().ControllerRevisions("default").List(b.t.Context(), metav1.ListOptions{LabelSelector: "app=web"})
	if err != nil {
		b.t.Fatal(err)
	}
	var out []int64
	for _, r := range list.Items {
		out = append(out, r.Revision)
	}
	slices.Sort(out)
	return fmt.Sprint(out)
}

// TestStatefulSetOrder: pods come one after the other, each when the one before is
// ready, and go in the opposite order.
func TestStatefulSetOrder(t *testing.T) {
	b := newBench(t)
	b.kubelet.unready.Store("slow", true)
	b.makeStatefulSet("slow", 3)
	b.podsAre("web-0=slow")
	b.ready("web-0")
	b.podsAre("web-0=slow web-1=slow")
	b.ready("web-1")
	b.podsAre("web-0=slow web-1=slow web-2=slow")
	b.ready("web-2")
	b.statefulSetDone()
	set := b.statefulSet()
	if s := set.Status; s.Replicas != 3 || s.ReadyReplicas != 3 || s.AvailableReplicas != 3 || s.CurrentReplicas != 3 || s.UpdatedReplicas != 3 ||
		s.CurrentRevision == "" || s.CurrentRevision != s.UpdateRevision || s.ObservedGeneration != set.Generation {
		t.Errorf("status %+v", s)
	}
	pod := b.pods("default", "statefulset.kubernetes.io/pod-name=web-1")[0]
	if pod.Spec.Hostname != "web-1" || pod.Spec.Subdomain != "front" || pod.Labels["apps.kubernetes.io/pod-index"] != "1" ||
		pod.Labels["controller-revision-hash"] != set.Status.UpdateRevision {
		t.Errorf("web-1: %q %q %v", pod.Spec.Hostname, pod.Spec.Subdomain, pod.Labels)
	}
	b.kubelet.frozen.Store(true)
	b.patchStatefulSet(`{"spec":{"replicas":1}}`)
	b.podsAre("web-0=slow web-1=slow web-2=slow-")
	b.kubelet.frozen.Store(false)
	b.patchPodStatus("web-2", `{"status":{"message":"look again"}}`)
	b.podsAre("web-0=slow")
	// A pod that somebody deletes comes back under its name, as another object.
	was := b.pods("default", "app=web")[0].UID
	if err := b.client.CoreV1().Pods("default").Delete(t.Context(), "web-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.podsAre("web-0=slow")
	if b.pods("default", "app=web")[0].UID == was {
		t.Error("the pod was not made anew")
	}
	// One that has failed is replaced, too.
	b.patchPodStatus("web-0", `{"status":{"phase":"Failed"}}`)
	nettest.Eventually(t, patience, "a new web-0", func() error {
		pods := b.pods("default", "app=web")
		if len(pods) != 1 || pods[0].Status.Phase == corev1.PodFailed {
			return fmt.Errorf("%s", b.podNames())
		}
		return nil
	})
}

// TestStatefulSetUpdate: a rolling update goes down to the partition; undo brings an
// old template back as a new revision; OnDelete waits for the user.
func TestStatefulSetUpdate(t *testing.T) {
	b := newBench(t)
	b.makeStatefulSet("one", 3)
	b.statefulSetDone()
	b.patchStatefulSet(`{"spec":{"updateStrategy":{"rollingUpdate":{"partition":2}}}}`)
	b.patchStatefulSet(imagePatch("two"))
	b.podsAre("web-0=one web-1=one web-2=two")
	s := b.statefulSet().Status
	if s.CurrentRevision == s.UpdateRevision || s.UpdatedReplicas != 1 || s.CurrentReplicas != 2 {
		t.Errorf("half way: %+v", s)
	}
	// Below the partition a pod that is made anew keeps the old template.
	if err := b.client.CoreV1().Pods("default").Delete(t.Context(), "web-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.podsAre("web-0=one web-1=one web-2=two")
	b.patchStatefulSet(`{"spec":{"updateStrategy":{"rollingUpdate":{"partition":0}}}}`)
	b.podsAre("web-0=two web-1=two web-2=two")
	b.statefulSetDone()
	if got := b.revisionsOf(); got != "[1 2]" {
		t.Errorf("revisions %s", got)
	}
	b.rollBack("StatefulSet", b.statefulSet(), 1)
	b.podsAre("web-0=one web-1=one web-2=one")
	b.statefulSetDone()
	if got := b.revisionsOf(); got != "[2 3]" {
		t.Errorf("revisions after undo %s", got)
	}
	b.patchStatefulSet(`{"spec":{"updateStrategy":{"type":"OnDelete","rollingUpdate":null}}}`)
	b.patchStatefulSet(imagePatch("three"))
	b.podsAre("web-0=one web-1=one web-2=one")
	if err := b.client.CoreV1().Pods("default").Delete(t.Context(), "web-1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.podsAre("web-0=one web-1=three web-2=one")
	// Old revisions go, those in use stay.
	b.patchStatefulSet(`{"spec":{"revisionHistoryLimit":0}}`)
	nettest.Eventually(t, patience, "old revisions to go", func() error {
		if got := b.revisionsOf(); got != "[3 4]" {
			return fmt.Errorf("revisions %s", got)
		}
		return nil
	})
}

// TestStatefulSetParallelAndClaims: all pods come at once, each with its claim; the
// claims stay or go as the policy says.
func TestStatefulSetParallelAndClaims(t *testing.T) {
	b := newBench(t)
	b.kubelet.unready.Store("slow", true)
	b.makeStatefulSet("slow", 2, func(s *appsv1.StatefulSet) {
		s.Spec.PodManagementPolicy = appsv1.ParallelPodManagement
		s.Spec.Ordinals = &appsv1.StatefulSetOrdinals{Start: 5}
		s.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{
			ObjectMeta: metav1.ObjectMeta{Name: "data"},
			Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
			},
		}}
		s.Spec.PersistentVolumeClaimRetentionPolicy = &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{
			WhenScaled: appsv1.DeletePersistentVolumeClaimRetentionPolicyType,
		}
	})
	b.podsAre("web-5=slow web-6=slow")
	claims := func() string {
		list, err := b.client.CoreV1().PersistentVolumeClaims("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=web"})
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, c := range list.Items {
			names = append(names, c.Name)
		}
		return strings.Join(names, " ")
	}
	if got := claims(); got != "data-web-5 data-web-6" {
		t.Errorf("claims %s", got)
	}
	if v := b.pods("default", "app=web")[0].Spec.Volumes; v[0].PersistentVolumeClaim == nil || v[0].PersistentVolumeClaim.ClaimName != "data-web-5" {
		t.Errorf("volumes %+v", v)
	}
	b.patchStatefulSet(`{"spec":{"replicas":1}}`)
	b.podsAre("web-5=slow")
	nettest.Eventually(t, patience, "the claim of web-6 to go", func() error {
		if got := claims(); got != "data-web-5" {
			return fmt.Errorf("claims %s", got)
		}
		return nil
	})
	if err := b.client.AppsV1().StatefulSets("default").Delete(t.Context(), "web", metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}); err != nil {
		t.Fatal(err)
	}
	b.podsAre("")
	if got := claims(); got != "data-web-5" {
		t.Errorf("claims of a deleted set: %s", got)
	}
	nettest.Eventually(t, patience, "the revisions to go", func() error {
		if got := b.revisionsOf(); got != "[]" {
			return fmt.Errorf("revisions %s", got)
		}
		return nil
	})
}

// TestReplicationController keeps its pods by the ReplicaSets' rules.
func TestReplicationController(t *testing.T) {
	b := newBench(t)
	template := webTemplate("one")
	controllers := b.client.CoreV1().ReplicationControllers("default")
	if _, err := controllers.Create(t.Context(), &corev1.ReplicationController{
		ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ReplicationControllerSpec{Replicas: ptr.To[int32](3), Template: &template},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	is := func(want int32) {
		t.Helper()
		b.settle()
		nettest.Eventually(t, patience, "the status", func() error {
			rc, err := controllers.Get(t.Context(), "web", metav1.GetOptions{})
			if err != nil {
				return err
			}
			if s := rc.Status; s.Replicas != want || s.ReadyReplicas != want || s.AvailableReplicas != want || s.ObservedGeneration != rc.Generation {
				return fmt.Errorf("status %+v", s)
			}
			return nil
		})
	}
	is(3)
	if ref := metav1.GetControllerOf(&b.pods("default", "app=web")[0]); ref == nil || ref.Kind != "ReplicationController" || ref.APIVersion != "v1" {
		t.Errorf("owner %+v", ref)
	}
	events, err := b.client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.kind=ReplicationController,reason=SuccessfulCreate"})
	if err != nil || len(events.Items) == 0 {
		t.Errorf("%v, %d events", err, len(events.Items))
	}
	scale, err := controllers.GetScale(t.Context(), "web", metav1.GetOptions{})
	if err != nil || scale.Status.Selector != "app=web" {
		t.Fatal(err, scale)
	}
	scale.Spec.Replicas = 1
	if _, err := controllers.UpdateScale(t.Context(), "web", scale, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	is(1)
	orphan := metav1.DeletePropagationOrphan
	if err := controllers.Delete(t.Context(), "web", metav1.DeleteOptions{PropagationPolicy: &orphan}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	if pods := b.pods("default", "app=web"); len(pods) != 1 || metav1.GetControllerOf(&pods[0]) != nil {
		t.Errorf("pods left by an orphaning deletion: %s", b.podNames())
	}
}
