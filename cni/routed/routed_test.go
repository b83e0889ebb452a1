// SPDX-License-Identifier: Apache-2.0

package routed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/cni/ipam"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// nodeIP is the address of every node here.
const nodeIP = "10.0.0.132"

// node is a namespace with a node IP on its loopback link, and the plugin.
type node struct {
	*Plugin
	ns   *netns.NS
	conf map[string]any
}

func newNode(tb testing.TB, subnet string) *node {
	tb.Helper()
	ns := nettest.NewNS(tb)
	err := ns.Do(func() error {
		for _, s := range []string{"ipv4/ip_forward", "ipv6/conf/all/disable_ipv6"} {
			if err := os.WriteFile("/proc/sys/net/"+s, []byte("1"), 0); err != nil {
				return err
			}
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(nodeIP + "/32")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, addr)
	})
	if err != nil {
		tb.Fatal(err)
	}
	p := New(ns)
	tb.Cleanup(func() {
		if err := p.Close(); err != nil {
			tb.Error(err)
		}
	})
	return &node{Plugin: p, ns: ns, conf: map[string]any{
		"cniVersion": "1.1.0", "name": "pods", "type": Type, "subnet": subnet, "nodeIP": nodeIP,
		"dataDir": filepath.Join(tb.TempDir(), "ipam"), "keepLinks": true,
	}}
}

func (n *node) request(tb testing.TB, command, id string, pod *netns.NS, extra map[string]any) Request {
	tb.Helper()
	conf := map[string]any{}
	for _, m := range []map[string]any{n.conf, extra} {
		for k, v := range m {
			conf[k] = v
		}
	}
	stdin, err := json.Marshal(conf)
	if err != nil {
		tb.Fatal(err)
	}
	path := "/gone"
	if pod != nil {
		path = pod.Path()
	}
	return Request{
		Command: command, ContainerID: id, IfName: "eth0", Netns: path, Stdin: stdin,
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=" + id + ";K8S_POD_UID=x",
	}
}

func (n *node) call(tb testing.TB, command, id string, pod *netns.NS, extra map[string]any) ([]byte, error) {
	tb.Helper()
	return n.Serve(context.Background(), n.request(tb, command, id, pod, extra))
}

func (n *node) add(tb testing.TB, id string, pod *netns.NS) (netip.Addr, []byte) {
	tb.Helper()
	out, err := n.call(tb, "ADD", id, pod, nil)
	if err != nil {
		tb.Fatal(err)
	}
	res, err := types100.NewResult(out)
	if err != nil {
		tb.Fatal(err)
	}
	r, err := types100.GetResult(res)
	if err != nil || len(r.IPs) != 1 || r.CNIVersion != "1.1.0" {
		tb.Fatalf("result %s: %v", out, err)
	}
	ip, _ := netip.AddrFromSlice(r.IPs[0].Address.IP)
	return ip.Unmap(), out
}

// ping sends one UDP datagram from a to addr, which must be in b, and returns how
// long it took to arrive and from where it came.
func ping(tb testing.TB, a, b *netns.NS, addr netip.Addr) (time.Duration, netip.Addr, error) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	l, err := b.ListenPacket(ctx, "udp", netip.AddrPortFrom(addr, 9).String())
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	c, err := a.Dial(ctx, "udp", netip.AddrPortFrom(addr, 9).String())
	if err != nil {
		return 0, netip.Addr{}, err
	}
	defer func() { _ = c.Close() }()
	if err := l.SetReadDeadline(time.Now().Add(3 * time.Second)); err != nil {
		tb.Fatal(err)
	}
	start := time.Now()
	if _, err := c.Write([]byte("x")); err != nil {
		return 0, netip.Addr{}, err
	}
	_, from, err := l.ReadFrom(make([]byte, 8))
	if err != nil {
		return 0, netip.Addr{}, err
	}
	return time.Since(start), netip.MustParseAddrPort(from.String()).Addr(), nil
}

