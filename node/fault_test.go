// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

// count sends datagrams to a port of an address and returns how many arrive, until none
// has for a while.
func count(t *testing.T, from, to *netns.NS, addr netip.AddrPort, n int) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	l, err := to.ListenPacket(ctx, "udp4", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	c, err := from.Dial(ctx, "udp4", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	got, buf := 0, make([]byte, 4)
	// In lots that the buffer of a socket holds.
	for sent := 0; sent < n; {
		for range min(100, n-sent) {
			// What the sender's own rules drop, it is told at once.
			if _, err := c.Write([]byte("x")); err != nil && !errors.Is(err, unix.EPERM) {
				t.Fatal(err)
			}
			sent++
		}
		for {
			_ = l.SetReadDeadline(time.Now().Add(150 * time.Millisecond))
			if _, _, err := l.ReadFrom(buf); err != nil {
				break
			}
			got++
			if got == sent {
				break
			}
		}
	}
	return got
}

// TestLinkFaults sends packets over links with each fault, and after it.
func TestLinkFaults(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	rt := newSpaces(t, false)
	f := newFabric(t, rt)
	at := map[string]netip.Addr{"node1": one.IP, "node2": two.IP, "master": master.IP, "outside": outside}
	// reached is how many of n datagrams get from one to another.
	reached := func(from, to string, n int) int {
		return count(t, rt.all[memberOf(from)], rt.all[memberOf(to)], netip.AddrPortFrom(at[to], 5353), n)
	}
	type way struct{ from, to string }
	in, out, other := way{"node2", "node1"}, way{"node1", "node2"}, way{"master", "node1"}
	for _, x := range []struct {
		what         string
		faults       []LinkFault
		open, closed []way
	}{
		{"none", nil, []way{in, out, other}, nil},
		{"drop in", []LinkFault{{Node: "node1", Drop: DropIn}}, []way{out}, []way{in, other}},
		{"drop out", []LinkFault{{Node: "node1", Drop: DropOut}}, []way{in, other}, []way{out}},
		{"drop both", []LinkFault{{Node: "node1", Drop: DropBoth}}, []way{{"master", "node2"}}, []way{in, out, other}},
		{"a partition of two", []LinkFault{{Node: "node1", To: "node2", Drop: DropBoth}}, []way{other}, []way{in, out}},
		{"one way between two", []LinkFault{{Node: "node1", To: "node2", Drop: DropOut}}, []way{other, in}, []way{out}},
		{"down", []LinkFault{{Node: "node1", Down: true}}, []way{{"master", "node2"}}, []way{in, out}},
		{"outside, and another", []LinkFault{{Node: "outside", Drop: DropBoth}, {Node: "node2", Drop: DropIn}}, []way{in, other}, []way{out, {"outside", "node1"}}},
		{"all at once", []LinkFault{{Node: "node1", Loss: 10000}, {Node: "node1", To: "node2", Drop: DropBoth}}, []way{{"master", "node2"}}, []way{in, out, other}},
		{"none again", nil, []way{in, out, other}, nil},
	} {
		if err := f.SetLinkFaults(x.faults); err != nil {
			t.Fatalf("%s: %v", x.what, err)
		}
		for _, w := range x.open {
			if n := reached(w.from, w.to, 3); n != 3 {
				t.Errorf("%s: %d of 3 packets from %s to %s", x.what, n, w.from, w.to)
			}
		}
		for _, w := range x.closed {
			if n := reached(w.from, w.to, 3); n != 0 {
				t.Errorf("%s: %d of 3 packets from %s to %s, want none", x.what, n, w.from, w.to)
			}
		}
	}

	// It asks for addresses once a second while nobody answers.
	nettest.Eventually(t, patience, "the client outside to be heard again", func() error {
		if n := reached("outside", "node1", 3); n != 3 {
			return fmt.Errorf("%d of 3 packets", n)
		}
		return nil
	})

	if err := f.SetLinkFaults([]LinkFault{{Node: "node1", Loss: 3000}}); err != nil {
		t.Fatal(err)
	}
	// 30 % of 2,000 is 600 with a standard deviation of 20.
	const sent = 2000
	for _, w := range []way{in, out} {
		if n := reached(w.from, w.to, sent); n < 1250 || n > 1550 {
			t.Errorf("a loss of 30 %%: %d of %d packets from %s to %s", n, sent, w.from, w.to)
		}
	}
	if err := f.SetLinkFaults(nil); err != nil {
		t.Fatal(err)
	}
	if n := reached("node1", "node2", sent); n != sent {
		t.Errorf("without faults: %d of %d packets", n, sent)
	}
}

// TestLinkDownKeepsRoutes looks at what a node has while its link is down.
func TestLinkDownKeepsRoutes(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	rt := newSpaces(t, false)
	f := newFabric(t, rt)
	routes := func() (n int) {
		t.Helper()
		err := rt.all["node-node1"].Do(func() error {
			all, err := netlink.RouteList(nil, netlink.FAMILY_V4)
			n = len(all)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := routes()
	if err := f.SetLinkFaults([]LinkFault{{Node: "node1", Down: true}}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, patience, "the node to lose its carrier", func() error {
		links, err := f.Links()
		for _, l := range links {
			if l.Node == "node1" && !l.Up && !l.Carrier {
				return err
			}
		}
		return errors.Join(err, fmt.Errorf("links are %+v", links))
	})
	if n := routes(); n != before || n < 4 {
		t.Errorf("%d routes with the link down, %d before", n, before)
	}
}

// TestRate sends a stream each way over a slow link.
func TestRate(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	rt := newSpaces(t, false)
	f := newFabric(t, rt)
	err := f.SetLinkFaults([]LinkFault{{Node: "node1", Rate: 8e6}})
	if errors.Is(err, ErrNoRate) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []struct {
		from, to string
		ip       netip.Addr
	}{{"node-node2", "node-node1", one.IP}, {"node-node1", "node-node2", two.IP}} {
		// 600 kB at 1 MB/s, of which a burst passes at once. How much longer it takes
		// depends on the machine.
		if took := stream(t, rt.all[w.from], rt.all[w.to], w.ip, 600<<10); took < 400*time.Millisecond {
			t.Errorf("600 kB from %s took %s at 8 Mbit/s", w.from, took)
		}
	}
	if err := f.SetLinkFaults(nil); err != nil {
		t.Fatal(err)
	}
	if took := stream(t, rt.all["node-node2"], rt.all["node-node1"], one.IP, 600<<10); took > 400*time.Millisecond {
		t.Errorf("600 kB took %s without a limit", took)
	}
}

// stream sends so many bytes over TCP and returns how long they took.
func stream(t *testing.T, from, to *netns.NS, ip netip.Addr, size int) time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	l, err := to.Listen(ctx, "tcp4", netip.AddrPortFrom(ip, 5354).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	sent := make(chan error, 1)
	go func() {
		c, err := from.Dial(ctx, "tcp4", netip.AddrPortFrom(ip, 5354).String())
		if err == nil {
			_, err = c.Write(make([]byte, size))
			err = errors.Join(err, c.Close())
		}
		sent <- err
	}()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(patience))
	start := time.Now()
	buf, got := make([]byte, 64<<10), 0
	for {
		n, err := c.Read(buf)
		got += n
		if err != nil {
			break
		}
	}
	took := time.Since(start)
	if err := <-sent; err != nil || got != size {
		t.Fatalf("%d of %d bytes, %v", got, size, err)
	}
	return took
}

// TestDelay holds packets up where the kernel can, and says so where it cannot.
func TestDelay(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	rt := newSpaces(t, false)
	f := newFabric(t, rt)
	err := f.SetLinkFaults([]LinkFault{{Node: "node1", Delay: 100 * time.Millisecond, Rate: 1e9}})
	if errors.Is(err, ErrNoDelay) {
		queues := 0
		if err := rt.all[FabricNS].Do(func() error {
			link, err := netlink.LinkByName("node1")
			if err != nil {
				return err
			}
			had, err := faultQueues(link)
			queues = len(had)
			return err
		}); err != nil || queues != 0 {
			t.Errorf("refused, and left %d queues: %v", queues, err)
		}
		nettest.Need(t, "netem")
	}
	if err != nil {
		t.Fatal(err)
	}
	took, _, err := send(t, rt.all["node-node2"], rt.all["node-node1"], one.IP)
	if err != nil || took < 100*time.Millisecond {
		t.Errorf("a packet took %s, %v; want 100 ms", took, err)
	}
}

// TestNodeFaults asks a dead name server and opens more connections than a node takes.
func TestNodeFaults(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	rt := newSpaces(t, false)
	newFabric(t, rt)
	from, to := rt.all["node-node1"], rt.all["node-node2"]
	ask := func(port uint16) int { return count(t, from, to, netip.AddrPortFrom(two.IP, port), 3) }
	set := func(f NodeFault) {
		t.Helper()
		if err := SetNodeFault(from, f); err != nil {
			t.Fatal(err)
		}
	}
	set(NodeFault{DNS: []netip.Addr{two.IP, netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("fd00::10")}})
	if dns, other := ask(53), ask(54); dns != 0 || other != 3 {
		t.Errorf("a dead name server: %d of 3 questions, %d of 3 other packets arrive", dns, other)
	}

	const most = 5
	set(NodeFault{Conns: most})
	if dns := ask(53); dns != 3 {
		t.Errorf("the name server is back: %d of 3 questions arrive", dns)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	l, err := to.Listen(ctx, "tcp4", netip.AddrPortFrom(two.IP, 5355).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	dial := func() (net.Conn, error) {
		short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		return from.Dial(short, "tcp4", l.Addr().String())
	}
	open := 0
	for range most + 3 {
		c, err := dial()
		if err != nil {
			continue
		}
		defer func() { _ = c.Close() }()
		open++
	}
	// The questions from before are connections, too, for as long as they are tracked.
	if open > most || open < most-1 {
		t.Errorf("%d connections with a limit of %d", open, most)
	}
	set(NodeFault{})
	c, err := dial()
	if err != nil {
		t.Fatalf("without a limit: %v", err)
	}
	_ = c.Close()
	if err := from.Do(func() error { return tableGone() }); err != nil {
		t.Error(err)
	}
}

// tableGone looks for the table of faults in the namespace of the thread.
func tableGone() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	tables, err := c.ListTables()
	for _, table := range tables {
		if table.Name == FaultTable {
			return errors.New("the table of faults is still there")
		}
	}
	return err
}
