// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

type nodeOption func(*corev1.Node)

func node(name string, opts ...nodeOption) *corev1.Node {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}},
		Status: corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
	for _, o := range opts {
		o(n)
	}
	return n
}

func taint(key, value string, effect corev1.TaintEffect) nodeOption {
	return func(n *corev1.Node) {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key, Value: value, Effect: effect})
	}
}

func label(key, value string) nodeOption { return func(n *corev1.Node) { n.Labels[key] = value } }

type podOption func(*corev1.Pod)

func pod(name string, opts ...podOption) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: types.UID(name)}}
	for _, o := range opts {
		o(p)
	}
	return p
}

func ownedBy(owner string) podOption {
	return func(p *corev1.Pod) {
		yes := true
		p.OwnerReferences = []metav1.OwnerReference{{UID: types.UID(owner), Controller: &yes}}
	}
}

func port80(ip string, protocol corev1.Protocol) podOption {
	return func(p *corev1.Pod) {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Ports: []corev1.ContainerPort{{HostIP: ip, HostPort: 80, Protocol: protocol}}})
	}
}

// lab is a control plane with its taint and two workers.
func lab() *state {
	s := newState()
	s.setNode(node("master", taint("node-role.kubernetes.io/control-plane", "", corev1.TaintEffectNoSchedule)))
	s.setNode(node("node2"))
	s.setNode(node("node1"))
	return s
}

// put schedules pods one after the other and returns how many each node got.
func put(t *testing.T, s *state, pods ...*corev1.Pod) map[string]int {
	t.Helper()
	got := map[string]int{}
	for _, p := range pods {
		name, why := s.pick(p, storage{})
		if why != "" {
			t.Fatalf("%s: %s", p.Name, why)
		}
		s.place(p, name)
		got[name]++
	}
	return got
}

func many(n int, prefix string, opts ...podOption) []*corev1.Pod {
	var out []*corev1.Pod
	for i := range n {
		out = append(out, pod(fmt.Sprint(prefix, i), opts...))
	}
	return out
}

func TestSpread(t *testing.T) {
	s := lab()
	if got := put(t, s, many(3, "web-", ownedBy("web"))...); got["node1"] != 2 || got["node2"] != 1 {
		t.Fatalf("3 replicas over 2 workers: %v", got)
	}
	// Siblings count more than the number of pods: one each, although node1 has more.
	if got := put(t, s, many(2, "db-", ownedBy("db"))...); got["node1"] != 1 || got["node2"] != 1 {
		t.Fatalf("a second owner: %v", got)
	}
	// Pods without an owner go where there are fewest.
	if got := put(t, s, pod("alone")); got["node2"] != 1 {
		t.Fatalf("no owner: %v", got)
	}
	s = lab()
	for i := range 3 {
		s.setNode(node(fmt.Sprint("more", i)))
	}
	got := put(t, s, many(500, "burst-", ownedBy("burst"))...)
	for name, n := range got {
		if n != 100 {
			t.Fatalf("%s got %d of 500 pods: %v", name, n, got)
		}
	}
}

func TestRefusals(t *testing.T) {
	for _, tc := range []struct {
		name string
		pod  *corev1.Pod
		prep func(*state)
		want string
	}{
		{"selector", pod("p", func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"disk": "ssd"} }), nil,
			"0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 node(s) didn't match Pod's node affinity/selector."},
		{"cordoned", pod("p"), func(s *state) {
			s.setNode(node("node1", func(n *corev1.Node) { n.Spec.Unschedulable = true }, taint(corev1.TaintNodeUnschedulable, "", corev1.TaintEffectNoSchedule)))
			s.setNode(node("node2", taint("gpu", "yes", corev1.TaintEffectNoExecute)))
		}, "0/3 nodes are available: 1 node(s) had untolerated taint {gpu: yes}, 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 1 node(s) were unschedulable."},
		{"not ready", pod("p"), func(s *state) {
			down := func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionFalse }
			s.setNode(node("node1", down))
			s.setNode(node("node2", down, taint(corev1.TaintNodeUnreachable, "", corev1.TaintEffectNoSchedule)))
		}, "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }, 1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }."},
		{"full", pod("p"), func(s *state) {
			two := func(n *corev1.Node) {
				n.Status.Allocatable = corev1.ResourceList{corev1.ResourcePods: resource.MustParse("2")}
			}
			s.setNode(node("node1", two))
			s.setNode(node("node2", two))
			put(t, s, many(4, "x")...)
		}, "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 Too many pods."},
		{"host port", pod("p", port80("", "")), func(s *state) {
			put(t, s, many(2, "x", port80("10.0.0.1", corev1.ProtocolTCP))...)
		}, "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 node(s) didn't have free ports for the requested pod ports."},
	} {
		s := lab()
		if tc.prep != nil {
			tc.prep(s)
		}
		if name, why := s.pick(tc.pod, storage{}); why != tc.want {
			t.Errorf("%s: placed on %q, said %q", tc.name, name, why)
		}
	}
	if _, why := newState().pick(pod("p"), storage{}); why != "no nodes available to schedule pods" {
		t.Errorf("no nodes: %q", why)
	}
}

