// SPDX-License-Identifier: Apache-2.0

package registry

import (
	storagev1 "k8s.io/api/storage/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// volumeAttachmentKind is the wish that a volume is attached to a node, which a
// CSI driver's attacher fulfils. A lab has none.
func volumeAttachmentKind() Kind {
	return Kind{
		Resource: "volumeattachments", Singular: "volumeattachment", Kind: "VolumeAttachment",
		GroupVersion: storagev1.SchemeGroupVersion,
		New:          newObject[storagev1.VolumeAttachment], NewList: newObject[storagev1.VolumeAttachmentList],
		Validate: validates(validateVolumeAttachment),
		ValidateUpdate: validatesUpdate(func(a, old *storagev1.VolumeAttachment) field.ErrorList {
			return apivalidation.ValidateImmutableField(a.Spec, old.Spec, field.NewPath("spec"))
		}),
		Status: &StatusStrategy{},
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Attacher", "string", "The driver that attaches."),
			column("PV", "string", "The volume."),
			column("Node", "string", "The node."),
			column("Attached", "boolean", "Whether it is attached."),
			ageColumn,
		},
		Row: row(func(a *storagev1.VolumeAttachment) []any {
			return []any{
				a.Name, a.Spec.Attacher, ptr.Deref(a.Spec.Source.PersistentVolumeName, ""), a.Spec.NodeName,
				a.Status.Attached, age(a.CreationTimestamp),
			}
		}),
	}
}

func validateVolumeAttachment(a *storagev1.VolumeAttachment) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateDriverName(a.Spec.Attacher, spec.Child("attacher"))
	source := spec.Child("source")
	pv := a.Spec.Source.PersistentVolumeName
	switch {
	case a.Spec.Source.InlineVolumeSpec == nil && pv == nil:
		errs = append(errs, field.Required(source, "must specify exactly one of inlineVolumeSpec and persistentVolumeName"))
	case a.Spec.Source.InlineVolumeSpec != nil && pv != nil:
		errs = append(errs, field.Forbidden(source, "must specify exactly one of inlineVolumeSpec and persistentVolumeName"))
	case pv != nil && *pv == "":
		errs = append(errs, field.Required(source.Child("persistentVolumeName"), "must specify non empty persistentVolumeName"))
	case pv != nil:
		errs = append(errs, invalidIf(source.Child("persistentVolumeName"), *pv, apivalidation.NameIsDNSSubdomain(*pv, false))...)
	}
	return append(errs, invalidIf(spec.Child("nodeName"), a.Spec.NodeName, apivalidation.NameIsDNSSubdomain(a.Spec.NodeName, false))...)
}
