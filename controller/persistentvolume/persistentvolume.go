// SPDX-License-Identifier: Apache-2.0

// Package persistentvolume binds claims to volumes that people made, and says of a
// volume whether it is available, bound, released or failed.
//
// A claim gets the smallest volume that has its class, access modes, mode and labels
// and is large enough, or the one that it names. It waits for its first pod when its
// class says so: the scheduler then reserves the volume, since it knows the node. Both
// sides of a bond are written, the volume's first, so that a half-made one can be
// finished by whoever comes next.
//
// There is no provisioner: a claim that no volume fits stays pending, and an event
// says why, in upstream's words.
package persistentvolume

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/internal/settle"
)

// again is after how long a claim that stays pending is looked at anew: its class may
// be there now.
const again = 15 * time.Second

// task is a claim, or a volume when the namespace is empty.
type task = loop.Key

// Controller is the binder of persistent volumes.
type Controller struct {
	loop     *loop.Loop[task]
	client   kubernetes.Interface
	clock    clock.PassiveClock
	recorder record.EventRecorder
	volumes  corelisters.PersistentVolumeLister
	claims   corelisters.PersistentVolumeClaimLister
}

// New makes the controller and subscribes it to volumes, claims and pods.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	volumes, claims := d.Informers.Core().V1().PersistentVolumes(), d.Informers.Core().V1().PersistentVolumeClaims()
	c := &Controller{
		client: d.Client, clock: d.Clock, recorder: d.Recorder("persistentvolume-controller"),
		volumes: volumes.Lister(), claims: claims.Lister(),
	}
	// One worker: two claims must not decide for one volume at the same time.
	c.loop = loop.New(loop.Options[task]{Name: "persistentvolume", Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "persistentvolumes", volumes.Informer(), c.onVolume)
	loop.Watch(c.loop, "persistentvolumeclaims", claims.Informer(), c.onClaim)
	loop.Watch(c.loop, "pods", d.Informers.Core().V1().Pods().Informer(), c.onPod)
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error { return c.loop.Run(ctx) }

// onVolume wakes the volume, its claim, and all claims that wait for one.
func (c *Controller) onVolume(old, cur *corev1.PersistentVolume) {
	for _, v := range []*corev1.PersistentVolume{old, cur} {
		if v != nil && v.Spec.ClaimRef != nil {
			c.loop.Add(task{Namespace: v.Spec.ClaimRef.Namespace, Name: v.Spec.ClaimRef.Name})
		}
	}
	if cur == nil {
		return
	}
	c.loop.Add(task{Name: cur.Name})
	if cur.Status.Phase == corev1.VolumeBound {
		return
	}
	all, err := c.claims.List(labels.Everything())
	if err != nil {
		return
	}
	for _, claim := range all {
		if claim.Status.Phase == corev1.ClaimPending {
			c.loop.Add(loop.KeyOf(claim))
		}
	}
}

// onClaim wakes the claim and its volume.
func (c *Controller) onClaim(old, cur *corev1.PersistentVolumeClaim) {
	if cur != nil {
		c.loop.Add(loop.KeyOf(cur))
	}
	if old != nil && old.Spec.VolumeName != "" {
		c.loop.Add(task{Name: old.Spec.VolumeName})
	}
}

func (c *Controller) sync(ctx context.Context, t task) error {
	if t.Namespace == "" {
		volume, err := c.volumes.Get(t.Name)
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return err
		}
		return c.syncVolume(ctx, volume)
	}
	claim, err := c.claims.PersistentVolumeClaims(t.Namespace).Get(t.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if claim.DeletionTimestamp != nil {
		return c.letClaimGo(ctx, claim)
	}
	if metav1.HasAnnotation(claim.ObjectMeta, storagehelpers.AnnBindCompleted) {
		return c.syncBound(ctx, claim)
	}
	return c.syncUnbound(ctx, claim)
}

// syncUnbound looks for a volume.
func (c *Controller) syncUnbound(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	if claim.Spec.VolumeName != "" {
		return c.bindNamed(ctx, claim)
	}
	class, err := c.classOf(ctx, claim)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	delayed := class != nil && ptr.Deref(class.VolumeBindingMode, "") == storagev1.VolumeBindingWaitForFirstConsumer
	all, listErr := c.volumes.List(labels.Everything())
	if listErr != nil {
		return listErr
	}
	found, matchErr := storagehelpers.FindMatchingVolume(claim, all, nil, nil, delayed, true)
	if matchErr != nil {
		return fmt.Errorf("find a volume for %s: %w", claim.Name, matchErr)
	}
	if found != nil {
		return c.bind(ctx, found, claim)
	}
	switch name := storagehelpers.GetPersistentVolumeClaimClass(claim); {
	case delayed && !storagehelpers.IsDelayBindingProvisioning(claim):
		c.recorder.Event(claim, corev1.EventTypeNormal, "WaitForFirstConsumer", "waiting for first consumer to be created before binding")
	case name == "":
		c.recorder.Event(claim, corev1.EventTypeNormal, "FailedBinding", "no persistent volumes available for this claim and no storage class is set")
	case class == nil:
		// Upstream reads the class from a cache, which names it in the singular.
		c.recorder.Event(claim, corev1.EventTypeWarning, "ProvisioningFailed", apierrors.NewNotFound(storagev1.Resource("storageclass"), name).Error())
	case class.Provisioner == "kubernetes.io/no-provisioner":
		c.recorder.Eventf(claim, corev1.EventTypeWarning, "ProvisioningFailed", "no volume plugin matched name: %s", class.Provisioner)
	default:
		c.recorder.Eventf(claim, corev1.EventTypeNormal, "ExternalProvisioning",
			"Waiting for a volume to be created either by the external provisioner '%s' or manually by the system administrator. If volume creation is delayed, please verify that the provisioner is running and correctly registered.", class.Provisioner)
	}
	c.loop.After(loop.KeyOf(claim), again)
	return nil
}

// classOf reads the claim's storage class; nil when it names none.
func (c *Controller) classOf(ctx context.Context, claim *corev1.PersistentVolumeClaim) (*storagev1.StorageClass, error) {
	name := storagehelpers.GetPersistentVolumeClaimClass(claim)
	if name == "" {
		return nil, nil
	}
	class, err := c.client.StorageV1().StorageClasses().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return class, nil
}

// bindNamed binds the claim to the volume that it asks for by name.
func (c *Controller) bindNamed(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	volume, err := c.volumes.Get(claim.Spec.VolumeName)
	if apierrors.IsNotFound(err) {
		return nil // it may come
	}
	if err != nil {
		return err
	}
	switch {
	case storagehelpers.IsVolumeBoundToClaim(volume, claim):
	case volume.Spec.ClaimRef != nil:
		c.recorder.Eventf(claim, corev1.EventTypeWarning, "FailedBinding", "volume %q already bound to a different claim.", volume.Name)
		return nil
	default:
		if why := mismatch(volume, claim); why != "" {
			c.recorder.Eventf(claim, corev1.EventTypeWarning, "VolumeMismatch", "Cannot bind to requested volume %q: %s", volume.Name, why)
			return nil
		}
	}
	return c.bind(ctx, volume, claim)
}

// mismatch says why the volume does not do for the claim; "" when it does.
func mismatch(volume *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) string {
	asked, has := claim.Spec.Resources.Requests[corev1.ResourceStorage], volume.Spec.Capacity[corev1.ResourceStorage]
	switch {
	case has.Cmp(asked) < 0:
		return "requested PV is too small"
	case storagehelpers.GetPersistentVolumeClass(volume) != storagehelpers.GetPersistentVolumeClaimClass(claim):
		return "storageClassName does not match"
	case storagehelpers.CheckVolumeModeMismatches(&claim.Spec, &volume.Spec):
		return "incompatible volumeMode"
	case !storagehelpers.CheckAccessModes(claim, volume):
		return "incompatible accessMode"
	}
	return ""
}

// bind writes both sides of the bond, as far as they are not written yet.
func (c *Controller) bind(ctx context.Context, volume *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) error {
	bound, dirty, err := storagehelpers.GetBindVolumeToClaim(volume, claim)
	if err != nil {
		return err
	}
	if dirty {
		if bound, err = c.client.CoreV1().PersistentVolumes().Update(ctx, bound, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("bind the volume %s to the claim %s: %w", volume.Name, claim.Name, err)
		}
	}
	if bound, err = c.setPhase(ctx, bound, corev1.VolumeBound, ""); err != nil {
		return err
	}
	update := claim.DeepCopy()
	if update.Spec.VolumeName == "" {
		update.Spec.VolumeName = bound.Name
		metav1.SetMetaDataAnnotation(&update.ObjectMeta, storagehelpers.AnnBoundByController, "yes")
	}
	if !metav1.HasAnnotation(update.ObjectMeta, storagehelpers.AnnBindCompleted) {
		metav1.SetMetaDataAnnotation(&update.ObjectMeta, storagehelpers.AnnBindCompleted, "yes")
		if update, err = c.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Update(ctx, update, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("bind the claim %s to the volume %s: %w", claim.Name, volume.Name, err)
		}
	}
	if update.Status.Phase == corev1.ClaimBound {
		return nil
	}
	update.Status.Phase, update.Status.AccessModes, update.Status.Capacity = corev1.ClaimBound, bound.Spec.AccessModes, bound.Spec.Capacity
	return c.writeClaim(ctx, update)
}

// syncBound keeps a bond whole, or says that it is lost.
func (c *Controller) syncBound(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	if claim.Spec.VolumeName == "" {
		return c.lose(ctx, claim, "ClaimLost", "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!")
	}
	volume, err := c.volumes.Get(claim.Spec.VolumeName)
	switch {
	case apierrors.IsNotFound(err):
		return c.lose(ctx, claim, "ClaimLost", "Bound claim has lost its PersistentVolume. Data on the volume is lost!")
	case err != nil:
		return err
	case volume.Spec.ClaimRef != nil && !storagehelpers.IsVolumeBoundToClaim(volume, claim):
		return c.lose(ctx, claim, "ClaimMisbound", "Two claims are bound to the same volume, this one is bound incorrectly")
	}
	return c.bind(ctx, volume, claim)
}

func (c *Controller) lose(ctx context.Context, claim *corev1.PersistentVolumeClaim, reason, message string) error {
	if claim.Status.Phase == corev1.ClaimLost {
		return nil
	}
	c.recorder.Event(claim, corev1.EventTypeWarning, reason, message)
	update := claim.DeepCopy()
	update.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimLost}
	return c.writeClaim(ctx, update)
}

