// SPDX-License-Identifier: Apache-2.0

package deployment

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
)

// The annotations are upstream's; kubectl rollout reads the first.
const (
	revisionAnnotation        = "deployment.kubernetes.io/revision"
	revisionHistoryAnnotation = "deployment.kubernetes.io/revision-history"
	desiredReplicasAnnotation = "deployment.kubernetes.io/desired-replicas"
	maxReplicasAnnotation     = "deployment.kubernetes.io/max-replicas"
)

// historyLimit bounds the revision-history annotation, in characters.
const historyLimit = 2000

// sameTemplate reports whether rs was made from d's present template. The hash label
// does not count: it is derived, and another version of this program may have
// derived it otherwise.
func sameTemplate(rs *appsv1.ReplicaSet, d *appsv1.Deployment) bool {
	a, b := rs.Spec.Template.DeepCopy(), d.Spec.Template.DeepCopy()
	delete(a.Labels, appsv1.DefaultDeploymentUniqueLabelKey)
	delete(b.Labels, appsv1.DefaultDeploymentUniqueLabelKey)
	return equality.Semantic.DeepEqual(a, b)
}

// templateHash names a pod template: the same template always gives the same hash.
// collisions counts how often the name turned out to be taken by another template.
// The characters are those that upstream allows, which cannot form words.
func templateHash(t *corev1.PodTemplateSpec, collisions *int32) (string, error) {
	encoded, err := json.Marshal(t)
	if err != nil {
		return "", fmt.Errorf("encode the pod template: %w", err)
	}
	h := fnv.New32a()
	h.Write(encoded)
	if collisions != nil {
		h.Write([]byte(strconv.Itoa(int(*collisions))))
	}
	return rand.SafeEncodeString(strconv.FormatUint(uint64(h.Sum32()), 10)), nil
}

func revisionOf(obj metav1.Object) int64 {
	n, err := strconv.ParseInt(obj.GetAnnotations()[revisionAnnotation], 10, 64)
	if err != nil {
		return 0
	}
	return n
}

func intAnnotation(rs *appsv1.ReplicaSet, key string) (int32, bool) {
	n, err := strconv.ParseInt(rs.Annotations[key], 10, 32)
	return int32(n), err == nil
}

// setDesired writes the sizes that a later scaling is measured against, and reports
// whether they changed.
func setDesired(rs *appsv1.ReplicaSet, desired, most int32) bool {
	if rs.Annotations == nil {
		rs.Annotations = map[string]string{}
	}
	changed := false
	for key, n := range map[string]int32{desiredReplicasAnnotation: desired, maxReplicasAnnotation: most} {
		if value := strconv.Itoa(int(n)); rs.Annotations[key] != value {
			rs.Annotations[key] = value
			changed = true
		}
	}
	return changed
}

// ownAnnotation reports whether a Deployment's annotation is about the Deployment
// itself and must not be copied to its sets.
func ownAnnotation(key string) bool {
	switch key {
	case corev1.LastAppliedConfigAnnotation, revisionAnnotation, revisionHistoryAnnotation,
		desiredReplicasAnnotation, maxReplicasAnnotation, appsv1.DeprecatedRollbackTo:
		return true
	}
	return false
}

// nextRevision is one more than the highest among the old sets.
func nextRevision(old []*appsv1.ReplicaSet) int64 {
	var highest int64
	for _, rs := range old {
		highest = max(highest, revisionOf(rs))
	}
	return highest + 1
}

// annotate gives the current set the Deployment's annotations and its revision. A
// set that becomes current again, by a rollback, gets a new revision and remembers
// the one it had. It reports whether anything changed.
func annotate(rs *appsv1.ReplicaSet, d *appsv1.Deployment, revision int64) bool {
	before := maps.Clone(rs.Annotations)
	if rs.Annotations == nil {
		rs.Annotations = map[string]string{}
	}
	for key, value := range d.Annotations {
		if !ownAnnotation(key) {
			rs.Annotations[key] = value
		}
	}
	if had := rs.Annotations[revisionAnnotation]; revisionOf(rs) < revision {
		if had != "" {
			rs.Annotations[revisionHistoryAnnotation] = addHistory(rs.Annotations[revisionHistoryAnnotation], had)
		}
		rs.Annotations[revisionAnnotation] = strconv.FormatInt(revision, 10)
	}
	return !maps.Equal(before, rs.Annotations)
}

// addHistory appends a revision to a comma-separated list and drops the oldest ones
// when the list gets too long.
func addHistory(list, revision string) string {
	if list != "" {
		revision = list + "," + revision
	}
	for len(revision) > historyLimit {
		_, rest, more := strings.Cut(revision, ",")
		if !more {
			return ""
		}
		revision = rest
	}
	return revision
}

