// SPDX-License-Identifier: Apache-2.0

package routed

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
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
		rawWire(b, rawNode, podConn, two, fmt.Sprintf("v%d", i), ip)
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

func rawWire(b *testing.B, node, pod *rtnl.Conn, ns *netns.NS, name string, ip netip.Addr) {
	b.Helper()
	var host, l rtnl.Link
	gw := netip.PrefixFrom(Gateway(), 32)
	if err := node.Do(new(rtnl.Batch).AddVeth(rtnl.Veth{
		Name: name, MAC: MAC(Gateway()), Up: true, Peer: rtnl.VethPeer{Name: "eth0", MAC: MAC(ip), NSFd: ns.Fd()},
	}).GetLink(name, &host)); err != nil {
		b.Fatal(err)
	}
	if err := pod.Do(new(rtnl.Batch).SetUp(1).SetUp(host.Peer).
		AddAddr(host.Peer, netip.PrefixFrom(ip, 32), unix.RT_SCOPE_UNIVERSE).
		ReplaceNeigh(host.Peer, Gateway(), MAC(Gateway())).
		ReplaceRoute(rtnl.Route{Dst: gw, Link: host.Peer}).
		ReplaceRoute(rtnl.Route{Dst: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Via: Gateway(), Link: host.Peer}).
		GetLinkAt(host.Peer, &l)); err != nil {
		b.Fatal(err)
	}
	if err := node.Do(new(rtnl.Batch).
		AddAddr(host.Index, gw, unix.RT_SCOPE_LINK).
		ReplaceNeigh(host.Index, ip, MAC(ip)).
		ReplaceRoute(rtnl.Route{Dst: netip.PrefixFrom(ip, 32), Link: host.Index, Src: netip.MustParseAddr("10.0.0.132")}).
		GetLinkAt(host.Index, &l)); err != nil {
		b.Fatal(err)
	}
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
