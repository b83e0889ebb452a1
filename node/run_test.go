// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/kplab/kplab/cni/routed"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox"
)

const patience = 20 * time.Second

// lab is two nodes and outside, with a fake API.
type lab struct {
	t       *testing.T
	runtime *sandbox.Runtime
	client  *fake.Clientset
	nodes   map[string]*Node
	full    atomic.Bool // the API registers no node
}

func newLab(t *testing.T) *lab {
	t.Helper()
	return newLabOf(t, "IPv4")
}

// newLabOf is newLab with a choice of [families].
func newLabOf(t *testing.T, choice string) *lab {
	t.Helper()
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	dir := t.TempDir()
	l := &lab{t: t, client: fake.NewClientset(), nodes: map[string]*Node{}}
	// Before anybody asks: the fake's list of reactors has no lock for the one who adds.
	l.client.PrependReactor("create", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		return l.full.Load(), nil, errors.New("the disk is full")
	})
	ctx, cancel := context.WithCancel(context.Background())
	var ends []chan error
	t.Cleanup(func() {
		cancel()
		for _, end := range ends {
			if err := <-end; err != nil {
				t.Error(err)
			}
		}
		if err := l.runtime.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
	})
	var err error
	if l.runtime, err = sandbox.Open(sandbox.Config{Dir: filepath.Join(dir, "run")}); err != nil {
		t.Fatal(err)
	}
	net := families(l.runtime)[choice]
	fabric := newFabricOf(t, net)
	factory := informers.NewSharedInformerFactory(l.client, 0)
	for _, p := range net.Nodes[1:] {
		n, err := New(Config{
			Name: p.Name, IP: netip.PrefixFrom(p.IP, net.Subnet.Bits()), PodCIDR: p.PodCIDR,
			SecondaryIP: netip.PrefixFrom(p.SecondaryIP, net.SecondarySubnet.Bits()), SecondaryPodCIDR: p.SecondaryPodCIDR,
			Client: l.client, Informers: factory, Fabric: fabric, Runtime: l.runtime,
			StateDir: filepath.Join(dir, "state", p.Name), RuntimeDir: filepath.Join(dir, "run", "nodes", p.Name),
			Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		l.nodes[p.Name] = n
	}
	factory.StartWithContext(ctx)
	for _, n := range l.nodes {
		end := make(chan error, 1)
		ends = append(ends, end)
		go func() { end <- n.Run(ctx) }()
	}
	return l
}

// pod makes a pod and returns its address and namespace once it is ready.
func (l *lab) pod(name, node string) (netip.Addr, *netns.NS) {
	l.t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-" + name)},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "pause"}}},
	}
	if _, err := l.client.CoreV1().Pods("default").Create(context.Background(), p, metav1.CreateOptions{}); err != nil {
		l.t.Fatal(err)
	}
	var ip netip.Addr
	nettest.Eventually(l.t, patience, "pod "+name+" to be ready", func() error {
		p, err := l.client.CoreV1().Pods("default").Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if p.Status.Phase != corev1.PodRunning {
			return fmt.Errorf("status is %+v", p.Status)
		}
		ip, err = netip.ParseAddr(p.Status.PodIP)
		return err
	})
	return ip, l.runtime.Get("uid-" + name).NetNS()
}

func (l *lab) outside() *netns.NS {
	l.t.Helper()
	ns, err := l.runtime.NetNS(OutsideNS)
	if err != nil {
		l.t.Fatal(err)
	}
	return ns
}

func TestPodsReachEachOther(t *testing.T) {
	l := newLab(t)
	ipA, a := l.pod("a", "node1")
	ipB, b := l.pod("b", "node2")
	_, c := l.pod("c", "node1")
	node1, node2 := l.nodes["node1"].NS(), l.nodes["node2"].NS()

	took, from, err := send(t, a, b, ipB)
	if err != nil || from != ipA {
		t.Fatalf("across nodes: from %s, %v; want %s", from, err, ipA)
	}
	t.Logf("first packet between pods of two nodes: %s", took)
	// A link whose carrier is not looked at yet costs a second.
	if took > 800*time.Millisecond {
		t.Errorf("the first packet took %s, want under 800 ms", took)
	}
	for _, x := range []struct {
		name     string
		from, to *netns.NS
		addr     netip.Addr
		want     netip.Addr
	}{
		{"on one node", c, a, ipA, netip.MustParseAddr("10.244.1.3")},
		{"node to its own pod", node1, a, ipA, one.IP},
		{"node to a pod elsewhere", node1, b, ipB, one.IP},
		{"pod to its node", a, node1, one.IP, ipA},
		{"pod to another node", a, node2, two.IP, ipA},
		{"outside to a node", l.outside(), node1, one.IP, outside},
	} {
		if _, from, err := send(t, x.from, x.to, x.addr); err != nil || from != x.want {
			t.Errorf("%s: from %s, %v; want %s", x.name, from, err, x.want)
		}
	}
	if _, _, err := send(t, l.outside(), a, ipA); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("outside to a pod: %v, want no route", err)
	}
	if _, _, err := send(t, a, l.outside(), netip.MustParseAddr("192.0.2.1")); err == nil {
		t.Error("a pod reaches an address that is nowhere")
	}
}