func TestAddCarriesPacketsAtOnce(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	n := newNode(t, "10.244.1.0/24")
	a, b := nettest.NewNS(t), nettest.NewNS(t)
	ipA, _ := n.add(t, "a", a)
	ipB, _ := n.add(t, "b", b)
	if ipA.String() != "10.244.1.2" || ipB.String() != "10.244.1.3" {
		t.Errorf("addresses are %s and %s", ipA, ipB)
	}
	took, from, err := ping(t, a, b, ipB)
	if err != nil || from != ipA {
		t.Fatalf("pod to pod: from %s, %v", from, err)
	}
	t.Logf("first packet after ADD: %s", took)
	// A link whose carrier is not looked at yet costs a second.
	if took > 250*time.Millisecond {
		t.Errorf("the first packet took %s, want under 250 ms", took)
	}
	if _, from, err := ping(t, n.ns, b, ipB); err != nil || from.String() != "10.0.0.132" {
		t.Errorf("node to pod comes from %s (%v), want the node IP", from, err)
	}
	if _, from, err := ping(t, a, n.ns, netip.MustParseAddr("10.0.0.132")); err != nil || from != ipA {
		t.Errorf("pod to node comes from %s (%v), want %s", from, err, ipA)
	}
}

func TestAddIsRepeatableAndHeals(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	n := newNode(t, "10.244.1.0/24")
	pod := nettest.NewNS(t)
	ip, out := n.add(t, "a", pod)
	if _, again := n.add(t, "a", pod); string(again) != string(out) {
		t.Errorf("second ADD says %s, want %s", again, out)
	}
	var prev map[string]any
	if err := json.Unmarshal(out, &prev); err != nil {
		t.Fatal(err)
	}
	check := func() error {
		_, err := n.call(t, "CHECK", "a", pod, map[string]any{"prevResult": prev})
		return err
	}
	if err := check(); err != nil {
		t.Errorf("CHECK after ADD: %v", err)
	}
	breaks := map[string]struct {
		ns   *netns.NS
		do   func() error
		says string
	}{
		"node end down": {n.ns, func() error { return eachLink(LinkName("a", "eth0"), netlink.LinkSetDown) }, "is down"},
		"pod end down":  {pod, func() error { return eachLink("eth0", netlink.LinkSetDown) }, "is down"},
		"no gateway address": {n.ns, func() error {
			return eachLink(LinkName("a", "eth0"), func(l netlink.Link) error {
				addr, err := netlink.ParseAddr("169.254.1.1/32")
				if err != nil {
					return err
				}
				return netlink.AddrDel(l, addr)
			})
		}, "no address 169.254.1.1/32"},
		"no pod route": {n.ns, func() error {
			routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			for _, r := range routes {
				if r.Dst != nil && r.Dst.IP.String() == ip.String() {
					return netlink.RouteDel(&r)
				}
			}
			return errors.New("no route to remove")
		}, "no route"},
	}
	for name, b := range breaks {
		t.Run(name, func(t *testing.T) {
			if err := b.ns.Do(b.do); err != nil {
				t.Fatal(err)
			}
			if err := check(); err == nil || !strings.Contains(err.Error(), b.says) {
				t.Errorf("CHECK says %v, want %q", err, b.says)
			}
			n.add(t, "a", pod)
			if err := check(); err != nil {
				t.Errorf("CHECK after ADD: %v", err)
			}
			if _, from, err := ping(t, n.ns, pod, ip); err != nil || from.String() != "10.0.0.132" {
				t.Errorf("node to pod: from %s, %v", from, err)
			}
		})
	}
}

