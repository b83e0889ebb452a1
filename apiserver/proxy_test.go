// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// TestProxy reaches a pod by itself and through its Service: what was asked arrives,
// at a ready endpoint, by the port's number or name.
func TestProxy(t *testing.T) {
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		fmt.Fprintf(w, "%s %s %s", r.Method, r.URL.RequestURI(), body)
	}))
	defer backend.Close()
	var mu sync.Mutex
	var dialed []string
	s := startServer(t, "", func(c *Config) {
		c.KubeletDial = func(ctx context.Context, _, addr string) (net.Conn, error) {
			mu.Lock()
			dialed = append(dialed, addr)
			mu.Unlock()
			return new(net.Dialer).DialContext(ctx, "tcp", strings.TrimPrefix(backend.URL, "http://"))
		}
	})
	makeNamespace(t, s, "default")
	ctx := t.Context()
	pod := testPod("a")
	pod.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 8080}}
	pod, err := s.client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.Status.PodIP, pod.Status.PodIPs = "10.244.1.2", []corev1.PodIP{{IP: "10.244.1.2"}}
	_, err = s.client.CoreV1().Pods("default").UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"web", "idle"} {
		if _, err := s.client.CoreV1().Services("default").Create(ctx, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	port, portName, yes, no, tcp := int32(9090), "http", true, false, corev1.ProtocolTCP
	if _, err := s.client.DiscoveryV1().EndpointSlices("default").Create(ctx, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &portName, Port: &port, Protocol: &tcp}},
		Endpoints: []discoveryv1.Endpoint{
			{Addresses: []string{"10.244.1.3"}, Conditions: discoveryv1.EndpointConditions{Ready: &yes}},
			{Addresses: []string{"10.244.1.4"}, Conditions: discoveryv1.EndpointConditions{Ready: &no}},
		},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	client, err := rest.HTTPClientFor(jsonConfig(s))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ method, path, answer, at string }{
		{"GET", "pods/a/proxy/x/y?q=1&r=a%20b", "GET /x/y?q=1&r=a%20b ", "10.244.1.2:8080"},
		{"POST", "pods/a:81/proxy/x/", "POST /x/ body", "10.244.1.2:81"},
		{"GET", "services/web:80/proxy/", "GET / ", "10.244.1.3:9090"},
		{"PUT", "services/web:http/proxy/p", "PUT /p body", "10.244.1.3:9090"},
		{"DELETE", "services/http:web:http/proxy/p", "DELETE /p ", "10.244.1.3:9090"},
		{"GET", "services/web/proxy/", `no endpoints available for service \"web\"`, ""}, // its port has a name
		{"GET", "services/web:81/proxy/", `no service port 81 found for service \"web\"`, ""},
		{"GET", "services/idle:http/proxy/", `no endpoints available for service \"idle:http\"`, ""},
		{"GET", "services/ftp:web:http/proxy/", `invalid service request \"ftp:web:http\"`, ""},
		{"GET", "pods/none/proxy/", `pods \"none\" not found`, ""},
	} {
		mu.Lock()
		dialed = nil
		mu.Unlock()
		body := ""
		if c.method == "POST" || c.method == "PUT" {
			body = "body"
		}
		req, err := http.NewRequestWithContext(ctx, c.method, s.ClientConfig("admin").Host+"/api/v1/namespaces/default/"+c.path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		res, err := client.Do(req)
		if err != nil {
			t.Errorf("%s %s: %v", c.method, c.path, err)
			continue
		}
		got, err := io.ReadAll(res.Body)
		if err := errors.Join(err, res.Body.Close()); err != nil {
			t.Error(err)
		}
		mu.Lock()
		at := strings.Join(dialed, " ")
		mu.Unlock()
		if at != c.at || c.at != "" && string(got) != c.answer || !strings.Contains(string(got), c.answer) {
			t.Errorf("%s %s: %d %q at %q", c.method, c.path, res.StatusCode, got, at)
		}
	}
}