// syncRevisions brings the current set's annotations and minReadySeconds up to date,
// and the Deployment's revision. It makes no set.
func (r *rollout) syncRevisions() error {
	if r.current == nil {
		return nil
	}
	update := r.current.DeepCopy()
	changed := annotate(update, r.d, nextRevision(r.old))
	if update.Spec.MinReadySeconds != r.d.Spec.MinReadySeconds {
		update.Spec.MinReadySeconds = r.d.Spec.MinReadySeconds
		changed = true
	}
	if changed {
		stored, err := r.c.client.AppsV1().ReplicaSets(update.Namespace).Update(r.ctx, update, metav1.UpdateOptions{})
		if err != nil {
			return fmt.Errorf("update replica set %s: %w", update.Name, err)
		}
		r.replace(stored)
	}
	if progressing(r.d) == nil {
		r.note(corev1.ConditionTrue, foundNewReplicaSet, fmt.Sprintf("Found new replica set %q", r.current.Name))
	}
	return r.publishRevision()
}

// publishRevision copies the current set's revision to the Deployment, by the status
// subresource: the generation counts what people change.
func (r *rollout) publishRevision() error {
	revision := r.current.Annotations[revisionAnnotation]
	if r.d.Annotations[revisionAnnotation] == revision {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid":         r.d.UID,
		"annotations": map[string]string{revisionAnnotation: revision},
	}})
	if err != nil {
		return fmt.Errorf("encode the revision: %w", err)
	}
	stored, err := r.c.client.AppsV1().Deployments(r.d.Namespace).Patch(r.ctx, r.d.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil {
		return fmt.Errorf("write revision %s: %w", revision, err)
	}
	// The spec that this sync works on stays the one it began with: only what the
	// status update needs is taken over.
	r.d.Annotations, r.d.ResourceVersion = stored.Annotations, stored.ResourceVersion
	return nil
}

// create makes the ReplicaSet of the present template, with as many replicas as the
// strategy allows now.
func (r *rollout) create() error {
	template := r.d.Spec.Template.DeepCopy()
	hash, err := templateHash(template, r.d.Status.CollisionCount)
	if err != nil {
		return err
	}
	template.Labels = withHash(template.Labels, hash)
	selector := r.d.Spec.Selector.DeepCopy()
	selector.MatchLabels = withHash(selector.MatchLabels, hash)
	size := grownSize(r.d, sum(r.all, replicasOf), 0)
	rs := &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{
			Name:            r.d.Name + "-" + hash,
			Namespace:       r.d.Namespace,
			Labels:          template.Labels,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(r.d, kind)},
		},
		Spec: appsv1.ReplicaSetSpec{
			Replicas:        &size,
			MinReadySeconds: r.d.Spec.MinReadySeconds,
			Selector:        selector,
			Template:        *template,
		},
	}
	annotate(rs, r.d, nextRevision(r.old))
	setDesired(rs, *r.d.Spec.Replicas, *r.d.Spec.Replicas+maxSurge(r.d))
	stored, err := r.c.client.AppsV1().ReplicaSets(rs.Namespace).Create(r.ctx, rs, metav1.CreateOptions{})
	switch {
	case apierrors.IsAlreadyExists(err):
		if stored, err = r.taken(rs.Name); err != nil {
			return err
		}
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return err
	case err != nil:
		text := fmt.Sprintf("Failed to create new replica set %q: %v", rs.Name, err)
		r.note(corev1.ConditionFalse, failedRSCreate, text)
		r.c.recorder.Event(r.d, corev1.EventTypeWarning, failedRSCreate, text)
		return r.finish(fmt.Errorf("create replica set %s: %w", rs.Name, err))
	default:
		r.note(corev1.ConditionTrue, newReplicaSetCreated, fmt.Sprintf("Created new replica set %q", rs.Name))
		if size > 0 {
			r.c.recorder.Eventf(r.d, corev1.EventTypeNormal, "ScalingReplicaSet", "Scaled up replica set %s from 0 to %d", rs.Name, size)
		}
	}
	r.current = stored
	r.all = append(r.all, stored)
	return r.publishRevision()
}

// taken looks at who has the name that the new set should get. It is the set itself
// when the cache is a moment behind; else two templates have the same hash, and the
// next try hashes otherwise.
func (r *rollout) taken(name string) (*appsv1.ReplicaSet, error) {
	rs, err := r.c.client.AppsV1().ReplicaSets(r.d.Namespace).Get(r.ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read replica set %s: %w", name, err)
	}
	if metav1.IsControlledBy(rs, r.d) && sameTemplate(rs, r.d) {
		return rs, nil
	}
	collisions := int32(1)
	if r.d.Status.CollisionCount != nil {
		collisions += *r.d.Status.CollisionCount
	}
	update := r.d.DeepCopy()
	update.Status.CollisionCount = &collisions
	if _, err := r.c.client.AppsV1().Deployments(r.d.Namespace).UpdateStatus(r.ctx, update, metav1.UpdateOptions{}); err != nil {
		return nil, fmt.Errorf("count the collision on the name %s: %w", name, err)
	}
	return nil, errNextEvent
}

// withHash returns a copy of m with the template's hash added.
func withHash(m map[string]string, hash string) map[string]string {
	m = maps.Clone(m)
	if m == nil {
		m = map[string]string{}
	}
	m[appsv1.DefaultDeploymentUniqueLabelKey] = hash
	return m
}
