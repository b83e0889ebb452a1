// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/polymorphichelpers"

	"github.com/kplab/kplab/internal/nettest"
)

func deployment(name string, replicas int32, opts ...func(*appsv1.Deployment)) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	d := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Labels: labels},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "nginx:1", Ports: []corev1.ContainerPort{{ContainerPort: 80}}}}},
			},
		},
	}
	for _, o := range opts {
		o(d)
	}
	return d
}

func (b *bench) create(d *appsv1.Deployment) {
	b.t.Helper()
	if _, err := b.client.AppsV1().Deployments(d.Namespace).Create(b.t.Context(), d, metav1.CreateOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) get(name string) *appsv1.Deployment {
	b.t.Helper()
	d, err := b.client.AppsV1().Deployments("default").Get(b.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return d
}

func (b *bench) patch(patch string) {
	b.t.Helper()
	_, err := b.client.AppsV1().Deployments("default").Patch(b.t.Context(), "web", types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) setImage(image string) {
	b.t.Helper()
	b.patch(`{"spec":{"template":{"spec":{"containers":[{"name":"c","image":"` + image + `"}]}}}}`)
}

func (b *bench) sets(name string) []appsv1.ReplicaSet {
	b.t.Helper()
	list, err := b.client.AppsV1().ReplicaSets("default").List(b.t.Context(), metav1.ListOptions{LabelSelector: "app=" + name})
	if err != nil {
		b.t.Fatal(err)
	}
	return list.Items
}

// rolledOut asks what kubectl rollout status asks.
func (b *bench) rolledOut(name string) {
	b.t.Helper()
	viewer, err := polymorphichelpers.StatusViewerFor(appsv1.SchemeGroupVersion.WithKind("Deployment").GroupKind())
	if err != nil {
		b.t.Fatal(err)
	}
	nettest.Eventually(b.t, patience, "rollout of "+name, func() error {
		d, err := b.client.AppsV1().Deployments("default").Get(b.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(d)
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

func perNode(pods []corev1.Pod) map[string]int {
	out := map[string]int{}
	for i := range pods {
		out[pods[i].Spec.NodeName]++
	}
	return out
}

func images(pods []corev1.Pod) string {
	var out []string
	for i := range pods {
		out = append(out, pods[i].Spec.Containers[0].Image)
	}
	slices.Sort(out)
	return strings.Join(slices.Compact(out), ",")
}

func reason(d *appsv1.Deployment, t appsv1.DeploymentConditionType) string {
	for _, c := range d.Status.Conditions {
		if c.Type == t {
			return string(c.Status) + " " + c.Reason
		}
	}
	return ""
}

func TestRollout(t *testing.T) {
	b := newBench(t)
	b.create(deployment("web", 3))
	b.rolledOut("web")
	b.settle()
	if got := perNode(b.pods("default", "app=web")); got["node1"] != 2 || got["node2"] != 1 {
		t.Fatalf("3 replicas over 2 workers: %v", got)
	}
	d := b.get("web")
	if d.Annotations["deployment.kubernetes.io/revision"] != "1" || reason(d, appsv1.DeploymentProgressing) != "True NewReplicaSetAvailable" || reason(d, appsv1.DeploymentAvailable) != "True MinimumReplicasAvailable" {
		t.Fatalf("revision %v, %+v", d.Annotations, d.Status)
	}
	// Only people change what the generation counts.
	if d.Generation != 1 || d.Status.ObservedGeneration != 1 {
		t.Errorf("generation %d, observed %d", d.Generation, d.Status.ObservedGeneration)
	}
	first := b.sets("web")[0]
	hash := first.Labels[appsv1.DefaultDeploymentUniqueLabelKey]
	if hash == "" || first.Name != "web-"+hash || first.Spec.Selector.MatchLabels[appsv1.DefaultDeploymentUniqueLabelKey] != hash {
		t.Fatalf("set %s with hash %q", first.Name, hash)
	}
	for _, p := range b.pods("default", "app=web") {
		if !strings.HasPrefix(p.Name, first.Name+"-") {
			t.Fatalf("pod %s of set %s", p.Name, first.Name)
		}
	}

	// A new template, up and down within the fences, then back.
	b.setImage("nginx:2")
	b.rolledOut("web")
	b.settle()
	if got := images(b.pods("default", "app=web")); got != "nginx:2" || len(b.pods("default", "app=web")) != 3 || len(b.sets("web")) != 2 {
		t.Fatalf("after the update: %s", got)
	}
	if got := b.get("web").Annotations["deployment.kubernetes.io/revision"]; got != "2" {
		t.Fatalf("revision %s", got)
	}
	rollbacker, err := polymorphichelpers.RollbackerFor(appsv1.SchemeGroupVersion.WithKind("Deployment").GroupKind(), b.client)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rollbacker.Rollback(b.get("web"), nil, 0, cmdutil.DryRunNone); err != nil {
		t.Fatal(err)
	}
	b.rolledOut("web")
	b.settle()
	if got := images(b.pods("default", "app=web")); got != "nginx:1" || len(b.sets("web")) != 2 {
		t.Fatalf("after the rollback: %s, %d sets", got, len(b.sets("web")))
	}
	for _, rs := range b.sets("web") {
		if rs.Name == first.Name && (rs.Annotations["deployment.kubernetes.io/revision"] != "3" || rs.Annotations["deployment.kubernetes.io/revision-history"] != "1") {
			t.Fatalf("the first set after the rollback: %v", rs.Annotations)
		}
	}

	// Scaling, up and down.
	for _, n := range []int{6, 1, 0, 2} {
		b.patch(fmt.Sprintf(`{"spec":{"replicas":%d}}`, n))
		b.rolledOut("web")
		b.settle()
		if got := b.pods("default", "app=web"); len(got) != n {
			t.Fatalf("scaled to %d: %d pods", n, len(got))
		}
		if got := b.get("web").Status; int(got.Replicas) != n || int(got.AvailableReplicas) != n {
			t.Fatalf("scaled to %d: %+v", n, got)
		}
	}

	// A pod that is deleted by hand is replaced.
	victim := b.pods("default", "app=web")[0].Name
	if err := b.client.CoreV1().Pods("default").Delete(t.Context(), victim, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	if got := b.pods("default", "app=web"); len(got) != 2 || got[0].Name == victim || got[1].Name == victim {
		t.Fatalf("after a deletion by hand: %d pods", len(got))
	}

	// And all goes with the Deployment.
	background := metav1.DeletePropagationBackground
	if err := b.client.AppsV1().Deployments("default").Delete(t.Context(), "web", metav1.DeleteOptions{PropagationPolicy: &background}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, patience, "everything of web goes", func() error {
		if sets, pods := len(b.sets("web")), len(b.pods("default", "app=web")); sets+pods > 0 {
			return fmt.Errorf("%d sets and %d pods are left", sets, pods)
		}
		return nil
	})
	b.settle()
}

func TestRollingUpdateKeepsServing(t *testing.T) {
	b := newBench(t)
	b.create(deployment("web", 4, func(d *appsv1.Deployment) {
		one, zero := intstr.FromInt32(1), intstr.FromInt32(0)
		d.Spec.Strategy.RollingUpdate = &appsv1.RollingUpdateDeployment{MaxSurge: &one, MaxUnavailable: &zero}
		seconds := int32(1)
		d.Spec.ProgressDeadlineSeconds = &seconds
	}))
	b.rolledOut("web")
	b.settle()
	// Pods of this image never become ready: the rollout stops, the old ones stay.
	b.kubelet.unready.Store("nginx:broken", true)
	b.setImage("nginx:broken")
	nettest.Eventually(t, patience, "the deadline passes", func() error {
		if got := reason(b.get("web"), appsv1.DeploymentProgressing); got != "False ProgressDeadlineExceeded" {
			return fmt.Errorf("progressing is %s", got)
		}
		return nil
	})
	b.settle()
	ready := 0
	for _, p := range b.pods("default", "app=web") {
		if p.Spec.Containers[0].Image == "nginx:1" {
			ready++
		}
	}
	if ready != 4 || len(b.pods("default", "app=web")) != 5 {
		t.Fatalf("%d old pods of %d", ready, len(b.pods("default", "app=web")))
	}
	// Scaled in the middle of it, both sets grow.
	b.patch(`{"spec":{"replicas":8}}`)
	b.settle()
	if got := len(b.pods("default", "app=web")); got != 9 {
		t.Fatalf("scaled to 8 plus a surge of 1: %d pods", got)
	}
	b.setImage("nginx:3")
	b.rolledOut("web")
	b.settle()
	if got := images(b.pods("default", "app=web")); got != "nginx:3" {
		t.Fatalf("after the good image: %s", got)
	}
}

func TestRecreateWaitsForTheOldPods(t *testing.T) {
	b := newBench(t)
	b.create(deployment("web", 2, func(d *appsv1.Deployment) { d.Spec.Strategy.Type = appsv1.RecreateDeploymentStrategyType }))
	b.rolledOut("web")
	b.settle()
	b.kubelet.frozen.Store(true)
	b.setImage("nginx:2")
	b.settle()
	if got := images(b.pods("default", "app=web")); got != "nginx:1" {
		t.Fatalf("old pods still end, and there are %s", got)
	}
	b.kubelet.frozen.Store(false)
	for _, p := range b.pods("default", "app=web") { // the kubelet looks again
		b.patchPod(p.Name, `{"metadata":{"annotations":{"poke":"1"}}}`)
	}
	b.rolledOut("web")
	b.settle()
	if got := images(b.pods("default", "app=web")); got != "nginx:2" {
		t.Fatalf("afterwards: %s", got)
	}
}

func (b *bench) patchPod(name, patch string) {
	b.t.Helper()
	_, err := b.client.CoreV1().Pods("default").Patch(b.t.Context(), name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
}

func TestPauseHistoryAndCollision(t *testing.T) {
	b := newBench(t)
	b.create(deployment("web", 1, func(d *appsv1.Deployment) {
		two := int32(2)
		d.Spec.RevisionHistoryLimit = &two
	}))
	b.rolledOut("web")
	b.patch(`{"spec":{"paused":true}}`)
	b.setImage("nginx:2")
	b.settle()
	if d := b.get("web"); reason(d, appsv1.DeploymentProgressing) != "Unknown DeploymentPaused" || len(b.sets("web")) != 1 {
		t.Fatalf("paused: %s, %d sets", reason(d, appsv1.DeploymentProgressing), len(b.sets("web")))
	}
	b.patch(`{"spec":{"paused":false}}`)
	b.rolledOut("web")
	for i := 3; i <= 6; i++ {
		b.setImage(fmt.Sprintf("nginx:%d", i))
		b.rolledOut("web")
		b.settle()
	}
	if got := len(b.sets("web")); got != 3 {
		t.Fatalf("%d sets with a history of 2", got)
	}

	// A set of a strange owner has the name that the next one would get.
	d := deployment("db", 1)
	b.create(d)
	b.rolledOut("db")
	b.settle()
	name := b.sets("db")[0].Name
	zero := int64(0)
	orphan := metav1.DeletePropagationBackground
	if err := b.client.AppsV1().Deployments("default").Delete(t.Context(), "db", metav1.DeleteOptions{PropagationPolicy: &orphan, GracePeriodSeconds: &zero}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, patience, "db goes", func() error {
		if n := len(b.sets("db")); n > 0 {
			return fmt.Errorf("%d sets", n)
		}
		return nil
	})
	strange := &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: appsv1.ReplicaSetSpec{
			Replicas: new(int32),
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"x": "y"}},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"x": "y"}}, Spec: d.Spec.Template.Spec,
			},
		},
	}
	if _, err := b.client.AppsV1().ReplicaSets("default").Create(t.Context(), strange, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.create(deployment("db", 1))
	b.rolledOut("db")
	b.settle()
	if got := b.get("db").Status.CollisionCount; got == nil || *got != 1 || b.sets("db")[0].Name == name {
		t.Fatalf("collisions: %v", got)
	}
}

func TestForegroundAndOrphan(t *testing.T) {
	b := newBench(t)
	for _, name := range []string{"fore", "orphan"} {
		b.create(deployment(name, 2))
		b.rolledOut(name)
	}
	b.settle()
	b.kubelet.frozen.Store(true)
	for name, policy := range map[string]metav1.DeletionPropagation{"fore": metav1.DeletePropagationForeground, "orphan": metav1.DeletePropagationOrphan} {
		if err := b.client.AppsV1().Deployments("default").Delete(t.Context(), name, metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
			t.Fatal(err)
		}
	}
	b.settle()
	// The pods are still ending: their owners must not go first.
	if d := b.get("fore"); d.DeletionTimestamp == nil || len(b.sets("fore")) != 1 || len(b.pods("default", "app=fore")) != 2 {
		t.Fatal("an owner went before its dependants")
	}
	if _, err := b.client.AppsV1().Deployments("default").Get(t.Context(), "orphan", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Fatalf("the owner that let its dependants go is there: %v", err)
	}
	if sets := b.sets("orphan"); len(sets) != 1 || len(sets[0].OwnerReferences) != 0 || len(b.pods("default", "app=orphan")) != 2 {
		t.Fatalf("orphans: %d sets", len(sets))
	}
	b.kubelet.frozen.Store(false)
	for _, p := range b.pods("default", "app=fore") {
		b.patchPod(p.Name, `{"metadata":{"annotations":{"poke":"1"}}}`)
	}
	nettest.Eventually(t, patience, "the owner goes last", func() error {
		_, err := b.client.AppsV1().Deployments("default").Get(t.Context(), "fore", metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("still there: %w", err)
		}
		return nil
	})
	// A new Deployment of the same selector and template takes the orphans over.
	b.create(deployment("orphan", 2))
	b.rolledOut("orphan")
	b.settle()
	if sets := b.sets("orphan"); len(sets) != 1 || len(sets[0].OwnerReferences) != 1 {
		t.Fatalf("%d sets after the adoption", len(sets))
	}
}

func TestServiceGetsItsEndpoints(t *testing.T) {
	b := newBench(t)
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: map[string]string{"team": "a"}},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if _, err := b.client.CoreV1().Services("default").Create(t.Context(), svc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	slices := func() []discoveryv1.EndpointSlice {
		t.Helper()
		list, err := b.client.DiscoveryV1().EndpointSlices("default").List(t.Context(), metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=web"})
		if err != nil {
			t.Fatal(err)
		}
		return list.Items
	}
	if got := slices(); len(got) != 1 || len(got[0].Endpoints) != 0 {
		t.Fatalf("no placeholder: %+v", got)
	}
	b.create(deployment("web", 3))
	b.rolledOut("web")
	b.settle()
	got := slices()
	if len(got) != 1 || len(got[0].Endpoints) != 3 || got[0].Labels["team"] != "a" || !strings.HasPrefix(got[0].Name, "web-") {
		t.Fatalf("got %+v", got)
	}
	for _, e := range got[0].Endpoints {
		if !*e.Conditions.Ready || !*e.Conditions.Serving || *e.Conditions.Terminating || e.NodeName == nil || e.TargetRef.Kind != "Pod" {
			t.Fatalf("got %+v", e)
		}
	}
	endpoints := func() *corev1.Endpoints {
		t.Helper()
		e, err := b.client.CoreV1().Endpoints("default").Get(t.Context(), "web", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	if e := endpoints(); len(e.Subsets) != 1 || len(e.Subsets[0].Addresses) != 3 {
		t.Fatalf("got %+v", e)
	}
	// A pod that is being deleted is out of both before it is gone.
	b.kubelet.frozen.Store(true)
	victim := b.pods("default", "app=web")[0]
	if err := b.client.CoreV1().Pods("default").Delete(t.Context(), victim.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	for _, a := range endpoints().Subsets[0].Addresses {
		if a.IP == victim.Status.PodIP {
			t.Fatal("Endpoints still names a pod that is leaving")
		}
	}
	for _, e := range slices()[0].Endpoints {
		if leaving := e.Addresses[0] == victim.Status.PodIP; leaving && (*e.Conditions.Ready || !*e.Conditions.Serving || !*e.Conditions.Terminating) {
			t.Fatalf("a pod that is leaving: %+v", e.Conditions)
		}
	}
	// What a user edits is put right.
	e := endpoints()
	e.Subsets = nil
	if _, err := b.client.CoreV1().Endpoints("default").Update(t.Context(), e, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := b.client.DiscoveryV1().EndpointSlices("default").Delete(t.Context(), slices()[0].Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	if len(endpoints().Subsets) != 1 || len(slices()) != 1 {
		t.Fatal("an edit stays")
	}
	if err := b.client.CoreV1().Services("default").Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	_, err := b.client.CoreV1().Endpoints("default").Get(t.Context(), "web", metav1.GetOptions{})
	if !apierrors.IsNotFound(err) || len(slices()) != 0 {
		t.Fatalf("left over: %v, %d slices", err, len(slices()))
	}
}
