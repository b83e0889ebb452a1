// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

const (
	jsonType  = "application/json"
	yamlType  = "application/yaml"
	protoType = "application/vnd.kubernetes.protobuf"
	tableType = "application/json;as=Table;v=v1;g=meta.k8s.io"
)

// encode is obj as protobuf, as a typed client sends it.
func encode(tb testing.TB, obj runtime.Object) string {
	tb.Helper()
	info, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), protoType)
	if !ok {
		tb.Fatal("no protobuf")
	}
	data, err := runtime.Encode(scheme.Codecs.EncoderForVersion(info.Serializer, corev1.SchemeGroupVersion), obj)
	if err != nil {
		tb.Fatal(err)
	}
	return string(data)
}

func decode[T runtime.Object](tb testing.TB, body string) T {
	tb.Helper()
	obj, _, err := scheme.Codecs.UniversalDeserializer().Decode([]byte(body), nil, nil)
	if err != nil {
		tb.Fatal(err)
	}
	out, ok := obj.(T)
	if !ok {
		tb.Fatalf("got a %T", obj)
	}
	return out
}

// TestContentOut asks for answers in every form.
func TestContentOut(t *testing.T) {
	_, w := startWire(t)
	w.mustPost(servicesPath, webService)
	get := func(accept string) answer { return w.get(servicesPath+"/web", "Accept", accept) }
	contentType := func(t *testing.T, a answer, want string) {
		t.Helper()
		if got := a.header.Get("Content-Type"); got != want {
			t.Errorf("Content-Type %q, want %q", got, want)
		}
	}
	t.Run("json", func(t *testing.T) {
		for _, accept := range []string{"", "*/*", jsonType, "text/html, " + jsonType + ";q=0.1", protoType + ";as=Nonsense," + jsonType} {
			a := get(accept).want(t, 200, `"kind":"Service","apiVersion":"v1"`)
			contentType(t, a, jsonType)
		}
	})
	t.Run("pretty", func(t *testing.T) {
		w.get(servicesPath+"/web?pretty=true").want(t, 200, "{\n  \"kind\": \"Service\",\n")
	})
	t.Run("yaml", func(t *testing.T) {
		a := get(yamlType).want(t, 200, "kind: Service\n")
		contentType(t, a, yamlType)
		var s corev1.Service
		if err := yaml.Unmarshal([]byte(a.body), &s); err != nil || s.Name != "web" {
			t.Errorf("%v, %+v", err, s)
		}
	})
	t.Run("protobuf", func(t *testing.T) {
		a := get(protoType+","+jsonType).want(t, 200)
		contentType(t, a, protoType)
		if s := decode[*corev1.Service](t, a.body); s.Spec.Ports[0].Port != 80 {
			t.Errorf("%+v", s)
		}
		list := w.get("/api/v1/services", "Accept", protoType)
		if l := decode[*corev1.ServiceList](t, list.body); len(l.Items) != 1 {
			t.Errorf("%+v", l)
		}
	})
	t.Run("none that the server has", func(t *testing.T) {
		for _, accept := range []string{"text/html", "application/json;as=Table;v=v9;g=meta.k8s.io", "application/json;as=Thing;v=v1;g=meta.k8s.io"} {
			get(accept).status(t, http.StatusNotAcceptable, metav1.StatusReasonNotAcceptable, "application/json, application/yaml, application/vnd.kubernetes.protobuf")
		}
	})
	t.Run("errors are negotiated, too", func(t *testing.T) {
		a := w.get(servicesPath+"/nope", "Accept", protoType)
		if s := decode[*metav1.Status](t, a.body); a.code != 404 || s.Reason != metav1.StatusReasonNotFound || s.Message != `services "nope" not found` {
			t.Errorf("%d %+v", a.code, s)
		}
		// A table of an error is the error.
		w.get(servicesPath+"/nope", "Accept", tableType+","+jsonType).status(t, 404, metav1.StatusReasonNotFound)
	})
	t.Run("compressed", func(t *testing.T) {
		w.mustPost(mapsPath, mapBody("big", strings.Repeat("x", 200<<10)))
		a := w.get(mapsPath+"/big", "Accept-Encoding", "gzip").want(t, 200)
		if a.header.Get("Content-Encoding") != "gzip" || len(a.body) > 100<<10 {
			t.Fatalf("%d bytes, encoding %q", len(a.body), a.header.Get("Content-Encoding"))
		}
		r, err := gzip.NewReader(strings.NewReader(a.body))
		if err != nil {
			t.Fatal(err)
		}
		plain, err := io.ReadAll(r)
		if err != nil || len(plain) < 200<<10 {
			t.Errorf("%d bytes, %v", len(plain), err)
		}
		if small := w.get(servicesPath+"/web", "Accept-Encoding", "gzip"); small.header.Get("Content-Encoding") != "" {
			t.Error("a small answer is compressed")
		}
	})
	t.Run("unknown parameters of discovery", func(t *testing.T) {
		const v2 = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
		a := w.get("/apis", "Accept", v2+";profile=nopeer,"+v2+","+jsonType).want(t, 200, `"kind":"APIGroupDiscoveryList"`)
		if got := a.header.Get("Content-Type"); !strings.HasPrefix(got, v2) {
			t.Errorf("Content-Type %q", got)
		}
		if a.header.Get("ETag") == "" {
			t.Error("no ETag")
		}
		w.get("/apis", "Accept", v2, "If-None-Match", a.header.Get("ETag")).want(t, http.StatusNotModified)
	})
}

