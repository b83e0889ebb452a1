// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func (w wire) remove(path, options string) answer {
	w.t.Helper()
	return w.send(http.MethodDelete, path, options)
}

// TestDelete looks at the answers to deletions and at what they leave.
func TestDelete(t *testing.T) {
	_, w := startWire(t)
	create := func(name string) string {
		m := w.mustPost(mapsPath, mapBody(name, "1"))
		return text(m, "metadata", "uid")
	}
	t.Run("answer", func(t *testing.T) {
		uid := create("c")
		m := w.remove(mapsPath+"/c", `{"kind":"DeleteOptions","apiVersion":"v1","propagationPolicy":"Background"}`).want(t, 200).object(t)
		if text(m, "kind") != "Status" || text(m, "status") != "Success" || text(m, "details", "name") != "c" || text(m, "details", "kind") != "configmaps" || text(m, "details", "uid") != uid {
			t.Errorf("%v", m)
		}
		w.remove(mapsPath+"/c", "").status(t, 404, metav1.StatusReasonNotFound, `configmaps "c" not found`)
	})
	t.Run("preconditions", func(t *testing.T) {
		uid := create("c")
		w.remove(mapsPath+"/c", `{"preconditions":{"uid":"other"}}`).status(t, 409, metav1.StatusReasonConflict,
			`Operation cannot be fulfilled on ConfigMap "c": the UID in the precondition (other) does not match the UID in record (`+uid+`). The object might have been deleted and then recreated`)
		w.remove(mapsPath+"/c", `{"preconditions":{"resourceVersion":"1"}}`).status(t, 409, metav1.StatusReasonConflict, "the ResourceVersion in the precondition (1) does not match the ResourceVersion in record (")
		rev := text(w.get(mapsPath+"/c").object(t), "metadata", "resourceVersion")
		w.remove(mapsPath+"/c", fmt.Sprintf(`{"preconditions":{"uid":%q,"resourceVersion":%q}}`, uid, rev)).want(t, 200)
	})
	for policy, finalizer := range map[string]string{"Foreground": "foregroundDeletion", "Orphan": "orphan"} {
		t.Run(policy, func(t *testing.T) {
			for _, query := range []bool{false, true} {
				create("c")
				path, body := mapsPath+"/c", fmt.Sprintf(`{"propagationPolicy":%q}`, policy)
				if query {
					path, body = path+"?propagationPolicy="+policy, ""
				}
				m := w.remove(path, body).want(t, 200).object(t)
				if text(m, "kind") != "ConfigMap" || text(m, "metadata", "finalizers", 0) != finalizer || text(m, "metadata", "deletionTimestamp") == "" || text(m, "metadata", "deletionGracePeriodSeconds") != "0" {
					t.Errorf("%v", m)
				}
				// Nothing is added to what is being deleted.
				w.patch(mapsPath+"/c", mergePatch, `{"metadata":{"finalizers":["kplab.io/new",`+fmt.Sprintf("%q", finalizer)+`]}}`).
					status(t, 422, metav1.StatusReasonInvalid, "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted")
				w.patch(mapsPath+"/c", mergePatch, `{"metadata":{"finalizers":null}}`).want(t, 200)
				w.get(mapsPath+"/c").status(t, 404, metav1.StatusReasonNotFound)
			}
		})
	}
	t.Run("refused options", func(t *testing.T) {
		create("c")
		w.remove(mapsPath+"/c", `{"propagationPolicy":"Sideways"}`).status(t, 422, metav1.StatusReasonInvalid,
			`propagationPolicy: Unsupported value: "Sideways": supported values: "Foreground", "Background", "Orphan", "nil"`)
		w.remove(mapsPath+"/c", `{"propagationPolicy":"Orphan","orphanDependents":true}`).status(t, 422, metav1.StatusReasonInvalid,
			"orphanDependents and deletionPropagation cannot be both set")
		w.remove(mapsPath+"/c", `{"dryRun":["Some"]}`).status(t, 422, metav1.StatusReasonInvalid, `dryRun: Unsupported value: ["Some"]: supported values: "All"`)
		w.remove(mapsPath+"/c", `{`).status(t, 400, metav1.StatusReasonBadRequest)
		w.remove(mapsPath+"/c?gracePeriodSeconds=x", "").status(t, 400, metav1.StatusReasonBadRequest)
		w.remove(mapsPath+"/c", `{"kind":"Status","apiVersion":"v1"}`).status(t, 400, metav1.StatusReasonBadRequest)
		w.remove(mapsPath+"/c", `{"preconditions":{}}`).want(t, 200)
	})
	t.Run("grace", func(t *testing.T) {
		pod := `{"metadata":{"name":%q},"spec":{"nodeName":"n","containers":[{"name":"c","image":"nginx"}]}}`
		for name, tc := range map[string]struct{ options, want string }{
			"default": {"", "30"}, "body": {`{"gracePeriodSeconds":5}`, "5"}, "query": {"?gracePeriodSeconds=7", "7"},
		} {
			w.mustPost(podsPath, fmt.Sprintf(pod, name))
			path, body := podsPath+"/"+name, tc.options
			if strings.HasPrefix(body, "?") {
				path, body = path+body, ""
			}
			m := w.remove(path, body).want(t, 200).object(t)
			if text(m, "kind") != "Pod" || text(m, "metadata", "deletionGracePeriodSeconds") != tc.want {
				t.Errorf("%s: %v", name, field(m, "metadata"))
			}
			w.remove(podsPath+"/"+name, `{"gracePeriodSeconds":0}`).want(t, 200)
			w.get(podsPath+"/"+name).status(t, 404, metav1.StatusReasonNotFound)
		}
	})
}

