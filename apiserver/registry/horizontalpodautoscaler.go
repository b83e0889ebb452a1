// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"strings"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

func horizontalPodAutoscalerKind() Kind {
	return Kind{
		Resource: "horizontalpodautoscalers", Singular: "horizontalpodautoscaler", Kind: "HorizontalPodAutoscaler",
		GroupVersion: autoscalingv2.SchemeGroupVersion, Namespaced: true,
		ShortNames: []string{"hpa"}, Categories: []string{"all"},
		New:              newObject[autoscalingv2.HorizontalPodAutoscaler],
		NewList:          newObject[autoscalingv2.HorizontalPodAutoscalerList],
		Default:          forObject(defaultAutoscaler),
		TracksGeneration: true,
		Views:            []View{autoscalerV1()},
		Validate:         validates(validateAutoscaler),
		Warnings: warns(func(_, old *autoscalingv2.HorizontalPodAutoscaler) []string {
			if old != nil {
				return nil
			}
			return []string{"kplab stores horizontal pod autoscalers and scales nothing by them"}
		}),
		Status: &StatusStrategy{Validate: validatesUpdate(func(h, _ *autoscalingv2.HorizontalPodAutoscaler) field.ErrorList {
			status := field.NewPath("status")
			errs := notNegative(status.Child("currentReplicas"), h.Status.CurrentReplicas)
			return append(errs, notNegative(status.Child("desiredReplicas"), h.Status.DesiredReplicas)...)
		})},
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Reference", "string", "What is scaled."),
			column("Targets", "string", "The metrics now, and what they should be."),
			column("MinPods", "string", "The fewest replicas."),
			column("MaxPods", "string", "The most replicas."),
			column("Replicas", "string", "How many there are."),
			ageColumn,
		},
		Row: row(func(h *autoscalingv2.HorizontalPodAutoscaler) []any {
			least := "<unset>"
			if n := h.Spec.MinReplicas; n != nil {
				least = fmt.Sprint(*n)
			}
			return []any{
				h.Name, h.Spec.ScaleTargetRef.Kind + "/" + h.Spec.ScaleTargetRef.Name, metricsText(h),
				least, int64(h.Spec.MaxReplicas), int64(h.Status.CurrentReplicas), age(h.CreationTimestamp),
			}
		}),
	}
}

func defaultAutoscaler(h *autoscalingv2.HorizontalPodAutoscaler) {
	const busy = 80 // percent of a pod's request
	setDefault(&h.Spec.MinReplicas, 1)
	if len(h.Spec.Metrics) == 0 {
		h.Spec.Metrics = []autoscalingv2.MetricSpec{{
			Type: autoscalingv2.ResourceMetricSourceType,
			Resource: &autoscalingv2.ResourceMetricSource{Name: corev1.ResourceCPU, Target: autoscalingv2.MetricTarget{
				Type: autoscalingv2.UtilizationMetricType, AverageUtilization: ptr.To[int32](busy),
			}},
		}}
	}
	if b := h.Spec.Behavior; b != nil {
		double := autoscalingv2.HPAScalingPolicy{Type: autoscalingv2.PercentScalingPolicy, Value: 100, PeriodSeconds: 15}
		b.ScaleUp = scalingRules(b.ScaleUp, ptr.To[int32](0), double, autoscalingv2.HPAScalingPolicy{Type: autoscalingv2.PodsScalingPolicy, Value: 4, PeriodSeconds: 15})
		b.ScaleDown = scalingRules(b.ScaleDown, nil, double)
	}
}

// scalingRules fills in what r does not say.
func scalingRules(r *autoscalingv2.HPAScalingRules, window *int32, policies ...autoscalingv2.HPAScalingPolicy) *autoscalingv2.HPAScalingRules {
	if r == nil {
		r = &autoscalingv2.HPAScalingRules{}
	}
	setDefault(&r.SelectPolicy, autoscalingv2.MaxChangePolicySelect)
	if r.StabilizationWindowSeconds == nil {
		r.StabilizationWindowSeconds = window
	}
	if r.Policies == nil {
		r.Policies = policies
	}
	return r
}

