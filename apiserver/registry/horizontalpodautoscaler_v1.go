// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"encoding/json"
	"fmt"
	"maps"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
)

// What autoscaling/v1 has no field for is in these annotations, as JSON.
const (
	metricsAnnotation        = "autoscaling.alpha.kubernetes.io/metrics"
	currentMetricsAnnotation = "autoscaling.alpha.kubernetes.io/current-metrics"
	conditionsAnnotation     = "autoscaling.alpha.kubernetes.io/conditions"
	behaviorAnnotation       = "autoscaling.alpha.kubernetes.io/behavior"
)

// autoscalerV1 is autoscaling/v1 over the storage of v2: it knows one metric, the
// processor's utilization.
func autoscalerV1() View {
	return View{
		GroupVersion: autoscalingv1.SchemeGroupVersion,
		New:          newObject[autoscalingv1.HorizontalPodAutoscaler], NewList: newObject[autoscalingv1.HorizontalPodAutoscalerList],
		AddToScheme: addAutoscalerConversions,
	}
}

func addAutoscalerConversions(s *runtime.Scheme) error {
	for _, c := range []struct {
		from, to any
		convert  conversion.ConversionFunc
	}{
		{(*autoscalingv1.HorizontalPodAutoscaler)(nil), (*autoscalingv2.HorizontalPodAutoscaler)(nil), func(a, b any, _ conversion.Scope) error {
			return autoscalerFromV1(a.(*autoscalingv1.HorizontalPodAutoscaler), b.(*autoscalingv2.HorizontalPodAutoscaler))
		}},
		{(*autoscalingv2.HorizontalPodAutoscaler)(nil), (*autoscalingv1.HorizontalPodAutoscaler)(nil), func(a, b any, _ conversion.Scope) error {
			return autoscalerToV1(a.(*autoscalingv2.HorizontalPodAutoscaler), b.(*autoscalingv1.HorizontalPodAutoscaler))
		}},
		{(*autoscalingv1.HorizontalPodAutoscalerList)(nil), (*autoscalingv2.HorizontalPodAutoscalerList)(nil), func(a, b any, _ conversion.Scope) error {
			in, out := a.(*autoscalingv1.HorizontalPodAutoscalerList), b.(*autoscalingv2.HorizontalPodAutoscalerList)
			out.ListMeta, out.Items = in.ListMeta, make([]autoscalingv2.HorizontalPodAutoscaler, len(in.Items))
			return convertAll(in.Items, out.Items, autoscalerFromV1)
		}},
		{(*autoscalingv2.HorizontalPodAutoscalerList)(nil), (*autoscalingv1.HorizontalPodAutoscalerList)(nil), func(a, b any, _ conversion.Scope) error {
			in, out := a.(*autoscalingv2.HorizontalPodAutoscalerList), b.(*autoscalingv1.HorizontalPodAutoscalerList)
			out.ListMeta, out.Items = in.ListMeta, make([]autoscalingv1.HorizontalPodAutoscaler, len(in.Items))
			return convertAll(in.Items, out.Items, autoscalerToV1)
		}},
	} {
		if err := s.AddConversionFunc(c.from, c.to, c.convert); err != nil {
			return err
		}
	}
	return nil
}

func convertAll[A, B any](in []A, out []B, convert func(*A, *B) error) error {
	for i := range in {
		if err := convert(&in[i], &out[i]); err != nil {
			return err
		}
	}
	return nil
}

