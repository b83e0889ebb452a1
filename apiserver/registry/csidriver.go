// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"strings"

	storagev1 "k8s.io/api/storage/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// maxCSIDriverName is how long a driver's name may be, in bytes.
const maxCSIDriverName = 63

func csiDriverKind() Kind {
	return Kind{
		Resource: "csidrivers", Singular: "csidriver", Kind: "CSIDriver",
		GroupVersion: storagev1.SchemeGroupVersion,
		New:          newObject[storagev1.CSIDriver], NewList: newObject[storagev1.CSIDriverList],
		TracksGeneration: true,
		Default:          forObject(defaultCSIDriver),
		Validate:         validates(validateCSIDriver),
		ValidateUpdate: validatesUpdate(func(d, old *storagev1.CSIDriver) field.ErrorList {
			spec := field.NewPath("spec")
			errs := apivalidation.ValidateImmutableField(d.Spec.AttachRequired, old.Spec.AttachRequired, spec.Child("attachRequired"))
			return append(errs, apivalidation.ValidateImmutableField(d.Spec.VolumeLifecycleModes, old.Spec.VolumeLifecycleModes, spec.Child("volumeLifecycleModes"))...)
		}),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("AttachRequired", "boolean", "Whether volumes are attached to a node before they are mounted."),
			column("PodInfoOnMount", "boolean", "Whether the driver is told of the pod when it mounts."),
			column("StorageCapacity", "boolean", "Whether the scheduler looks at the capacity that the driver reports."),
			column("TokenRequests", "string", "The audiences of the tokens that the driver gets."),
			column("RequiresRepublish", "boolean", "Whether mounts are repeated."),
			column("Modes", "string", "What kinds of volumes the driver has."),
			ageColumn,
		},
		Row: row(csiDriverRow),
	}
}

func defaultCSIDriver(d *storagev1.CSIDriver) {
	s := &d.Spec
	setDefault(&s.AttachRequired, true)
	setDefault(&s.PodInfoOnMount, false)
	setDefault(&s.StorageCapacity, false)
	setDefault(&s.FSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy)
	setDefault(&s.RequiresRepublish, false)
	setDefault(&s.SELinuxMount, false)
	if len(s.VolumeLifecycleModes) == 0 {
		s.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
	}
}

func csiDriverRow(d *storagev1.CSIDriver) []any {
	tokens, modes := "<unset>", "<none>"
	if d.Spec.TokenRequests != nil {
		var audiences []string
		for _, t := range d.Spec.TokenRequests {
			audiences = append(audiences, t.Audience)
		}
		tokens = strings.Join(audiences, ",")
	}
	if len(d.Spec.VolumeLifecycleModes) > 0 {
		var all []string
		for _, m := range d.Spec.VolumeLifecycleModes {
			all = append(all, string(m))
		}
		modes = strings.Join(all, ",")
	}
	return []any{
		d.Name, ptr.Deref(d.Spec.AttachRequired, true), ptr.Deref(d.Spec.PodInfoOnMount, false), ptr.Deref(d.Spec.StorageCapacity, false),
		tokens, ptr.Deref(d.Spec.RequiresRepublish, false), modes, age(d.CreationTimestamp),
	}
}

func validateCSIDriver(d *storagev1.CSIDriver) field.ErrorList {
	errs := validateDriverName(d.Name, field.NewPath("metadata", "name"))
	modes := field.NewPath("spec", "volumeLifecycleModes")
	for i, m := range d.Spec.VolumeLifecycleModes {
		errs = append(errs, among(string(m), modes.Index(i), string(storagev1.VolumeLifecyclePersistent), string(storagev1.VolumeLifecycleEphemeral))...)
	}
	if p := d.Spec.FSGroupPolicy; p != nil {
		errs = append(errs, oneOf(*p, field.NewPath("spec", "fsGroupPolicy"),
			storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy, storagev1.FileFSGroupPolicy, storagev1.NoneFSGroupPolicy)...)
	}
	audiences := map[string]bool{}
	for i, t := range d.Spec.TokenRequests {
		path := field.NewPath("spec", "tokenRequests").Index(i)
		if audiences[t.Audience] {
			errs = append(errs, field.Duplicate(path.Child("audience"), t.Audience))
		}
		audiences[t.Audience] = true
		if v := t.ExpirationSeconds; v != nil && *v < minTokenSeconds {
			errs = append(errs, field.Invalid(path.Child("expirationSeconds"), *v, "may not specify a duration less than 10 minutes"))
		}
	}
	return errs
}

// validateDriverName checks the name of a CSI driver, wherever it stands.
func validateDriverName(name string, path *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(path, "")}
	}
	var errs field.ErrorList
	if len(name) > maxCSIDriverName {
		errs = append(errs, field.TooLong(path, "", maxCSIDriverName))
	}
	return append(errs, invalidIf(path, name, utilvalidation.IsDNS1123Subdomain(strings.ToLower(name)))...)
}
