// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// itemNames are the names of a list's items.
func itemNames(m map[string]any) string {
	var out []string
	items, _ := field(m, "items").([]any)
	for _, item := range items {
		out = append(out, text(item, "metadata", "name"))
	}
	return strings.Join(out, " ")
}

// revisionOf is the resourceVersion of an object or a list.
func revisionOf(tb testing.TB, m map[string]any) uint64 {
	tb.Helper()
	rev, err := strconv.ParseUint(text(m, "metadata", "resourceVersion"), 10, 64)
	if err != nil {
		tb.Fatalf("resourceVersion: %v in %v", err, field(m, "metadata"))
	}
	return rev
}

// TestListForm looks at what a list is made of.
func TestListForm(t *testing.T) {
	s, w := startWire(t)
	w.get(mapsPath).want(t, 200, `"kind":"ConfigMapList","apiVersion":"v1"`, `"items":[]`)
	makeNamespace(t, s, "a")
	w.mustPost(mapsPath, mapBody("b", "1"))
	w.mustPost("/api/v1/namespaces/a/configmaps", mapBody("z", "1"))
	w.mustPost(mapsPath, mapBody("a", "1"))
	a := w.get("/api/v1/configmaps").want(t, 200)
	m := a.object(t)
	// Sorted by namespace, then by name.
	if got := itemNames(m); got != "z a b" {
		t.Errorf("items %q", got)
	}
	if kind := field(m, "items", 0, "kind"); kind != nil {
		t.Errorf("an item of a typed list names its kind, %v", kind)
	}
	if revisionOf(t, m) < revisionOf(t, field(m, "items", 1).(map[string]any)) {
		t.Errorf("the list is older than its items: %v", m)
	}
}

// TestListPages reads a list in pages while it changes.
func TestListPages(t *testing.T) { bothWays(t, listPages) }

func listPages(t *testing.T, s *testServer) {
	t.Helper()
	makeNamespace(t, s, "default")
	w := newWire(t, s)
	for i := range 5 {
		w.post(mapsPath, strings.Replace(mapBody(fmt.Sprint("c", i), "1"), `"name"`, `"labels":{"l":"1"},"name"`, 1)).want(t, 201)
	}
	first := w.get(mapsPath+"?limit=2").want(t, 200).object(t)
	token := text(first, "metadata", "continue")
	if itemNames(first) != "c0 c1" || token == "" || text(first, "metadata", "remainingItemCount") != "3" {
		t.Fatalf("%s %v", itemNames(first), field(first, "metadata"))
	}
	next := func(token, more string) answer { return w.get(mapsPath + "?continue=" + url.QueryEscape(token) + more) }
	w.mustPost(mapsPath, mapBody("c9", "1"))
	w.send(http.MethodDelete, mapsPath+"/c2", "").want(t, 200)
	t.Run("consistent", func(t *testing.T) {
		m := next(token, "&limit=2").want(t, 200).object(t)
		if itemNames(m) != "c2 c3" || revisionOf(t, m) != revisionOf(t, first) || text(m, "metadata", "remainingItemCount") != "1" {
			t.Errorf("%s %v", itemNames(m), field(m, "metadata"))
		}
		m = next(text(m, "metadata", "continue"), "&limit=2").want(t, 200).object(t)
		if itemNames(m) != "c4" || field(m, "metadata", "continue") != nil || field(m, "metadata", "remainingItemCount") != nil {
			t.Errorf("%s %v", itemNames(m), field(m, "metadata"))
		}
		// Without a limit, the rest.
		if m := next(token, "").want(t, 200).object(t); itemNames(m) != "c2 c3 c4" {
			t.Errorf("%s", itemNames(m))
		}
	})
	t.Run("selector", func(t *testing.T) {
		m := w.get(mapsPath+"?limit=2&labelSelector=l").want(t, 200).object(t)
		if field(m, "metadata", "remainingItemCount") != nil || text(m, "metadata", "continue") == "" {
			t.Errorf("%v", field(m, "metadata"))
		}
	})
	t.Run("refused", func(t *testing.T) {
		next(token, "&resourceVersion=5").status(t, 400, metav1.StatusReasonBadRequest, "specifying resource version is not allowed when using continue")
		next(token, "&resourceVersionMatch=Exact").status(t, 422, metav1.StatusReasonInvalid, "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden when continue is provided")
		next("nonsense", "").status(t, 400, metav1.StatusReasonBadRequest, "continue key is not valid")
		w.get(mapsPath+"?limit=x").status(t, 400, metav1.StatusReasonBadRequest, "")
		w.get(mapsPath+"?limit=-1").want(t, 200)
	})
	t.Run("expired", func(t *testing.T) {
		if err := s.db.Compact(t.Context(), s.Revision()); err != nil {
			t.Fatal(err)
		}
		a := next(token, "&limit=2")
		if a.code == 200 && !s.cfg.noWatchCache {
			return // the cache keeps lists of the past for a while
		}
		st := a.status(t, 410, metav1.StatusReasonExpired, "The provided continue parameter is too old to display a consistent list result")
		if st.Continue == "" {
			t.Fatalf("no token to go on with: %s", a.short())
		}
		// What comes then is of another time.
		m := next(st.Continue, "&limit=9").want(t, 200).object(t)
		if itemNames(m) != "c3 c4 c9" {
			t.Errorf("%s", itemNames(m))
		}
	})
}

