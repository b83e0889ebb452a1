// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"fmt"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

func testPod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: "nginx:1.27"}}},
	}
}

// wantError fails unless err is the API error that is says and its text has
// every part.
func wantError(tb testing.TB, what string, err error, is func(error) bool, parts ...string) {
	tb.Helper()
	if err == nil {
		tb.Errorf("%s: no error", what)
		return
	}
	if !is(err) {
		tb.Errorf("%s: wrong kind of error: %v (%v)", what, err, apierrors.ReasonForError(err))
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			tb.Errorf("%s: error %q lacks %q", what, err, p)
		}
	}
}

func TestNamespaceLifecycle(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	core := s.client.CoreV1()
	makeNamespace(t, s, "default")
	makeNamespace(t, s, "a")

	_, err := core.ConfigMaps("nowhere").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, metav1.CreateOptions{})
	wantError(t, "create in an unknown namespace", err, apierrors.IsNotFound, `namespaces "nowhere" not found`)
	wantError(t, "delete default", core.Namespaces().Delete(ctx, "default", metav1.DeleteOptions{}), apierrors.IsForbidden, "this namespace may not be deleted")

	if err := core.Namespaces().Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	ns, err := core.Namespaces().Get(ctx, "a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if ns.Status.Phase != corev1.NamespaceTerminating || ns.DeletionTimestamp == nil {
		t.Errorf("a deleted namespace is %s, deletionTimestamp %v", ns.Status.Phase, ns.DeletionTimestamp)
	}
	_, err = core.ConfigMaps("a").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, metav1.CreateOptions{})
	wantError(t, "create in a terminating namespace", err, apierrors.IsForbidden, "unable to create new content in namespace a because it is being terminated")
	if !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		t.Errorf("the refusal has no cause NamespaceTerminating: %#v", err)
	}
	ns.Spec.Finalizers = nil
	if _, err := core.Namespaces().Finalize(ctx, ns, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err = core.Namespaces().Get(ctx, "a", metav1.GetOptions{})
	wantError(t, "get after finalize", err, apierrors.IsNotFound)
}

