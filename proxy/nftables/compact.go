// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"strconv"

	"github.com/kplab/kplab/proxy"
)

// The compact layout has no chain for a Service. One map holds every endpoint,
// keyed by the address, protocol and port that a packet asks for and by an index;
// a Service's entry leads to a chain that is shared by all Services of the same
// shape, which draws an index below the number of endpoints and looks it up. So
// adding an endpoint is one element and another chain in the Service's entry,
// whatever else is loaded.

// localBase is the index from which a Service's endpoints of Local scope are
// numbered, where it has both scopes.
const localBase = 65536

// shape is what Services have in common that share a chain.
type shape struct {
	// cluster and local count the endpoints of each scope; local is 0 where the
	// scope is not used.
	cluster, local int
	// external entries masquerade, or with localPolicy serve the node's own
	// endpoints and spare pods and the node itself from that.
	external, localPolicy bool
	// nodePort entries answer on any address of the node.
	nodePort bool
}

// name says what the chain does.
func (s shape) name() string {
	var n string
	switch {
	case s.external && s.nodePort:
		n = "nodeport"
	case s.external:
		n = "external"
	case s.nodePort:
		n = "nodeport-balance"
	default:
		n = "balance"
	}
	n += "-" + strconv.Itoa(s.cluster)
	if s.localPolicy {
		n += "-local-" + strconv.Itoa(s.local)
	}
	return n
}

// balancer is the shape of the chain that this one's short circuits go to.
func (s shape) balancer() shape { return shape{cluster: s.cluster, nodePort: s.nodePort} }

// serveCompact writes an entry, its endpoints, and asks for the chain.
func (w *writer) serveCompact(s set, k key, internal bool) {
	p := w.port
	sh := shape{external: !internal, nodePort: s == serviceNodePorts}
	number := func(eps []proxy.Endpoint, base int) {
		at := k
		if !at.addr.IsValid() {
			at.addr = w.anyAddr()
		}
		w.expect(endpoints, len(eps))
		for i := range eps {
			at.index = uint32(base + i)
			w.element(endpoints, element{at, value{to: eps[i].Addr}})
		}
	}
	switch {
	case internal:
		sh.cluster = len(p.InternalEndpoints())
		number(p.InternalEndpoints(), 0)
	default:
		sh.cluster, sh.localPolicy = len(p.Cluster), p.ExternalLocal
		number(p.Cluster, 0)
		if p.ExternalLocal {
			sh.local = len(p.Local)
			number(p.Local, localBase)
		}
	}
	// After a jump a packet that met no endpoint comes back for the rule that
	// catches it; with a local policy that is the chain's own affair, since not to
	// be served is what the policy may want.
	v := value{verdict: verdictJump, chain: sh.name(), comment: w.name}
	if sh.localPolicy {
		v.verdict = verdictGoto
	}
	w.element(s, element{k, v})
	w.out.shapes = append(w.out.shapes, sh)
	if sh.localPolicy && sh.cluster > 0 {
		w.out.shapes = append(w.out.shapes, sh.balancer())
	}
}

// shapeChain is the chain of a shape.
func (s settings) shapeChain(sh shape) chain {
	c := chain{name: sh.name()}
	if !sh.localPolicy {
		if sh.external {
			c.rules = s.external(false, "", "")
		}
		c.rules = append(c.rules, s.draw(sh.cluster, 0, sh.nodePort))
		return c
	}
	cluster := ""
	if sh.cluster > 0 {
		cluster = sh.balancer().name()
	}
	c.rules = s.external(true, cluster, "")
	if sh.local > 0 {
		c.rules = append(c.rules, s.draw(sh.local, localBase, sh.nodePort), s.draw(1, localBase, sh.nodePort))
	}
	return c
}

// draw takes one of n endpoints, counted from base.
func (s settings) draw(n, base int, anyAddress bool) rule {
	return s.rule(dnatIndexed(setEndpoints, n, base, anyAddress))
}

// missed takes the first endpoint. While a transaction takes the last index away,
// a packet may have met the larger number and look its index up when it is gone.
// The rule stands behind the map of entries and not in each chain: the kernel walks
// through a chain once for each entry that leads there, whenever one changes.
func missed(anyAddress bool) statement { return dnatIndexed(setEndpoints, 1, 0, anyAddress) }
