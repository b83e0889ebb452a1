// SPDX-License-Identifier: Apache-2.0

package deployment

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func dep(replicas int32, surge, unavailable string) *appsv1.Deployment {
	parse := func(s string) *intstr.IntOrString {
		if s == "" {
			return nil
		}
		v := intstr.Parse(s)
		return &v
	}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web", UID: "d"},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Strategy: appsv1.DeploymentStrategy{
				Type:          appsv1.RollingUpdateDeploymentStrategyType,
				RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: parse(surge), MaxUnavailable: parse(unavailable)},
			},
		},
	}
}

// rs makes a set of that size, of which so many pods are available; age orders sets.
func rs(name string, age int, size, available int32) *appsv1.ReplicaSet {
	return &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: types.UID(name),
			CreationTimestamp: metav1.NewTime(time.Unix(1000-int64(age), 0)),
		},
		Spec:   appsv1.ReplicaSetSpec{Replicas: &size},
		Status: appsv1.ReplicaSetStatus{Replicas: size, ReadyReplicas: available, AvailableReplicas: available},
	}
}

func TestFences(t *testing.T) {
	for _, tc := range []struct {
		replicas           int32
		surge, unavailable string
		wantSurge, wantUn  int32
	}{
		{10, "25%", "25%", 3, 2}, // up and down
		{4, "", "", 1, 1},
		{3, "", "", 1, 0},
		{1, "0", "0%", 0, 1}, // never stuck
		{2, "0", "50%", 0, 1},
		{3, "100%", "0", 3, 0},
		{2, "1", "9", 1, 2}, // no more than there are
		{0, "1", "1", 0, 0},
	} {
		surge, unavailable := fences(dep(tc.replicas, tc.surge, tc.unavailable))
		if surge != tc.wantSurge || unavailable != tc.wantUn {
			t.Errorf("%+v: got surge %d, unavailable %d", tc, surge, unavailable)
		}
	}
	d := dep(5, "2", "2")
	d.Spec.Strategy.Type = appsv1.RecreateDeploymentStrategyType
	if surge, unavailable := fences(d); surge != 0 || unavailable != 0 {
		t.Errorf("recreate: %d, %d", surge, unavailable)
	}
}

func TestGrownSize(t *testing.T) {
	for _, tc := range []struct{ replicas, total, current, want int32 }{
		{10, 0, 0, 10},   // first rollout: all at once
		{10, 10, 0, 3},   // surge
		{10, 13, 3, 3},   // no room
		{10, 11, 3, 5},   // room for two
		{10, 4, 4, 10},   // nothing old left
		{10, 20, 10, 10}, // done
	} {
		if got := grownSize(dep(tc.replicas, "25%", "25%"), tc.total, tc.current); got != tc.want {
			t.Errorf("%+v: got %d", tc, got)
		}
	}
}

func sizes(rs []resizing) string {
	out := ""
	for _, r := range rs {
		out += fmt.Sprintf("%s=%d ", r.set.Name, r.to)
	}
	return out
}

