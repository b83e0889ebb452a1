// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// callLog is the order of calls to several modes. It is safe for concurrent use.
type callLog struct {
	mu    sync.Mutex
	calls []string
}

func (l *callLog) add(call string) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = append(l.calls, call)
}

func (l *callLog) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.calls)
}

func (l *callLog) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = nil
}

// fakeMode records what is applied and fails when told.
type fakeMode struct {
	mu       sync.Mutex
	applied  []*Snapshot
	failures int // the next so many Apply calls fail
	gone     bool
	resets   int
	probe    error
	log      *callLog // nil records nothing
	name     string   // "fake" when empty
	cleaned  int
}

type fakeProgram struct {
	m *fakeMode
	s *Snapshot
}

func (m *fakeMode) Name() string                        { return cmp.Or(m.name, "fake") }
func (m *fakeMode) Render(s *Snapshot) (Program, error) { return fakeProgram{m, s}, nil }
func (m *fakeMode) Probe(context.Context) error         { return m.probe }
func (m *fakeMode) Cleanup(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cleaned++
	m.log.add("clean " + m.Name())
	return nil
}
func (m *fakeMode) Intact(context.Context) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.gone, nil
}

func (m *fakeMode) Reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gone = false
	m.resets++
}

func (p fakeProgram) String() string { return fmt.Sprint(len(p.s.Services)) }
func (p fakeProgram) Apply(context.Context) error {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	if p.m.failures > 0 {
		p.m.failures--
		return errors.New("no such luck")
	}
	p.m.applied = append(p.m.applied, p.s)
	p.m.log.add(strings.TrimSpace("apply " + p.m.name))
	return nil
}

// fakeTable is a connection tracking table.
type fakeTable struct {
	mode    *fakeMode
	flows   []UDPFlow
	deleted []UDPFlow
}

func (f *fakeTable) UDPFlows(context.Context, corev1.IPFamily) ([]UDPFlow, error) {
	return f.flows, nil
}
func (f *fakeTable) LocalAddrs(context.Context) ([]netip.Addr, error) { return nil, nil }
func (f *fakeTable) Delete(_ context.Context, flows []UDPFlow) error {
	f.mode.mu.Lock()
	defer f.mode.mu.Unlock()
	f.deleted = append(f.deleted, flows...)
	if len(flows) > 0 {
		f.mode.log.add("delete")
	}
	return nil
}

// run starts a proxy for n1 on a fake API, and stops it with the test.
func run(t *testing.T, m *fakeMode, change func(*Config)) (*Proxy, *fake.Clientset) {
	t.Helper()
	client := fake.NewClientset()
	factory := informers.NewSharedInformerFactory(client, 0)
	cfg := Config{
		NodeName: "n1", NodeIPs: []netip.Addr{netip.MustParseAddr("172.18.0.2")},
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		Informers:    factory, Mode: m, RetryPeriod: 10 * time.Millisecond,
	}
	if change != nil {
		change(&cfg)
	}
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if got := p.Witness().Snapshot().Pending; got == 0 {
		t.Error("nothing is pending before the first sync")
	}
	ctx, cancel := context.WithCancel(t.Context())
	factory.Start(ctx.Done())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		factory.Shutdown()
	})
	nettest.Eventually(t, 5*time.Second, "the first sync", func() error { return applied(p) })
	return p, client
}

// applied is nil when the proxy has nothing left to do.
func applied(p *Proxy) error {
	if st := p.Status(); st.Applied.IsZero() || p.Witness().Snapshot().Pending != 0 {
		return fmt.Errorf("status is %+v", st)
	}
	return nil
}

func TestProxyFollowsTheAPI(t *testing.T) {
	p, client := run(t, &fakeMode{}, nil)
	ctx := t.Context()
	svc := testService()
	svc.ResourceVersion = "17"
	if _, err := client.CoreV1().Services("default").Create(ctx, svc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	slice := testSlice("web-a", ep("10.244.1.1", "n1", "rs"), ep("10.244.2.2", "n2", "rs"))
	slice.ResourceVersion = "18"
	if _, err := client.DiscoveryV1().EndpointSlices("default").Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, 5*time.Second, "two endpoints", func() error {
		s := p.Current()
		if len(s.Services) != 1 || len(s.Services[0].Cluster) != 2 {
			return fmt.Errorf("%d services", len(s.Services))
		}
		return applied(p)
	})
	if revs := p.Status().Revisions; revs["services"] != 17 || revs["endpointslices"] != 18 {
		t.Errorf("applied revisions are %v", revs)
	}
	if revs := p.Witness().Snapshot().Revs; revs["services"] != 17 || revs["endpointslices"] != 18 {
		t.Errorf("seen revisions are %v", revs)
	}
	if err := client.CoreV1().Services("default").Delete(ctx, "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, 5*time.Second, "no service", func() error {
		if n := len(p.Current().Services); n != 0 {
			return fmt.Errorf("%d services", n)
		}
		return nil
	})
}

