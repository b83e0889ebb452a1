// SPDX-License-Identifier: Apache-2.0

package registry

import (
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxCSINodeID is how long a driver's name for a node may be, in bytes.
const maxCSINodeID = 256

func csiNodeKind() Kind {
	return Kind{
		Resource: "csinodes", Singular: "csinode", Kind: "CSINode",
		GroupVersion: storagev1.SchemeGroupVersion,
		New:          newObject[storagev1.CSINode], NewList: newObject[storagev1.CSINodeList],
		Validate:       validates(validateCSINode),
		ValidateUpdate: validatesUpdate(validateCSINodeUpdate),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Drivers", "integer", "How many CSI drivers the node has."),
			ageColumn,
		},
		Row: row(func(n *storagev1.CSINode) []any {
			return []any{n.Name, int64(len(n.Spec.Drivers)), age(n.CreationTimestamp)}
		}),
	}
}

func validateCSINode(n *storagev1.CSINode) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, d := range n.Spec.Drivers {
		path := field.NewPath("spec", "drivers").Index(i)
		errs = append(errs, validateDriverName(d.Name, path.Child("name"))...)
		if id := path.Child("nodeID"); d.NodeID == "" {
			errs = append(errs, field.Required(id, d.NodeID))
		} else if len(d.NodeID) > maxCSINodeID {
			errs = append(errs, field.Invalid(id, d.NodeID, "must be 256 characters or less"))
		}
		if a := d.Allocatable; a != nil && a.Count != nil {
			errs = append(errs, notNegative(path.Child("allocatable", "count"), *a.Count)...)
		}
		if seen[d.Name] {
			errs = append(errs, field.Duplicate(path.Child("name"), d.Name))
		}
		seen[d.Name] = true
		keys := map[string]bool{}
		for _, k := range d.TopologyKeys {
			path := path.Child("topologyKeys")
			if k == "" || keys[k] {
				errs = append(errs, field.Duplicate(path, k))
			}
			keys[k] = true
			errs = append(errs, invalidIf(path, k, utilvalidation.IsQualifiedName(k))...)
		}
	}
	return errs
}

// validateCSINodeUpdate refuses changes of a driver that stays: it registers
// anew, by a removal and an addition, when its node ID or topology changes.
func validateCSINodeUpdate(n, old *storagev1.CSINode) field.ErrorList {
	var errs field.ErrorList
	for i, d := range n.Spec.Drivers {
		for _, o := range old.Spec.Drivers {
			d.Allocatable, o.Allocatable = nil, nil
			if d.Name == o.Name && !equality.Semantic.DeepEqual(d, o) {
				errs = append(errs, field.Invalid(field.NewPath("spec", "drivers").Index(i), d, "field is immutable"))
			}
		}
	}
	return errs
}
