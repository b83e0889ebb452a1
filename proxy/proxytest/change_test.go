// SPDX-License-Identifier: Apache-2.0

package proxytest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/none"
	"github.com/kplab/kplab/proxy/userspace"
)

// traffic opens one connection after the other until stop.
type traffic struct {
	answered atomic.Int64
	others   map[string]int // how the rest ended; read after stop
	end      func()
	done     chan struct{}
}

func newTraffic(tb testing.TB, from *Host, to string) *traffic {
	tb.Helper()
	end := make(chan struct{})
	tr := &traffic{others: map[string]int{}, done: make(chan struct{}), end: sync.OnceFunc(func() { close(end) })}
	go func() {
		defer close(tr.done)
		for {
			select {
			case <-end:
				return
			default:
			}
			if r := from.TCP(to); r.Outcome == Answered {
				tr.answered.Add(1)
			} else {
				tr.others[r.Outcome]++
			}
		}
	}()
	tb.Cleanup(tr.stop)
	return tr
}

func (tr *traffic) stop() {
	tr.end()
	<-tr.done
}

// TestNoMissWhileEndpointsChange changes the endpoints of a Service, which all
// serve, under new flows: none may meet a gap. A packet that nothing translates
// is refused in nftables mode and silent in others.
func TestNoMissWhileEndpointsChange(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	for _, m := range modes() {
		t.Run(m.String(), func(t *testing.T) {
			l := NewLab(t, m)
			sets := [][]*Host{{l.B1}, {l.B1, l.B2}, {l.B1, l.B2, l.B3}, {l.B2, l.B3}, {l.B3}, {l.B3, l.B1, l.B2}, {l.B2, l.B1}}
			serve := func(hosts []*Host) {
				svc := Service("web", NodePort(30080))
				slice := Slice(svc, []int32{8080})
				for _, h := range hosts {
					slice.Endpoints = append(slice.Endpoints, Ready(h))
				}
				l.Apply(t, []*corev1.Service{svc}, slice)
			}
			serve(sets[0])
			all := []*traffic{newTraffic(t, l.C1, vip+":80"), newTraffic(t, l.X, l.N1.IP.String()+":30080")}
			want := int64(100)
			if m.Name == "nftables" {
				want = 1000
			}
			steps := 0
			for all[0].answered.Load() < want || all[1].answered.Load() < want {
				serve(sets[steps%len(sets)])
				if steps++; t.Context().Err() != nil {
					return
				}
			}
			for _, tr := range all {
				tr.stop()
				t.Logf("%d answered, others %v, in %d changes", tr.answered.Load(), tr.others, steps)
				if n := tr.others[Refused] + tr.others[Denied]; n > 0 {
					t.Errorf("%d connections refused", n)
				}
			}
		})
	}
}

// TestLastIndexGone looks at the moment in the middle of a change of nftables'
// compact layout: a packet has met the old number of endpoints and looks its index
// up among the new ones. It must be served as well.
func TestLastIndexGone(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "nft")
	nettest.LeakCheck(t)
	for _, m := range modes() {
		if m.String() != "nftables-compact" {
			continue
		}
		l := NewLab(t, m)
		svc := Service("web", NodePort(30080), External(ExternalIP))
		local := Service("local", At("10.96.0.51"), External("203.0.113.78"), ExternalLocal)
		route(t, l.X, "203.0.113.78/32", l.N1.IP.String())
		// One pod of the node, with two ports, is two endpoints.
		second := Slice(local, []int32{8443}, Ready(l.B1))
		second.Name += "2"
		l.Apply(t, []*corev1.Service{svc, local}, Slice(svc, []int32{8080}, Ready(l.B1), Ready(l.B2), Ready(l.B3)), Slice(local, []int32{8080}, Ready(l.B1)), second)
		for _, key := range []string{vip + " . tcp . 80 . 2", "0.0.0.0 . tcp . 30080 . 2", ExternalIP + " . tcp . 80 . 2", "203.0.113.78 . tcp . 80 . 65537"} {
			cmd := execx.Cmd{Path: "nft", Args: []string{"delete", "element", "ip", "kube-proxy", "endpoints", "{ " + key + " }"}}
			if _, err := execx.In(l.N1.NS).Run(t.Context(), cmd); err != nil {
				t.Fatal(err)
			}
		}
		for range 30 {
			want(t, "cluster address", l.C1.TCP(vip+":80"), l.C1.IP, l.B1, l.B2)
			want(t, "nodePort", l.X.TCP(l.N1.IP.String()+":30080"), l.N1.IP, l.B1, l.B2)
			want(t, "external address", l.X.TCP(ExternalIP+":80"), l.N1.IP, l.B1, l.B2)
			want(t, "external address, policy Local", l.X.TCP("203.0.113.78:80"), l.X.IP, l.B1)
		}
		return
	}
	t.Error("there is no compact layout")
}

