// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"
)

// bindingKind assigns the pod of its name to a node: the older way to what
// pods/binding does.
func bindingKind() Kind {
	k := Kind{
		Resource: "bindings", Singular: "binding", Kind: "Binding",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		New: newObject[corev1.Binding],
	}
	k.Virtual = func(deps Deps) rest.Storage { return bindingsREST{k, deps} }
	return k
}

type bindingsREST struct {
	kind Kind
	deps Deps
}

var (
	_ rest.Creater = bindingsREST{}
	_ rest.Scoper  = bindingsREST{}
)

func (r bindingsREST) New() runtime.Object     { return r.kind.New() }
func (bindingsREST) Destroy()                  {}
func (bindingsREST) NamespaceScoped() bool     { return true }
func (r bindingsREST) GetSingularName() string { return r.kind.Singular }

// Create implements rest.Creater.
func (r bindingsREST) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc, options *metav1.CreateOptions) (runtime.Object, error) {
	b, ok := obj.(*corev1.Binding)
	if !ok {
		return nil, apierrors.NewBadRequest("not a Binding object")
	}
	return bindingREST{r.deps.Lookup("pods")}.Create(ctx, b.Name, obj, validate, options)
}
