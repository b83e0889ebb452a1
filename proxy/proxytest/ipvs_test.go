// SPDX-License-Identifier: Apache-2.0

package proxytest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/ipvs"
)

// ipvsMode is mode ipvs. Its tests run in a virtual machine where this kernel lacks it:
// make test-vm.
func ipvsMode() Mode {
	return Mode{Name: "ipvs", Needs: []string{"ipvs"}, New: func(tb testing.TB, ns *netns.NS) proxy.Mode {
		tb.Helper()
		return ipvs.New(ipvs.Options{NetNS: ns})
	}}
}

// TestIPVSSchedulers shows by packets how each scheduler spreads connections. The
// Services ask for theirs by annotation, so one node has all of them at once.
func TestIPVSSchedulers(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "ipvs")
	nettest.LeakCheck(t)
	l := NewLab(t, ipvsMode())
	for _, b := range []*Host{l.B1, l.B2, l.B3} {
		holdOpen(t, b)
	}
	all := []*Host{l.B1, l.B2, l.B3}
	serve := func(t *testing.T, scheduler string, target int32) {
		t.Helper()
		svc := Service("web")
		svc.Annotations = map[string]string{proxy.AnnotationScheduler: scheduler}
		slice := Slice(svc, []int32{target})
		for _, b := range all {
			slice.Endpoints = append(slice.Endpoints, Ready(b))
		}
		l.Apply(t, []*corev1.Service{svc}, slice)
		t.Cleanup(func() { l.Apply(t, nil) })
		out, err := execx.In(l.N1.NS).Run(t.Context(), execx.Cmd{Path: "ipvsadm", Args: []string{"-S", "-n"}})
		if err != nil {
			t.Fatal(err)
		}
		if want := "-A -t " + vip + ":80 -s " + scheduler; !strings.Contains(string(out.Stdout), want) {
			t.Errorf("ipvsadm does not show %q:\n%s", want, out.Stdout)
		}
	}
	for _, scheduler := range []string{"rr", "wrr"} {
		t.Run(scheduler, func(t *testing.T) {
			serve(t, scheduler, 8080)
			for name, n := range spread(t, l.C1, vip+":80", 15) {
				if n != 5 {
					t.Errorf("%s got %d of 15", name, n)
				}
			}
		})
	}
	// Fixed by the client's address, or by the Service's: one client always meets the
	// same backend.
	for _, scheduler := range []string{"sh", "dh"} {
		t.Run(scheduler, func(t *testing.T) {
			serve(t, scheduler, 8080)
			first := spread(t, l.C1, vip+":80", 10)
			if len(first) != 1 {
				t.Errorf("10 connections of one client went to %v", first)
			}
			if second := spread(t, l.B1, vip+":80", 10); len(second) != 1 || (scheduler == "dh" && !sameKeys(first, second)) {
				t.Errorf("another client met %v, the first %v", second, first)
			}
		})
	}
	// The port counts too: one client with many ports meets several.
	t.Run("mh", func(t *testing.T) {
		serve(t, "mh", 8080)
		if got := spread(t, l.C1, vip+":80", 30); len(got) < 2 {
			t.Errorf("30 connections went to %v", got)
		}
	})
	// Where connections stay open, the next goes where there are fewest.
	for _, scheduler := range []string{"lc", "wlc", "sed", "nq"} {
		t.Run(scheduler, func(t *testing.T) {
			serve(t, scheduler, 9191)
			got := map[string]int{}
			for range 6 {
				name, c := openTo(t, l.C1, vip+":80")
				t.Cleanup(func() { _ = c.Close() })
				got[name]++
			}
			for _, b := range all {
				if got[b.Name] != 2 {
					t.Errorf("6 open connections: %v, want 2 each", got)
				}
			}
		})
	}
}

func sameKeys(a, b map[string]int) bool {
	for k := range a {
		if b[k] == 0 {
			return false
		}
	}
	return len(a) == len(b)
}