func TestProxyUsesItsNodesZone(t *testing.T) {
	p, client := run(t, &fakeMode{}, nil)
	ctx := t.Context()
	for _, name := range []string{"n1", "n2"} {
		n := &corev1.Node{}
		n.Name, n.Labels = name, map[string]string{corev1.LabelTopologyZone: "zone-of-" + name}
		if _, err := client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client.CoreV1().Services("default").Create(ctx, testService(), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	slice := testSlice("web-a", ep("10.244.1.1", "n1", "rs", "zone=zone-of-n1"), ep("10.244.2.2", "n2", "rs", "zone=zone-of-n2"))
	if _, err := client.DiscoveryV1().EndpointSlices("default").Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, 5*time.Second, "the endpoint of the zone", func() error {
		s := p.Current()
		if len(s.Services) == 1 && slices.Equal(addrs(s.Services[0].Cluster), []string{"10.244.1.1"}) {
			return nil
		}
		return fmt.Errorf("%d services", len(s.Services))
	})
}

func TestProxyRetries(t *testing.T) {
	m := &fakeMode{failures: 3}
	p, _ := run(t, m, nil)
	if st := p.Status(); st.Failures != 3 || st.Err != nil {
		t.Errorf("status is %+v", st)
	}
}

func TestProxyHeals(t *testing.T) {
	m := &fakeMode{}
	p, _ := run(t, m, func(c *Config) { c.SyncPeriod = 20 * time.Millisecond })
	m.mu.Lock()
	m.gone = true
	m.mu.Unlock()
	nettest.Eventually(t, 5*time.Second, "a repair", func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.resets == 0 {
			return errors.New("not reset")
		}
		return nil
	})
	nettest.Eventually(t, 5*time.Second, "the count of repairs", func() error {
		if n := p.Status().Repairs; n != 1 {
			return fmt.Errorf("%d repairs", n)
		}
		return nil
	})
}

func TestProxyRefusesAModeThatCannotWork(t *testing.T) {
	factory := informers.NewSharedInformerFactory(fake.NewClientset(), 0)
	p, err := New(Config{NodeName: "n1", NodeIPs: []netip.Addr{netip.MustParseAddr("172.18.0.2")}, Informers: factory, Mode: &fakeMode{probe: errors.New("no ip_vs")}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Run(t.Context()); err == nil || err.Error() != "proxy of node n1: mode fake: no ip_vs" {
		t.Errorf("error is %v", err)
	}
}

// TestRulesBeforeEntries checks the order of rules and connection tracking.
func TestRulesBeforeEntries(t *testing.T) {
	log := &callLog{}
	m := &fakeMode{log: log}
	table := &fakeTable{mode: m, flows: []UDPFlow{{Dst: netip.MustParseAddrPort("10.96.0.50:80"), Peer: netip.MustParseAddrPort("10.244.9.9:8080")}}}
	_, client := run(t, m, func(c *Config) { c.Conntrack = table })
	svc := testService(func(s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolUDP })
	slice := testSlice("web-a", ep("10.244.1.1", "n1", "rs"))
	*slice.Ports[0].Protocol = corev1.ProtocolUDP
	if _, err := client.DiscoveryV1().EndpointSlices("default").Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Services("default").Create(t.Context(), svc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, 5*time.Second, "the stale entry's end", func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		calls := log.all()
		if i := slices.Index(calls, "delete"); i < 1 || calls[i-1] != "apply" {
			return fmt.Errorf("log is %v", calls)
		}
		return nil
	})
}

func TestStaleFlows(t *testing.T) {
	udp := func(nodePort int32, eps ...string) *Snapshot {
		svc := testService(func(s *corev1.Service) {
			s.Spec.Ports[0].Protocol = corev1.ProtocolUDP
			if nodePort != 0 {
				external(s)
				s.Spec.Ports[0].NodePort = nodePort
			}
		})
		slice := testSlice("web-a")
		*slice.Ports[0].Protocol = corev1.ProtocolUDP
		for _, a := range eps {
			conditions := "rs"
			if a[0] == '-' {
				a, conditions = a[1:], "st"
			}
			slice.Endpoints = append(slice.Endpoints, ep(a, "n1", conditions))
		}
		d := NewDecider()
		d.SetService(svc)
		d.SetSlice(slice)
		return d.Decide(testFacts())
	}
	none := Decide(testFacts(), nil, nil)
	flow := func(dst, peer string) UDPFlow {
		return UDPFlow{Dst: netip.MustParseAddrPort(dst), Peer: netip.MustParseAddrPort(peer)}
	}
	const vip, pod, gone = "10.96.0.50:80", "10.244.1.1:8080", "10.244.1.2:8080"
	for _, tc := range []struct {
		name        string
		before, now *Snapshot
		flow        UDPFlow
		stale       bool
	}{
		{"O01 endpoint gone", udp(0, "10.244.1.1", "10.244.1.2"), udp(0, "10.244.1.1"), flow(vip, gone), true},
		{"healthy", udp(0, "10.244.1.1", "10.244.1.2"), udp(0, "10.244.1.1"), flow(vip, pod), false},
		{"O02 sent before there was one", udp(0), udp(0, "10.244.1.1"), flow(vip, vip), true},
		{"O03 none left", udp(0, "10.244.1.1"), udp(0), flow(vip, pod), false},
		{"O04 nodePort", udp(30053, "10.244.1.2"), udp(30053, "10.244.1.1"), flow("172.18.0.2:30053", gone), true},
		{"O04 nodePort on loopback", udp(30053, "10.244.1.2"), udp(30053, "10.244.1.1"), flow("127.0.0.1:30053", gone), true},
		{"a like-numbered port elsewhere", udp(30053, "10.244.1.2"), udp(30053, "10.244.1.1"), flow("198.51.100.7:30053", "198.51.100.7:30053"), false},
		{"O05 terminating and serving", udp(0, "10.244.1.1"), udp(0, "-10.244.1.1", "10.244.1.2"), flow(vip, pod), false},
		{"O08 Service deleted", udp(0, "10.244.1.1"), none, flow(vip, pod), true},
		{"another address", udp(0, "10.244.1.1"), none, flow("198.51.100.7:80", "198.51.100.7:80"), false},
		{"found after a restart", nil, udp(0, "10.244.1.1"), flow(vip, gone), true},
		{"left over, found after a restart", nil, none, flow("10.96.0.99:53", gone), true},
		{"not ours, found after a restart", nil, none, flow("198.51.100.7:53", gone), false},
	} {
		got := staleFlows([]UDPFlow{tc.flow}, tc.before, tc.now, []netip.Addr{netip.MustParseAddr("172.18.0.2")}, []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}, func(netip.AddrPort) bool { return false })
		if (len(got) == 1) != tc.stale {
			t.Errorf("%s: stale %v, want %v", tc.name, len(got) == 1, tc.stale)
		}
	}
}

