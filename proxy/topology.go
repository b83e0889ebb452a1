// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// candidate is an endpoint before the choice, with the hints that the choice
// needs.
type candidate struct {
	Endpoint
	zones, nodes []string
}

// collect gathers the endpoints of one Service port from the Service's slices.
// Only slices of the port's family count, and only slice ports of the same name
// and protocol. An address that stands in several slices (a controller moves
// endpoints between slices in separate writes) is one endpoint, and the better
// of its states holds.
func collect(name ServicePortName, family corev1.IPFamily, node string, eps []*discoveryv1.EndpointSlice) []candidate {
	var out []candidate
	for _, slice := range eps {
		if string(slice.AddressType) != string(family) {
			continue
		}
		for i := range slice.Ports {
			port := &slice.Ports[i]
			if port.Port == nil || deref(port.Name, "") != name.Port || deref(port.Protocol, corev1.ProtocolTCP) != name.Protocol {
				continue
			}
			out = slices.Grow(out, len(slice.Endpoints))
			for j := range slice.Endpoints {
				if c, ok := newCandidate(&slice.Endpoints[j], uint16(*port.Port), family, node); ok {
					out = append(out, c)
				}
			}
		}
	}
	byAddr := func(a, b candidate) int { return a.Addr.Compare(b.Addr) }
	if !slices.IsSortedFunc(out, byAddr) {
		slices.SortStableFunc(out, byAddr)
	}
	return merge(out)
}

// newCandidate reads one endpoint of a slice. Conditions that are not set mean
// ready, serving and not terminating.
func newCandidate(e *discoveryv1.Endpoint, port uint16, family corev1.IPFamily, node string) (candidate, bool) {
	if len(e.Addresses) == 0 {
		return candidate{}, false
	}
	// Addresses after the first mean nothing: consumers are to use the first.
	addr, err := netip.ParseAddr(e.Addresses[0])
	if err != nil || FamilyOf(addr) != family || port == 0 {
		return candidate{}, false
	}
	c := candidate{Endpoint: Endpoint{
		Addr:        netip.AddrPortFrom(addr.Unmap(), port),
		Local:       node != "" && deref(e.NodeName, "") == node,
		Ready:       deref(e.Conditions.Ready, true),
		Serving:     deref(e.Conditions.Serving, true),
		Terminating: deref(e.Conditions.Terminating, false),
	}}
	if e.Hints != nil {
		for _, z := range e.Hints.ForZones {
			c.zones = append(c.zones, z.Name)
		}
		for _, n := range e.Hints.ForNodes {
			c.nodes = append(c.nodes, n.Name)
		}
	}
	return c, true
}

// merge makes one endpoint of neighbours with the same address.
func merge(in []candidate) []candidate {
	out := in[:0]
	for _, c := range in {
		if n := len(out); n > 0 && out[n-1].Addr == c.Addr {
			local := out[n-1].Local || c.Local
			if rank(c.Endpoint) > rank(out[n-1].Endpoint) {
				out[n-1] = c
			}
			out[n-1].Local = local
			continue
		}
		out = append(out, c)
	}
	return out
}

// rank orders the states of an endpoint by how useful they are.
func rank(e Endpoint) int {
	switch {
	case e.Ready:
		return 3
	case e.Serving && e.Terminating:
		return 2
	case e.Serving:
		return 1
	}
	return 0
}

// choice is what choose found.
type choice struct {
	cluster, local []Endpoint
	// anywhere says that some endpoint of the cluster is usable.
	anywhere bool
}

// choose picks the endpoints of the Cluster and the Local scope. Each scope is
// decided by itself: the ready ones of the scope, else those of the scope that
// are terminating and still serve (KEP-1669). The Cluster scope follows topology
// hints among the ready ones; falling back to terminating ones it does not,
// since a far endpoint is better than none. Local beats topology.
func choose(all []candidate, node, zone string) choice {
	var ready, draining, localReady, localDraining []Endpoint
	fit := hintFilter(all, node, zone)
	out := choice{}
	for i := range all {
		c := &all[i]
		switch {
		case c.Ready:
			out.anywhere = true
			if fit == nil || fit(c) {
				ready = append(ready, c.Endpoint)
			}
			if c.Local {
				localReady = append(localReady, c.Endpoint)
			}
		case c.Serving && c.Terminating:
			out.anywhere = true
			draining = append(draining, c.Endpoint)
			if c.Local {
				localDraining = append(localDraining, c.Endpoint)
			}
		}
	}
	out.cluster, out.local = ready, localReady
	if len(ready) == 0 {
		out.cluster = draining
	}
	if len(localReady) == 0 {
		out.local = localDraining
	}
	return out
}

// hintFilter says which ready endpoints the topology hints allow, nil meaning
// all. Hints count only when every ready endpoint carries them, since a missing
// one means that the slices are half updated, and only when they leave at least
// one endpoint. Hints for nodes come before hints for zones (KEP-3015, KEP-2433).
func hintFilter(all []candidate, node, zone string) func(*candidate) bool {
	anyReady, allNodes, allZones, hasNode, hasZone := false, true, true, false, false
	for i := range all {
		c := &all[i]
		if !c.Ready {
			continue
		}
		anyReady = true
		allNodes = allNodes && len(c.nodes) > 0
		allZones = allZones && len(c.zones) > 0
		hasNode = hasNode || slices.Contains(c.nodes, node)
		hasZone = hasZone || (zone != "" && slices.Contains(c.zones, zone))
	}
	switch {
	case !anyReady:
		return nil
	case allNodes && hasNode:
		return func(c *candidate) bool { return slices.Contains(c.nodes, node) }
	case allZones && hasZone:
		return func(c *candidate) bool { return slices.Contains(c.zones, zone) }
	}
	return nil
}

func deref[T any](p *T, missing T) T {
	if p == nil {
		return missing
	}
	return *p
}