// metricsText shows the first two metrics as kubectl does: what is, and what
// should be.
func metricsText(h *autoscalingv2.HorizontalPodAutoscaler) string {
	var out []string
	for i, m := range h.Spec.Metrics {
		if i == 2 {
			out[1] += fmt.Sprintf(" + %d more...", len(h.Spec.Metrics)-2)
			break
		}
		var now *autoscalingv2.MetricValueStatus
		if i < len(h.Status.CurrentMetrics) {
			now = currentMetric(&h.Status.CurrentMetrics[i])
		}
		out = append(out, metricText(&m, now))
	}
	if len(out) == 0 {
		return "<none>"
	}
	return strings.Join(out, ", ")
}

// metricText is "NAME: NOW/TARGET" for a resource, "NOW/TARGET" for all others.
func metricText(m *autoscalingv2.MetricSpec, now *autoscalingv2.MetricValueStatus) string {
	name := ""
	var target autoscalingv2.MetricTarget
	switch {
	case m.Resource != nil:
		name, target = string(m.Resource.Name)+": ", m.Resource.Target
	case m.ContainerResource != nil:
		name, target = string(m.ContainerResource.Name)+": ", m.ContainerResource.Target
	case m.Pods != nil:
		target = m.Pods.Target
	case m.Object != nil:
		target = m.Object.Target
	case m.External != nil:
		target = m.External.Target
	}
	have, want := "<unknown>", "<auto>"
	switch {
	case target.AverageUtilization != nil:
		want = fmt.Sprintf("%d%%", *target.AverageUtilization)
		if now != nil && now.AverageUtilization != nil {
			have = fmt.Sprintf("%d%%", *now.AverageUtilization)
		}
	case target.AverageValue != nil:
		want = target.AverageValue.String()
		if now != nil && now.AverageValue != nil {
			have = now.AverageValue.String()
		}
	case target.Value != nil:
		want = target.Value.String()
		if now != nil && now.Value != nil {
			have = now.Value.String()
		}
	}
	if target.AverageValue != nil && (m.Object != nil || m.External != nil) {
		want += " (avg)"
	}
	return name + have + "/" + want
}

func currentMetric(s *autoscalingv2.MetricStatus) *autoscalingv2.MetricValueStatus {
	switch {
	case s.Resource != nil:
		return &s.Resource.Current
	case s.ContainerResource != nil:
		return &s.ContainerResource.Current
	case s.Pods != nil:
		return &s.Pods.Current
	case s.Object != nil:
		return &s.Object.Current
	case s.External != nil:
		return &s.External.Current
	}
	return nil
}

func validateAutoscaler(h *autoscalingv2.HorizontalPodAutoscaler) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	least := ptr.Deref(h.Spec.MinReplicas, 1)
	if least < 1 {
		errs = append(errs, field.Invalid(spec.Child("minReplicas"), least, "must be greater than or equal to 1"))
	}
	most := spec.Child("maxReplicas")
	if h.Spec.MaxReplicas < 1 {
		errs = append(errs, field.Invalid(most, h.Spec.MaxReplicas, "must be greater than 0"))
	}
	if h.Spec.MaxReplicas < least {
		errs = append(errs, field.Invalid(most, h.Spec.MaxReplicas, "must be greater than or equal to `minReplicas`"))
	}
	target := spec.Child("scaleTargetRef")
	for name, value := range map[string]string{"kind": h.Spec.ScaleTargetRef.Kind, "name": h.Spec.ScaleTargetRef.Name} {
		if value == "" {
			errs = append(errs, field.Required(target.Child(name), ""))
		}
	}
	for i := range h.Spec.Metrics {
		errs = append(errs, validateMetric(&h.Spec.Metrics[i], spec.Child("metrics").Index(i))...)
	}
	if b := h.Spec.Behavior; b != nil {
		errs = append(errs, validateScalingRules(b.ScaleUp, spec.Child("behavior", "scaleUp"))...)
		errs = append(errs, validateScalingRules(b.ScaleDown, spec.Child("behavior", "scaleDown"))...)
	}
	return errs
}

