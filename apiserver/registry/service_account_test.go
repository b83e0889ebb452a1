// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/apiserver/allocator"
)

var errDisk = errors.New("no space left on device")

// badDisk is a storage whose writes fail, before or after they are written.
type badDisk struct {
	storage.Interface
	written, broken bool
}

func (d *badDisk) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	if !d.broken {
		return d.Interface.Create(ctx, key, obj, out, ttl)
	}
	if d.written {
		return errors.Join(d.Interface.Create(ctx, key, obj, out, ttl), errDisk)
	}
	return errDisk
}

func (d *badDisk) GuaranteedUpdate(ctx context.Context, key string, out runtime.Object, ignoreNotFound bool, pre *storage.Preconditions, update storage.UpdateFunc, cached runtime.Object) error {
	if !d.broken {
		return d.Interface.GuaranteedUpdate(ctx, key, out, ignoreNotFound, pre, update, cached)
	}
	if d.written {
		return errors.Join(d.Interface.GuaranteedUpdate(ctx, key, out, ignoreNotFound, pre, update, cached), errDisk)
	}
	// The hooks have run, the write has not happened.
	lost := func(obj runtime.Object, meta storage.ResponseMeta) (runtime.Object, *uint64, error) {
		if _, _, err := update(obj, meta); err != nil {
			return nil, nil, err
		}
		return nil, nil, errDisk
	}
	return d.Interface.GuaranteedUpdate(ctx, key, out, ignoreNotFound, pre, lost, cached)
}

// TestServiceDiskFull lets writes fail below the API. What they took stays taken
// until the store can be asked, and then is taken only if it is stored.
func TestServiceDiskFull(t *testing.T) {
	for _, written := range []bool{false, true} {
		name := "lost"
		if written {
			name = "written all the same"
		}
		t.Run(name, func(t *testing.T) {
			b := newServiceBench(t)
			b.mustCreate("a", web)
			disk := &badDisk{Interface: b.storages["services"].(*serviceREST).Store.Storage.Storage, written: written}
			b.storages["services"].(*serviceREST).Store.Storage.Storage = disk
			before := b.taken()

			disk.broken = true
			_, err := b.tryCreate("x", web+"\nclusterIP: 10.96.0.50")
			wantError(t, err, errDisk.Error())
			_, err = b.tryPatch("a", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
			wantError(t, err, errDisk.Error())
			disk.broken = false

			_, err = b.tryCreate("again", web+"\nclusterIP: 10.96.0.50")
			if (err != nil) != written {
				t.Errorf("taking the address again: %v", err)
			}
			b.agree()
			if err == nil {
				b.remove("services", "again")
				if after := b.taken(); !slices.Equal(before, after) {
					t.Errorf("before %q, after %q", before, after)
				}
			}
		})
	}
}

// TestTwoFamilies asks the allocator of a cluster with a second range (P04, P09
// to P12), which the API server does not have yet.
func TestTwoFamilies(t *testing.T) {
	deps := serviceDeps("10.96.0.0/16", 30000, 2768)
	a := newServiceAllocator(nil, deps)
	ranges := make([]allocator.IPRange, 2)
	for i, cidr := range []string{"10.96.0.0/16", "fd00:96::/112"} {
		r, err := allocator.NewIPRange(netip.MustParsePrefix(cidr))
		if err != nil {
			t.Fatal(err)
		}
		ranges[i] = r
	}
	ports, err := allocator.NewPortRange(30000, 32767)
	if err != nil {
		t.Fatal(err)
	}
	if a.book, err = allocator.NewBook(allocator.Config{IPs: ranges, Ports: ports}); err != nil {
		t.Fatal(err)
	}
	a.families = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}

	write := func(s, old *corev1.Service) error {
		ctx := context.WithValue(t.Context(), serviceWriteKey{}, &serviceWrite{})
		if _, err := a.begin(ctx, s, old, false); err != nil {
			return err
		}
		errs := validateService(s)
		if old != nil {
			errs = append(errs, validateServiceUpdate(s, old)...)
		}
		return errs.ToAggregate()
	}
	fresh := func(policy corev1.IPFamilyPolicy) *corev1.Service {
		s := &corev1.Service{Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{{Port: 80}}, IPFamilyPolicy: ptr.To(policy),
		}}
		s.Name, s.UID = "x", "uid"
		defaultService(s)
		return s
	}
	dual := fresh(corev1.IPFamilyPolicyRequireDualStack)
	single := fresh(corev1.IPFamilyPolicySingleStack)
	if err := errors.Join(write(dual, nil), write(single, nil)); err != nil {
		t.Fatal(err)
	}
	if ips := dual.Spec.ClusterIPs; len(ips) != 2 || familyOf(ips[0]) != "IPv4" || familyOf(ips[1]) != "IPv6" || dual.Spec.ClusterIP != ips[0] || len(dual.Spec.IPFamilies) != 2 {
		t.Errorf("P04: %+v", dual.Spec)
	}

	for _, tc := range []struct {
		id     string
		old    *corev1.Service
		change func(s *corev1.Service)
		want   string // an error, or the families that remain
	}{
		{"P09", single, func(s *corev1.Service) { s.Spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyPreferDualStack) }, "IPv4 IPv6"},
		{"P10", dual, func(s *corev1.Service) { s.Spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicySingleStack) }, "IPv4"},
		{"P11", dual, func(s *corev1.Service) {
			s.Spec.ClusterIPs, s.Spec.IPFamilies = s.Spec.ClusterIPs[:1], s.Spec.IPFamilies[:1]
			s.Spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyPreferDualStack)
		}, "must be set to 'SingleStack' when releasing the secondary clusterIP"},
		{"P12", dual, func(s *corev1.Service) {
			slices.Reverse(s.Spec.IPFamilies)
			slices.Reverse(s.Spec.ClusterIPs)
			s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
		}, "spec.ipFamilies[0]: Invalid value: [\"IPv6\",\"IPv4\"]: may not change once set"},
		{"unchanged", dual, func(*corev1.Service) {}, "IPv4 IPv6"},
	} {
		t.Run(tc.id, func(t *testing.T) {
			s := tc.old.DeepCopy()
			tc.change(s)
			err := write(s, tc.old)
			if !strings.HasPrefix(tc.want, "IPv") {
				wantError(t, err, tc.want)
				return
			}
			var got []string
			for i, f := range s.Spec.IPFamilies {
				got = append(got, string(f))
				if len(s.Spec.ClusterIPs) <= i || familyOf(s.Spec.ClusterIPs[i]) != f {
					t.Errorf("addresses %q for families %q", s.Spec.ClusterIPs, s.Spec.IPFamilies)
				}
			}
			if text := strings.Join(got, " "); err != nil || text != tc.want || s.Spec.ClusterIPs[0] != tc.old.Spec.ClusterIPs[0] {
				t.Errorf("families %q, want %q: %v", text, tc.want, err)
			}
		})
	}
}