// autoscalerToV1 shows a stored autoscaler as v1.
func autoscalerToV1(in *autoscalingv2.HorizontalPodAutoscaler, out *autoscalingv1.HorizontalPodAutoscaler) error {
	*out = autoscalingv1.HorizontalPodAutoscaler{
		ObjectMeta: in.ObjectMeta,
		Spec: autoscalingv1.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv1.CrossVersionObjectReference(in.Spec.ScaleTargetRef),
			MinReplicas:    in.Spec.MinReplicas, MaxReplicas: in.Spec.MaxReplicas,
		},
		Status: autoscalingv1.HorizontalPodAutoscalerStatus{
			ObservedGeneration: in.Status.ObservedGeneration, LastScaleTime: in.Status.LastScaleTime,
			CurrentReplicas: in.Status.CurrentReplicas, DesiredReplicas: in.Status.DesiredReplicas,
		},
	}
	var more []autoscalingv1.MetricSpec
	for i := range in.Spec.Metrics {
		m := &in.Spec.Metrics[i]
		if busy := processorTarget(m); busy != nil && out.Spec.TargetCPUUtilizationPercentage == nil {
			out.Spec.TargetCPUUtilizationPercentage = busy
			continue
		}
		more = append(more, metricToV1(m))
	}
	for i := range in.Status.CurrentMetrics {
		if m := &in.Status.CurrentMetrics[i]; m.Resource != nil && m.Resource.Name == corev1.ResourceCPU {
			out.Status.CurrentCPUUtilizationPercentage = m.Resource.Current.AverageUtilization
		}
	}
	notes := map[string]any{}
	if len(more) > 0 {
		notes[metricsAnnotation] = more
	}
	if in.Spec.Behavior != nil {
		notes[behaviorAnnotation] = in.Spec.Behavior // the same JSON in both versions
	}
	if len(in.Status.Conditions) > 0 {
		notes[conditionsAnnotation] = in.Status.Conditions // likewise
	}
	if len(in.Status.CurrentMetrics) > 0 {
		current := make([]autoscalingv1.MetricStatus, 0, len(in.Status.CurrentMetrics))
		for i := range in.Status.CurrentMetrics {
			current = append(current, metricStatusToV1(&in.Status.CurrentMetrics[i]))
		}
		notes[currentMetricsAnnotation] = current
	}
	if len(notes) == 0 {
		return nil
	}
	out.Annotations = maps.Clone(in.Annotations)
	if out.Annotations == nil {
		out.Annotations = map[string]string{}
	}
	for name, v := range notes {
		text, err := json.Marshal(v)
		if err != nil {
			return fmt.Errorf("encode the annotation %s: %w", name, err)
		}
		out.Annotations[name] = string(text)
	}
	return nil
}

// processorTarget returns the utilization that v1 has a field for; nil when m is about
// something else.
func processorTarget(m *autoscalingv2.MetricSpec) *int32 {
	if m.Type != autoscalingv2.ResourceMetricSourceType || m.Resource == nil || m.Resource.Name != corev1.ResourceCPU {
		return nil
	}
	return m.Resource.Target.AverageUtilization
}

// autoscalerFromV1 reads v1 as what is stored. Defaults are set here: they depend on
// the metrics of the annotation.
func autoscalerFromV1(in *autoscalingv1.HorizontalPodAutoscaler, out *autoscalingv2.HorizontalPodAutoscaler) error {
	*out = autoscalingv2.HorizontalPodAutoscaler{
		ObjectMeta: in.ObjectMeta,
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference(in.Spec.ScaleTargetRef),
			MinReplicas:    in.Spec.MinReplicas, MaxReplicas: in.Spec.MaxReplicas,
		},
		Status: autoscalingv2.HorizontalPodAutoscalerStatus{
			ObservedGeneration: in.Status.ObservedGeneration, LastScaleTime: in.Status.LastScaleTime,
			CurrentReplicas: in.Status.CurrentReplicas, DesiredReplicas: in.Status.DesiredReplicas,
		},
	}
	if busy := in.Spec.TargetCPUUtilizationPercentage; busy != nil {
		out.Spec.Metrics = []autoscalingv2.MetricSpec{{
			Type: autoscalingv2.ResourceMetricSourceType,
			Resource: &autoscalingv2.ResourceMetricSource{Name: corev1.ResourceCPU, Target: autoscalingv2.MetricTarget{
				Type: autoscalingv2.UtilizationMetricType, AverageUtilization: busy,
			}},
		}}
	}
	var more []autoscalingv1.MetricSpec
	var current []autoscalingv1.MetricStatus
	for name, v := range map[string]any{
		metricsAnnotation: &more, currentMetricsAnnotation: &current,
		conditionsAnnotation: &out.Status.Conditions, behaviorAnnotation: &out.Spec.Behavior,
	} {
		if text, said := in.Annotations[name]; said {
			// What cannot be read is dropped, as upstream does.
			_ = json.Unmarshal([]byte(text), v)
		}
	}
	for i := range more {
		out.Spec.Metrics = append(out.Spec.Metrics, metricFromV1(&more[i]))
	}
	for i := range current {
		out.Status.CurrentMetrics = append(out.Status.CurrentMetrics, metricStatusFromV1(&current[i]))
	}
	if len(current) == 0 && in.Status.CurrentCPUUtilizationPercentage != nil {
		out.Status.CurrentMetrics = []autoscalingv2.MetricStatus{{
			Type: autoscalingv2.ResourceMetricSourceType,
			Resource: &autoscalingv2.ResourceMetricStatus{Name: corev1.ResourceCPU, Current: autoscalingv2.MetricValueStatus{
				AverageUtilization: in.Status.CurrentCPUUtilizationPercentage,
			}},
		}}
	}
	if len(in.Annotations) > 0 {
		out.Annotations = maps.Clone(in.Annotations)
		for _, name := range []string{metricsAnnotation, currentMetricsAnnotation, conditionsAnnotation, behaviorAnnotation} {
			delete(out.Annotations, name)
		}
	}
	defaultAutoscaler(out)
	return nil
}

