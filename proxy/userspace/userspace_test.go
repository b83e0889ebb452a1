// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// web is a Service with a TCP and a UDP port on cluster address 10.96.0.50, and
// endpoints on the neighbour 172.18.0.200.
func web(change func(*corev1.Service), endpoints ...string) *proxy.Snapshot {
	s := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.50", Ports: []corev1.ServicePort{
		{Name: "tcp", Port: 80, Protocol: corev1.ProtocolTCP}, {Name: "udp", Port: 80, Protocol: corev1.ProtocolUDP},
	}}}
	s.Namespace, s.Name = "default", "web"
	if change != nil {
		change(s)
	}
	var slices []*discoveryv1.EndpointSlice
	for i, e := range endpoints {
		at := netip.MustParseAddrPort(e)
		slice := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{at.Addr().String()}}}}
		slice.Namespace, slice.Name = "default", fmt.Sprintf("web-%d", i)
		slice.Labels = map[string]string{discoveryv1.LabelServiceName: "web"}
		for _, p := range s.Spec.Ports {
			port := int32(at.Port())
			slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &port})
		}
		slices = append(slices, slice)
	}
	return proxy.Decide(proxy.Facts{
		NodeName: "n1", NodeIPs: []netip.Addr{netip.MustParseAddr("172.18.0.2")}, LocalhostNodePorts: true,
	}, []*corev1.Service{s}, slices)
}

func everyEntry(s *corev1.Service) {
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	s.Spec.Ports[0].NodePort = 30080
	s.Spec.ExternalIPs = []string{"203.0.113.77"}
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.10"}}
	s.Spec.Ports = s.Spec.Ports[:1]
}

// TestText compares the rules of a Service that has every kind of entry with what
// kube-proxy of old wrote for one, but for the bridge match (see the README).
func TestText(t *testing.T) {
	p, err := New(Options{}).Render(web(everyEntry, "172.18.0.200:8080"))
	if err != nil {
		t.Fatal(err)
	}
	port := preferredPort(portID{proxy.ServicePortName{Namespace: "default", Name: "web", Port: "tcp", Protocol: corev1.ProtocolTCP}, corev1.IPv4Protocol})
	want := strings.ReplaceAll(`# IPv4 rules; load with: iptables-restore --noflush
# They lead to these ports of the proxy process:
#   tcp/@ for default/web:tcp -> 1 endpoints
*filter
:KUBE-NODEPORT-NON-LOCAL - [0:0]
-A INPUT -m comment --comment "Ensure that non-local NodePort traffic can flow" -j KUBE-NODEPORT-NON-LOCAL
-A KUBE-NODEPORT-NON-LOCAL -p tcp -m comment --comment "default/web:tcp" -m tcp --dport @ -m state --state NEW -j ACCEPT
COMMIT
*nat
:KUBE-PORTALS-CONTAINER - [0:0]
:KUBE-PORTALS-HOST - [0:0]
:KUBE-NODEPORT-CONTAINER - [0:0]
:KUBE-NODEPORT-HOST - [0:0]
-A PREROUTING -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-CONTAINER
-A OUTPUT -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-HOST
-A PREROUTING -m addrtype --dst-type LOCAL -m comment --comment "handle service NodePorts; NOTE: this must be the last rule in the chain" -j KUBE-NODEPORT-CONTAINER
-A OUTPUT -m addrtype --dst-type LOCAL -m comment --comment "handle service NodePorts; NOTE: this must be the last rule in the chain" -j KUBE-NODEPORT-HOST
-A KUBE-PORTALS-CONTAINER -d 10.96.0.50/32 -p tcp -m comment --comment "default/web:tcp" -m tcp --dport 80 -j REDIRECT --to-ports @
-A KUBE-PORTALS-CONTAINER -d 203.0.113.10/32 -p tcp -m comment --comment "default/web:tcp" -m tcp --dport 80 -j REDIRECT --to-ports @
-A KUBE-PORTALS-CONTAINER -d 203.0.113.77/32 -p tcp -m comment --comment "default/web:tcp" -m tcp --dport 80 -j REDIRECT --to-ports @
-A KUBE-PORTALS-HOST -d 10.96.0.50/32 -p tcp -m comment --comment "default/web:tcp" -m tcp --dport 80 -j DNAT --to-destination 172.18.0.2:@
-A KUBE-PORTALS-HOST -d 203.0.113.10/32 -p tcp -m comment --comment "default/web:tcp" -m tcp --dport 80 -j DNAT --to-destination 172.18.0.2:@
-A KUBE-PORTALS-HOST -d 203.0.113.77/32 -p tcp -m comment --comment "default/web:tcp" -m tcp --dport 80 -m addrtype --dst-type LOCAL -j DNAT --to-destination 172.18.0.2:@
-A KUBE-NODEPORT-CONTAINER -p tcp -m comment --comment "default/web:tcp" -m tcp --dport 30080 -j REDIRECT --to-ports @
-A KUBE-NODEPORT-HOST -p tcp -m comment --comment "default/web:tcp" -m tcp --dport 30080 -j DNAT --to-destination 172.18.0.2:@
COMMIT
`, "@", fmt.Sprint(port))
	if d := cmp.Diff(want, p.String()); d != "" {
		t.Errorf("text (-want +got):\n%s", d)
	}
}