// A pod has an address of each family, the first of the first range; the kernel may
// use all of them at once.
func TestFamilies(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	const nodeIP6 = "fd00:10::132"
	for name, c := range map[string]struct {
		conf map[string]any
		ips  []string
	}{
		"dual":         {map[string]any{"subnet": "10.244.1.0/24", "secondarySubnet": "fd00:10:244:1::/64", "secondaryNodeIP": nodeIP6}, []string{"10.244.1.2", "fd00:10:244:1::2"}},
		"IPv6 first":   {map[string]any{"subnet": "fd00:10:244:1::/64", "nodeIP": nodeIP6, "secondarySubnet": "10.244.1.0/24", "secondaryNodeIP": nodeIP}, []string{"fd00:10:244:1::2", "10.244.1.2"}},
		"IPv6 only":    {map[string]any{"subnet": "fd00:10:244:1::/64", "nodeIP": nodeIP6}, []string{"fd00:10:244:1::2"}},
		"small second": {map[string]any{"subnet": "10.244.1.0/24", "secondarySubnet": "fd00::8/125", "secondaryNodeIP": nodeIP6}, []string{"10.244.1.2", "fd00::a"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, "10.244.1.0/24")
			for k, v := range c.conf {
				n.conf[k] = v
			}
			if err := n.ns.Do(func() error {
				for _, s := range []string{"all/disable_ipv6", "default/disable_ipv6", "all/forwarding"} {
					if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+s, []byte(map[bool]string{true: "1", false: "0"}[s == "all/forwarding"]), 0); err != nil {
						return err
					}
				}
				return eachLink("lo", func(l netlink.Link) error {
					addr, err := netlink.ParseAddr(nodeIP6 + "/128")
					if err != nil {
						return err
					}
					return netlink.AddrAdd(l, addr)
				})
			}); err != nil {
				t.Fatal(err)
			}
			pods := []*netns.NS{nettest.NewNS(t), nettest.NewNS(t)}
			var all [2][]netip.Addr
			for i, pod := range pods {
				var out []byte
				for range 2 {
					var err error
					if out, err = n.call(t, "ADD", fmt.Sprint("p", i), pod, nil); err != nil {
						t.Fatal(err)
					}
				}
				res, err := types100.NewResult(out)
				if err != nil {
					t.Fatal(err)
				}
				r, err := types100.GetResult(res)
				if err != nil {
					t.Fatal(err)
				}
				for _, ip := range r.IPs {
					a, _ := netip.AddrFromSlice(ip.Address.IP)
					all[i] = append(all[i], a.Unmap())
				}
				var prev map[string]any
				if err := json.Unmarshal(out, &prev); err != nil {
					t.Fatal(err)
				}
				if _, err := n.call(t, "CHECK", fmt.Sprint("p", i), pod, map[string]any{"prevResult": prev}); err != nil {
					t.Errorf("CHECK: %v", err)
				}
			}
			if got := fmt.Sprint(all[0]); got != fmt.Sprint(c.ips) {
				t.Fatalf("the first pod has %v, want %v", got, c.ips)
			}
			for f, ip := range all[1] {
				node := netip.MustParseAddr(nodeIP)
				if ip.Is6() {
					node = netip.MustParseAddr(nodeIP6)
				}
				took, from, err := ping(t, pods[0], pods[1], ip)
				if err != nil || from != all[0][f] {
					t.Errorf("pod to pod %s: from %s, %v", ip, from, err)
				}
				if took > 250*time.Millisecond {
					t.Errorf("the first packet to %s took %s, want under 250 ms", ip, took)
				}
				if _, from, err := ping(t, n.ns, pods[1], ip); err != nil || from != node {
					t.Errorf("node to pod %s comes from %s (%v), want %s", ip, from, err, node)
				}
				if _, from, err := ping(t, pods[1], n.ns, node); err != nil || from != ip {
					t.Errorf("pod to node comes from %s (%v), want %s", from, err, ip)
				}
			}
			if err := pods[0].Do(func() error {
				addrs, err := netlink.AddrList(nil, netlink.FAMILY_V6)
				for _, a := range addrs {
					if a.Flags&unix.IFA_F_TENTATIVE != 0 {
						t.Errorf("%s is tentative", a)
					}
				}
				return err
			}); err != nil {
				t.Fatal(err)
			}
			if name == "small second" { // five addresses: an ADD that fails takes none of the first range
				for i := 2; i < 7; i++ {
					pod := nettest.NewNS(t)
					_, err := n.call(t, "ADD", fmt.Sprint("p", i), pod, nil)
					if (err == nil) != (i < 5) {
						t.Errorf("ADD of pod %d: %v", i, err)
					}
				}
				_, pools, err := n.open(mustConf(t, n))
				if err != nil {
					t.Fatal(err)
				}
				if left, err := pools[0].List(); err != nil || len(left) != 5 {
					t.Errorf("addresses of the first range: %v, %v", left, err)
				}
			}
			for i := range 2 {
				if _, err := n.call(t, "DEL", fmt.Sprint("p", i), pods[i], nil); err != nil {
					t.Error(err)
				}
			}
			if _, _, err := ping(t, n.ns, pods[1], all[1][0]); err == nil {
				t.Error("after DEL the pod is reached")
			}
		})
	}
}