// holdOpen serves connections on port 9191 of a backend that say its name and stay
// open until the client closes.
func holdOpen(t *testing.T, h *Host) {
	t.Helper()
	ln, err := h.NS.Listen(context.WithoutCancel(t.Context()), "tcp", h.IP.String()+":9191")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() { // ends with the client's side, which every test closes
				defer c.Close()
				_, _ = fmt.Fprintln(c, h.Name)
				_, _ = c.Read(make([]byte, 1))
			}()
		}
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
	})
}

// openTo connects and reads the name of who answers; the connection stays open.
func openTo(t *testing.T, from *Host, to string) (string, net.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	c, err := from.NS.Dial(ctx, "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	buf := make([]byte, 32)
	n, err := c.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Time{})
	return strings.TrimSpace(string(buf[:n])), c
}

// TestIPVSLeaving: a real server with an open connection stays at weight 0, gets no new
// ones, comes back to weight 1 with its endpoint, and goes when its last connection has
// ended (M19, G11).
func TestIPVSLeaving(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "ipvs")
	nettest.LeakCheck(t)
	l := NewLab(t, ipvsMode())
	holdOpen(t, l.B1)
	holdOpen(t, l.B2)
	shown := func() string {
		out, err := execx.In(l.N1.NS).Run(t.Context(), execx.Cmd{Path: "ipvsadm", Args: []string{"-S", "-n"}})
		if err != nil {
			t.Fatal(err)
		}
		return string(out.Stdout)
	}
	serve := func(backends ...*Host) {
		svc := Service("web")
		slice := Slice(svc, []int32{9191})
		for _, b := range backends {
			slice.Endpoints = append(slice.Endpoints, Ready(b))
		}
		l.Apply(t, []*corev1.Service{svc}, slice)
	}
	server := func(h *Host, weight int) string {
		return fmt.Sprintf("-a -t %s:80 -r %s:9191 -m -w %d\n", vip, h.IP, weight)
	}
	serve(l.B1)
	name, c := openTo(t, l.C1, vip+":80")
	if name != "b1" {
		t.Fatalf("%s answered", name)
	}
	serve(l.B2)
	if got := shown(); !strings.Contains(got, server(l.B1, 0)) || !strings.Contains(got, server(l.B2, 1)) {
		t.Errorf("a connection is open to b1:\n%s", got)
	}
	for range 4 {
		other, o := openTo(t, l.C1, vip+":80")
		if other != "b2" {
			t.Errorf("a new connection met %s", other)
		}
		_ = o.Close()
	}
	serve(l.B1, l.B2)
	if got := shown(); !strings.Contains(got, server(l.B1, 1)) {
		t.Errorf("b1 is back:\n%s", got)
	}
	serve(l.B2)
	if _, err := c.Write([]byte("x")); err != nil {
		t.Errorf("the open connection: %v", err)
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("the backend ends: read %d, %v", n, err)
	}
	_ = c.Close()
	// What has ended is known to the kernel for two minutes more; a table without it is
	// made by hand, since nobody waits so long here.
	if got := shown(); !strings.Contains(got, server(l.B1, 0)) {
		t.Errorf("the connection has just ended:\n%s", got)
	}
	svc := Service("web")
	l.Apply(t, nil)
	l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{9191}, Ready(l.B1), Ready(l.B2)))
	l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{9191}, Ready(l.B2)))
	if got := shown(); strings.Contains(got, l.B1.IP.String()) {
		t.Errorf("b1 had no connection and is still there:\n%s", got)
	}
	l.Apply(t, nil)
}

