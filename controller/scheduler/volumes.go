// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/kplab/kplab/controller/loop"
)

// Reasons of nodes that cannot have the pod's volumes, in upstream's words.
const (
	noVolumeAffinity = "node(s) didn't match PersistentVolume's node affinity"
	noFreeVolume     = "node(s) didn't find available persistent volumes to bind"
	noSuchVolume     = "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)"
)

// volumes looks up what the claims of pods have to do with nodes.
type volumes struct {
	client  kubernetes.Interface
	claims  corelisters.PersistentVolumeClaimLister
	volumes corelisters.PersistentVolumeLister
}

// newVolumes subscribes l to claims and volumes; changed is called when one of them
// may let a pod in that waits.
func newVolumes(d loop.Deps, l *loop.Loop[loop.Key], changed func()) volumes {
	claims, all := d.Informers.Core().V1().PersistentVolumeClaims(), d.Informers.Core().V1().PersistentVolumes()
	loop.Watch(l, "persistentvolumeclaims", claims.Informer(), func(_, _ *corev1.PersistentVolumeClaim) { changed() })
	loop.Watch(l, "persistentvolumes", all.Informer(), func(_, _ *corev1.PersistentVolume) { changed() })
	return volumes{client: d.Client, claims: claims.Lister(), volumes: all.Lister()}
}

// storage is what a pod's claims ask of its node.
type storage struct {
	// bound are the volumes that the pod has; a claim may be bound to one that is gone.
	bound []*corev1.PersistentVolume
	gone  bool
	// waiting are claims that get their volume once the node is known, from free.
	waiting []*corev1.PersistentVolumeClaim
	free    []*corev1.PersistentVolume
}

// of reads the claims of a pod. refusal says why no node whatever will do.
func (v volumes) of(ctx context.Context, pod *corev1.Pod) (s storage, refusal string, err error) {
	for i := range pod.Spec.Volumes {
		name := ""
		switch volume := &pod.Spec.Volumes[i]; {
		case volume.PersistentVolumeClaim != nil:
			name = volume.PersistentVolumeClaim.ClaimName
		case volume.Ephemeral != nil:
			name = pod.Name + "-" + volume.Name
		default:
			continue
		}
		claim, err := v.claims.PersistentVolumeClaims(pod.Namespace).Get(name)
		switch {
		case apierrors.IsNotFound(err) && pod.Spec.Volumes[i].Ephemeral != nil:
			return s, fmt.Sprintf("waiting for ephemeral volume controller to create the persistentvolumeclaim %q", name), nil
		case apierrors.IsNotFound(err):
			return s, fmt.Sprintf("persistentvolumeclaim %q not found", name), nil
		case err != nil:
			return s, "", err
		case claim.Status.Phase == corev1.ClaimLost:
			return s, fmt.Sprintf("persistentvolumeclaim %q bound to non-existent persistentvolume %q", name, claim.Spec.VolumeName), nil
		case claim.DeletionTimestamp != nil:
			return s, fmt.Sprintf("persistentvolumeclaim %q is being deleted", name), nil
		}
		if refusal, err = s.add(ctx, v, claim); err != nil || refusal != "" {
			return s, refusal, err
		}
	}
	if len(s.waiting) > 0 {
		s.free, err = v.volumes.List(labels.Everything())
	}
	return s, "", err
}

func (s *storage) add(ctx context.Context, v volumes, claim *corev1.PersistentVolumeClaim) (refusal string, err error) {
	if claim.Spec.VolumeName != "" && metav1.HasAnnotation(claim.ObjectMeta, storagehelpers.AnnBindCompleted) {
		volume, err := v.volumes.Get(claim.Spec.VolumeName)
		if apierrors.IsNotFound(err) {
			s.gone = true
			return "", nil
		}
		s.bound = append(s.bound, volume)
		return "", err
	}
	delayed, err := v.delayed(ctx, claim)
	if err != nil {
		return "", err
	}
	if !delayed || claim.Spec.VolumeName != "" {
		return "pod has unbound immediate PersistentVolumeClaims", nil
	}
	s.waiting = append(s.waiting, claim)
	return "", nil
}

// delayed reports whether the claim is bound only when a pod uses it.
func (v volumes) delayed(ctx context.Context, claim *corev1.PersistentVolumeClaim) (bool, error) {
	name := storagehelpers.GetPersistentVolumeClaimClass(claim)
	if name == "" {
		return false, nil
	}
	class, err := v.client.StorageV1().StorageClasses().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the storage class %s: %w", name, err)
	}
	return class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer, nil
}

// refuses returns why the node cannot have the volumes, "" when it can.
func (s storage) refuses(node *corev1.Node) string {
	if s.gone {
		return noSuchVolume
	}
	for _, volume := range s.bound {
		if storagehelpers.CheckNodeAffinity(volume, node.Labels) != nil {
			return noVolumeAffinity
		}
	}
	if _, ok := s.choose(node); !ok {
		return noFreeVolume
	}
	return ""
}

// choose picks a volume for each claim that waits; ok is false when there is none for
// one of them.
func (s storage) choose(node *corev1.Node) (chosen []*corev1.PersistentVolume, ok bool) {
	taken := map[string]*corev1.PersistentVolume{}
	for _, claim := range s.waiting {
		volume, err := storagehelpers.FindMatchingVolume(claim, s.free, node, taken, false, true)
		if err != nil || volume == nil {
			return nil, false
		}
		taken[volume.Name] = volume
		chosen = append(chosen, volume)
	}
	return chosen, true
}

// reserve writes into the chosen volumes for which claims they are. The binder does
// the rest; the pod is looked at again when its claims are bound.
func (v volumes) reserve(ctx context.Context, s storage, chosen []*corev1.PersistentVolume) error {
	for i, volume := range chosen {
		update, dirty, err := storagehelpers.GetBindVolumeToClaim(volume, s.waiting[i])
		if err != nil {
			return err
		}
		if !dirty {
			continue
		}
		if _, err := v.client.CoreV1().PersistentVolumes().Update(ctx, update, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("reserve the volume %s for %s: %w", volume.Name, s.waiting[i].Name, err)
		}
	}
	return nil
}
