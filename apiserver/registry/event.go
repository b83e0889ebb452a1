// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// eventTTL is how long an event lives, as by upstream's default.
const eventTTL = time.Hour

// eventKind serves events in two shapes, v1 and events.k8s.io/v1, over one
// storage of the first.
func eventKind() Kind {
	return Kind{
		Resource: "events", Singular: "event", Kind: "Event",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		WatchCache: true,
		ShortNames: []string{"ev"},
		New:        newObject[corev1.Event], NewList: newObject[corev1.EventList],
		TTL:                 eventTTL,
		AllowCreateOnUpdate: true,
		Validate:            validates(validateEvent),
		Columns: []metav1.TableColumnDefinition{
			column("Last Seen", "string", "Time since it happened last."),
			column("Type", "string", "Normal or Warning."),
			column("Reason", "string", "Why, in one word."),
			column("Object", "string", "What it happened to."),
			wideColumn("Subobject", "The part of the object."),
			wideColumn("Source", "Who saw it."),
			column("Message", "string", "What happened."),
			wideColumn("First Seen", "Time since it happened first."),
			wideColumn("Count", "How often it happened."),
			wideColumn("Name", "The event's own name."),
		},
		Row: row(eventRow),
		FieldLabels: []string{
			"involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
			"involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath",
			"reason", "reportingComponent", "source", "type",
		},
		Fields: fieldsOf(eventFields),
		Views: []View{{
			GroupVersion: eventsv1.SchemeGroupVersion,
			New:          newObject[eventsv1.Event], NewList: newObject[eventsv1.EventList],
			AddToScheme: addEventConversions,
			FieldLabels: []string{"reason", "type"},
			FieldAliases: map[string]string{
				"regarding.kind": "involvedObject.kind", "regarding.namespace": "involvedObject.namespace",
				"regarding.name": "involvedObject.name", "regarding.uid": "involvedObject.uid",
				"regarding.apiVersion": "involvedObject.apiVersion", "regarding.resourceVersion": "involvedObject.resourceVersion",
				"regarding.fieldPath": "involvedObject.fieldPath", "reportingController": "reportingComponent",
			},
		}},
	}
}

func eventFields(e *corev1.Event) fields.Set {
	source := e.Source.Component
	if source == "" {
		source = e.ReportingController
	}
	return fields.Set{
		"involvedObject.kind":            e.InvolvedObject.Kind,
		"involvedObject.namespace":       e.InvolvedObject.Namespace,
		"involvedObject.name":            e.InvolvedObject.Name,
		"involvedObject.uid":             string(e.InvolvedObject.UID),
		"involvedObject.apiVersion":      e.InvolvedObject.APIVersion,
		"involvedObject.resourceVersion": e.InvolvedObject.ResourceVersion,
		"involvedObject.fieldPath":       e.InvolvedObject.FieldPath,
		"reason":                         e.Reason,
		"reportingComponent":             e.ReportingController,
		"source":                         source,
		"type":                           e.Type,
	}
}

// validateEvent checks what every client may be asked for: events of the old
// shape have always been accepted with little in them.
func validateEvent(e *corev1.Event) field.ErrorList {
	var errs field.ErrorList
	p := field.NewPath("involvedObject", "namespace")
	switch ns := e.InvolvedObject.Namespace; {
	case ns == "" && e.Namespace != metav1.NamespaceDefault && e.Namespace != metav1.NamespaceSystem:
		errs = append(errs, field.Invalid(p, ns, "does not match event.namespace"))
	case ns != "" && ns != e.Namespace:
		errs = append(errs, field.Invalid(p, ns, "does not match event.namespace"))
	}
	if e.EventTime.IsZero() {
		return errs
	}
	// The rest is asked only of events of the new shape.
	if e.ReportingController == "" {
		errs = append(errs, field.Required(field.NewPath("reportingController"), ""))
	}
	if e.ReportingInstance == "" {
		errs = append(errs, field.Required(field.NewPath("reportingInstance"), ""))
	}
	if e.Action == "" {
		errs = append(errs, field.Required(field.NewPath("action"), ""))
	}
	if e.Reason == "" {
		errs = append(errs, field.Required(field.NewPath("reason"), ""))
	}
	if len(e.Message) > 1024 {
		errs = append(errs, field.Invalid(field.NewPath("message"), "", "can have at most 1024 characters"))
	}
	return append(errs, oneOf(e.Type, field.NewPath("type"), corev1.EventTypeNormal, corev1.EventTypeWarning)...)
}

