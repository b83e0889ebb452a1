// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestStatusErrors looks at failures as a client reads them.
func TestStatusErrors(t *testing.T) {
	s, w := startWire(t)
	w.mustPost(mapsPath, mapBody("c", "1"))
	t.Run("causes", func(t *testing.T) {
		st := w.post(servicesPath, `{"metadata":{"name":"Bad_Name"},"spec":{"ports":[{"port":0},{"port":443}]}}`).status(t, 422, metav1.StatusReasonInvalid,
			`Service "Bad_Name" is invalid: [`)
		if st.Details == nil || st.Details.Name != "Bad_Name" || st.Details.Kind != "Service" || st.Details.Group != "" {
			t.Fatalf("details %+v", st.Details)
		}
		got := map[string]metav1.CauseType{}
		for _, c := range st.Details.Causes {
			got[c.Field] = c.Type
		}
		for path, cause := range map[string]metav1.CauseType{
			"metadata.name": metav1.CauseTypeFieldValueInvalid, "spec.ports[0].port": metav1.CauseTypeFieldValueInvalid, "spec.ports[1].name": metav1.CauseTypeFieldValueRequired,
		} {
			if got[path] != cause {
				t.Errorf("cause of %s is %q, want %q", path, got[path], cause)
			}
		}
		if names := w.post("/apis/apps/v1/namespaces/default/deployments", `{"metadata":{"name":"x"},"spec":{}}`).status(t, 422, metav1.StatusReasonInvalid); names.Details == nil || names.Details.Group != "apps" || names.Details.Kind != "Deployment" {
			t.Errorf("details %+v", names.Details)
		}
	})
	t.Run("details", func(t *testing.T) {
		st := w.get("/apis/apps/v1/namespaces/default/deployments/x").status(t, 404, metav1.StatusReasonNotFound, `deployments.apps "x" not found`)
		if st.Details == nil || st.Details.Name != "x" || st.Details.Kind != "deployments" || st.Details.Group != "apps" {
			t.Errorf("details %+v", st.Details)
		}
		w.post(mapsPath, mapBody("c", "1")).status(t, 409, metav1.StatusReasonAlreadyExists, `configmaps "c" already exists`)
		w.post("/api/v1/namespaces/nowhere/configmaps", mapBody("c", "1")).status(t, 404, metav1.StatusReasonNotFound, `namespaces "nowhere" not found`)
	})
	t.Run("path and body", func(t *testing.T) {
		w.send(http.MethodPut, mapsPath+"/c", mapBody("d", "1")).status(t, 400, metav1.StatusReasonBadRequest, "the name of the object (d) does not match the name on the URL (c)")
		w.send(http.MethodPut, mapsPath+"/c", strings.Replace(mapBody("c", "1"), `"name"`, `"namespace":"other","name"`, 1)).
			status(t, 400, metav1.StatusReasonBadRequest, "the namespace of the provided object does not match the namespace sent on the request")
		w.post(mapsPath, strings.Replace(mapBody("e", "1"), `"name"`, `"namespace":"other","name"`, 1)).
			status(t, 400, metav1.StatusReasonBadRequest, "the namespace of the provided object does not match the namespace sent on the request")
		w.post(mapsPath, `{"metadata":{}}`).status(t, 422, metav1.StatusReasonInvalid, "name or generateName is required")
		w.post(mapsPath, strings.Replace(mapBody("e", "1"), `"name"`, `"resourceVersion":"5","name"`, 1)).status(t, 500, "", "resourceVersion should not be set on objects to be created")
	})
	t.Run("update of nothing", func(t *testing.T) {
		w.send(http.MethodPut, mapsPath+"/none", mapBody("none", "1")).status(t, 404, metav1.StatusReasonNotFound, `configmaps "none" not found`)
		// Of some kinds it makes the object.
		w.send(http.MethodPut, servicesPath+"/web", webService).want(t, http.StatusCreated)
		w.send(http.MethodPut, servicesPath+"/web", webService).want(t, http.StatusOK)
		w.send(http.MethodPut, servicesPath+"/gone", strings.Replace(webService, `"name":"web"`, `"name":"gone","uid":"u"`, 1)).
			status(t, 409, metav1.StatusReasonConflict, "Precondition failed: UID in precondition: u, UID in object meta: ")
	})
	t.Run("paths", func(t *testing.T) {
		for _, path := range []string{"/api/v1/nothing", "/api/v2", "/apis/nope", "/apis/nope/v1/things", "/nowhere", mapsPath + "/c/nothing", "/api/v1/namespaces/default/nothing/x"} {
			if a := w.get(path); a.code != 404 {
				t.Errorf("%s: %d %s", path, a.code, a.short())
			}
		}
		err := s.client.CoreV1().RESTClient().Get().AbsPath("/api/v1/nothing").Do(t.Context()).Error()
		if err == nil || err.Error() != "the server could not find the requested resource" {
			t.Errorf("what a client makes of it: %v", err)
		}
		if a := w.send(http.MethodPut, mapsPath, mapBody("c", "1")); a.code != 405 {
			t.Errorf("PUT to a collection: %d %s", a.code, a.short())
		}
		err = s.client.CoreV1().RESTClient().Put().AbsPath(mapsPath).Body([]byte("{}")).Do(t.Context()).Error()
		if err == nil || !strings.Contains(err.Error(), "the server does not allow this method on the requested resource") {
			t.Errorf("what a client makes of it: %v", err)
		}
	})
	t.Run("names that are no names", func(t *testing.T) {
		for _, path := range []string{mapsPath + "/..%2Fc", mapsPath + "/a%2Fb", mapsPath + "/%25"} {
			if a := w.get(path); a.code < 400 || a.code >= 500 {
				t.Errorf("%s: %d %s", path, a.code, a.short())
			}
		}
	})
	t.Run("warnings", func(t *testing.T) {
		a := w.get("/api/v1/namespaces/default/endpoints").want(t, 200)
		if got := a.header.Values("Warning"); len(got) != 1 || got[0] != `299 - "v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice"` {
			t.Errorf("%q", got)
		}
		body := `{"metadata":{"name":"warned"},"spec":{"externalIPs":["203.0.113.7"],"externalName":"a.example","ports":[{"port":80}]}}`
		if got := w.post(servicesPath, body).want(t, 201).header.Values("Warning"); len(got) != 2 {
			t.Errorf("%q", got)
		}
	})
}

