// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"

	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/node/netpolicy"
)

// startPolicies makes what enforces NetworkPolicies on each node.
func (l *Lab) startPolicies(context.Context) (string, error) {
	for _, n := range l.cfg.Nodes {
		ns, err := l.runtime.NetNS(node.NSName(n.Name))
		if err != nil {
			return "", err
		}
		e, err := netpolicy.New(netpolicy.Config{NodeName: n.Name, NS: ns, Informers: l.informers, Log: l.log.With("part", "netpolicy")})
		if err != nil {
			return "", err
		}
		l.witnesses = append(l.witnesses, e.Witness())
		l.loops.run("network policies of node "+n.Name, e.Run)
	}
	return fmt.Sprintf("enforced on %d nodes", len(l.cfg.Nodes)), nil
}