func TestHealthServers(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ns.Close() }()
	_, client := run(t, &fakeMode{}, func(c *Config) { c.Listen = ns.Listen })
	svc := testService(externalLocal, func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.HealthCheckNodePort = 31000
	})
	if _, err := client.CoreV1().Services("default").Create(t.Context(), svc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	get := func(url string) (int, string, http.Header, error) {
		r, err := http.Get(url)
		if err != nil {
			return 0, "", nil, err
		}
		defer func() { _ = r.Body.Close() }()
		b, err := io.ReadAll(r.Body)
		return r.StatusCode, string(b), r.Header, err
	}
	await := func(url string, code int) (body string, h http.Header) {
		t.Helper()
		nettest.Eventually(t, 5*time.Second, fmt.Sprintf("%d from %s", code, url), func() error {
			got, b, header, err := get(url)
			if err != nil || got != code {
				return fmt.Errorf("%d %s, %w", got, b, err)
			}
			body, h = b, header
			return nil
		})
		return body, h
	}
	await("http://127.0.0.1:31000/", http.StatusServiceUnavailable)
	if _, err := client.DiscoveryV1().EndpointSlices("default").Create(t.Context(), testSlice("web-a", ep("10.244.1.1", "n1", "rs"), ep("10.244.1.2", "n1", "st")), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	body, header := await("http://127.0.0.1:31000/any/path", http.StatusOK)
	var answer struct {
		Service             struct{ Namespace, Name string }
		LocalEndpoints      int
		ServiceProxyHealthy bool
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil || answer.Service.Name != "web" || answer.LocalEndpoints != 1 || !answer.ServiceProxyHealthy {
		t.Errorf("answer is %s, %v", body, err)
	}
	if got := header.Get("X-Load-Balancing-Endpoint-Weight"); got != "1" {
		t.Errorf("weight is %q", got)
	}
	await("http://127.0.0.1:10256/healthz", http.StatusOK)
	if mode, _ := await("http://127.0.0.1:10249/proxyMode", http.StatusOK); mode != "fake" {
		t.Errorf("mode is %q", mode)
	}
	n := &corev1.Node{Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: toBeDeletedTaint, Effect: corev1.TaintEffectNoSchedule}}}}
	n.Name = "n1"
	if _, err := client.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	await("http://127.0.0.1:10256/healthz", http.StatusServiceUnavailable)
	await("http://127.0.0.1:10256/livez", http.StatusOK)
	if err := client.CoreV1().Services("default").Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, 5*time.Second, "the closed health check port", func() error {
		if code, _, _, err := get("http://127.0.0.1:31000/"); err == nil {
			return fmt.Errorf("answered %d", code)
		}
		return nil
	})
}