// TestContentTables asks for tables and for metadata.
func TestContentTables(t *testing.T) {
	_, w := startWire(t)
	w.mustPost(servicesPath, webService)
	w.mustPost(servicesPath, strings.Replace(webService, `"web"},`, `"other"},`, 1))
	t.Run("table", func(t *testing.T) {
		for _, accept := range []string{tableType, "application/json;as=Table;v=v1beta1;g=meta.k8s.io", tableType + "," + jsonType} {
			m := w.get(servicesPath, "Accept", accept).want(t, 200).object(t)
			version := "meta.k8s.io/v1"
			if strings.Contains(accept, "v1beta1") {
				version += "beta1"
			}
			if text(m, "kind") != "Table" || text(m, "apiVersion") != version || len(field(m, "rows").([]any)) != 2 || text(m, "metadata", "resourceVersion") == "" {
				t.Errorf("%s: %v", accept, m)
			}
			columns, cells := field(m, "columnDefinitions").([]any), field(m, "rows", 0, "cells").([]any)
			if len(columns) != 7 || len(cells) != 7 || text(columns[6], "name") != "Selector" || text(columns[6], "priority") != "1" || text(cells[6]) == "" {
				t.Errorf("%v\n%v", columns, cells)
			}
		}
	})
	t.Run("yaml table", func(t *testing.T) {
		w.get(servicesPath, "Accept", "application/yaml;as=Table;v=v1;g=meta.k8s.io").want(t, 200, "kind: Table\n")
	})
	for include, kind := range map[string]string{"": "PartialObjectMetadata", "Metadata": "PartialObjectMetadata", "Object": "Service", "None": ""} {
		t.Run("includeObject="+include, func(t *testing.T) {
			m := w.get(servicesPath+"?includeObject="+include, "Accept", tableType).want(t, 200).object(t)
			if got := text(m, "rows", 0, "object", "kind"); got != kind {
				t.Errorf("rows hold a %q, want %q", got, kind)
			}
			if spec := field(m, "rows", 0, "object", "spec"); (spec != nil) != (kind == "Service") {
				t.Errorf("spec %v", spec)
			}
			if kind != "" && text(m, "rows", 0, "object", "metadata", "namespace") != "default" {
				t.Errorf("%v", m)
			}
		})
	}
	t.Run("includeObject of nonsense", func(t *testing.T) {
		a := w.get(servicesPath+"?includeObject=Half", "Accept", tableType)
		if a.code != http.StatusBadRequest && a.code != http.StatusUnprocessableEntity && a.code != http.StatusNotAcceptable {
			t.Errorf("%d %s", a.code, a.short())
		}
	})
	t.Run("one object", func(t *testing.T) {
		m := w.get(servicesPath+"/web", "Accept", tableType).want(t, 200).object(t)
		if len(field(m, "rows").([]any)) != 1 || text(m, "rows", 0, "cells", 0) != "web" {
			t.Errorf("%v", m)
		}
	})
	t.Run("pages", func(t *testing.T) {
		m := w.get(servicesPath+"?limit=1", "Accept", tableType).want(t, 200).object(t)
		if text(m, "metadata", "continue") == "" || text(m, "metadata", "remainingItemCount") != "1" {
			t.Errorf("%v", field(m, "metadata"))
		}
	})
	t.Run("Q09", func(t *testing.T) {
		m := w.get("/api/v1/events", "Accept", tableType).want(t, 200).object(t)
		var shown []string
		for i := range field(m, "columnDefinitions").([]any) {
			if c := field(m, "columnDefinitions", i); text(c, "priority") == "0" {
				shown = append(shown, text(c, "name"))
			}
		}
		if got := strings.Join(shown, ", "); got != "Last Seen, Type, Reason, Object, Message" {
			t.Error(got)
		}
	})
	t.Run("kind without a printer", func(t *testing.T) {
		m := w.get("/api/v1/namespaces/default/limitranges", "Accept", tableType)
		if m.code == 404 {
			return // not served
		}
		m.want(t, 200, `"Created At"`)
	})
	t.Run("metadata", func(t *testing.T) {
		const partial = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
		m := w.get(servicesPath+"/web", "Accept", partial).want(t, 200).object(t)
		if text(m, "kind") != "PartialObjectMetadata" || text(m, "apiVersion") != "meta.k8s.io/v1" || text(m, "metadata", "uid") == "" || field(m, "spec") != nil {
			t.Errorf("%v", m)
		}
		const list = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
		m = w.get(servicesPath, "Accept", list).want(t, 200).object(t)
		if text(m, "kind") != "PartialObjectMetadataList" || len(field(m, "items").([]any)) != 2 || field(m, "items", 0, "spec") != nil {
			t.Errorf("%v", m)
		}
		a := w.get(servicesPath, "Accept", "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io").want(t, 200)
		if !strings.HasPrefix(a.body, "k8s\x00") {
			t.Errorf("no protobuf: %s", a.short())
		}
	})
}