func TestPodLife(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	pods := s.client.CoreV1().Pods("default")

	p, err := pods.Create(ctx, testPod("a"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if p.Status.Phase != corev1.PodPending || p.Status.QOSClass != corev1.PodQOSBestEffort || p.Generation != 1 ||
		p.Spec.ServiceAccountName != "default" || len(p.Spec.Volumes) != 1 || len(p.Spec.Tolerations) != 2 {
		t.Errorf("created pod: %+v", p)
	}
	_, err = pods.Create(ctx, testPod("a"), metav1.CreateOptions{})
	wantError(t, "create twice", err, apierrors.IsAlreadyExists, `pods "a" already exists`)

	bind := func(uid types.UID) error {
		return pods.Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: uid}, Target: corev1.ObjectReference{Kind: "Node", Name: "node1"}}, metav1.CreateOptions{})
	}
	wantError(t, "bind another pod of that name", bind("other"), apierrors.IsConflict)
	if err := bind(p.UID); err != nil {
		t.Fatal(err)
	}
	wantError(t, "bind twice", bind(p.UID), apierrors.IsConflict, `pod a is already assigned to node "node1"`)
	if p, err = pods.Get(ctx, "a", metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}
	if p.Spec.NodeName != "node1" || len(p.Status.Conditions) != 1 || p.Status.Conditions[0].Type != corev1.PodScheduled {
		t.Errorf("bound pod: node %q conditions %v", p.Spec.NodeName, p.Status.Conditions)
	}

	byNode, err := pods.List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=node1,status.phase=Pending"})
	if err != nil || len(byNode.Items) != 1 {
		t.Errorf("list by node: %v, %d items", err, len(byNode.Items))
	}
	_, err = pods.List(ctx, metav1.ListOptions{FieldSelector: "spec.color=red"})
	wantError(t, "unknown field", err, apierrors.IsBadRequest, "field label not supported: spec.color")

	// The status subresource keeps the spec, the main resource the status.
	p.Status.Phase, p.Status.PodIP = corev1.PodRunning, "10.244.1.2"
	p.Spec.Containers[0].Image = "ignored"
	if p, err = pods.UpdateStatus(ctx, p, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if p.Spec.Containers[0].Image != "nginx:1.27" || p.Status.Phase != corev1.PodRunning {
		t.Errorf("after a status update: %s %s", p.Spec.Containers[0].Image, p.Status.Phase)
	}
	p.Status.Phase = corev1.PodFailed
	p.Spec.Containers[0].Image = "nginx:2"
	if p, err = pods.Update(ctx, p, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if p.Status.Phase != corev1.PodRunning || p.Generation != 2 {
		t.Errorf("after an update: phase %s generation %d", p.Status.Phase, p.Generation)
	}
	p.Spec.HostNetwork = true
	_, err = pods.Update(ctx, p, metav1.UpdateOptions{})
	wantError(t, "change hostNetwork", err, apierrors.IsInvalid, "pod updates may not change fields other than")

	// A pod on a node stays until its node has stopped it.
	if err := pods.Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if p, err = pods.Get(ctx, "a", metav1.GetOptions{}); err != nil || p.DeletionTimestamp == nil || *p.DeletionGracePeriodSeconds != 30 {
		t.Fatalf("a deleted pod on a node: %v %+v", err, p)
	}
	if err := pods.Delete(ctx, "a", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		t.Fatal(err)
	}
	_, err = pods.Get(ctx, "a", metav1.GetOptions{})
	wantError(t, "get after grace 0", err, apierrors.IsNotFound)

	// One without a node goes at once, by eviction too.
	if _, err := pods.Create(ctx, testPod("b"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := pods.EvictV1(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: "b"}}); err != nil {
		t.Fatal(err)
	}
	_, err = pods.Get(ctx, "b", metav1.GetOptions{})
	wantError(t, "get after eviction", err, apierrors.IsNotFound)
}

func TestPodRefused(t *testing.T) {
	s := startServer(t, "")
	makeNamespace(t, s, "default")
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		want   []string
	}{
		"no container":   {func(p *corev1.Pod) { p.Spec.Containers = nil }, []string{"spec.containers: Required value"}},
		"no image":       {func(p *corev1.Pod) { p.Spec.Containers[0].Image = "" }, []string{"spec.containers[0].image: Required value"}},
		"restart policy": {func(p *corev1.Pod) { p.Spec.RestartPolicy = "Sometimes" }, []string{`spec.restartPolicy: Unsupported value: "Sometimes": supported values: "Always", "Never", "OnFailure"`}},
		"port":           {func(p *corev1.Pod) { p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 70000}} }, []string{"spec.containers[0].ports[0].containerPort: Invalid value: 70000: must be between 1 and 65535, inclusive"}},
		"mount": {func(p *corev1.Pod) {
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "x", MountPath: "/x"}}
		}, []string{`spec.containers[0].volumeMounts[0].name: Not found: "x"`}},
		"two names":          {func(p *corev1.Pod) { p.Spec.Containers = append(p.Spec.Containers, p.Spec.Containers[0]) }, []string{`spec.containers[1].name: Duplicate value: "web"`}},
		"probe without kind": {func(p *corev1.Pod) { p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{} }, []string{"spec.containers[0].readinessProbe: Required value: must specify a handler type"}},
		"name":               {func(p *corev1.Pod) { p.Name = "Bad_Name" }, []string{`metadata.name: Invalid value: "Bad_Name"`}},
	} {
		p := testPod("a")
		c.change(p)
		_, err := s.client.CoreV1().Pods("default").Create(t.Context(), p, metav1.CreateOptions{})
		wantError(t, name, err, apierrors.IsInvalid, c.want...)
	}
	p := testPod("a")
	p.Spec.ServiceAccountName = "nobody"
	_, err := s.client.CoreV1().Pods("default").Create(t.Context(), p, metav1.CreateOptions{})
	wantError(t, "unknown account", err, apierrors.IsForbidden, `error looking up service account default/nobody`)
}