// TestListRevision asks for lists of a time.
func TestListRevision(t *testing.T) { bothWays(t, listRevision) }

func listRevision(t *testing.T, s *testServer) {
	t.Helper()
	makeNamespace(t, s, "default")
	w := newWire(t, s)
	one := revisionOf(t, w.mustPost(mapsPath, mapBody("c1", "1")))
	two := revisionOf(t, w.mustPost(mapsPath, mapBody("c2", "1")))
	three := revisionOf(t, w.mustPost(mapsPath, mapBody("c3", "1")))
	get := func(rev any, match string) answer {
		path := fmt.Sprintf("%s?resourceVersion=%v", mapsPath, rev)
		if match != "" {
			path += "&resourceVersionMatch=" + match
		}
		return w.get(path)
	}
	for _, tc := range []struct {
		name  string
		rev   any
		match string
		want  string
	}{
		{"unset", "", "", "c1 c2 c3"},
		{"zero", 0, "", "c1 c2 c3"},
		{"zero, not older", 0, "NotOlderThan", "c1 c2 c3"},
		{"at least", two, "", "c1 c2 c3"},
		{"not older", two, "NotOlderThan", "c1 c2 c3"},
		{"exact", two, "Exact", "c1 c2"},
		{"exact first", one, "Exact", "c1"},
		{"exact now", three, "Exact", "c1 c2 c3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := get(tc.rev, tc.match).want(t, 200).object(t)
			if itemNames(m) != tc.want {
				t.Errorf("%q, want %q", itemNames(m), tc.want)
			}
			if tc.match == "Exact" && text(m, "metadata", "resourceVersion") != fmt.Sprint(tc.rev) {
				t.Errorf("revision %v", field(m, "metadata"))
			}
		})
	}
	t.Run("limit of a time", func(t *testing.T) {
		m := w.get(fmt.Sprintf("%s?resourceVersion=%d&resourceVersionMatch=Exact&limit=1", mapsPath, two)).want(t, 200).object(t)
		if itemNames(m) != "c1" || text(m, "metadata", "remainingItemCount") != "1" {
			t.Errorf("%s %v", itemNames(m), field(m, "metadata"))
		}
	})
	t.Run("refused", func(t *testing.T) {
		get("x", "").status(t, 400, metav1.StatusReasonBadRequest, "invalid resource version")
		get("", "Exact").status(t, 422, metav1.StatusReasonInvalid, "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided")
		get(0, "Exact").status(t, 422, metav1.StatusReasonInvalid, `resourceVersionMatch: Forbidden: resourceVersionMatch "exact" is forbidden for resourceVersion "0"`)
		get(two, "Roughly").status(t, 422, metav1.StatusReasonInvalid, `resourceVersionMatch: Unsupported value: "Roughly": supported values: "Exact", "NotOlderThan"`)
		w.get(mapsPath+"?sendInitialEvents=true").status(t, 422, metav1.StatusReasonInvalid, "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for list")
	})
	t.Run("future", func(t *testing.T) {
		for _, match := range []string{"NotOlderThan", "Exact"} {
			a := get(three+1000, match)
			st := a.status(t, 504, metav1.StatusReasonTimeout, "Too large resource version")
			// Only the cache knows how long it may take to get there; exact lists are the
			// store's.
			cached := match == "NotOlderThan" && !s.cfg.noWatchCache
			if st.Details == nil || st.Details.RetryAfterSeconds == 0 && cached || len(st.Details.Causes) == 0 || st.Details.Causes[0].Type != metav1.CauseTypeResourceVersionTooLarge {
				t.Errorf("%s: details %+v", match, st.Details)
			}
		}
	})
	t.Run("one object", func(t *testing.T) {
		for _, rev := range []string{"", "?resourceVersion=0", fmt.Sprint("?resourceVersion=", one)} {
			w.get(mapsPath+"/c1"+rev).want(t, 200)
		}
		a := w.get(mapsPath + "/c1?resourceVersion=x")
		if s.cfg.noWatchCache {
			a.status(t, 400, metav1.StatusReasonBadRequest, "invalid resource version")
		} else {
			// The cache's answer for one object is upstream's, and no better there.
			a.status(t, 500, "", `resourceVersion: Invalid value: "x"`)
		}
	})
	t.Run("past", func(t *testing.T) {
		if err := s.db.Compact(t.Context(), s.Revision()); err != nil {
			t.Fatal(err)
		}
		// The cache may still have it; the store has not.
		if a := get(one, "Exact"); a.code != 200 || s.cfg.noWatchCache {
			a.status(t, 410, metav1.StatusReasonExpired, "too old")
		}
	})
}

