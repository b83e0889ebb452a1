// SPDX-License-Identifier: Apache-2.0

package routed

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/internal/rawnet"
	"github.com/kplab/kplab/internal/rtnl"
)

// BenchmarkAddRatio wires pods by ADD and by the least that the kernel must be
// told (three calls on open sockets), turn and turn about, in namespaces made
// beforehand. "x-raw" is the ratio of the two by the clock, "cpu-x-raw" by the
// process's CPU time, which other work on the machine disturbs less.
func BenchmarkAddRatio(b *testing.B) {
	nettest.NeedRoot(b)
	// As on a lab: reservations live under the runtime directory, in memory. Before
	// the first b.TempDir, which remembers.
	b.Setenv("TMPDIR", "/dev/shm")
	n := newNode(b, "10.244.0.0/16")
	raw := newNode(b, "10.244.0.0/16")
	rawNode, err := rtnl.DialIn(raw.ns)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = rawNode.Close() }()

	var byAdd, byHand, cpuAdd, cpuHand time.Duration
	ip := netip.MustParseAddr("10.244.0.2")
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		one, two := nettest.NewNS(b), nettest.NewNS(b)
		var podConn *rtnl.Conn
		if podConn, err = rtnl.DialIn(two); err != nil {
			b.Fatal(err)
		}
		r := n.request(b, "ADD", fmt.Sprintf("pod-%d", i), one, nil)
		b.StartTimer()
		start, cpu := time.Now(), cpuTime(b)
		if _, err := n.Serve(b.Context(), r); err != nil {
			b.Fatal(err)
		}
		byAdd += time.Since(start)
		cpuAdd += cpuTime(b) - cpu
		b.StopTimer()
		start, cpu = time.Now(), cpuTime(b)
		if err := rawnet.Wire(rawNode, podConn, two, fmt.Sprintf("v%d", i), ip, netip.MustParseAddr(nodeIP)); err != nil {
			b.Fatal(err)
		}
		byHand += time.Since(start)
		cpuHand += cpuTime(b) - cpu
		ip = ip.Next()
		_ = podConn.Close()
		b.StartTimer()
	}
	b.ReportMetric(float64(byAdd)/float64(byHand), "x-raw")
	b.ReportMetric(float64(cpuAdd)/float64(cpuHand), "cpu-x-raw")
	b.ReportMetric(float64(byHand.Microseconds())/float64(b.N), "raw-µs/op")
}

// cpuTime is what the process has used so far.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
