// SPDX-License-Identifier: Apache-2.0

package registry_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/apiserver"
)

// The tests of this file send requests to a whole server, so that decoding,
// patching, field management and headers are those a client meets.

func TestMain(m *testing.M) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	os.Exit(m.Run())
}

type server struct {
	client *kubernetes.Clientset
	warned *warned
	stop   func()
}

// start runs a server with its state in dir until the test ends or stop is
// called.
func start(t *testing.T, dir string) *server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, err := apiserver.New(apiserver.Config{
		StateDir: dir, Listeners: []net.Listener{l}, ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
		NoFsync: true, Version: "v0.0.1-test", Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("stop: %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Error("the server does not stop")
		}
	})
	t.Cleanup(stop)
	ready, cancelReady := context.WithTimeout(ctx, 20*time.Second)
	defer cancelReady()
	if err := s.Ready(ready); err != nil {
		t.Fatal(err)
	}
	w := &warned{}
	config := s.ClientConfig("tester", "system:masters")
	config.WarningHandler = w
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return &server{client, w, stop}
}

// withNamespaces makes namespaces as the controllers of a lab would.
func (s *server) withNamespaces(t *testing.T, names ...string) *server {
	t.Helper()
	for _, name := range names {
		_, err := s.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	return s
}

// warned records Warning headers.
type warned struct {
	mu    sync.Mutex
	texts []string
}

var _ rest.WarningHandler = &warned{}

// HandleWarningHeader implements rest.WarningHandler.
func (w *warned) HandleWarningHeader(_ int, _ string, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.texts = append(w.texts, text)
}

func (w *warned) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	texts := w.texts
	w.texts = nil
	return texts
}

// owned returns, for each field manager, the paths of spec that it owns, as JSON.
func owned(t *testing.T, m metav1.Object) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, e := range m.GetManagedFields() {
		var fields map[string]json.RawMessage
		if err := json.Unmarshal(e.FieldsV1.Raw, &fields); err != nil {
			t.Fatal(err)
		}
		out[e.Manager+"/"+e.Subresource] = string(fields["f:spec"])
	}
	return out
}

// TestServiceApply applies a Service twice and lets two managers meet: what the
// server allocated belongs to nobody.
func TestServiceApply(t *testing.T) {
	s := start(t, t.TempDir()).withNamespaces(t, "default")
	services := s.client.CoreV1().Services("default")
	apply := func(manager, body string) (*corev1.Service, error) {
		return services.Patch(t.Context(), "x", types.ApplyPatchType, []byte(body), metav1.PatchOptions{FieldManager: manager})
	}
	const manifest = `{"apiVersion":"v1","kind":"Service","metadata":{"name":"x"},"spec":{"type":"NodePort","selector":{"app":"web"},"ports":[{"port":80}]}}`
	first, err := apply("alice", manifest)
	if err != nil {
		t.Fatal(err)
	}
	if first.Spec.ClusterIP == "" || first.Spec.Ports[0].NodePort < 30086 {
		t.Errorf("%+v", first.Spec)
	}
	want := `{"f:ports":{"k:{\"port\":80,\"protocol\":\"TCP\"}":{".":{},"f:port":{}}},"f:selector":{},"f:type":{}}`
	if got := owned(t, first)["alice/"]; got != want {
		t.Errorf("alice owns %s\nwant %s", got, want)
	}
	again, err := apply("alice", manifest)
	if err != nil {
		t.Fatal(err)
	}
	if again.ResourceVersion != first.ResourceVersion {
		t.Error("A19: applying the same again wrote something")
	}
	_, err = apply("bob", strings.Replace(manifest, "NodePort", "ClusterIP", 1))
	if !apierrors.IsConflict(err) || !strings.Contains(err.Error(), `conflict with "alice": .spec.type`) {
		t.Errorf("bob: %v", err)
	}
	changed, err := apply("alice", strings.Replace(manifest, `"type":"NodePort",`, "", 1))
	if err != nil {
		t.Fatal(err)
	}
	if changed.Spec.Type != corev1.ServiceTypeClusterIP || changed.Spec.Ports[0].NodePort != 0 || changed.Spec.ClusterIP != first.Spec.ClusterIP || changed.Spec.ExternalTrafficPolicy != "" {
		t.Errorf("B06 by apply: %+v", changed.Spec)
	}
	if _, err := apply("alice", strings.Replace(manifest, `"type":"NodePort"`, fmt.Sprintf(`"type":"NodePort","clusterIP":%q`, first.Spec.ClusterIP), 1)); err != nil {
		t.Errorf("the own address may be named: %v", err)
	}
}

