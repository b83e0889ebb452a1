// SPDX-License-Identifier: Apache-2.0

package netpolicy

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/internal/nfnl"
)

func dial(t *testing.T, ns *netns.NS) *nfnl.Conn {
	t.Helper()
	conn, err := nfnl.Dial(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	return conn
}

// nft lists the ruleset of a namespace as a person would.
func nft(t *testing.T, ns *netns.NS, args ...string) string {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.Command("nft", args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := ns.Start(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("nft %v: %v\n%s", args, err, out.String())
	}
	return out.String()
}

// TestWriteReadsBack goes through random programs one after another, each written as
// the difference from the one before.
func TestWriteReadsBack(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	conn, r := dial(t, ns), rand.New(rand.NewPCG(3, 4))
	var have *Program
	for round := range 150 {
		want := Decide(random(r), "n1", false)
		if err := write(conn, have, want); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		now, err := look(conn, false)
		if err != nil {
			t.Fatal(err)
		}
		if diff := differs(now, wanted(want)); diff != "" {
			t.Fatalf("round %d: %s\n%s", round, diff, nft(t, ns, "list", "ruleset"))
		}
		have = want
	}
	nft(t, ns, "list", "ruleset")
}

// TestChangesAreSeen: whatever somebody does to the table, it is another.
func TestChangesAreSeen(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	nettest.Need(t, "nft")
	ns := nettest.NewNS(t)
	conn := dial(t, ns)
	o := Objects{
		Pods:       []*corev1.Pod{pod("a", "web", "n1", "10.244.1.2", "web", 80), pod("a", "db", "n1", "10.244.1.3", "db", 80)},
		Namespaces: []*corev1.Namespace{namespace("a")},
		Policies: []*networkingv1.NetworkPolicy{policy("p", app("db"), []networkingv1.NetworkPolicyIngressRule{{
			From: []networkingv1.NetworkPolicyPeer{{PodSelector: app("web")}}, Ports: []networkingv1.NetworkPolicyPort{port(80, "", 90)},
		}}, nil)},
	}
	want := Decide(o, "n1", false)
	for _, args := range []string{
		"delete table ip kplab-netpol", "flush chain ip kplab-netpol forward", "add rule ip kplab-netpol forward accept",
		"insert rule ip kplab-netpol forward accept", "add chain ip kplab-netpol x", "delete element ip kplab-netpol pods-ingress { 10.244.1.3 }",
		"add element ip kplab-netpol self { 10.244.1.9 . 10.244.1.9 }", "add set ip kplab-netpol x { type ipv4_addr; }",
	} {
		if err := write(conn, nil, want); err != nil {
			t.Fatal(err)
		}
		text := nft(t, ns, "list", "table", "ip", "kplab-netpol")
		for _, part := range []string{"ct state established,related accept", "tcp dport 80-90 return comment \"a/p\"", "drop comment \"isolated by a/p\"", "10.244.1.3 : jump ingress-"} {
			if !strings.Contains(text, part) {
				t.Errorf("no %q in:\n%s", part, text)
			}
		}
		nft(t, ns, strings.Fields(args)...)
		now, err := look(conn, false)
		if err != nil {
			t.Fatal(err)
		}
		if differs(now, wanted(want)) == "" {
			t.Errorf("nft %s is not seen", args)
		}
	}
}

// world is a node with three pods behind it.
type world struct {
	t    *testing.T
	node *netns.NS
	pods map[string]*netns.NS // by address
}

func newWorld(t *testing.T, addrs ...string) *world {
	t.Helper()
	w := &world{t: t, node: nettest.NewNS(t), pods: map[string]*netns.NS{}}
	for i, a := range addrs {
		ip := netip.MustParseAddr(a)
		gw := netip.MustParsePrefix(strings.TrimSuffix(a, ip.String()[strings.LastIndexAny(ip.String(), ".:")+1:]) + "1/24")
		if ip.Is6() {
			gw = netip.PrefixFrom(gw.Addr(), 64)
		}
		w.pods[a] = nettest.NewNS(t)
		nettest.Veth(t,
			nettest.End{NS: w.node, Name: "veth" + string(rune('a'+i)), Addrs: []netip.Prefix{gw}},
			nettest.End{NS: w.pods[a], Name: "eth0", Addrs: []netip.Prefix{netip.PrefixFrom(ip, gw.Bits())}})
		if err := w.pods[a].Do(func() error {
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gw.Addr().AsSlice()})
		}); err != nil {
			t.Fatal(err)
		}
	}
	nft(t, w.node, "list", "tables")
	for _, key := range []string{"net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"} {
		cmd := exec.Command("sysctl", "-qw", key)
		if err := w.node.Start(cmd); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// reaches connects, and says whether that went through.
func (w *world) reaches(from *netns.NS, to, port string, patience time.Duration) bool {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	c, err := from.Dial(ctx, "tcp", net.JoinHostPort(to, port))
	if err == nil {
		_ = c.Close()
	}
	return err == nil
}

// TestPackets sends packets through the rules, of both families.
func TestPackets(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "nft")
	for _, tc := range []struct {
		name         string
		v6           bool
		web, db, far string
		block        string
	}{
		{"IPv4", false, "10.244.1.2", "10.244.2.2", "10.244.3.2", "10.244.3.0/24"},
		{"IPv6", true, "fd00:1::2", "fd00:2::2", "fd00:3::2", "fd00:3::/64"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			nettest.LeakCheck(t)
			w := newWorld(t, tc.web, tc.db, tc.far)
			for _, ns := range w.pods {
				for _, port := range []string{"80", "81"} {
					ln, err := ns.Listen(t.Context(), "tcp", ":"+port)
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { _ = ln.Close() })
				}
			}
			conn := dial(t, w.node)
			o := Objects{Namespaces: []*corev1.Namespace{namespace("a"), namespace("b")}, Pods: []*corev1.Pod{
				pod("a", "web", "n1", tc.web, "web", 80), pod("a", "db", "n1", tc.db, "db", 80), pod("b", "far", "n1", tc.far, "far", 80),
			}}
			var have *Program
			enforce := func(policies ...*networkingv1.NetworkPolicy) {
				t.Helper()
				o.Policies = policies
				want := Decide(o, "n1", tc.v6)
				if err := write(conn, have, want); err != nil {
					t.Fatal(err)
				}
				now, err := look(conn, tc.v6)
				if err != nil {
					t.Fatal(err)
				}
				if diff := differs(now, wanted(want)); diff != "" {
					t.Fatal(errors.New(diff))
				}
				have = want
			}
			expect := func(what string, from, to, port string, want bool) {
				t.Helper()
				ns := w.pods[from]
				if from == "node" {
					ns = w.node
				}
				patience := 500 * time.Millisecond
				if want {
					patience = 20 * time.Second // a slow machine is no policy
				}
				if got := w.reaches(ns, to, port, patience); got != want {
					t.Errorf("%s: %s to %s port %s connects: %v, want %v\n%s", what, from, to, port, got, want, nft(t, w.node, "list", "ruleset"))
				}
			}
			nettest.Until(t, 30*time.Second, "addresses are no longer tentative", func() bool {
				return w.reaches(w.pods[tc.web], tc.db, "80", time.Second) && w.reaches(w.pods[tc.far], tc.db, "80", time.Second) &&
					w.reaches(w.pods[tc.web], tc.far, "80", time.Second) && w.reaches(w.node, tc.db, "80", time.Second)
			})
			open, err := w.pods[tc.far].Dial(t.Context(), "tcp", net.JoinHostPort(tc.db, "80"))
			if err != nil {
				t.Fatal(err)
			}
			defer open.Close()

			deny := policy("deny", everything(), nil, nil, "Ingress")
			enforce(deny)
			expect("default deny", tc.web, tc.db, "80", false)
			expect("not selected", tc.web, tc.far, "80", true)
			expect("the node's own traffic", "node", tc.db, "80", true)
			expect("a pod to itself", tc.db, tc.db, "80", true)
			if _, err := open.Write([]byte("x")); err != nil {
				t.Error(err)
			}

			web := policy("web", app("db"), []networkingv1.NetworkPolicyIngressRule{{
				From: []networkingv1.NetworkPolicyPeer{{PodSelector: app("web")}}, Ports: []networkingv1.NetworkPolicyPort{port("http", "", 0)},
			}}, nil)
			enforce(deny, web)
			expect("allowed peer and named port", tc.web, tc.db, "80", true)
			expect("another port", tc.web, tc.db, "81", false)
			expect("another peer", tc.far, tc.db, "80", false)

			block := policy("block", app("db"), []networkingv1.NetworkPolicyIngressRule{{
				From: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: tc.block}}}, Ports: []networkingv1.NetworkPolicyPort{port(81, "", 90)},
			}}, nil)
			enforce(deny, web, block)
			expect("a block and a range", tc.far, tc.db, "81", true)
			expect("a block, port out of the range", tc.far, tc.db, "80", false)
			block.Spec.Ingress[0].From[0].IPBlock.Except = []string{tc.far + map[bool]string{false: "/32", true: "/128"}[tc.v6]}
			enforce(deny, web, block)
			expect("the exception of a block", tc.far, tc.db, "81", false)

			out := policy("out", app("db"), nil, []networkingv1.NetworkPolicyEgressRule{{To: []networkingv1.NetworkPolicyPeer{{PodSelector: app("web")}}}}, "Egress")
			enforce(out)
			expect("egress to what is allowed", tc.db, tc.web, "80", true)
			expect("egress to others", tc.db, tc.far, "80", false)
			expect("egress of others", tc.web, tc.far, "80", true)
			enforce(out, policy("in", app("web"), nil, nil))
			expect("out is allowed and in is not", tc.db, tc.web, "80", false)

			enforce()
			expect("all policies gone", tc.db, tc.web, "80", true)
			if text := nft(t, w.node, "list", "tables"); strings.Contains(text, table) {
				t.Errorf("a table is left:\n%s", text)
			}
		})
	}
}
