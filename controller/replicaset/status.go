// SPDX-License-Identifier: Apache-2.0

package replicaset

import (
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/kplab/kplab/controller/podstate"
)

// newStatus counts the pods. wait is the time until the next ready pod becomes
// available, 0 when none will by time alone.
func newStatus(rs *appsv1.ReplicaSet, pods []*corev1.Pod, manageErr error, now time.Time) (status appsv1.ReplicaSetStatus, wait time.Duration) {
	status = *rs.Status.DeepCopy()
	status.ObservedGeneration = rs.Generation
	status.Replicas = int32(len(pods))
	status.FullyLabeledReplicas, status.ReadyReplicas, status.AvailableReplicas = 0, 0, 0
	template := labels.Set(rs.Spec.Template.Labels).AsSelectorPreValidated()
	for _, pod := range pods {
		if template.Matches(labels.Set(pod.Labels)) {
			status.FullyLabeledReplicas++
		}
		if !podstate.Ready(pod) {
			continue
		}
		status.ReadyReplicas++
		available, left := podstate.Available(pod, minReady(rs), now)
		switch {
		case available:
			status.AvailableReplicas++
		case left > 0 && (wait == 0 || left < wait):
			wait = left
		}
	}
	status.Conditions = failureCondition(status.Conditions, len(pods) < int(replicas(rs)), manageErr, now)
	return status, wait
}

// failureCondition sets ReplicaFailure after a failed create or delete and takes it
// away after a sync without an error.
func failureCondition(old []appsv1.ReplicaSetCondition, creating bool, err error, now time.Time) []appsv1.ReplicaSetCondition {
	var out []appsv1.ReplicaSetCondition
	var had *appsv1.ReplicaSetCondition
	for i := range old {
		if old[i].Type == appsv1.ReplicaSetReplicaFailure {
			had = &old[i]
			continue
		}
		out = append(out, old[i])
	}
	if err == nil {
		return out
	}
	reason := "FailedDelete"
	if creating {
		reason = "FailedCreate"
	}
	if had != nil && had.Reason == reason {
		return append(out, *had) // the text of a retry may differ; one write is enough
	}
	return append(out, appsv1.ReplicaSetCondition{
		Type: appsv1.ReplicaSetReplicaFailure, Status: corev1.ConditionTrue,
		Reason: reason, Message: err.Error(), LastTransitionTime: metav1.NewTime(now),
	})
}
