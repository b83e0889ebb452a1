// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestAutoscalersInTwoVersions: one object, as v1 and as v2, and nothing is lost.
func TestAutoscalersInTwoVersions(t *testing.T) {
	_, w := startWire(t)
	const v1, v2 = "/apis/autoscaling/v1/namespaces/default/horizontalpodautoscalers", "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"
	group := w.get("/apis/autoscaling").object(t)
	if text(group, "preferredVersion", "version") != "v2" || len(field(group, "versions").([]any)) != 2 {
		t.Errorf("group %v", group)
	}
	m := w.mustPost(v1, `{"metadata":{"name":"a"},"spec":{"scaleTargetRef":{"apiVersion":"apps/v1","kind":"Deployment","name":"web"},"maxReplicas":5,"targetCPUUtilizationPercentage":60}}`)
	if text(m, "apiVersion") != "autoscaling/v1" || text(m, "spec", "targetCPUUtilizationPercentage") != "60" || text(m, "spec", "minReplicas") != "1" {
		t.Errorf("created %v", m)
	}
	m = w.get(v2 + "/a").object(t)
	if text(m, "spec", "metrics", 0, "resource", "target", "averageUtilization") != "60" || text(m, "spec", "maxReplicas") != "5" {
		t.Errorf("as v2: %v", field(m, "spec"))
	}
	// Without a target it is upstream's default, and what is wrong is refused.
	m = w.mustPost(v1, `{"metadata":{"name":"b"},"spec":{"scaleTargetRef":{"kind":"Deployment","name":"web"},"maxReplicas":5}}`)
	if text(m, "spec", "targetCPUUtilizationPercentage") != "80" {
		t.Errorf("default %v", field(m, "spec"))
	}
	w.post(v1, `{"metadata":{"name":"c"},"spec":{"scaleTargetRef":{"kind":"Deployment","name":"web"},"maxReplicas":0}}`).
		status(t, 422, metav1.StatusReasonInvalid, "spec.maxReplicas: Invalid value: 0")

	// What v1 has no field for survives a change by v1.
	w.mustPost(v2, `{"metadata":{"name":"d","annotations":{"mine":"x"}},"spec":{"scaleTargetRef":{"kind":"Deployment","name":"web"},"maxReplicas":5,
		"metrics":[{"type":"Resource","resource":{"name":"memory","target":{"type":"AverageValue","averageValue":"100Mi"}}},
			{"type":"Pods","pods":{"metric":{"name":"hits"},"target":{"type":"AverageValue","averageValue":"7"}}}],
		"behavior":{"scaleDown":{"stabilizationWindowSeconds":11}}}}`)
	before := w.get(v2 + "/d").object(t)
	m = w.get(v1 + "/d").object(t)
	notes := text(m, "metadata", "annotations", "autoscaling.alpha.kubernetes.io/metrics")
	if !strings.Contains(notes, `"metricName":"hits"`) || !strings.Contains(notes, `"targetAverageValue":"100Mi"`) || field(m, "spec", "targetCPUUtilizationPercentage") != nil {
		t.Errorf("as v1: %v", m)
	}
	w.send("PATCH", v1+"/d", `{"spec":{"maxReplicas":6}}`, "Content-Type", "application/merge-patch+json").want(t, 200)
	after := w.get(v2 + "/d").object(t)
	for _, path := range [][]any{
		{"spec", "metrics", 0, "resource", "target", "averageValue"}, {"spec", "metrics", 1, "pods", "metric", "name"},
		{"spec", "behavior", "scaleDown", "stabilizationWindowSeconds"}, {"metadata", "annotations", "mine"},
	} {
		if got, want := text(after, path...), text(before, path...); got != want || got == "" {
			t.Errorf("%v: %q, was %q", path, got, want)
		}
	}
	if text(after, "spec", "maxReplicas") != "6" || field(after, "metadata", "annotations", "autoscaling.alpha.kubernetes.io/metrics") != nil {
		t.Errorf("after the change: %v", after)
	}
	if got := itemNames(w.get(v1).object(t)); got != "a b d" {
		t.Errorf("list %s", got)
	}
	w.send("PATCH", v1+"/a/status", `{"status":{"currentReplicas":3}}`, "Content-Type", "application/merge-patch+json").want(t, 200)
	if m = w.get(v2 + "/a").object(t); text(m, "status", "currentReplicas") != "3" {
		t.Errorf("status %v", field(m, "status"))
	}
}
