// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// The functions in this file turn a function on a concrete type into the form
// that Kind wants, so that a kind's file is written without type assertions.
// The framework only ever passes objects that Kind.New or Kind.NewList made.

func newObject[T any, P interface {
	*T
	runtime.Object
}]() runtime.Object {
	return P(new(T))
}

func forObject[T runtime.Object](f func(T)) func(runtime.Object) {
	return func(obj runtime.Object) { f(obj.(T)) }
}

func onCreate[T runtime.Object](f func(context.Context, T)) func(context.Context, runtime.Object) {
	return func(ctx context.Context, obj runtime.Object) { f(ctx, obj.(T)) }
}

func onUpdate[T runtime.Object](f func(ctx context.Context, obj, old T)) func(context.Context, runtime.Object, runtime.Object) {
	return func(ctx context.Context, obj, old runtime.Object) { f(ctx, obj.(T), old.(T)) }
}

func validates[T runtime.Object](f func(T) field.ErrorList) func(runtime.Object) field.ErrorList {
	return func(obj runtime.Object) field.ErrorList { return f(obj.(T)) }
}

func validatesUpdate[T runtime.Object](f func(obj, old T) field.ErrorList) func(runtime.Object, runtime.Object) field.ErrorList {
	return func(obj, old runtime.Object) field.ErrorList { return f(obj.(T), old.(T)) }
}

// warns passes a nil T for old on create.
func warns[T runtime.Object](f func(obj, old T) []string) func(runtime.Object, runtime.Object) []string {
	return func(obj, old runtime.Object) []string {
		o, _ := old.(T)
		return f(obj.(T), o)
	}
}

func row[T runtime.Object](f func(T) []any) func(runtime.Object) ([]any, []metav1.TableRowCondition) {
	return func(obj runtime.Object) ([]any, []metav1.TableRowCondition) { return f(obj.(T)), nil }
}

func fieldsOf[T runtime.Object](f func(T) fields.Set) func(runtime.Object) fields.Set {
	return func(obj runtime.Object) fields.Set { return f(obj.(T)) }
}
