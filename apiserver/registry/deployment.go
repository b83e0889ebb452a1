// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"
)

func deploymentKind() Kind {
	return Kind{
		Resource: "deployments", Singular: "deployment", Kind: "Deployment",
		GroupVersion: appsv1.SchemeGroupVersion, Namespaced: true,
		WatchCache: true,
		ShortNames: []string{"deploy"}, Categories: []string{"all"},
		New:              newObject[appsv1.Deployment],
		NewList:          newObject[appsv1.DeploymentList],
		Default:          forObject(defaultDeployment),
		TracksGeneration: true,
		PrepareForUpdate: onUpdate(countAnnotationChange),
		Validate:         validates(validateDeployment),
		ValidateUpdate: validatesUpdate(func(d, old *appsv1.Deployment) field.ErrorList {
			return selectorImmutable(d.Spec.Selector, old.Spec.Selector)
		}),
		Warnings: warnsOfTemplate(func(d *appsv1.Deployment) *corev1.PodTemplateSpec { return &d.Spec.Template }),
		Status:   &StatusStrategy{Validate: validatesUpdate(validateDeploymentStatus)},
		Columns: append([]metav1.TableColumnDefinition{
			nameColumn,
			column("Ready", "string", "How many of the wanted pods are ready."),
			column("Up-to-date", "string", "How many pods are made from the present template."),
			column("Available", "string", "How many pods have been ready for minReadySeconds."),
			ageColumn,
		}, templateColumns()...),
		Row: row(func(d *appsv1.Deployment) []any {
			cells := []any{
				d.Name, fmt.Sprintf("%d/%d", d.Status.ReadyReplicas, ptr.Deref(d.Spec.Replicas, 1)),
				int64(d.Status.UpdatedReplicas), int64(d.Status.AvailableReplicas), age(d.CreationTimestamp),
			}
			return append(cells, templateCells(&d.Spec.Template, d.Spec.Selector)...)
		}),
		SubresourceTypes: scaleTypes(),
		Subresources: func(store *Store, _ Deps) map[string]rest.Storage {
			return map[string]rest.Storage{"scale": newScaleREST(store, appsv1.SchemeGroupVersion, func(d *appsv1.Deployment) scaled {
				return scaled{&d.Spec.Replicas, d.Status.Replicas, d.Spec.Selector}
			})}
		},
	}
}

func defaultDeployment(d *appsv1.Deployment) {
	const quarter, history, deadline = "25%", 10, 600
	setDefault(&d.Spec.Replicas, 1)
	setIfZero(&d.Spec.Strategy.Type, appsv1.RollingUpdateDeploymentStrategyType)
	if d.Spec.Strategy.Type == appsv1.RollingUpdateDeploymentStrategyType {
		setDefault(&d.Spec.Strategy.RollingUpdate, appsv1.RollingUpdateDeployment{})
		setDefault(&d.Spec.Strategy.RollingUpdate.MaxUnavailable, intstr.FromString(quarter))
		setDefault(&d.Spec.Strategy.RollingUpdate.MaxSurge, intstr.FromString(quarter))
	}
	setDefault(&d.Spec.RevisionHistoryLimit, history)
	setDefault(&d.Spec.ProgressDeadlineSeconds, deadline)
	defaultPodSpec(&d.Spec.Template.Spec)
}

// countAnnotationChange makes the generation count changes of the annotations
// too, because the Deployment's controller copies them to its ReplicaSets.
func countAnnotationChange(_ context.Context, d, old *appsv1.Deployment) {
	if !equality.Semantic.DeepEqual(d.Annotations, old.Annotations) && equality.Semantic.DeepEqual(d.Spec, old.Spec) {
		d.Generation = old.Generation + 1
	}
}

func validateDeployment(d *appsv1.Deployment) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateReplicated("deployment", d.Spec.Replicas, d.Spec.MinReadySeconds, d.Spec.Selector, &d.Spec.Template)
	errs = append(errs, validateDeploymentStrategy(&d.Spec.Strategy, spec.Child("strategy"))...)
	if n := d.Spec.RevisionHistoryLimit; n != nil {
		errs = append(errs, notNegative(spec.Child("revisionHistoryLimit"), *n)...)
	}
	if n := d.Spec.ProgressDeadlineSeconds; n != nil {
		path := spec.Child("progressDeadlineSeconds")
		errs = append(errs, notNegative(path, *n)...)
		if *n <= d.Spec.MinReadySeconds {
			errs = append(errs, field.Invalid(path, *n, "must be greater than minReadySeconds"))
		}
	}
	return errs
}

func validateDeploymentStrategy(s *appsv1.DeploymentStrategy, path *field.Path) field.ErrorList {
	rolling := path.Child("rollingUpdate")
	switch s.Type {
	case appsv1.RecreateDeploymentStrategyType:
		if s.RollingUpdate != nil {
			return field.ErrorList{field.Forbidden(rolling, "may not be specified when strategy `type` is '"+string(s.Type)+"'")}
		}
		return nil
	case appsv1.RollingUpdateDeploymentStrategyType:
		return validateRollingUpdate(s.RollingUpdate, rolling)
	}
	return oneOf(s.Type, path.Child("type"), appsv1.RecreateDeploymentStrategyType, appsv1.RollingUpdateDeploymentStrategyType)
}

func validateRollingUpdate(r *appsv1.RollingUpdateDeployment, path *field.Path) field.ErrorList {
	if r == nil || r.MaxUnavailable == nil || r.MaxSurge == nil {
		return field.ErrorList{field.Required(path, "this should be defaulted and never be nil")}
	}
	unavailable := path.Child("maxUnavailable")
	errs := validateIntOrPercent(*r.MaxUnavailable, unavailable)
	errs = append(errs, validateIntOrPercent(*r.MaxSurge, path.Child("maxSurge"))...)
	if len(errs) > 0 {
		return errs
	}
	if isZero(*r.MaxUnavailable) && isZero(*r.MaxSurge) {
		errs = append(errs, field.Invalid(unavailable, r.MaxUnavailable, "may not be 0 when `maxSurge` is 0"))
	}
	return append(errs, atMost100Percent(*r.MaxUnavailable, unavailable)...)
}

// isZero tells whether v is 0 or 0%.
func isZero(v intstr.IntOrString) bool {
	n, err := intstr.GetScaledValueFromIntOrPercent(&v, 100, true)
	return err == nil && n == 0
}

func validateDeploymentStatus(d, old *appsv1.Deployment) field.ErrorList {
	s, path := &d.Status, field.NewPath("status")
	errs := apivalidation.ValidateNonnegativeField(s.ObservedGeneration, path.Child("observedGeneration"))
	errs = append(errs, validateCounters(counter{"replicas", s.Replicas},
		counter{"updatedReplicas", s.UpdatedReplicas}, counter{"readyReplicas", s.ReadyReplicas}, counter{"availableReplicas", s.AvailableReplicas})...)
	errs = append(errs, availableWithinReady(s.AvailableReplicas, s.ReadyReplicas)...)
	errs = append(errs, notNegative(path.Child("unavailableReplicas"), s.UnavailableReplicas)...)
	errs = append(errs, notNegative(path.Child("terminatingReplicas"), ptr.Deref(s.TerminatingReplicas, 0))...)
	return append(errs, validateCollisions(s.CollisionCount, old.Status.CollisionCount)...)
}
