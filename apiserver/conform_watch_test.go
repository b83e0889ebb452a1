// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/client-go/kubernetes/scheme"
)

// frame is one event of a watch.
type frame struct {
	Type   string
	Object map[string]any
}

// stream is an open watch.
type stream struct {
	t      testing.TB
	resp   *http.Response
	frames chan frame
	end    chan error // gets what ended it
}

func (w wire) watch(path string, headers ...string) *stream {
	w.t.Helper()
	resp, err := w.open(http.MethodGet, path, "", headers...)
	if err != nil {
		w.t.Fatal(err)
	}
	s := &stream{w.t, resp, make(chan frame, 100), make(chan error, 1)}
	if resp.StatusCode != http.StatusOK {
		body, err := io.ReadAll(resp.Body)
		w.t.Fatalf("watch %s: %d %s (%v)", path, resp.StatusCode, body, err)
	}
	done := make(chan struct{})
	w.t.Cleanup(func() { resp.Body.Close(); <-done })
	go func() {
		defer close(done)
		lines := bufio.NewReader(resp.Body)
		for {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				if len(bytes.TrimSpace(line)) > 0 {
					err = fmt.Errorf("half a line: %s", line)
				}
				s.end <- err
				return
			}
			var f frame
			if err := json.Unmarshal(line, &f); err != nil {
				s.end <- err
				return
			}
			s.frames <- f
		}
	}()
	return s
}

// next is the next frame; kind is what it must be, name whom it must be about.
func (s *stream) next(kind, name string) map[string]any {
	s.t.Helper()
	select {
	case f := <-s.frames:
		if f.Type != kind || text(f.Object, "metadata", "name") != name {
			s.t.Fatalf("got %s of %q, want %s of %q: %v", f.Type, text(f.Object, "metadata", "name"), kind, name, f.Object)
		}
		return f.Object
	case err := <-s.end:
		s.t.Fatalf("the watch ended (%v), want %s of %q", err, kind, name)
	case <-time.After(waitTime):
		s.t.Fatalf("no frame, want %s of %q", kind, name)
	}
	return nil
}

// ended waits for the end of the watch, which must be a clean one, with no more
// frames than some of the allowed types.
func (s *stream) ended(allowed ...string) {
	s.t.Helper()
	for {
		select {
		case f := <-s.frames:
			if !slices.Contains(allowed, f.Type) {
				s.t.Fatalf("got %s, want the end", f.Type)
			}
			continue
		case err := <-s.end:
			if !errors.Is(err, io.EOF) {
				s.t.Fatalf("ended with %v", err)
			}
		case <-time.After(waitTime):
			s.t.Fatal("the watch goes on")
		}
		return
	}
}

// TestWatchFrames follows one object from before its birth to its death.
func TestWatchFrames(t *testing.T) {
	_, w := startWire(t)
	start := text(w.get(mapsPath).object(t), "metadata", "resourceVersion")
	s := w.watch(mapsPath + "?watch=true&resourceVersion=" + start)
	if got := s.resp.Header.Get("Content-Type"); got != jsonType {
		t.Errorf("Content-Type %q", got)
	}
	created := w.mustPost(mapsPath, mapBody("c", "1"))
	w.patch(mapsPath+"/c", mergePatch, `{"data":{"k":"2"}}`).want(t, 200)
	w.patch(mapsPath+"/c", mergePatch, `{"data":{"k":"2"}}`).want(t, 200) // nothing
	w.patch(mapsPath+"/c", mergePatch, `{"metadata":{"finalizers":["kplab.io/test"]}}`).want(t, 200)
	w.send(http.MethodDelete, mapsPath+"/c", "").want(t, 200)
	w.patch(mapsPath+"/c", mergePatch, `{"metadata":{"finalizers":null}}`).want(t, 200)
	m := s.next("ADDED", "c")
	if revisionOf(t, m) != revisionOf(t, created) || text(m, "kind") != "ConfigMap" || text(m, "apiVersion") != "v1" {
		t.Errorf("%v", m)
	}
	last := revisionOf(t, m)
	for _, want := range []string{"value", "finalizer", "deletionTimestamp"} {
		m = s.next("MODIFIED", "c")
		if rev := revisionOf(t, m); rev <= last {
			t.Errorf("%s: revision %d after %d", want, rev, last)
		} else {
			last = rev
		}
	}
	if text(m, "metadata", "deletionTimestamp") == "" {
		t.Errorf("%v", m)
	}
	m = s.next("DELETED", "c")
	if revisionOf(t, m) <= last || text(m, "data", "k") != "2" {
		t.Errorf("%v", m)
	}
}