// TestBalancer checks who gets a client: in turn, a client's own, and the next one when
// the own does not answer.
func TestBalancer(t *testing.T) {
	var b balancer
	now := time.Unix(1000, 0)
	eps := []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("10.0.0.2:80"), netip.MustParseAddrPort("10.0.0.3:80")}
	one, two := netip.MustParseAddr("10.0.9.1"), netip.MustParseAddr("10.0.9.2")
	if _, ok := b.pick(one, false, now); ok {
		t.Error("an endpoint came out of none")
	}
	b.set(eps, 0, now)
	count := map[netip.AddrPort]int{}
	for range 9 {
		a, _ := b.pick(one, false, now)
		count[a]++
		b.set(eps, 0, now) // a sync that changes nothing goes on in turn
	}
	if count[eps[0]] != 3 || count[eps[1]] != 3 || count[eps[2]] != 3 {
		t.Errorf("nine picks: %v", count)
	}
	b.set(eps, time.Minute, now)
	first, _ := b.pick(one, false, now)
	for range 5 {
		if a, _ := b.pick(one, false, now); a != first {
			t.Errorf("one moved from %s to %s", first, a)
		}
		if a, _ := b.pick(two, false, now); a == first {
			t.Errorf("two has %s too, although it came next", a)
		}
	}
	moved, _ := b.pick(one, true, now)
	if moved == first {
		t.Error("an endpoint that did not answer was picked again at once")
	}
	if a, _ := b.pick(one, false, now); a != moved {
		t.Errorf("one has %s after it moved to %s", a, moved)
	}
	if b.set(eps, time.Minute, now.Add(2*time.Minute)); len(b.clients) != 0 {
		t.Errorf("idle clients are remembered: %v", b.clients)
	}
}

// bench is a node and a neighbour, which is client and backends at once.
type bench struct {
	node, peer *netns.NS
	mode       *Mode
}

func newBench(t *testing.T, opts Options) *bench {
	t.Helper()
	nettest.NeedRoot(t)
	nettest.Need(t, map[bool]string{true: "iptables-legacy", false: "iptables"}[opts.Variant == xtables.Legacy])
	nettest.LeakCheck(t)
	b := &bench{node: nettest.NewNS(t), peer: nettest.NewNS(t)}
	nettest.Veth(t, nettest.End{NS: b.node, Name: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("172.18.0.2/16")}},
		nettest.End{NS: b.peer, Name: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("172.18.0.200/16"), netip.MustParsePrefix("172.18.0.201/16")}})
	err := b.peer.Do(func() error {
		_, dst, err := net.ParseCIDR("10.96.0.0/12")
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP("172.18.0.2")})
	})
	if err != nil {
		t.Fatal(err)
	}
	opts.NetNS, opts.LockFile = b.node, t.TempDir()+"/lock"
	b.mode = New(opts)
	ctx := context.WithoutCancel(t.Context())
	t.Cleanup(func() {
		if err := b.mode.Cleanup(ctx); err != nil {
			t.Errorf("clean up: %v", err)
		}
		b.mode.Close()
		if n := b.mode.Carrying(); n != 0 {
			t.Errorf("%d connections after the end", n)
		}
	})
	return b
}