func TestAccepts(t *testing.T) {
	tolerateAll := func(p *corev1.Pod) {
		p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	}
	affinity := func(key string, values ...string) podOption {
		return func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: values}},
				}}},
			}}
		}
	}
	prefers := func(key, value string) podOption {
		return func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{Weight: 5, Preference: corev1.NodeSelectorTerm{
					MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{value}}},
				}}},
			}}
		}
	}
	for _, tc := range []struct {
		name string
		pod  *corev1.Pod
		prep func(*state)
		want string
	}{
		{"tolerates the control plane", pod("p", tolerateAll), func(s *state) { put(t, s, many(4, "x")...) }, "master"},
		{"required affinity", pod("p", affinity(corev1.LabelHostname, "node2", "nodeX")), nil, "node2"},
		{"preferred affinity", pod("p", prefers(corev1.LabelHostname, "node2")), func(s *state) {
			s.place(pod("x"), "node2")
		}, "node2"},
		{"avoids PreferNoSchedule", pod("p"), func(s *state) {
			s.setNode(node("node1", taint("slow", "", corev1.TaintEffectPreferNoSchedule)))
			s.place(pod("x"), "node2")
		}, "node2"},
		{"same host port, other protocol", pod("p", port80("", corev1.ProtocolUDP)), func(s *state) {
			s.place(pod("x", port80("", corev1.ProtocolTCP)), "node1")
			s.place(pod("y", port80("", corev1.ProtocolUDP)), "node2")
		}, "node1"},
		{"tolerates a cordon", pod("p", tolerateAll, affinity(corev1.LabelHostname, "node1")), func(s *state) {
			s.setNode(node("node1", func(n *corev1.Node) { n.Spec.Unschedulable = true }))
		}, "node1"},
		{"room again after a removal", pod("p", port80("", "")), func(s *state) {
			s.place(pod("x", port80("", "")), "node1")
			s.place(pod("y", port80("", "")), "node2")
			s.remove("y")
		}, "node2"},
		{"node comes back with its pods", pod("p"), func(s *state) {
			s.place(pod("x"), "node1")
			s.removeNode("node1")
			s.setNode(node("node1"))
		}, "node2"},
	} {
		s := lab()
		if tc.prep != nil {
			tc.prep(s)
		}
		if name, why := s.pick(tc.pod, storage{}); name != tc.want {
			t.Errorf("%s: placed on %q %s, want %q", tc.name, name, why, tc.want)
		}
	}
}

func TestStateCountsOnce(t *testing.T) {
	s := lab()
	p := pod("p", ownedBy("o"))
	s.place(p, "node1")
	s.place(p, "node1")
	s.place(p, "node2") // the API decided otherwise
	if len(s.nodes["node1"].pods) != 0 || len(s.nodes["node2"].pods) != 1 || s.nodes["node2"].owners["o"] != 1 {
		t.Fatalf("got %+v", s.nodes)
	}
	s.place(pod("q"), "ghost")
	if len(s.known()) != 3 || !s.remove("q") || s.remove("q") {
		t.Fatal("an unknown node is counted wrongly")
	}
	if _, kept := s.nodes["ghost"]; kept {
		t.Fatal("an unknown node without pods is kept")
	}
	s.remove("p")
	if len(s.nodes["node2"].owners) != 0 {
		t.Fatal("owner is counted still")
	}
}

func TestRoomier(t *testing.T) {
	a := node("n")
	if roomier(a, node("n", func(n *corev1.Node) { n.ResourceVersion = "9"; n.Status.Images = []corev1.ContainerImage{{}} })) {
		t.Fatal("a heartbeat makes room")
	}
	for _, o := range []nodeOption{
		taint("k", "", corev1.TaintEffectNoSchedule), label("zone", "a"),
		func(n *corev1.Node) { n.Spec.Unschedulable = true },
		func(n *corev1.Node) { n.Status.Conditions = nil },
	} {
		if !roomier(a, node("n", o)) {
			t.Fatal("a change is overlooked")
		}
	}
}

func BenchmarkPick(b *testing.B) {
	s := lab()
	for i := range b.N {
		p := pod(fmt.Sprint(i), ownedBy("o"))
		name, _ := s.pick(p, storage{})
		if name != "" {
			s.place(p, name)
		}
	}
}
