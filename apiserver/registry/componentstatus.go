// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"
)

// componentStatusKind asks the parts of the control plane how they are, each time it
// is read.
func componentStatusKind() Kind {
	k := Kind{
		Resource: "componentstatuses", Singular: "componentstatus", Kind: "ComponentStatus",
		GroupVersion: corev1.SchemeGroupVersion,
		ShortNames:   []string{"cs"},
		New:          newObject[corev1.ComponentStatus], NewList: newObject[corev1.ComponentStatusList],
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Status", "string", "Healthy or Unhealthy."),
			column("Message", "string", "What it answered."),
			column("Error", "string", "What was wrong."),
		},
		Row: row(func(c *corev1.ComponentStatus) []any {
			status, message, problem := "Unknown", "", ""
			for _, condition := range c.Conditions {
				if condition.Type != corev1.ComponentHealthy {
					continue
				}
				status, message, problem = "Unhealthy", condition.Message, condition.Error
				if condition.Status == corev1.ConditionTrue {
					status = "Healthy"
				}
			}
			return []any{c.Name, status, message, problem}
		}),
	}
	k.Virtual = func(deps Deps) rest.Storage { return componentREST{newTableConvertor(k), k, deps.Components} }
	return k
}

type componentREST struct {
	tableConvertor
	kind  Kind
	parts map[string]func(context.Context) error
}

var (
	_ rest.Getter             = componentREST{}
	_ rest.Lister             = componentREST{}
	_ rest.ShortNamesProvider = componentREST{}
)

func (r componentREST) New() runtime.Object     { return r.kind.New() }
func (r componentREST) NewList() runtime.Object { return r.kind.NewList() }
func (r componentREST) Destroy()                {}
func (r componentREST) NamespaceScoped() bool   { return false }
func (r componentREST) GetSingularName() string { return r.kind.Singular }
func (r componentREST) ShortNames() []string    { return r.kind.ShortNames }

// Get implements rest.Getter.
func (r componentREST) Get(ctx context.Context, name string, _ *metav1.GetOptions) (runtime.Object, error) {
	ask, ok := r.parts[name]
	if !ok {
		return nil, apierrors.NewNotFound(corev1.Resource(r.kind.Resource), name)
	}
	c := component(ctx, name, ask)
	return &c, nil
}

// List implements rest.Lister: all are asked at the same time.
func (r componentREST) List(ctx context.Context, options *internalversion.ListOptions) (runtime.Object, error) {
	names := slices.Sorted(maps.Keys(r.parts))
	all := make([]corev1.ComponentStatus, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() { all[i] = component(ctx, name, r.parts[name]) })
	}
	wg.Wait()
	list := &corev1.ComponentStatusList{Items: []corev1.ComponentStatus{}}
	for i := range all {
		if selects(options, &all[i]) {
			list.Items = append(list.Items, all[i])
		}
	}
	return list, nil
}

func component(ctx context.Context, name string, ask func(context.Context) error) corev1.ComponentStatus {
	healthy := corev1.ComponentCondition{Type: corev1.ComponentHealthy, Status: corev1.ConditionTrue, Message: "ok"}
	if err := ask(ctx); err != nil {
		healthy.Status, healthy.Message, healthy.Error = corev1.ConditionFalse, "", fmt.Sprint(err)
	}
	return corev1.ComponentStatus{ObjectMeta: metav1.ObjectMeta{Name: name}, Conditions: []corev1.ComponentCondition{healthy}}
}
