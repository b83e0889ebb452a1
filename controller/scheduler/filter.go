// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	schedhelpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
)

// defaultPods is how many pods a node takes when it does not say.
const defaultPods = 110

// pick returns the node for pod, or why there is none, in upstream's words: people
// search for them.
func (s *state) pick(pod *corev1.Pod, storage storage) (node, refusal string) {
	names := s.known()
	if len(names) == 0 {
		return "", "no nodes available to schedule pods"
	}
	need := needsOf(pod)
	need.storage = storage
	reasons := map[string]int{}
	var fit []*nodeInfo
	for _, name := range names {
		n := s.nodes[name]
		if why := n.refuses(need); why != "" {
			reasons[why]++
		} else {
			fit = append(fit, n)
		}
	}
	if len(fit) == 0 {
		return "", explain(len(names), reasons)
	}
	return best(fit, need).node.Name, ""
}

// explain puts the nodes' reasons together: "0/3 nodes are available: 1 node(s) …, 2
// node(s) ….".
func explain(nodes int, reasons map[string]int) string {
	parts := make([]string, 0, len(reasons))
	for why, n := range reasons {
		parts = append(parts, fmt.Sprintf("%d %s", n, why))
	}
	slices.Sort(parts)
	return fmt.Sprintf("0/%d nodes are available: %s.", nodes, strings.Join(parts, ", "))
}

// needs is what a pod asks of a node, read from its spec once for all nodes.
type needs struct {
	pod       *corev1.Pod
	placed    placed
	required  nodeaffinity.RequiredNodeAffinity
	preferred *nodeaffinity.PreferredSchedulingTerms
	storage   storage
}

func needsOf(pod *corev1.Pod) needs {
	n := needs{
		pod:      pod,
		placed:   placed{owner: ownerOf(pod), ports: hostPorts(pod)},
		required: nodeaffinity.GetRequiredNodeAffinity(pod),
	}
	if a := pod.Spec.Affinity; a != nil && a.NodeAffinity != nil {
		// Terms that cannot be parsed are wishes that cannot be met.
		n.preferred, _ = nodeaffinity.NewPreferredSchedulingTerms(a.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
	}
	return n
}

// refuses returns why the node cannot take the pod, "" when it can. The first reason
// in upstream's order of filters is the one that is told.
func (n *nodeInfo) refuses(need needs) string {
	if n.node.Spec.Unschedulable && !tolerates(need.pod, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}) {
		return "node(s) were unschedulable"
	}
	for _, taint := range taintsOf(n.node) {
		if taint.Effect != corev1.TaintEffectPreferNoSchedule && !tolerates(need.pod, taint) {
			return fmt.Sprintf("node(s) had untolerated taint {%s: %s}", taint.Key, taint.Value)
		}
	}
	if ok, err := need.required.Match(n.node); err != nil || !ok {
		return "node(s) didn't match Pod's node affinity/selector"
	}
	if n.portsTaken(need.placed.ports) {
		return "node(s) didn't have free ports for the requested pod ports"
	}
	if len(n.pods) >= podCapacity(n.node) {
		return "Too many pods"
	}
	return need.storage.refuses(n.node)
}

// taintsOf returns the node's taints. A node that is not ready counts as tainted
// from the moment it says so; the taint itself is written a little later, by the
// node lifecycle controller.
func taintsOf(node *corev1.Node) []corev1.Taint {
	taints := slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(t corev1.Taint) bool {
		return t.Key == corev1.TaintNodeUnschedulable && node.Spec.Unschedulable // judged before
	})
	if nodeReady(node) || slices.ContainsFunc(taints, func(t corev1.Taint) bool {
		return t.Key == corev1.TaintNodeNotReady || t.Key == corev1.TaintNodeUnreachable
	}) {
		return taints
	}
	return append(taints, corev1.Taint{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule})
}

func tolerates(pod *corev1.Pod, taint corev1.Taint) bool {
	return schedhelpers.TolerationsTolerateTaint(klog.Logger{}, pod.Spec.Tolerations, &taint, false)
}

func (n *nodeInfo) portsTaken(wanted []hostPort) bool {
	if len(wanted) == 0 {
		return false
	}
	for _, p := range n.pods {
		for _, have := range p.ports {
			if slices.ContainsFunc(wanted, have.conflicts) {
				return true
			}
		}
	}
	return false
}

func nodeReady(node *corev1.Node) bool {
	for i := range node.Status.Conditions {
		if node.Status.Conditions[i].Type == corev1.NodeReady {
			return node.Status.Conditions[i].Status == corev1.ConditionTrue
		}
	}
	return false
}

// podCapacity is how many pods the node takes.
func podCapacity(node *corev1.Node) int {
	for _, list := range []corev1.ResourceList{node.Status.Allocatable, node.Status.Capacity} {
		if q, ok := list[corev1.ResourcePods]; ok {
			return int(q.Value())
		}
	}
	return defaultPods
}
