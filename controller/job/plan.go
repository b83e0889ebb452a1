// SPDX-License-Identifier: Apache-2.0

package job

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/podstate"
)

// burst is the most pods that are made or deleted in one round.
const burst = 500

// plan is what a Job that goes on needs.
type plan struct {
	// remove are pods too many. They do not count as failed.
	remove []*corev1.Pod
	// create has the index of each pod to make, or noIndex.
	create []int
	// wait is the time until more pods may be made; 0 when nothing waits.
	wait time.Duration
}

// plan decides which pods to make or to remove; never both, removal comes first.
func (l *look) plan() plan {
	active := len(l.active)
	if suspended(l.job) {
		return plan{remove: l.active}
	}
	want := l.wanted()
	if remove := l.surplus(max(0, active-want)); len(remove) > 0 {
		return plan{remove: remove[:min(len(remove), burst)]}
	}
	missing := want - active
	if replacesFailedOnly(l.job) {
		missing -= int(l.terminating)
	}
	if missing <= 0 {
		return plan{}
	}
	if !perIndex(l.job) {
		if wait := l.failures.wait(l.now); wait > 0 {
			return plan{wait: wait}
		}
	}
	missing = min(missing, burst)
	if !indexed(l.job) {
		return plan{create: slices.Repeat([]int{noIndex}, missing)}
	}
	return l.planIndexes(missing)
}

// wanted is how many pods should be active.
func (l *look) wanted() int {
	parallelism := int(ptr.Deref(l.job.Spec.Parallelism, 1))
	switch {
	case l.job.Spec.Completions != nil:
		return max(0, min(parallelism, completions(l.job)-int(l.succeeded)))
	case l.succeeded > 0:
		// The work queue is empty, one pod says: the others come to their end.
		return len(l.active)
	}
	return parallelism
}

// planIndexes picks the indexes whose pods are missing. With a limit for each index,
// each has its own pause after a failure.
func (l *look) planIndexes(missing int) plan {
	taken := union(l.done, l.lost, indexesOfPods(l.active))
	if replacesFailedOnly(l.job) {
		var leaving []*corev1.Pod
		for _, pod := range l.pods {
			if pod.DeletionTimestamp != nil && !podstate.Finished(pod) {
				leaving = append(leaving, pod)
			}
		}
		taken = union(taken, indexesOfPods(leaving))
	}
	var p plan
	for _, i := range taken.missing(missing, completions(l.job)) {
		wait := l.pauseOf(i)
		switch {
		case wait == 0:
			p.create = append(p.create, i)
		case p.wait == 0 || wait < p.wait:
			p.wait = wait
		}
	}
	return p
}

// pauseOf is how long the next pod of an index has to wait.
func (l *look) pauseOf(index int) time.Duration {
	last := l.awaited[index]
	if last == nil {
		return 0
	}
	counted, ignored := failuresOf(last)
	return failures{count: counted + ignored + 1, last: endOf(last)}.wait(l.now)
}

// surplus returns the active pods to remove: those of an Indexed Job whose index is
// not the Job's or taken twice, and more until there are n, the least valuable first.
func (l *look) surplus(n int) []*corev1.Pod {
	left := slices.Clone(l.active)
	slices.SortFunc(left, func(a, b *corev1.Pod) int { return podstate.CompareNeed(a, b, nil) })
	var remove []*corev1.Pod
	if indexed(l.job) {
		seen := map[int]bool{}
		var keep []*corev1.Pod
		for _, pod := range slices.Backward(left) {
			i := indexOf(pod)
			if i == noIndex || i >= completions(l.job) || seen[i] {
				remove = append(remove, pod)
				continue
			}
			seen[i] = true
			keep = append(keep, pod)
		}
		slices.Reverse(keep)
		left = keep
	}
	if more := n - len(remove); more > 0 {
		remove = append(remove, left[:more]...)
	}
	return remove
}
