// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"
)

// podMetricsKind is what the containers of a pod use (kubectl top pod). Only pods that
// run have figures.
func podMetricsKind() Kind {
	k := Kind{
		Resource: "pods", Singular: "pod", Kind: "PodMetrics",
		GroupVersion: metricsv1beta1.SchemeGroupVersion,
		Namespaced:   true,
		New:          newObject[metricsv1beta1.PodMetrics], NewList: newObject[metricsv1beta1.PodMetricsList],
		Columns: figureColumns(),
		Row: row(func(m *metricsv1beta1.PodMetrics) []any {
			var cpu, memory int64
			for _, c := range m.Containers {
				cpu, memory = cpu+c.Usage.Cpu().ScaledValue(-9), memory+c.Usage.Memory().Value()
			}
			return figureRow(m.Name, useOf(cpu, memory), m.Window)
		}),
	}
	k.Virtual = func(deps Deps) rest.Storage {
		return podMetricsREST{newTableConvertor(k), k, deps, newFigures(deps)}
	}
	return k
}

type podMetricsREST struct {
	tableConvertor
	kind    Kind
	deps    Deps
	figures *figures
}

var (
	_ rest.Getter = podMetricsREST{}
	_ rest.Lister = podMetricsREST{}
)

func (r podMetricsREST) New() runtime.Object     { return r.kind.New() }
func (r podMetricsREST) NewList() runtime.Object { return r.kind.NewList() }
func (r podMetricsREST) Destroy()                {}
func (r podMetricsREST) NamespaceScoped() bool   { return true }
func (r podMetricsREST) GetSingularName() string { return r.kind.Singular }

// Get implements rest.Getter.
func (r podMetricsREST) Get(ctx context.Context, name string, _ *metav1.GetOptions) (runtime.Object, error) {
	namespace := request.NamespaceValue(ctx)
	pod, err := Read[*corev1.Pod](ctx, r.deps.Lookup, "pods", namespace, name)
	if err != nil {
		return nil, err
	}
	found := r.of(ctx, []corev1.Pod{*pod})
	if len(found) == 0 {
		return nil, apierrors.NewNotFound(schema.GroupResource{Group: metricsv1beta1.GroupName, Resource: r.kind.Resource}, fmt.Sprintf("%s/%s", namespace, name))
	}
	return &found[0], nil
}

// List implements rest.Lister.
func (r podMetricsREST) List(ctx context.Context, options *internalversion.ListOptions) (runtime.Object, error) {
	byLabel, byField := selectorsOf(options)
	pods, err := List[*corev1.PodList](ctx, r.deps.Lookup, "pods", request.NamespaceValue(ctx), byLabel)
	if err != nil {
		return nil, err
	}
	chosen := slices.DeleteFunc(slices.Clone(pods.Items), func(p corev1.Pod) bool {
		return !byField.Matches(fields.Set{"metadata.name": p.Name, "metadata.namespace": p.Namespace})
	})
	return &metricsv1beta1.PodMetricsList{Items: r.of(ctx, chosen)}, nil
}

// of returns the figures of pods, as far as there are any.
func (r podMetricsREST) of(ctx context.Context, pods []corev1.Pod) []metricsv1beta1.PodMetrics {
	var nodes []string
	for _, p := range pods {
		if p.Status.Phase == corev1.PodRunning && !slices.Contains(nodes, p.Spec.NodeName) {
			nodes = append(nodes, p.Spec.NodeName)
		}
	}
	uses := r.figures.ofNodes(ctx, nodes)
	out := []metricsv1beta1.PodMetrics{}
	for _, p := range pods {
		use := uses[p.Spec.NodeName]
		if p.Status.Phase != corev1.PodRunning || use == nil || len(use.pods[p.UID]) == 0 {
			continue
		}
		m := metricsv1beta1.PodMetrics{
			ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: p.Namespace, Labels: p.Labels, CreationTimestamp: metav1.Now()},
			Timestamp:  metav1.NewTime(use.at), Window: metav1.Duration{Duration: use.window},
		}
		for _, c := range use.pods[p.UID] {
			m.Containers = append(m.Containers, metricsv1beta1.ContainerMetrics{Name: c.name, Usage: c.resources()})
		}
		out = append(out, m)
	}
	slices.SortFunc(out, func(a, b metricsv1beta1.PodMetrics) int { return byName(&a, &b) })
	return out
}
