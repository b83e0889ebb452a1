// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// apply applies a Service named web with a spec ("" for none), as manager.
func (w wire) apply(manager, spec, query string) answer {
	w.t.Helper()
	body := `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"}`
	if spec != "" {
		body += `,"spec":` + spec
	}
	body += "}"
	return w.patch(servicesPath+"/web?fieldManager="+manager+query, applyPatch, body)
}

// owners says who owns what: "manager/subresource operation" to the fields.
func owners(t *testing.T, m map[string]any) map[string]string {
	t.Helper()
	out := map[string]string{}
	list, _ := field(m, "metadata", "managedFields").([]any)
	for _, e := range list {
		data, err := json.Marshal(field(e, "fieldsV1"))
		if err != nil {
			t.Fatal(err)
		}
		if text(e, "apiVersion") == "" || text(e, "fieldsType") != "FieldsV1" {
			t.Errorf("entry %v", e)
		}
		out[strings.TrimSuffix(text(e, "manager")+"/"+text(e, "subresource"), "/")+" "+text(e, "operation")] = string(data)
	}
	return out
}

// TestApply follows one object through server-side apply.
func TestApply(t *testing.T) {
	_, w := startWire(t)
	m := w.apply("alice", `{"selector":{"app":"web"},"ports":[{"port":80}]}`, "").want(t, http.StatusCreated).object(t)
	if got, want := owners(t, m)["alice Apply"], `{"f:spec":{"f:ports":{"k:{\"port\":80,\"protocol\":\"TCP\"}":{".":{},"f:port":{}}},"f:selector":{}}}`; got != want {
		t.Errorf("alice owns %s, want %s", got, want)
	}
	created := text(m, "metadata", "resourceVersion")
	m = w.apply("alice", `{"selector":{"app":"web"},"ports":[{"port":80}]}`, "").want(t, http.StatusOK).object(t)
	if text(m, "metadata", "resourceVersion") != created {
		t.Error("applying the same again wrote something")
	}

	t.Run("conflict", func(t *testing.T) {
		s := w.apply("bob", `{"type":"NodePort","selector":{"app":"other"},"ports":[{"port":80,"targetPort":81}]}`, "").status(t, http.StatusConflict, metav1.StatusReasonConflict,
			`Apply failed with 1 conflict: conflict with "alice": .spec.selector`)
		if s.Details == nil || len(s.Details.Causes) != 1 || s.Details.Causes[0].Type != metav1.CauseTypeFieldManagerConflict || s.Details.Causes[0].Field != ".spec.selector" {
			t.Errorf("details %+v", s.Details)
		}
		w.get(servicesPath+"/web").want(t, 200, `"type":"ClusterIP"`)
	})
	t.Run("sharing", func(t *testing.T) {
		// The same value is no conflict: both own it.
		m := w.apply("carol", `{"selector":{"app":"web"}}`, "").want(t, 200).object(t)
		o := owners(t, m)
		if !strings.Contains(o["carol Apply"], "f:selector") || !strings.Contains(o["alice Apply"], "f:selector") {
			t.Errorf("%v", o)
		}
		// Who leaves it out gives it up, and it stays for the other.
		m = w.apply("carol", "", "").want(t, 200).object(t)
		if o = owners(t, m); o["carol Apply"] != "" || text(m, "spec", "selector", "app") != "web" {
			t.Errorf("%v %v", o, field(m, "spec"))
		}
	})
	t.Run("force", func(t *testing.T) {
		m := w.apply("bob", `{"selector":{"app":"other"},"ports":[{"port":8080,"name":"b"}]}`, "&force=true")
		// Two ports, one of them without a name.
		m.status(t, 422, metav1.StatusReasonInvalid, "spec.ports[0].name: Required value")
		got := w.apply("bob", `{"selector":{"app":"other"}}`, "&force=true").want(t, 200).object(t)
		o := owners(t, got)
		if text(got, "spec", "selector", "app") != "other" || strings.Contains(o["alice Apply"], "f:selector") || !strings.Contains(o["bob Apply"], "f:selector") {
			t.Errorf("%v", o)
		}
	})
	t.Run("removal", func(t *testing.T) {
		w.apply("alice", `{"sessionAffinity":"ClientIP","ports":[{"port":80}]}`, "").want(t, 200, `"sessionAffinity":"ClientIP"`, `"timeoutSeconds":10800`)
		// What nobody owns any more goes back to its default.
		w.apply("alice", `{"ports":[{"port":80}]}`, "").want(t, 200, `"sessionAffinity":"None"`)
	})
	t.Run("another writer", func(t *testing.T) {
		w.patch(servicesPath+"/web?fieldManager=kubectl-patch", mergePatch, `{"metadata":{"labels":{"a":"b"}}}`).want(t, 200)
		body := `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web","labels":{"a":"c"}}}`
		w.patch(servicesPath+"/web?fieldManager=dave", applyPatch, body).status(t, 409, metav1.StatusReasonConflict,
			`conflict with "kubectl-patch" using v1: .metadata.labels.a`)
	})
	t.Run("status", func(t *testing.T) {
		w.apply("alice", `{"type":"LoadBalancer","ports":[{"port":80}]}`, "").want(t, 200)
		body := `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"type":"ClusterIP"},"status":{"loadBalancer":{"ingress":[{"ip":"203.0.113.1"}]}}}`
		m := w.patch(servicesPath+"/web/status?fieldManager=lb", applyPatch, body).want(t, 200).object(t)
		o := owners(t, m)
		if text(m, "spec", "type") != "LoadBalancer" || strings.Contains(o["lb/status Apply"], "f:spec") || !strings.Contains(o["lb/status Apply"], "f:ingress") {
			t.Errorf("%v %v", o, field(m, "spec"))
		}
		body = `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"status":{"loadBalancer":{}}}`
		m = w.patch(servicesPath+"/web?fieldManager=eve", applyPatch, body).want(t, 200).object(t)
		if text(m, "status", "loadBalancer", "ingress", 0, "ip") != "203.0.113.1" {
			t.Errorf("%v", field(m, "status"))
		}
	})
}

