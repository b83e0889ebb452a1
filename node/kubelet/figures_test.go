// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kplab/kplab/internal/nettest"
)

// get200 asks the kubelet's HTTP interface.
func (h *harness) get200(path string) string {
	h.t.Helper()
	w := httptest.NewRecorder()
	h.kubelet.Handler().ServeHTTP(w, httptest.NewRequestWithContext(h.t.Context(), http.MethodGet, path, nil))
	if w.Code != http.StatusOK {
		h.t.Fatalf("GET %s: %d %s", path, w.Code, w.Body)
	}
	return w.Body.String()
}

// TestFigures: a pod that works has CPU time and memory, one that sleeps has memory, a
// built-in server has neither, and the node is the sum of all, those that have ended
// included.
func TestFigures(t *testing.T) {
	h := newHarness(t)
	if text := h.get200("/metrics/resource"); !strings.Contains(text, "node_cpu_usage_seconds_total 0 ") || !strings.Contains(text, "resource_scrape_error 0\n") || strings.Contains(text, "container=") {
		t.Errorf("an empty node:\n%s", text)
	}
	h.create(newTestPod("busy", "busybox", "sh", "-c", "while :; do :; done"))
	h.create(newTestPod("idle", "busybox", "sleep", "1000"))
	h.create(newTestPod("web", "nginx"))
	for _, name := range []string{"busy", "idle", "web"} {
		h.until(name, "ready", isReady)
	}
	var s summary
	pods := map[string]podFigures{}
	nettest.Eventually(t, patience, "figures", func() error {
		if err := json.Unmarshal([]byte(h.get200("/stats/summary")), &s); err != nil {
			return err
		}
		for _, p := range s.Pods {
			pods[p.Ref.Name] = p
		}
		if pods["busy"].CPU.Used < 500e6 {
			return fmt.Errorf("busy has used %d ns", pods["busy"].CPU.Used)
		}
		return nil
	})
	if s.Node.NodeName != "n1" || len(s.Pods) != 3 {
		t.Fatalf("%+v", s)
	}
	busy, idle, web := pods["busy"], pods["idle"], pods["web"]
	if len(busy.Containers) != 1 || busy.Containers[0].Name != "main" || busy.Containers[0].CPU != busy.CPU || busy.Ref.UID != "uid-busy" || busy.Containers[0].Start.IsZero() {
		t.Errorf("busy: %+v", busy)
	}
	if idle.CPU.Used > 200e6 || idle.Memory.WorkingSet == 0 {
		t.Errorf("idle: %+v", idle)
	}
	if len(web.Containers) != 1 || web.CPU.Used != 0 || web.Memory.WorkingSet != 0 {
		t.Errorf("a built-in server: %+v", web)
	}
	if sum := busy.CPU.Used + idle.CPU.Used; s.Node.CPU.Used != sum || s.Node.Memory.WorkingSet != busy.Memory.WorkingSet+idle.Memory.WorkingSet {
		t.Errorf("the node is not the sum of its pods: %+v", s)
	}
	text := h.get200("/metrics/resource")
	for _, want := range []string{
		`container_cpu_usage_seconds_total{container="main",namespace="default",pod="busy"} `,
		`container_memory_working_set_bytes{container="main",namespace="default",pod="idle"} `,
		`container_start_time_seconds{container="main",namespace="default",pod="web"} `,
		`pod_cpu_usage_seconds_total{namespace="default",pod="web"} 0 `,
		"# TYPE node_cpu_usage_seconds_total counter\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	// What people run in a built-in server is counted for its container.
	h.eventuallyExec("web", []string{"sh", "-c", "timeout 1 sh -c 'while :; do :; done'; echo done"}, "done\n")
	h.delete("busy", 0)
	h.untilGone("busy")
	var after summary
	if err := json.Unmarshal([]byte(h.get200("/stats/summary")), &after); err != nil {
		t.Fatal(err)
	}
	if after.Node.CPU.Used < s.Node.CPU.Used {
		t.Errorf("the node's CPU time went from %d to %d", s.Node.CPU.Used, after.Node.CPU.Used)
	}
}