// TestDeleteCollection removes many at once.
func TestDeleteCollection(t *testing.T) {
	s, w := startWire(t)
	for i := range 6 {
		w.post(mapsPath, fmt.Sprintf(`{"metadata":{"name":"c%d","labels":{"even":"%t"}}}`, i, i%2 == 0)).want(t, 201)
	}
	before := s.Revision()
	w.remove(mapsPath+"?dryRun=All", "").want(t, 200)
	if s.Revision() != before {
		t.Error("a dry run wrote something")
	}
	m := w.remove(mapsPath+"?labelSelector=even%3Dtrue", "").want(t, 200).object(t)
	if text(m, "kind") != "ConfigMapList" || itemNames(m) != "c0 c2 c4" {
		t.Errorf("%v %s", m["kind"], itemNames(m))
	}
	if got := itemNames(w.get(mapsPath).object(t)); got != "c1 c3 c5" {
		t.Errorf("left: %s", got)
	}
	w.remove(mapsPath+"?fieldSelector=metadata.name%3Dc1", `{"propagationPolicy":"Foreground"}`).want(t, 200)
	if got := text(w.get(mapsPath+"/c1").object(t), "metadata", "finalizers", 0); got != "foregroundDeletion" {
		t.Errorf("finalizer %q", got)
	}
	w.remove(mapsPath, "").want(t, 200)
	if got := itemNames(w.get(mapsPath).object(t)); got != "c1" {
		t.Errorf("left: %s", got)
	}
}

// TestFieldValidation sends fields that do not exist, and some twice.
func TestFieldValidation(t *testing.T) {
	_, w := startWire(t)
	w.mustPost(servicesPath, webService)
	const unknown, twice = `unknown field "spec.color"`, `duplicate field "spec.ports"`
	body := func(name string) string {
		return `{"apiVersion":"v1","kind":"Service","metadata":{"name":"` + name + `"},"spec":{"color":"red","ports":[{"port":80}],"ports":[{"port":81}]}}`
	}
	yamlBody := "metadata: {name: yam}\nspec:\n  color: red\n  ports: [{port: 80}]\n"
	for _, tc := range []struct {
		name, method, path, kind, body string
		finds                          []string
		code                           int
	}{
		{"create", http.MethodPost, servicesPath, jsonType, body("x"), []string{unknown, twice}, 201},
		{"create from YAML", http.MethodPost, servicesPath, yamlType, yamlBody, []string{unknown}, 201},
		{"update", http.MethodPut, servicesPath + "/web", jsonType, body("web"), []string{unknown, twice}, 200},
		{"merge", http.MethodPatch, servicesPath + "/web", mergePatch, `{"spec":{"color":"red","sessionAffinity":"None","sessionAffinity":"ClientIP"}}`, []string{unknown, `duplicate field "spec.sessionAffinity"`}, 200},
		{"strategic", http.MethodPatch, servicesPath + "/web", strategicPatch, `{"spec":{"color":"red"}}`, []string{unknown}, 200},
		{"json", http.MethodPatch, servicesPath + "/web", jsonPatch, `[{"op":"add","path":"/spec/color","value":"red"}]`, []string{unknown}, 200},
	} {
		t.Run(tc.name, func(t *testing.T) {
			do := func(query string) answer {
				w.t.Helper()
				return w.send(tc.method, tc.path+query, tc.body, "Content-Type", tc.kind)
			}
			strict := do("?fieldValidation=Strict")
			// A patch that cannot be is not a body that cannot be read.
			code, reason := int(http.StatusBadRequest), metav1.StatusReasonBadRequest
			if tc.method == http.MethodPatch {
				code, reason = http.StatusUnprocessableEntity, metav1.StatusReasonInvalid
			}
			strict.status(t, code, reason, append([]string{"strict decoding error: "}, tc.finds...)...)
			if got := strict.header.Values("Warning"); len(got) != 0 {
				t.Errorf("Strict warns: %q", got)
			}
			do("?fieldValidation=Loosely").status(t, 422, metav1.StatusReasonInvalid, `fieldValidation: Unsupported value: "Loosely": supported values: "", "Ignore", "Strict", "Warn"`)
			for _, query := range []string{"?fieldValidation=Warn", ""} {
				a := do(query).want(t, tc.code)
				for _, find := range tc.finds {
					if got := strings.Join(a.header.Values("Warning"), "\n"); !strings.Contains(got, `299 - "`+strings.ReplaceAll(find, `"`, `\"`)+`"`) {
						t.Errorf("%q: warnings %q lack %s", query, got, find)
					}
				}
				if strings.Contains(a.body, "color") && !strings.Contains(a.body, "managedFields") {
					t.Errorf("the field is stored: %s", a.short())
				}
				if tc.method == http.MethodPost {
					w.remove(tc.path+"/x", "")
					w.remove(tc.path+"/yam", "")
				}
			}
			if a := do("?fieldValidation=Ignore").want(t, tc.code); len(a.header.Values("Warning")) != 0 {
				t.Errorf("Ignore warns: %q", a.header.Values("Warning"))
			}
		})
	}
}