func (c *Controller) writeClaim(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	_, err := c.client.CoreV1().PersistentVolumeClaims(claim.Namespace).UpdateStatus(ctx, claim, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write the status of the claim %s: %w", claim.Name, err)
	}
	return nil
}

// syncVolume says how the volume is.
func (c *Controller) syncVolume(ctx context.Context, volume *corev1.PersistentVolume) error {
	ref := volume.Spec.ClaimRef
	if volume.DeletionTimestamp != nil && volume.Status.Phase != corev1.VolumeBound {
		return c.letVolumeGo(ctx, volume)
	}
	if ref == nil || ref.UID == "" {
		_, err := c.setPhase(ctx, volume, corev1.VolumeAvailable, "")
		return err
	}
	// The API, not the cache: a claim that is not seen yet must not free its volume.
	claim, err := c.client.CoreV1().PersistentVolumeClaims(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err) || (err == nil && claim.UID != ref.UID):
		return c.release(ctx, volume)
	case err != nil:
		return fmt.Errorf("read the claim of the volume %s: %w", volume.Name, err)
	case claim.Spec.VolumeName == "":
		return nil // its claim is woken, too, and binds itself
	case claim.Spec.VolumeName == volume.Name:
		_, err := c.setPhase(ctx, volume, corev1.VolumeBound, "")
		return err
	}
	// The claim took another one. What people wrote stays.
	update := volume.DeepCopy()
	update.Spec.ClaimRef.UID, update.Spec.ClaimRef.ResourceVersion = "", ""
	if metav1.HasAnnotation(volume.ObjectMeta, storagehelpers.AnnBoundByController) {
		delete(update.Annotations, storagehelpers.AnnBoundByController)
		update.Spec.ClaimRef = nil
	}
	if update, err = c.client.CoreV1().PersistentVolumes().Update(ctx, update, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("free the volume %s: %w", volume.Name, err)
	}
	_, err = c.setPhase(ctx, update, corev1.VolumeAvailable, "")
	return err
}

