// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const figuresPath = "/apis/metrics.k8s.io/v1beta1"

// TestFigures asks what a pod and its node use, of which the kubelet knows CPU time and
// memory.
func TestFigures(t *testing.T) {
	s := startWithKubelet(t)
	w := newWire(t, s)
	if got := itemNames(w.get(figuresPath+"/namespaces/default/pods").want(t, 200, `"kind":"PodMetricsList"`).object(t)); got != "" {
		t.Errorf("figures of pods that do not run: %s", got)
	}
	for _, name := range []string{"a", "waiting"} {
		w.patch(podsPath+"/"+name, mergePatch, `{"metadata":{"labels":{"n":"`+name+`"}}}`).want(t, 200)
	}
	w.patch(podsPath+"/a/status", mergePatch, `{"status":{"phase":"Running"}}`).want(t, 200)
	began := time.Now()
	m := w.get(figuresPath+"/namespaces/default/pods/a").want(t, 200, `"kind":"PodMetrics"`, `"namespace":"default"`, `"name":"web"`, `"memory":"8Mi"`).object(t)
	half := func(m any, path ...any) error {
		q, err := resource.ParseQuantity(text(m, path...))
		if err == nil && (q.MilliValue() < 490 || q.MilliValue() > 510) {
			err = fmt.Errorf("%s, want half a core", q.String())
		}
		return err
	}
	if err := half(m, "containers", 0, "usage", "cpu"); err != nil {
		t.Error(err)
	}
	window, err := time.ParseDuration(text(m, "window"))
	if err != nil || window < 500*time.Millisecond || window > time.Since(began)+time.Second {
		t.Errorf("window %v %v", window, err)
	}
	for query, want := range map[string]string{"": "a", "?labelSelector=n%3Da": "a", "?labelSelector=n%3Dwaiting": "", "?fieldSelector=metadata.name%3Da": "a", "?fieldSelector=metadata.name%3Db": ""} {
		if got := itemNames(w.get(figuresPath+"/pods"+query).want(t, 200).object(t)); got != want {
			t.Errorf("pods%s: %q, want %q", query, got, want)
		}
	}
	if got := itemNames(w.get(figuresPath + "/namespaces/kube-system/pods").object(t)); got != "" {
		t.Errorf("in another namespace: %s", got)
	}
	w.get(figuresPath+"/namespaces/default/pods/waiting").status(t, 404, metav1.StatusReasonNotFound, `pods.metrics.k8s.io "default/waiting" not found`)
	w.get(figuresPath+"/namespaces/default/pods/absent").status(t, 404, metav1.StatusReasonNotFound, `pods "absent" not found`)

	m = w.get(figuresPath+"/nodes").want(t, 200, `"kind":"NodeMetricsList"`).object(t)
	if err := half(m, "items", 0, "usage", "cpu"); err != nil || itemNames(m) != "node1" {
		t.Errorf("nodes: %v in %v", err, m)
	}
	w.get(figuresPath+"/nodes/node1").want(t, 200, `"memory":"8Mi"`)
	w.get(figuresPath+"/nodes/node9").status(t, 404, metav1.StatusReasonNotFound)
	table := w.get(figuresPath+"/nodes", "Accept", tableType).want(t, 200).object(t)
	if got := text(table, "columnDefinitions", 1, "name") + text(table, "columnDefinitions", 2, "name") + text(table, "columnDefinitions", 3, "name"); got != "cpumemoryWindow" || text(table, "rows", 0, "cells", 2) != "8Mi" {
		t.Errorf("table: %v", table)
	}
	w.get(figuresPath).want(t, 200, `"name":"nodes","singularName":"node","namespaced":false,"kind":"NodeMetrics","verbs":["get","list"]`)
	reader := asJane(t, s).RESTClient()
	list := func() error {
		return reader.Get().AbsPath(figuresPath + "/namespaces/default/pods").Do(t.Context()).Error()
	}
	if err := list(); !apierrors.IsForbidden(err) {
		t.Errorf("without a role: %v", err)
	}
	bindClusterRole(t, s, "view", jane())
	if err := list(); err != nil {
		t.Errorf("with the role view: %v", err)
	}
	if s.NewestRevisions()["pods"] == 0 {
		t.Error("the figures hide the pods themselves")
	}
}