func eventRow(e *corev1.Event) []any {
	first := age(e.FirstTimestamp)
	if e.FirstTimestamp.IsZero() {
		first = age(metav1.Time(e.EventTime))
	}
	last := first
	if !e.LastTimestamp.IsZero() {
		last = age(e.LastTimestamp)
	}
	count := int64(e.Count)
	if e.Series != nil {
		last, count = age(metav1.Time(e.Series.LastObservedTime)), int64(e.Series.Count)
	} else if count == 0 {
		count = 1
	}
	object := strings.ToLower(e.InvolvedObject.Kind)
	if e.InvolvedObject.Name != "" {
		object += "/" + e.InvolvedObject.Name
	}
	component, instance := e.Source.Component, e.Source.Host
	if component == "" {
		component, instance = e.ReportingController, e.ReportingInstance
	}
	source := component
	if instance != "" {
		source += ", " + instance
	}
	return []any{
		last, e.Type, e.Reason, object, e.InvolvedObject.FieldPath, source,
		strings.TrimSpace(e.Message), first, count, e.Name,
	}
}

// addEventConversions registers how the two shapes of an event become each
// other. Nothing is lost in either direction.
func addEventConversions(s *runtime.Scheme) error {
	for _, c := range []struct {
		from, to any
		convert  conversion.ConversionFunc
	}{
		{(*eventsv1.Event)(nil), (*corev1.Event)(nil), func(a, b any, _ conversion.Scope) error {
			eventToCore(a.(*eventsv1.Event), b.(*corev1.Event))
			return nil
		}},
		{(*corev1.Event)(nil), (*eventsv1.Event)(nil), func(a, b any, _ conversion.Scope) error {
			eventFromCore(a.(*corev1.Event), b.(*eventsv1.Event))
			return nil
		}},
		{(*eventsv1.EventList)(nil), (*corev1.EventList)(nil), func(a, b any, _ conversion.Scope) error {
			in, out := a.(*eventsv1.EventList), b.(*corev1.EventList)
			out.ListMeta, out.Items = in.ListMeta, make([]corev1.Event, len(in.Items))
			for i := range in.Items {
				eventToCore(&in.Items[i], &out.Items[i])
			}
			return nil
		}},
		{(*corev1.EventList)(nil), (*eventsv1.EventList)(nil), func(a, b any, _ conversion.Scope) error {
			in, out := a.(*corev1.EventList), b.(*eventsv1.EventList)
			out.ListMeta, out.Items = in.ListMeta, make([]eventsv1.Event, len(in.Items))
			for i := range in.Items {
				eventFromCore(&in.Items[i], &out.Items[i])
			}
			return nil
		}},
	} {
		if err := s.AddConversionFunc(c.from, c.to, c.convert); err != nil {
			return err
		}
	}
	return nil
}

func eventToCore(in *eventsv1.Event, out *corev1.Event) {
	*out = corev1.Event{
		ObjectMeta:          in.ObjectMeta,
		InvolvedObject:      in.Regarding,
		Related:             in.Related,
		Reason:              in.Reason,
		Message:             in.Note,
		Source:              in.DeprecatedSource,
		FirstTimestamp:      in.DeprecatedFirstTimestamp,
		LastTimestamp:       in.DeprecatedLastTimestamp,
		Count:               in.DeprecatedCount,
		Type:                in.Type,
		EventTime:           in.EventTime,
		Action:              in.Action,
		ReportingController: in.ReportingController,
		ReportingInstance:   in.ReportingInstance,
	}
	if in.Series != nil {
		out.Series = &corev1.EventSeries{Count: in.Series.Count, LastObservedTime: in.Series.LastObservedTime}
	}
}

func eventFromCore(in *corev1.Event, out *eventsv1.Event) {
	*out = eventsv1.Event{
		ObjectMeta:               in.ObjectMeta,
		Regarding:                in.InvolvedObject,
		Related:                  in.Related,
		Reason:                   in.Reason,
		Note:                     in.Message,
		DeprecatedSource:         in.Source,
		DeprecatedFirstTimestamp: in.FirstTimestamp,
		DeprecatedLastTimestamp:  in.LastTimestamp,
		DeprecatedCount:          in.Count,
		Type:                     in.Type,
		EventTime:                in.EventTime,
		Action:                   in.Action,
		ReportingController:      in.ReportingController,
		ReportingInstance:        in.ReportingInstance,
	}
	if in.Series != nil {
		out.Series = &eventsv1.EventSeries{Count: in.Series.Count, LastObservedTime: in.Series.LastObservedTime}
	}
}
