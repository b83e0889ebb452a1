// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/apiserver/registry"
)

// priorityAdmission does what the plugin Priority does upstream: it gives a new pod
// the priority of its class, or of the class that is the default, and keeps a second
// class from becoming the default.
type priorityAdmission struct {
	lookup func(string) *registry.Store
}

var (
	_ admission.MutationInterface   = priorityAdmission{}
	_ admission.ValidationInterface = priorityAdmission{}
)

// Handles implements admission.Interface.
func (priorityAdmission) Handles(op admission.Operation) bool {
	return op == admission.Create || op == admission.Update
}

// Admit implements admission.MutationInterface.
func (p priorityAdmission) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok || a.GetSubresource() != "" {
		return nil
	}
	if a.GetOperation() == admission.Update {
		// Whoever leaves out what was resolved does not want to change it.
		if old, ok := a.GetOldObject().(*corev1.Pod); ok {
			if pod.Spec.Priority == nil {
				pod.Spec.Priority = old.Spec.Priority
			}
			if pod.Spec.PreemptionPolicy == nil {
				pod.Spec.PreemptionPolicy = old.Spec.PreemptionPolicy
			}
		}
		return nil
	}
	class, err := p.classOf(ctx, pod)
	if apierrors.IsNotFound(err) {
		return admission.NewForbidden(a, fmt.Errorf("no PriorityClass with name %v was found", pod.Spec.PriorityClassName))
	}
	if err != nil {
		return err
	}
	pod.Spec.PriorityClassName = class.Name
	if said := pod.Spec.Priority; said != nil && *said != class.Value {
		return admission.NewForbidden(a, fmt.Errorf("the integer value of priority (%d) must not be provided in pod spec; priority admission controller computed %d from the given PriorityClass name", *said, class.Value))
	}
	pod.Spec.Priority = ptr.To(class.Value)
	if class.PreemptionPolicy == nil {
		return nil
	}
	if said := pod.Spec.PreemptionPolicy; said != nil && *said != *class.PreemptionPolicy {
		return admission.NewForbidden(a, fmt.Errorf("the string value of PreemptionPolicy (%s) must not be provided in pod spec; priority admission controller computed %s from the given PriorityClass name", *said, *class.PreemptionPolicy))
	}
	pod.Spec.PreemptionPolicy = ptr.To(*class.PreemptionPolicy)
	return nil
}

// classOf returns the pod's class; a nameless one of priority 0 when it has none and
// there is no default.
func (p priorityAdmission) classOf(ctx context.Context, pod *corev1.Pod) (*schedulingv1.PriorityClass, error) {
	if name := pod.Spec.PriorityClassName; name != "" {
		class, err := registry.Read[*schedulingv1.PriorityClass](ctx, p.lookup, "priorityclasses", metav1.NamespaceNone, name)
		if err != nil && !apierrors.IsNotFound(err) {
			err = fmt.Errorf("failed to get PriorityClass with name %s: %w", name, err)
		}
		return class, err
	}
	class, err := p.defaultClass(ctx)
	if class == nil && err == nil {
		class = &schedulingv1.PriorityClass{PreemptionPolicy: ptr.To(corev1.PreemptLowerPriority)}
	}
	return class, err
}

// defaultClass returns the class of pods that name none; nil when there is none. Of
// several, which only a race can make, it is the lowest.
func (p priorityAdmission) defaultClass(ctx context.Context) (*schedulingv1.PriorityClass, error) {
	all, err := registry.List[*schedulingv1.PriorityClassList](ctx, p.lookup, "priorityclasses", metav1.NamespaceNone, labels.Everything())
	if err != nil {
		return nil, fmt.Errorf("failed to get default priority class: %w", err)
	}
	var lowest *schedulingv1.PriorityClass
	for i := range all.Items {
		if class := &all.Items[i]; class.GlobalDefault && (lowest == nil || class.Value < lowest.Value) {
			lowest = class
		}
	}
	return lowest, nil
}

// Validate implements admission.ValidationInterface.
func (p priorityAdmission) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	class, ok := a.GetObject().(*schedulingv1.PriorityClass)
	if !ok || a.GetSubresource() != "" || !class.GlobalDefault {
		return nil
	}
	have, err := p.defaultClass(ctx)
	if err != nil {
		return err
	}
	if have == nil || (a.GetOperation() == admission.Update && have.Name == class.Name) {
		return nil
	}
	return admission.NewForbidden(a, fmt.Errorf("PriorityClass %v is already marked as default. Only one default can exist", have.Name))
}