func TestNodeRegisters(t *testing.T) {
	l := newLab(t)
	nettest.Eventually(t, patience, "Node and Lease", func() error {
		n, err := l.client.CoreV1().Nodes().Get(context.Background(), "node1", metav1.GetOptions{})
		if err != nil {
			return err
		}
		_, err = l.client.CoordinationV1().Leases("kube-node-lease").Get(context.Background(), "node1", metav1.GetOptions{})
		if n.Spec.PodCIDR != one.PodCIDR.String() || n.Status.Addresses[0].Address != one.IP.String() || n.Status.NodeInfo.KubeletVersion != "v1.37.2-kplab" {
			t.Errorf("node is %+v", n)
		}
		if disk := n.Status.Capacity[corev1.ResourceEphemeralStorage]; disk.Value() < 1<<20 {
			t.Errorf("the node's disk has %s", disk.String())
		}
		return err
	})
	// Marked by the lifecycle controller while it was silent: it speaks up.
	n, err := l.client.CoreV1().Nodes().Get(context.Background(), "node1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n = n.DeepCopy()
	for i := range n.Status.Conditions {
		if n.Status.Conditions[i].Type == corev1.NodeReady {
			n.Status.Conditions[i].Status = corev1.ConditionUnknown
		}
	}
	if _, err := l.client.CoreV1().Nodes().UpdateStatus(context.Background(), n, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, patience, "the node to be ready again", func() error {
		n, err := l.client.CoreV1().Nodes().Get(context.Background(), "node1", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return errors.New("not ready")
	})
}

// Who waits for a node is told what it fails at, for as long as it does.
// Heartbeats move with the reports that come by their time, transitions never
// without one.
func TestConditionsKeepTheirTimes(t *testing.T) {
	c := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue}
	for _, row := range []struct {
		name                  string
		ago                   time.Duration
		was                   corev1.ConditionStatus
		heartbeat, transition bool
	}{
		{"an early report", time.Minute, corev1.ConditionTrue, false, false},
		{"a report by its time", reportEvery, corev1.ConditionTrue, true, false},
		{"a change", time.Minute, corev1.ConditionUnknown, true, true},
	} {
		then := metav1.NewTime(time.Now().Add(-row.ago).Truncate(time.Second))
		s := &corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: row.was, LastHeartbeatTime: then, LastTransitionTime: then}}}
		setNodeCondition(s, c)
		got := s.Conditions[0]
		if moved := !got.LastHeartbeatTime.Equal(&then); moved != row.heartbeat {
			t.Errorf("%s: the heartbeat moved: %v", row.name, moved)
		}
		if moved := !got.LastTransitionTime.Equal(&then); moved != row.transition {
			t.Errorf("%s: the transition moved: %v", row.name, moved)
		}
	}
}

func TestNodeSaysWhatFails(t *testing.T) {
	l := newLab(t)
	n := l.nodes["node1"]
	registered := func() error {
		_, err := l.client.CoreV1().Nodes().Get(context.Background(), "node1", metav1.GetOptions{})
		return errors.Join(err, n.Err())
	}
	nettest.Eventually(t, patience, "the node to be registered and well", registered)
	l.full.Store(true)
	if err := l.client.CoreV1().Nodes().Delete(context.Background(), "node1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, patience, "the node to say why it is not registered", func() error {
		if err := n.Err(); err == nil || !strings.Contains(err.Error(), "register node node1: the disk is full") {
			return fmt.Errorf("it says: %v", err) //nolint:errorlint // nil is no error to wrap
		}
		return nil
	})
	l.full.Store(false)
	nettest.Eventually(t, patience, "the node to be registered and well again", registered)
}

