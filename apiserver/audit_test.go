// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kplab/kplab/internal/nettest"
)

// auditEvents reads an audit log.
func auditEvents(tb testing.TB, path string) []map[string]any {
	tb.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	var out []map[string]any
	for line := range strings.Lines(string(data)) {
		if !strings.HasSuffix(line, "\n") {
			break // it is being written
		}
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			tb.Fatalf("%v in %s", err, line)
		}
		out = append(out, m)
	}
	return out
}

// eventOf is the last event of a request, nil for none.
func eventOf(events []map[string]any, id string) map[string]any {
	var found map[string]any
	for _, e := range events {
		if e["auditID"] == id {
			found = e
		}
	}
	return found
}

func TestAudit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	s := startServer(t, "", func(c *Config) { c.Audit.Log = path })
	makeNamespace(t, s, "default")
	w := newWire(t, s)
	made := w.post(mapsPath, mapBody("c", "a secret thing")).want(t, 201)
	missing := w.get(mapsPath+"/nowhere").want(t, 404)
	event := w.post("/api/v1/namespaces/default/events", `{"apiVersion":"v1","kind":"Event","metadata":{"name":"e"},"involvedObject":{"namespace":"default"}}`).want(t, 201)
	health := w.get("/readyz").want(t, 200)
	id := made.header.Get("Audit-Id")
	var e map[string]any
	nettest.Eventually(t, waitTime, "the request in the audit log", func() error {
		events := auditEvents(t, path)
		if e = eventOf(events, id); e == nil || eventOf(events, missing.header.Get("Audit-Id")) == nil {
			return fmt.Errorf("%d events, none of %q", len(events), id)
		}
		return nil
	})
	for want, p := range map[string][]any{
		"Event":            {"kind"},
		"audit.k8s.io/v1":  {"apiVersion"},
		"Metadata":         {"level"},
		"ResponseComplete": {"stage"},
		"create":           {"verb"},
		"tester":           {"user", "username"},
		"configmaps":       {"objectRef", "resource"},
		"default":          {"objectRef", "namespace"},
		"c":                {"objectRef", "name"},
		"201":              {"responseStatus", "code"},
		mapsPath:           {"requestURI"},
		"allow":            {"annotations", "authorization.k8s.io/decision"},
	} {
		if got := text(e, p...); got != want {
			t.Errorf("%v is %q, want %q in %v", p, got, want, e)
		}
	}
	if code := text(eventOf(auditEvents(t, path), missing.header.Get("Audit-Id")), "responseStatus", "code"); code != "404" {
		t.Errorf("code of a missing object: %s", code)
	}
	// What came before them is written, if it is at all.
	for name, id := range map[string]string{"an event": event.header.Get("Audit-Id"), "a look at the health": health.header.Get("Audit-Id")} {
		if e := eventOf(auditEvents(t, path), id); e != nil {
			t.Errorf("%s is in the log: %v", name, e)
		}
	}
	last := w.send(http.MethodDelete, mapsPath+"/c", "").want(t, 200)
	s.stop()
	if eventOf(auditEvents(t, path), last.header.Get("Audit-Id")) == nil {
		t.Error("the last request is not in the log after the end")
	}
	data, err := os.ReadFile(path)
	if err != nil || strings.Contains(string(data), "a secret thing") {
		t.Errorf("contents are in the log of metadata (%v)", err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the log: %v %v", info, err)
	}
}

func TestAuditPolicy(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, tc := range []struct{ name, policy, want string }{
		{"no YAML", "a: [", "audit policy "},
		{"another kind", "apiVersion: v1\nkind: ConfigMap\n", "it must be a Policy of audit.k8s.io/v1"},
		{"no rules", "apiVersion: audit.k8s.io/v1\nkind: Policy\n", "0 rules"},
		{"unknown level", "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Everything}]\n", `Unsupported value: "Everything"`},
		{"unknown field", "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{lvl: None}]\n", "level"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := Audit{Log: filepath.Join(dir, "log"), Policy: write("policy", tc.policy)}.Check()
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
	if err := (Audit{Policy: "/p"}).Check(); err == nil || !strings.Contains(err.Error(), "without an audit log") {
		t.Errorf("a policy alone: %v", err)
	}
	if err := (Audit{Log: "/l", Policy: filepath.Join(dir, "absent")}).Check(); err == nil {
		t.Error("a policy that is not there")
	}
	path := filepath.Join(dir, "audit.log")
	policy := write("good", "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n- {level: RequestResponse, resources: [{resources: [configmaps]}]}\n- {level: None}\n")
	s := startServer(t, "", func(c *Config) { c.Audit = Audit{Log: path, Policy: policy} })
	makeNamespace(t, s, "default")
	w := newWire(t, s)
	a := w.post(mapsPath, mapBody("c", "v")).want(t, 201)
	s.stop()
	events := auditEvents(t, path)
	if e := eventOf(events, a.header.Get("Audit-Id")); len(events) != 1 || text(e, "requestObject", "data", "k") != "v" || text(e, "responseObject", "metadata", "uid") == "" {
		t.Errorf("%d events: %v", len(events), e)
	}
}
