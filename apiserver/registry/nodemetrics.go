// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/rest"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"
)

// nodeMetricsKind is what the pods of a node use (kubectl top node).
func nodeMetricsKind() Kind {
	k := Kind{
		Resource: "nodes", Singular: "node", Kind: "NodeMetrics",
		GroupVersion: metricsv1beta1.SchemeGroupVersion,
		New:          newObject[metricsv1beta1.NodeMetrics], NewList: newObject[metricsv1beta1.NodeMetricsList],
		Columns: figureColumns(),
		Row: row(func(m *metricsv1beta1.NodeMetrics) []any {
			return figureRow(m.Name, m.Usage, m.Window)
		}),
	}
	k.Virtual = func(deps Deps) rest.Storage {
		return nodeMetricsREST{newTableConvertor(k), k, deps, newFigures(deps)}
	}
	return k
}

type nodeMetricsREST struct {
	tableConvertor
	kind    Kind
	deps    Deps
	figures *figures
}

var (
	_ rest.Getter = nodeMetricsREST{}
	_ rest.Lister = nodeMetricsREST{}
)

func (r nodeMetricsREST) New() runtime.Object     { return r.kind.New() }
func (r nodeMetricsREST) NewList() runtime.Object { return r.kind.NewList() }
func (r nodeMetricsREST) Destroy()                {}
func (r nodeMetricsREST) NamespaceScoped() bool   { return false }
func (r nodeMetricsREST) GetSingularName() string { return r.kind.Singular }

// Get implements rest.Getter.
func (r nodeMetricsREST) Get(ctx context.Context, name string, _ *metav1.GetOptions) (runtime.Object, error) {
	node, err := Read[*corev1.Node](ctx, r.deps.Lookup, "nodes", metav1.NamespaceNone, name)
	if err != nil {
		return nil, err
	}
	found := r.of(ctx, []corev1.Node{*node})
	if len(found) == 0 {
		return nil, apierrors.NewNotFound(schema.GroupResource{Group: metricsv1beta1.GroupName, Resource: r.kind.Resource}, name)
	}
	return &found[0], nil
}

// List implements rest.Lister.
func (r nodeMetricsREST) List(ctx context.Context, options *internalversion.ListOptions) (runtime.Object, error) {
	byLabel, byField := selectorsOf(options)
	nodes, err := List[*corev1.NodeList](ctx, r.deps.Lookup, "nodes", metav1.NamespaceNone, byLabel)
	if err != nil {
		return nil, err
	}
	chosen := slices.DeleteFunc(slices.Clone(nodes.Items), func(n corev1.Node) bool {
		return !byField.Matches(fields.Set{"metadata.name": n.Name})
	})
	return &metricsv1beta1.NodeMetricsList{Items: r.of(ctx, chosen)}, nil
}

// of returns the figures of nodes, as far as there are any.
func (r nodeMetricsREST) of(ctx context.Context, nodes []corev1.Node) []metricsv1beta1.NodeMetrics {
	var names []string
	for _, n := range nodes {
		names = append(names, n.Name)
	}
	uses := r.figures.ofNodes(ctx, names)
	out := []metricsv1beta1.NodeMetrics{}
	for _, n := range nodes {
		use := uses[n.Name]
		if use == nil {
			continue
		}
		var cpu, memory int64
		for _, containers := range use.pods {
			for _, c := range containers {
				cpu, memory = cpu+c.cpu, memory+c.memory
			}
		}
		out = append(out, metricsv1beta1.NodeMetrics{
			ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: n.Labels, CreationTimestamp: metav1.Now()},
			Timestamp:  metav1.NewTime(use.at), Window: metav1.Duration{Duration: use.window}, Usage: useOf(cpu, memory),
		})
	}
	slices.SortFunc(out, func(a, b metricsv1beta1.NodeMetrics) int { return byName(&a, &b) })
	return out
}

// selectorsOf are the selectors of a list; all match where none is given.
func selectorsOf(options *internalversion.ListOptions) (labels.Selector, fields.Selector) {
	byLabel, byField := labels.Everything(), fields.Everything()
	if options != nil && options.LabelSelector != nil {
		byLabel = options.LabelSelector
	}
	if options != nil && options.FieldSelector != nil {
		byField = options.FieldSelector
	}
	return byLabel, byField
}
