// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Labels that give a node its roles in a table.
const (
	roleLabelPrefix = "node-role.kubernetes.io/"
	roleLabel       = "kubernetes.io/role"
)

func nodeKind() Kind {
	return Kind{
		Resource: "nodes", Singular: "node", Kind: "Node",
		GroupVersion: corev1.SchemeGroupVersion,
		WatchCache:   true,
		ShortNames:   []string{"no"},
		New:          newObject[corev1.Node], NewList: newObject[corev1.NodeList],
		Default: forObject(func(n *corev1.Node) {
			// What is allocatable is what there is, until a node says less.
			if n.Status.Allocatable == nil && len(n.Status.Capacity) > 0 {
				n.Status.Allocatable = n.Status.Capacity.DeepCopy()
			}
			// The first range has two fields.
			if n.Spec.PodCIDR != "" && len(n.Spec.PodCIDRs) == 0 {
				n.Spec.PodCIDRs = []string{n.Spec.PodCIDR}
			}
		}),
		Validate:       validates(validateNode),
		ValidateUpdate: validatesUpdate(validateNodeUpdate),
		Status:         &StatusStrategy{Validate: validatesUpdate(validateNodeStatus)},
		// A kubelet registers itself with the status that it has.
		KeepStatusOnCreate: true,
		Subresources:       nodeSubresources,
		SubresourceTypes:   map[schema.GroupVersion][]runtime.Object{corev1.SchemeGroupVersion: {&corev1.NodeProxyOptions{}}},
		AddToScheme:        addOptions(&corev1.NodeProxyOptions{}),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Status", "string", "Whether the node is ready, and whether pods may be scheduled to it."),
			column("Roles", "string", "The node's roles, from its labels."),
			ageColumn,
			column("Version", "string", "The version of its kubelet."),
			wideColumn("Internal-IP", "The address within the cluster."),
			wideColumn("External-IP", "The address outside the cluster."),
			wideColumn("OS-Image", "The operating system."),
			wideColumn("Kernel-Version", "The kernel."),
			wideColumn("Container-Runtime", "The container runtime."),
		},
		Row:         row(nodeRow),
		FieldLabels: []string{"spec.unschedulable"},
		Fields: fieldsOf(func(n *corev1.Node) fields.Set {
			return fields.Set{"spec.unschedulable": strconv.FormatBool(n.Spec.Unschedulable)}
		}),
	}
}

func nodeRow(n *corev1.Node) []any {
	info := n.Status.NodeInfo
	return []any{
		n.Name, nodeStatus(n), nodeRoles(n), age(n.CreationTimestamp), info.KubeletVersion,
		nodeAddress(n, corev1.NodeInternalIP), nodeAddress(n, corev1.NodeExternalIP),
		unknownIfEmpty(info.OSImage), unknownIfEmpty(info.KernelVersion), unknownIfEmpty(info.ContainerRuntimeVersion),
	}
}

func unknownIfEmpty(s string) string {
	if s == "" {
		return "<unknown>"
	}
	return s
}

func nodeStatus(n *corev1.Node) string {
	status := "Unknown"
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			if status = "NotReady"; c.Status == corev1.ConditionTrue {
				status = "Ready"
			}
		}
	}
	if n.Spec.Unschedulable {
		status += ",SchedulingDisabled"
	}
	return status
}

func nodeRoles(n *corev1.Node) string {
	var roles []string
	for label, value := range n.Labels {
		if role, ok := strings.CutPrefix(label, roleLabelPrefix); ok && role != "" {
			roles = append(roles, role)
		} else if label == roleLabel && value != "" {
			roles = append(roles, value)
		}
	}
	slices.Sort(roles)
	return orNone(strings.Join(slices.Compact(roles), ","))
}

func nodeAddress(n *corev1.Node, want corev1.NodeAddressType) string {
	for _, a := range n.Status.Addresses {
		if a.Type == want {
			return a.Address
		}
	}
	return "<none>"
}

func validateNode(n *corev1.Node) field.ErrorList {
	var errs field.ErrorList
	spec := field.NewPath("spec")
	seen := map[string]bool{}
	for i, t := range n.Spec.Taints {
		p := spec.Child("taints").Index(i)
		errs = append(errs, invalidIf(p.Child("key"), t.Key, validation.IsQualifiedName(t.Key))...)
		errs = append(errs, invalidIf(p.Child("value"), t.Value, validation.IsValidLabelValue(t.Value))...)
		if t.Effect == "" {
			errs = append(errs, field.Required(p.Child("effect"), ""))
		} else {
			errs = append(errs, oneOf(t.Effect, p.Child("effect"), corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute)...)
		}
		key := t.Key + ":" + string(t.Effect)
		if seen[key] {
			d := field.Duplicate(p, t)
			d.Detail = "taints must be unique by key and effect pair"
			errs = append(errs, d)
		}
		seen[key] = true
	}
	p := spec.Child("podCIDRs")
	if len(n.Spec.PodCIDRs) > 0 && n.Spec.PodCIDR != n.Spec.PodCIDRs[0] {
		errs = append(errs, field.Invalid(p.Index(0), n.Spec.PodCIDRs[0], "must be the same as podCIDR"))
	}
	for i, cidr := range n.Spec.PodCIDRs {
		if _, err := netip.ParsePrefix(cidr); err != nil {
			errs = append(errs, field.Invalid(p.Index(i), cidr, "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)"))
		}
	}
	if len(n.Spec.PodCIDRs) > 2 {
		errs = append(errs, field.Invalid(p, n.Spec.PodCIDRs, "may specify no more than one CIDR for each IP family"))
	}
	return errs
}

func validateNodeUpdate(n, old *corev1.Node) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	if len(old.Spec.PodCIDRs) > 0 && !equality.Semantic.DeepEqual(n.Spec.PodCIDRs, old.Spec.PodCIDRs) {
		errs = append(errs, field.Forbidden(spec.Child("podCIDRs"), "node updates may not change podCIDR except from \"\" to valid"))
	}
	if old.Spec.ProviderID != "" && n.Spec.ProviderID != old.Spec.ProviderID {
		errs = append(errs, field.Forbidden(spec.Child("providerID"), "node updates may not change providerID except from \"\" to valid"))
	}
	return errs
}

func validateNodeStatus(n, _ *corev1.Node) field.ErrorList {
	var errs field.ErrorList
	p := field.NewPath("status", "addresses")
	seen := map[corev1.NodeAddress]bool{}
	for i, a := range n.Status.Addresses {
		if seen[a] {
			errs = append(errs, field.Duplicate(p.Index(i), a))
		}
		seen[a] = true
	}
	return append(errs, validateNodeResources(n)...)
}

// validateNodeResources checks what a node says that it has.
func validateNodeResources(n *corev1.Node) field.ErrorList {
	var errs field.ErrorList
	status := field.NewPath("status")
	for _, list := range []struct {
		name  string
		items corev1.ResourceList
	}{{"capacity", n.Status.Capacity}, {"allocatable", n.Status.Allocatable}} {
		for _, name := range slices.Sorted(maps.Keys(list.items)) {
			if q := list.items[name]; q.Sign() < 0 {
				errs = append(errs, field.Invalid(status.Child(list.name, string(name)), q.String(), "must be greater than or equal to 0"))
			}
		}
	}
	return errs
}
