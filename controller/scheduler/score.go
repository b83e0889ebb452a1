// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"cmp"

	corev1 "k8s.io/api/core/v1"
)

// best returns the node that suits the pod most; nodes come sorted by name and the
// first of equals wins, so that the same cluster always gives the same placement.
func best(fit []*nodeInfo, need needs) *nodeInfo {
	winner, top := fit[0], scoreOf(fit[0], need)
	for _, n := range fit[1:] {
		if s := scoreOf(n, need); s.compare(top) > 0 {
			winner, top = n, s
		}
	}
	return winner
}

// score is compared field by field, in this order. The user's own wishes come first;
// then the pods of one owner are spread, then all pods.
type score struct {
	avoided   int   // taints of effect PreferNoSchedule that the pod does not tolerate: fewer is better
	preferred int64 // weight of the preferred node affinities that match: more is better
	siblings  int   // pods of the same owner: fewer is better
	pods      int   // pods: fewer is better
}

func scoreOf(n *nodeInfo, need needs) score {
	s := score{pods: len(n.pods)}
	for _, taint := range n.node.Spec.Taints {
		if taint.Effect == corev1.TaintEffectPreferNoSchedule && !tolerates(need.pod, taint) {
			s.avoided++
		}
	}
	if need.preferred != nil {
		s.preferred = need.preferred.Score(n.node)
	}
	if need.placed.owner != "" {
		s.siblings = n.owners[need.placed.owner]
	}
	return s
}

// compare is positive when s is the better one.
func (s score) compare(other score) int {
	return cmp.Or(
		cmp.Compare(other.avoided, s.avoided),
		cmp.Compare(s.preferred, other.preferred),
		cmp.Compare(other.siblings, s.siblings),
		cmp.Compare(other.pods, s.pods),
	)
}