// TestDryRunOnTheWire: every verb answers as if it had happened, stores nothing,
// and no watch hears of it.
func TestDryRunOnTheWire(t *testing.T) {
	s, w := startWire(t)
	w.mustPost(servicesPath, webService)
	before := s.Revision()
	watch := w.watch(fmt.Sprintf("%s?watch=1&resourceVersion=%d", servicesPath, before))
	other := strings.Replace(webService, `"web"},`, `"other"},`, 1)
	m := w.post(servicesPath+"?dryRun=All", other).want(t, 201).object(t)
	if text(m, "metadata", "uid") == "" || text(m, "spec", "clusterIP") != "10.96.0.0" {
		t.Errorf("create: %v", m)
	}
	w.post(servicesPath+"?dryRun=All", webService).status(t, 409, metav1.StatusReasonAlreadyExists, `services "web" already exists`)
	w.post(servicesPath+"?dryRun=All", strings.Replace(other, `"port":80`, `"port":0`, 1)).status(t, 422, metav1.StatusReasonInvalid, "spec.ports[0].port")
	w.send(http.MethodPut, servicesPath+"/web?dryRun=All", strings.Replace(webService, `"port":80`, `"port":81`, 1)).want(t, 200, `"port":81`)
	for kind, body := range map[string]string{
		mergePatch: `{"spec":{"type":"NodePort"}}`, strategicPatch: `{"spec":{"type":"NodePort"}}`, jsonPatch: `[{"op":"add","path":"/spec/type","value":"NodePort"}]`,
	} {
		w.patch(servicesPath+"/web?dryRun=All", kind, body).want(t, 200, `"type":"NodePort"`, `"nodePort":3`)
	}
	w.apply("a", `{"sessionAffinity":"ClientIP","ports":[{"port":80}]}`, "&dryRun=All&force=true").want(t, 200, `"timeoutSeconds":10800`)
	w.remove(servicesPath+"/web?dryRun=All", "").want(t, 200)
	w.remove(servicesPath+"/web", `{"dryRun":["All"]}`).want(t, 200)
	w.post(servicesPath+"?dryRun=Some", other).status(t, 422, metav1.StatusReasonInvalid, `dryRun: Unsupported value: ["Some"]: supported values: "All"`)
	if now := s.Revision(); now != before {
		t.Errorf("revision %d, was %d", now, before)
	}
	w.get(servicesPath+"/web").want(t, 200, `"type":"ClusterIP"`, `"port":80`)
	// The first thing that the watch hears of is real.
	w.patch(servicesPath+"/web", mergePatch, `{"metadata":{"labels":{"real":"yes"}}}`).want(t, 200)
	if m := watch.next("MODIFIED", "web"); text(m, "metadata", "labels", "real") != "yes" || text(m, "spec", "type") != "ClusterIP" {
		t.Errorf("%v", m)
	}
}
