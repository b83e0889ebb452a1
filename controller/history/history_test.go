// SPDX-License-Identifier: Apache-2.0

package history

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/kplab/kplab/controller/loop"
)

func template(image string) *corev1.PodTemplateSpec {
	return &corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: image}}},
	}
}

// A revision's patch is what kubectl rollout undo sends, and gives the template back.
func TestPatchAndTemplate(t *testing.T) {
	data, err := patchOf(template("nginx:1"))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"spec":{"template":{"$patch":"replace","metadata":{"labels":{"app":"web"}},"spec":{"containers":[{"image":"nginx:1","name":"c","resources":{}}]}}}}`
	if string(data) != want {
		t.Errorf("patch\n%s\nwant\n%s", data, want)
	}
	got, err := Template(&appsv1.ControllerRevision{Data: runtime.RawExtension{Raw: data}})
	if err != nil || got.Spec.Containers[0].Image != "nginx:1" || got.Labels["app"] != "web" {
		t.Errorf("%v, %+v", err, got)
	}
}

func TestHashCountsCollisions(t *testing.T) {
	one := int32(1)
	if hashOf([]byte("a"), nil) == hashOf([]byte("b"), nil) || hashOf([]byte("a"), nil) == hashOf([]byte("a"), &one) {
		t.Error("different contents have one hash")
	}
}

// A template that is taken by another content gets another name, and the count says so.
func TestCollision(t *testing.T) {
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "ns", UID: "u"}}
	p := Parent{Object: set, Kind: appsv1.SchemeGroupVersion.WithKind("StatefulSet"), Template: template("nginx:1")}
	data, err := patchOf(p.Template)
	if err != nil {
		t.Fatal(err)
	}
	taken := newRevision(p, []byte(`{"other":"content"}`), 1, nil)
	taken.Name = "web-" + hashOf(data, nil)
	client := fake.NewClientset(taken)
	k := New(loop.Deps{Client: client, Informers: informers.NewSharedInformerFactory(client, 0)})
	made, collisions, err := k.create(t.Context(), p, data, 2)
	if err != nil || collisions == nil || *collisions != 1 || made.Name == taken.Name {
		t.Fatalf("%v, %v, %v", made, collisions, err)
	}
	// What is ours already, and only the cache does not know, is not made again.
	again, collisions, err := k.create(t.Context(), Parent{Object: p.Object, Kind: p.Kind, Template: p.Template, Collisions: collisions}, data, 2)
	if err != nil || again.Name != made.Name || *collisions != 1 {
		t.Fatalf("%v, %v, %v", again, collisions, err)
	}
}
