// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"encoding/json"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/kplab/kplab/internal/nettest"
)

const (
	boatsDefinition = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"boats.example.com"},
"spec":{"group":"example.com","scope":"Namespaced","names":{"plural":"boats","singular":"boat","kind":"Boat"},"versions":[
{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}},
{"name":"v2","served":true,"storage":false,"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]}}`
	definitionsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	boatsPath       = "/apis/example.com/v1/namespaces/%s/boats"
)

// boats are the custom resources of a bench.
type boats struct {
	*bench
	rest rest.Interface
}

func newBoats(t *testing.T) boats {
	t.Helper()
	b := boats{newBench(t), nil}
	b.rest = b.client.Discovery().RESTClient()
	b.define()
	return b
}

func (b boats) define() {
	b.t.Helper()
	if err := b.rest.Post().AbsPath(definitionsPath).SetHeader("Content-Type", "application/json").Body([]byte(boatsDefinition)).Do(b.t.Context()).Error(); err != nil {
		b.t.Fatal(err)
	}
	nettest.Eventually(b.t, patience, "boats", func() error {
		return b.rest.Get().AbsPath(fmt.Sprintf(boatsPath, "default")).Do(b.t.Context()).Error()
	})
}

// launch makes a boat and returns a reference to it.
func (b boats) launch(namespace, name string, owners ...metav1.OwnerReference) metav1.OwnerReference {
	b.t.Helper()
	m := &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: "example.com/v1", Kind: "Boat"},
		ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: owners},
	}
	body, err := json.Marshal(m)
	if err != nil {
		b.t.Fatal(err)
	}
	var made metav1.PartialObjectMetadata
	data, err := b.rest.Post().AbsPath(fmt.Sprintf(boatsPath, namespace)).SetHeader("Content-Type", "application/json").SetHeader("Accept", "application/json").Body(body).DoRaw(b.t.Context())
	if err == nil {
		err = json.Unmarshal(data, &made)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return metav1.OwnerReference{APIVersion: "example.com/v1", Kind: "Boat", Name: name, UID: made.UID}
}

// sink deletes a boat of the namespace default.
func (b boats) sink(name string, policy metav1.DeletionPropagation) {
	b.t.Helper()
	body := []byte(fmt.Sprintf(`{"kind":"DeleteOptions","apiVersion":"v1","propagationPolicy":%q}`, policy))
	if err := b.rest.Delete().AbsPath(fmt.Sprintf(boatsPath, "default"), name).SetHeader("Content-Type", "application/json").Body(body).Do(b.t.Context()).Error(); err != nil {
		b.t.Fatal(err)
	}
}

// cargo is a ConfigMap that owners own.
func (b boats) cargo(name string, owners ...metav1.OwnerReference) metav1.OwnerReference {
	b.t.Helper()
	c, err := b.client.CoreV1().ConfigMaps("default").Create(b.t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: owners}}, metav1.CreateOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: name, UID: c.UID}
}

func (b boats) boatIsThere(namespace, name string) bool {
	b.t.Helper()
	err := b.rest.Get().AbsPath(fmt.Sprintf(boatsPath, namespace), name).Do(b.t.Context()).Error()
	if err != nil && !apierrors.IsNotFound(err) {
		b.t.Fatal(err)
	}
	return err == nil
}

func (b boats) cargoIsThere(name string) bool {
	b.t.Helper()
	_, err := b.client.CoreV1().ConfigMaps("default").Get(b.t.Context(), name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		b.t.Fatal(err)
	}
	return err == nil
}

// until waits for something to be there or not.
func (b boats) until(what string, is func() bool) {
	b.t.Helper()
	nettest.Eventually(b.t, patience, what, func() error {
		if !is() {
			return fmt.Errorf("not yet")
		}
		return nil
	})
}

