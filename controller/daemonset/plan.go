// SPDX-License-Identifier: Apache-2.0

package daemonset

import (
	"cmp"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/kplab/kplab/controller/podstate"
)

// plan is what a set has and wants, node by node. It is pure: it writes nothing.
type plan struct {
	set   *appsv1.DaemonSet
	hash  string // of the present template
	nodes []slot // sorted by name
	lost  []*corev1.Pod
	now   time.Time
	wait  time.Duration // until time alone makes a pod available; 0 when it makes none
}

// slot is one node.
type slot struct {
	name      string
	run, stay bool
	pods      []*corev1.Pod // the oldest first
}

func newPlan(set *appsv1.DaemonSet, hash string, nodes []*corev1.Node, pods []*corev1.Pod, now time.Time) *plan {
	p := &plan{set: set, hash: hash, now: now}
	byNode := map[string][]*corev1.Pod{}
	for _, pod := range pods {
		byNode[nodeOf(pod)] = append(byNode[nodeOf(pod)], pod)
	}
	for _, node := range nodes {
		s := slot{name: node.Name, pods: byNode[node.Name]}
		s.run, s.stay = judge(set, node)
		slices.SortFunc(s.pods, func(a, b *corev1.Pod) int {
			return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
		})
		p.nodes = append(p.nodes, s)
		delete(byNode, node.Name)
	}
	slices.SortFunc(p.nodes, func(a, b slot) int { return strings.Compare(a.name, b.name) })
	for _, pods := range byNode {
		p.lost = append(p.lost, pods...)
	}
	return p
}

func (p *plan) updated(pod *corev1.Pod) bool {
	return pod.Labels[appsv1.ControllerRevisionHashLabelKey] == p.hash
}

// runs reports whether a pod has the template of that hash.
func (p *plan) runs(hash string) bool {
	for _, s := range p.nodes {
		if slices.ContainsFunc(s.pods, func(pod *corev1.Pod) bool { return pod.Labels[appsv1.ControllerRevisionHashLabelKey] == hash }) {
			return true
		}
	}
	return false
}

func (p *plan) available(pod *corev1.Pod) bool {
	if !podstate.Active(pod) {
		return false
	}
	ok, left := podstate.Available(pod, minReady(p.set), p.now)
	if left > 0 && (p.wait == 0 || left < p.wait) {
		p.wait = left
	}
	return ok
}

// active are the pods of the node that count: the newest template's first one, and
// the older templates' first one.
func (p *plan) active(s slot) (updated, old *corev1.Pod) {
	for _, pod := range s.pods {
		switch {
		case !podstate.Active(pod):
		case p.updated(pod):
			updated = cmp.Or(updated, pod)
		default:
			old = cmp.Or(old, pod)
		}
	}
	return updated, old
}

// place returns the nodes that lack a pod, and the pods that are too many or have
// ended.
func (p *plan) place() (missing []string, extra []*corev1.Pod) {
	for _, s := range p.nodes {
		present := false
		updated, old := p.active(s)
		for _, pod := range s.pods {
			switch {
			case pod.DeletionTimestamp != nil:
				// Its place is free when it is gone. In a surge nobody waits for it.
				present = present || p.surge() == 0 || !p.updated(pod)
			case !s.stay, podstate.Finished(pod):
				extra = append(extra, pod)
				present = present || s.stay
			case p.keeps(pod, updated, old):
				present = true
			default:
				extra = append(extra, pod)
			}
		}
		if s.run && !present {
			missing = append(missing, s.name)
		}
	}
	for _, pod := range p.lost {
		// The node lifecycle's, unless the pod never got to a node.
		if pod.DeletionTimestamp == nil && pod.Spec.NodeName == "" && nodeOf(pod) != "" {
			extra = append(extra, pod)
		}
	}
	return missing, extra
}

// keeps reports whether an active pod is the one that its node should have. During a
// surge the old one stays until the new one is available.
func (p *plan) keeps(pod, updated, old *corev1.Pod) bool {
	switch {
	case updated == nil || old == nil:
		return pod == updated || pod == old
	case p.surge() == 0:
		// Two templates at once is nobody's plan: the older pod stays.
		first := updated
		if old.CreationTimestamp.Before(&updated.CreationTimestamp) {
			first = old
		}
		return pod == first
	case pod == updated:
		return true
	}
	return pod == old && !p.available(updated)
}

func (p *plan) wanted() int {
	n := 0
	for _, s := range p.nodes {
		if s.run {
			n++
		}
	}
	return n
}

func (p *plan) surge() int {
	return p.limit(func(r *appsv1.RollingUpdateDaemonSet) *intstr.IntOrString { return r.MaxSurge })
}

func (p *plan) maxUnavailable() int {
	return p.limit(func(r *appsv1.RollingUpdateDaemonSet) *intstr.IntOrString { return r.MaxUnavailable })
}

// limit is a bound of the update strategy in nodes; percentages are rounded up.
func (p *plan) limit(of func(*appsv1.RollingUpdateDaemonSet) *intstr.IntOrString) int {
	u := p.set.Spec.UpdateStrategy
	if u.Type != appsv1.RollingUpdateDaemonSetStrategyType || u.RollingUpdate == nil || of(u.RollingUpdate) == nil {
		return 0
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(of(u.RollingUpdate), p.wanted(), true)
	if err != nil {
		return 0
	}
	return n
}

// roll returns the nodes that get a second pod, and the old pods that go, in the next
// step of a rolling update. place had nothing to do.
func (p *plan) roll() (missing []string, extra []*corev1.Pod) {
	surge := p.surge()
	budget := p.maxUnavailable()
	var free, costly []*corev1.Pod // old pods; to delete a free one makes nothing worse
	for _, s := range p.nodes {
		if !s.run {
			continue
		}
		updated, old := p.active(s)
		switch {
		case updated == nil && old == nil:
			budget--
			surge--
		case updated != nil && old != nil:
			surge--
		case updated != nil:
			if !p.available(updated) {
				budget--
			}
		case !p.available(old):
			budget--
			free = append(free, old)
		default:
			costly = append(costly, old)
		}
	}
	if p.surge() == 0 {
		return nil, append(free, costly[:min(len(costly), max(0, budget))]...)
	}
	// A pod that does not work anyway is replaced without counting.
	for _, pod := range free {
		missing = append(missing, nodeOf(pod))
	}
	for _, pod := range costly[:min(len(costly), max(0, surge))] {
		missing = append(missing, nodeOf(pod))
	}
	return missing, nil
}

// status counts nodes and pods.
func (p *plan) status(collisions *int32) appsv1.DaemonSetStatus {
	st := appsv1.DaemonSetStatus{ObservedGeneration: p.set.Generation, CollisionCount: collisions, Conditions: p.set.Status.Conditions}
	for _, s := range p.nodes {
		if !s.run {
			if len(s.pods) > 0 {
				st.NumberMisscheduled++
			}
			continue
		}
		st.DesiredNumberScheduled++
		if len(s.pods) == 0 {
			continue
		}
		st.CurrentNumberScheduled++
		// The youngest stands for the node: during an update it is the new one.
		pod := s.pods[len(s.pods)-1]
		if podstate.Ready(pod) {
			st.NumberReady++
			if p.available(pod) {
				st.NumberAvailable++
			}
		}
		if p.updated(pod) {
			st.UpdatedNumberScheduled++
		}
	}
	st.NumberUnavailable = st.DesiredNumberScheduled - st.NumberAvailable
	return st
}