func apply(t *testing.T, m *Mode, s *proxy.Snapshot) {
	t.Helper()
	p, err := m.Render(s)
	if err == nil {
		err = p.Apply(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// backend answers each connection with its name and closes it.
func (b *bench) backend(t *testing.T, at, name string) {
	t.Helper()
	l, err := b.peer.Listen(t.Context(), "tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, name)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
}

func (b *bench) dial(t *testing.T, network, to string) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := b.peer.Dial(ctx, network, to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	return c
}

// ask connects and reads all.
func (b *bench) ask(t *testing.T) string {
	t.Helper()
	got, err := io.ReadAll(b.dial(t, "tcp", "10.96.0.50:80"))
	if err != nil {
		t.Fatal(err)
	}
	return string(got)
}

func (b *bench) save(t *testing.T) string {
	t.Helper()
	tool := "iptables-nft-save"
	if b.mode.opts.Variant == xtables.Legacy {
		tool = "iptables-legacy-save"
	}
	out, err := execx.In(b.node).Run(t.Context(), execx.Cmd{Path: tool, Env: []string{"XTABLES_LOCKFILE=/dev/null"}})
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for l := range strings.Lines(string(out.Stdout)) {
		if !strings.HasPrefix(l, "#") && !strings.HasPrefix(l, ":") {
			lines = append(lines, xtables.Squeeze(strings.TrimSuffix(l, "\n")))
		}
	}
	return strings.Join(lines, "\n")
}

// TestKernel writes, changes, flushes and removes the rules, with both variants of the
// tools: the kernel has what the text says, a look finds each change by others, a new
// process writes nothing that is right, and rules of others stay.
func TestKernel(t *testing.T) {
	for _, v := range []xtables.Variant{xtables.NFT, xtables.Legacy} {
		t.Run(string(v), func(t *testing.T) {
			b := newBench(t, Options{Variant: v})
			tool := "iptables-" + string(v)
			run := func(args string) {
				t.Helper()
				if _, err := execx.In(b.node).Run(t.Context(), execx.Cmd{Path: tool, Args: strings.Fields(args), Env: []string{"XTABLES_LOCKFILE=/dev/null"}}); err != nil {
					t.Fatal(err)
				}
			}
			run("-t nat -A PREROUTING -p tcp --dport 4444 -j ACCEPT")
			run("-t nat -N KUBE-KUBELET-CANARY")
			foreign := b.save(t)
			s := web(everyEntry, "172.18.0.200:8080")
			apply(t, b.mode, web(nil))
			apply(t, b.mode, s)
			full := b.save(t)
			p, err := b.mode.Render(s)
			if err != nil {
				t.Fatal(err)
			}
			for l := range strings.Lines(p.String()) {
				if l = strings.TrimSpace(l); strings.HasPrefix(l, "-A") && !strings.Contains(full, l) {
					t.Errorf("the kernel lacks %q:\n%s", l, full)
				}
			}
			for _, args := range []string{"-t nat -F", "-t nat -F KUBE-PORTALS-HOST", "-t nat -D PREROUTING 1", "-F INPUT", "-t nat -A KUBE-NODEPORT-HOST -j RETURN"} {
				run(args)
				if intact, err := b.mode.Intact(t.Context()); err != nil || intact {
					t.Errorf("after %q: intact %v, %v", args, intact, err)
				}
				b.mode.Reset()
				apply(t, b.mode, s)
				if intact, err := b.mode.Intact(t.Context()); err != nil || !intact {
					t.Errorf("put right after %q: intact %v, %v", args, intact, err)
				}
			}
			// The process ends, the rules stay; the next one listens on the same ports.
			before := b.save(t)
			b.mode.Close()
			if got := b.save(t); got != before {
				t.Errorf("rules changed when the process ended (-before +after):\n%s", cmp.Diff(before, got))
			}
			opts := b.mode.opts
			opts.Exec = noRestore{execx.In(b.node)}
			b.mode = New(opts)
			apply(t, b.mode, s)
			b.mode.exec, b.mode.tool = execx.In(b.node), nil
			if err := b.mode.Cleanup(t.Context()); err != nil {
				t.Error(err)
			}
			run("-t nat -A PREROUTING -p tcp --dport 4444 -j ACCEPT") // the flush took it
			if got := b.save(t); !strings.HasSuffix(strings.ReplaceAll(got, "*filter\nCOMMIT\n", ""), foreign) {
				t.Errorf("left behind (-want +got):\n%s", cmp.Diff(foreign, got))
			}
		})
	}
}

// noRestore fails each command that would write rules.
type noRestore struct{ execx.Runner }

func (n noRestore) Run(ctx context.Context, c execx.Cmd) (execx.Result, error) {
	if strings.HasSuffix(c.Path, "-restore") && len(c.Stdin) > 0 {
		return execx.Result{}, fmt.Errorf("a restart wrote:\n%s", c.Stdin)
	}
	return n.Runner.Run(ctx, c)
}

// TestRetry has one backend that answers, one that refuses, one that says nothing, and
// none at last: no client meets a dead one while a living one is left.
func TestRetry(t *testing.T) {
	b := newBench(t, Options{})
	b.backend(t, "172.18.0.200:8080", "alive")
	apply(t, b.mode, web(nil, "172.18.0.200:8080", "172.18.0.200:8081", "172.18.77.77:8080"))
	for i := range 9 {
		if got := b.ask(t); got != "alive" {
			t.Errorf("connection %d: %q", i, got)
		}
	}
	apply(t, b.mode, web(nil))
	if got := b.ask(t); got != "" {
		t.Errorf("without endpoints: %q", got)
	}
}

// TestStream checks what a copied connection keeps of a real one: bytes in order, an end
// of one direction while the other lives, a reset; and that it outlives its endpoint and
// its Service, which take no new ones.
func TestStream(t *testing.T) {
	b := newBench(t, Options{})
	l, err := b.peer.Listen(t.Context(), "tcp", "172.18.0.200:8080")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	pair := func() (client, backend *net.TCPConn) {
		t.Helper()
		c := b.dial(t, "tcp", "10.96.0.50:80")
		far, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = far.Close() })
		_ = far.SetDeadline(time.Now().Add(10 * time.Second))
		return c.(*net.TCPConn), far.(*net.TCPConn)
	}
	apply(t, b.mode, web(nil, "172.18.0.200:8080"))
	client, backend := pair()
	other, otherBackend := pair()
	if n := b.mode.Carrying(); n != 2 {
		t.Errorf("%d connections under way, want 2", n)
	}
	apply(t, b.mode, web(nil)) // the endpoint is gone
	// And the Service. With the last rule of all that needs it, connection tracking
	// would lose its hooks; nodes have a table that keeps them.
	apply(t, b.mode, web(func(s *corev1.Service) { s.Name, s.Spec.ClusterIP = "other", "10.96.0.51" }))
	if _, err := client.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(backend); err != nil || string(got) != "question" {
		t.Errorf("backend read %q, %v", got, err)
	}
	if _, err := backend.Write([]byte("answer")); err != nil {
		t.Fatal(err)
	}
	_ = backend.Close()
	if got, err := io.ReadAll(client); err != nil || string(got) != "answer" {
		t.Errorf("client read %q, %v", got, err)
	}
	_ = otherBackend.SetLinger(0)
	_ = otherBackend.Close()
	if _, err := other.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("after a reset the client read %v", err)
	}
	nettest.Until(t, 10*time.Second, "nothing under way", func() bool { return b.mode.Carrying() == 0 })
	// Nobody listens for it any more.
	if _, err := b.peer.Dial(t.Context(), "tcp", "172.18.0.2:"+fmt.Sprint(preferredPort(portID{proxy.ServicePortName{Namespace: "default", Name: "web", Port: "tcp", Protocol: corev1.ProtocolTCP}, corev1.IPv4Protocol}))); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("the port of a deleted Service: %v", err)
	}
}

