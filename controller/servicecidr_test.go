// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/internal/nettest"
)

func (b *bench) createService(name, clusterIP string) (*corev1.Service, error) {
	return b.client.CoreV1().Services("default").Create(b.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{ClusterIP: clusterIP, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
}

// readyCIDR waits until the condition Ready of a ServiceCIDR is as wanted and
// returns its reason.
func (b *bench) readyCIDR(name string, status metav1.ConditionStatus) string {
	b.t.Helper()
	var reason string
	nettest.Eventually(b.t, patience, "the condition Ready of "+name, func() error {
		cidr, err := b.client.NetworkingV1().ServiceCIDRs().Get(b.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		c := meta.FindStatusCondition(cidr.Status.Conditions, networkingv1.ServiceCIDRConditionReady)
		if c == nil || c.Status != status {
			return fmt.Errorf("condition Ready is %+v, want %s", c, status)
		}
		reason = c.Reason
		return nil
	})
	return reason
}

// TestServiceCIDRs follows one further range from its creation to its end.
func TestServiceCIDRs(t *testing.T) {
	// Six addresses: kubernetes has the first, five are left.
	b := newBench(t, func(b *bench) { b.services = netip.MustParsePrefix("10.96.0.0/29") })
	ctx := t.Context()
	cidrs := b.client.NetworkingV1().ServiceCIDRs()
	extra := netip.MustParsePrefix("192.168.200.0/24")

	t.Run("A12 the object of the lab's own range", func(t *testing.T) {
		cidr, err := cidrs.Get(ctx, "kubernetes", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(cidr.Spec.CIDRs, ","); got != "10.96.0.0/29" {
			t.Errorf("CIDRs are %s", got)
		}
		b.readyCIDR("kubernetes", metav1.ConditionTrue)
	})
	for i := range 5 {
		if _, err := b.createService(fmt.Sprintf("first-%d", i), ""); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.createService("late", ""); err == nil || !strings.Contains(err.Error(), "range is full") {
		t.Fatalf("a Service in a full range: %v", err)
	}
	var name string
	t.Run("A13 a further range gives addresses", func(t *testing.T) {
		_, err := cidrs.Create(ctx, &networkingv1.ServiceCIDR{
			ObjectMeta: metav1.ObjectMeta{Name: "more"},
			Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{extra.String()}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		b.readyCIDR("more", metav1.ConditionTrue)
		s, err := b.createService("late", "")
		if err != nil {
			t.Fatal(err)
		}
		if name = s.Spec.ClusterIP; !extra.Contains(netip.MustParseAddr(name)) {
			t.Errorf("cluster IP %s is not of %s", name, extra)
		}
		if _, err := b.createService("chosen", "192.168.200.77"); err != nil {
			t.Errorf("an address of the new range by name: %v", err)
		}
		if _, err := b.createService("nowhere", "192.168.201.77"); !apierrors.IsInvalid(err) {
			t.Errorf("an address of no range: %v", err)
		}
	})
	t.Run("A11 the object of an address", func(t *testing.T) {
		ip, err := b.client.NetworkingV1().IPAddresses().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if p := ip.Spec.ParentRef; p.Resource != "services" || p.Namespace != "default" || p.Name != "late" {
			t.Errorf("parentRef is %+v", p)
		}
		if ip.Labels[networkingv1.LabelIPAddressFamily] != "IPv4" || ip.Labels[networkingv1.LabelManagedBy] == "" {
			t.Errorf("labels are %v", ip.Labels)
		}
	})
	t.Run("A14 a range in use stays until its last address is given back", func(t *testing.T) {
		if err := cidrs.Delete(ctx, "more", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if reason := b.readyCIDR("more", metav1.ConditionFalse); reason != "Terminating" {
			t.Errorf("reason is %s", reason)
		}
		cidr, err := cidrs.Get(ctx, "more", metav1.GetOptions{})
		if err != nil || cidr.DeletionTimestamp == nil || len(cidr.Finalizers) != 1 {
			t.Errorf("the range is %+v, %v", cidr, err)
		}
		if _, err := b.createService("later", ""); err == nil {
			t.Error("a range that is to be deleted gives an address")
		}
		for _, s := range []string{"late", "chosen"} {
			if err := b.client.CoreV1().Services("default").Delete(ctx, s, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		nettest.Eventually(t, patience, "the range goes", func() error {
			if _, err := cidrs.Get(ctx, "more", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				return fmt.Errorf("the range is still there: %w", err)
			}
			return nil
		})
		if _, err := b.client.NetworkingV1().IPAddresses().Get(ctx, name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("the address of the deleted Service: %v", err)
		}
	})
}