// TestMetadata: what the server sets, and what nobody can.
func TestMetadata(t *testing.T) {
	_, w := startWire(t)
	body := `{"metadata":{"name":"c","uid":"mine","creationTimestamp":"2001-01-01T00:00:00Z","generation":9,"selfLink":"/x","deletionTimestamp":"2001-01-01T00:00:00Z"},"data":{"k":"v"}}`
	m := w.post(mapsPath+"?fieldManager=me", body).want(t, 201).object(t)
	md := field(m, "metadata").(map[string]any)
	if text(md, "uid") == "mine" || text(md, "uid") == "" || strings.HasPrefix(text(md, "creationTimestamp"), "2001") || md["deletionTimestamp"] != nil || md["selfLink"] != nil || md["generation"] != nil {
		t.Errorf("%v", md)
	}
	if rev := text(md, "resourceVersion"); rev == "" || strings.HasPrefix(rev, "0") {
		t.Errorf("resourceVersion %q", rev)
	}
	if text(md, "managedFields", 0, "manager") != "me" {
		t.Errorf("%v", md)
	}
	t.Run("generateName", func(t *testing.T) {
		long := strings.Repeat("a", 70)
		m := w.post(mapsPath, `{"metadata":{"generateName":"`+long+`"}}`).want(t, 201).object(t)
		name := text(m, "metadata", "name")
		if len(name) != 63 || !strings.HasPrefix(name, long[:58]) || strings.Trim(name[58:], "bcdfghjklmnpqrstvwxz2456789") != "" {
			t.Errorf("%q", name)
		}
		m = w.post(mapsPath, `{"metadata":{"generateName":"x-","name":"given"}}`).want(t, 201).object(t)
		if text(m, "metadata", "name") != "given" {
			t.Errorf("%v", field(m, "metadata"))
		}
	})
	t.Run("generation", func(t *testing.T) {
		path := "/apis/apps/v1/namespaces/default/deployments"
		d := `{"metadata":{"name":"d"},"spec":{"selector":{"matchLabels":{"a":"b"}},"template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"nginx"}]}}}}`
		w.post(path, d).want(t, 201, `"generation":1`)
		w.patch(path+"/d", mergePatch, `{"metadata":{"labels":{"x":"y"}}}`).want(t, 200, `"generation":1`)
		w.patch(path+"/d", mergePatch, `{"spec":{"replicas":3}}`).want(t, 200, `"generation":2`)
		w.patch(path+"/d/status", mergePatch, `{"status":{"observedGeneration":2}}`).want(t, 200, `"generation":2`)
	})
}