// TestLimit carries as many connections as it may, lets the next wait, and cuts all of
// them at the end.
func TestLimit(t *testing.T) {
	b := newBench(t, Options{MaxFlows: 2})
	l, err := b.peer.Listen(t.Context(), "tcp", "172.18.0.200:8080")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	accepted := make(chan net.Conn, 8)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	defer func() {
		_ = l.Close()
		<-done
	}()
	apply(t, b.mode, web(nil, "172.18.0.200:8080"))
	var clients []net.Conn
	for range 3 {
		clients = append(clients, b.dial(t, "tcp", "10.96.0.50:80"))
	}
	first := <-accepted
	second := <-accepted
	t.Cleanup(func() { _ = second.Close() })
	if n := b.mode.Carrying(); n != 2 || len(accepted) != 0 {
		t.Errorf("%d under way, %d more accepted, with a limit of 2", n, len(accepted))
	}
	_ = first.Close()
	_ = clients[0].Close()
	_ = clients[1].Close()
	third := <-accepted
	t.Cleanup(func() { _ = third.Close() })
	b.mode.Close()
	if _, err := io.ReadAll(clients[2]); err != nil && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the end of the mode: %v", err)
	}
}

// TestUDP asks and is answered from the address that it asked; it keeps its backend
// while it goes on asking, is forgotten when it does not, and leaves a backend that goes.
func TestUDP(t *testing.T) {
	b := newBench(t, Options{UDPIdle: 500 * time.Millisecond})
	echo := func(at, name string) {
		t.Helper()
		pc, err := b.peer.ListenPacket(t.Context(), "udp", at)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			buf := make([]byte, 64)
			for {
				_, from, err := pc.ReadFrom(buf)
				if err != nil {
					return
				}
				_, _ = pc.WriteTo([]byte(name), from)
			}
		}()
		t.Cleanup(func() {
			_ = pc.Close()
			<-done
		})
	}
	echo("172.18.0.200:8080", "one")
	echo("172.18.0.201:8080", "two")
	apply(t, b.mode, web(nil, "172.18.0.200:8080", "172.18.0.201:8080"))
	c := b.dial(t, "udp", "10.96.0.50:80") // connected: answers from elsewhere are not for it
	ask := func() string {
		t.Helper()
		if _, err := c.Write([]byte("?")); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 64)
		n, err := c.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		return string(buf[:n])
	}
	mine := ask()
	if mine != "one" && mine != "two" {
		t.Fatalf("answer %q", mine)
	}
	if n := b.mode.Carrying(); n != 1 {
		t.Errorf("%d clients, want 1", n)
	}
	nettest.Until(t, 10*time.Second, "an idle client is forgotten", func() bool { return b.mode.Carrying() == 0 })
	ask()
	left := map[string]string{"one": "172.18.0.200:8080", "two": "172.18.0.201:8080"}
	for _, name := range []string{"one", "two", "one"} {
		apply(t, b.mode, web(nil, left[name]))
		if got := ask(); got != name {
			t.Errorf("%s answers, and only %s is left", got, name)
		}
	}
}