// TestListSelectors chooses by labels and by fields.
func TestListSelectors(t *testing.T) {
	_, w := startWire(t)
	for name, labels := range map[string]string{"a": `{"env":"prod","tier":"web"}`, "b": `{"env":"dev"}`, "c": `{"tier":"db"}`} {
		w.post(mapsPath, `{"metadata":{"name":"`+name+`","labels":`+labels+`}}`).want(t, 201)
	}
	for selector, want := range map[string]string{
		"env=prod": "a", "env==prod": "a", "env!=prod": "b c", "env in (prod,dev)": "a b", "env notin (prod)": "b c", "env": "a b", "!env": "c",
		"env,tier": "a", "env=prod,tier=db": "", "": "a b c",
	} {
		m := w.get(mapsPath+"?labelSelector="+url.QueryEscape(selector)).want(t, 200).object(t)
		if itemNames(m) != want {
			t.Errorf("%q: %q, want %q", selector, itemNames(m), want)
		}
	}
	for selector, want := range map[string]string{
		"metadata.name=a": "a", "metadata.name!=a": "b c", "metadata.namespace=default": "a b c", "metadata.namespace=other": "",
		"metadata.name=a,metadata.name=b": "",
	} {
		m := w.get("/api/v1/configmaps?fieldSelector="+url.QueryEscape(selector)).want(t, 200).object(t)
		if itemNames(m) != want {
			t.Errorf("%q: %q, want %q", selector, itemNames(m), want)
		}
	}
	w.get(mapsPath+"?labelSelector="+url.QueryEscape("env in prod")).status(t, 400, metav1.StatusReasonBadRequest, "unable to parse requirement")
	w.get(mapsPath+"?labelSelector="+url.QueryEscape("a b")).status(t, 400, metav1.StatusReasonBadRequest, "")
	w.get(mapsPath+"?fieldSelector=data.k%3Dv").status(t, 400, metav1.StatusReasonBadRequest, "field label not supported: data.k")
	w.get("/api/v1/namespaces?fieldSelector=metadata.namespace%3Dx").status(t, 400, metav1.StatusReasonBadRequest, "field label not supported: metadata.namespace")
	w.get(mapsPath+"?fieldSelector=nonsense").status(t, 400, metav1.StatusReasonBadRequest, "invalid selector: 'nonsense'; can't understand 'nonsense'")
}
