// SPDX-License-Identifier: Apache-2.0

package loadbalancer

import (
	"bytes"
	"crypto/sha256"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"
)

// candidate is a node as far as the election of who announces an address goes.
type candidate struct {
	name string
	// excluded nodes never announce: they bear upstream's label, or are being deleted.
	excluded bool
	// ready is the Node's condition; healthy what the health checks from outside said.
	ready, healthy bool
	// endpoints says that a ready endpoint of the Service runs there.
	endpoints bool
}

// elect chooses the node that announces an address. With local, only nodes with an
// endpoint of their own count: another would drop what it attracts. Among these, the
// ones that are ready and healthy are preferred, and when all fail their checks, the
// checks are not believed. The order of preference is a hash of node and address, as
// in MetalLB: every address has its own, so the addresses spread over the nodes, and
// the loss of one node moves only what that node had. "" means that nobody can.
func elect(addr netip.Addr, nodes []candidate, local bool) string {
	for _, good := range []func(candidate) bool{
		func(c candidate) bool { return c.ready && c.healthy },
		func(c candidate) bool { return c.ready },
		func(candidate) bool { return true },
	} {
		best, bestHash := "", []byte(nil)
		for _, c := range nodes {
			if c.excluded || (local && !c.endpoints) || !good(c) {
				continue
			}
			h := sha256.Sum256([]byte(c.name + "#" + addr.String()))
			if best == "" || bytes.Compare(h[:], bestHash) < 0 {
				best, bestHash = c.name, h[:]
			}
		}
		if best != "" {
			return best
		}
	}
	return ""
}

// candidateOf reads a Node.
func candidateOf(n *corev1.Node) candidate {
	c := candidate{name: n.Name, excluded: n.DeletionTimestamp != nil, healthy: true}
	if _, out := n.Labels[corev1.LabelNodeExcludeBalancers]; out {
		c.excluded = true
	}
	for _, cond := range n.Status.Conditions {
		if cond.Type == corev1.NodeReady {
			c.ready = cond.Status == corev1.ConditionTrue
		}
		if cond.Type == corev1.NodeNetworkUnavailable && cond.Status == corev1.ConditionTrue {
			c.excluded = true
		}
	}
	return c
}

// nodesWithEndpoints lists the nodes that run a ready endpoint. One that terminates
// does not count: its node says so on the health check port, too.
func nodesWithEndpoints(all []*discoveryv1.EndpointSlice) map[string]bool {
	out := map[string]bool{}
	for _, s := range all {
		for _, e := range s.Endpoints {
			if ptr.Deref(e.Conditions.Ready, true) && !ptr.Deref(e.Conditions.Terminating, false) && e.NodeName != nil {
				out[*e.NodeName] = true
			}
		}
	}
	return out
}

// internalIP returns the node's first address.
func internalIP(n *corev1.Node) (netip.Addr, bool) {
	for _, a := range n.Status.Addresses {
		if a.Type != corev1.NodeInternalIP {
			continue
		}
		if ip, err := netip.ParseAddr(a.Address); err == nil {
			return ip, true
		}
	}
	return netip.Addr{}, false
}
