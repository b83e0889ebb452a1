// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/ti-mo/conntrack"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/nettest"
)

// TestDeleteMany deletes thousands of entries, some of which are gone already and one of
// which was made anew meanwhile, and no other.
func TestDeleteMany(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	table := kernelConntrack{ns}
	c, err := table.dial()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	flow := func(client string, port int) conntrack.Flow {
		f := conntrack.NewFlow(unix.IPPROTO_UDP, 0, netip.MustParseAddr(client), netip.MustParseAddr("10.96.0.50"), uint16(port), 80, 120, 0)
		f.TupleReply.IP.SourceAddress = netip.MustParseAddr("10.244.1.1")
		return f
	}
	const many = 3000
	for i := range many {
		if err := c.Create(flow("10.244.1.9", 1000+i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Create(flow("10.244.1.10", 1000)); err != nil {
		t.Fatal(err)
	}
	all, err := table.UDPFlows(t.Context(), corev1.IPv4Protocol)
	if err != nil || len(all) != many+1 {
		t.Fatalf("%d entries, %v", len(all), err)
	}
	var stale []UDPFlow
	for _, f := range all {
		if f.Src.Addr() == netip.MustParseAddr("10.244.1.9") {
			stale = append(stale, f)
		}
	}
	for _, f := range stale[:20] {
		if err := c.Delete(flow("10.244.1.9", int(f.Src.Port()))); err != nil {
			t.Fatal(err)
		}
	}
	anew := flow("10.244.1.9", int(stale[0].Src.Port()))
	if err := c.Create(anew); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if err := table.Delete(t.Context(), stale); err != nil {
		t.Error(err)
	}
	t.Logf("%d entries in %s", len(stale), time.Since(start))
	left, err := table.UDPFlows(t.Context(), corev1.IPv4Protocol)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, f := range left {
		got[f.Src.String()] = true
	}
	if len(left) != 2 || !got["10.244.1.10:1000"] || !got[fmt.Sprintf("10.244.1.9:%d", stale[0].Src.Port())] {
		t.Errorf("left are %v", left)
	}
	if err := table.Delete(t.Context(), stale[:1]); err != nil {
		t.Errorf("what is gone: %v", err)
	}
}
