// SPDX-License-Identifier: Apache-2.0

package deployment

import (
	"cmp"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// This file holds the arithmetic: pure functions of the objects.

func replicasOf(rs *appsv1.ReplicaSet) int32 {
	if rs == nil || rs.Spec.Replicas == nil {
		return 0
	}
	return *rs.Spec.Replicas
}

// sum adds up f over sets.
func sum(sets []*appsv1.ReplicaSet, f func(*appsv1.ReplicaSet) int32) int32 {
	var n int32
	for _, rs := range sets {
		if rs != nil {
			n += f(rs)
		}
	}
	return n
}

func statusReplicas(rs *appsv1.ReplicaSet) int32    { return rs.Status.Replicas }
func readyReplicas(rs *appsv1.ReplicaSet) int32     { return rs.Status.ReadyReplicas }
func availableReplicas(rs *appsv1.ReplicaSet) int32 { return rs.Status.AvailableReplicas }

// sureAvailable is availableReplicas without those that are about to be deleted: the
// status may still count them after the set was scaled down.
func sureAvailable(rs *appsv1.ReplicaSet) int32 {
	return min(rs.Status.AvailableReplicas, replicasOf(rs))
}

// active returns the sets that ought to have pods.
func active(sets []*appsv1.ReplicaSet) []*appsv1.ReplicaSet {
	return slices.DeleteFunc(slices.Clone(sets), func(rs *appsv1.ReplicaSet) bool {
		return rs == nil || replicasOf(rs) == 0
	})
}

// fences returns maxSurge and maxUnavailable as numbers of pods. When both come out
// as 0 nothing could ever move, so one pod may be unavailable.
func fences(d *appsv1.Deployment) (surge, unavailable int32) {
	if d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType || *d.Spec.Replicas == 0 {
		return 0, 0
	}
	surge, unavailable = scaled(d, true), scaled(d, false)
	if surge == 0 && unavailable == 0 {
		unavailable = 1
	}
	return surge, min(unavailable, *d.Spec.Replicas)
}

func scaled(d *appsv1.Deployment, surge bool) int32 {
	var value *intstr.IntOrString
	if ru := d.Spec.Strategy.RollingUpdate; ru != nil {
		if value = ru.MaxUnavailable; surge {
			value = ru.MaxSurge
		}
	}
	if value == nil {
		quarter := intstr.FromString("25%")
		value = &quarter
	}
	// Surge is rounded up, unavailability down: the careful way for both.
	n, err := intstr.GetScaledValueFromIntOrPercent(value, int(*d.Spec.Replicas), surge)
	if err != nil {
		return 0 // the API refuses such a value
	}
	return int32(n)
}

func maxSurge(d *appsv1.Deployment) int32 {
	surge, _ := fences(d)
	return surge
}

func maxUnavailable(d *appsv1.Deployment) int32 {
	_, unavailable := fences(d)
	return unavailable
}

// grownSize returns how many replicas the current ReplicaSet should have now, given
// how many all of the Deployment's sets have together.
func grownSize(d *appsv1.Deployment, total, current int32) int32 {
	want := *d.Spec.Replicas
	if d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		return want
	}
	room := want + maxSurge(d) - total
	if room <= 0 {
		return current
	}
	return current + min(room, want-current)
}

// resizing is a new size for one ReplicaSet.
type resizing struct {
	set *appsv1.ReplicaSet
	to  int32
}

// shrinkOld returns how the old sets should shrink now. Pods that never became ready
// serve nobody and go first; ready ones go only as far as enough pods stay
// available.
func shrinkOld(d *appsv1.Deployment, current *appsv1.ReplicaSet, old []*appsv1.ReplicaSet) []resizing {
	all := append(slices.Clone(old), current)
	oldTotal := sum(old, replicasOf)
	if oldTotal == 0 {
		return nil
	}
	mustHave := *d.Spec.Replicas - maxUnavailable(d)
	// Pods of the current set that are not available yet are counted as if they never
	// would be: only what is above the minimum may go.
	currentMissing := replicasOf(current) - sureAvailable(current)
	mayGo := sum(all, replicasOf) - mustHave - currentMissing
	if mayGo <= 0 {
		return nil
	}

	size := map[*appsv1.ReplicaSet]int32{}
	sorted := slices.Clone(old)
	slices.SortStableFunc(sorted, olderFirst)
	for _, rs := range sorted {
		size[rs] = replicasOf(rs)
	}
	// First the unhealthy ones.
	var gone int32
	for _, rs := range sorted {
		if gone >= mayGo {
			break
		}
		n := min(mayGo-gone, max(0, size[rs]-rs.Status.AvailableReplicas))
		size[rs] -= n
		gone += n
	}
	// Then healthy ones, as far as more pods are available than there must be.
	spare := min(sum(all, sureAvailable)-mustHave, mayGo-gone)
	for _, rs := range sorted {
		if spare <= 0 {
			break
		}
		n := min(size[rs], spare)
		size[rs] -= n
		spare -= n
	}
	var out []resizing
	for _, rs := range sorted {
		if size[rs] != replicasOf(rs) {
			out = append(out, resizing{rs, size[rs]})
		}
	}
	return out
}

// shareOut gives the change of a scaled Deployment out to several active sets, each
// in proportion to its size, so that a rollout that is under way keeps its ratio.
func shareOut(d *appsv1.Deployment, sets []*appsv1.ReplicaSet) []resizing {
	var allowed int32
	if *d.Spec.Replicas > 0 {
		allowed = *d.Spec.Replicas + maxSurge(d)
	}
	change := allowed - sum(sets, replicasOf)
	if change == 0 {
		out := make([]resizing, 0, len(sets))
		for _, rs := range sets {
			out = append(out, resizing{rs, replicasOf(rs)})
		}
		return out
	}
	sorted := slices.Clone(sets)
	slices.SortStableFunc(sorted, func(a, b *appsv1.ReplicaSet) int {
		// The bigger ones first. Among equals the newer one grows first and the older
		// one shrinks first.
		age := olderFirst(a, b)
		if change > 0 {
			age = -age
		}
		return cmp.Or(cmp.Compare(replicasOf(b), replicasOf(a)), age, strings.Compare(a.Name, b.Name))
	})
	out := make([]resizing, 0, len(sorted))
	var given int32
	for _, rs := range sorted {
		part := int32(0)
		if left := change - given; left != 0 {
			part = fraction(rs, d, allowed)
			if change > 0 {
				part = max(0, min(part, left))
			} else {
				part = min(0, max(part, left))
			}
		}
		given += part
		out = append(out, resizing{rs, replicasOf(rs) + part})
	}
	// What rounding left over goes to the biggest.
	if left := change - given; left != 0 {
		out[0].to = max(0, out[0].to+left)
	}
	return out
}

// fraction is one set's share: its size keeps its proportion to the size that the
// Deployment was allowed when the set was last looked at.
func fraction(rs *appsv1.ReplicaSet, d *appsv1.Deployment, allowed int32) int32 {
	if *d.Spec.Replicas == 0 {
		return -replicasOf(rs)
	}
	before, ok := intAnnotation(rs, maxReplicasAnnotation)
	if !ok || before == 0 {
		before = d.Status.Replicas
	}
	if before == 0 {
		return 0
	}
	share := float64(replicasOf(rs)) * float64(allowed) / float64(before)
	return int32(share+0.5) - replicasOf(rs)
}