// available leaves out the modes that this machine lacks something for.
func available(t *testing.T, all []Mode) []Mode {
	t.Helper()
	return slices.DeleteFunc(all, func(m Mode) bool {
		return slices.ContainsFunc(m.Needs, func(f string) bool { return nettest.Lacks(t.Context(), f) != nil })
	})
}

// noMode is a node without a proxy.
var noMode = Mode{Name: "none", New: func(testing.TB, *netns.NS) proxy.Mode { return none.New() }}

// TestSwitchUnderTraffic changes the mode of a running proxy from each mode to every
// other, and to none and back: new flows are answered all the time, open connections go
// on, through the old rules or the old proxy, a UDP client that keeps its port is served,
// of the old mode nothing is left, and what others wrote stays. The legacy tools have
// tables of their own, and a node keeps its variant: they are a round of their own.
func TestSwitchUnderTraffic(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "nft")
	rounds := map[string][]Mode{"nft": nil}
	for _, m := range modes() {
		if m.Variant != "legacy" {
			rounds["nft"] = append(rounds["nft"], m)
		}
	}
	if os.Getenv("KPLAB_LONG") != "" {
		legacy := Mode{Name: "userspace", Variant: "legacy", Needs: []string{"iptables-legacy"}, New: func(tb testing.TB, ns *netns.NS) proxy.Mode {
			tb.Helper()
			return userspace.New(userspace.Options{NetNS: ns, Variant: xtables.Legacy, LockFile: tb.TempDir() + "/xtables.lock"})
		}}
		for _, m := range modes() {
			if m.Variant == "legacy" || m.Name == "nftables" {
				rounds["legacy"] = append(rounds["legacy"], m)
			}
		}
		rounds["legacy"] = append(rounds["legacy"], legacy)
	}
	for name, all := range rounds {
		t.Run(name, func(t *testing.T) { switchAll(t, append(available(t, all), noMode)) })
	}
}

// eachPair is a way through all modes that takes every step from one to another.
func eachPair(all []Mode) []Mode {
	var order []Mode
	for i := range all {
		for j := range all {
			if i != j {
				order = append(order, all[i], all[j])
			}
		}
	}
	return slices.CompactFunc(order, func(a, b Mode) bool { return a.String() == b.String() })
}

