// SPDX-License-Identifier: Apache-2.0

package nettest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

func TestMainGivesAnEmptyNamespace(t *testing.T) {
	nettest.NeedRoot(t)
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if l.Attrs().Name == "lo" && l.Attrs().Flags&net.FlagUp == 0 {
			t.Error("lo is down")
		}
		if l.Type() == "veth" || l.Type() == "device" && l.Attrs().Name != "lo" {
			t.Errorf("link %s (%s) leads out", l.Attrs().Name, l.Type())
		}
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil || len(routes) != 0 {
		t.Errorf("routes %v, %v", routes, err)
	}
}

// probe is a testing.TB that keeps what LeakCheck says.
type probe struct {
	testing.TB
	cleanups []func()
	said     string
}

func (p *probe) Helper()                        {}
func (p *probe) Cleanup(f func())               { p.cleanups = append(p.cleanups, f) }
func (p *probe) Errorf(format string, a ...any) { p.said += fmt.Sprintf(format, a...) }

func (p *probe) end() string {
	for i := len(p.cleanups) - 1; i >= 0; i-- {
		p.cleanups[i]()
	}
	return p.said
}

func TestLeakCheckFinds(t *testing.T) {
	nettest.NeedRoot(t)
	for _, tc := range []struct {
		name, want string
		leak       func(t *testing.T) (undo func())
	}{
		{"namespace held by a file", "network namespace net:[", func(t *testing.T) func() {
			t.Helper()
			ns, err := netns.New()
			if err != nil {
				t.Fatal(err)
			}
			return func() { _ = ns.Close() }
		}},
		{"namespace held by a socket", "network namespace net:[", func(t *testing.T) func() {
			t.Helper()
			ns, err := netns.New()
			if err != nil {
				t.Fatal(err)
			}
			l, err := ns.ListenPacket(t.Context(), "udp", ":0")
			if err := errors.Join(err, ns.Close()); err != nil {
				t.Fatal(err)
			}
			return func() { _ = l.Close() }
		}},
		{"mount", "kernel mount", func(t *testing.T) func() {
			t.Helper()
			dir := t.TempDir()
			if err := unix.Mount("leak", dir, "tmpfs", 0, ""); err != nil {
				t.Fatal(err)
			}
			return func() { _ = unix.Unmount(dir, 0) }
		}},
		{"process", "sleep 60", func(t *testing.T) func() {
			t.Helper()
			cmd := exec.CommandContext(t.Context(), "sleep", "60")
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			return func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
		}},
		{"orphan", "sleep 61", func(t *testing.T) func() {
			t.Helper()
			ctx, cancel := context.WithCancel(t.Context())
			cmd := exec.CommandContext(ctx, "sh", "-c", "setsid sleep 61 >/dev/null 2>&1 & echo $!")
			out, err := cmd.Output()
			if err != nil {
				t.Fatal(err)
			}
			var pid int
			if _, err := fmt.Sscan(string(out), &pid); err != nil {
				t.Fatal(err)
			}
			return func() { cancel(); _ = unix.Kill(pid, unix.SIGKILL) }
		}},
		{"link and route", "kernel route", func(t *testing.T) func() {
			t.Helper()
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "leak"
			br := &netlink.Bridge{LinkAttrs: attrs}
			if err := netlink.LinkAdd(br); err != nil {
				t.Fatal(err)
			}
			addr, err := netlink.ParseAddr("10.99.0.1/24")
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(netlink.AddrAdd(br, addr), netlink.LinkSetUp(br)); err != nil {
				t.Fatal(err)
			}
			return func() { _ = netlink.LinkDel(br) }
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			nettest.LeakCheck(t)
			p := &probe{TB: t}
			nettest.LeakCheckWithin(p, 100*time.Millisecond)
			undo := tc.leak(t)
			said := p.end()
			undo()
			if !strings.Contains(said, tc.want) {
				t.Errorf("LeakCheck said %q, want %q in it", said, tc.want)
			}
		})
	}
}

func TestVethCarriesPackets(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	a, b := nettest.NewNS(t), nettest.NewNS(t)
	nettest.Veth(t,
		nettest.End{NS: a, Name: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.9.0.1/24"), netip.MustParsePrefix("fd00:9::1/64")}},
		nettest.End{NS: b, Name: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.9.0.2/24"), netip.MustParsePrefix("fd00:9::2/64")}})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	for _, addr := range []string{"10.9.0.2:7000", "[fd00:9::2]:7000"} {
		l, err := b.Listen(ctx, "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		c, err := a.Dial(ctx, "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		limit := 500 * time.Millisecond
		if addr[0] == '[' {
			// A first neighbour solicitation may come before the other end has joined its
			// group; the kernel sends the next one after a second.
			limit = 3 * time.Second
		}
		if d := time.Since(begin); d > limit {
			t.Errorf("first connection to %s took %v: the carrier was not looked at", addr, d)
		}
		if err := errors.Join(c.Close(), l.Close()); err != nil {
			t.Error(err)
		}
	}
}

func TestNeedKnowsItsProbes(t *testing.T) {
	for _, f := range []string{"root", "users", "iptables", "iptables-legacy", "nft", "ipvs", "dummy", "netem", "sctp", "ipv6", "bridge", "vxlan", "nfacct", "br-netfilter", "ping", "busybox"} {
		t.Run(f, func(t *testing.T) {
			nettest.LeakCheck(t)
			nettest.Need(t, f)
		})
	}
}

func TestEventuallyReportsTheLastError(t *testing.T) {
	n := 0
	nettest.Eventually(t, time.Second, "third time", func() error {
		if n++; n < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	if n != 3 {
		t.Errorf("called %d times", n)
	}
}
