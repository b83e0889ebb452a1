// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// The files conform_*_test.go say what a client meets on the wire: they send
// requests as bytes and look at codes, headers and bodies. What is compared is
// what upstream's server answers.

// wire sends requests to one server.
type wire struct {
	t      testing.TB
	base   string
	client *http.Client
}

func newWire(tb testing.TB, s *testServer) wire {
	tb.Helper()
	config := s.ClientConfig("tester", "system:masters")
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(client.CloseIdleConnections)
	return wire{tb, config.Host, client}
}

// startWire is a server with the namespace default, and a wire to it.
func startWire(tb testing.TB) (*testServer, wire) {
	tb.Helper()
	s := startServer(tb, "")
	makeNamespace(tb, s, "default")
	return s, newWire(tb, s)
}

// answer is what the server said.
type answer struct {
	code   int
	header http.Header
	body   string
}

// send sends one request; headers are pairs of a name and a value. Without
// Content-Type, a body is sent as JSON.
func (w wire) send(method, path, body string, headers ...string) answer {
	w.t.Helper()
	a, err := w.try(method, path, body, headers...)
	if err != nil {
		w.t.Fatal(err)
	}
	return a
}

// try is send for requests that may fail to get an answer.
func (w wire) try(method, path, body string, headers ...string) (answer, error) {
	w.t.Helper()
	resp, err := w.open(method, path, body, headers...)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, string(data)}, err
}

// open sends one request and leaves the answer's body to the caller.
func (w wire) open(method, path, body string, headers ...string) (*http.Response, error) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), method, w.base+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	// Nothing is decompressed behind the test's back.
	req.Header.Set("Accept-Encoding", "identity")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return w.client.Do(req)
}

func (w wire) get(path string, headers ...string) answer {
	w.t.Helper()
	return w.send(http.MethodGet, path, "", headers...)
}

func (w wire) post(path, body string, headers ...string) answer {
	w.t.Helper()
	return w.send(http.MethodPost, path, body, headers...)
}

// mustPost creates an object.
func (w wire) mustPost(path, body string) map[string]any {
	w.t.Helper()
	return w.post(path, body).want(w.t, http.StatusCreated).object(w.t)
}

// want fails the test unless the answer has this code and every part in its body.
func (a answer) want(tb testing.TB, code int, parts ...string) answer {
	tb.Helper()
	if a.code != code {
		tb.Errorf("code %d, want %d: %s", a.code, code, a.short())
		return a
	}
	for _, p := range parts {
		if !strings.Contains(a.body, p) {
			tb.Errorf("answer lacks %q: %s", p, a.short())
		}
	}
	return a
}

func (a answer) short() string {
	if len(a.body) > 600 {
		return fmt.Sprintf("%q...", a.body[:600])
	}
	return fmt.Sprintf("%q", a.body)
}

// status decodes a failure. reason is what it must be.
func (a answer) status(tb testing.TB, code int, reason metav1.StatusReason, parts ...string) metav1.Status {
	tb.Helper()
	var s metav1.Status
	if err := json.Unmarshal([]byte(a.body), &s); err != nil {
		tb.Errorf("code %d, and no Status: %v in %s", a.code, err, a.short())
		return s
	}
	if a.code != code || s.Kind != "Status" || s.APIVersion != "v1" || s.Status != metav1.StatusFailure || int(s.Code) != code || s.Reason != reason {
		tb.Errorf("got code %d, %s; want %d %s", a.code, a.short(), code, reason)
	}
	for _, p := range parts {
		if !strings.Contains(s.Message, p) {
			tb.Errorf("message %q\n  lacks %q", s.Message, p)
		}
	}
	return s
}

// object decodes a JSON object.
func (a answer) object(tb testing.TB) map[string]any {
	tb.Helper()
	var m map[string]any
	decoder := json.NewDecoder(bytes.NewReader([]byte(a.body)))
	decoder.UseNumber()
	if err := decoder.Decode(&m); err != nil {
		tb.Fatalf("code %d, and no JSON object: %v in %s", a.code, err, a.short())
	}
	return m
}

// field walks a decoded object: "metadata", "labels", "a". Nil when it is not
// there; an int indexes a list.
func field(v any, path ...any) any {
	for _, p := range path {
		switch p := p.(type) {
		case string:
			m, ok := v.(map[string]any)
			if !ok {
				return nil
			}
			v = m[p]
		case int:
			l, ok := v.([]any)
			if !ok || p >= len(l) {
				return nil
			}
			v = l[p]
		}
	}
	return v
}

// text is field as a string, "" when it is not there.
func text(v any, path ...any) string {
	f := field(v, path...)
	if f == nil {
		return ""
	}
	return fmt.Sprint(f)
}

const (
	mapsPath     = "/api/v1/namespaces/default/configmaps"
	servicesPath = "/api/v1/namespaces/default/services"
	podsPath     = "/api/v1/namespaces/default/pods"
)

// mapBody is a ConfigMap with one value.
func mapBody(name, value string) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q},"data":{"k":%q}}`, name, value)
}

const webService = `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"selector":{"app":"web"},"ports":[{"port":80}]}}`
