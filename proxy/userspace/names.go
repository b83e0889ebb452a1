// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"strings"

	"github.com/kplab/kplab/proxy"
)

// chain is one of the mode's chains. Their names are upstream's.
type chain int

const (
	// portalsContainer and portalsHost lead cluster, external and load balancer
	// addresses to the listeners: for packets that arrive on a link, and for those of
	// the node itself.
	portalsContainer chain = iota
	portalsHost
	// nodePortContainer and nodePortHost do the same for nodePorts.
	nodePortContainer
	nodePortHost
	// nodePortNonLocal accepts in filter what was led to a listener of a nodePort, for
	// nodes that refuse what nobody has allowed.
	nodePortNonLocal
	chains
)

var chainNames = [chains]string{"KUBE-PORTALS-CONTAINER", "KUBE-PORTALS-HOST", "KUBE-NODEPORT-CONTAINER", "KUBE-NODEPORT-HOST", "KUBE-NODEPORT-NON-LOCAL"}

func (c chain) String() string { return chainNames[c] }

// table is where the chain stands.
func (c chain) table() string {
	if c == nodePortNonLocal {
		return "filter"
	}
	return "nat"
}

// tables in the order in which they are written: what accepts before what leads there.
var tables = [...]string{"filter", "nat"}

// chainsOf are the chains in a table.
func chainsOf(table string) []chain {
	var out []chain
	for c := range chains {
		if c.table() == table {
			out = append(out, c)
		}
	}
	return out
}

// isOwnChain says whether this mode owns a chain of that name in that table.
func isOwnChain(table, name string) bool {
	for c := range chains {
		if c.table() == table && c.String() == name {
			return true
		}
	}
	return false
}

// Comments of the jumps, which are upstream's: books quote them.
const (
	portalsNote  = "handle ClusterIPs; NOTE: this must be before the NodePort rules"
	nodePortNote = "handle service NodePorts; NOTE: this must be the last rule in the chain"
	nonLocalNote = "Ensure that non-local NodePort traffic can flow"
)

// Proxy ports: the listeners of Service ports. kube-proxy let the kernel pick any port
// unless --proxy-port-range said otherwise; here the range stands below the nodePorts
// and the ephemeral ports, and a Service port gets the same one again after a restart,
// so that rules that outlived the process are right again.
const (
	firstPort = 20000
	ports     = 10000
)

// preferredPort is where the search for a Service port's proxy port begins.
func preferredPort(id portID) uint16 {
	h := uint32(2166136261) // FNV-1a
	for _, b := range []byte(id.String() + "/" + strings.ToLower(string(id.Protocol)) + "/" + string(id.family)) {
		h = (h ^ uint32(b)) * 16777619
	}
	return uint16(firstPort + h%ports)
}

func idOf(p *proxy.ServicePort) portID { return portID{p.ServicePortName, p.Family} }