func switchAll(t *testing.T, all []Mode) {
	t.Helper()
	nettest.LeakCheck(t)
	order := eachPair(all)
	l := &Lab{Topology: NewTopology(t), Mode: order[0].Name, nodePorts: order[0].NodePortAddresses}
	first := order[0].New(t, l.N1.NS)
	p := l.runWith(t, fake.NewClientset(), first, nil)
	current := first
	t.Cleanup(func() {
		p.stop()
		if err := current.Cleanup(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	l.N1.tool(t, "nft", "add table ip foreign; add chain ip foreign c { type filter hook forward priority 7 ; }; add rule ip foreign c ip saddr 192.0.2.1 drop")
	l.N1.tool(t, "iptables-nft", "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "--dport", "4444", "-j", "ACCEPT")
	ln, err := l.B2.NS.Listen(t.Context(), "tcp", l.B2.IP.String()+":9090")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	// One Service for new flows, one for connections that stay open, one for UDP.
	p.set(t, Service("web", NodePort(30080)), 8080, Ready(l.B2))
	p.set(t, Service("long", At("10.96.0.51")), 9090, Ready(l.B2))
	p.set(t, Service("udp", At("10.96.0.52"), OverUDP), 8080, Ready(l.B2))
	open := func() [2]net.Conn {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		c, err := l.C1.NS.Dial(ctx, "tcp", "10.96.0.51:80")
		if err != nil {
			t.Fatal(err)
		}
		far, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = c.Close(), far.Close() })
		return [2]net.Conn{c, far}
	}
	steady, err := l.C1.NS.Dial(t.Context(), "udp", "10.96.0.52:80")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = steady.Close() }()
	oldest := open()
	for i := 1; i < len(order); i++ {
		was, to := order[i-1], order[i]
		step := was.String() + " to " + to.String()
		// Of a node that is to lose its proxy, or had none, only what is open counts.
		serves := was.Name != "none" && to.Name != "none"
		var pairs [][2]net.Conn
		if was.Name != "none" {
			pairs = append(pairs, open())
		}
		var during []*traffic
		if serves {
			during = append(during, newTraffic(t, l.C1, vip+":80"), newTraffic(t, l.X, l.N1.IP.String()+":30080"))
		}
		next := to.New(t, l.N1.NS)
		if err := p.Switch(t.Context(), next, to.NodePortAddresses); err != nil {
			t.Fatalf("%s: %v", step, err)
		}
		current = next
		for _, tr := range during {
			nettest.Eventually(t, 3*patience, "an answer", func() error {
				if tr.answered.Load() == 0 {
					return errors.New("none")
				}
				return nil
			})
			tr.stop()
			if n := tr.others[Refused] + tr.others[Denied] + tr.others[Closed]; n > 0 {
				t.Errorf("%s: %d answered, others %v", step, tr.answered.Load(), tr.others)
			}
		}
		if st := p.Status(); st.Mode != to.Name {
			t.Errorf("%s: status says %s", step, st.Mode)
		}
		if got := leftovers(t, l.N1, to.Name); got != "" && was.Name != "ipvs" { // which drains
			t.Errorf("%s: %s", step, got)
		}
		for _, pair := range append(pairs, oldest) {
			if err := echo(pair[0], pair[1]); err != nil {
				t.Errorf("%s: an open connection: %v", step, err)
			}
		}
		if to.Name == "none" {
			wantOutcome(t, step, l.C1.TCP(vip+":80"), Silence)
			continue
		}
		want(t, step, l.C1.TCP(vip+":80"), anyPeer, l.B2)
		nettest.Eventually(t, patience, step+": an answer to a UDP client that keeps its port", func() error {
			if r := talk(steady, "udp", time.Now()); r.Outcome != Answered {
				return fmt.Errorf("%s", r)
			}
			return nil
		})
	}
	if got := l.N1.tool(t, "nft", "list", "table", "ip", "foreign"); !strings.Contains(got, "192.0.2.1") {
		t.Errorf("the foreign table is now:\n%s", got)
	}
	if got := l.N1.tool(t, "iptables-nft-save", "-t", "nat"); !strings.Contains(got, "--dport 4444") {
		t.Errorf("the foreign rule is gone:\n%s", got)
	}
}

// TestMixedModes gives two nodes different modes: each translates for its own clients,
// and every pod and nodePort is reached from everywhere.
func TestMixedModes(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	all := available(t, slices.DeleteFunc(modes(), func(m Mode) bool { return m.Variant == "legacy" }))
	for i := range all {
		for j := range all {
			if i >= j || (os.Getenv("KPLAB_LONG") == "" && j != i+1) {
				continue
			}
			a, b := all[i], all[j]
			t.Run(a.String()+"+"+b.String(), func(t *testing.T) {
				l := newLab(t, a, b)
				svc := Service("web", NodePort(30080))
				l.Serve(t, svc, Ready(l.B1), Ready(l.B2))
				for _, from := range []*Host{l.C1, l.C2, l.N1, l.N2} {
					seen := map[string]bool{}
					for range 24 {
						r := from.TCP(vip + ":80")
						want(t, from.Name, r, anyPeer, l.B1, l.B2)
						seen[r.Backend] = true
					}
					if len(seen) != 2 {
						t.Errorf("%s met %v", from.Name, seen)
					}
				}
				for _, n := range []*Host{l.N1, l.N2} {
					want(t, "x by "+n.Name, l.X.TCP(n.IP.String()+":30080"), anyPeer, l.B1, l.B2)
					want(t, "c1 by "+n.Name, l.C1.TCP(n.IP.String()+":30080"), anyPeer, l.B1, l.B2)
				}
			})
		}
	}
}

// BenchmarkPath compares a connection and its answer through a Service with one to
// the pod itself, on another node, while both run with the same rules: pairs in
// turn, each the median of many.
func BenchmarkPath(b *testing.B) {
	nettest.NeedRoot(b)
	tp := NewTopology(b)
	for _, m := range modes() {
		if m.Name != "nftables" {
			continue
		}
		for _, services := range []int{1, 10000} {
			b.Run(fmt.Sprintf("%s/%d", m, services), func(b *testing.B) {
				d := SyntheticDecider(services, 5)
				svc := Service("web")
				d.SetService(svc)
				d.SetSlice(Slice(svc, []int32{8080}, Ready(tp.B2)))
				f := SyntheticFacts()
				f.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix(ClusterCIDR)}
				mode := m.New(b, tp.N1.NS)
				program, err := mode.Render(d.Decide(f))
				if err != nil {
					b.Fatal(err)
				}
				if err := program.Apply(b.Context()); err != nil {
					b.Fatal(err)
				}
				var ratios []float64
				var direct, through time.Duration
				in(b, tp.C1.NS, func() error {
					for b.Loop() {
						d, err := medianConnect(netip.AddrPortFrom(tp.B2.IP, 8080), 200)
						if err != nil {
							return err
						}
						s, err := medianConnect(netip.MustParseAddrPort(vip+":80"), 200)
						if err != nil {
							return err
						}
						direct, through = direct+d, through+s
						ratios = append(ratios, float64(s)/float64(d))
					}
					return nil
				})
				slices.Sort(ratios)
				b.ReportMetric(ratios[len(ratios)/2], "ratio")
				b.ReportMetric(float64(direct.Microseconds())/float64(len(ratios)), "us/direct")
				b.ReportMetric(float64(through.Microseconds())/float64(len(ratios)), "us/service")
				if err := mode.Cleanup(context.WithoutCancel(b.Context())); err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}

// medianConnect connects n times, reads the answer, and gives the median time.
// It blocks in the calling thread, which stands in the client's namespace.
func medianConnect(to netip.AddrPort, n int) (time.Duration, error) {
	took := make([]time.Duration, 0, n)
	buf := make([]byte, 256)
	for range n {
		start := time.Now()
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return 0, err
		}
		err = unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
		if err == nil {
			_, err = unix.Read(fd, buf)
		}
		took = append(took, time.Since(start))
		// A reset leaves no closed connection behind that fills the tables.
		linger := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		if cerr := unix.Close(fd); err == nil {
			err = cerr
		}
		if err == nil {
			err = linger
		}
		if err != nil {
			return 0, fmt.Errorf("connect to %s: %w", to, err)
		}
	}
	slices.Sort(took)
	return took[n/2], nil
}
