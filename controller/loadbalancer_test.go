// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/loadbalancer"
	"github.com/kplab/kplab/internal/nettest"
)

// pool gives the bench a load balancer; "" takes it away.
func (b *bench) pool(text string) {
	b.t.Helper()
	api := b.client.CoreV1().ConfigMaps(loadbalancer.Namespace)
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: loadbalancer.ConfigMap}, Data: map[string]string{loadbalancer.PoolKey: text}}
	var err error
	switch _, there := api.Get(b.t.Context(), m.Name, metav1.GetOptions{}); {
	case text == "":
		err = api.Delete(b.t.Context(), m.Name, metav1.DeleteOptions{})
	case apierrors.IsNotFound(there):
		_, err = api.Create(b.t.Context(), m, metav1.CreateOptions{})
	default:
		_, err = api.Update(b.t.Context(), m, metav1.UpdateOptions{})
	}
	if err != nil {
		b.t.Fatal(err)
	}
	b.settle()
}

// balanced makes a Service of type LoadBalancer.
func (b *bench) balanced(name string, change ...func(*corev1.Service)) {
	b.t.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{}}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Port: 80}},
	}}
	for _, fn := range change {
		fn(s)
	}
	if _, err := b.client.CoreV1().Services("default").Create(b.t.Context(), s, metav1.CreateOptions{}); err != nil {
		b.t.Fatal(err)
	}
	b.settle()
}