// TestContentIn sends bodies in every form.
func TestContentIn(t *testing.T) {
	_, w := startWire(t)
	t.Run("yaml", func(t *testing.T) {
		a := w.post(mapsPath, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: from-yaml}\ndata: {k: v}\n", "Content-Type", yamlType).want(t, 201)
		if m := a.object(t); text(m, "data", "k") != "v" {
			t.Errorf("%v", m)
		}
		w.send(http.MethodPut, mapsPath+"/from-yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: from-yaml}\ndata: {k: w}\n", "Content-Type", yamlType).want(t, 200, `"k":"w"`)
	})
	t.Run("protobuf", func(t *testing.T) {
		body := encode(t, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "proto"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}})
		a := w.post(servicesPath, body, "Content-Type", protoType, "Accept", protoType).want(t, 201)
		s := decode[*corev1.Service](t, a.body)
		if s.Spec.ClusterIP == "" || s.Spec.Ports[0].Protocol != corev1.ProtocolTCP {
			t.Errorf("%+v", s.Spec)
		}
		s.Spec.Ports[0].Port = 81
		w.send(http.MethodPut, servicesPath+"/proto", encode(t, s), "Content-Type", protoType).want(t, 200, `"port":81`)
	})
	t.Run("JSON without a type", func(t *testing.T) {
		w.post(mapsPath, mapBody("untyped", "v"), "Content-Type", "").want(t, 201)
	})
	t.Run("kind and version are filled in", func(t *testing.T) {
		w.post(mapsPath, `{"metadata":{"name":"bare"}}`).want(t, 201, `"kind":"ConfigMap","apiVersion":"v1"`)
	})
	t.Run("a type that is not known", func(t *testing.T) {
		for _, contentType := range []string{"text/plain", "application/xml", "application/x-www-form-urlencoded"} {
			w.post(mapsPath, mapBody("x", "v"), "Content-Type", contentType).status(t, http.StatusUnsupportedMediaType, metav1.StatusReasonUnsupportedMediaType,
				"the body of the request was in an unknown format - accepted media types include: application/json, application/yaml, application/vnd.kubernetes.protobuf")
		}
	})
	for name, tc := range map[string]struct{ body, contentType, message string }{
		"no JSON":              {"{", jsonType, "unexpected end of JSON input"},
		"a list":               {"[]", jsonType, "cannot unmarshal array"},
		"a string in a map":    {`{"metadata":{"name":"x"},"data":"v"}`, jsonType, `ConfigMap in version "v1" cannot be handled as a ConfigMap: json: cannot unmarshal string into Go struct field ConfigMap.data of type map[string]string`},
		"no YAML":              {"a: [", yamlType, "yaml"},
		"protobuf of nothing":  {"k8s\x00", protoType, ""},
		"protobuf that is not": {mapBody("x", "v"), protoType, "provided data does not appear to be a protobuf message"},
		"another kind":         {`{"apiVersion":"v1","kind":"Secret","metadata":{"name":"x"}}`, jsonType, `Secret in version "v1" cannot be handled as a ConfigMap`},
		"another version":      {`{"apiVersion":"v2","kind":"ConfigMap","metadata":{"name":"x"}}`, jsonType, `ConfigMap in version "v2" cannot be handled as a ConfigMap`},
	} {
		t.Run(name, func(t *testing.T) {
			w.post(mapsPath, tc.body, "Content-Type", tc.contentType).status(t, http.StatusBadRequest, metav1.StatusReasonBadRequest, tc.message)
		})
	}
	t.Run("nothing", func(t *testing.T) {
		a := w.post(mapsPath, "", "Content-Type", jsonType)
		if a.code != http.StatusBadRequest && a.code != http.StatusUnprocessableEntity {
			t.Errorf("%d %s", a.code, a.short())
		}
	})
	t.Run("too large", func(t *testing.T) {
		for _, size := range []int{3<<20 - 200, 3<<20 + 1} {
			body := mapBody("large", strings.Repeat("x", size))
			a := w.post(mapsPath, body)
			if size < 3<<20 {
				// What is too large for a ConfigMap is not too large for a body.
				a.status(t, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "Too long")
				continue
			}
			a.status(t, http.StatusRequestEntityTooLarge, metav1.StatusReasonRequestEntityTooLarge, "limit is 3145728")
		}
		patch := fmt.Sprintf(`{"data":{"k":%q}}`, strings.Repeat("x", 3<<20))
		w.mustPost(mapsPath, mapBody("patched", "v"))
		w.send(http.MethodPatch, mapsPath+"/patched", patch, "Content-Type", "application/merge-patch+json").
			status(t, http.StatusRequestEntityTooLarge, metav1.StatusReasonRequestEntityTooLarge, "limit is 3145728")
	})
}
