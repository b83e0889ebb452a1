// SPDX-License-Identifier: Apache-2.0

package deployment

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Reasons of the conditions, upstream's own: kubectl and scripts compare them.
const (
	replicaSetUpdated    = "ReplicaSetUpdated"
	failedRSCreate       = "ReplicaSetCreateError"
	newReplicaSetCreated = "NewReplicaSetCreated"
	foundNewReplicaSet   = "FoundNewReplicaSet"
	newRSAvailable       = "NewReplicaSetAvailable"
	timedOut             = "ProgressDeadlineExceeded"
	pausedDeploy         = "DeploymentPaused"
	resumedDeploy        = "DeploymentResumed"
	minimumAvailable     = "MinimumReplicasAvailable"
	minimumUnavailable   = "MinimumReplicasUnavailable"
)

// hasDeadline reports whether the Deployment's progress is watched.
func hasDeadline(d *appsv1.Deployment) bool {
	return d.Spec.ProgressDeadlineSeconds != nil && *d.Spec.ProgressDeadlineSeconds != math.MaxInt32
}

func condition(conditions []appsv1.DeploymentCondition, t appsv1.DeploymentConditionType) *appsv1.DeploymentCondition {
	for i := range conditions {
		if conditions[i].Type == t {
			return &conditions[i]
		}
	}
	return nil
}

func progressing(d *appsv1.Deployment) *appsv1.DeploymentCondition {
	return condition(d.Status.Conditions, appsv1.DeploymentProgressing)
}

func without(conditions []appsv1.DeploymentCondition, t appsv1.DeploymentConditionType) []appsv1.DeploymentCondition {
	return slices.DeleteFunc(slices.Clone(conditions), func(c appsv1.DeploymentCondition) bool { return c.Type == t })
}

// set puts a condition in. One of the same status and reason is kept as it is, so
// that saying the same again is no change.
func set(conditions []appsv1.DeploymentCondition, t appsv1.DeploymentConditionType, status corev1.ConditionStatus, reason, message string, now time.Time) []appsv1.DeploymentCondition {
	had := condition(conditions, t)
	if had != nil && had.Status == status && had.Reason == reason {
		return conditions
	}
	c := appsv1.DeploymentCondition{
		Type: t, Status: status, Reason: reason, Message: message,
		LastUpdateTime: metav1.NewTime(now), LastTransitionTime: metav1.NewTime(now),
	}
	if had != nil && had.Status == status {
		c.LastTransitionTime = had.LastTransitionTime
	}
	return append(without(conditions, t), c)
}

// note sets the Progressing condition of this sync. It is stored with the status at
// the sync's end.
func (r *rollout) note(status corev1.ConditionStatus, reason, message string) {
	if hasDeadline(r.d) {
		r.noted = set(r.conditions(), appsv1.DeploymentProgressing, status, reason, message, r.c.clock.Now())
	}
}

// conditions are the stored ones with the notes of this sync.
func (r *rollout) conditions() []appsv1.DeploymentCondition {
	if r.noted != nil {
		return r.noted
	}
	return r.d.Status.Conditions
}

// notePause says in the condition that the Deployment was paused or resumed. The
// deadline does not run while it is paused.
func (r *rollout) notePause() error {
	had := progressing(r.d)
	if !hasDeadline(r.d) || (had != nil && had.Reason == timedOut) {
		return nil
	}
	paused := had != nil && had.Reason == pausedDeploy
	switch {
	case r.d.Spec.Paused && !paused:
		r.note(corev1.ConditionUnknown, pausedDeploy, "Deployment is paused")
	case !r.d.Spec.Paused && paused:
		r.note(corev1.ConditionUnknown, resumedDeploy, "Deployment is resumed")
	}
	return nil
}

// count returns the status without its Progressing condition's next state.
func (r *rollout) count() appsv1.DeploymentStatus {
	now := r.c.clock.Now()
	available := sum(r.all, availableReplicas)
	status := appsv1.DeploymentStatus{
		ObservedGeneration:  r.d.Generation,
		Replicas:            sum(r.all, statusReplicas),
		UpdatedReplicas:     sum([]*appsv1.ReplicaSet{r.current}, statusReplicas),
		ReadyReplicas:       sum(r.all, readyReplicas),
		AvailableReplicas:   available,
		UnavailableReplicas: max(0, sum(r.all, replicasOf)-available),
		TerminatingReplicas: r.d.Status.TerminatingReplicas,
		CollisionCount:      r.d.Status.CollisionCount,
		Conditions:          slices.Clone(r.conditions()),
	}
	if available >= *r.d.Spec.Replicas-maxUnavailable(r.d) {
		status.Conditions = set(status.Conditions, appsv1.DeploymentAvailable, corev1.ConditionTrue,
			minimumAvailable, "Deployment has minimum availability.", now)
	} else {
		status.Conditions = set(status.Conditions, appsv1.DeploymentAvailable, corev1.ConditionFalse,
			minimumUnavailable, "Deployment does not have minimum availability.", now)
	}
	return status
}

// complete reports whether status is the one of a finished rollout of d.
func complete(d *appsv1.Deployment, status *appsv1.DeploymentStatus) bool {
	want := *d.Spec.Replicas
	return status.UpdatedReplicas == want && status.Replicas == want && status.AvailableReplicas == want &&
		status.ObservedGeneration >= d.Generation
}

