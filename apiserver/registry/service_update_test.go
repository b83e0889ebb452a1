// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

func same(a, b any) bool { return equality.Semantic.DeepEqual(a, b) }

// agree checks that what is taken is what is stored: nothing leaks and nothing is
// given out that a restart would not know of.
func (b serviceBench) agree() {
	b.t.Helper()
	services := b.storages["services"].(*serviceREST)
	fresh := newServiceAllocator(services.Store, services.alloc.deps)
	if _, err := fresh.open(b.ctx()); err != nil {
		b.t.Fatal(err)
	}
	var derived []string
	for _, e := range fresh.book.Taken() {
		derived = append(derived, e.String())
	}
	if got := b.taken(); !slices.Equal(got, derived) {
		b.t.Errorf("taken %q\nstored %q", got, derived)
	}
}

// TestServiceCreateByPut uses the two ways in which a PUT meets no object.
func TestServiceCreateByPut(t *testing.T) {
	b := newServiceBench(t)
	if _, err := b.put("services", b.service("x", "type: NodePort\n"+web)); err != nil {
		t.Fatal(err)
	}
	_, err := b.put("services", b.service("other", web+"\nclusterIP: 10.96.0.10"))
	wantError(t, err, "provided IP is already allocated")
	b.agree()
}

// TestServiceParallel creates and deletes from many sides, and compares with a
// restart (A02, E01: random picks out of the upper bands).
func TestServiceParallel(t *testing.T) {
	b := newServiceBench(t)
	var wg sync.WaitGroup
	for w := range 64 {
		wg.Go(func() {
			for i := range 3 {
				name := fmt.Sprintf("s-%d-%d", w, i)
				s, err := b.tryCreate(name, "type: NodePort\n"+web)
				if err != nil {
					t.Error(err)
					continue
				}
				if i == 1 {
					b.remove("services", name)
				}
				if port := s.Spec.Ports[0].NodePort; port < 30086 || strings.HasPrefix(s.Spec.ClusterIP, "10.96.0.") {
					t.Errorf("%s got %s and %d", name, s.Spec.ClusterIP, port)
				}
			}
		})
	}
	wg.Wait()
	b.agree()
	seen := map[string]bool{}
	for _, line := range b.taken() {
		value, _, _ := strings.Cut(line, " ")
		if seen[value] {
			t.Errorf("%s has two owners", value)
		}
		seen[value] = true
	}
	if want := 1 + 64*2*2; len(seen) != want {
		t.Errorf("%d values are taken, want %d", len(seen), want)
	}
}

// TestServiceContended changes one Service from many sides without a version, so
// that writes lose to one another and start over with new picks.
func TestServiceContended(t *testing.T) {
	b := newServiceBench(t)
	b.mustCreate("x", web)
	types := []corev1.ServiceType{corev1.ServiceTypeNodePort, corev1.ServiceTypeClusterIP, corev1.ServiceTypeLoadBalancer}
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			for i := range 8 {
				s := b.service("x", web)
				s.Spec.Type = types[(w+i)%len(types)]
				s.Labels = map[string]string{"by": fmt.Sprintf("%d-%d", w, i)}
				if _, err := b.put("services", s); err != nil && !apierrors.IsInvalid(err) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	b.agree()
	for _, line := range b.taken() {
		if strings.Contains(line, "in flight") {
			t.Errorf("nobody writes any more: %s", line)
		}
	}
}

// TestServiceRestart closes the store and opens it again, as a crash would.
func TestServiceRestart(t *testing.T) {
	b := newServiceBench(t)
	b.mustCreate("a", "type: NodePort\n"+web)
	b.mustCreate("b", "type: LoadBalancer\nexternalTrafficPolicy: Local\n"+web)
	before := b.taken()
	again := serviceBench{openAgain(t, b)}
	if after := again.taken(); !slices.Equal(before, after) {
		t.Errorf("before %q, after %q", before, after)
	}
	_, err := again.tryCreate("x", web+"\nclusterIP: 10.96.0.10")
	wantError(t, err, "provided IP is already allocated")
}

func TestServiceRangeUnusable(t *testing.T) {
	deps := serviceDeps("10.96.0.0/32", 2768)
	if err := CheckServiceRanges(deps); err == nil {
		t.Error("a range without an address was accepted")
	}
	b := serviceBench{newBench(t, deps, serviceKind())}
	_, err := b.tryCreate("x", web)
	wantError(t, err, "no Service can be written", "holds no usable address; use a wider one")
}
