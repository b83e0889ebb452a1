// SPDX-License-Identifier: Apache-2.0

package daemonset

import (
	"fmt"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func node(name string, taints ...corev1.Taint) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"name": name}}, Spec: corev1.NodeSpec{Taints: taints}}
}

type podOption func(*corev1.Pod)

// pod is a ready pod of a node, made from the template of that hash.
func pod(on, hash string, opts ...podOption) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: on + "-" + hash, Namespace: "ns", UID: types.UID(on + hash),
			Labels: map[string]string{appsv1.ControllerRevisionHashLabelKey: hash},
		},
		Spec: corev1.PodSpec{NodeName: on},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{
			Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(start),
		}}},
	}
	for _, o := range opts {
		o(p)
	}
	return p
}

func unready(p *corev1.Pod)  { p.Status.Conditions = nil }
func younger(p *corev1.Pod)  { p.CreationTimestamp = metav1.NewTime(start.Add(time.Hour)) }
func failed(p *corev1.Pod)   { p.Status.Phase = corev1.PodFailed }
func deleting(p *corev1.Pod) { now := metav1.NewTime(start); p.DeletionTimestamp = &now }

func set(unavailable, surge int) *appsv1.DaemonSet {
	u, s := intstr.FromInt(unavailable), intstr.FromInt(surge)
	return &appsv1.DaemonSet{Spec: appsv1.DaemonSetSpec{UpdateStrategy: appsv1.DaemonSetUpdateStrategy{
		Type: appsv1.RollingUpdateDaemonSetStrategyType, RollingUpdate: &appsv1.RollingUpdateDaemonSet{MaxUnavailable: &u, MaxSurge: &s},
	}}}
}

func names(missing []string, extra []*corev1.Pod) string {
	out := []string{}
	for _, p := range extra {
		out = append(out, "-"+p.Name)
	}
	for _, n := range missing {
		out = append(out, "+"+n)
	}
	slices.Sort(out)
	return fmt.Sprint(out)
}

func TestPlan(t *testing.T) {
	noExecute := corev1.Taint{Key: "k", Effect: corev1.TaintEffectNoExecute}
	noSchedule := corev1.Taint{Key: "k", Effect: corev1.TaintEffectNoSchedule}
	notReady := corev1.Taint{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoExecute}
	abc := []*corev1.Node{node("a"), node("b"), node("c")}
	for _, tc := range []struct {
		id    string
		set   *appsv1.DaemonSet
		nodes []*corev1.Node
		pods  []*corev1.Pod
		place string
		roll  string // asked when place has nothing to do
	}{
		{"a pod for each node", set(1, 0), abc, []*corev1.Pod{pod("b", "new")}, "[+a +c]", ""},
		{"one too many", set(1, 0), abc[:1], []*corev1.Pod{pod("a", "new"), pod("a", "new", younger)}, "[-a-new]", ""},
		{"one has failed", set(1, 0), abc[:1], []*corev1.Pod{pod("a", "new", failed)}, "[-a-new]", ""},
		{"one is on its way out", set(1, 0), abc[:1], []*corev1.Pod{pod("a", "new", deleting)}, "[]", "[]"},
		{"a taint that only keeps new ones away", set(1, 0), []*corev1.Node{node("a", noSchedule), node("b", noSchedule)}, []*corev1.Pod{pod("a", "new")}, "[]", "[]"},
		{"a taint that drives them out", set(1, 0), []*corev1.Node{node("a", noExecute)}, []*corev1.Pod{pod("a", "new")}, "[-a-new]", ""},
		{"a node in trouble", set(1, 0), []*corev1.Node{node("a", notReady)}, nil, "[+a]", ""},
		{"a node that went", set(1, 0), nil, []*corev1.Pod{pod("a", "new")}, "[]", "[]"},
		{"an update, one at a time", set(1, 0), abc, []*corev1.Pod{pod("a", "old"), pod("b", "old"), pod("c", "old")}, "[]", "[-a-old]"},
		{"two at a time", set(2, 0), abc, []*corev1.Pod{pod("a", "old"), pod("b", "old"), pod("c", "old")}, "[]", "[-a-old -b-old]"},
		{"one new one is not ready", set(1, 0), abc, []*corev1.Pod{pod("a", "new", unready), pod("b", "old"), pod("c", "old")}, "[]", "[]"},
		{"old ones that do not work cost nothing", set(1, 0), abc, []*corev1.Pod{pod("a", "old", unready), pod("b", "old", unready), pod("c", "old")}, "[]", "[-a-old -b-old]"},
		{"a surge begins", set(0, 1), abc, []*corev1.Pod{pod("a", "old"), pod("b", "old"), pod("c", "old")}, "[]", "[+a]"},
		{"a surge waits", set(0, 1), abc, []*corev1.Pod{pod("a", "old"), pod("a", "new", younger, unready), pod("b", "old"), pod("c", "old")}, "[]", "[]"},
		{"a surge ends", set(0, 1), abc[:1], []*corev1.Pod{pod("a", "old"), pod("a", "new", younger)}, "[-a-old]", ""},
	} {
		t.Run(tc.id, func(t *testing.T) {
			p := newPlan(tc.set, "new", tc.nodes, tc.pods, start.Add(time.Minute))
			got := names(p.place())
			if got != tc.place {
				t.Fatalf("place %s, want %s", got, tc.place)
			}
			if got == "[]" {
				if got := names(p.roll()); got != tc.roll {
					t.Errorf("roll %s, want %s", got, tc.roll)
				}
			}
		})
	}
}

func TestStatus(t *testing.T) {
	d := set(1, 0)
	d.Generation = 3
	d.Spec.MinReadySeconds = 120
	d.Spec.Template.Spec.NodeSelector = map[string]string{"name": "a"}
	p := newPlan(d, "new", []*corev1.Node{node("a"), node("b")}, []*corev1.Pod{pod("a", "new"), pod("b", "old")}, start.Add(time.Minute))
	got := p.status(nil)
	want := appsv1.DaemonSetStatus{ObservedGeneration: 3, DesiredNumberScheduled: 1, CurrentNumberScheduled: 1, NumberMisscheduled: 1, NumberReady: 1, UpdatedNumberScheduled: 1, NumberUnavailable: 1}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%+v\nwant %+v", got, want)
	}
	if p.wait != time.Minute {
		t.Errorf("looks again after %v", p.wait)
	}
}

// A daemon is placed by the scheduler, on its node alone.
func TestPod(t *testing.T) {
	spec := corev1.PodSpec{HostNetwork: true, Tolerations: []corev1.Toleration{{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}}}
	tolerate(&spec)
	if len(spec.Tolerations) != 7 {
		t.Errorf("%d tolerations", len(spec.Tolerations))
	}
	pinTo(&spec, "a")
	if got := nodeOf(&corev1.Pod{Spec: spec}); got != "a" {
		t.Errorf("meant for %q", got)
	}
}