// TestCustomResourcesAreCollected: custom resources own and are owned as other objects.
func TestCustomResourcesAreCollected(t *testing.T) {
	b := newBoats(t)
	gull := b.launch("default", "gull")
	b.cargo("fish", gull)
	harbour := b.cargo("harbour")
	b.launch("default", "dinghy", harbour)
	tern := b.launch("default", "tern")
	b.cargo("salt", tern)
	b.settle()
	if !b.cargoIsThere("fish") || !b.boatIsThere("default", "dinghy") {
		t.Fatal("collected while the owner is there")
	}
	b.sink("gull", metav1.DeletePropagationBackground)
	b.until("the cargo of a sunk boat to go", func() bool { return !b.cargoIsThere("fish") })
	if err := b.client.CoreV1().ConfigMaps("default").Delete(t.Context(), "harbour", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.until("the boat of a harbour that is gone to go", func() bool { return !b.boatIsThere("default", "dinghy") })

	yes := true
	tern.BlockOwnerDeletion = &yes
	b.cargo("held", tern)
	if _, err := b.client.CoreV1().ConfigMaps("default").Patch(t.Context(), "held", types.MergePatchType, []byte(`{"metadata":{"finalizers":["example.com/rope"]}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.settle()
	b.sink("tern", metav1.DeletePropagationForeground)
	b.until("the free cargo to go", func() bool { return !b.cargoIsThere("salt") })
	if !b.boatIsThere("default", "tern") {
		t.Error("the owner went before the dependant that blocks it")
	}
	if _, err := b.client.CoreV1().ConfigMaps("default").Patch(t.Context(), "held", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.until("the owner to go", func() bool { return !b.boatIsThere("default", "tern") })
}

// TestCustomOwnersAndDefinitions: what a definition loses and what it keeps.
func TestCustomOwnersAndDefinitions(t *testing.T) {
	b := newBoats(t)
	gull := b.launch("default", "gull")
	b.cargo("fish", gull)
	b.settle()
	// Another version, and later none, is no end of the boats.
	for _, patch := range []string{
		`[{"op":"replace","path":"/spec/versions/0/served","value":false}]`,
		`[{"op":"replace","path":"/spec/versions/1/served","value":false}]`,
		`[{"op":"replace","path":"/spec/versions/0/served","value":true}]`,
	} {
		err := b.rest.Patch(types.JSONPatchType).AbsPath(definitionsPath, "boats.example.com").Body([]byte(patch)).Do(t.Context()).Error()
		if err != nil {
			t.Fatal(err)
		}
		b.settle()
		if !b.cargoIsThere("fish") {
			t.Fatalf("the cargo went after %s", patch)
		}
	}
	b.until("boats again", func() bool { return b.boatIsThere("default", "gull") })
	// The end of the definition is.
	if err := b.rest.Delete().AbsPath(definitionsPath, "boats.example.com").Do(t.Context()).Error(); err != nil {
		t.Fatal(err)
	}
	b.until("the cargo to go", func() bool { return !b.cargoIsThere("fish") })
	b.settle()

	// A namespace takes its boats with it.
	b.until("the definition to go", func() bool {
		return apierrors.IsNotFound(b.rest.Get().AbsPath(definitionsPath, "boats.example.com").Do(t.Context()).Error())
	})
	b.define()
	if _, err := b.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "sea"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.launch("sea", "whale")
	b.settle()
	if err := b.client.CoreV1().Namespaces().Delete(t.Context(), "sea", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.until("the namespace to go", func() bool {
		_, err := b.client.CoreV1().Namespaces().Get(t.Context(), "sea", metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	if b.boatIsThere("sea", "whale") {
		t.Error("a boat outlived its namespace")
	}
}

// TestCustomOwnersAfterRestart: controllers that start again find the owners among
// custom resources, whichever watch is first.
func TestCustomOwnersAfterRestart(t *testing.T) {
	b := newBoats(t)
	gull := b.launch("default", "gull")
	b.cargo("fish", gull)
	b.settle()
	b.halt()
	b.sink("gull", metav1.DeletePropagationBackground)
	tern := b.launch("default", "tern")
	b.cargo("salt", tern)
	b.start()
	b.until("the cargo of a boat that sank meanwhile to go", func() bool { return !b.cargoIsThere("fish") })
	b.settle()
	if !b.cargoIsThere("salt") {
		t.Error("the cargo of a boat that is there went")
	}
}