func TestShrinkOld(t *testing.T) {
	for _, tc := range []struct {
		name    string
		d       *appsv1.Deployment
		current *appsv1.ReplicaSet
		old     []*appsv1.ReplicaSet
		want    string
	}{
		{"surged, new not available", dep(10, "3", "2"), rs("new", 0, 3, 0), []*appsv1.ReplicaSet{rs("a", 5, 10, 10)}, "a=8 "},
		{"maxUnavailable 0 waits for the new one", dep(3, "1", "0"), rs("new", 0, 1, 0), []*appsv1.ReplicaSet{rs("a", 5, 3, 3)}, ""},
		{"maxUnavailable 0, new one available", dep(3, "1", "0"), rs("new", 0, 1, 1), []*appsv1.ReplicaSet{rs("a", 5, 3, 3)}, "a=2 "},
		{"unhealthy go first", dep(10, "3", "2"), rs("new", 0, 3, 3), []*appsv1.ReplicaSet{rs("a", 5, 8, 8), rs("b", 4, 2, 0)}, "a=5 b=0 "},
		{"oldest first", dep(4, "1", "1"), rs("new", 0, 3, 3), []*appsv1.ReplicaSet{rs("b", 4, 1, 1), rs("a", 5, 1, 1)}, "a=0 b=0 "},
		{"nothing old", dep(4, "1", "1"), rs("new", 0, 4, 4), nil, ""},
		{"all broken: old may go as far as the fence", dep(4, "1", "1"), rs("new", 0, 2, 0), []*appsv1.ReplicaSet{rs("a", 5, 4, 0)}, "a=3 "},
		{"a status that counts deleted pods does not cost more pods", dep(10, "3", "2"), rs("new", 0, 5, 1),
			[]*appsv1.ReplicaSet{func() *appsv1.ReplicaSet { r := rs("a", 5, 8, 8); r.Status.AvailableReplicas = 10; return r }()}, "a=7 "},
	} {
		if got := sizes(shrinkOld(tc.d, tc.current, tc.old)); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}

// A whole rolling update, step by step, keeps both fences.
func TestRollingNeverBreaksTheFences(t *testing.T) {
	for _, fence := range [][2]string{{"25%", "25%"}, {"1", "0"}, {"0", "1"}, {"100%", "0"}, {"2", "3"}} {
		d := dep(10, fence[0], fence[1])
		cur, old := rs("new", 0, 0, 0), rs("old", 9, 10, 10)
		steps := 0
		for ; *old.Spec.Replicas > 0 || cur.Status.AvailableReplicas < 10; steps++ {
			if steps > 100 {
				t.Fatalf("%v: stuck at new %d, old %d", fence, *cur.Spec.Replicas, *old.Spec.Replicas)
			}
			if to := grownSize(d, *cur.Spec.Replicas+*old.Spec.Replicas, *cur.Spec.Replicas); to != *cur.Spec.Replicas {
				*cur.Spec.Replicas = to
			} else if shrink := shrinkOld(d, cur, []*appsv1.ReplicaSet{old}); len(shrink) > 0 {
				*old.Spec.Replicas = shrink[0].to
				old.Status.AvailableReplicas = shrink[0].to
			} else if cur.Status.AvailableReplicas < *cur.Spec.Replicas {
				cur.Status.AvailableReplicas++ // one pod becomes available
			}
			if total := *cur.Spec.Replicas + *old.Spec.Replicas; total > 10+maxSurge(d) {
				t.Fatalf("%v: %d replicas", fence, total)
			}
			if avail := cur.Status.AvailableReplicas + old.Status.AvailableReplicas; avail < 10-maxUnavailable(d) {
				t.Fatalf("%v: %d available", fence, avail)
			}
		}
	}
}

func TestShareOut(t *testing.T) {
	set := func(r *appsv1.ReplicaSet, most int) *appsv1.ReplicaSet {
		r.Annotations = map[string]string{maxReplicasAnnotation: strconv.Itoa(most)}
		return r
	}
	for _, tc := range []struct {
		name string
		d    *appsv1.Deployment
		sets []*appsv1.ReplicaSet
		want string
	}{
		{"10 to 20 in mid-rollout", dep(20, "0", "1"), []*appsv1.ReplicaSet{set(rs("new", 0, 5, 5), 10), set(rs("old", 9, 5, 5), 10)}, "new=10 old=10 "},
		{"10 to 4", dep(4, "0", "1"), []*appsv1.ReplicaSet{set(rs("new", 0, 8, 8), 10), set(rs("old", 9, 2, 2), 10)}, "new=3 old=1 "},
		{"the rest goes to the biggest", dep(11, "0", "1"), []*appsv1.ReplicaSet{set(rs("new", 0, 5, 5), 10), set(rs("old", 9, 5, 5), 10)}, "new=6 old=5 "},
		{"to nothing", dep(0, "0", "1"), []*appsv1.ReplicaSet{set(rs("new", 0, 3, 3), 4), set(rs("old", 9, 1, 1), 4)}, "new=0 old=0 "},
		{"no change", dep(4, "0", "1"), []*appsv1.ReplicaSet{set(rs("new", 0, 3, 3), 4), set(rs("old", 9, 1, 1), 4)}, "new=3 old=1 "},
	} {
		got := shareOut(tc.d, tc.sets)
		if sizes(got) != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, sizes(got), tc.want)
		}
	}
}

func TestTemplateHash(t *testing.T) {
	template := func(image string) *corev1.PodTemplateSpec {
		return &corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "1", "b": "2", "c": "3"}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: image}}},
		}
	}
	one, err := templateHash(template("nginx:1"), nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if again, _ := templateHash(template("nginx:1"), nil); again != one {
			t.Fatalf("%s, then %s", one, again)
		}
	}
	if other, _ := templateHash(template("nginx:2"), nil); other == one {
		t.Fatal("two templates, one hash")
	}
	n := int32(1)
	if collided, _ := templateHash(template("nginx:1"), &n); collided == one {
		t.Fatal("a collision changes nothing")
	}
}

func TestAnnotate(t *testing.T) {
	d := dep(1, "", "")
	d.Annotations = map[string]string{
		"kubernetes.io/change-cause":         "image 2",
		corev1.LastAppliedConfigAnnotation:   "{}",
		revisionAnnotation:                   "7",
		"deprecated.deployment.rollback.to":  "1",
		"deployment.kubernetes.io/something": "kept",
	}
	set := rs("web-1", 0, 1, 1)
	if !annotate(set, d, 1) || set.Annotations[revisionAnnotation] != "1" || set.Annotations["kubernetes.io/change-cause"] != "image 2" {
		t.Fatalf("got %v", set.Annotations)
	}
	if _, copied := set.Annotations[corev1.LastAppliedConfigAnnotation]; copied || set.Annotations["deployment.kubernetes.io/something"] != "kept" {
		t.Fatalf("got %v", set.Annotations)
	}
	if annotate(set, d, 1) {
		t.Fatal("the second time is a change")
	}
	// A rollback makes it revision 3, then 5.
	annotate(set, d, 3)
	annotate(set, d, 5)
	if set.Annotations[revisionAnnotation] != "5" || set.Annotations[revisionHistoryAnnotation] != "1,3" {
		t.Fatalf("got %v", set.Annotations)
	}
	if long := addHistory(fmt.Sprintf("1,%01999d", 2), "3"); long != "3" {
		t.Fatalf("history of %d characters", len(long))
	}
}

func TestOverdue(t *testing.T) {
	d := dep(1, "", "")
	ten := int32(10)
	d.Spec.ProgressDeadlineSeconds = &ten
	at := time.Unix(5000, 0)
	had := &appsv1.DeploymentCondition{Reason: replicaSetUpdated, LastUpdateTime: metav1.NewTime(at)}
	if overdue(d, had, at.Add(10*time.Second)) || !overdue(d, had, at.Add(11*time.Second)) || overdue(d, nil, at) {
		t.Fatal("deadline is judged wrongly")
	}
	had.Reason = newRSAvailable
	if overdue(d, had, at.Add(time.Hour)) {
		t.Fatal("a finished rollout is overdue")
	}
}
