// SPDX-License-Identifier: Apache-2.0

package deployment

import (
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/controller/podstate"
)

// roll does the next step of a rolling update: the new ReplicaSet grows as far as
// maxSurge allows; if it cannot, the old ones shrink as far as maxUnavailable allows.
func (r *rollout) roll() error {
	if err := r.syncRevisions(); err != nil {
		return err
	}
	if r.current == nil {
		if err := r.create(); err != nil {
			return err
		}
	}
	if moved, err := r.grow(); err != nil || moved {
		return r.finish(err)
	}
	shrink := shrinkOld(r.d, r.current, r.old)
	for _, s := range shrink {
		if err := r.resize(s.set, s.to); err != nil {
			return err
		}
	}
	if len(shrink) == 0 && complete(r.d, &r.d.Status) {
		if err := r.tidy(); err != nil {
			return err
		}
	}
	return r.finish(nil)
}

// grow brings the current ReplicaSet nearer to its final size and reports whether
// that changed anything.
func (r *rollout) grow() (bool, error) {
	have := replicasOf(r.current)
	if have == *r.d.Spec.Replicas {
		return false, nil
	}
	to := *r.d.Spec.Replicas
	if have < to {
		to = grownSize(r.d, sum(r.all, replicasOf), have)
	}
	if to == have {
		return false, nil
	}
	return true, r.resize(r.current, to)
}

// recreate does the next step of strategy Recreate: all old pods end before the
// first new one begins.
func (r *rollout) recreate() error {
	if err := r.syncRevisions(); err != nil {
		return err
	}
	shrunk := false
	for _, rs := range active(r.old) {
		shrunk = true
		if err := r.resize(rs, 0); err != nil {
			return err
		}
	}
	if shrunk {
		return r.finish(nil)
	}
	running, err := r.oldPodsRun()
	if err != nil {
		return err
	}
	if running {
		return r.finish(nil)
	}
	if r.current == nil {
		if err := r.create(); err != nil {
			return err
		}
	}
	if err := r.resize(r.current, *r.d.Spec.Replicas); err != nil {
		return err
	}
	if complete(r.d, &r.d.Status) {
		if err := r.tidy(); err != nil {
			return err
		}
	}
	return r.finish(nil)
}

// oldPodsRun reports whether a pod of an old ReplicaSet has not ended yet.
func (r *rollout) oldPodsRun() (bool, error) {
	if len(r.old) == 0 {
		return false, nil
	}
	selector, err := metav1.LabelSelectorAsSelector(r.d.Spec.Selector)
	if err != nil {
		return false, err
	}
	pods, err := r.c.pods.Pods(r.d.Namespace).List(selector)
	if err != nil {
		return false, err
	}
	return anyOf(pods, r.old), nil
}

// anyOf reports whether one of the pods belongs to one of the sets and has not
// ended. A pod that is being deleted still runs.
func anyOf(pods []*corev1.Pod, sets []*appsv1.ReplicaSet) bool {
	for _, pod := range pods {
		ref := metav1.GetControllerOf(pod)
		if ref == nil || podstate.Finished(pod) {
			continue
		}
		for _, rs := range sets {
			if rs.UID == ref.UID {
				return true
			}
		}
	}
	return false
}

// wasScaled reports whether the Deployment's replicas changed since its sets were
// last sized.
func (r *rollout) wasScaled() bool {
	for _, rs := range active(r.all) {
		if desired, ok := intAnnotation(rs, desiredReplicasAnnotation); ok && desired != *r.d.Spec.Replicas {
			return true
		}
	}
	return false
}

// scale sizes the sets of a Deployment that was scaled, or that is paused: no
// rollout step, only the number.
func (r *rollout) scale() error {
	running := active(r.all)
	switch {
	case len(running) == 0 && r.current != nil:
		return r.resize(r.current, *r.d.Spec.Replicas)
	case len(running) == 0:
		if len(r.all) == 0 {
			return nil
		}
		return r.resize(r.all[len(r.all)-1], *r.d.Spec.Replicas)
	case len(running) == 1:
		return r.resize(running[0], *r.d.Spec.Replicas)
	}
	if r.saturated() {
		for _, rs := range active(r.old) {
			if err := r.resize(rs, 0); err != nil {
				return err
			}
		}
		return nil
	}
	if r.d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		return nil
	}
	for _, s := range shareOut(r.d, running) {
		if err := r.resize(s.set, s.to); err != nil {
			return err
		}
	}
	return nil
}

// saturated reports whether the current set alone has all the pods, available.
func (r *rollout) saturated() bool {
	if r.current == nil {
		return false
	}
	desired, ok := intAnnotation(r.current, desiredReplicasAnnotation)
	want := *r.d.Spec.Replicas
	return ok && desired == want && replicasOf(r.current) == want && r.current.Status.AvailableReplicas == want
}