func metricToV1(in *autoscalingv2.MetricSpec) autoscalingv1.MetricSpec {
	out := autoscalingv1.MetricSpec{Type: autoscalingv1.MetricSourceType(in.Type)}
	if m := in.Resource; m != nil {
		out.Resource = &autoscalingv1.ResourceMetricSource{Name: m.Name, TargetAverageUtilization: m.Target.AverageUtilization, TargetAverageValue: m.Target.AverageValue}
	}
	if m := in.ContainerResource; m != nil {
		out.ContainerResource = &autoscalingv1.ContainerResourceMetricSource{
			Name: m.Name, Container: m.Container, TargetAverageUtilization: m.Target.AverageUtilization, TargetAverageValue: m.Target.AverageValue,
		}
	}
	if m := in.Pods; m != nil {
		out.Pods = &autoscalingv1.PodsMetricSource{MetricName: m.Metric.Name, Selector: m.Metric.Selector, TargetAverageValue: ptr.Deref(m.Target.AverageValue, resource.Quantity{})}
	}
	if m := in.Object; m != nil {
		out.Object = &autoscalingv1.ObjectMetricSource{
			Target: autoscalingv1.CrossVersionObjectReference(m.DescribedObject), MetricName: m.Metric.Name, Selector: m.Metric.Selector,
			TargetValue: ptr.Deref(m.Target.Value, resource.Quantity{}), AverageValue: m.Target.AverageValue,
		}
	}
	if m := in.External; m != nil {
		out.External = &autoscalingv1.ExternalMetricSource{
			MetricName: m.Metric.Name, MetricSelector: m.Metric.Selector, TargetValue: m.Target.Value, TargetAverageValue: m.Target.AverageValue,
		}
	}
	return out
}

// target says what kind of target the values make.
func target(utilization *int32, value, average *resource.Quantity) autoscalingv2.MetricTarget {
	t := autoscalingv2.MetricTarget{Type: autoscalingv2.ValueMetricType, AverageUtilization: utilization, Value: value, AverageValue: average}
	switch {
	case utilization != nil:
		t.Type = autoscalingv2.UtilizationMetricType
	case average != nil:
		t.Type = autoscalingv2.AverageValueMetricType
	}
	return t
}

func metricFromV1(in *autoscalingv1.MetricSpec) autoscalingv2.MetricSpec {
	out := autoscalingv2.MetricSpec{Type: autoscalingv2.MetricSourceType(in.Type)}
	if m := in.Resource; m != nil {
		out.Resource = &autoscalingv2.ResourceMetricSource{Name: m.Name, Target: target(m.TargetAverageUtilization, nil, m.TargetAverageValue)}
	}
	if m := in.ContainerResource; m != nil {
		out.ContainerResource = &autoscalingv2.ContainerResourceMetricSource{
			Name: m.Name, Container: m.Container, Target: target(m.TargetAverageUtilization, nil, m.TargetAverageValue),
		}
	}
	if m := in.Pods; m != nil {
		out.Pods = &autoscalingv2.PodsMetricSource{
			Metric: autoscalingv2.MetricIdentifier{Name: m.MetricName, Selector: m.Selector}, Target: target(nil, nil, &m.TargetAverageValue),
		}
	}
	if m := in.Object; m != nil {
		t := target(nil, nil, m.AverageValue)
		if m.AverageValue == nil {
			t.Value = &m.TargetValue
		}
		out.Object = &autoscalingv2.ObjectMetricSource{
			DescribedObject: autoscalingv2.CrossVersionObjectReference(m.Target),
			Metric:          autoscalingv2.MetricIdentifier{Name: m.MetricName, Selector: m.Selector}, Target: t,
		}
	}
	if m := in.External; m != nil {
		out.External = &autoscalingv2.ExternalMetricSource{
			Metric: autoscalingv2.MetricIdentifier{Name: m.MetricName, Selector: m.MetricSelector}, Target: target(nil, m.TargetValue, m.TargetAverageValue),
		}
	}
	return out
}

