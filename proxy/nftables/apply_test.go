// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"testing"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nfnl"
	"github.com/kplab/kplab/proxy"
)

func apply(tb testing.TB, m *Mode, s *proxy.Snapshot) *Program {
	tb.Helper()
	p, err := m.Render(s)
	if err != nil {
		tb.Fatal(err)
	}
	if err := p.Apply(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	return p.(*Program)
}

func lookIn(tb testing.TB, ns *netns.NS, f family) *kernelTable {
	tb.Helper()
	conn, err := nfnl.Dial(ns)
	if err != nil {
		tb.Fatal(err)
	}
	defer conn.Close()
	k, err := look(conn, f, true)
	if err != nil {
		tb.Fatal(err)
	}
	return k
}
