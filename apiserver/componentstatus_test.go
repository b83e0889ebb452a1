// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestComponentStatuses asks the parts each time, and says that nobody should ask.
func TestComponentStatuses(t *testing.T) {
	var broken error
	s := startServer(t, "", func(c *Config) {
		c.Components = map[string]func(context.Context) error{"scheduler": func(context.Context) error { return broken }}
	})
	w := newWire(t, s)
	const path = "/api/v1/componentstatuses"
	a := w.get(path)
	list := a.want(t, 200).object(t)
	if itemNames(list) != "etcd-0 scheduler" || text(list, "items", 1, "conditions", 0, "status") != "True" || text(list, "items", 0, "conditions", 0, "message") != "ok" {
		t.Errorf("list %v", list)
	}
	if got := a.header.Get("Warning"); !strings.Contains(got, "v1 ComponentStatus is deprecated in v1.19+") {
		t.Errorf("warning %q", got)
	}
	broken = errors.New("asleep")
	m := w.get(path+"/scheduler").want(t, 200).object(t)
	if text(m, "conditions", 0, "status") != "False" || text(m, "conditions", 0, "error") != "asleep" {
		t.Errorf("broken: %v", m)
	}
	w.get(path+"/nobody").status(t, 404, metav1.StatusReasonNotFound, `componentstatuses "nobody" not found`)
	table := w.get(path, "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").object(t)
	if text(table, "rows", 1, "cells") != "[scheduler Unhealthy  asleep]" {
		t.Errorf("cells %v", field(table, "rows", 1, "cells"))
	}
	w.post(path, `{"metadata":{"name":"x"}}`).status(t, 405, metav1.StatusReasonMethodNotAllowed)
}