// TestPortsTaken has processes on the ports that a Service would get: another proxy port
// is found, and a nodePort is left to its holder until it is free.
func TestPortsTaken(t *testing.T) {
	b := newBench(t, Options{})
	id := portID{proxy.ServicePortName{Namespace: "default", Name: "web", Port: "tcp", Protocol: corev1.ProtocolTCP}, corev1.IPv4Protocol}
	b.backend(t, "172.18.0.200:8080", "alive")
	for _, port := range []uint16{preferredPort(id), 30080} {
		l, err := b.node.Listen(t.Context(), "tcp", fmt.Sprintf(":%d", port))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		if port == 30080 {
			s := web(everyEntry, "172.18.0.200:8080")
			apply(t, b.mode, s)
			if got := b.ask(t); got != "alive" {
				t.Errorf("by the next port: %q", got)
			}
			if b.mode.portOf(id) == preferredPort(id) {
				t.Error("the taken port was taken")
			}
			if rules := b.save(t); strings.Contains(rules, "--dport 30080") {
				t.Errorf("the nodePort of another process is redirected:\n%s", rules)
			}
			_ = l.Close()
			apply(t, b.mode, s)
			if got, err := io.ReadAll(b.dial(t, "tcp", "172.18.0.2:30080")); err != nil || string(got) != "alive" {
				t.Errorf("the free nodePort: %q, %v", got, err)
			}
		}
	}
}

// TestPortsDiffer gives many Service ports a port each.
func TestPortsDiffer(t *testing.T) {
	m := New(Options{})
	var seen []uint16
	for i := range 2000 {
		id := portID{proxy.ServicePortName{Namespace: "default", Name: fmt.Sprint("svc-", i), Protocol: corev1.ProtocolTCP}, corev1.IPv4Protocol}
		if !m.givePort(id, preferredPort(id)) {
			t.Fatal("no port left")
		}
		seen = append(seen, m.portOf(id))
	}
	slices.Sort(seen)
	if n := len(slices.Compact(seen)); n != 2000 || seen[0] < firstPort || seen[len(seen)-1] >= firstPort+ports {
		t.Errorf("%d different ports for 2000, from %d to %d", n, seen[0], seen[len(seen)-1])
	}
}
