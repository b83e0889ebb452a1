// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/internal/nettest"
)

// TestRowsH is about Services without a selector, as far as objects go.
func TestRowsH(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	slices := func(service string) []discoveryv1.EndpointSlice {
		t.Helper()
		list, err := b.client.DiscoveryV1().EndpointSlices("default").List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + service})
		if err != nil {
			t.Fatal(err)
		}
		return list.Items
	}
	create := func(name string, e *corev1.Endpoints) {
		t.Helper()
		svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 3306}}}}
		if _, err := b.client.CoreV1().Services("default").Create(ctx, svc, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if e != nil {
			e.Name = name
			if _, err := b.client.CoreV1().Endpoints("default").Create(ctx, e, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		b.settle()
	}
	subset := func(ips ...string) []corev1.EndpointSubset {
		s := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Port: 3306}}}
		for _, ip := range ips {
			s.Addresses = append(s.Addresses, corev1.EndpointAddress{IP: ip})
		}
		return []corev1.EndpointSubset{s}
	}

	create("alone", nil)
	if n := len(slices("alone")); n != 0 {
		t.Errorf("H01: %d slices of a Service without selector and Endpoints", n)
	}
	create("mysql", &corev1.Endpoints{Subsets: subset("10.0.0.132")})
	s := slices("mysql")
	if len(s) != 1 || s[0].GenerateName != "mysql-" || len(s[0].OwnerReferences) != 1 || s[0].OwnerReferences[0].Kind != "Endpoints" ||
		s[0].Labels[discoveryv1.LabelManagedBy] != "endpointslicemirroring-controller.k8s.io" || s[0].Endpoints[0].NodeName != nil {
		t.Errorf("H03: %+v", s)
	}
	create("skipped", &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{discoveryv1.LabelSkipMirror: "true"}}, Subsets: subset("10.0.0.132")})
	if n := len(slices("skipped")); n != 0 {
		t.Errorf("H06: %d slices", n)
	}
	var many []string
	for i := range 1003 {
		many = append(many, fmt.Sprintf("10.9.%d.%d", i/250, i%250+1))
	}
	create("many", &corev1.Endpoints{Subsets: subset(many...)})
	if s := slices("many"); len(s) != 1 || len(s[0].Endpoints) != 1000 {
		t.Errorf("H07: %d slices", len(s))
	}
	b.said("many", "TooManyAddressesToMirror", "1000")

	// H11, H19: a slice of one's own needs no Endpoints and outlives its Service; the
	// controllers' do not.
	if _, err := b.client.DiscoveryV1().EndpointSlices("default").Create(ctx, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "mine", Labels: map[string]string{discoveryv1.LabelServiceName: "alone", discoveryv1.LabelManagedBy: "me"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.132"}}},
		Ports: []discoveryv1.EndpointPort{{Port: ptr.To(int32(3306))}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"alone", "mysql"} {
		if err := b.client.CoreV1().Services("default").Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	nettest.Eventually(t, patience, "H19: the mirrored slice goes", func() error {
		if s := slices("mysql"); len(s) != 0 {
			return fmt.Errorf("%d slices", len(s))
		}
		return nil
	})
	b.settle()
	if s := slices("alone"); len(s) != 1 || s[0].Name != "mine" {
		t.Errorf("H19: %+v", s)
	}
}
