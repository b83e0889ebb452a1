// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/storage/names"

	"github.com/kplab/kplab/apiserver/registry"
)

// What upstream's admission plugins put into every pod.
const (
	tokenVolumePrefix = "kube-api-access-"
	tokenMountPath    = "/var/run/secrets/kubernetes.io/serviceaccount"
	// tokenSeconds is an hour and seven seconds, by which upstream tells these
	// tokens from those that somebody asked for.
	tokenSeconds = 3607
	// rootCAConfigMap has the API's authority in every namespace.
	rootCAConfigMap = "kube-root-ca.crt"
	// tolerationSeconds is how long a pod stays on a node that is not ready.
	tolerationSeconds = 300
)

// podAdmission does for a new pod what the plugins ServiceAccount and
// DefaultTolerationSeconds do upstream.
type podAdmission struct {
	lookup func(string) *registry.Store
}

var _ admission.MutationInterface = podAdmission{}

// Handles implements admission.Interface.
func (podAdmission) Handles(op admission.Operation) bool { return op == admission.Create }

// Admit implements admission.MutationInterface.
func (p podAdmission) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok || a.GetResource().Resource != "pods" || a.GetSubresource() != "" {
		return nil
	}
	addTolerations(pod)
	// A mirror pod shows what a node runs by itself; it can use no account.
	if _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		return nil
	}
	if pod.Spec.ServiceAccountName == "" {
		pod.Spec.ServiceAccountName = "default"
	}
	pod.Spec.DeprecatedServiceAccount = pod.Spec.ServiceAccountName
	account, err := p.account(ctx, a.GetNamespace(), pod.Spec.ServiceAccountName)
	if err != nil {
		return admission.NewForbidden(a, fmt.Errorf("error looking up service account %s/%s: %w", a.GetNamespace(), pod.Spec.ServiceAccountName, err))
	}
	if wantsToken(pod, account) {
		mountToken(pod)
	}
	if len(pod.Spec.ImagePullSecrets) == 0 {
		pod.Spec.ImagePullSecrets = append(pod.Spec.ImagePullSecrets, account.ImagePullSecrets...)
	}
	return nil
}

// account reads the service account. The account default of a new namespace is
// made by a controller a moment after the namespace, so a pod may wait for it.
func (p podAdmission) account(ctx context.Context, namespace, name string) (*corev1.ServiceAccount, error) {
	until := time.Now().Add(accountWait)
	for {
		account, err := registry.Read[*corev1.ServiceAccount](ctx, p.lookup, "serviceaccounts", namespace, name)
		if !apierrors.IsNotFound(err) || name != "default" || time.Now().After(until) {
			return account, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func wantsToken(pod *corev1.Pod, account *corev1.ServiceAccount) bool {
	if v := pod.Spec.AutomountServiceAccountToken; v != nil {
		return *v
	}
	return account.AutomountServiceAccountToken == nil || *account.AutomountServiceAccountToken
}

// mountToken adds the projected volume with token, authority and namespace, and
// mounts it in every container that has nothing at that path.
func mountToken(pod *corev1.Pod) {
	volume := ""
	for _, v := range pod.Spec.Volumes {
		if len(v.Name) > len(tokenVolumePrefix) && v.Name[:len(tokenVolumePrefix)] == tokenVolumePrefix {
			volume = v.Name
		}
	}
	added := volume == ""
	if added {
		volume = names.SimpleNameGenerator.GenerateName(tokenVolumePrefix)
	}
	used := false
	mount := func(containers []corev1.Container) {
		for i := range containers {
			taken := false
			for _, m := range containers[i].VolumeMounts {
				taken = taken || m.MountPath == tokenMountPath
			}
			if !taken {
				used = true
				containers[i].VolumeMounts = append(containers[i].VolumeMounts, corev1.VolumeMount{
					Name: volume, ReadOnly: true, MountPath: tokenMountPath,
				})
			}
		}
	}
	mount(pod.Spec.InitContainers)
	mount(pod.Spec.Containers)
	if added && used {
		pod.Spec.Volumes = append(pod.Spec.Volumes, tokenVolume(volume))
	}
}

func tokenVolume(name string) corev1.Volume {
	seconds, mode := int64(tokenSeconds), int32(corev1.ProjectedVolumeSourceDefaultMode)
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		DefaultMode: &mode,
		Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{ExpirationSeconds: &seconds, Path: "token"}},
			{ConfigMap: &corev1.ConfigMapProjection{
				LocalObjectReference: corev1.LocalObjectReference{Name: rootCAConfigMap},
				Items:                []corev1.KeyToPath{{Key: "ca.crt", Path: "ca.crt"}},
			}},
			{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{{
				Path:     "namespace",
				FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"},
			}}}},
		},
	}}}
}

// addTolerations lets a pod stay for a while on a node that is not ready or
// cannot be reached, unless it says itself what it wants.
func addTolerations(pod *corev1.Pod) {
	for _, key := range []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable} {
		said := false
		for _, t := range pod.Spec.Tolerations {
			said = said || ((t.Key == key || t.Key == "") && (t.Effect == corev1.TaintEffectNoExecute || t.Effect == ""))
		}
		if !said {
			seconds := int64(tolerationSeconds)
			pod.Spec.Tolerations = append(pod.Spec.Tolerations, corev1.Toleration{
				Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &seconds,
			})
		}
	}
}