func eachLink(name string, fn func(netlink.Link) error) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return fn(l)
}

func TestDelAfterTheNamespaceIsGone(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	n := newNode(t, "10.244.1.0/29")
	pod := nettest.NewNS(t)
	n.add(t, "a", pod)
	if err := pod.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := n.call(t, "DEL", "a", nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	nettest.Eventually(t, 5*time.Second, "the address to be free", func() error {
		_, pools, err := n.open(mustConf(t, n))
		if err != nil {
			return err
		}
		pool := pools[0]
		if _, _, err := pool.Allocate(ipam.Owner{ID: "z", IfName: "eth0"}); err != nil {
			return err
		}
		if err := pool.Release(ipam.Owner{ID: "z", IfName: "eth0"}, ""); err != nil {
			return err
		}
		all, err := pool.List()
		if err == nil && len(all) != 0 {
			err = fmt.Errorf("reservations are %v", all)
		}
		return err
	})
}

// A pod whose namespace is still held (a socket, a forgotten handle) keeps its
// address from the next pod, and nothing reaches it any more.
func TestDelWhileTheNamespaceLives(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	n := newNode(t, "10.244.1.0/29") // five addresses
	pods := make([]*netns.NS, 5)
	var last netip.Addr
	for i := range pods {
		pods[i] = nettest.NewNS(t)
		last, _ = n.add(t, fmt.Sprint("p", i), pods[i])
	}
	_, err := n.call(t, "ADD", "p9", nettest.NewNS(t), nil)
	var cniErr *types.Error
	if !errors.As(err, &cniErr) || cniErr.Code != types.ErrTryAgainLater || !strings.Contains(err.Error(), "10.244.1.0/29") {
		t.Fatalf("ADD beyond the range: %v", err)
	}
	if _, err := n.call(t, "DEL", "p4", pods[4], nil); err != nil {
		t.Fatal(err)
	}
	if _, _, err := ping(t, n.ns, pods[4], last); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("after DEL the pod is reached: %v", err)
	}
	next := nettest.NewNS(t)
	if _, err := n.call(t, "ADD", "p9", next, nil); err == nil {
		t.Fatal("the address was handed out while the pod's link stands")
	}
	if err := pods[4].Close(); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, 5*time.Second, "ADD with the freed address", func() error {
		_, err := n.call(t, "ADD", "p9", next, nil)
		return err
	})
	if _, from, err := ping(t, n.ns, next, last); err != nil || from.String() != "10.0.0.132" {
		t.Errorf("node to the new pod: from %s, %v", from, err)
	}
	// A new sandbox for an ID whose old link still dies.
	again := nettest.NewNS(t)
	if ip, _ := n.add(t, "p3", again); ip.String() != "10.244.1.5" {
		t.Errorf("the new sandbox got %s, want the owner's 10.244.1.5", ip)
	}
	if _, _, err := ping(t, n.ns, again, netip.MustParseAddr("10.244.1.5")); err != nil {
		t.Errorf("node to the new sandbox: %v", err)
	}
}

