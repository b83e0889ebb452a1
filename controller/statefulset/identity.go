// SPDX-License-Identifier: Apache-2.0

package statefulset

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/controller/history"
)

// first is the lowest ordinal of the set.
func first(set *appsv1.StatefulSet) int {
	if set.Spec.Ordinals == nil {
		return 0
	}
	return int(set.Spec.Ordinals.Start)
}

func podName(set *appsv1.StatefulSet, ordinal int) string {
	return set.Name + "-" + strconv.Itoa(ordinal)
}

// ordinalOf returns the ordinal of a pod of the set by its name.
func ordinalOf(set *appsv1.StatefulSet, name string) (int, bool) {
	text, ok := strings.CutPrefix(name, set.Name+"-")
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(text, 10, 31)
	// "web-01" is nobody's.
	return int(n), err == nil && podName(set, int(n)) == name
}

// podFor returns the pod of an ordinal as a revision's template wants it.
func (r *round) podFor(ordinal int, revision *appsv1.ControllerRevision) (*corev1.Pod, error) {
	template := &r.set.Spec.Template
	if revision != r.revisions.Update {
		var err error
		if template, err = history.Template(revision); err != nil {
			return nil, err
		}
	}
	pod := r.c.pods.FromTemplate(r.set, template)
	pod.GenerateName, pod.Name = "", podName(r.set, ordinal)
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	maps.Copy(pod.Labels, identity(r.set, ordinal))
	pod.Labels[appsv1.ControllerRevisionHashLabelKey] = revision.Name
	pod.Spec.Hostname, pod.Spec.Subdomain = pod.Name, r.set.Spec.ServiceName
	pod.Spec.Volumes = slices.DeleteFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return slices.ContainsFunc(r.set.Spec.VolumeClaimTemplates, func(c corev1.PersistentVolumeClaim) bool { return c.Name == v.Name })
	})
	for i := range r.set.Spec.VolumeClaimTemplates {
		template := &r.set.Spec.VolumeClaimTemplates[i]
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{
			Name: template.Name,
			VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
				ClaimName: claimName(r.set, template, ordinal),
			}},
		})
	}
	return pod, nil
}

// identity are the labels that a pod has for being the one that it is.
func identity(set *appsv1.StatefulSet, ordinal int) map[string]string {
	return map[string]string{
		appsv1.StatefulSetPodNameLabel: podName(set, ordinal),
		appsv1.PodIndexLabel:           strconv.Itoa(ordinal),
	}
}

// identify puts the labels of a pod right that was adopted, or that somebody changed.
func (r *round) identify(ordinal int, pod *corev1.Pod) error {
	missing := identity(r.set, ordinal)
	maps.DeleteFunc(missing, func(key, value string) bool { return pod.Labels[key] == value })
	if len(missing) == 0 {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID, "labels": missing}})
	if err != nil {
		return fmt.Errorf("encode the labels of pod %s: %w", pod.Name, err)
	}
	_, err = r.c.client.CoreV1().Pods(pod.Namespace).Patch(r.ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		r.event("update", "Pod "+pod.Name, err)
		return fmt.Errorf("label pod %s: %w", pod.Name, err)
	}
	return nil
}

func claimName(set *appsv1.StatefulSet, template *corev1.PersistentVolumeClaim, ordinal int) string {
	return template.Name + "-" + podName(set, ordinal)
}

// makeClaims makes the claims of an ordinal that are missing.
func (r *round) makeClaims(ordinal int) error {
	for i := range r.set.Spec.VolumeClaimTemplates {
		template := &r.set.Spec.VolumeClaimTemplates[i]
		name := claimName(r.set, template, ordinal)
		had, err := r.c.claims.PersistentVolumeClaims(r.set.Namespace).Get(name)
		switch {
		case err == nil && had.DeletionTimestamp != nil:
			return fmt.Errorf("claim %s is being deleted", name)
		case err == nil:
			continue
		case !apierrors.IsNotFound(err):
			return err
		}
		claim := template.DeepCopy()
		claim.Name, claim.Namespace, claim.Status = name, r.set.Namespace, corev1.PersistentVolumeClaimStatus{}
		if claim.Labels == nil {
			claim.Labels = map[string]string{}
		}
		maps.Copy(claim.Labels, r.set.Spec.Selector.MatchLabels)
		claim.OwnerReferences = r.claimOwners(nil, ordinal)
		what := fmt.Sprintf("Claim %s Pod %s", name, podName(r.set, ordinal))
		_, err = r.c.client.CoreV1().PersistentVolumeClaims(r.set.Namespace).Create(r.ctx, claim, metav1.CreateOptions{})
		switch {
		case apierrors.IsAlreadyExists(err):
		case err != nil:
			r.event("create", what, err)
			return fmt.Errorf("create claim %s: %w", name, err)
		default:
			r.event("create", what, nil)
		}
	}
	return nil
}

// claimOwners are the owner references of an ordinal's claims, by the retention
// policy: the set's when they go with it, the pod's when they go with a pod that is
// one too many. Those of others stay.
func (r *round) claimOwners(had []metav1.OwnerReference, ordinal int) []metav1.OwnerReference {
	name := podName(r.set, ordinal)
	refs := slices.DeleteFunc(slices.Clone(had), func(ref metav1.OwnerReference) bool {
		return ref.UID == r.set.UID || (ref.Kind == "Pod" && ref.Name == name)
	})
	policy := r.set.Spec.PersistentVolumeClaimRetentionPolicy
	if policy == nil {
		return refs
	}
	const drop = appsv1.DeletePersistentVolumeClaimRetentionPolicyType
	if policy.WhenDeleted == drop {
		refs = append(refs, metav1.OwnerReference{APIVersion: kind.GroupVersion().String(), Kind: kind.Kind, Name: r.set.Name, UID: r.set.UID})
	}
	for _, pod := range r.condemned {
		if policy.WhenScaled == drop && pod.Name == name {
			refs = append(refs, metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: name, UID: pod.UID})
		}
	}
	return refs
}

// fixClaimOwners makes the claims of all pods follow the retention policy.
func (r *round) fixClaimOwners() error {
	if len(r.set.Spec.VolumeClaimTemplates) == 0 {
		return nil
	}
	for _, pod := range slices.Concat(r.slots, r.condemned) {
		if pod == nil {
			continue
		}
		ordinal, _ := ordinalOf(r.set, pod.Name)
		for i := range r.set.Spec.VolumeClaimTemplates {
			claim, err := r.c.claims.PersistentVolumeClaims(r.set.Namespace).Get(claimName(r.set, &r.set.Spec.VolumeClaimTemplates[i], ordinal))
			if err != nil {
				continue // made, or reported, when its pod is
			}
			refs := r.claimOwners(claim.OwnerReferences, ordinal)
			if slices.EqualFunc(refs, claim.OwnerReferences, func(a, b metav1.OwnerReference) bool { return a.UID == b.UID }) {
				continue
			}
			update := claim.DeepCopy()
			update.OwnerReferences = refs
			if _, err := r.c.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Update(r.ctx, update, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
				return fmt.Errorf("set the owners of claim %s: %w", claim.Name, err)
			}
		}
	}
	return nil
}