// advanced reports whether status is nearer to the end than the stored one.
func advanced(d *appsv1.Deployment, status *appsv1.DeploymentStatus) bool {
	had := &d.Status
	return status.UpdatedReplicas > had.UpdatedReplicas ||
		status.Replicas-status.UpdatedReplicas < had.Replicas-had.UpdatedReplicas ||
		status.ReadyReplicas > had.ReadyReplicas ||
		status.AvailableReplicas > had.AvailableReplicas
}

// overdue reports whether nothing has moved for longer than the deadline.
func overdue(d *appsv1.Deployment, had *appsv1.DeploymentCondition, now time.Time) bool {
	switch {
	case had == nil || had.Reason == newRSAvailable:
		return false
	case had.Reason == timedOut:
		return true
	}
	return had.LastUpdateTime.Add(time.Duration(*d.Spec.ProgressDeadlineSeconds) * time.Second).Before(now)
}

// finish ends a rollout step: it stores the status with the Progressing condition as
// it is after the step, and returns err.
func (r *rollout) finish(err error) error {
	if apierrors.IsConflict(err) {
		return err // seen again in a moment, with a newer cache
	}
	status := r.count()
	if !hasDeadline(r.d) {
		status.Conditions = without(status.Conditions, appsv1.DeploymentProgressing)
	} else {
		r.judgeProgress(&status)
	}
	return errors.Join(err, r.store(status))
}

// judgeProgress sets the Progressing condition.
func (r *rollout) judgeProgress(status *appsv1.DeploymentStatus) {
	now := r.c.clock.Now()
	had := condition(status.Conditions, appsv1.DeploymentProgressing)
	if had != nil && had.Reason == newRSAvailable && status.Replicas == status.UpdatedReplicas {
		return // the rollout is over; pods that come and go later are no progress
	}
	what := fmt.Sprintf("Deployment %q", r.d.Name)
	if r.current != nil {
		what = fmt.Sprintf("ReplicaSet %q", r.current.Name)
	}
	switch {
	case complete(r.d, status):
		status.Conditions = set(status.Conditions, appsv1.DeploymentProgressing, corev1.ConditionTrue,
			newRSAvailable, what+" has successfully progressed.", now)
	case advanced(r.d, status):
		// Each step forward restarts the deadline: the update time counts, so the
		// condition is written anew even when its reason is the same.
		next := appsv1.DeploymentCondition{
			Type: appsv1.DeploymentProgressing, Status: corev1.ConditionTrue,
			Reason: replicaSetUpdated, Message: what + " is progressing.",
			LastUpdateTime: metav1.NewTime(now), LastTransitionTime: metav1.NewTime(now),
		}
		if had != nil && had.Status == corev1.ConditionTrue {
			next.LastTransitionTime = had.LastTransitionTime
		}
		status.Conditions = append(without(status.Conditions, appsv1.DeploymentProgressing), next)
	case overdue(r.d, had, now):
		status.Conditions = set(status.Conditions, appsv1.DeploymentProgressing, corev1.ConditionFalse,
			timedOut, what+" has timed out progressing.", now)
	}
}

// writeStatus stores the counts alone: a paused, scaled or vanishing Deployment makes
// no progress that could be judged.
func (r *rollout) writeStatus() error { return r.store(r.count()) }

// store writes the status when it differs from the stored one, and else plans the
// look at the deadline.
func (r *rollout) store(status appsv1.DeploymentStatus) error {
	status.Conditions = r.failures(status.Conditions)
	if equality.Semantic.DeepEqual(r.d.Status, status) {
		r.planDeadline()
		return nil
	}
	update := r.d.DeepCopy()
	update.Status = status
	_, err := r.c.client.AppsV1().Deployments(r.d.Namespace).UpdateStatus(r.ctx, update, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write the status: %w", err)
	}
	return nil
}

// failures carries the sets' ReplicaFailure up to the Deployment; the current set's
// is the one that matters most.
func (r *rollout) failures(conditions []appsv1.DeploymentCondition) []appsv1.DeploymentCondition {
	sets := append([]*appsv1.ReplicaSet{}, r.all...)
	if r.current != nil {
		sets = append([]*appsv1.ReplicaSet{r.current}, sets...)
	}
	for _, rs := range sets {
		for _, c := range rs.Status.Conditions {
			if c.Type == appsv1.ReplicaSetReplicaFailure {
				return set(conditions, appsv1.DeploymentReplicaFailure, c.Status, c.Reason, c.Message, r.c.clock.Now())
			}
		}
	}
	if condition(conditions, appsv1.DeploymentReplicaFailure) == nil {
		return conditions
	}
	return without(conditions, appsv1.DeploymentReplicaFailure)
}

// planDeadline looks at the Deployment again when its deadline has passed, if it is
// under way.
func (r *rollout) planDeadline() {
	had := progressing(r.d)
	if !hasDeadline(r.d) || r.d.Spec.Paused || had == nil || complete(r.d, &r.d.Status) || had.Reason == newRSAvailable || had.Reason == timedOut {
		return
	}
	due := had.LastUpdateTime.Add(time.Duration(*r.d.Spec.ProgressDeadlineSeconds) * time.Second)
	// Stored times have whole seconds: a second more makes sure that it has passed.
	r.c.loop.After(r.key, max(0, due.Sub(r.c.clock.Now()))+time.Second)
}