// TestWatchStart begins watches at every kind of revision.
func TestWatchStart(t *testing.T) {
	server, w := startWire(t)
	one := revisionOf(t, w.mustPost(mapsPath, mapBody("c1", "1")))
	w.mustPost(mapsPath, mapBody("c2", "1"))
	for _, rev := range []string{"", "&resourceVersion=", "&resourceVersion=0"} {
		t.Run("now"+rev, func(t *testing.T) {
			w := w
			w.t = t
			s := w.watch(mapsPath + "?watch=1" + rev)
			s.next("ADDED", "c1")
			s.next("ADDED", "c2")
		})
	}
	t.Run("past", func(t *testing.T) {
		w := w
		w.t = t
		w.watch(fmt.Sprintf("%s?watch=1&resourceVersion=%d", mapsPath, one)).next("ADDED", "c2")
	})
	t.Run("one object", func(t *testing.T) {
		w := w
		w.t = t
		s := w.watch(mapsPath + "?watch=1&resourceVersion=0&fieldSelector=metadata.name%3Dc2")
		s.next("ADDED", "c2")
		w.patch(mapsPath+"/c1", mergePatch, `{"data":{"k":"2"}}`).want(t, 200)
		w.patch(mapsPath+"/c2", mergePatch, `{"data":{"k":"2"}}`).want(t, 200)
		s.next("MODIFIED", "c2")
	})
	t.Run("old path", func(t *testing.T) {
		w := w
		w.t = t
		w.watch("/api/v1/watch/namespaces/default/configmaps/c1").next("ADDED", "c1")
	})
	t.Run("too old", func(t *testing.T) {
		w := w
		w.t = t
		// A server that has started again has no events in memory, and these are
		// gone from the disk.
		if err := server.db.Compact(t.Context(), server.Revision()); err != nil {
			t.Fatal(err)
		}
		server.stop()
		again := startServer(t, server.dir)
		w = newWire(t, again)
		s := w.watch(mapsPath + "?watch=1&resourceVersion=1")
		select {
		case f := <-s.frames:
			if f.Type != "ERROR" || text(f.Object, "kind") != "Status" || text(f.Object, "code") != "410" || text(f.Object, "reason") != "Expired" ||
				!strings.HasPrefix(text(f.Object, "message"), "too old resource version: 1 (") {
				t.Errorf("%+v", f)
			}
		case <-time.After(waitTime):
			t.Fatal("no frame")
		}
		s.ended()
	})
}

// TestWatchRefused asks for watches that cannot be.
func TestWatchRefused(t *testing.T) {
	_, w := startWire(t)
	const initial = "?watch=1&sendInitialEvents=true"
	w.get(mapsPath+initial+"&allowWatchBookmarks=true").status(t, 422, metav1.StatusReasonInvalid,
		"resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan")
	w.get(mapsPath+initial+"&allowWatchBookmarks=true&resourceVersionMatch=Exact").status(t, 422, metav1.StatusReasonInvalid, "resourceVersionMatch")
	w.get(mapsPath+"?watch=1&resourceVersionMatch=NotOlderThan").status(t, 422, metav1.StatusReasonInvalid,
		"resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided")
	// As with one object, upstream's generic code has no better answer.
	w.get(mapsPath+"?watch=1&resourceVersion=x").status(t, 500, "", `resourceVersion: Invalid value: "x"`)
	w.get(mapsPath+"?watch=1&fieldSelector=data.k%3Dv").status(t, 400, metav1.StatusReasonBadRequest, "field label not supported: data.k")
	w.get(mapsPath+"?watch=1", "Accept", "text/html").status(t, 406, metav1.StatusReasonNotAcceptable)
}

