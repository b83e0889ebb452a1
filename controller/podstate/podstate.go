// SPDX-License-Identifier: Apache-2.0

// Package podstate answers the questions that several controllers ask about a pod:
// is it active, ready, available. The answers are pure functions of the object.
package podstate

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Condition returns the pod's condition of that type, nil when it has none.
func Condition(pod *corev1.Pod, t corev1.PodConditionType) *corev1.PodCondition {
	for i := range pod.Status.Conditions {
		if pod.Status.Conditions[i].Type == t {
			return &pod.Status.Conditions[i]
		}
	}
	return nil
}

// Finished reports whether the pod's containers have ended for good.
func Finished(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// Active reports whether the pod counts as a replica: not finished and not being
// deleted.
func Active(pod *corev1.Pod) bool { return !Finished(pod) && pod.DeletionTimestamp == nil }

// Ready reports whether the pod's Ready condition is true.
func Ready(pod *corev1.Pod) bool {
	c := Condition(pod, corev1.PodReady)
	return c != nil && c.Status == corev1.ConditionTrue
}

// ReadySince returns when the pod became ready; ok is false when it is not.
func ReadySince(pod *corev1.Pod) (since metav1.Time, ok bool) {
	c := Condition(pod, corev1.PodReady)
	if c == nil || c.Status != corev1.ConditionTrue {
		return metav1.Time{}, false
	}
	return c.LastTransitionTime, true
}

// Available reports whether the pod has been ready for minReady. When it is ready
// but not yet for long enough, wait is how long it takes from now.
func Available(pod *corev1.Pod, minReady time.Duration, now time.Time) (available bool, wait time.Duration) {
	since, ok := ReadySince(pod)
	if !ok {
		return false, 0
	}
	if minReady == 0 {
		return true, 0
	}
	if since.IsZero() {
		return false, 0
	}
	if left := since.Add(minReady).Sub(now); left > 0 {
		return false, left
	}
	return true, 0
}

// Restarts returns how often the pod's containers were restarted; the most restarted
// one counts.
func Restarts(pod *corev1.Pod) int32 {
	var most int32
	for i := range pod.Status.ContainerStatuses {
		most = max(most, pod.Status.ContainerStatuses[i].RestartCount)
	}
	return most
}
