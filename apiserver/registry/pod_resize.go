// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// resizeStrategy changes what the containers of a pod ask for and may use while it runs
// (KEP-1287): kubectl patch --subresource=resize.
type resizeStrategy struct{ strategy }

func (s resizeStrategy) AllowCreateOnUpdate(context.Context) bool { return false }

// PrepareForUpdate drops everything but the resources.
func (s resizeStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	pod, ok := obj.(*corev1.Pod)
	was, okOld := old.(*corev1.Pod)
	if !ok || !okOld {
		return
	}
	asked := pod.DeepCopy()
	*pod = *was.DeepCopy()
	pod.ManagedFields, pod.ResourceVersion = asked.ManagedFields, asked.ResourceVersion
	for _, lists := range [][2][]corev1.Container{{pod.Spec.Containers, asked.Spec.Containers}, {pod.Spec.InitContainers, asked.Spec.InitContainers}} {
		for i := range lists[0] {
			for j := range lists[1] {
				if lists[0][i].Name == lists[1][j].Name {
					lists[0][i].Resources = lists[1][j].Resources
				}
			}
		}
	}
	if !equality.Semantic.DeepEqual(pod.Spec, was.Spec) {
		pod.Generation++
	}
}

func (s resizeStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	pod, ok := obj.(*corev1.Pod)
	was, okOld := old.(*corev1.Pod)
	if !ok || !okOld {
		return nil
	}
	errs := validatePod(pod)
	spec := field.NewPath("spec")
	if _, mirror := was.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		errs = append(errs, field.Forbidden(field.NewPath(""), "static pods cannot be resized"))
	}
	if podQOS(pod) != podQOS(was) {
		errs = append(errs, field.Invalid(spec, was.Status.QOSClass, "Pod QOS Class may not change as a result of resizing"))
	}
	for i := range pod.Spec.Containers {
		errs = append(errs, validateResize(&pod.Spec.Containers[i], &was.Spec.Containers[i], spec.Child("containers").Index(i).Child("resources"))...)
	}
	for i := range pod.Spec.InitContainers {
		now, before := &pod.Spec.InitContainers[i], &was.Spec.InitContainers[i]
		path := spec.Child("initContainers").Index(i).Child("resources")
		if now.RestartPolicy == nil && !equality.Semantic.DeepEqual(now.Resources, before.Resources) {
			errs = append(errs, field.Forbidden(path, "resources for non-sidecar init containers are immutable"))
			continue
		}
		errs = append(errs, validateResize(now, before, path)...)
	}
	return errs
}

// validateResize refuses what a running container cannot follow.
func validateResize(now, was *corev1.Container, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	others := func(r corev1.ResourceRequirements) corev1.ResourceRequirements {
		out := *r.DeepCopy()
		for _, list := range []corev1.ResourceList{out.Requests, out.Limits} {
			delete(list, corev1.ResourceCPU)
			delete(list, corev1.ResourceMemory)
		}
		return out
	}
	if before, after := others(was.Resources), others(now.Resources); !sameQuantities(before.Requests, after.Requests) || !sameQuantities(before.Limits, after.Limits) {
		errs = append(errs, field.Forbidden(path, "only cpu and memory resources are mutable"))
	}
	for _, lists := range []struct {
		what        string
		now, before corev1.ResourceList
	}{{"requests", now.Resources.Requests, was.Resources.Requests}, {"limits", now.Resources.Limits, was.Resources.Limits}} {
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
			_, had := lists.before[name]
			if _, has := lists.now[name]; had && !has {
				errs = append(errs, field.Forbidden(path.Child(lists.what), "resource "+lists.what+" cannot be removed"))
				break
			}
		}
	}
	return errs
}

// sameQuantities compares lists of which one may be nil and the other empty.
func sameQuantities(a, b corev1.ResourceList) bool {
	return len(a) == 0 && len(b) == 0 || equality.Semantic.DeepEqual(a, b)
}