// TestWatchListFrames: the initial events, their end, and what comes after.
func TestWatchListFrames(t *testing.T) {
	server, w := startWire(t)
	w.mustPost(mapsPath, mapBody("c1", "1"))
	w.mustPost("/api/v1/namespaces/default/secrets", `{"metadata":{"name":"s"}}`)
	const query = "?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&resourceVersion="
	for _, rev := range []string{"", "0", fmt.Sprint(server.Revision())} {
		t.Run("from "+rev, func(t *testing.T) {
			w := w
			w.t = t
			s := w.watch(mapsPath + query + rev)
			s.next("ADDED", "c1")
			mark := s.next("BOOKMARK", "")
			if text(mark, "kind") != "ConfigMap" || text(mark, "metadata", "annotations", "k8s.io/initial-events-end") != "true" || field(mark, "data") != nil || revisionOf(t, mark) == 0 {
				t.Errorf("%v", mark)
			}
			name := "new" + rev
			w.mustPost(mapsPath, mapBody(name, "1"))
			s.next("ADDED", name)
			w.send(http.MethodDelete, mapsPath+"/"+name, "").want(t, 200)
			s.next("DELETED", name)
		})
	}
	t.Run("nothing there", func(t *testing.T) {
		w := w
		w.t = t
		w.watch(servicesPath+query).next("BOOKMARK", "")
	})
	t.Run("selected", func(t *testing.T) {
		w := w
		w.t = t
		s := w.watch(mapsPath + query + "&fieldSelector=metadata.name%3Dnope")
		s.next("BOOKMARK", "")
	})
	t.Run("no events wanted", func(t *testing.T) {
		w := w
		w.t = t
		s := w.watch(mapsPath + "?watch=1&sendInitialEvents=false&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true")
		w.mustPost(mapsPath, mapBody("late", "1"))
		s.next("ADDED", "late")
	})
}

// TestWatchTables: the columns come once.
func TestWatchTables(t *testing.T) {
	_, w := startWire(t)
	w.mustPost(servicesPath, webService)
	t.Run("Q10", func(t *testing.T) {
		s := w.watch(servicesPath+"?watch=1&resourceVersion=0", "Accept", tableType+","+jsonType)
		for i, kind := range []string{"ADDED", "MODIFIED"} {
			m := s.next(kind, "")
			rows, _ := field(m, "rows").([]any)
			if columns := field(m, "columnDefinitions"); text(m, "kind") != "Table" || (columns != nil) != (i == 0) || len(rows) != 1 ||
				text(rows[0], "cells", 0) != "web" || text(rows[0], "object", "kind") != "PartialObjectMetadata" {
				t.Errorf("frame %d: %v", i, m)
			}
			w.patch(servicesPath+"/web", mergePatch, fmt.Sprintf(`{"metadata":{"labels":{"n":"%d"}}}`, i)).want(t, 200)
		}
	})
}

// TestWatchProtobuf reads frames as a typed client does.
func TestWatchProtobuf(t *testing.T) {
	_, w := startWire(t)
	w.mustPost(mapsPath, mapBody("c", "1"))
	resp, err := w.open(http.MethodGet, mapsPath+"?watch=1", "", "Accept", protoType)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got := resp.Header.Get("Content-Type"); got != protoType+";stream=watch" {
		t.Errorf("Content-Type %q", got)
	}
	raw := protobuf.NewRawSerializer(scheme.Scheme, scheme.Scheme)
	frames := streaming.NewDecoder(protobuf.LengthDelimitedFramer.NewFrameReader(resp.Body), raw)
	var e metav1.WatchEvent
	if _, _, err := frames.Decode(nil, &e); err != nil {
		t.Fatal(err)
	}
	if c := decode[*corev1.ConfigMap](t, string(e.Object.Raw)); e.Type != "ADDED" || c.Name != "c" {
		t.Errorf("%s %+v", e.Type, c)
	}
}

// TestWatchTimeout: the server ends a watch when the client wants it, cleanly. A
// client that may have bookmarks learns before that how far it has come, although
// nothing of what it watches has changed.
func TestWatchTimeout(t *testing.T) {
	server, w := startWire(t)
	w.mustPost(mapsPath, mapBody("c", "1"))
	from := server.Revision()
	w.watch(fmt.Sprintf("%s?watch=1&timeoutSeconds=1&resourceVersion=%d", mapsPath, from)).ended()
	query := fmt.Sprintf("?watch=1&timeoutSeconds=4&resourceVersion=%d&fieldSelector=metadata.name%%3Dother", from)
	without, with := w.watch(mapsPath+query), w.watch(mapsPath+query+"&allowWatchBookmarks=true")
	changed := w.patch(mapsPath+"/c", mergePatch, `{"data":{"k":"2"}}`).want(t, 200).object(t)
	mark := with.next("BOOKMARK", "")
	if text(mark, "kind") != "ConfigMap" || revisionOf(t, mark) != revisionOf(t, changed) || field(mark, "metadata", "annotations") != nil {
		t.Errorf("%v", mark)
	}
	with.ended("BOOKMARK")
	without.ended()
}
