// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/internal/nettest"
)

// amounts reads "pods=2 requests.cpu=1".
func amounts(text string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for word := range strings.FieldsSeq(text) {
		name, q, _ := strings.Cut(word, "=")
		out[corev1.ResourceName(name)] = resource.MustParse(q)
	}
	return out
}

func (b *bench) quota(name, hard string, opts ...func(*corev1.ResourceQuota)) {
	b.t.Helper()
	q := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ResourceQuotaSpec{Hard: amounts(hard)}}
	for _, o := range opts {
		o(q)
	}
	if _, err := b.client.CoreV1().ResourceQuotas("default").Create(b.t.Context(), q, metav1.CreateOptions{}); err != nil {
		b.t.Fatal(err)
	}
	nettest.Eventually(b.t, patience, "quota "+name+" is counted", func() error {
		got, err := b.client.CoreV1().ResourceQuotas("default").Get(b.t.Context(), name, metav1.GetOptions{})
		if err == nil && len(got.Status.Used) == 0 {
			err = fmt.Errorf("status %+v", got.Status)
		}
		return err
	})
}

// usedIs waits until the quota's status says so.
func (b *bench) usedIs(name, want string) {
	b.t.Helper()
	nettest.Eventually(b.t, patience, "quota "+name+" "+want, func() error {
		got, err := b.client.CoreV1().ResourceQuotas("default").Get(b.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for res, q := range amounts(want) {
			if used, ok := got.Status.Used[res]; !ok || used.Cmp(q) != 0 {
				return fmt.Errorf("%s is %v", res, used.String())
			}
		}
		return nil
	})
}

func (b *bench) pod(name string, requests, limits string, opts ...func(*corev1.Pod)) error {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: webTemplate("nginx").Spec}
	if requests != "" || limits != "" {
		pod.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: amounts(requests), Limits: amounts(limits)}
	}
	for _, o := range opts {
		o(pod)
	}
	_, err := b.client.CoreV1().Pods("default").Create(b.t.Context(), pod, metav1.CreateOptions{})
	return err
}

func wantForbidden(t *testing.T, err error, want string) {
	t.Helper()
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v\nwant %s", err, want)
	}
}

