// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"

	"github.com/kplab/kplab/apiserver/registry"
	"github.com/kplab/kplab/apiserver/store"
)

// writeRaw puts an object into a lab's file as the API server encodes it, past
// everything that it checks.
func writeRaw(t *testing.T, path, key string, obj runtime.Object) {
	t.Helper()
	scheme, err := registry.NewScheme(registry.Kinds())
	if err != nil {
		t.Fatal(err)
	}
	gvks, _, err := scheme.ObjectKinds(obj)
	if err != nil {
		t.Fatal(err)
	}
	codecs := serializer.NewCodecFactory(scheme)
	info, _ := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	codec := codecs.CodecForVersions(info.Serializer, codecs.UniversalDeserializer(), gvks[0].GroupVersion(), runtime.InternalGroupVersioner)
	db, err := store.Open(path, store.Options{NoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	prefix := key[:strings.LastIndexByte(key[:strings.LastIndexByte(key, '/')], '/')]
	newFunc := func() runtime.Object { return obj.DeepCopyObject() }
	if err := db.NewStore(store.Config{Codec: codec, NewFunc: newFunc, Prefix: prefix}).Create(t.Context(), key, obj, nil, 0); err != nil {
		t.Error(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

func objectOf(gv, kind, namespace, name string) *unstructured.Unstructured {
	u := &unstructured.Unstructured{}
	parsed, _ := schema.ParseGroupVersion(gv)
	u.SetGroupVersionKind(parsed.WithKind(kind))
	u.SetNamespace(namespace)
	u.SetName(name)
	return u
}

// Each object comes after those that it may need, kinds that nobody heard of too.
func TestImportOrder(t *testing.T) {
	in := []*unstructured.Unstructured{
		objectOf("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "", "w"),
		objectOf("apps/v1", "Deployment", "b", "d"),
		objectOf("example.com/v1", "Wish", "a", "x"),
		objectOf("example.com/v1", "WideWish", "", "x"),
		objectOf("v1", "Service", "b", "s"),
		objectOf("v1", "Service", "a", "s"),
		objectOf("v1", "ConfigMap", "a", "c"),
		objectOf("v1", "ServiceAccount", "a", "sa"),
		objectOf("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "wishes.example.com"),
		objectOf("v1", "Namespace", "", "a"),
	}
	slices.SortStableFunc(in, compareForImport)
	var got []string
	for _, u := range in {
		got = append(got, objectName(u))
	}
	want := []string{
		"namespace/a", "customresourcedefinition.apiextensions.k8s.io/wishes.example.com", "widewish.example.com/x", "serviceaccount/sa in a",
		"configmap/c in a", "service/s in a", "service/s in b", "wish.example.com/x in a", "deployment.apps/d in b",
		"validatingwebhookconfiguration.admissionregistration.k8s.io/w",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q\nwant %q", got, want)
	}
}

// A Job is exported without the selector that the server made for it.
func TestCleanJob(t *testing.T) {
	job := func(manual bool) *unstructured.Unstructured {
		u := objectOf("batch/v1", "Job", "default", "j")
		labels := map[string]any{"batch.kubernetes.io/controller-uid": "1", "job-name": "j", "app": "x"}
		u.Object["spec"] = map[string]any{
			"selector": map[string]any{"matchLabels": map[string]any{"batch.kubernetes.io/controller-uid": "1"}},
			"template": map[string]any{"metadata": map[string]any{"labels": labels}},
		}
		if manual {
			u.Object["spec"].(map[string]any)["manualSelector"] = true
		}
		cleanObject(u)
		return u
	}
	u := job(false)
	labels, _, _ := unstructured.NestedStringMap(u.Object, "spec", "template", "metadata", "labels")
	if _, found, _ := unstructured.NestedMap(u.Object, "spec", "selector"); found || len(labels) != 1 || labels["app"] != "x" {
		t.Errorf("%v", u.Object)
	}
	if _, found, _ := unstructured.NestedMap(job(true).Object, "spec", "selector"); !found {
		t.Error("a selector of one's own is dropped")
	}
}

// Only the documents themselves can define a kind that the lab does not serve.
func TestDefinedKinds(t *testing.T) {
	crd := objectOf("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "wishes.example.com")
	crd.Object["spec"] = map[string]any{"group": "example.com", "names": map[string]any{"kind": "Wish"}}
	docs := []*document{{Unstructured: crd}, {Unstructured: objectOf("v1", "ConfigMap", "a", "c")}}
	if got := definedKinds(docs); len(got) != 1 || got[0].String() != "Wish.example.com" {
		t.Errorf("%v", got)
	}
}

// What the API has from its start is neither exported nor imported; what a person
// makes under the same labels is.
func TestThereFromStart(t *testing.T) {
	object := func(apiVersion, kind, name string, labels, annotations map[string]string) *unstructured.Unstructured {
		u := &unstructured.Unstructured{Object: map[string]any{}}
		u.SetAPIVersion(apiVersion)
		u.SetKind(kind)
		u.SetName(name)
		u.SetLabels(labels)
		u.SetAnnotations(annotations)
		return u
	}
	bootstrap := map[string]string{"kubernetes.io/bootstrapping": "rbac-defaults"}
	auto := map[string]string{"rbac.authorization.kubernetes.io/autoupdate": "true"}
	for _, c := range []struct {
		obj  *unstructured.Unstructured
		want bool
	}{
		{object("rbac.authorization.k8s.io/v1", "ClusterRole", "view", bootstrap, auto), true},
		{object("rbac.authorization.k8s.io/v1", "ClusterRole", "mine", nil, nil), false},
		{object("rbac.authorization.k8s.io/v1", "ClusterRole", "kept", bootstrap, nil), false},
		{object("networking.k8s.io/v1", "ServiceCIDR", "kubernetes", nil, nil), true},
		{object("networking.k8s.io/v1", "ServiceCIDR", "second", nil, nil), false},
	} {
		if got := thereFromStart(c.obj); got != c.want {
			t.Errorf("%s: %t, want %t", kubectlName(c.obj), got, c.want)
		}
		docs := leaveOutDerived([]*document{{Unstructured: c.obj, number: 1}}, func(string) {})
		if (len(docs) == 0) != c.want {
			t.Errorf("%s: an import keeps %d documents", kubectlName(c.obj), len(docs))
		}
	}
}
