// SPDX-License-Identifier: Apache-2.0

package persistentvolume

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/controller/podstate"
)

// The finalizers that the API puts on what may be in use.
const (
	claimProtection  = "kubernetes.io/pvc-protection"
	volumeProtection = "kubernetes.io/pv-protection"
)

// onPod wakes the claims that a pod used and uses no longer.
func (c *Controller) onPod(old, cur *corev1.Pod) {
	if old == nil || (cur != nil && podstate.Finished(cur) == podstate.Finished(old)) {
		return
	}
	for _, name := range claimsOf(old) {
		c.loop.Add(task{Namespace: old.Namespace, Name: name})
	}
}

func claimsOf(pod *corev1.Pod) (names []string) {
	for i := range pod.Spec.Volumes {
		if claim := pod.Spec.Volumes[i].PersistentVolumeClaim; claim != nil {
			names = append(names, claim.ClaimName)
		}
	}
	return names
}

// letClaimGo takes the protection off a claim that is being deleted once no pod on a
// node uses it.
func (c *Controller) letClaimGo(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	if !slices.Contains(claim.Finalizers, claimProtection) {
		return nil
	}
	// The API, not the cache: a pod that is not seen yet may use it.
	pods, err := c.client.CoreV1().Pods(claim.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("see who uses the claim %s: %w", claim.Name, err)
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if pod.Spec.NodeName != "" && !podstate.Finished(pod) && slices.Contains(claimsOf(pod), claim.Name) {
			return nil
		}
	}
	update := claim.DeepCopy()
	update.Finalizers = slices.DeleteFunc(update.Finalizers, func(f string) bool { return f == claimProtection })
	_, err = c.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Update(ctx, update, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("let the claim %s go: %w", claim.Name, err)
	}
	return nil
}

// letVolumeGo takes the protection off a volume that is being deleted and bound to
// nothing.
func (c *Controller) letVolumeGo(ctx context.Context, volume *corev1.PersistentVolume) error {
	if volume.Status.Phase == corev1.VolumeBound || !slices.Contains(volume.Finalizers, volumeProtection) {
		return nil
	}
	update := volume.DeepCopy()
	update.Finalizers = slices.DeleteFunc(update.Finalizers, func(f string) bool { return f == volumeProtection })
	_, err := c.client.CoreV1().PersistentVolumes().Update(ctx, update, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("let the volume %s go: %w", volume.Name, err)
	}
	return nil
}
