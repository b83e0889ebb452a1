// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"encoding/json"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// sane fails the test unless an answer is one that a client can use: no failure of the
// server itself, and for a refusal a Status that says the same as the code. A server
// that panics answers 500.
func (a answer) sane(tb testing.TB, request string) {
	tb.Helper()
	// 504 is "Too large resource version", which a client may try again. An apply that is
	// not of the schema gets a 500 from upstream's field manager too.
	known := a.code == http.StatusGatewayTimeout || strings.Contains(a.body, "failed to create typed patch object")
	if a.code >= http.StatusInternalServerError && !known {
		tb.Fatalf("%s: code %d: %s", request, a.code, a.short())
	}
	if a.code < http.StatusBadRequest {
		return
	}
	var s metav1.Status
	if err := json.Unmarshal([]byte(a.body), &s); err != nil {
		tb.Fatalf("%s: code %d, and no Status: %s", request, a.code, a.short())
	}
	if s.Kind != "Status" || s.Status != metav1.StatusFailure || int(s.Code) != a.code || s.Message == "" {
		tb.Fatalf("%s: code %d, and the Status %s", request, a.code, a.short())
	}
}

// The kinds that are fuzzed: one with a spec, allocation and lists with merge keys, one
// with much validation, one of each other shape.
var fuzzPaths = []string{
	servicesPath, podsPath, mapsPath,
	"/apis/apps/v1/namespaces/default/deployments",
	"/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
	"/apis/batch/v1/namespaces/default/cronjobs",
	"/apis/networking.k8s.io/v1/namespaces/default/ingresses",
	"/apis/policy/v1/namespaces/default/poddisruptionbudgets",
	"/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers",
	"/apis/rbac.authorization.k8s.io/v1/clusterroles",
	"/api/v1/nodes",
	"/api/v1/namespaces/default/pods/nobody/eviction",
	"/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
}

// FuzzCreate posts any bytes. Whatever they are, the answer is a success whose object
// can be read, or a Status after which nothing is stored.
func FuzzCreate(f *testing.F) {
	seeds := []string{
		webService, mapBody("a", "b"), ``, `null`, `[]`, `{}`, `"x"`, `{`, "\x00", `{"kind":"List"}`,
		`{"metadata":{"name":"a","name":"b"}}`,
		`{"metadata":{"name":7},"spec":"x"}`,
		`{"metadata":{"generateName":"g-"},"spec":{"ports":[{"port":80},{"port":80}],"clusterIP":"10.96.0.300"}}`,
		`{"metadata":{"name":"s"},"spec":{"ports":[{"port":-1,"nodePort":99999999999999999999}]}}`,
		`{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c","image":"nginx","ports":[{}],"env":[{}],"resources":{"limits":{"cpu":"x"}}}]}}`,
		`{"metadata":{"name":"p","labels":null,"annotations":{"a":1}},"spec":{"containers":null,"volumes":[{}]}}`,
		`{"metadata":{"name":"d"},"spec":{"selector":{"matchExpressions":[{}]},"template":{}}}`,
		`{"metadata":{"name":"e"},"addressType":"IPv4","endpoints":[{"addresses":[""]}],"ports":[{}]}`,
		`{"metadata":{"name":"c"},"spec":{"schedule":"@@@","jobTemplate":{"spec":{"template":{}}}}}`,
		`{"metadata":{"name":"i"},"spec":{"rules":[{"http":{"paths":[{}]}}]}}`,
		`{"metadata":{"name":"h"},"spec":{"metrics":[{}],"behavior":{"scaleUp":{"policies":[{}]}}}}`,
		`{"metadata":{"name":"n"},"spec":{"podCIDR":"x","taints":[{}]}}`,
		`{"metadata":{"name":"x","managedFields":[{}],"ownerReferences":[{}],"finalizers":["\u0000"]}}`,
		"metadata:\n  name: y\nspec: *nothing\n", "metadata: {name: y, deletionTimestamp: never}",
	}
	types := []string{"application/json", "application/yaml", "application/vnd.kubernetes.protobuf", "application/apply-patch+yaml", "", "text/plain; ;", "application/cbor"}
	for i, body := range seeds {
		for j := range fuzzPaths {
			f.Add(uint8(j), uint8(0), []byte(body))
		}
		f.Add(uint8(i), uint8(i), []byte(body))
	}
	for i := range types {
		f.Add(uint8(0), uint8(i), []byte(webService))
	}
	f.Add(uint8(0), uint8(2), []byte("k8s\x00\x0a\x04\x0a\x00\x12\x00\x12\xff\xff\xff\xff\x0f"))
	_, w := startWire(f)
	f.Fuzz(func(t *testing.T, where, what uint8, body []byte) {
		w := wire{t, w.base, w.client}
		path := fuzzPaths[int(where)%len(fuzzPaths)]
		query := "?fieldValidation=" + []string{"", "Strict", "Warn", "Ignore", "x"}[int(what/16)%5]
		a, err := w.try(http.MethodPost, path+query, string(body), "Content-Type", types[int(what)%len(types)])
		if err != nil {
			t.Fatalf("no answer to %q: %v", body, err)
		}
		a.sane(t, path)
		if a.code != http.StatusCreated {
			return
		}
		name := text(a.object(t), "metadata", "name")
		if name == "" {
			return // a review
		}
		one := path + "/" + url.PathEscape(name)
		if strings.HasSuffix(path, "/eviction") {
			return
		}
		w.get(one).want(t, http.StatusOK)
		d := w.send(http.MethodDelete, one+"?gracePeriodSeconds=0", "")
		d.sane(t, one)
	})
}

