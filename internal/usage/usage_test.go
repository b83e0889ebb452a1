// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
)

func list(text string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for word := range strings.FieldsSeq(text) {
		name, q, _ := strings.Cut(word, "=")
		out[corev1.ResourceName(name)] = resource.MustParse(q)
	}
	return out
}

func text(l corev1.ResourceList) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(l)) {
		q := l[name]
		out = append(out, fmt.Sprintf("%s=%s", name, q.String()))
	}
	return strings.Join(out, " ")
}

func pod(change func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{
		{Name: "a", Resources: corev1.ResourceRequirements{Requests: list("cpu=1 memory=1Gi example.com/gpu=2"), Limits: list("cpu=2")}},
		{Name: "b", Resources: corev1.ResourceRequirements{Requests: list("cpu=500m")}},
	}}}
	change(p)
	return p
}

func TestOf(t *testing.T) {
	now := time.Unix(1000, 0)
	pods, services, claims := schema.GroupResource{Resource: "pods"}, schema.GroupResource{Resource: "services"}, schema.GroupResource{Resource: "persistentvolumeclaims"}
	gone := func(seconds int64) *corev1.Pod {
		return pod(func(p *corev1.Pod) {
			p.DeletionTimestamp, p.DeletionGracePeriodSeconds = ptr.To(metav1.NewTime(now.Add(-10*time.Second))), &seconds
		})
	}
	const full = "count/pods=1 cpu=1500m limits.cpu=2 memory=1Gi pods=1 requests.cpu=1500m requests.example.com/gpu=2 requests.memory=1Gi"
	service := func(s corev1.ServiceSpec) *corev1.Service {
		s.Ports = []corev1.ServicePort{{Port: 1, NodePort: 30001}, {Port: 2}}
		return &corev1.Service{Spec: s}
	}
	for name, x := range map[string]struct {
		gr   schema.GroupResource
		obj  any
		want string
	}{
		"a pod":                     {pods, pod(func(*corev1.Pod) {}), full},
		"a pod that has ended":      {pods, pod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }), "count/pods=1"},
		"a pod that is on its way":  {pods, gone(60), full},
		"a pod that should be gone": {pods, gone(5), "count/pods=1"},
		"a service":                 {services, service(corev1.ServiceSpec{}), "count/services=1 services=1 services.loadbalancers=0 services.nodeports=0"},
		"a node port":               {services, service(corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort}), "count/services=1 services=1 services.loadbalancers=0 services.nodeports=2"},
		"a balancer":                {services, service(corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}), "count/services=1 services=1 services.loadbalancers=1 services.nodeports=2"},
		"a balancer without ports":  {services, service(corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, AllocateLoadBalancerNodePorts: ptr.To(false)}), "count/services=1 services=1 services.loadbalancers=1 services.nodeports=1"},
		"a secret":                  {schema.GroupResource{Resource: "secrets"}, &corev1.Secret{}, "count/secrets=1 secrets=1"},
		"anything":                  {schema.GroupResource{Group: "example.com", Resource: "widgets"}, &metav1.PartialObjectMetadata{}, "count/widgets.example.com=1"},
		"a claim of a class":        {claims, &corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: ptr.To("gold"), Resources: corev1.VolumeResourceRequirements{Requests: list("storage=5Gi")}}}, "count/persistentvolumeclaims=1 gold.storageclass.storage.k8s.io/persistentvolumeclaims=1 gold.storageclass.storage.k8s.io/requests.storage=5Gi persistentvolumeclaims=1 requests.storage=5Gi"},
	} {
		got := Of(x.gr, x.obj, now)
		if text(got) != x.want {
			t.Errorf("%s: %s\nwant %s", name, text(got), x.want)
		}
		// What is measured under a name is what the name is about.
		for res := range got {
			if Resource(res) != x.gr {
				t.Errorf("%s: %s is about %v", name, res, Resource(res))
			}
		}
	}
}

func TestResourceOfUnknownNames(t *testing.T) {
	for _, name := range []corev1.ResourceName{"bananas", "limits.storage", "requests.bananas", "example.com/gpu"} {
		if got := Resource(name); got.Resource != "" {
			t.Errorf("%s is about %v", name, got)
		}
	}
}

func TestMissing(t *testing.T) {
	p := pod(func(p *corev1.Pod) { p.Spec.InitContainers = []corev1.Container{{Name: "0"}} })
	if got := Missing(p, []corev1.ResourceName{"requests.memory", "limits.cpu", "pods", "requests.example.com/gpu"}); got != "must specify limits.cpu for: 0,b; requests.memory for: 0,b" {
		t.Errorf("got %q", got)
	}
	if got := Missing(p, []corev1.ResourceName{"pods", "ephemeral-storage"}); got != "" {
		t.Errorf("got %q", got)
	}
}

func TestInScope(t *testing.T) {
	p := pod(func(p *corev1.Pod) {
		p.Spec.ActiveDeadlineSeconds, p.Spec.PriorityClassName, p.Status.QOSClass = ptr.To[int64](5), "gold", corev1.PodQOSBurstable
		p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{
			{PodAffinityTerm: corev1.PodAffinityTerm{Namespaces: []string{"other"}}},
		}}}
	})
	for _, x := range []struct {
		scope  corev1.ResourceQuotaScope
		op     corev1.ScopeSelectorOperator
		values []string
		want   bool
	}{
		{corev1.ResourceQuotaScopeTerminating, corev1.ScopeSelectorOpExists, nil, true},
		{corev1.ResourceQuotaScopeNotTerminating, corev1.ScopeSelectorOpExists, nil, false},
		{corev1.ResourceQuotaScopeBestEffort, corev1.ScopeSelectorOpExists, nil, false},
		{corev1.ResourceQuotaScopeNotBestEffort, corev1.ScopeSelectorOpExists, nil, true},
		{corev1.ResourceQuotaScopeCrossNamespacePodAffinity, corev1.ScopeSelectorOpExists, nil, true},
		{corev1.ResourceQuotaScopePriorityClass, corev1.ScopeSelectorOpExists, nil, true},
		{corev1.ResourceQuotaScopePriorityClass, corev1.ScopeSelectorOpIn, []string{"silver", "gold"}, true},
		{corev1.ResourceQuotaScopePriorityClass, corev1.ScopeSelectorOpNotIn, []string{"gold"}, false},
		{corev1.ResourceQuotaScopePriorityClass, corev1.ScopeSelectorOpDoesNotExist, nil, false},
	} {
		got, err := InScope(p, corev1.ScopedResourceSelectorRequirement{ScopeName: x.scope, Operator: x.op, Values: x.values})
		if err != nil || got != x.want {
			t.Errorf("%s %s %v: %v, %v", x.scope, x.op, x.values, got, err)
		}
	}
	if in, err := InScope(&corev1.Service{}, corev1.ScopedResourceSelectorRequirement{ScopeName: corev1.ResourceQuotaScopeTerminating}); in || err != nil {
		t.Errorf("a Service: %v, %v", in, err)
	}
}