func validateMetric(m *autoscalingv2.MetricSpec, path *field.Path) field.ErrorList {
	if m.Type == "" {
		return field.ErrorList{field.Required(path.Child("type"), "must specify a metric source type")}
	}
	sources := map[autoscalingv2.MetricSourceType]bool{
		autoscalingv2.ObjectMetricSourceType: m.Object != nil, autoscalingv2.PodsMetricSourceType: m.Pods != nil,
		autoscalingv2.ResourceMetricSourceType: m.Resource != nil, autoscalingv2.ContainerResourceMetricSourceType: m.ContainerResource != nil,
		autoscalingv2.ExternalMetricSourceType: m.External != nil,
	}
	present, known := sources[m.Type]
	errs := oneOf(m.Type, path.Child("type"), autoscalingv2.ContainerResourceMetricSourceType, autoscalingv2.ExternalMetricSourceType,
		autoscalingv2.ObjectMetricSourceType, autoscalingv2.PodsMetricSourceType, autoscalingv2.ResourceMetricSourceType)
	if known && !present {
		name := strings.ToLower(string(m.Type[:1])) + string(m.Type[1:])
		errs = append(errs, field.Required(path.Child(name), "must populate information for the given metric source"))
	}
	if m.Resource == nil {
		return errs
	}
	if m.Resource.Name == "" {
		errs = append(errs, field.Required(path.Child("resource", "name"), "must specify a resource name"))
	}
	target, t := path.Child("resource", "target"), m.Resource.Target
	switch {
	case t.AverageUtilization == nil && t.AverageValue == nil:
		errs = append(errs, field.Required(target.Child("averageUtilization"), "must set either a target raw value or a target utilization"))
	case t.AverageUtilization != nil && *t.AverageUtilization < 1:
		errs = append(errs, field.Invalid(target.Child("averageUtilization"), *t.AverageUtilization, "must be greater than 0"))
	case t.AverageUtilization != nil && t.AverageValue != nil:
		errs = append(errs, field.Forbidden(target.Child("averageValue"), "may not set both a target raw value and a target utilization"))
	}
	return errs
}

func validateScalingRules(r *autoscalingv2.HPAScalingRules, path *field.Path) field.ErrorList {
	if r == nil {
		return nil
	}
	const hour, halfHour = 3600, 1800
	var errs field.ErrorList
	if w := r.StabilizationWindowSeconds; w != nil {
		errs = append(errs, notNegative(path.Child("stabilizationWindowSeconds"), *w)...)
		if *w > hour {
			errs = append(errs, field.Invalid(path.Child("stabilizationWindowSeconds"), *w, fmt.Sprintf("must be less than or equal to %v", hour)))
		}
	}
	if r.SelectPolicy != nil {
		errs = append(errs, oneOf(*r.SelectPolicy, path.Child("selectPolicy"), autoscalingv2.DisabledPolicySelect, autoscalingv2.MaxChangePolicySelect, autoscalingv2.MinChangePolicySelect)...)
	}
	if len(r.Policies) == 0 {
		errs = append(errs, field.Required(path.Child("policies"), "must specify at least one Policy"))
	}
	for i, p := range r.Policies {
		pp := path.Child("policies").Index(i)
		errs = append(errs, oneOf(p.Type, pp.Child("type"), autoscalingv2.PercentScalingPolicy, autoscalingv2.PodsScalingPolicy)...)
		for name, n := range map[string]int32{"value": p.Value, "periodSeconds": p.PeriodSeconds} {
			if n <= 0 {
				errs = append(errs, field.Invalid(pp.Child(name), n, "must be greater than zero"))
			}
		}
		if p.PeriodSeconds > halfHour {
			errs = append(errs, field.Invalid(pp.Child("periodSeconds"), p.PeriodSeconds, fmt.Sprintf("must be less than or equal to %v", halfHour)))
		}
	}
	if r.Tolerance != nil {
		errs = append(errs, apivalidation.ValidateNonnegativeField(r.Tolerance.MilliValue(), path.Child("tolerance"))...)
	}
	return errs
}