// FuzzPatch sends any bytes as each type of patch to one Service, which stays one that
// can be read and has an address.
func FuzzPatch(f *testing.F) {
	patches := []string{
		"application/json-patch+json", "application/merge-patch+json",
		"application/strategic-merge-patch+json", "application/apply-patch+yaml",
	}
	for _, body := range []string{
		``, `null`, `{}`, `[]`, `[{}]`, `{"spec":null}`, `{"spec":{"ports":null}}`, `{"spec":{"type":"NodePort"}}`,
		`{"spec":{"ports":[{"$patch":"replace"}]}}`, `{"spec":{"$setElementOrder/ports":[{"port":9}]}}`,
		`{"$patch":"delete"}`, `{"metadata":{"$retainKeys":["name"],"labels":{"$patch":"x"}}}`, `{"metadata":null}`,
		`[{"op":"test","path":"/spec","value":1}]`, `[{"op":"remove","path":"/metadata"}]`, `[{"op":"move","from":"/spec","path":"/spec/ports/0"}]`,
		`[{"op":"replace","path":"","value":null}]`, `[{"op":"add","path":"/metadata/labels/-","value":{}}]`, `[{"op":"copy","from":"/","path":"/~2"}]`,
		`{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"ports":[{"port":80},{"port":80}]}}`,
		`{"apiVersion":"v1","kind":"Service","metadata":{"name":"web","managedFields":[{}]}}`, `{"apiVersion":"v1","kind":"Pod"}`,
	} {
		for i := range patches {
			f.Add(uint8(i), []byte(body))
		}
	}
	_, w := startWire(f)
	w.mustPost(servicesPath, webService)
	cidr := netip.MustParsePrefix("10.96.0.0/12")
	f.Fuzz(func(t *testing.T, what uint8, body []byte) {
		w := wire{t, w.base, w.client}
		one := servicesPath + "/web"
		a, err := w.try(http.MethodPatch, one+"?fieldManager=fuzz&force=true", string(body), "Content-Type", patches[int(what)%len(patches)])
		if err != nil {
			// force is for apply alone; the others refuse it, which is fine, too.
			t.Fatalf("no answer to %q: %v", body, err)
		}
		a.sane(t, one)
		if a.code == http.StatusUnprocessableEntity || a.code == http.StatusBadRequest {
			a, err = w.try(http.MethodPatch, one+"?fieldManager=fuzz", string(body), "Content-Type", patches[int(what)%len(patches)])
			if err != nil {
				t.Fatalf("no answer to %q: %v", body, err)
			}
			a.sane(t, one)
		}
		now := w.get(one).want(t, http.StatusOK).object(t)
		if text(now, "spec", "type") == "ExternalName" {
			return
		}
		if ip, err := netip.ParseAddr(text(now, "spec", "clusterIP")); err != nil || !cidr.Contains(ip) {
			t.Fatalf("%q left the Service with the cluster IP %q", body, text(now, "spec", "clusterIP"))
		}
	})
}

// FuzzListOptions sends any query to lists and watches.
func FuzzListOptions(f *testing.F) {
	for _, q := range []string{
		"limit=1", "limit=-1", "limit=x", "continue=x", "continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MSwic3RhcnQiOiJhIn0",
		"resourceVersion=0", "resourceVersion=-1", "resourceVersion=18446744073709551616", "resourceVersion=x", "resourceVersion=1&resourceVersionMatch=Exact",
		"resourceVersionMatch=x", "resourceVersionMatch=NotOlderThan", "labelSelector=a%3D%3Db", "labelSelector=%21%21a", "labelSelector=a+in+()", "labelSelector=,", "fieldSelector=a%3Db",
		"fieldSelector=metadata.name%3Da,metadata.name!%3Db", "fieldSelector=%3D", "watch=x", "watch=1&resourceVersion=999999999", "watch=1&sendInitialEvents=true",
		"watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&labelSelector=x", "watch=1&resourceVersion=1", "sendInitialEvents=true",
		"timeoutSeconds=0", "timeoutSeconds=-1", "timeoutSeconds=99999999999999", "pretty=x&pretty=y", "%zz", "a;b", "includeObject=x", "limit=1&limit=2", "shardSelector=x",
	} {
		f.Add(uint8(0), q)
		f.Add(uint8(4), q)
		f.Add(uint8(1), q)
	}
	_, w := startWire(f)
	w.mustPost(mapsPath, mapBody("a", "b"))
	f.Fuzz(func(t *testing.T, where uint8, query string) {
		w := wire{t, w.base, w.client}
		path := fuzzPaths[int(where/2)%len(fuzzPaths)]
		if strings.HasSuffix(path, "/eviction") || strings.HasSuffix(path, "reviews") {
			return // a path that nobody lists
		}
		headers := []string{"Accept", "application/json"}
		if where%2 == 1 {
			headers[1] = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
		}
		// Only a query that a client can send: net/http refuses the rest itself.
		if _, err := url.Parse("http://x/?" + query); err != nil || strings.ContainsAny(query, " #\r\n\t") {
			return // not a query
		}
		// A watch has no end of its own; one second is the shortest.
		full := path + "?" + query
		if strings.Contains(strings.ToLower(query), "watch") {
			full += "&timeoutSeconds=1"
		}
		w.client = &http.Client{Transport: w.client.Transport, Timeout: 30 * time.Second}
		a, err := w.try(http.MethodGet, full, "", headers...)
		if err != nil {
			if strings.Contains(err.Error(), "Client.Timeout") && strings.Contains(strings.ToLower(query), "watch") {
				return // a watch whose query named a longer time first
			}
			t.Fatalf("%s: %v", full, err)
		}
		if strings.Contains(a.header.Get("Content-Type"), "stream=watch") || strings.HasPrefix(a.body, `{"type"`) {
			return
		}
		a.sane(t, full)
	})
}
