// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"net/http"
	"strings"
	"testing"
)

// A pod's resources change by their subresource only, and within what its class of
// service allows.
func TestPodResize(t *testing.T) {
	_, w := startWire(t)
	const path, patchType = "/api/v1/namespaces/default/pods/p", "application/strategic-merge-patch+json"
	w.mustPost("/api/v1/namespaces/default/pods", `{"metadata":{"name":"p"},"spec":{
		"initContainers":[{"name":"i","image":"nginx"}],
		"containers":[{"name":"c","image":"nginx","resources":{"requests":{"cpu":"100m","memory":"64Mi"},"limits":{"memory":"128Mi"}}}]}}`)
	resize := func(body string) answer {
		t.Helper()
		return w.send(http.MethodPatch, path+"/resize", body, "Content-Type", patchType)
	}
	resources := func(r string) string { return `{"spec":{"containers":[{"name":"c","resources":` + r + `}]}}` }
	w.send(http.MethodPatch, path, resources(`{"requests":{"cpu":"200m"}}`), "Content-Type", patchType).want(t, 422, "pod updates may not change fields other than")
	resize(resources(`{"requests":{"cpu":"200m"}}`)).want(t, 200, `"cpu":"200m"`, `"memory":"64Mi"`, `"generation":2`, `"qosClass":"Burstable"`)
	// The same again is no change, and nothing else comes along.
	resize(resources(`{"requests":{"cpu":"200m"}}`)).want(t, 200, `"generation":2`)
	a := resize(`{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"httpd"}]}}`).want(t, 200, `"image":"nginx"`, `"generation":2`)
	if strings.Contains(a.body, `"a":"b"`) {
		t.Errorf("a label came along: %s", a.body)
	}
	for body, want := range map[string]string{
		resources(`{"requests":{"cpu":"9"},"limits":{"cpu":"1"}}`):                        "must be less than or equal to cpu limit",
		resources(`{"requests":{"memory":null}}`):                                         "", // what the limit says stays asked for
		resources(`{"limits":{"memory":null}}`):                                           "spec.containers[0].resources.limits: Forbidden: resource limits cannot be removed",
		resources(`{"limits":{"ephemeral-storage":"1Gi"}}`):                               "spec.containers[0].resources: Forbidden: only cpu and memory resources are mutable",
		`{"spec":{"initContainers":[{"name":"i","resources":{"requests":{"cpu":"1"}}}]}}`: "resources for non-sidecar init containers are immutable",
	} {
		if want == "" {
			resize(body).want(t, 200)
			continue
		}
		resize(body).want(t, 422, want)
	}
	// What a pod asks for may not give it another class.
	w.mustPost("/api/v1/namespaces/default/pods", `{"metadata":{"name":"plain"},"spec":{"containers":[{"name":"c","image":"nginx"}]}}`)
	w.send(http.MethodPatch, "/api/v1/namespaces/default/pods/plain/resize", resources(`{"requests":{"cpu":"1"}}`), "Content-Type", patchType).
		want(t, 422, `spec: Invalid value: \"BestEffort\": Pod QOS Class may not change as a result of resizing`)
}
