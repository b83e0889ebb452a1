// SPDX-License-Identifier: Apache-2.0

package mirroring

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	sliceutil "k8s.io/endpointslice/util"
	netutils "k8s.io/utils/net"
)

// perSubset is the most addresses mirrored of one subset; upstream's limit, and what
// one slice can hold.
const perSubset = 1000

// skips counts addresses that are not mirrored.
type skips struct{ tooMany, invalid int }

// mirror returns the slices that say what the Endpoints say: one for each set of
// ports and each address family. They have no name yet.
func mirror(e *corev1.Endpoints) ([]*discoveryv1.EndpointSlice, skips) {
	var out []*discoveryv1.EndpointSlice
	var skipped skips
	for _, subset := range merged(e.Subsets) {
		byFamily := map[discoveryv1.AddressType][]discoveryv1.Endpoint{}
		count := 0
		add := func(addresses []corev1.EndpointAddress, ready bool) {
			for j := range addresses {
				if count >= perSubset {
					skipped.tooMany++
					continue
				}
				ip, family, ok := parse(addresses[j].IP)
				if !ok {
					skipped.invalid++
					continue
				}
				count++
				byFamily[family] = append(byFamily[family], endpoint(&addresses[j], ip, ready))
			}
		}
		add(subset.Addresses, true)
		add(subset.NotReadyAddresses, false)
		for _, family := range slices.Sorted(maps.Keys(byFamily)) {
			s := frame(e, family)
			s.Endpoints, s.Ports = byFamily[family], ports(subset.Ports)
			out = append(out, s)
		}
	}
	return out, skipped
}

// merged puts subsets with the same ports together: two slices of the same ports
// could not be told apart later. Of an address that is there twice the first stays;
// one that is in both lists is ready.
func merged(subsets []corev1.EndpointSubset) []corev1.EndpointSubset {
	type known struct {
		ports, ip string
		uid       types.UID
	}
	var out []corev1.EndpointSubset
	index := map[string]int{}
	seen := map[known]bool{}
	fresh := func(ports string, in []corev1.EndpointAddress) []corev1.EndpointAddress {
		var kept []corev1.EndpointAddress
		for _, a := range in {
			k := known{ports: ports, ip: a.IP}
			if a.TargetRef != nil {
				k.uid = a.TargetRef.UID
			}
			if !seen[k] {
				kept = append(kept, a)
			}
			seen[k] = true
		}
		return kept
	}
	for _, s := range subsets {
		key := portsKey(ports(s.Ports))
		i, ok := index[key]
		if !ok {
			i = len(out)
			index[key] = i
			out = append(out, corev1.EndpointSubset{Ports: s.Ports})
		}
		out[i].Addresses = append(out[i].Addresses, fresh(key, s.Addresses)...)
	}
	for _, s := range subsets {
		key := portsKey(ports(s.Ports))
		i := index[key]
		out[i].NotReadyAddresses = append(out[i].NotReadyAddresses, fresh(key, s.NotReadyAddresses)...)
	}
	return out
}

// portsKey is the same for equal sets of ports.
func portsKey(ports []discoveryv1.EndpointPort) string {
	return string(sliceutil.NewPortMapKey(slices.Clone(ports)))
}

// parse reads an address as generously as old Endpoints were written, with zeros
// in front of a number, and returns it as slices have it.
func parse(text string) (string, discoveryv1.AddressType, bool) {
	ip := netutils.ParseIPSloppy(text)
	switch {
	case ip == nil:
		return "", "", false
	case ip.To4() != nil:
		return ip.String(), discoveryv1.AddressTypeIPv4, true
	}
	return ip.String(), discoveryv1.AddressTypeIPv6, true
}

func endpoint(a *corev1.EndpointAddress, ip string, ready bool) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{
		Addresses:  []string{ip},
		Conditions: discoveryv1.EndpointConditions{Ready: &ready},
		TargetRef:  a.TargetRef,
		NodeName:   a.NodeName,
	}
	if a.Hostname != "" {
		e.Hostname = &a.Hostname
	}
	return e
}

func ports(in []corev1.EndpointPort) []discoveryv1.EndpointPort {
	out := make([]discoveryv1.EndpointPort, 0, len(in))
	for _, p := range in {
		protocol := p.Protocol
		if protocol == "" {
			protocol = corev1.ProtocolTCP
		}
		out = append(out, discoveryv1.EndpointPort{Name: &p.Name, Port: &p.Port, Protocol: &protocol, AppProtocol: p.AppProtocol})
	}
	return out
}

// frame is an empty slice with the metadata that follows from the Endpoints.
func frame(e *corev1.Endpoints, family discoveryv1.AddressType) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: prefix(e.Name),
			Namespace:    e.Namespace,
			Labels:       maps.Clone(e.Labels),
			Annotations:  map[string]string{},
			OwnerReferences: []metav1.OwnerReference{
				*metav1.NewControllerRef(e, corev1.SchemeGroupVersion.WithKind("Endpoints")),
			},
		},
		AddressType: family,
	}
	if s.Labels == nil {
		s.Labels = map[string]string{}
	}
	s.Labels[discoveryv1.LabelServiceName] = e.Name
	s.Labels[discoveryv1.LabelManagedBy] = ManagedBy
	for key, value := range e.Annotations {
		// What kubectl and the Endpoints' writer note about the Endpoints would be
		// a lie on a slice.
		if key != corev1.LastAppliedConfigAnnotation && key != corev1.EndpointsLastChangeTriggerTime {
			s.Annotations[key] = value
		}
	}
	return s
}

// prefix begins the names of the slices; a name that is too long for the dash goes
// without.
func prefix(name string) string {
	if p := name + "-"; len(apivalidation.NameIsDNSSubdomain(p, true)) == 0 {
		return p
	}
	return name
}

// changes is what has to be written.
type changes struct{ create, update, remove []*discoveryv1.EndpointSlice }

// plan finds for every wanted slice an existing one of the same family and ports to
// keep or update; what is left over on either side is created or removed.
func plan(wanted, existing []*discoveryv1.EndpointSlice) changes {
	var p changes
	key := func(s *discoveryv1.EndpointSlice) string {
		return string(s.AddressType) + portsKey(s.Ports)
	}
	have := map[string][]*discoveryv1.EndpointSlice{}
	sorted := slices.Clone(existing)
	slices.SortFunc(sorted, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	for _, s := range sorted {
		if s.DeletionTimestamp == nil {
			have[key(s)] = append(have[key(s)], s)
		}
	}
	for _, w := range wanted {
		k := key(w)
		candidates := have[k]
		if len(candidates) == 0 {
			p.create = append(p.create, w)
			continue
		}
		old := candidates[0]
		have[k] = candidates[1:]
		update := old.DeepCopy()
		update.Labels, update.Annotations, update.OwnerReferences = w.Labels, w.Annotations, w.OwnerReferences
		update.Endpoints, update.Ports = w.Endpoints, w.Ports
		if !equality.Semantic.DeepEqual(old, update) {
			p.update = append(p.update, update)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(have)) {
		p.remove = append(p.remove, have[k]...)
	}
	return p
}
