// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/labels"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apiserver/pkg/admission"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/kplab/kplab/apiserver/registry"
)

// limitsAnnotation says of a pod which of its requests and limits are not its own.
const limitsAnnotation = "kubernetes.io/limit-ranger"

// limitAdmission does what the plugin LimitRanger does upstream: new pods get the
// defaults of their namespace's LimitRanges, and pods and claims have to stay within
// their bounds.
type limitAdmission struct {
	lookup func(string) *registry.Store
	// any is false while no LimitRange was ever stored.
	any func() bool
}

var (
	_ admission.MutationInterface   = limitAdmission{}
	_ admission.ValidationInterface = limitAdmission{}
)

// Handles implements admission.Interface.
func (limitAdmission) Handles(op admission.Operation) bool {
	return op == admission.Create || op == admission.Update
}

// items returns all limits of the namespace.
func (l limitAdmission) items(ctx context.Context, a admission.Attributes) ([]corev1.LimitRangeItem, error) {
	if !l.any() {
		return nil, nil
	}
	all, err := registry.List[*corev1.LimitRangeList](ctx, l.lookup, "limitranges", a.GetNamespace(), labels.Everything())
	if err != nil {
		return nil, admission.NewForbidden(a, fmt.Errorf("unable to %s %v at this time because there was an error enforcing limit ranges", a.GetOperation(), a.GetResource()))
	}
	var out []corev1.LimitRangeItem
	for _, r := range all.Items {
		out = append(out, r.Spec.Limits...)
	}
	return out, nil
}

// Admit implements admission.MutationInterface.
func (l limitAdmission) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok || a.GetSubresource() != "" || a.GetOperation() != admission.Create {
		return nil // the resources of a pod that is there are not changed this way
	}
	items, err := l.items(ctx, a)
	if err != nil {
		return err
	}
	var filled []string
	for i := range items {
		if items[i].Type == corev1.LimitTypeContainer {
			filled = append(filled, fillContainers(pod.Spec.Containers, "container", &items[i])...)
			filled = append(filled, fillContainers(pod.Spec.InitContainers, "init container", &items[i])...)
		}
	}
	if len(filled) > 0 {
		if pod.Annotations == nil {
			pod.Annotations = map[string]string{}
		}
		pod.Annotations[limitsAnnotation] = "LimitRanger plugin set: " + strings.Join(filled, "; ")
	}
	return nil
}

// fillContainers sets what containers leave open and says what it set.
func fillContainers(containers []corev1.Container, what string, limit *corev1.LimitRangeItem) (filled []string) {
	for i := range containers {
		c := &containers[i]
		if set := fill(&c.Resources.Requests, limit.DefaultRequest); len(set) > 0 {
			filled = append(filled, strings.Join(set, ", ")+" request for "+what+" "+c.Name)
		}
		if set := fill(&c.Resources.Limits, limit.Default); len(set) > 0 {
			filled = append(filled, strings.Join(set, ", ")+" limit for "+what+" "+c.Name)
		}
	}
	return filled
}

// fill copies from defaults what list lacks, and returns the names.
func fill(list *corev1.ResourceList, defaults corev1.ResourceList) (set []string) {
	for _, name := range slices.Sorted(maps.Keys(defaults)) {
		if _, said := (*list)[name]; said {
			continue
		}
		if *list == nil {
			*list = corev1.ResourceList{}
		}
		(*list)[name] = defaults[name].DeepCopy()
		set = append(set, string(name))
	}
	return set
}

// Validate implements admission.ValidationInterface.
func (l limitAdmission) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	var check func(*corev1.LimitRangeItem) []error
	switch obj := a.GetObject().(type) {
	case *corev1.Pod:
		if (a.GetSubresource() != "" || a.GetOperation() != admission.Create) && a.GetSubresource() != "resize" {
			return nil
		}
		check = func(i *corev1.LimitRangeItem) []error { return checkPod(i, obj) }
	case *corev1.PersistentVolumeClaim:
		if a.GetSubresource() != "" {
			return nil
		}
		check = func(i *corev1.LimitRangeItem) []error { return checkClaim(i, obj) }
	default:
		return nil
	}
	items, err := l.items(ctx, a)
	if err != nil {
		return err
	}
	var errs []error
	for i := range items {
		errs = append(errs, check(&items[i])...)
	}
	if len(errs) == 0 {
		return nil
	}
	return admission.NewForbidden(a, utilerrors.NewAggregate(errs))
}