// TestIPVSSwitch changes a running proxy between ipvs and every other mode: new flows
// are answered all the time, a connection that was opened through ipvs and one that was
// opened through the other mode go on, and in the end nothing is left of ipvs.
func TestIPVSSwitch(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "ipvs")
	nettest.LeakCheck(t)
	tp := NewTopology(t)
	holdOpen(t, tp.B2)
	ctx := t.Context()
	client := fake.NewClientset()
	factory := informers.NewSharedInformerFactory(client, 0)
	current := ipvsMode().New(t, tp.N1.NS)
	p, err := proxy.New(proxy.Config{
		NodeName: "n1", NodeIPs: []netip.Addr{tp.N1.IP}, Informers: factory, Mode: current,
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix(ClusterCIDR)}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix(ServiceCIDR)},
		Conntrack: proxy.NewConntrack(tp.N1.NS),
	})
	if err != nil {
		t.Fatal(err)
	}
	run, cancel := context.WithCancel(ctx)
	factory.Start(run.Done())
	done := make(chan error, 1)
	go func() { done <- p.Run(run) }()
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
	web, long := Service("web", NodePort(30080)), Service("long", At("10.96.0.51"))
	for svc, target := range map[*corev1.Service]int32{web: 8080, long: 9191} {
		if _, err := client.CoreV1().Services(namespace).Create(ctx, svc, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, Slice(svc, []int32{target}, Ready(tp.B2)), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	answers := func(what, to string) {
		t.Helper()
		nettest.Eventually(t, 20*time.Second, what, func() error {
			if r := tp.C1.TCP(to); r.Outcome != Answered {
				return fmt.Errorf("%s", r)
			}
			return nil
		})
	}
	answers("the first answer", vip+":80")
	change := func(to Mode) {
		t.Helper()
		// One client: in a slow machine each takes what the change needs.
		during := []*traffic{newTraffic(t, tp.C1, vip+":80")}
		next := to.New(t, tp.N1.NS)
		if err := p.Switch(ctx, next, to.NodePortAddresses); err != nil {
			t.Fatalf("to %s: %v", to, err)
		}
		current = next
		for _, tr := range during {
			nettest.Eventually(t, 20*time.Second, "an answer during the change", func() error {
				if tr.answered.Load() == 0 {
					return errors.New("none")
				}
				return nil
			})
			tr.stop()
			if tr.others[Refused]+tr.others[Denied] > 0 {
				t.Errorf("to %s: %d answered, others %v", to, tr.answered.Load(), tr.others)
			}
		}
		answers("an answer after the change", vip+":80")
	}
	alive := func(what string, c net.Conn) {
		t.Helper()
		// A backend that got it would answer by closing.
		_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		var timeout net.Error
		if _, err := c.Read(make([]byte, 1)); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("%s: %v", what, err)
		}
	}
	finish := func(what string, c net.Conn) {
		t.Helper()
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.Write([]byte("x")); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || err.Error() != "EOF" {
			t.Errorf("%s: read %d, %v, want the backend's end", what, n, err)
		}
		_ = c.Close()
	}
	for _, other := range modes() {
		if other.Variant == "legacy" || other.Variant == "compact" {
			continue // a node keeps its variant, and both layouts are one table
		}
		t.Run(other.String(), func(t *testing.T) {
			_, through := openTo(t, tp.C1, "10.96.0.51:80")
			change(other)
			_, direct := openTo(t, tp.C1, "10.96.0.51:80")
			alive("the connection through ipvs", through)
			finish("the connection through ipvs", through)
			change(ipvsMode())
			if other.Name != "userspace" {
				alive("the connection through "+other.String(), direct)
				finish("the connection through "+other.String(), direct)
			} else {
				_ = direct.Close()
			}
		})
	}
	// Out for good: when the last connection has ended, all of it goes.
	change(modes()[0])
	nettest.Eventually(t, 90*time.Second, "the end of ipvs", func() error {
		for what, cmd := range map[string][]string{"ipvsadm": {"-S", "-n"}, "ipset": {"list", "-n"}, "ip": {"-o", "link", "show", "type", "dummy"}} {
			out, err := execx.In(tp.N1.NS).Run(ctx, execx.Cmd{Path: what, Args: cmd})
			if err != nil {
				return err
			}
			if len(out.Stdout) > 0 {
				return fmt.Errorf("%s still shows:\n%s", what, out.Stdout)
			}
		}
		return nil
	})
	out, err := execx.In(tp.N1.NS).Run(ctx, execx.Cmd{Path: "iptables-nft-save"})
	if err != nil {
		t.Fatal(err)
	}
	for _, chain := range []string{"KUBE-IPVS", "KUBE-NODE-PORT ", "KUBE-LOAD-BALANCER", "KUBE-SOURCE-RANGES"} {
		if strings.Contains(string(out.Stdout), chain) {
			t.Errorf("%s is still there:\n%s", chain, out.Stdout)
		}
	}
	answers("an answer in the end", vip+":80")
}