func TestServicePatches(t *testing.T) {
	s := start(t, t.TempDir()).withNamespaces(t, "default", "two")
	services := s.client.CoreV1().Services("default")
	create := func(ns, spec string) (*corev1.Service, error) {
		out := &corev1.Service{}
		err := s.client.CoreV1().RESTClient().Post().Namespace(ns).Resource("services").Param("fieldValidation", "Strict").
			SetHeader("Content-Type", "application/json").
			Body([]byte(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"x"},"spec":` + spec + `}`)).Do(t.Context()).Into(out)
		return out, err
	}
	merge := func(patch string) (*corev1.Service, error) {
		return services.Patch(t.Context(), "x", types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	}
	t.Run("A40", func(t *testing.T) {
		_, err := create("default", `{"topologyKeys":["a"],"ports":[{"port":80}]}`)
		if !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), `Service in version "v1" cannot be handled as a Service: strict decoding error: unknown field "spec.topologyKeys"`) {
			t.Error(err)
		}
	})
	a, err := create("default", `{"selector":{"app":"web"},"ports":[{"port":80}]}`)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("A42", func(t *testing.T) {
		b, err := create("two", `{"selector":{"app":"web"},"ports":[{"port":80}]}`)
		if err != nil || a.Spec.ClusterIP == b.Spec.ClusterIP {
			t.Errorf("%v, %s and %s", err, a.Spec.ClusterIP, b.Spec.ClusterIP)
		}
	})
	for _, tc := range []struct{ id, patch, want string }{
		{"B01", `{"spec":{"clusterIP":"10.96.0.99"}}`, `Service "x" is invalid: spec.clusterIPs[0]: Invalid value: ["10.96.0.99"]: may not change once set`},
		{"A32", `{"spec":{"ports":[{"port":80,"nodePort":30080}]}}`, "spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"},
		{"P02", `{"spec":{"ipFamilyPolicy":"RequireDualStack"}}`, "this cluster is not configured for dual-stack services"},
	} {
		_, err := merge(tc.patch)
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", tc.id, err)
		}
	}
	for _, tc := range []struct {
		id, patch string
		check     func(s *corev1.Service) bool
	}{
		{"B05", `{"spec":{"type":"NodePort"}}`, func(s *corev1.Service) bool {
			return s.Spec.ClusterIP == a.Spec.ClusterIP && s.Spec.Ports[0].NodePort >= 30086 && s.Spec.ExternalTrafficPolicy == "Cluster"
		}},
		{"B06", `{"spec":{"type":"ClusterIP"}}`, func(s *corev1.Service) bool {
			return s.Spec.Ports[0].NodePort == 0 && s.Spec.ExternalTrafficPolicy == ""
		}},
		{"L01", `{"spec":{"type":"LoadBalancer","externalTrafficPolicy":"Local"}}`, func(s *corev1.Service) bool {
			return s.Spec.HealthCheckNodePort != 0 && *s.Spec.AllocateLoadBalancerNodePorts
		}},
		{"B13", `{"spec":{"externalTrafficPolicy":"Cluster"}}`, func(s *corev1.Service) bool { return s.Spec.HealthCheckNodePort == 0 }},
		{"B08", `{"spec":{"type":"ExternalName","externalName":"a.example"}}`, func(s *corev1.Service) bool {
			return s.Spec.ClusterIP == "" && s.Spec.ClusterIPs == nil && s.Spec.IPFamilies == nil && s.Spec.AllocateLoadBalancerNodePorts == nil
		}},
		{"B09", `{"spec":{"type":"ClusterIP"}}`, func(s *corev1.Service) bool { return s.Spec.ClusterIP != "" && len(s.Spec.IPFamilies) == 1 }},
	} {
		got, err := merge(tc.patch)
		if err != nil || !tc.check(got) {
			t.Errorf("%s: %v, %+v", tc.id, err, got.Spec)
		}
	}
	if got := s.warned.take(); !slices.Contains(got, `spec.externalName is ignored when spec.type is not "ExternalName"`) {
		t.Errorf("B09: warnings %q", got)
	}
}

func TestServiceStatusOnly(t *testing.T) {
	s := start(t, t.TempDir()).withNamespaces(t, "default")
	services := s.client.CoreV1().Services("default")
	_, err := services.Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "lb"},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80}}},
		Status:     corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	const patch = `{"spec":{"type":"ClusterIP"},"status":{"loadBalancer":{"ingress":[{"ip":"203.0.113.10"}]}}}`
	got, err := services.Patch(t.Context(), "lb", types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
	ingress := got.Status.LoadBalancer.Ingress
	if got.Spec.Type != corev1.ServiceTypeLoadBalancer || len(ingress) != 1 || ingress[0].IP != "203.0.113.10" || *ingress[0].IPMode != corev1.LoadBalancerIPModeVIP {
		t.Errorf("B21, K02: %+v %+v", got.Spec, got.Status)
	}
	_, err = services.Patch(t.Context(), "lb", types.MergePatchType, []byte(`{"status":{"loadBalancer":{"ingress":[{"hostname":"a.example","ipMode":"VIP"}]}}}`), metav1.PatchOptions{}, "status")
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "status.loadBalancer.ingress[0].ipMode: Forbidden: may not be specified when `ip` is not set") {
		t.Errorf("K20: %v", err)
	}
}

func TestFieldSelectors(t *testing.T) {
	s := start(t, t.TempDir()).withNamespaces(t, "default")
	services := s.client.CoreV1().Services("default")
	for name, spec := range map[string]corev1.ServiceSpec{
		"np":       {Type: corev1.ServiceTypeNodePort},
		"headless": {ClusterIP: corev1.ClusterIPNone},
		"plain":    {},
	} {
		spec.Ports = []corev1.ServicePort{{Port: 80}}
		if _, err := services.Create(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("Q08", func(t *testing.T) {
		for selector, want := range map[string]string{"spec.type=NodePort": "np", "spec.clusterIP=None": "headless"} {
			list, err := services.List(t.Context(), metav1.ListOptions{FieldSelector: selector})
			if err != nil || len(list.Items) != 1 || list.Items[0].Name != want {
				t.Errorf("%s: %v, %v", selector, list, err)
			}
		}
		_, err := services.List(t.Context(), metav1.ListOptions{FieldSelector: "spec.selector=x"})
		if !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), "field label not supported: spec.selector") {
			t.Error(err)
		}
	})
}

func TestEndpointsWarning(t *testing.T) {
	s := start(t, t.TempDir()).withNamespaces(t, "default")
	if _, err := s.client.CoreV1().Endpoints("default").List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	want := []string{"v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice"}
	if got := s.warned.take(); !slices.Equal(got, want) {
		t.Errorf("H04: warnings %q", got)
	}
}

// TestScaleOwnership scales as kubectl does; who scales owns the number.
func TestScaleOwnership(t *testing.T) {
	s := start(t, t.TempDir()).withNamespaces(t, "default")
	deployments := s.client.AppsV1().Deployments("default")
	_, err := deployments.Create(t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](2),
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: "nginx"}}},
			},
		},
	}, metav1.CreateOptions{FieldManager: "creator"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.client.AppsV1().RESTClient().Patch(types.MergePatchType).Namespace("default").Resource("deployments").Name("web").SubResource("scale").
		Param("fieldManager", "scaler").Body([]byte(`{"spec":{"replicas":5}}`)).Do(t.Context()).Error(); err != nil {
		t.Fatal(err)
	}
	d, err := deployments.Get(t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	owners := owned(t, d)
	if *d.Spec.Replicas != 5 || d.Generation != 2 || owners["scaler/scale"] != `{"f:replicas":{}}` || strings.Contains(owners["creator/"], "f:replicas") {
		t.Errorf("%d replicas, generation %d, owners %v", *d.Spec.Replicas, d.Generation, owners)
	}
	scale, err := deployments.GetScale(t.Context(), "web", metav1.GetOptions{})
	if err != nil || scale.Spec.Replicas != 5 || scale.Status.Selector != "app=web" {
		t.Errorf("%+v, %v", scale, err)
	}
	scale.Spec.Replicas = 0
	if _, err := deployments.UpdateScale(t.Context(), "web", scale, metav1.UpdateOptions{}); err != nil {
		t.Error(err)
	}
}

// TestParallelAndRestart creates from 64 clients at once, restarts the server and
// finds the same values taken.
func TestParallelAndRestart(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir).withNamespaces(t, "default")
	services := s.client.CoreV1().Services("default")
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			_, err := services.Create(t.Context(), &corev1.Service{
				ObjectMeta: metav1.ObjectMeta{GenerateName: fmt.Sprintf("s%d-", i)},
				Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80}}},
			}, metav1.CreateOptions{})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	list, err := services.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ips, ports := map[string]bool{}, map[int32]bool{}
	for _, s := range list.Items {
		ips[s.Spec.ClusterIP], ports[s.Spec.Ports[0].NodePort] = true, true
	}
	if len(list.Items) != 64 || len(ips) != 64 || len(ports) != 64 {
		t.Fatalf("%d Services, %d addresses, %d ports", len(list.Items), len(ips), len(ports))
	}
	s.stop()

	s = start(t, dir)
	taken := list.Items[0].Spec
	_, err = s.client.CoreV1().Services("default").Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "late"},
		Spec:       corev1.ServiceSpec{ClusterIP: taken.ClusterIP, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "provided IP is already allocated") {
		t.Errorf("after a restart: %v", err)
	}
	if err := s.client.CoreV1().RESTClient().Delete().Namespace("default").Resource("services").Do(t.Context()).Error(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.CoreV1().Services("default").Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "late"},
		Spec:       corev1.ServiceSpec{ClusterIP: taken.ClusterIP, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Errorf("A16 after deletecollection: %v", err)
	}
}