func checkPod(limit *corev1.LimitRangeItem, pod *corev1.Pod) []error {
	switch limit.Type {
	case corev1.LimitTypeContainer:
		var errs []error
		for _, containers := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
			for i := range containers {
				errs = append(errs, checkDemand(limit, containers[i].Resources.Requests, containers[i].Resources.Limits)...)
			}
		}
		return errs
	case corev1.LimitTypePod:
		options := resourcehelper.PodResourcesOptions{}
		return checkDemand(limit, resourcehelper.PodRequests(pod, options), resourcehelper.PodLimits(pod, options))
	}
	return nil
}

// checkClaim knows requests only: the limits of a claim mean nothing.
func checkClaim(limit *corev1.LimitRangeItem, claim *corev1.PersistentVolumeClaim) []error {
	if limit.Type != corev1.LimitTypePersistentVolumeClaim {
		return nil
	}
	requests := claim.Spec.Resources.Requests
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(limit.Min)) {
		errs = append(errs, atLeast(limit, name, requests, nil))
	}
	for _, name := range slices.Sorted(maps.Keys(limit.Max)) {
		most := limit.Max[name]
		if asked, said := requests[name]; !said {
			errs = append(errs, fmt.Errorf("maximum %s usage per %s is %s.  No request is specified", name, limit.Type, most.String()))
		} else if asked.Cmp(most) > 0 {
			errs = append(errs, fmt.Errorf("maximum %s usage per %s is %s, but request is %s", name, limit.Type, most.String(), asked.String()))
		}
	}
	return slices.DeleteFunc(errs, func(err error) bool { return err == nil })
}

// checkDemand compares with all bounds of one limit.
func checkDemand(limit *corev1.LimitRangeItem, requests, limits corev1.ResourceList) []error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(limit.Min)) {
		errs = append(errs, atLeast(limit, name, requests, limits))
	}
	for _, name := range slices.Sorted(maps.Keys(limit.Max)) {
		errs = append(errs, atMost(limit, name, requests, limits))
	}
	for _, name := range slices.Sorted(maps.Keys(limit.MaxLimitRequestRatio)) {
		errs = append(errs, withinRatio(limit, name, requests, limits))
	}
	return slices.DeleteFunc(errs, func(err error) bool { return err == nil })
}

func atLeast(limit *corev1.LimitRangeItem, name corev1.ResourceName, requests, limits corev1.ResourceList) error {
	least := limit.Min[name]
	bound := fmt.Sprintf("minimum %s usage per %s is %s", name, limit.Type, least.String())
	asked, said := requests[name]
	if !said {
		return errors.New(bound + ".  No request is specified")
	}
	if asked.Cmp(least) < 0 {
		return fmt.Errorf("%s, but request is %s", bound, asked.String())
	}
	if top, said := limits[name]; said && top.Cmp(least) < 0 {
		return fmt.Errorf("%s, but limit is %s", bound, top.String())
	}
	return nil
}

func atMost(limit *corev1.LimitRangeItem, name corev1.ResourceName, requests, limits corev1.ResourceList) error {
	most := limit.Max[name]
	bound := fmt.Sprintf("maximum %s usage per %s is %s", name, limit.Type, most.String())
	top, said := limits[name]
	if !said {
		return errors.New(bound + ".  No limit is specified")
	}
	if top.Cmp(most) > 0 {
		return fmt.Errorf("%s, but limit is %s", bound, top.String())
	}
	if asked, said := requests[name]; said && asked.Cmp(most) > 0 {
		return fmt.Errorf("%s, but request is %s", bound, asked.String())
	}
	return nil
}

func withinRatio(limit *corev1.LimitRangeItem, name corev1.ResourceName, requests, limits corev1.ResourceList) error {
	most := limit.MaxLimitRequestRatio[name]
	bound := fmt.Sprintf("%s max limit to request ratio per %s is %s", name, limit.Type, most.String())
	asked, top := requests[name], limits[name]
	switch {
	case asked.IsZero():
		return errors.New(bound + ", but no request is specified or request is 0")
	case top.IsZero():
		return errors.New(bound + ", but no limit is specified or limit is 0")
	}
	if ratio := value(top) / value(asked); ratio > value(most) {
		return fmt.Errorf("%s, but provided ratio is %f", bound, ratio)
	}
	return nil
}

func value(q resource.Quantity) float64 { return q.AsApproximateFloat64() }