// TestQuota: what is made is charged and refused beyond the limit, what goes is given
// back, and many at once get no more than there is.
func TestQuota(t *testing.T) {
	b := newBench(t)
	b.quota("q", "pods=3 requests.cpu=1 limits.memory=1Gi services=2 services.nodeports=2 configmaps=3 count/deployments.apps=1 count/leases.coordination.k8s.io=5 secrets=0")
	// The Service kubernetes and the authority's ConfigMap are there from the start.
	b.usedIs("q", "pods=0 requests.cpu=0 services=1 services.nodeports=0 configmaps=1 count/deployments.apps=0 count/leases.coordination.k8s.io=0 secrets=0")

	wantForbidden(t, b.pod("bare", "", ""), `pods "bare" is forbidden: failed quota: q: must specify limits.memory for: c; requests.cpu for: c`)
	if err := b.pod("a", "cpu=600m", "memory=256Mi"); err != nil {
		t.Fatal(err)
	}
	b.usedIs("q", "pods=1 requests.cpu=600m limits.memory=256Mi")
	wantForbidden(t, b.pod("big", "cpu=500m", "memory=1Mi"),
		`pods "big" is forbidden: exceeded quota: q, requested: requests.cpu=500m, used: requests.cpu=600m, limited: requests.cpu=1`)
	b.settle()

	// A dry run costs nothing, and what is refused neither.
	dry := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "dry"}}
	maps := b.client.CoreV1().ConfigMaps("default")
	if _, err := maps.Create(t.Context(), dry, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
		t.Error(err)
	}
	if _, err := maps.Create(t.Context(), dry, metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
	if _, err := maps.Create(t.Context(), dry, metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		t.Errorf("twice: %v", err)
	}
	b.usedIs("q", "configmaps=2")
	_, err := b.client.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}}, metav1.CreateOptions{})
	wantForbidden(t, err, `secrets "s" is forbidden: exceeded quota: q, requested: secrets=1, used: secrets=0, limited: secrets=0`)

	// A Service that becomes a NodePort takes one.
	services := b.client.CoreV1().Services("default")
	svc, err := services.Create(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "a", Port: 80}, {Name: "b", Port: 81}}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	svc.Spec.Type = corev1.ServiceTypeNodePort
	if svc, err = services.Update(t.Context(), svc, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.usedIs("q", "services=2 services.nodeports=2")
	svc.Spec.Type = corev1.ServiceTypeClusterIP
	if _, err = services.Update(t.Context(), svc, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.usedIs("q", "services.nodeports=0")

	b.create(deployment("one", 0))
	_, err = b.client.AppsV1().Deployments("default").Create(t.Context(), deployment("two", 0), metav1.CreateOptions{})
	wantForbidden(t, err, `deployments.apps "two" is forbidden: exceeded quota: q, requested: count/deployments.apps=1, used: count/deployments.apps=1, limited: count/deployments.apps=1`)

	// A pod that ends gives back what it took, and stays.
	b.patchPodStatus("a", `{"status":{"phase":"Succeeded"}}`)
	b.usedIs("q", "pods=0 requests.cpu=0 limits.memory=0")
	b.settle()

	var made, refused atomic.Int32
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			switch err := b.pod(fmt.Sprintf("p%d", i), "cpu=10m", "memory=1Mi"); {
			case err == nil:
				made.Add(1)
			case apierrors.IsForbidden(err):
				refused.Add(1)
			default:
				t.Errorf("create: %v", err)
			}
		})
	}
	wg.Wait()
	if made.Load() != 3 || refused.Load() != 9 {
		t.Errorf("%d made, %d refused; there was room for 3", made.Load(), refused.Load())
	}
	b.usedIs("q", "pods=3 requests.cpu=30m")
	if err := b.client.CoreV1().Pods("default").DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	b.usedIs("q", "pods=0 requests.cpu=0")
	b.settle()
}

