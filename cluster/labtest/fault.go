// SPDX-License-Identifier: Apache-2.0

package labtest

import (
	"context"

	"github.com/kplab/kplab/cluster"
)

// Break breaks something of the lab, as `kplab fault add` does; it is broken when Break
// returns.
func (l *Lab) Break(f cluster.Fault) {
	l.t.Helper()
	if _, err := l.lab.AddFault(context.Background(), f); err != nil {
		l.t.Fatal(err)
	}
}

// SetLink makes a node's link faulty, as `kplab link set` does.
func (l *Lab) SetLink(node string, with cluster.LinkFaults) {
	l.t.Helper()
	if _, err := l.lab.SetLink(context.Background(), node, with); err != nil {
		l.t.Fatal(err)
	}
}

// OnNode stops, kills, pauses or starts a node, as `kplab node` does.
func (l *Lab) OnNode(name string, action cluster.NodeAction) {
	l.t.Helper()
	if err := l.lab.ActOnNode(context.Background(), name, action); err != nil {
		l.t.Fatal(err)
	}
}

// Mend ends every fault, as `kplab fault clear --all` does; everything is as without
// them when it returns.
func (l *Lab) Mend() {
	l.t.Helper()
	if _, err := l.lab.ClearFaults(context.Background(), true); err != nil {
		l.t.Fatal(err)
	}
}
