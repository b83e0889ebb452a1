// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/admission"

	"github.com/kplab/kplab/apiserver/registry"
)

// The annotations of a storage class that make it the default one, the older last.
const (
	defaultClassAnnotation     = "storageclass.kubernetes.io/is-default-class"
	betaDefaultClassAnnotation = "storageclass.beta.kubernetes.io/is-default-class"
)

// claimAdmission does what the plugin DefaultStorageClass does upstream: a new claim
// that says nothing of a class gets the default one, when there is one.
type claimAdmission struct {
	lookup func(string) *registry.Store
}

var _ admission.MutationInterface = claimAdmission{}

// Handles implements admission.Interface.
func (claimAdmission) Handles(op admission.Operation) bool { return op == admission.Create }

// Admit implements admission.MutationInterface.
func (c claimAdmission) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	claim, ok := a.GetObject().(*corev1.PersistentVolumeClaim)
	if !ok || a.GetSubresource() != "" || claim.Spec.StorageClassName != nil {
		return nil
	}
	if _, said := claim.Annotations[corev1.BetaStorageClassAnnotation]; said {
		return nil
	}
	all, err := registry.List[*storagev1.StorageClassList](ctx, c.lookup, "storageclasses", metav1.NamespaceNone, labels.Everything())
	if err != nil {
		return admission.NewForbidden(a, fmt.Errorf("find the default storage class: %w", err))
	}
	// Of several, the newest; of those, the first by name, in which order they come.
	var class *storagev1.StorageClass
	for i := range all.Items {
		s := &all.Items[i]
		isDefault := s.Annotations[defaultClassAnnotation] == "true" || s.Annotations[betaDefaultClassAnnotation] == "true"
		if isDefault && (class == nil || class.CreationTimestamp.Before(&s.CreationTimestamp)) {
			class = s
		}
	}
	if class != nil {
		claim.Spec.StorageClassName = &class.Name
	}
	return nil
}
