// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// state is the scheduler's account of nodes and the pods on them, assumed ones
// included. It has no lock of its own.
type state struct {
	nodes map[string]*nodeInfo
	// where says on which node each pod is counted.
	where map[types.UID]string
	// names is the sorted list of known nodes; nil when it has to be made anew.
	names []string
}

// nodeInfo is one node. A pod may be bound to a node that is not known (yet, or any
// more): then node is nil.
type nodeInfo struct {
	node   *corev1.Node
	pods   map[types.UID]placed
	owners map[types.UID]int // pods by their controller
}

// placed is what is remembered of a pod.
type placed struct {
	owner types.UID
	ports []hostPort
}

// hostPort is a port that a pod takes on its node's addresses.
type hostPort struct {
	ip       string // "" stands for all addresses
	protocol corev1.Protocol
	port     int32
}

func newState() *state {
	return &state{nodes: map[string]*nodeInfo{}, where: map[types.UID]string{}}
}

func (s *state) info(name string) *nodeInfo {
	n := s.nodes[name]
	if n == nil {
		n = &nodeInfo{pods: map[types.UID]placed{}, owners: map[types.UID]int{}}
		s.nodes[name] = n
	}
	return n
}

func (s *state) setNode(node *corev1.Node) {
	n := s.info(node.Name)
	if n.node == nil {
		s.names = nil
	}
	n.node = node
}

func (s *state) removeNode(name string) {
	n := s.nodes[name]
	if n == nil {
		return
	}
	s.names = nil
	n.node = nil
	if len(n.pods) == 0 {
		delete(s.nodes, name)
	}
}

func (s *state) has(uid types.UID) bool { _, ok := s.where[uid]; return ok }

// place counts pod on the node, and no longer on another.
func (s *state) place(pod *corev1.Pod, node string) {
	if was, ok := s.where[pod.UID]; ok {
		if was == node {
			return // what is remembered of a pod cannot change
		}
		s.remove(pod.UID)
	}
	p := placed{owner: ownerOf(pod), ports: hostPorts(pod)}
	n := s.info(node)
	n.pods[pod.UID] = p
	if p.owner != "" {
		n.owners[p.owner]++
	}
	s.where[pod.UID] = node
}

// remove stops counting a pod and reports whether it was counted.
func (s *state) remove(uid types.UID) bool {
	name, ok := s.where[uid]
	if !ok {
		return false
	}
	delete(s.where, uid)
	n := s.nodes[name]
	p := n.pods[uid]
	delete(n.pods, uid)
	if p.owner != "" {
		if n.owners[p.owner]--; n.owners[p.owner] == 0 {
			delete(n.owners, p.owner)
		}
	}
	if n.node == nil && len(n.pods) == 0 {
		delete(s.nodes, name)
	}
	return true
}

// known returns the nodes that exist, sorted by name.
func (s *state) known() []string {
	if s.names == nil {
		s.names = slices.Sorted(maps.Keys(s.nodes))
		s.names = slices.DeleteFunc(s.names, func(name string) bool { return s.nodes[name].node == nil })
	}
	return s.names
}

// ownerOf returns the UID of the pod's controller, "" when it has none.
func ownerOf(pod *corev1.Pod) types.UID {
	if ref := metav1.GetControllerOf(pod); ref != nil {
		return ref.UID
	}
	return ""
}

// hostPorts returns the ports that the pod takes on its node.
func hostPorts(pod *corev1.Pod) []hostPort {
	var ports []hostPort
	for _, containers := range [][]corev1.Container{pod.Spec.Containers, restartable(pod.Spec.InitContainers)} {
		for i := range containers {
			for _, p := range containers[i].Ports {
				if p.HostPort <= 0 {
					continue
				}
				h := hostPort{ip: p.HostIP, protocol: p.Protocol, port: p.HostPort}
				if h.ip == "0.0.0.0" || h.ip == "::" {
					h.ip = ""
				}
				if h.protocol == "" {
					h.protocol = corev1.ProtocolTCP
				}
				ports = append(ports, h)
			}
		}
	}
	return ports
}

// restartable returns the init containers that run beside the main ones.
func restartable(all []corev1.Container) []corev1.Container {
	var out []corev1.Container
	for i := range all {
		if p := all[i].RestartPolicy; p != nil && *p == corev1.ContainerRestartPolicyAlways {
			out = append(out, all[i])
		}
	}
	return out
}

func (h hostPort) conflicts(other hostPort) bool {
	return h.port == other.port && h.protocol == other.protocol && (h.ip == other.ip || h.ip == "" || other.ip == "")
}

// roomier reports whether a changed node may take pods that it refused before.
// Heartbeats and images do not matter.
func roomier(old, cur *corev1.Node) bool {
	return old.Spec.Unschedulable != cur.Spec.Unschedulable ||
		nodeReady(old) != nodeReady(cur) ||
		!equality.Semantic.DeepEqual(old.Spec.Taints, cur.Spec.Taints) ||
		!maps.Equal(old.Labels, cur.Labels) ||
		podCapacity(old) != podCapacity(cur)
}

// specChanged reports whether a pod that waits changed in a way that may let it in.
func specChanged(old, cur *corev1.Pod) bool {
	return !equality.Semantic.DeepEqual(old.Spec, cur.Spec) || !maps.Equal(old.Labels, cur.Labels)
}
