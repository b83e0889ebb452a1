// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/internal/nettest"
)

const (
	definitionsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	boatDefinition  = definitionsPath + "/boats.harbour.example.com"
	boatsPath       = "/apis/harbour.example.com/v1/namespaces/default/boats"
	allBoatsPath    = "/apis/harbour.example.com/v1/boats"

	// boats has two versions, both subresources, and something of each thing that a
	// schema can say.
	boats = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: boats.harbour.example.com}
spec:
  group: harbour.example.com
  scope: Namespaced
  names: {plural: boats, singular: boat, kind: Boat, shortNames: [bt], categories: [fleet]}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}, scale: {specReplicasPath: .spec.crew, statusReplicasPath: .status.crew, labelSelectorPath: .status.selector}}
    selectableFields: [{jsonPath: .spec.colour}]
    additionalPrinterColumns:
    - {name: Crew, type: integer, jsonPath: .spec.crew}
    - {name: Colour, type: string, jsonPath: .spec.colour, priority: 1}
    schema:
      openAPIV3Schema:
        description: A boat that lies in the harbour.
        type: object
        required: [spec]
        properties:
          spec:
            type: object
            required: [crew]
            properties:
              crew: {type: integer, minimum: 1, maximum: 99, description: How many people it takes to sail her.}
              colour: {type: string, default: white, enum: [white, red, blue]}
              seats: {type: integer}
              sails:
                type: array
                x-kubernetes-list-type: map
                x-kubernetes-list-map-keys: [name]
                items: {type: object, required: [name], properties: {name: {type: string}, area: {type: integer}}}
              extra: {type: object, x-kubernetes-preserve-unknown-fields: true}
            x-kubernetes-validations:
            - {rule: "!has(self.seats) || self.seats >= self.crew", message: there are fewer seats than crew}
          status:
            type: object
            properties: {crew: {type: integer}, selector: {type: string}, berth: {type: string}}
  - name: v1beta1
    served: true
    storage: false
    deprecated: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`
)

// boat is a custom resource; spec is JSON.
func boat(name, spec string) string {
	return fmt.Sprintf(`{"apiVersion":"harbour.example.com/v1","kind":"Boat","metadata":{"name":%q},"spec":%s}`, name, spec)
}

// define creates a definition and waits until its kind is served in version.
func (w wire) define(yaml, groupVersion string) {
	w.t.Helper()
	w.post(definitionsPath, yaml, "Content-Type", yamlType).want(w.t, 201)
	nettest.Eventually(w.t, waitTime, "the kind to be served", func() error {
		if a := w.get("/apis/" + groupVersion); a.code != 200 {
			return fmt.Errorf("%d %s", a.code, a.short())
		}
		return nil
	})
}

// startBoats is a server that has boats.
func startBoats(tb testing.TB) (*testServer, wire) {
	tb.Helper()
	s, w := startWire(tb)
	w.define(boats, "harbour.example.com/v1")
	return s, w
}

// condition is the status of a definition's condition.
func condition(m map[string]any, kind string) string {
	list, _ := field(m, "status", "conditions").([]any)
	for _, c := range list {
		if text(c, "type") == kind {
			return text(c, "status")
		}
	}
	return ""
}

// TestCustomResourcesEstablished: a definition counts at once, and its objects can be
// made at once. Without one, nothing of it runs.
func TestCustomResourcesEstablished(t *testing.T) {
	s, w := startWire(t)
	w.get(boatsPath).want(t, 404)
	if s.custom.Resources() != nil {
		t.Error("custom resources before there is a definition")
	}
	w.get(definitionsPath).want(t, 200, `"items":[]`)
	w.post(definitionsPath, boats, "Content-Type", yamlType).want(t, 201, `"storedVersions":["v1"]`)
	nettest.Eventually(t, waitTime, "condition Established", func() error {
		if m := w.get(boatDefinition).object(t); condition(m, "Established") != "True" || condition(m, "NamesAccepted") != "True" {
			return fmt.Errorf("%v", field(m, "status", "conditions"))
		}
		return nil
	})
	nettest.Eventually(t, waitTime, "the resource", func() error {
		if a := w.get(boatsPath); a.code != 200 {
			return fmt.Errorf("%d", a.code)
		}
		return nil
	})
	began := time.Now()
	w.mustPost(boatsPath, boat("gull", `{"crew":2}`))
	// The library's wait for other API servers alone is two seconds.
	if took := time.Since(began); took >= 2*time.Second {
		t.Errorf("the first object took %v", took)
	}
	if got := fmt.Sprint(s.custom.Resources()); got != "[boats.harbour.example.com]" {
		t.Errorf("served: %s", got)
	}
	if newest := s.NewestRevisions(); newest["boats.harbour.example.com"] == 0 || newest["customresourcedefinitions"] == 0 {
		t.Errorf("newest revisions: %v", newest)
	}
}

// TestCustomResourceRefused sends what a schema or the server refuses.
func TestCustomResourceRefused(t *testing.T) {
	_, w := startBoats(t)
	w.post(boatsPath, boat("a", `{"crew":"two"}`)).status(t, 422, metav1.StatusReasonInvalid, `spec.crew: Invalid value: "string": spec.crew in body must be of type integer`)
	w.post(boatsPath, boat("a", `{"crew":0}`)).status(t, 422, metav1.StatusReasonInvalid, "spec.crew in body should be greater than or equal to 1")
	w.post(boatsPath, boat("a", `{}`)).status(t, 422, metav1.StatusReasonInvalid, "spec.crew: Required value")
	w.post(boatsPath, boat("a", `{"crew":1,"colour":"green"}`)).status(t, 422, metav1.StatusReasonInvalid, `spec.colour: Unsupported value: "green"`)
	w.post(boatsPath, boat("a", `{"crew":3,"seats":2}`)).status(t, 422, metav1.StatusReasonInvalid, "there are fewer seats than crew")
	w.post(boatsPath+"?fieldValidation=Strict", boat("a", `{"crew":1,"krew":1}`)).status(t, 400, metav1.StatusReasonBadRequest, `unknown field "spec.krew"`)
	w.post("/apis/harbour.example.com/v1/boats", boat("a", `{"crew":1}`)).want(t, 404)
	w.post("/apis/harbour.example.com/v1/namespaces/nowhere/boats", boat("a", `{"crew":1}`)).status(t, 404, metav1.StatusReasonNotFound, `namespaces "nowhere" not found`)
	w.get("/apis/harbour.example.com/v2/boats").want(t, 404)
	w.get("/apis/harbour.example.com/v1/ships").want(t, 404)
	w.mustPost(boatsPath, boat("a", `{"crew":1}`))
	w.post(boatsPath, boat("a", `{"crew":1}`)).status(t, 409, metav1.StatusReasonAlreadyExists, `boats.harbour.example.com "a" already exists`)
	w.patch(boatsPath+"/a", "application/strategic-merge-patch+json", `{"spec":{"crew":2}}`).want(t, 415)

	bad := strings.Replace(boats, "type: integer, minimum: 1", "type: number, format: [1], minimum: 1", 1)
	w.post(definitionsPath, bad, "Content-Type", yamlType).want(t, 400)
	bad = strings.Replace(strings.ReplaceAll(boats, "boats", "barges"), "self.seats >= self.crew", "self.seats >=", 1)
	w.post(definitionsPath, bad, "Content-Type", yamlType).status(t, 422, metav1.StatusReasonInvalid, "compilation failed")
	bad = strings.Replace(boats, "name: boats.harbour", "name: ships.harbour", 1)
	w.post(definitionsPath, bad, "Content-Type", yamlType).status(t, 422, metav1.StatusReasonInvalid, `must be spec.names.plural+"."+spec.group`)
}

// TestCustomResourceWrites changes one object in each way that there is.
func TestCustomResourceWrites(t *testing.T) {
	_, w := startBoats(t)
	m := w.post(boatsPath, boat("gull", `{"crew":2,"krew":3,"extra":{"any":{"thing":1}}}`)).want(t, 201).object(t)
	if text(m, "spec", "colour") != "white" || field(m, "spec", "krew") != nil || text(m, "spec", "extra", "any", "thing") != "1" {
		t.Errorf("defaults and pruning: %v", m["spec"])
	}
	if text(m, "metadata", "generation") != "1" || text(m, "metadata", "uid") == "" {
		t.Errorf("%v", m["metadata"])
	}
	w.patch(boatsPath+"/gull", mergePatch, `{"spec":{"crew":3}}`).want(t, 200, `"crew":3`, `"generation":2`)
	w.patch(boatsPath+"/gull", jsonPatch, `[{"op":"replace","path":"/spec/crew","value":4}]`).want(t, 200, `"crew":4`)
	w.patch(boatsPath+"/gull", jsonPatch, `[{"op":"replace","path":"/spec/crew","value":400}]`).status(t, 422, metav1.StatusReasonInvalid, "less than or equal to 99")
	m = w.get(boatsPath+"/gull").want(t, 200).object(t)
	old := strings.Replace(boat("gull", `{"crew":5}`), `"name"`, `"resourceVersion":"1","name"`, 1)
	w.send(http.MethodPut, boatsPath+"/gull", old).status(t, 409, metav1.StatusReasonConflict, "the object has been modified")
	put := strings.Replace(boat("gull", `{"crew":5}`), `"name"`, fmt.Sprintf(`"resourceVersion":%q,"name"`, text(m, "metadata", "resourceVersion")), 1)
	w.send(http.MethodPut, boatsPath+"/gull", put).want(t, 200, `"crew":5`)

	// Apply merges lists by their keys, as the schema says.
	w.patch(boatsPath+"/tern?fieldManager=anna", applyPatch, boat("tern", `{"crew":1,"sails":[{"name":"jib","area":4}]}`)).want(t, 201)
	w.patch(boatsPath+"/tern?fieldManager=bert", applyPatch, boat("tern", `{"sails":[{"name":"main","area":9}]}`)).want(t, 200, `"name":"jib"`, `"name":"main"`)
	w.patch(boatsPath+"/tern?fieldManager=bert", applyPatch, boat("tern", `{"crew":7}`)).status(t, 409, metav1.StatusReasonConflict, `conflict with "anna": .spec.crew`)
	w.patch(boatsPath+"/tern?fieldManager=bert&force=true", applyPatch, boat("tern", `{"crew":7}`)).want(t, 200, `"crew":7`)
	m = w.get(boatsPath + "/tern").object(t)
	if list, _ := field(m, "spec", "sails").([]any); len(list) != 1 || text(list[0], "name") != "jib" {
		t.Errorf("bert's sail is still there: %v", list)
	}
	w.patch(boatsPath+"/dry?fieldManager=bert&dryRun=All", applyPatch, boat("dry", `{"crew":7}`)).want(t, 201)
	w.get(boatsPath+"/dry").want(t, 404)

	w.mustPost(boatsPath, strings.Replace(boat("", `{"crew":1}`), `"name":""`, `"generateName":"x-","labels":{"old":"yes"}`, 1))
	w.send(http.MethodDelete, boatsPath+"?labelSelector=old%3Dyes", "").want(t, 200)
	if got := itemNames(w.get(boatsPath).object(t)); got != "gull tern" {
		t.Errorf("after deletecollection: %s", got)
	}
	w.send(http.MethodDelete, boatsPath+"/gull", "").want(t, 200)
	w.get(boatsPath+"/gull").status(t, 404, metav1.StatusReasonNotFound, `boats.harbour.example.com "gull" not found`)
}

// TestCustomResourceSubresources: each of status and the rest ignores the other, and
// scale is a view of both.
func TestCustomResourceSubresources(t *testing.T) {
	_, w := startBoats(t)
	body := strings.TrimSuffix(boat("gull", `{"crew":2}`), "}") + `,"status":{"berth":"3"}}`
	if m := w.mustPost(boatsPath, body); m["status"] != nil {
		t.Errorf("status of a new object: %v", m["status"])
	}
	m := w.patch(boatsPath+"/gull/status", mergePatch, `{"spec":{"crew":9},"status":{"berth":"7","crew":1,"selector":"on=gull"}}`).want(t, 200).object(t)
	if text(m, "spec", "crew") != "2" || text(m, "status", "berth") != "7" || text(m, "metadata", "generation") != "1" {
		t.Errorf("after a write of status: %v", m)
	}
	w.patch(boatsPath+"/gull/status", mergePatch, `{"status":{"crew":"x"}}`).want(t, 422)
	w.get(boatsPath+"/gull/scale").want(t, 200, `"kind":"Scale"`, `"spec":{"replicas":2}`, `"status":{"replicas":1,"selector":"on=gull"}`)
	w.patch(boatsPath+"/gull/scale", mergePatch, `{"spec":{"replicas":5}}`).want(t, 200, `"replicas":5`)
	w.get(boatsPath+"/gull").want(t, 200, `"crew":5`, `"berth":"7"`)
	w.get(boatsPath+"/gull/log").want(t, 404)
}

// TestCustomResourceReads: tables, selectors, versions, pages.
func TestCustomResourceReads(t *testing.T) {
	_, w := startBoats(t)
	for i, colour := range []string{"red", "blue", "red"} {
		w.mustPost(boatsPath, strings.Replace(boat(fmt.Sprint("b", i), fmt.Sprintf(`{"crew":%d,"colour":%q}`, i+1, colour)), `"name"`, fmt.Sprintf(`"labels":{"n":"%d"},"name"`, i), 1))
	}
	table := w.get(boatsPath, "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").want(t, 200).object(t)
	var columns []string
	list, _ := field(table, "columnDefinitions").([]any)
	for _, c := range list {
		columns = append(columns, text(c, "name")+"/"+text(c, "priority"))
	}
	if got := strings.Join(columns, " "); got != "Name/0 Crew/0 Colour/1" {
		t.Errorf("columns %s", got)
	}
	if got := fmt.Sprint(field(table, "rows", 1, "cells")); got != "[b1 2 blue]" {
		t.Errorf("cells %s", got)
	}
	if got := itemNames(w.get(allBoatsPath+"?fieldSelector=spec.colour%3Dred").want(t, 200).object(t)); got != "b0 b2" {
		t.Errorf("red boats: %s", got)
	}
	w.get(allBoatsPath+"?fieldSelector=spec.crew%3D1").status(t, 400, metav1.StatusReasonBadRequest, "field label not supported: spec.crew")
	if got := itemNames(w.get(allBoatsPath + "?labelSelector=n+in+(0,1)").object(t)); got != "b0 b1" {
		t.Errorf("by label: %s", got)
	}
	page := w.get(allBoatsPath + "?limit=2").object(t)
	if itemNames(page) != "b0 b1" || text(page, "metadata", "continue") == "" || text(page, "kind") != "BoatList" {
		t.Errorf("page: %v", page)
	}

	a := w.get(strings.Replace(boatsPath, "/v1/", "/v1beta1/", 1)+"/b1").want(t, 200, `"apiVersion":"harbour.example.com/v1beta1"`)
	if warning := a.header.Get("Warning"); !strings.Contains(warning, "harbour.example.com/v1beta1 Boat is deprecated; use harbour.example.com/v1 Boat") {
		t.Errorf("warning %q", warning)
	}
	w.post(strings.Replace(boatsPath, "/v1/", "/v1beta1/", 1), strings.Replace(boat("old", `{"crew":1}`), "/v1", "/v1beta1", 1)).want(t, 201)
	w.get(boatsPath+"/old").want(t, 200, `"apiVersion":"harbour.example.com/v1"`)
	meta := w.get(boatsPath+"/old", "Accept", "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io").want(t, 200, `"kind":"PartialObjectMetadata"`)
	if strings.Contains(meta.body, `"spec":`) {
		t.Errorf("metadata alone: %s", meta.short())
	}
	w.get(definitionsPath, "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").want(t, 200, `"name":"Created At"`, `"boats.harbour.example.com"`)
}

// TestCustomResourceDocuments: discovery in both forms, OpenAPI.
func TestCustomResourceDocuments(t *testing.T) {
	_, w := startBoats(t)
	aggregatedType := "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	w.get("/apis").want(t, 200, `"name":"harbour.example.com"`, `"name":"apiextensions.k8s.io"`)
	w.get("/apis", "Accept", aggregatedType).want(t, 200,
		`"resource":"boats","responseKind":{"group":"harbour.example.com","version":"v1","kind":"Boat"},"scope":"Namespaced","singularResource":"boat"`,
		`"shortNames":["bt"]`, `"categories":["fleet"]`, `"subresource":"scale"`, `"resource":"deployments"`)
	w.get("/apis/harbour.example.com").want(t, 200, `"versions":[{"groupVersion":"harbour.example.com/v1","version":"v1"},{"groupVersion":"harbour.example.com/v1beta1","version":"v1beta1"}]`, `"preferredVersion":{"groupVersion":"harbour.example.com/v1"`)
	w.get("/apis/harbour.example.com/v1").want(t, 200, `"name":"boats","singularName":"boat","namespaced":true,"kind":"Boat"`, `"name":"boats/status"`, `"name":"boats/scale"`)
	w.get("/apis/harbour.example.com/v9").want(t, 404)

	const services = "/apis/apiregistration.k8s.io/v1/apiservices"
	for _, name := range []string{"v1.", "v1.apps", "v1beta1.metrics.k8s.io", "v1.apiextensions.k8s.io", "v1beta1.harbour.example.com"} {
		w.get(services+"/"+name).want(t, 200, `"kind":"APIService"`, `"status":"True"`, "Local APIServices are always available")
	}
	w.get(services+"?fieldSelector=metadata.name%3Dv1.apps", "Accept", tableType).want(t, 200, `"cells":["v1.apps","Local","True",`)
	w.get(services+"/v1.nothing").status(t, 404, metav1.StatusReasonNotFound)

	w.get("/openapi/v3").want(t, 200, `"apis/harbour.example.com/v1":`, `"apis/apiextensions.k8s.io/v1":`)
	w.get("/openapi/v3/apis/harbour.example.com/v1").want(t, 200, `"com.example.harbour.v1.Boat":`, "How many people it takes to sail her.", `"x-kubernetes-selectable-fields"`)
	w.get("/openapi/v3/apis/apiextensions.k8s.io/v1").want(t, 200, `"io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinition":`)

	w.get("/openapi/v2").want(t, 200, `"com.example.harbour.v1.Boat":`, "How many people it takes to sail her.", `"io.k8s.api.core.v1.Pod":`, `"/apis/harbour.example.com/v1/namespaces/{namespace}/boats"`)

	// A change of the definition changes them.
	w.patch(boatDefinition, jsonPatch, `[{"op":"replace","path":"/spec/names/shortNames","value":["boot"]},{"op":"replace","path":"/spec/versions/1/served","value":false},
		{"op":"replace","path":"/spec/versions/0/schema/openAPIV3Schema/description","value":"A changed boat."}]`).want(t, 200)
	nettest.Eventually(t, waitTime, "the new form of the kind", func() error {
		if a := w.get("/apis/harbour.example.com/v1"); !strings.Contains(a.body, `"boot"`) {
			return fmt.Errorf("%s", a.body)
		}
		if a := w.get("/openapi/v3/apis/harbour.example.com/v1"); !strings.Contains(a.body, "A changed boat.") {
			return fmt.Errorf("old text in OpenAPI")
		}
		if a := w.get("/openapi/v2"); !strings.Contains(a.body, "A changed boat.") {
			return fmt.Errorf("old text in OpenAPI v2")
		}
		if a := w.get("/apis/harbour.example.com/v1beta1"); a.code != 404 {
			return fmt.Errorf("v1beta1: %d", a.code)
		}
		return nil
	})

	w.send(http.MethodDelete, boatDefinition, "").want(t, 200)
	nettest.Eventually(t, waitTime, "the kind to go", func() error {
		for _, path := range []string{"/apis", "/openapi/v3", "/openapi/v2"} {
			if a := w.get(path); strings.Contains(a.body, "harbour") {
				return fmt.Errorf("%s still names it", path)
			}
		}
		if a := w.get("/apis", "Accept", aggregatedType); strings.Contains(a.body, "harbour") {
			return fmt.Errorf("aggregated discovery still names it")
		}
		if a := w.get("/apis/harbour.example.com"); a.code != 404 {
			return fmt.Errorf("%d %s", a.code, a.short())
		}
		return nil
	})
}

// TestCustomResourceWatch follows boats from a revision, and from their state.
func TestCustomResourceWatch(t *testing.T) {
	_, w := startBoats(t)
	w.mustPost(boatsPath, boat("gull", `{"crew":2}`))
	start := text(w.get(boatsPath).object(t), "metadata", "resourceVersion")
	s := w.watch(boatsPath + "?watch=true&allowWatchBookmarks=true&resourceVersion=" + start)
	list := w.watch(allBoatsPath + "?watch=true&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&fieldSelector=spec.colour%3Dwhite")
	list.next("ADDED", "gull")
	if m := list.next("BOOKMARK", ""); text(m, "metadata", "annotations", "k8s.io/initial-events-end") != "true" {
		t.Errorf("end of the initial events: %v", m)
	}
	w.mustPost(boatsPath, boat("tern", `{"crew":1}`))
	s.next("ADDED", "tern")
	list.next("ADDED", "tern")
	w.patch(boatsPath+"/gull", mergePatch, `{"spec":{"colour":"red"}}`).want(t, 200)
	s.next("MODIFIED", "gull")
	list.next("DELETED", "gull")
	w.send(http.MethodDelete, boatsPath+"/tern", "").want(t, 200)
	s.next("DELETED", "tern")
	// Writes of others move the watch on.
	w.mustPost(mapsPath, mapBody("c", "v"))
	if m := s.next("BOOKMARK", ""); text(m, "kind") != "Boat" {
		t.Errorf("bookmark: %v", m)
	}
}

// TestCustomResourceDefinitionDeleted: its objects go before it, those with finalizers
// when they may, watches end, and the name is free for another definition.
func TestCustomResourceDefinitionDeleted(t *testing.T) {
	_, w := startBoats(t)
	w.mustPost(boatsPath, boat("gull", `{"crew":2}`))
	w.mustPost(boatsPath, strings.Replace(boat("held", `{"crew":2}`), `"name"`, `"finalizers":["example.com/rope"],"name"`, 1))
	s := w.watch(boatsPath + "?watch=true&resourceVersion=" + text(w.get(boatsPath).object(t), "metadata", "resourceVersion"))
	w.send(http.MethodDelete, boatsPath+"/held", "").want(t, 200, `"deletionTimestamp":`)
	w.send(http.MethodDelete, boatDefinition, "").want(t, 200)
	nettest.Eventually(t, waitTime, "the free boat to go", func() error {
		if a := w.get(boatsPath + "/gull"); a.code != 404 {
			return fmt.Errorf("%d", a.code)
		}
		return nil
	})
	if m := w.get(boatDefinition).want(t, 200).object(t); condition(m, "Terminating") != "True" {
		t.Errorf("conditions: %v", field(m, "status", "conditions"))
	}
	w.post(boatsPath, boat("new", `{"crew":2}`)).want(t, 403, "create not allowed while custom resource definition is terminating")
	w.patch(boatsPath+"/held", mergePatch, `{"metadata":{"finalizers":null}}`).want(t, 200)
	nettest.Eventually(t, waitTime, "the definition and its kind to go", func() error {
		if a, b := w.get(boatDefinition), w.get(boatsPath); a.code != 404 || b.code != 404 {
			return fmt.Errorf("%d, %d", a.code, b.code)
		}
		return nil
	})
	s.ended("MODIFIED", "DELETED")
	w.define(boats, "harbour.example.com/v1")
	if got := itemNames(w.get(boatsPath).want(t, 200).object(t)); got != "" {
		t.Errorf("boats of the former definition: %s", got)
	}
}

// TestCustomResourceRights: roles count for custom resources.
func TestCustomResourceRights(t *testing.T) {
	s, w := startBoats(t)
	w.mustPost(boatsPath, boat("gull", `{"crew":2}`))
	client := asJane(t, s).RESTClient()
	get := func() error {
		return client.Get().AbsPath(boatsPath + "/gull").Do(t.Context()).Error()
	}
	if err := get(); err == nil || !strings.Contains(err.Error(), `boats.harbour.example.com "gull" is forbidden: User "jane" cannot get resource "boats" in API group "harbour.example.com" in the namespace "default"`) {
		t.Errorf("without a role: %v", err)
	}
	_, err := s.client.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "sailor"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{"harbour.example.com"}, Resources: []string{"boats"}, Verbs: []string{"get"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	bindClusterRole(t, s, "sailor", rbacv1.Subject{Kind: "User", Name: "jane"})
	if err := get(); err != nil {
		t.Errorf("with a role: %v", err)
	}
	if err := client.Delete().AbsPath(boatsPath + "/gull").Do(t.Context()).Error(); err == nil || !strings.Contains(err.Error(), "cannot delete") {
		t.Errorf("delete: %v", err)
	}
}

// TestCustomResourcesKept: a server that starts again serves what was stored, from
// its first answer on.
func TestCustomResourcesKept(t *testing.T) {
	s, w := startBoats(t)
	w.mustPost(boatsPath, boat("gull", `{"crew":2}`))
	before := w.get(boatsPath + "/gull").body
	s.stop()
	s = startServer(t, s.dir)
	w = newWire(t, s)
	a := w.get(boatsPath+"/gull").want(t, 200)
	if a.body != before {
		t.Errorf("before %s\nafter %s", before, a.body)
	}
	w.get("/apis").want(t, 200, "harbour.example.com")
	w.get("/openapi/v3/apis/harbour.example.com/v1").want(t, 200, "sail her")
	w.mustPost(boatsPath, boat("tern", `{"crew":2}`))
	w.post(boatsPath, boat("x", `{"crew":2,"seats":1}`)).want(t, 422)
}

// TestCustomResourceNames: a second definition cannot take the names of the first.
func TestCustomResourceNames(t *testing.T) {
	_, w := startBoats(t)
	other := strings.NewReplacer("name: boats.harbour", "name: barges.harbour", "plural: boats, singular: boat", "plural: barges, singular: barge").Replace(boats)
	w.post(definitionsPath, other, "Content-Type", yamlType).want(t, 201)
	nettest.Eventually(t, waitTime, "the names to be refused", func() error {
		m := w.get(definitionsPath + "/barges.harbour.example.com").object(t)
		if condition(m, "NamesAccepted") != "False" || condition(m, "Established") != "False" {
			return fmt.Errorf("%v", field(m, "status", "conditions"))
		}
		return nil
	})
	w.get("/apis/harbour.example.com/v1/barges").want(t, 404)
	w.send(http.MethodDelete, boatDefinition, "").want(t, 200)
	nettest.Eventually(t, waitTime, "the names to be free", func() error {
		if a := w.get("/apis/harbour.example.com/v1/barges"); a.code != 200 {
			return fmt.Errorf("%d", a.code)
		}
		return nil
	})
}
