// SPDX-License-Identifier: Apache-2.0

package proxytest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/proxy"
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
		route(t, l.X, "eth0", "203.0.113.78/32", l.N1.IP.String())
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

// TestSwitchUnderTraffic changes the mode of a running proxy from each mode to
// every other: new flows are answered all the time, an open connection goes on,
// and of the old mode nothing is left.
func TestSwitchUnderTraffic(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "nft")
	nettest.LeakCheck(t)
	tp := NewTopology(t)
	ctx := t.Context()
	// The legacy variant has tables of its own, and a node keeps its variant.
	all := slices.DeleteFunc(modes(), func(m Mode) bool { return m.Variant == "legacy" })
	var order []Mode
	for i := range all {
		for j := range all {
			if i != j {
				order = append(order, all[i], all[j])
			}
		}
	}
	client := fake.NewClientset()
	factory := informers.NewSharedInformerFactory(client, 0)
	first := order[0].New(t, tp.N1.NS)
	p, err := proxy.New(proxy.Config{
		NodeName: "n1", NodeIPs: []netip.Addr{tp.N1.IP}, Informers: factory, Mode: first,
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix(ClusterCIDR)}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix(ServiceCIDR)},
		Conntrack: proxy.NewConntrack(tp.N1.NS), NodePortAddresses: order[0].NodePortAddresses,
	})
	if err != nil {
		t.Fatal(err)
	}
	run, cancel := context.WithCancel(ctx)
	factory.Start(run.Done())
	done := make(chan error, 1)
	go func() { done <- p.Run(run) }()
	current := first
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		factory.Shutdown()
		if err := current.Cleanup(context.WithoutCancel(ctx)); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	ln, err := tp.B2.NS.Listen(ctx, "tcp", tp.B2.IP.String()+":9090")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	// One Service for new flows, one for the connection that stays open.
	web, long := Service("web", NodePort(30080)), Service("long", At("10.96.0.51"))
	for svc, slice := range map[*corev1.Service][]int32{web: {8080}, long: {9090}} {
		if _, err := client.CoreV1().Services(namespace).Create(ctx, svc, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, Slice(svc, slice, Ready(tp.B2)), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	nettest.Eventually(t, 10*time.Second, "an answer", func() error {
		if r := tp.C1.TCP(vip + ":80"); r.Outcome != Answered {
			return fmt.Errorf("%s", r)
		}
		return nil
	})
	open, err := tp.C1.NS.Dial(ctx, "tcp", "10.96.0.51:80")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Close() }()
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = far.Close() }()

	for i := 1; i < len(order); i++ {
		was, to := order[i-1], order[i]
		if was.String() == to.String() {
			continue
		}
		during := []*traffic{newTraffic(t, tp.C1, vip+":80"), newTraffic(t, tp.X, tp.N1.IP.String()+":30080")}
		next := to.New(t, tp.N1.NS)
		if err := p.Switch(ctx, next, to.NodePortAddresses); err != nil {
			t.Fatalf("%s to %s: %v", was, to, err)
		}
		current = next
		for _, tr := range during {
			nettest.Eventually(t, 5*time.Second, "an answer", func() error {
				if tr.answered.Load() == 0 {
					return errors.New("none")
				}
				return nil
			})
			tr.stop()
			if tr.others[Refused]+tr.others[Denied] > 0 {
				t.Errorf("%s to %s: %d answered, others %v", was, to, tr.answered.Load(), tr.others)
			}
		}
		if st := p.Status(); st.Mode != to.Name {
			t.Errorf("%s to %s: status says %s", was, to, st.Mode)
		}
		// The old mode finds nothing of its own any more.
		if got := leftovers(t, tp.N1, to.Name); got != "" {
			t.Errorf("%s to %s: %s", was, to, got)
		}
		if err := echo(open, far); err != nil {
			t.Errorf("%s to %s: the open connection: %v", was, to, err)
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
