// SPDX-License-Identifier: Apache-2.0

// Package nettest is for tests that touch the kernel's network: a namespace
// without a way out to run in, waiting on conditions, probes for what the kernel
// can do, and a check that a test leaves nothing behind.
//
//	func TestMain(m *testing.M) { nettest.Main(m) }
//
//	func TestLink(t *testing.T) {
//		nettest.NeedRoot(t)
//		nettest.LeakCheck(t)
//		a, b := nettest.NewNS(t), nettest.NewNS(t)
//		…
//	}
package nettest

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/kplab/kplab/internal/netns"
)

// pollInterval is the pause between two looks at a condition.
const pollInterval = 5 * time.Millisecond

// Eventually calls cond until it returns nil, and ends the test when that has
// not happened within timeout, with what was awaited and the last error.
func Eventually(tb testing.TB, timeout time.Duration, what string, cond func() error) {
	tb.Helper()
	if err := await(timeout, cond); err != nil {
		tb.Fatalf("%s: not within %v: %v", what, timeout, err)
	}
}

// Until is [Eventually] for a condition that has no more to say than yes or no.
func Until(tb testing.TB, timeout time.Duration, what string, cond func() bool) {
	tb.Helper()
	Eventually(tb, timeout, what, func() error {
		if !cond() {
			return errors.New("not so yet")
		}
		return nil
	})
}

// await calls cond until it returns nil or timeout is over, at least once and
// also once at the very end.
func await(timeout time.Duration, cond func() error) error {
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if cond() == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			return cond()
		}
	}
}

// NeedRoot skips the test unless it runs as root, of the machine or of a user
// namespace. With "root" in KPLAB_REQUIRE the test fails instead. Under -short it
// skips always: that is for tests which need no privilege.
func NeedRoot(tb testing.TB) {
	tb.Helper()
	if testing.Short() {
		tb.Skip("it works in network namespaces, and -short asks for the tests that need none")
	}
	Need(tb, "root")
}

// NewNS returns a new network namespace with lo up, closed when the test ends.
func NewNS(tb testing.TB) *netns.NS {
	tb.Helper()
	ns, err := netns.New()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := ns.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			tb.Error(err)
		}
	})
	if err := ns.Do(loUp); err != nil {
		tb.Fatal(err)
	}
	return ns
}

// loUp sets the loopback link of the current namespace up.
func loUp() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// End is one end of a [Veth].
type End struct {
	// NS is where the link lives.
	NS *netns.NS
	// Name is the link's name.
	Name string
	// Addrs are put on the link, each with its prefix length, without duplicate
	// address detection.
	Addrs []netip.Prefix
}

// Veth joins two namespaces by a pair of links, up and with their addresses.
// The links go with their namespaces.
func Veth(tb testing.TB, a, b End) {
	tb.Helper()
	err := a.NS.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = a.Name
		// One queue each: more make the kernel wait for all CPUs at every link.
		attrs.NumTxQueues, attrs.NumRxQueues = 1, 1
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: attrs, PeerName: b.Name, PeerNamespace: netlink.NsFd(b.NS.Fd()),
			PeerNumTxQueues: 1, PeerNumRxQueues: 1,
		})
	})
	if err != nil {
		tb.Fatalf("add veth %s-%s: %v", a.Name, b.Name, err)
	}
	for _, e := range []End{a, b} {
		if err := e.NS.Do(e.setUp); err != nil {
			tb.Fatalf("set up %s: %v", e.Name, err)
		}
	}
	for _, e := range []End{a, b} {
		// Asking for the link makes the kernel look at the carrier now and not at
		// the end of the second.
		if err := e.NS.Do(func() error { _, err := netlink.LinkByName(e.Name); return err }); err != nil {
			tb.Fatalf("read %s: %v", e.Name, err)
		}
	}
}

// setUp gives the link its addresses and sets it up.
func (e End) setUp() error {
	link, err := netlink.LinkByName(e.Name)
	if err != nil {
		return err
	}
	for _, p := range e.Addrs {
		addr, err := netlink.ParseAddr(p.String())
		if err != nil {
			return err
		}
		if p.Addr().Is6() {
			addr.Flags = ifaFlagNoDAD
		}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("add %s: %w", p, err)
		}
	}
	return netlink.LinkSetUp(link)
}

// ifaFlagNoDAD is IFA_F_NODAD: an IPv6 address is usable at once.
const ifaFlagNoDAD = 0x02
