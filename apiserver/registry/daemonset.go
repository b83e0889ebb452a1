// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func daemonSetKind() Kind {
	return Kind{
		Resource: "daemonsets", Singular: "daemonset", Kind: "DaemonSet",
		GroupVersion: appsv1.SchemeGroupVersion, Namespaced: true,
		ShortNames: []string{"ds"}, Categories: []string{"all"},
		New:              newObject[appsv1.DaemonSet],
		NewList:          newObject[appsv1.DaemonSetList],
		Default:          forObject(defaultDaemonSet),
		TracksGeneration: true,
		PrepareForCreate: onCreate(func(_ context.Context, d *appsv1.DaemonSet) { setTemplateGeneration(d, 1) }),
		PrepareForUpdate: onUpdate(countTemplateChange),
		Validate:         validates(validateDaemonSet),
		ValidateUpdate: validatesUpdate(func(d, old *appsv1.DaemonSet) field.ErrorList {
			return selectorImmutable(d.Spec.Selector, old.Spec.Selector)
		}),
		Warnings: warnsOfTemplate(func(d *appsv1.DaemonSet) *corev1.PodTemplateSpec { return &d.Spec.Template }),
		Status:   &StatusStrategy{Validate: validatesUpdate(validateDaemonSetStatus)},
		Columns: append([]metav1.TableColumnDefinition{
			nameColumn,
			column("Desired", "integer", "How many nodes should run a pod."),
			column("Current", "integer", "How many of them have one."),
			column("Ready", "integer", "How many have one that is ready."),
			column("Up-to-date", "integer", "How many have one of the present template."),
			column("Available", "integer", "How many have one that has been ready for minReadySeconds."),
			column("Node Selector", "string", "Which nodes by the pod template's node selector."),
			ageColumn,
		}, templateColumns()...),
		Row: row(func(d *appsv1.DaemonSet) []any {
			s := &d.Status
			cells := []any{
				d.Name, int64(s.DesiredNumberScheduled), int64(s.CurrentNumberScheduled), int64(s.NumberReady),
				int64(s.UpdatedNumberScheduled), int64(s.NumberAvailable),
				metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: d.Spec.Template.Spec.NodeSelector}), age(d.CreationTimestamp),
			}
			return append(cells, templateCells(&d.Spec.Template, d.Spec.Selector)...)
		}),
	}
}

func defaultDaemonSet(d *appsv1.DaemonSet) {
	setIfZero(&d.Spec.UpdateStrategy.Type, appsv1.RollingUpdateDaemonSetStrategyType)
	if d.Spec.UpdateStrategy.Type == appsv1.RollingUpdateDaemonSetStrategyType {
		setDefault(&d.Spec.UpdateStrategy.RollingUpdate, appsv1.RollingUpdateDaemonSet{})
		setDefault(&d.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable, intstr.FromInt32(1))
		setDefault(&d.Spec.UpdateStrategy.RollingUpdate.MaxSurge, intstr.FromInt32(0))
	}
	setDefault(&d.Spec.RevisionHistoryLimit, 10)
	defaultPodSpec(&d.Spec.Template.Spec)
}

// countTemplateChange counts the changes of the template in an annotation, where the
// field of old was that counted them.
func countTemplateChange(_ context.Context, d, old *appsv1.DaemonSet) {
	n, err := strconv.ParseInt(old.Annotations[appsv1.DeprecatedTemplateGeneration], 10, 64)
	if err != nil {
		n = 1
	}
	if !equality.Semantic.DeepEqual(d.Spec.Template, old.Spec.Template) {
		n++
	}
	setTemplateGeneration(d, n)
}

func setTemplateGeneration(d *appsv1.DaemonSet, n int64) {
	if d.Annotations == nil {
		d.Annotations = map[string]string{}
	}
	d.Annotations[appsv1.DeprecatedTemplateGeneration] = strconv.FormatInt(n, 10)
}

func validateDaemonSet(d *appsv1.DaemonSet) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateReplicated("daemonset", nil, d.Spec.MinReadySeconds, d.Spec.Selector, &d.Spec.Template)
	errs = append(errs, noDeadline(&d.Spec.Template, "DaemonSet", spec)...)
	errs = append(errs, validateDaemonSetStrategy(&d.Spec.UpdateStrategy, spec.Child("updateStrategy"))...)
	if n := d.Spec.RevisionHistoryLimit; n != nil {
		errs = append(errs, notNegative(spec.Child("revisionHistoryLimit"), *n)...)
	}
	return errs
}

func validateDaemonSetStrategy(s *appsv1.DaemonSetUpdateStrategy, path *field.Path) field.ErrorList {
	if s.Type != appsv1.RollingUpdateDaemonSetStrategyType {
		return oneOf(s.Type, path.Child("type"), appsv1.RollingUpdateDaemonSetStrategyType, appsv1.OnDeleteDaemonSetStrategyType)
	}
	rolling := path.Child("rollingUpdate")
	r := s.RollingUpdate
	if r == nil || r.MaxUnavailable == nil || r.MaxSurge == nil {
		return field.ErrorList{field.Required(rolling, "")}
	}
	unavailable, surge := rolling.Child("maxUnavailable"), rolling.Child("maxSurge")
	errs := validateIntOrPercent(*r.MaxUnavailable, unavailable)
	errs = append(errs, validateIntOrPercent(*r.MaxSurge, surge)...)
	if len(errs) > 0 {
		return errs
	}
	errs = append(errs, atMost100Percent(*r.MaxUnavailable, unavailable)...)
	errs = append(errs, atMost100Percent(*r.MaxSurge, surge)...)
	switch more, fewer := !isZero(*r.MaxSurge), !isZero(*r.MaxUnavailable); {
	case more && fewer:
		errs = append(errs, field.Invalid(surge, r.MaxSurge, "may not be set when maxUnavailable is non-zero"))
	case !more && !fewer:
		errs = append(errs, field.Required(unavailable, "cannot be 0 when maxSurge is 0"))
	}
	return errs
}

func validateDaemonSetStatus(d, old *appsv1.DaemonSet) field.ErrorList {
	s, path := &d.Status, field.NewPath("status")
	var errs field.ErrorList
	for _, c := range []counter{
		{"currentNumberScheduled", s.CurrentNumberScheduled},
		{"numberMisscheduled", s.NumberMisscheduled},
		{"desiredNumberScheduled", s.DesiredNumberScheduled},
		{"numberReady", s.NumberReady},
		{"updatedNumberScheduled", s.UpdatedNumberScheduled},
		{"numberAvailable", s.NumberAvailable},
		{"numberUnavailable", s.NumberUnavailable},
	} {
		errs = append(errs, notNegative(path.Child(c.name), c.value)...)
	}
	errs = append(errs, apivalidation.ValidateNonnegativeField(s.ObservedGeneration, path.Child("observedGeneration"))...)
	return append(errs, validateCollisions(s.CollisionCount, old.Status.CollisionCount)...)
}
