// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	mergePatch     = "application/merge-patch+json"
	strategicPatch = "application/strategic-merge-patch+json"
	jsonPatch      = "application/json-patch+json"
	applyPatch     = "application/apply-patch+yaml"
)

func (w wire) patch(path, kind, body string) answer {
	w.t.Helper()
	return w.send(http.MethodPatch, path, body, "Content-Type", kind)
}

// TestPatchTypes changes one object in the four ways.
func TestPatchTypes(t *testing.T) {
	_, w := startWire(t)
	fresh := func(t *testing.T) {
		t.Helper()
		w.send(http.MethodDelete, servicesPath+"/web", "")
		w.mustPost(servicesPath, strings.Replace(webService, `"ports":[{"port":80}]`, `"ports":[{"name":"http","port":80},{"name":"https","port":443}]`, 1))
	}
	for _, tc := range []struct {
		name, kind, body string
		ports, selector  string
	}{
		// A list is one value.
		{"merge", mergePatch, `{"spec":{"ports":[{"name":"http","port":8080}],"selector":{"tier":"front"}}}`, "http:8080", "map[app:web tier:front]"},
		{"merge null", mergePatch, `{"spec":{"selector":{"app":null,"tier":"front"}}}`, "http:80 https:443", "map[tier:front]"},
		// Ports are merged by their number.
		{"strategic", strategicPatch, `{"spec":{"ports":[{"port":443,"targetPort":8443},{"name":"alt","port":8080}]}}`, "alt:8080 http:80 https:443>8443", "map[app:web]"},
		{"strategic delete", strategicPatch, `{"spec":{"ports":[{"$patch":"delete","port":80}]}}`, "https:443", "map[app:web]"},
		{"strategic replace", strategicPatch, `{"spec":{"ports":[{"$patch":"replace"},{"port":81}],"selector":{"$patch":"replace","x":"y"}}}`, ":81", "map[x:y]"},
		{"json", jsonPatch, `[{"op":"test","path":"/spec/ports/0/port","value":80},{"op":"replace","path":"/spec/ports/0/port","value":81},{"op":"add","path":"/spec/selector/tier","value":"front"},{"op":"remove","path":"/spec/ports/1"}]`, "http:81>80", "map[app:web tier:front]"},
		{"json move", jsonPatch, `[{"op":"move","from":"/spec/selector/app","path":"/spec/selector/web"},{"op":"copy","from":"/spec/selector/web","path":"/spec/selector/copy"}]`, "http:80 https:443", "map[copy:web web:web]"},
		// Ports are merged by number and protocol.
		{"apply", applyPatch, "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec:\n  ports: [{port: 80, protocol: UDP, name: udp}]\n", "http:80 https:443 udp:80", "map[app:web]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			fresh(t)
			m := w.patch(servicesPath+"/web?fieldManager=tester", tc.kind, tc.body).want(t, 200).object(t)
			var ports []string
			for i := range field(m, "spec", "ports").([]any) {
				p := field(m, "spec", "ports", i)
				one := text(p, "name") + ":" + text(p, "port")
				if to := text(p, "targetPort"); to != text(p, "port") {
					one += ">" + to
				}
				ports = append(ports, one)
			}
			slices.Sort(ports)
			got := strings.Join(ports, " ")
			if selector := fmt.Sprint(field(m, "spec", "selector")); got != tc.ports || selector != tc.selector {
				t.Errorf("ports %s, want %s; selector %s, want %s", got, tc.ports, selector, tc.selector)
			}
		})
	}
}

// TestPatchTrap applies a Service with 53/TCP and 53/UDP as kubectl apply did for
// years: the strategic merge knows ports by number only. It is upstream's
// behaviour, and server-side apply's way out of it is checked, too.
func TestPatchTrap(t *testing.T) {
	_, w := startWire(t)
	w.mustPost(servicesPath, `{"kind":"Service","apiVersion":"v1","metadata":{"name":"dns"},"spec":{"ports":[{"name":"udp","port":53,"protocol":"UDP"},{"name":"tcp","port":53,"protocol":"TCP"}]}}`)
	// The first port of that number is changed into the other, which is there twice then.
	w.patch(servicesPath+"/dns", strategicPatch, `{"spec":{"ports":[{"name":"tcp","port":53,"protocol":"TCP","targetPort":5353}]}}`).
		status(t, 422, metav1.StatusReasonInvalid, `spec.ports[1].name: Duplicate value: "tcp"`)
	w.send(http.MethodDelete, servicesPath+"/dns", "")
	const apply = "apiVersion: v1\nkind: Service\nmetadata: {name: dns}\nspec:\n  ports:\n  - {name: udp, port: 53, protocol: UDP}\n  - {name: tcp, port: 53, protocol: TCP, targetPort: %d}\n"
	w.patch(servicesPath+"/dns?fieldManager=a", applyPatch, fmt.Sprintf(apply, 53)).want(t, 201)
	m := w.patch(servicesPath+"/dns?fieldManager=a", applyPatch, fmt.Sprintf(apply, 5353)).want(t, 200).object(t)
	if text(m, "spec", "ports", 0, "targetPort") != "53" || text(m, "spec", "ports", 1, "targetPort") != "5353" {
		t.Errorf("%v", field(m, "spec", "ports"))
	}
}