// release does what the reclaim policy says with a volume whose claim is gone.
func (c *Controller) release(ctx context.Context, volume *corev1.PersistentVolume) error {
	if volume.Status.Phase == corev1.VolumeFailed {
		return nil
	}
	volume, err := c.setPhase(ctx, volume, corev1.VolumeReleased, "")
	if err != nil {
		return err
	}
	switch volume.Spec.PersistentVolumeReclaimPolicy {
	case corev1.PersistentVolumeReclaimDelete:
		return c.remove(ctx, volume)
	case corev1.PersistentVolumeReclaimRecycle:
		return c.fail(ctx, volume, "VolumeFailedRecycle", "recycling is not supported")
	case corev1.PersistentVolumeReclaimRetain:
	}
	return nil
}

// remove deletes a volume as upstream's in-tree plugins do. The data of a hostPath is
// a node's, and no controller reaches it.
func (c *Controller) remove(ctx context.Context, volume *corev1.PersistentVolume) error {
	switch host := volume.Spec.HostPath; {
	case volume.Spec.CSI != nil:
		return nil // its driver's
	case host == nil:
		return c.fail(ctx, volume, "VolumeFailedDelete", fmt.Sprintf("error getting deleter volume plugin for volume %q: no deletable volume plugin matched", volume.Name))
	case len(host.Path) <= len("/tmp/") || !strings.HasPrefix(host.Path, "/tmp/"):
		return c.fail(ctx, volume, "VolumeFailedDelete", "host_path deleter only supports /tmp/.+ but received provided "+host.Path)
	}
	err := c.client.CoreV1().PersistentVolumes().Delete(ctx, volume.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(volume.UID))})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete the volume %s: %w", volume.Name, err)
	}
	return nil
}

func (c *Controller) fail(ctx context.Context, volume *corev1.PersistentVolume, reason, why string) error {
	c.recorder.Event(volume, corev1.EventTypeWarning, reason, why)
	_, err := c.setPhase(ctx, volume, corev1.VolumeFailed, why)
	return err
}

// setPhase writes the volume's phase when it is another, and returns the volume.
func (c *Controller) setPhase(ctx context.Context, volume *corev1.PersistentVolume, phase corev1.PersistentVolumePhase, message string) (*corev1.PersistentVolume, error) {
	if volume.Status.Phase == phase {
		return volume, nil
	}
	update := volume.DeepCopy()
	update.Status = corev1.PersistentVolumeStatus{Phase: phase, Message: message, LastPhaseTransitionTime: ptr.To(metav1.NewTime(c.clock.Now()))}
	update, err := c.client.CoreV1().PersistentVolumes().UpdateStatus(ctx, update, metav1.UpdateOptions{})
	if err != nil {
		return nil, fmt.Errorf("write the phase of the volume %s: %w", volume.Name, err)
	}
	return update, nil
}