// TestHold freezes a proxy, flushes it and lets it go.
func TestHold(t *testing.T) {
	m := &fakeMode{}
	p, client := run(t, m, nil)
	ctx := t.Context()
	for range 2 {
		if err := p.SetHold(ctx, Frozen); err != nil {
			t.Fatal(err)
		}
	}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.ServiceSpec{
		ClusterIP: "10.96.0.20", ClusterIPs: []string{"10.96.0.20"}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
		Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}},
	}}
	if _, err := client.CoreV1().Services("default").Create(ctx, service, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, 5*time.Second, "the Service to be wanted", func() error {
		if n := len(p.Wanted().Services); n != 1 || p.Witness().Snapshot().Pending != 0 {
			return fmt.Errorf("%d Services, pending %d", n, p.Witness().Snapshot().Pending)
		}
		return nil
	})
	if n := len(p.Current().Services); n != 0 || m.cleaned != 0 {
		t.Errorf("frozen, and the kernel has %d Services, cleaned %d times", n, m.cleaned)
	}
	if err := p.Switch(ctx, &fakeMode{name: "next"}, nil); err == nil || !strings.Contains(err.Error(), "frozen") {
		t.Errorf("a frozen proxy changes its mode: %v", err)
	}
	for range 2 {
		if err := p.SetHold(ctx, Flushed); err != nil {
			t.Fatal(err)
		}
	}
	if m.cleaned != 1 || p.Current() != nil {
		t.Errorf("flushed: cleaned %d times, the kernel has %v", m.cleaned, p.Current())
	}
	// With the rules gone, one that is only frozen writes none.
	if err := p.SetHold(ctx, Frozen); err != nil || p.Current() != nil {
		t.Errorf("frozen after it was flushed: %v, the kernel has %v", err, p.Current())
	}
	if err := p.SetHold(ctx, Free); err != nil {
		t.Fatal(err)
	}
	if n := len(p.Current().Services); n != 1 || m.resets != 1 {
		t.Errorf("free: the kernel has %d Services, the mode forgot %d times what it wrote", n, m.resets)
	}
}

// TestSwitch changes the mode of a running proxy: the new rules first, then the old
// ones go; a mode that cannot do it leaves everything as it was.
func TestSwitch(t *testing.T) {
	log := &callLog{}
	old := &fakeMode{name: "old", log: log}
	p, _ := run(t, old, nil)
	ctx := t.Context()
	next := &fakeMode{name: "next", log: log}

	broken := &fakeMode{name: "broken", failures: 1}
	if err := p.Switch(ctx, broken, nil); err == nil || !strings.Contains(err.Error(), "no such luck") {
		t.Errorf("a mode that cannot apply: %v", err)
	}
	if st := p.Status(); st.Mode != "old" || broken.cleaned != 1 || old.cleaned != 0 {
		t.Errorf("after the failure: mode %s, cleaned %d and %d", st.Mode, broken.cleaned, old.cleaned)
	}
	if err := p.Switch(ctx, &fakeMode{probe: errors.New("not here")}, nil); err == nil || !strings.Contains(err.Error(), "not here") {
		t.Errorf("a mode that the kernel lacks: %v", err)
	}
	nettest.Eventually(t, 5*time.Second, "the old mode again", func() error { return applied(p) })

	log.reset()
	if err := p.Switch(ctx, next, []string{"primary"}); err != nil {
		t.Fatal(err)
	}
	if want := []string{"apply next", "clean old"}; len(log.all()) < 2 || !slices.Equal(log.all()[:2], want) {
		t.Errorf("order is %v, want %v", log.all(), want)
	}
	if st := p.Status(); st.Mode != "next" {
		t.Errorf("mode is %s", st.Mode)
	}
	if np := p.Wanted().NodePorts[corev1.IPv4Protocol]; np.All || len(np.Addrs) != 1 {
		t.Errorf("nodePorts answer on %+v, want the primary address", np)
	}
	// Another form of the same mode takes over what there is.
	if err := p.Switch(ctx, &fakeMode{name: "next"}, nil); err != nil || next.cleaned != 0 {
		t.Errorf("the same mode in another form: %v, cleaned %d times", err, next.cleaned)
	}
	late, cancel := context.WithCancel(ctx)
	cancel()
	if err := p.Switch(late, &fakeMode{name: "late"}, nil); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("nobody waits: %v", err)
	}
}