// TestApplyMigration takes ownership from kubectl apply's client side to the
// server side, as kubectl does it, and clears the record of owners.
func TestApplyMigration(t *testing.T) {
	_, w := startWire(t)
	w.post(servicesPath+"?fieldManager=kubectl-client-side-apply", webService).want(t, 201)
	m := w.get(servicesPath + "/web").object(t)
	if _, ok := owners(t, m)["kubectl-client-side-apply Update"]; !ok {
		t.Fatalf("%v", owners(t, m))
	}
	w.apply("kubectl", `{"selector":{"app":"web2"},"ports":[{"port":80}]}`, "").status(t, 409, metav1.StatusReasonConflict,
		`conflict with "kubectl-client-side-apply" using v1: .spec.selector`)
	patch := fmt.Sprintf(`[{"op":"test","path":"/metadata/resourceVersion","value":%q},{"op":"replace","path":"/metadata/managedFields/0/manager","value":"kubectl"},{"op":"replace","path":"/metadata/managedFields/0/operation","value":"Apply"}]`,
		text(m, "metadata", "resourceVersion"))
	m = w.patch(servicesPath+"/web?fieldManager=kubectl", jsonPatch, patch).want(t, 200).object(t)
	if o := owners(t, m); len(o) != 1 || o["kubectl Apply"] == "" {
		t.Errorf("%v", o)
	}
	w.apply("kubectl", `{"selector":{"app":"web2"},"ports":[{"port":80}]}`, "").want(t, 200, `"app":"web2"`)

	m = w.patch(servicesPath+"/web", mergePatch, `{"metadata":{"managedFields":[{}]}}`).want(t, 200).object(t)
	if field(m, "metadata", "managedFields") != nil {
		t.Errorf("%v", owners(t, m))
	}
	// After that, everything that is there belongs to a manager of old times.
	w.apply("kubectl", `{"selector":{"app":"web3"},"ports":[{"port":80}]}`, "").status(t, 409, metav1.StatusReasonConflict, `conflict with "before-first-apply" using v1: .spec.selector`)
}

// TestApplyRefused sends what cannot be applied.
func TestApplyRefused(t *testing.T) {
	_, w := startWire(t)
	w.mustPost(mapsPath, mapBody("c", "v"))
	const good = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {k: w}\n"
	for _, tc := range []struct {
		name, query, body string
		code              int
		reason            metav1.StatusReason
		message           string
	}{
		{"no manager", "", good, 422, metav1.StatusReasonInvalid, "fieldManager: Required value: is required for apply patch"},
		{"long manager", "?fieldManager=" + strings.Repeat("x", 129), good, 422, metav1.StatusReasonInvalid, "fieldManager: Too long"},
		{"unprintable manager", "?fieldManager=a%07", good, 422, metav1.StatusReasonInvalid, "fieldManager: Invalid value"},
		{"no YAML", "?fieldManager=a", "a: [", 400, metav1.StatusReasonBadRequest, "yaml: line 1"},
		{"no version", "?fieldManager=a", "metadata: {name: c}\n", 400, metav1.StatusReasonBadRequest, ""},
		{"another kind", "?fieldManager=a", "apiVersion: v1\nkind: Secret\nmetadata: {name: c}\n", 400, metav1.StatusReasonBadRequest, ""},
		{"another name", "?fieldManager=a&force=true", strings.Replace(good, "name: c", "name: d", 1), 400, metav1.StatusReasonBadRequest, "does not match"},
		{"owners", "?fieldManager=a", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c, managedFields: [{manager: x}]}\n", 400, metav1.StatusReasonBadRequest, "metadata.managedFields must be nil"},
		// An upstream wart: it is the client's fault, and the code is 500.
		{"unknown field", "?fieldManager=a&fieldValidation=Strict", good + "dada: {}\n", 500, "", ".dada: field not declared in schema"},
		{"old revision", "?fieldManager=a&force=true", strings.Replace(good, "name: c", "name: c, resourceVersion: '1'", 1), 409, metav1.StatusReasonConflict, "the object has been modified"},
		{"uid of a missing object", "x?fieldManager=a", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: cx, uid: u}\n", 409, metav1.StatusReasonConflict, "uid mismatch: the provided object specified uid u, and no existing object was found"},
		{"a subresource of a missing object", "x/status?fieldManager=a", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: cx}\n", 404, metav1.StatusReasonNotFound, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := w.patch(mapsPath+"/c"+tc.query, applyPatch, tc.body)
			if tc.name == "a subresource of a missing object" {
				if a.code != tc.code {
					t.Errorf("%d %s", a.code, a.short())
				}
				return
			}
			a.status(t, tc.code, tc.reason, tc.message)
		})
	}
	w.get(mapsPath+"/c").want(t, 200, `"k":"v"`)
}
