// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"cmp"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// CompareNeed is negative when a should go before b, of two active pods of which one is
// too many. sameNode says, by pod UID, how many related pods share each pod's node; nil
// when that is of no interest. The order is upstream's: pods without a node, pending
// ones, those that are not ready, those with a lower deletion cost, those that share
// their node with more siblings, those ready for a shorter time, those restarted more
// often, the younger ones.
func CompareNeed(a, b *corev1.Pod, sameNode map[types.UID]int) int {
	return cmp.Or(
		falseFirst(a.Spec.NodeName != "", b.Spec.NodeName != ""),
		cmp.Compare(phaseRank(a), phaseRank(b)),
		falseFirst(Ready(a), Ready(b)),
		cmp.Compare(deletionCost(a), deletionCost(b)),
		cmp.Compare(sameNode[b.UID], sameNode[a.UID]),
		shorterReadyFirst(a, b),
		cmp.Compare(Restarts(b), Restarts(a)),
		b.CreationTimestamp.Compare(a.CreationTimestamp.Time),
		strings.Compare(a.Name, b.Name), // a tie is broken the same way each time
	)
}

func falseFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

func phaseRank(pod *corev1.Pod) int {
	switch pod.Status.Phase {
	case corev1.PodRunning:
		return 2
	case corev1.PodUnknown:
		return 1
	default: // pending, or no status yet
		return 0
	}
}

// deletionCost is the user's own ranking; what cannot be read counts as 0.
func deletionCost(pod *corev1.Pod) int64 {
	n, err := strconv.ParseInt(pod.Annotations[corev1.PodDeletionCost], 10, 32)
	if err != nil {
		return 0
	}
	return n
}

func shorterReadyFirst(a, b *corev1.Pod) int {
	sinceA, okA := ReadySince(a)
	sinceB, okB := ReadySince(b)
	if !okA || !okB {
		return 0 // both are not ready, or they were told apart before
	}
	// A zero time is "we do not know": treated as the shortest.
	if sinceA.IsZero() != sinceB.IsZero() {
		return falseFirst(!sinceA.IsZero(), !sinceB.IsZero())
	}
	return sinceB.Compare(sinceA.Time)
}
