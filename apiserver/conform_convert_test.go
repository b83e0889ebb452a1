// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
)

// converting has two versions, between which a Service converts.
const converting = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: rafts.harbour.example.com}
spec:
  group: harbour.example.com
  scope: Namespaced
  names: {plural: rafts, singular: raft, kind: Raft}
  conversion:
    strategy: Webhook
    webhook:
      conversionReviewVersions: [v1]
      clientConfig: {service: {namespace: default, name: converter, path: /convert}, caBundle: CA}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {crew: {type: integer}}}}}}
  - name: v2
    served: true
    storage: false
    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {hands: {type: integer}}}}}}
`

// convert answers a ConversionReview: v1 says crew where v2 says hands.
func convert(w http.ResponseWriter, r *http.Request) {
	var review map[string]any
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil || r.URL.Path != "/convert" {
		http.Error(w, fmt.Sprint(err), http.StatusBadRequest)
		return
	}
	want := text(review, "request", "desiredAPIVersion")
	objects, _ := field(review, "request", "objects").([]any)
	for _, o := range objects {
		obj, _ := o.(map[string]any)
		spec, _ := obj["spec"].(map[string]any)
		from, to := "crew", "hands"
		if strings.HasSuffix(want, "/v1") {
			from, to = to, from
		}
		spec[to] = spec[from]
		delete(spec, from)
		obj["apiVersion"] = want
	}
	review["response"] = map[string]any{"uid": field(review, "request", "uid"), "convertedObjects": objects, "result": map[string]any{"status": "Success"}}
	delete(review, "request")
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(review)
}

// TestCustomResourceConversion: a webhook behind a Service is called at the Service's
// address, from where the API server is in the cluster.
func TestCustomResourceConversion(t *testing.T) {
	var webhook net.Listener
	var dialed string
	s := startServer(t, "", func(c *Config) {
		c.KubeletDial = func(ctx context.Context, _, addr string) (net.Conn, error) {
			dialed = addr
			return new(net.Dialer).DialContext(ctx, "tcp", webhook.Addr().String())
		}
	})
	makeNamespace(t, s, "default")
	w := newWire(t, s)
	cert, err := s.IssueServing("converter", []string{"converter.default.svc"}, []netip.Addr{netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		t.Fatal(err)
	}
	if webhook, err = tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}); err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(convert), ReadHeaderTimeout: waitTime}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(webhook); !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("webhook: %v", err)
		}
	}()
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		<-done
	})
	w.define(strings.Replace(converting, "CA}", base64.StdEncoding.EncodeToString(s.ServingAuthority())+"}", 1), "harbour.example.com/v2")
	const v1, v2 = "/apis/harbour.example.com/v1/namespaces/default/rafts", "/apis/harbour.example.com/v2/namespaces/default/rafts"
	w.post(v1, `{"apiVersion":"harbour.example.com/v1","kind":"Raft","metadata":{"name":"a"},"spec":{"crew":3}}`).want(t, 201)
	// Without the Service, what is asked for in another version cannot be had.
	w.get(v2+"/a").want(t, 500, "conversion webhook for harbour.example.com/v1, Kind=Raft failed")
	svc := w.mustPost(servicesPath, `{"apiVersion":"v1","kind":"Service","metadata":{"name":"converter"},"spec":{"ports":[{"port":443}]}}`)
	w.get(v2+"/a").want(t, 200, `"apiVersion":"harbour.example.com/v2"`, `"hands":3`)
	if want := net.JoinHostPort(text(svc, "spec", "clusterIP"), "443"); dialed != want {
		t.Errorf("dialed %s, want %s", dialed, want)
	}
	w.post(v2, `{"apiVersion":"harbour.example.com/v2","kind":"Raft","metadata":{"name":"b"},"spec":{"hands":5}}`).want(t, 201, `"hands":5`)
	if m := w.get(v1+"/b").want(t, 200, `"crew":5`).object(t); field(m, "spec", "hands") != nil {
		t.Errorf("%v", m)
	}
	w.get(v2).want(t, 200, `"hands":3`, `"hands":5`)
}