func (b *bench) service(name string) *corev1.Service {
	b.t.Helper()
	s, err := b.client.CoreV1().Services("default").Get(b.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

func (b *bench) patchService(name, patch string) {
	b.t.Helper()
	if _, err := b.client.CoreV1().Services("default").Patch(b.t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		b.t.Fatal(err)
	}
	b.settle()
}

// address is what EXTERNAL-IP shows.
func (b *bench) address(name string) string {
	b.t.Helper()
	var out []string
	for _, in := range b.service(name).Status.LoadBalancer.Ingress {
		out = append(out, in.IP)
	}
	if len(out) == 0 {
		return "<pending>"
	}
	return strings.Join(out, ",")
}

// said waits for an event about an object.
func (b *bench) said(name, reason, message string) {
	b.t.Helper()
	nettest.Eventually(b.t, patience, reason+" of "+name, func() error {
		list, err := b.client.CoreV1().Events("").List(b.t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		var all []string
		for _, e := range list.Items {
			if e.InvolvedObject.Name != name {
				continue
			}
			if e.Reason == reason && strings.Contains(e.Message, message) {
				return nil
			}
			all = append(all, e.Reason+": "+e.Message)
		}
		return fmt.Errorf("events: %q", all)
	})
}

func TestLoadBalancer(t *testing.T) {
	b := newBench(t)
	must := func(row, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %s, want %s", row, got, want)
		}
	}
	b.balanced("first")
	must("K01 pending without a load balancer", b.address("first"), "<pending>")
	if s := b.service("first"); len(s.Finalizers) > 0 {
		t.Errorf("K01: finalizers %v without a load balancer", s.Finalizers)
	}

	b.pool("10.0.0.240-10.0.0.242")
	must("K02 assigned", b.address("first"), "10.0.0.240")
	s := b.service("first")
	if in := s.Status.LoadBalancer.Ingress[0]; ptr.Deref(in.IPMode, "") != corev1.LoadBalancerIPModeVIP {
		t.Errorf("K02: ipMode %v", in.IPMode)
	}
	if !slices.Contains(s.Finalizers, "service.kubernetes.io/load-balancer-cleanup") {
		t.Errorf("K22: finalizers %v", s.Finalizers)
	}
	if node := s.Annotations[loadbalancer.AnnotationNode]; node == "" {
		t.Error("K23: no node announces the address")
	}
	b.said("first", "EnsuringLoadBalancer", "Ensuring load balancer")
	b.said("first", "IPAllocated", `Assigned IP ["10.0.0.240"]`)
	b.said("first", "EnsuredLoadBalancer", "Ensured load balancer")

	b.balanced("bare", func(s *corev1.Service) { s.Spec.AllocateLoadBalancerNodePorts = ptr.To(false) })
	must("K09 without nodePorts", b.address("bare"), "10.0.0.241")
	if p := b.service("bare").Spec.Ports[0].NodePort; p != 0 {
		t.Errorf("K09: nodePort %d", p)
	}
	port := b.service("first").Spec.Ports[0].NodePort
	b.patchService("first", `{"spec":{"allocateLoadBalancerNodePorts":false}}`)
	must("K10 nodePorts stay", fmt.Sprint(b.service("first").Spec.Ports[0].NodePort), fmt.Sprint(port))

	b.balanced("foreign", func(s *corev1.Service) { s.Spec.LoadBalancerClass = ptr.To("example.com/other") })
	must("K16 another's class", b.address("foreign"), "<pending>")
	b.balanced("wish", func(s *corev1.Service) { s.Spec.LoadBalancerIP = "10.0.0.242" })
	must("K17 spec.loadBalancerIP", b.address("wish"), "10.0.0.242")

	b.balanced("late")
	must("exhausted", b.address("late"), "<pending>")
	b.said("late", "SyncLoadBalancerFailed", "no free IPv4 address")
	b.balanced("taken", func(s *corev1.Service) { s.Spec.LoadBalancerIP = "10.0.0.240" })
	b.said("taken", "SyncLoadBalancerFailed", "address 10.0.0.240 is used by Service default/first")

	// A slip in a wish costs nobody what they have.
	b.patchService("bare", `{"spec":{"loadBalancerIP":"10.0.0.9"}}`)
	must("a wish that cannot be", b.address("bare"), "10.0.0.241")
	b.said("bare", "SyncLoadBalancerFailed", "address 10.0.0.9 is not in the pool")

	// Sharing.
	share := func(s *corev1.Service) {
		s.Annotations["metallb.io/allow-shared-ip"] = "k"
		s.Spec.LoadBalancerIP = "10.0.0.242"
	}
	b.patchService("wish", `{"metadata":{"annotations":{"metallb.io/allow-shared-ip":"k"}}}`)
	b.balanced("sharer", func(s *corev1.Service) { share(s); s.Spec.Ports[0].Port = 443 })
	must("sharing", b.address("sharer"), "10.0.0.242")
	if x, y := b.service("wish").Annotations[loadbalancer.AnnotationNode], b.service("sharer").Annotations[loadbalancer.AnnotationNode]; x != y {
		t.Errorf("one address, announced by %s and by %s", x, y)
	}
	b.balanced("mixed", func(s *corev1.Service) {
		share(s)
		s.Spec.Ports = []corev1.ServicePort{{Name: "t", Port: 53, Protocol: "TCP"}, {Name: "u", Port: 53, Protocol: "UDP"}}
	})
	must("K18 TCP and UDP", b.address("mixed"), "10.0.0.242")

	// What is given back goes to those that wait.
	if err := b.client.CoreV1().Services("default").Delete(t.Context(), "first", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	if _, err := b.client.CoreV1().Services("default").Get(t.Context(), "first", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("K22: the deleted Service is still there: %v", err)
	}
	if got := b.address("late") + " " + b.address("taken"); got != "10.0.0.240 <pending>" && got != "<pending> 10.0.0.240" {
		t.Errorf("after a Service went: %s", got)
	}

	// B12: another type.
	b.patchService("wish", `{"spec":{"type":"ClusterIP","loadBalancerIP":null}}`)
	s = b.service("wish")
	if len(s.Finalizers) > 0 || len(s.Status.LoadBalancer.Ingress) > 0 {
		t.Errorf("B12: finalizers %v, status %v", s.Finalizers, s.Status.LoadBalancer)
	}

	// A pool with a mistake changes nothing; none at all takes everything back.
	b.pool("10.0.0.300")
	must("a bad pool", b.address("sharer"), "10.0.0.242")
	b.said(loadbalancer.ConfigMap, "InvalidPool", "10.0.0.300")
	b.halt()
	b.start()
	b.settle()
	must("a bad pool and a new process", b.address("sharer"), "10.0.0.242")
	b.pool("10.0.0.241-10.0.0.249")
	must("what is in the new pool stays", b.address("sharer"), "10.0.0.242")
	b.pool("")
	for _, name := range []string{"bare", "sharer", "late"} {
		if s := b.service(name); b.address(name) != "<pending>" || len(s.Finalizers) > 0 {
			t.Errorf("%s without a pool: %s, finalizers %v", name, b.address(name), s.Finalizers)
		}
	}
}

// K23, L01: with policy Local only nodes with a ready endpoint announce.
func TestLoadBalancerLocal(t *testing.T) {
	b := newBench(t)
	b.pool("10.0.0.240/28")
	b.balanced("web", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
	node := func() string { return b.service("web").Annotations[loadbalancer.AnnotationNode] }
	if got := node(); got != "" {
		t.Errorf("announced by %s, which has no pod", got)
	}
	for _, n := range []string{"node2", "node1"} {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "on-" + n, Labels: map[string]string{"app": "web"}},
			Spec:       corev1.PodSpec{NodeName: n, Containers: []corev1.Container{{Name: "c", Image: "nginx"}}},
		}
		if _, err := b.client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		b.settle()
		if n == "node2" && node() != "node2" {
			t.Errorf("announced by %q, want node2", node())
		}
	}
	if err := b.client.CoreV1().Pods("default").Delete(t.Context(), "on-node2", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	if node() != "node1" {
		t.Errorf("announced by %q after the pod of node2 went, want node1", node())
	}
	// The label of upstream takes a node out; without any, nobody announces.
	label, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]string{corev1.LabelNodeExcludeBalancers: ""}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.client.CoreV1().Nodes().Patch(t.Context(), "node1", types.MergePatchType, label, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	if node() != "" {
		t.Errorf("announced by %q, which is excluded", node())
	}
	b.said("web", "UnAvailableLoadBalancer", "no available nodes")
}
