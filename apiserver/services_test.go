// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestDenyServiceExternalIPs turns the admission on while a Service already has
// external IPs.
func TestDenyServiceExternalIPs(t *testing.T) {
	s := startServer(t, "")
	makeNamespace(t, s, "default")
	service := func(name string, ips ...string) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}, ExternalIPs: ips}}
	}
	if _, err := s.client.CoreV1().Services("default").Create(t.Context(), service("old", "203.0.113.7", "203.0.113.8"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.stop()
	s = startServer(t, s.dir, func(c *Config) { c.DenyServiceExternalIPs = true })
	services := s.client.CoreV1().Services("default")
	t.Run("K29", func(t *testing.T) {
		_, err := services.Create(t.Context(), service("x", "203.0.113.9"), metav1.CreateOptions{})
		wantError(t, "create", err, apierrors.IsForbidden, `services "x" is forbidden: Use of external IPs is denied by admission control`)
		patch := func(body string) error {
			_, err := services.Patch(t.Context(), "old", types.MergePatchType, []byte(body), metav1.PatchOptions{})
			return err
		}
		wantError(t, "add", patch(`{"spec":{"externalIPs":["203.0.113.7","203.0.113.9"]}}`), apierrors.IsForbidden, "Use of external IPs is denied by admission control")
		if err := patch(`{"metadata":{"labels":{"a":"b"}}}`); err != nil {
			t.Errorf("a change of something else: %v", err)
		}
		if err := patch(`{"spec":{"externalIPs":["203.0.113.8"]}}`); err != nil {
			t.Errorf("taking one away: %v", err)
		}
		if _, err := services.Create(t.Context(), service("y"), metav1.CreateOptions{}); err != nil {
			t.Errorf("without external IPs: %v", err)
		}
	})
}

// TestServiceRanges: a server whose ranges cannot be used does not start.
func TestServiceRanges(t *testing.T) {
	for _, tc := range []struct {
		name, want string
		change     func(*Config)
	}{
		{"none", "is not a valid CIDR", func(c *Config) { c.ServiceCIDR = netip.Prefix{} }},
		{"no address", "holds no usable address", func(c *Config) { c.ServiceCIDR = netip.MustParsePrefix("10.96.0.0/32") }},
		{"two of one family", "are of one family", func(c *Config) { c.SecondaryServiceCIDR = netip.MustParsePrefix("10.97.0.0/16") }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := testConfig(t)
			tc.change(&cfg)
			s, err := New(cfg)
			if err == nil {
				t.Error(s.Close())
				t.Fatal("the server was built")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%q lacks %q", err, tc.want)
			}
		})
	}
}