func TestGCAndDelRemoveTheLink(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	n := newNode(t, "10.244.1.0/24")
	n.conf["keepLinks"] = false
	for _, id := range []string{"a", "b"} {
		n.add(t, id, nettest.NewNS(t))
	}
	gone := func(id string) error {
		return n.ns.Do(func() error {
			_, err := netlink.LinkByName(LinkName(id, "eth0"))
			var nf netlink.LinkNotFoundError
			if errors.As(err, &nf) {
				return nil
			}
			return errors.Join(fmt.Errorf("the link of %s is there", id), err)
		})
	}
	valid := []types.GCAttachment{{ContainerID: "b", IfName: "eth0"}}
	if _, err := n.call(t, "GC", "", nil, map[string]any{"cni.dev/valid-attachments": valid}); err != nil {
		t.Fatal(err)
	}
	if err := gone("a"); err != nil {
		t.Error(err)
	}
	if gone("b") == nil {
		t.Error("GC removed a valid attachment")
	}
	if _, err := n.call(t, "DEL", "b", nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := gone("b"); err != nil {
		t.Error(err)
	}
}

func TestHostileParentSettings(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	for name, hostile := range map[string]string{"ip_forward": "ip_forward", "default only": "conf/default/forwarding"} {
		t.Run(name, func(t *testing.T) {
			pod := nettest.NewNS(t)
			if err := pod.Do(func() error {
				return os.WriteFile("/proc/sys/net/ipv4/"+hostile, []byte("1"), 0)
			}); err != nil {
				t.Fatal(err)
			}
			newNode(t, "10.244.1.0/24").add(t, "a", pod)
			if err := pod.Do(func() error {
				for _, s := range []string{"ip_forward", "conf/default/forwarding", "conf/eth0/forwarding", "conf/lo/forwarding"} {
					b, err := os.ReadFile("/proc/sys/net/ipv4/" + s)
					if err != nil {
						return err
					}
					if strings.TrimSpace(string(b)) != "0" {
						t.Errorf("%s is %s", s, b)
					}
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestStatusVersionAndBadInput(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	n := newNode(t, "10.244.1.0/24")
	if _, err := n.call(t, "STATUS", "", nil, nil); err != nil {
		t.Errorf("STATUS: %v", err)
	}
	out, err := n.call(t, "VERSION", "", nil, nil)
	if err != nil || !strings.Contains(string(out), "1.1.0") {
		t.Errorf("VERSION says %s, %v", out, err)
	}
	for _, c := range []struct {
		name string
		conf map[string]any
		code uint
	}{
		{"node IP is not there", map[string]any{"nodeIP": "10.0.0.9"}, types.ErrPluginNotAvailable},
		{"future version", map[string]any{"cniVersion": "9.0.0"}, types.ErrIncompatibleCNIVersion},
		{"no subnet", map[string]any{"subnet": ""}, types.ErrInvalidNetworkConfig},
		{"subnet of another family", map[string]any{"subnet": "fd00::/64"}, types.ErrInvalidNetworkConfig},
		{"two subnets of one family", map[string]any{"secondarySubnet": "10.9.0.0/24", "secondaryNodeIP": "10.0.0.132"}, types.ErrInvalidNetworkConfig},
		{"second subnet alone", map[string]any{"secondarySubnet": "fd00::/64"}, types.ErrInvalidNetworkConfig},
		{"second node IP of another family", map[string]any{"secondarySubnet": "fd00::/64", "secondaryNodeIP": "10.0.0.132"}, types.ErrInvalidNetworkConfig},
		{"bad subnet", map[string]any{"subnet": "10.0.0.0"}, types.ErrDecodingFailure},
		{"small MTU", map[string]any{"mtu": 40}, types.ErrInvalidNetworkConfig},
		{"no directory", map[string]any{"dataDir": ""}, types.ErrInvalidNetworkConfig},
	} {
		_, err := n.call(t, "STATUS", "", nil, c.conf)
		var e *types.Error
		if !errors.As(err, &e) || e.Code != c.code {
			t.Errorf("%s: error is %v, want code %d", c.name, err, c.code)
		}
	}
	_, err = n.call(t, "ADD", "a", nil, nil)
	var e *types.Error
	if !errors.As(err, &e) || e.Code != types.ErrInvalidNetNS {
		t.Errorf("ADD without a namespace: %v", err)
	}
}

func mustConf(t *testing.T, n *node) *Conf {
	t.Helper()
	stdin, err := json.Marshal(n.conf)
	if err != nil {
		t.Fatal(err)
	}
	conf, err := parseConf(stdin)
	if err != nil {
		t.Fatal(err)
	}
	return conf
}