// What a user takes away from a node comes back without anybody asking.
func TestNodeHeals(t *testing.T) {
	l := newLab(t)
	ipA, a := l.pod("a", "node1")
	ipB, b := l.pod("b", "node2")
	node1 := l.nodes["node1"].NS()
	veth := routed.LinkName("uid-a", "eth0")
	for name, do := range map[string]func() error{
		"route to the other node's pods": func() error { return delRoute(two.PodCIDR) },
		"route to a pod":                 func() error { return delRoute(netip.PrefixFrom(ipA, 32)) },
		"pod link down":                  func() error { return withLink(veth, netlink.LinkSetDown) },
		"pod link gone":                  func() error { return withLink(veth, netlink.LinkDel) },
		"uplink down":                    func() error { return withLink("eth0", netlink.LinkSetDown) },
		"uplink address": func() error {
			return withLink("eth0", func(l netlink.Link) error {
				addr, err := netlink.ParseAddr("10.0.0.132/24")
				if err != nil {
					return err
				}
				return netlink.AddrDel(l, addr)
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			if err := node1.Do(do); err != nil {
				t.Fatal(err)
			}
			nettest.Eventually(t, patience, "packets to flow again", func() error {
				if _, _, err := send(t, b, a, ipA); err != nil {
					return fmt.Errorf("b to a: %w", err)
				}
				if _, _, err := send(t, a, b, ipB); err != nil {
					return fmt.Errorf("a to b: %w", err)
				}
				if _, from, err := send(t, node1, a, ipA); err != nil || from != one.IP {
					return fmt.Errorf("node1 to a: from %s: %w", from, err)
				}
				return nil
			})
			t.Logf("healed within %s", time.Since(start))
		})
	}
}

func delRoute(dst netip.Prefix) error {
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return err
	}
	for _, r := range routes {
		if r.Dst != nil && r.Dst.String() == dst.String() {
			return netlink.RouteDel(&r)
		}
	}
	return fmt.Errorf("no route to %s", dst)
}

// A node that joins later is reached by its object alone, and one that leaves is
// not reached any more.
func TestRoutesFollowNodeObjects(t *testing.T) {
	l := newLab(t)
	late := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "late"}}
	late.Spec.PodCIDR = "10.244.9.7/24" // people write such; the kernel keeps 10.244.9.0/24
	late.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.150"}}
	if _, err := l.client.CoreV1().Nodes().Create(context.Background(), late, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	has := func() (found bool, err error) {
		err = l.nodes["node1"].NS().Do(func() error {
			routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Protocol: RouteProtocol}, netlink.RT_FILTER_PROTOCOL)
			for _, r := range routes {
				found = found || r.Dst.String() == "10.244.9.0/24" && r.Gw.String() == "10.0.0.150"
			}
			return err
		})
		return found, err
	}
	for _, want := range []bool{true, false} {
		if !want {
			if err := l.client.CoreV1().Nodes().Delete(context.Background(), "late", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		nettest.Eventually(t, patience, fmt.Sprintf("the route to be there: %v", want), func() error {
			got, err := has()
			if err == nil && got != want {
				err = fmt.Errorf("it is %v", got)
			}
			return err
		})
		// What is right is left alone.
		if err := l.nodes["node1"].heal(context.Background()); err != nil {
			t.Error(err)
		}
		if got, err := has(); err != nil || got != want {
			t.Errorf("after another look the route is there: %v, %v; want %v", got, err, want)
		}
	}
}

// TestNodeEvents looks for what a kubelet says of its node when it begins, and when it is
// back after a silence.
func TestNodeEvents(t *testing.T) {
	l := newLab(t)
	count := func(reason string) (n int) {
		events, err := l.client.CoreV1().Events("").List(context.Background(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events.Items {
			if e.Reason == reason && e.InvolvedObject.Name == one.Name && e.InvolvedObject.Kind == "Node" {
				n += int(max(e.Count, 1))
			}
		}
		return n
	}
	for _, reason := range []string{"Starting", "NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID", "NodeAllocatableEnforced", "NodeReady"} {
		nettest.Eventually(t, patience, "event "+reason, func() error {
			if count(reason) == 0 {
				return fmt.Errorf("no event %s of %s", reason, one.Name)
			}
			return nil
		})
	}
	before := count("NodeReady")
	node, err := l.client.CoreV1().Nodes().Get(context.Background(), one.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range node.Status.Conditions {
		node.Status.Conditions[i].Status = corev1.ConditionUnknown
	}
	if _, err := l.client.CoreV1().Nodes().UpdateStatus(context.Background(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, patience, "the node to say that it is back", func() error {
		if n := count("NodeReady"); n <= before {
			return fmt.Errorf("%d events NodeReady, %d before", n, before)
		}
		return nil
	})
}