// TestQuotaHoldsBackADeployment: what is refused is told, does not keep a lab from
// being settled, and is made as soon as there is room.
func TestQuotaHoldsBackADeployment(t *testing.T) {
	b := newBench(t)
	b.quota("q", "pods=2")
	b.create(deployment("web", 4))
	b.usedIs("q", "pods=2")
	b.settle()
	set := b.sets("web")[0]
	b.event(set.Name, "FailedCreate", "exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2")
	if got := reason(b.get("web"), "ReplicaFailure"); got != "True FailedCreate" || len(b.pods("default", "app=web")) != 2 {
		t.Errorf("condition %s, %d pods", got, len(b.pods("default", "app=web")))
	}
	if _, err := b.client.CoreV1().ResourceQuotas("default").Patch(t.Context(), "q", types.MergePatchType, []byte(`{"spec":{"hard":{"pods":"3"}}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.usedIs("q", "pods=3")
	b.settle()
	if err := b.client.CoreV1().ResourceQuotas("default").Delete(t.Context(), "q", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	if n := len(b.pods("default", "app=web")); n != 4 {
		t.Errorf("%d pods without the quota", n)
	}
}

// TestQuotaScopes: a quota may be about some of the pods.
func TestQuotaScopes(t *testing.T) {
	b := newBench(t)
	b.quota("best", "pods=1", func(q *corev1.ResourceQuota) {
		q.Spec.Scopes = []corev1.ResourceQuotaScope{corev1.ResourceQuotaScopeBestEffort}
	})
	b.quota("critical", "pods=1", func(q *corev1.ResourceQuota) {
		q.Spec.ScopeSelector = &corev1.ScopeSelector{MatchExpressions: []corev1.ScopedResourceSelectorRequirement{{
			ScopeName: corev1.ResourceQuotaScopePriorityClass, Operator: corev1.ScopeSelectorOpIn, Values: []string{"system-cluster-critical"},
		}}}
	})
	if err := b.pod("a", "", ""); err != nil {
		t.Fatal(err)
	}
	wantForbidden(t, b.pod("b", "", ""), "exceeded quota: best, requested: pods=1, used: pods=1, limited: pods=1")
	critical := func(p *corev1.Pod) { p.Spec.PriorityClassName = "system-cluster-critical" }
	if err := b.pod("b", "cpu=1m", "", critical); err != nil {
		t.Fatal(err)
	}
	wantForbidden(t, b.pod("c", "cpu=1m", "", critical), "exceeded quota: critical")
	if err := b.pod("d", "cpu=1m", ""); err != nil {
		t.Error(err)
	}
	b.usedIs("best", "pods=1")
	b.usedIs("critical", "pods=1")
	b.settle()
}

// TestLimitRange: defaults are filled in and told, bounds are kept.
func TestLimitRange(t *testing.T) {
	b := newBench(t)
	limits := &corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Name: "l"}, Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{
		{
			Type: corev1.LimitTypeContainer, Default: amounts("cpu=300m memory=200Mi"), DefaultRequest: amounts("cpu=100m"),
			Min: amounts("cpu=50m"), Max: amounts("cpu=1"), MaxLimitRequestRatio: amounts("cpu=5"),
		},
		{Type: corev1.LimitTypePod, Max: amounts("memory=1Gi")},
		{Type: corev1.LimitTypePersistentVolumeClaim, Min: amounts("storage=1Gi"), Max: amounts("storage=2Gi")},
	}}}
	if _, err := b.client.CoreV1().LimitRanges("default").Create(t.Context(), limits, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := b.pod("a", "", ""); err != nil {
		t.Fatal(err)
	}
	pod, err := b.client.CoreV1().Pods("default").Get(t.Context(), "a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r := pod.Spec.Containers[0].Resources
	if r.Limits.Cpu().String() != "300m" || r.Limits.Memory().String() != "200Mi" || r.Requests.Cpu().String() != "100m" || r.Requests.Memory().String() != "200Mi" {
		t.Errorf("resources %v", r)
	}
	if got := pod.Annotations["kubernetes.io/limit-ranger"]; got != "LimitRanger plugin set: cpu, memory request for container c; cpu, memory limit for container c" {
		t.Errorf("annotation %q", got)
	}
	wantForbidden(t, b.pod("b", "cpu=500m", "cpu=2"), `pods "b" is forbidden: maximum cpu usage per Container is 1, but limit is 2`)
	wantForbidden(t, b.pod("b", "cpu=10m", "cpu=50m"), "minimum cpu usage per Container is 50m, but request is 10m")
	wantForbidden(t, b.pod("b", "cpu=100m", "cpu=1"), "cpu max limit to request ratio per Container is 5, but provided ratio is 10.000000")
	wantForbidden(t, b.pod("b", "", "memory=2Gi"), "maximum memory usage per Pod is 1Gi, but limit is 2Gi")
	wantForbidden(t, b.pod("b", "cpu=10m", "cpu=40m memory=2Gi"), "[minimum cpu usage per Container is 50m, but request is 10m, maximum memory usage per Pod is 1Gi, but limit is 2Gi]")

	claim := func(size string) error {
		_, err := b.client.CoreV1().PersistentVolumeClaims("default").Create(t.Context(), &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Name: "c" + strings.ToLower(size)},
			Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources:   corev1.VolumeResourceRequirements{Requests: amounts("storage=" + size)},
			},
		}, metav1.CreateOptions{})
		return err
	}
	wantForbidden(t, claim("3Gi"), "maximum storage usage per PersistentVolumeClaim is 2Gi, but request is 3Gi")
	wantForbidden(t, claim("1Mi"), "minimum storage usage per PersistentVolumeClaim is 1Gi, but request is 1Mi")
	if err := claim("2Gi"); err != nil {
		t.Error(err)
	}
	b.settle()
}
