// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/internal/nettest"
)

func TestOwnEndpointsAreMirrored(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	e := &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Name: "mysql"},
		Subsets: []corev1.EndpointSubset{{
			Addresses: []corev1.EndpointAddress{{IP: "10.0.0.132"}},
			Ports:     []corev1.EndpointPort{{Port: 3306}},
		}},
	}
	if _, err := b.client.CoreV1().Endpoints("default").Create(ctx, e, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	slices := func() []discoveryv1.EndpointSlice {
		t.Helper()
		list, err := b.client.DiscoveryV1().EndpointSlices("default").List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=mysql"})
		if err != nil {
			t.Fatal(err)
		}
		return list.Items
	}
	if n := len(slices()); n != 0 {
		t.Fatalf("%d slices before there is a Service", n)
	}
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "mysql"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 3306}}}}
	if _, err := b.client.CoreV1().Services("default").Create(ctx, svc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	got := slices()
	if len(got) != 1 || got[0].Endpoints[0].Addresses[0] != "10.0.0.132" || *got[0].Ports[0].Port != 3306 ||
		got[0].Labels[discoveryv1.LabelManagedBy] != "endpointslicemirroring-controller.k8s.io" {
		t.Fatalf("got %+v", got)
	}
	patch := []byte(`{"subsets":[{"addresses":[{"ip":"10.0.0.133"},{"ip":"10.0.0.132"}],"ports":[{"port":3306}]}]}`)
	if _, err := b.client.CoreV1().Endpoints("default").Patch(ctx, "mysql", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	if again := slices(); len(again) != 1 || again[0].Name != got[0].Name || len(again[0].Endpoints) != 2 {
		t.Fatalf("got %+v", again)
	}
	// With a selector the Service's slices are the other controller's.
	if _, err := b.client.CoreV1().Services("default").Patch(ctx, "mysql", types.MergePatchType, []byte(`{"spec":{"selector":{"app":"mysql"}}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	nettest.Eventually(t, patience, "the placeholder replaces the mirror", func() error {
		if s := slices(); len(s) != 1 || len(s[0].Endpoints) != 0 || s[0].Labels[discoveryv1.LabelManagedBy] != "endpointslice-controller.k8s.io" {
			return fmt.Errorf("got %+v", s)
		}
		return nil
	})
}
