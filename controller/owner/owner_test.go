// SPDX-License-Identifier: Apache-2.0

package owner

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

func pod(name, app, controller string, deleting bool) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{"app": app}}}
	if controller != "" {
		yes := true
		p.OwnerReferences = []metav1.OwnerReference{{UID: types.UID(controller), Controller: &yes}}
	}
	if deleting {
		now := metav1.Now()
		p.DeletionTimestamp = &now
	}
	return p
}

func TestClaim(t *testing.T) {
	me := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "me", UID: "me"}}
	var patched []string
	c := Controller{
		Object:   me,
		Ref:      metav1.OwnerReference{Kind: "X", Name: "me", UID: "me"},
		Selector: labels.SelectorFromSet(labels.Set{"app": "web"}),
		Live:     func() (metav1.Object, error) { return me, nil },
		Patch: func(name string, patch []byte) error {
			patched = append(patched, name)
			if name == "vanished" {
				return apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, name)
			}
			if !strings.Contains(string(patch), `"uid":"uid-`+name+`"`) {
				t.Errorf("patch of %s does not name its UID: %s", name, patch)
			}
			return nil
		},
	}
	pods := []*corev1.Pod{
		pod("mine", "web", "me", false), pod("others", "web", "other", false), pod("orphan", "web", "", false),
		pod("stranger", "db", "", false), pod("strayed", "db", "me", false), pod("dying", "web", "", true),
		pod("unfit", "web", "", false), pod("vanished", "web", "", false),
	}
	ours, err := Claim(c, pods, func(p *corev1.Pod) bool { return p.Name != "unfit" })
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range ours {
		names = append(names, p.Name)
	}
	if fmt.Sprint(names) != "[mine orphan]" || fmt.Sprint(patched) != "[orphan strayed vanished]" {
		t.Fatalf("ours %v, patched %v", names, patched)
	}
}

func TestNoAdoptionByTheWrongOwner(t *testing.T) {
	now := metav1.Now()
	for name, live := range map[string]func() (metav1.Object, error){
		"replaced": func() (metav1.Object, error) { return &metav1.ObjectMeta{UID: "another"}, nil },
		"deleting": func() (metav1.Object, error) { return &metav1.ObjectMeta{UID: "me", DeletionTimestamp: &now}, nil },
		"gone":     func() (metav1.Object, error) { return nil, errors.New("not found") },
	} {
		c := Controller{
			Object: &metav1.ObjectMeta{UID: "me"}, Selector: labels.Everything(), Live: live,
			Patch: func(name string, _ []byte) error { t.Errorf("%s was patched", name); return nil },
		}
		if ours, err := Claim(c, []*corev1.Pod{pod("orphan", "web", "", false)}, nil); err == nil || len(ours) != 0 {
			t.Errorf("%s: adopted %d, error %v", name, len(ours), err)
		}
	}
	deleting := Controller{Object: &metav1.ObjectMeta{UID: "me", DeletionTimestamp: &now}, Selector: labels.Everything()}
	if Judge(deleting, pod("orphan", "web", "", false), true) != Ignore || Judge(deleting, pod("mine", "web", "me", false), true) != Keep {
		t.Error("a controller that is being deleted adopts or drops")
	}
}