func metricStatusToV1(in *autoscalingv2.MetricStatus) autoscalingv1.MetricStatus {
	out := autoscalingv1.MetricStatus{Type: autoscalingv1.MetricSourceType(in.Type)}
	zero := resource.Quantity{}
	if m := in.Resource; m != nil {
		out.Resource = &autoscalingv1.ResourceMetricStatus{
			Name: m.Name, CurrentAverageUtilization: m.Current.AverageUtilization, CurrentAverageValue: ptr.Deref(m.Current.AverageValue, zero),
		}
	}
	if m := in.ContainerResource; m != nil {
		out.ContainerResource = &autoscalingv1.ContainerResourceMetricStatus{
			Name: m.Name, Container: m.Container, CurrentAverageUtilization: m.Current.AverageUtilization, CurrentAverageValue: ptr.Deref(m.Current.AverageValue, zero),
		}
	}
	if m := in.Pods; m != nil {
		out.Pods = &autoscalingv1.PodsMetricStatus{MetricName: m.Metric.Name, Selector: m.Metric.Selector, CurrentAverageValue: ptr.Deref(m.Current.AverageValue, zero)}
	}
	if m := in.Object; m != nil {
		out.Object = &autoscalingv1.ObjectMetricStatus{
			Target: autoscalingv1.CrossVersionObjectReference(m.DescribedObject), MetricName: m.Metric.Name, Selector: m.Metric.Selector,
			CurrentValue: ptr.Deref(m.Current.Value, zero), AverageValue: m.Current.AverageValue,
		}
	}
	if m := in.External; m != nil {
		out.External = &autoscalingv1.ExternalMetricStatus{
			MetricName: m.Metric.Name, MetricSelector: m.Metric.Selector, CurrentValue: ptr.Deref(m.Current.Value, zero), CurrentAverageValue: m.Current.AverageValue,
		}
	}
	return out
}

func metricStatusFromV1(in *autoscalingv1.MetricStatus) autoscalingv2.MetricStatus {
	out := autoscalingv2.MetricStatus{Type: autoscalingv2.MetricSourceType(in.Type)}
	if m := in.Resource; m != nil {
		out.Resource = &autoscalingv2.ResourceMetricStatus{Name: m.Name, Current: autoscalingv2.MetricValueStatus{
			AverageUtilization: m.CurrentAverageUtilization, AverageValue: &m.CurrentAverageValue,
		}}
	}
	if m := in.ContainerResource; m != nil {
		out.ContainerResource = &autoscalingv2.ContainerResourceMetricStatus{Name: m.Name, Container: m.Container, Current: autoscalingv2.MetricValueStatus{
			AverageUtilization: m.CurrentAverageUtilization, AverageValue: &m.CurrentAverageValue,
		}}
	}
	if m := in.Pods; m != nil {
		out.Pods = &autoscalingv2.PodsMetricStatus{
			Metric: autoscalingv2.MetricIdentifier{Name: m.MetricName, Selector: m.Selector}, Current: autoscalingv2.MetricValueStatus{AverageValue: &m.CurrentAverageValue},
		}
	}
	if m := in.Object; m != nil {
		out.Object = &autoscalingv2.ObjectMetricStatus{
			DescribedObject: autoscalingv2.CrossVersionObjectReference(m.Target), Metric: autoscalingv2.MetricIdentifier{Name: m.MetricName, Selector: m.Selector},
			Current: autoscalingv2.MetricValueStatus{Value: &m.CurrentValue, AverageValue: m.AverageValue},
		}
	}
	if m := in.External; m != nil {
		out.External = &autoscalingv2.ExternalMetricStatus{
			Metric:  autoscalingv2.MetricIdentifier{Name: m.MetricName, Selector: m.MetricSelector},
			Current: autoscalingv2.MetricValueStatus{Value: &m.CurrentValue, AverageValue: m.CurrentAverageValue},
		}
	}
	return out
}