// TestDefaultsAfterPatch takes defaulted fields away by every kind of patch:
// they come back.
func TestDefaultsAfterPatch(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	pods := s.client.CoreV1().Pods("default")
	if _, err := pods.Create(ctx, testPod("a"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for kind, patch := range map[types.PatchType]string{
		types.JSONPatchType:           `[{"op":"remove","path":"/spec/dnsPolicy"},{"op":"add","path":"/metadata/labels/json","value":"1"}]`,
		types.MergePatchType:          `{"spec":{"dnsPolicy":null},"metadata":{"labels":{"merge":"1"}}}`,
		types.StrategicMergePatchType: `{"spec":{"dnsPolicy":null,"containers":[{"name":"web","imagePullPolicy":null}]},"metadata":{"labels":{"strategic":"1"}}}`,
		types.ApplyPatchType:          `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a","labels":{"apply":"1"}}}`,
	} {
		p, err := pods.Patch(ctx, "a", kind, []byte(patch), metav1.PatchOptions{FieldManager: "test"})
		if err != nil {
			t.Errorf("%s: %v", kind, err)
			continue
		}
		if p.Spec.DNSPolicy != corev1.DNSClusterFirst || p.Spec.Containers[0].ImagePullPolicy != corev1.PullIfNotPresent {
			t.Errorf("%s: defaults are gone: %q %q", kind, p.Spec.DNSPolicy, p.Spec.Containers[0].ImagePullPolicy)
		}
	}
	p, err := pods.Get(ctx, "a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, label := range []string{"json", "merge", "strategic", "apply"} {
		if p.Labels[label] != "1" {
			t.Errorf("label %s was not set", label)
		}
	}
}

func TestServerSideApply(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	maps := s.client.CoreV1().ConfigMaps("default")
	apply := func(manager, value string, force bool) (*corev1.ConfigMap, error) {
		body := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c"},"data":{"k":%q}}`, value)
		return maps.Patch(ctx, "c", types.ApplyPatchType, []byte(body), metav1.PatchOptions{FieldManager: manager, Force: &force})
	}
	c, err := apply("alice", "1", false)
	if err != nil {
		t.Fatal(err)
	}
	again, err := apply("alice", "1", false)
	if err != nil || again.ResourceVersion != c.ResourceVersion {
		t.Errorf("applying the same again: %v, revision %s then %s", err, c.ResourceVersion, again.ResourceVersion)
	}
	_, err = apply("bob", "2", false)
	wantError(t, "conflict", err, apierrors.IsConflict, `conflict with "alice": .data.k`)
	if c, err = apply("bob", "2", true); err != nil || c.Data["k"] != "2" {
		t.Errorf("force: %v %v", err, c.Data)
	}
	for _, m := range c.ManagedFields {
		if m.Manager == "alice" {
			t.Errorf("alice still owns something: %s", m.FieldsV1)
		}
	}
}

func TestDryRunStoresNothing(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	before := s.Revision()
	all := []string{metav1.DryRunAll}
	p, err := s.client.CoreV1().Pods("default").Create(ctx, testPod("a"), metav1.CreateOptions{DryRun: all})
	if err != nil || p.UID == "" || p.Spec.DNSPolicy == "" {
		t.Fatalf("dry run: %v %+v", err, p)
	}
	if err := s.client.CoreV1().ServiceAccounts("default").Delete(ctx, "default", metav1.DeleteOptions{DryRun: all}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.CoreV1().ServiceAccounts("default").CreateToken(ctx, "default", tokenRequest(600), metav1.CreateOptions{DryRun: all}); err != nil {
		t.Fatal(err)
	}
	if s.Revision() != before {
		t.Errorf("revision %d after dry runs, was %d", s.Revision(), before)
	}
}

func TestConfigMapAndSecret(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	core := s.client.CoreV1()
	_, err := core.ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Data: map[string]string{"bad/key": "1"}}, metav1.CreateOptions{})
	wantError(t, "key", err, apierrors.IsInvalid, `data[bad/key]: Invalid value: "bad/key": a valid config key must consist of`)
	frozen, err := core.ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Data: map[string]string{"k": "1"}, Immutable: ptr.To(true)}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	frozen.Data["k"] = "2"
	_, err = core.ConfigMaps("default").Update(ctx, frozen, metav1.UpdateOptions{})
	wantError(t, "immutable", err, apierrors.IsInvalid, "data: Forbidden: field is immutable when `immutable` is set")

	secret, err := core.Secrets("default").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{GenerateName: "s-"}, StringData: map[string]string{"k": "v"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if string(secret.Data["k"]) != "v" || secret.StringData != nil || secret.Type != corev1.SecretTypeOpaque || !strings.HasPrefix(secret.Name, "s-") {
		t.Errorf("secret: %+v", secret)
	}
	secret.Type = "kplab/other"
	_, err = core.Secrets("default").Update(ctx, secret, metav1.UpdateOptions{})
	wantError(t, "type", err, apierrors.IsInvalid, "type: Invalid value: \"kplab/other\": field is immutable")
	_, err = core.Secrets("default").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "t"}, Type: corev1.SecretTypeTLS}, metav1.CreateOptions{})
	wantError(t, "tls", err, apierrors.IsInvalid, "data[tls.crt]: Required value", "data[tls.key]: Required value")
}

func TestNode(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	nodes := s.client.CoreV1().Nodes()
	n, err := nodes.Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node1"},
		Spec:       corev1.NodeSpec{PodCIDR: "10.244.1.0/24", PodCIDRs: []string{"10.244.1.0/24"}},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.132"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(n.Status.Addresses) != 1 {
		t.Error("a node that registers itself loses its status")
	}
	if _, err := nodes.Patch(ctx, "node1", types.StrategicMergePatchType, []byte(`{"spec":{"unschedulable":true,"taints":[{"key":"k","effect":"NoSchedule"}]}}`), metav1.PatchOptions{}); err != nil {
		t.Error(err)
	}
	list, err := nodes.List(ctx, metav1.ListOptions{FieldSelector: "spec.unschedulable=true"})
	if err != nil || len(list.Items) != 1 {
		t.Errorf("cordoned nodes: %v %d", err, len(list.Items))
	}
	_, err = nodes.Patch(ctx, "node1", types.MergePatchType, []byte(`{"spec":{"podCIDR":"10.244.9.0/24","podCIDRs":["10.244.9.0/24"]}}`), metav1.PatchOptions{})
	wantError(t, "podCIDR", err, apierrors.IsInvalid, `spec.podCIDRs: Forbidden: node updates may not change podCIDR except from "" to valid`)
}

