// SPDX-License-Identifier: Apache-2.0

package rtnl

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

func dial(t *testing.T, ns *netns.NS) *Conn {
	t.Helper()
	c, err := DialIn(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func TestWiringReadsBack(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	node, pod := nettest.NewNS(t), nettest.NewNS(t)
	nc, pc := dial(t, node), dial(t, pod)
	hostMAC, podMAC := net.HardwareAddr{2, 0, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 2}
	gw, ip := netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("10.244.1.2")

	var br, host, eth Link
	err := nc.Do(new(Batch).
		AddBridge("br0", 40, 1400, nil).
		GetLink("br0", &br).
		AddVeth(Veth{Name: "vethx", MTU: 1400, MAC: hostMAC, Up: true, Peer: VethPeer{Name: "eth0", MTU: 1400, MAC: podMAC, NSFd: pod.Fd()}}).
		GetLink("vethx", &host))
	if err != nil {
		t.Fatal(err)
	}
	if br.Index != 40 || br.Kind != "bridge" || br.MTU != 1400 || !br.Up {
		t.Errorf("bridge is %+v", br)
	}
	err = pc.Do(new(Batch).SetUp(host.Peer).
		AddAddr(host.Peer, netip.PrefixFrom(ip, 32), unix.RT_SCOPE_UNIVERSE).
		ReplaceNeigh(host.Peer, gw, hostMAC).
		ReplaceRoute(Route{Dst: netip.PrefixFrom(gw, 32), Link: host.Peer}).
		ReplaceRoute(Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Link: host.Peer, Via: gw}).
		GetLinkAt(host.Peer, &eth))
	if err != nil {
		t.Fatal(err)
	}
	if eth.Name != "eth0" || eth.Peer != host.Index || eth.MAC.String() != podMAC.String() || eth.Oper != 6 {
		t.Errorf("pod end is %+v", eth)
	}
	for range 2 { // all of it may be done again
		err = nc.Do(new(Batch).AddAddr(host.Index, netip.PrefixFrom(gw, 32), unix.RT_SCOPE_LINK).
			ReplaceNeigh(host.Index, ip, podMAC).
			ReplaceRoute(Route{Dst: netip.PrefixFrom(ip, 32), Link: host.Index, Protocol: 107}).
			SetLink(host.Index, "default/web", 0, 0).
			GetLinkAt(host.Index, &host))
		if err != nil {
			t.Fatal(err)
		}
	}
	if host.Alias != "default/web" || host.Oper != 6 {
		t.Errorf("host end is %+v", host)
	}
	if err := node.Do(func() error {
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{LinkIndex: host.Index}, netlink.RT_FILTER_OIF)
		if err != nil || len(routes) != 1 || routes[0].Dst.String() != "10.244.1.2/32" || routes[0].Protocol != 107 {
			t.Errorf("routes are %v, %v", routes, err)
		}
		l, err := netlink.LinkByName("vethx")
		if err != nil {
			return err
		}
		if a := l.Attrs(); a.NumTxQueues != 1 || a.NumRxQueues != 1 {
			t.Errorf("veth has %d and %d queues, want 1 and 1", a.NumTxQueues, a.NumRxQueues)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := nc.Do(new(Batch).DelRoute(Route{Dst: netip.PrefixFrom(ip, 32), Link: host.Index}).DelNeigh(host.Index, ip)); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Do(new(Batch).DelLink(host.Index)); err != nil {
		t.Fatal(err)
	}
}

func TestForwardingIsRead(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	c := dial(t, ns)
	for _, value := range []string{"1", "0"} {
		if err := ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte(value), 0) }); err != nil {
			t.Fatal(err)
		}
		var all, byDefault, lo bool
		if err := c.Do(new(Batch).GetForwarding(AllLinks, &all).GetForwarding(DefaultLinks, &byDefault).GetForwarding(1, &lo)); err != nil {
			t.Fatal(err)
		}
		if want := value == "1"; all != want || byDefault != want || lo != want {
			t.Errorf("ip_forward is %s, read %v %v %v", value, all, byDefault, lo)
		}
	}
}

func TestFailuresAreNamedAndTheRestIsDone(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	c := dial(t, ns)
	var lo Link
	err := c.Do(new(Batch).
		ReplaceRoute(Route{Dst: netip.MustParsePrefix("10.1.0.0/16"), Via: netip.MustParseAddr("10.9.9.9")}).
		GetLink("nope", &Link{}).Tolerate(unix.ENODEV).
		GetLink("lo", &lo))
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"add route to 10.1.0.0/16", "unreachable"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not say %q", err, want)
		}
	}
	if !errors.Is(err, unix.ENETUNREACH) || lo.Name != "lo" {
		t.Errorf("error %v, lo %+v", err, lo)
	}
	var e *Error
	if !errors.As(err, &e) || e.Detail == "" {
		t.Errorf("the kernel's explanation is missing: %+v", e)
	}
}