// TestPatchRefused sends patches that cannot be.
func TestPatchRefused(t *testing.T) {
	_, w := startWire(t)
	w.mustPost(mapsPath, mapBody("c", "v"))
	ops := func(n int) string {
		return "[" + strings.TrimSuffix(strings.Repeat(`{"op":"replace","path":"/data/k","value":"w"},`, n), ",") + "]"
	}
	for _, tc := range []struct {
		name, path, kind, body string
		code                   int
		reason                 metav1.StatusReason
		message                string
	}{
		{"type", "/c", "application/json", "{}", 415, metav1.StatusReasonUnsupportedMediaType,
			"415: Unsupported Media Type"},
		{"no type", "/c", "", "{}", 415, metav1.StatusReasonUnsupportedMediaType, "415: Unsupported Media Type"},
		{"test fails", "/c", jsonPatch, `[{"op":"test","path":"/data/k","value":"other"}]`, 422, metav1.StatusReasonInvalid, "the server rejected our request due to an error in our request"},
		{"path is not there", "/c", jsonPatch, `[{"op":"remove","path":"/data/none"}]`, 422, metav1.StatusReasonInvalid, "the server rejected our request due to an error in our request"},
		{"no JSON", "/c", jsonPatch, `[`, 400, metav1.StatusReasonBadRequest, "invalid JSON patch"},
		{"no list", "/c", jsonPatch, `{}`, 400, metav1.StatusReasonBadRequest, ""},
		{"merge is no JSON", "/c", mergePatch, `{`, 400, metav1.StatusReasonBadRequest, ""},
		{"merge of a wrong type", "/c", mergePatch, `{"data":"x"}`, 422, metav1.StatusReasonInvalid, "json: cannot unmarshal string into Go struct field ConfigMap.data of type map[string]string"},
		{"strategic of a wrong type", "/c", strategicPatch, `{"data":"x"}`, 422, metav1.StatusReasonInvalid, "cannot restore map from string"},
		{"name", "/c", mergePatch, `{"metadata":{"name":"d"}}`, 400, metav1.StatusReasonBadRequest, "the name of the object (d) does not match the name on the URL (c)"},
		{"namespace", "/c", mergePatch, `{"metadata":{"namespace":"other"}}`, 400, metav1.StatusReasonBadRequest, "the namespace of the provided object does not match the namespace sent on the request"},
		{"uid", "/c", mergePatch, `{"metadata":{"uid":"other"}}`, 422, metav1.StatusReasonInvalid, `metadata.uid: Invalid value: "other": field is immutable`},
		{"old revision", "/c", mergePatch, `{"metadata":{"resourceVersion":"1"}}`, 409, metav1.StatusReasonConflict, "the object has been modified; please apply your changes to the latest version and try again"},
		{"no object", "/nope", mergePatch, `{}`, 404, metav1.StatusReasonNotFound, `configmaps "nope" not found`},
		{"too many operations", "/c", jsonPatch, ops(10001), 413, metav1.StatusReasonRequestEntityTooLarge, "The allowed maximum operations in a JSON patch is 10000, got 10001"},
		{"force", "/c?force=true", mergePatch, `{}`, 422, metav1.StatusReasonInvalid, "force: Forbidden: may not be specified for non-apply patch"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w.patch(mapsPath+tc.path, tc.kind, tc.body).status(t, tc.code, tc.reason, tc.message)
		})
	}
	w.get(mapsPath+"/c").want(t, 200, `"k":"v"`)
	t.Run("as many operations as may be", func(t *testing.T) { w.patch(mapsPath+"/c", jsonPatch, ops(10000)).want(t, 200, `"k":"w"`) })
	t.Run("collection", func(t *testing.T) {
		if a := w.patch(mapsPath, mergePatch, "{}"); a.code != http.StatusMethodNotAllowed {
			t.Errorf("%d %s", a.code, a.short())
		}
	})
}

// TestPatchNothing: a patch that changes nothing writes nothing.
func TestPatchNothing(t *testing.T) {
	s, w := startWire(t)
	w.mustPost(mapsPath, mapBody("c", "v"))
	w.patch(mapsPath+"/c?fieldManager=a", applyPatch, mapBody("c", "v")).want(t, 200)
	before := s.Revision()
	for kind, body := range map[string]string{
		mergePatch: `{"data":{"k":"v"}}`, strategicPatch: `{"data":{"k":"v"}}`, jsonPatch: `[{"op":"replace","path":"/data/k","value":"v"}]`,
	} {
		w.patch(mapsPath+"/c", kind, body).want(t, 200)
	}
	w.patch(mapsPath+"/c?fieldManager=a", applyPatch, mapBody("c", "v")).want(t, 200)
	w.send(http.MethodPut, mapsPath+"/c", mapBody("c", "v")).want(t, 200)
	if now := s.Revision(); now != before {
		t.Errorf("revision %d, was %d", now, before)
	}
}

// TestPatchRetries: patches without a resourceVersion do not conflict, however
// many come at once.
func TestPatchRetries(t *testing.T) {
	_, w := startWire(t)
	w.mustPost(mapsPath, mapBody("c", "v"))
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			for {
				a, err := w.try(http.MethodPatch, mapsPath+"/c", fmt.Sprintf(`{"data":{"k%d":"v"}}`, i), "Content-Type", mergePatch)
				// Five losses in a row are the client's business.
				if err == nil && a.code == http.StatusConflict {
					continue
				}
				if err != nil || a.code != 200 {
					t.Errorf("%v %d %s", err, a.code, a.short())
				}
				return
			}
		})
	}
	wg.Wait()
	if m := w.get(mapsPath + "/c").object(t); len(field(m, "data").(map[string]any)) != 25 {
		t.Errorf("%v", field(m, "data"))
	}
}