// TestEventsInTwoShapes writes an event in each API version and reads it in the
// other.
func TestEventsInTwoShapes(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	about := corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "p", UID: "u"}
	if _, err := s.client.EventsV1().Events("default").Create(ctx, &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "new"}, EventTime: metav1.NowMicro(), Regarding: about, Note: "hello",
		Reason: "Because", Action: "Do", Type: "Normal", ReportingController: "c", ReportingInstance: "i",
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.CoreV1().Events("default").Create(ctx, &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "old"}, InvolvedObject: about, Message: "hallo", Reason: "Because", Type: "Warning", Count: 3,
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	core, err := s.client.CoreV1().Events("default").Get(ctx, "new", metav1.GetOptions{})
	if err != nil || core.Message != "hello" || core.InvolvedObject.Name != "p" {
		t.Errorf("new event in the old shape: %v %+v", err, core)
	}
	ev, err := s.client.EventsV1().Events("default").Get(ctx, "old", metav1.GetOptions{})
	if err != nil || ev.Note != "hallo" || ev.DeprecatedCount != 3 {
		t.Errorf("old event in the new shape: %v %+v", err, ev)
	}
	list, err := s.client.CoreV1().Events("default").List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=p,involvedObject.kind=Pod,type=Warning"})
	if err != nil || len(list.Items) != 1 {
		t.Errorf("events by fields: %v %d", err, len(list.Items))
	}
	views, err := s.client.EventsV1().Events("default").List(ctx, metav1.ListOptions{FieldSelector: "regarding.name=p"})
	if err != nil || len(views.Items) != 2 {
		t.Errorf("events of the new shape by fields: %v %d", err, len(views.Items))
	}
}

// TestWriteRules covers updates without a revision, with an old one, to a
// missing name, and without a change.
func TestWriteRules(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	maps := s.client.CoreV1().ConfigMaps("default")
	c, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	same, err := maps.Update(ctx, c, metav1.UpdateOptions{})
	if err != nil || same.ResourceVersion != c.ResourceVersion {
		t.Errorf("an update without a change: %v, revision %s then %s", err, c.ResourceVersion, same.ResourceVersion)
	}
	free := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Data: map[string]string{"k": "1"}}
	if _, err := maps.Update(ctx, free, metav1.UpdateOptions{}); err != nil {
		t.Errorf("unconditional update: %v", err)
	}
	c.Data = map[string]string{"k": "2"}
	_, err = maps.Update(ctx, c, metav1.UpdateOptions{})
	wantError(t, "old revision", err, apierrors.IsConflict, "the object has been modified")
	_, err = maps.Update(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "d"}}, metav1.UpdateOptions{})
	wantError(t, "update of nothing", err, apierrors.IsNotFound)
	wantError(t, "delete with another UID", maps.Delete(ctx, "c", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: ptr.To[types.UID]("x")}}), apierrors.IsConflict)

	leases := s.client.CoordinationV1().Leases("default")
	if _, err := leases.Update(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "l"}}, metav1.UpdateOptions{}); err != nil {
		t.Errorf("a lease created by update: %v", err)
	}
	_, err = leases.Update(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "l"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To("me")}}, metav1.UpdateOptions{})
	wantError(t, "a lease without revision", err, apierrors.IsInvalid, "metadata.resourceVersion")

	// Finalizers hold an object until they are gone.
	held := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "held", Finalizers: []string{"kplab.io/test"}}}
	if _, err := maps.Create(ctx, held, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := maps.Delete(ctx, "held", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if got, err := maps.Get(ctx, "held", metav1.GetOptions{}); err != nil || got.DeletionTimestamp == nil {
		t.Errorf("an object with a finalizer: %v %v", err, got.DeletionTimestamp)
	}
	if _, err := maps.Patch(ctx, "held", types.JSONPatchType, []byte(`[{"op":"remove","path":"/metadata/finalizers"}]`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err = maps.Get(context.Background(), "held", metav1.GetOptions{})
	wantError(t, "after the finalizer", err, apierrors.IsNotFound)
}
