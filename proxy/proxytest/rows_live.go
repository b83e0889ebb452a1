// SPDX-License-Identifier: Apache-2.0

//nolint:thelper // a row is a test and not a helper: its own lines are what a failure names
package proxytest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/proxy"
)

// live is a running proxy of node n1, fed by an API of its own.
type live struct {
	*proxy.Proxy
	client *fake.Clientset
	stop   func()
}

// run starts a proxy with the mode of n1; it stops with the test.
func (l *Lab) run(t *testing.T, change func(*proxy.Config)) *live {
	t.Helper()
	return l.runWith(t, fake.NewClientset(), l.nodes[0].mode, change)
}

func (l *Lab) runWith(t *testing.T, client *fake.Clientset, mode proxy.Mode, change func(*proxy.Config)) *live {
	t.Helper()
	factory := informers.NewSharedInformerFactory(client, 0)
	cfg := proxy.Config{
		NodeName: "n1", NodeIPs: []netip.Addr{l.N1.IP}, Informers: factory, Mode: mode,
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix(ClusterCIDR)}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix(ServiceCIDR)},
		Conntrack: proxy.NewConntrack(l.N1.NS), NodePortAddresses: l.nodePorts, Listen: l.N1.NS.Listen,
	}
	if change != nil {
		change(&cfg)
	}
	p, err := proxy.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	factory.Start(ctx.Done())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	stopped := false
	out := &live{p, client, func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		factory.Shutdown()
		// What the proxy left is not what the lab remembers.
		if r, ok := mode.(proxy.Resetter); ok {
			r.Reset()
		}
	}}
	t.Cleanup(out.stop)
	out.settled(t, "the first sync")
	return out
}

// settled waits until the proxy has nothing left to do.
func (p *live) settled(t *testing.T, what string) {
	t.Helper()
	nettest.Eventually(t, 20*time.Second, what, func() error {
		if st := p.Status(); st.Applied.IsZero() || p.Witness().Snapshot().Pending != 0 {
			return fmt.Errorf("status is %+v", st)
		}
		return nil
	})
}

// set creates or replaces a Service and its slice, and waits until the proxy has them.
func (p *live) set(t *testing.T, svc *corev1.Service, target int32, eps ...discoveryv1.Endpoint) {
	t.Helper()
	services, slices := p.client.CoreV1().Services(svc.Namespace), p.client.DiscoveryV1().EndpointSlices(svc.Namespace)
	slice := Slice(svc, []int32{target}, eps...)
	before := p.Status().Syncs
	if _, err := services.Create(t.Context(), svc, metav1.CreateOptions{}); err != nil {
		if _, err = services.Update(t.Context(), svc, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := slices.Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		if _, err = slices.Update(t.Context(), slice, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	nettest.Eventually(t, 20*time.Second, "the change", func() error {
		if p.Status().Syncs > before && p.Witness().Snapshot().Pending == 0 && held(p.Current(), svc.Name, len(eps)) {
			return nil
		}
		return fmt.Errorf("status is %+v", p.Status())
	})
}

// held says whether a snapshot has a Service with so many endpoints that serve.
func held(s *proxy.Snapshot, name string, endpoints int) bool {
	if s == nil {
		return false
	}
	for _, p := range s.Services {
		if p.Name == name {
			return len(p.Serving) == endpoints
		}
	}
	return false
}

// get asks a web server from inside a node or from elsewhere.
func (h *Host) get(t *testing.T, url string) (code int, body string, header http.Header, err error) {
	t.Helper()
	u := strings.TrimPrefix(url, "http://")
	host, path, _ := strings.Cut(u, "/")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	c, err := h.NS.Dial(ctx, "tcp", host)
	if err != nil {
		return 0, "", nil, err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+host+"/"+path, http.NoBody)
	if err != nil {
		return 0, "", nil, err
	}
	req.Close = true
	if err := req.Write(c); err != nil {
		return 0, "", nil, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), req)
	if err != nil {
		return 0, "", nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	var b strings.Builder
	_, err = bufio.NewReader(resp.Body).WriteTo(&b)
	return resp.StatusCode, b.String(), resp.Header, err
}

// await asks until the answer has a code.
func (h *Host) await(t *testing.T, url string, code int) (body string, header http.Header) {
	t.Helper()
	nettest.Eventually(t, 20*time.Second, fmt.Sprintf("%d from %s for %s", code, url, h), func() error {
		got, b, hd, err := h.get(t, url)
		if err == nil && got == code {
			body, header = b, hd
			return nil
		}
		return fmt.Errorf("%d %s, %w", got, b, err)
	})
	return body, header
}

// liveRows need a proxy that runs.
func liveRows() []Row {
	const hc = ":31000"
	lb := func() *corev1.Service {
		return Service("web", LoadBalancer(LoadBalancerIP, corev1.LoadBalancerIPModeVIP), ExternalLocal, func(s *corev1.Service) { s.Spec.HealthCheckNodePort = 31000 })
	}
	return []Row{
		{ID: "C37", Title: "rules that somebody flushed come back", Run: func(t *testing.T, l *Lab) {
			p := l.run(t, func(c *proxy.Config) { c.SyncPeriod = 200 * time.Millisecond })
			p.set(t, Service("web"), 8080, Ready(l.B1))
			want(t, "before", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
			l.flush(t)
			nettest.Eventually(t, 20*time.Second, "an answer after the flush", func() error {
				if r := l.C1.TCP(vip + ":80"); r.Outcome != Answered {
					return fmt.Errorf("%s", r)
				}
				return nil
			})
			nettest.Until(t, 20*time.Second, "the repair is counted", func() bool { return p.Status().Repairs > 0 })
		}},
		{ID: "L02", Title: "healthCheckNodePort of a node with a ready pod", Run: func(t *testing.T, l *Lab) {
			p := l.run(t, nil)
			p.set(t, lb(), 8080, Ready(l.B1))
			body, h := l.X.await(t, "http://"+l.N1.IP.String()+hc+"/any/path", http.StatusOK)
			var a struct {
				Service             struct{ Namespace, Name string }
				LocalEndpoints      int
				ServiceProxyHealthy bool
			}
			if err := json.Unmarshal([]byte(body), &a); err != nil || a.Service.Name != "web" || a.Service.Namespace != namespace || a.LocalEndpoints != 1 || !a.ServiceProxyHealthy {
				t.Errorf("body %s, %v", body, err)
			}
			for k, v := range map[string]string{"Content-Type": "application/json", "X-Content-Type-Options": "nosniff", "X-Load-Balancing-Endpoint-Weight": "1"} {
				if h.Get(k) != v {
					t.Errorf("%s is %q, want %q", k, h.Get(k), v)
				}
			}
		}},
		{ID: "L03", Title: "healthCheckNodePort of a node without one", Run: func(t *testing.T, l *Lab) {
			p := l.run(t, nil)
			p.set(t, lb(), 8080, Ready(l.B2))
			if body, _ := l.X.await(t, "http://"+l.N1.IP.String()+hc+"/", http.StatusServiceUnavailable); !strings.Contains(body, `"localEndpoints":0`) {
				t.Errorf("body %s", body)
			}
		}},
		{ID: "L04", Title: "a terminating pod does not count, and still serves", Run: func(t *testing.T, l *Lab) {
			p := l.run(t, nil)
			p.set(t, lb(), 8080, Draining(l.B1), Ready(l.B2))
			l.X.await(t, "http://"+l.N1.IP.String()+hc+"/", http.StatusServiceUnavailable)
			if !l.userspace() {
				want(t, "x", l.X.TCP(l.N1.IP.String()+":30080"), l.X.IP, l.B1)
			}
		}},
		{ID: "L06", Title: "a node that lets nothing in by default", Long: true, Run: func(t *testing.T, l *Lab) {
			l.notIn(t, "userspace", "the mode has no rule for health checks, as upstream's had none")
			p := l.run(t, nil)
			p.set(t, lb(), 8080, Ready(l.B1))
			l.X.await(t, "http://"+l.N1.IP.String()+hc+"/", http.StatusOK)
			l.N1.tool(t, l.iptables(), "-P", "INPUT", "DROP")
			code, _, _, err := l.X.get(t, "http://"+l.N1.IP.String()+hc+"/")
			l.N1.tool(t, l.iptables(), "-P", "INPUT", "ACCEPT")
			if l.Mode == "nftables" {
				if err == nil {
					t.Errorf("answered %d: another table's drop cannot be undone", code)
				}
			} else if err != nil || code != http.StatusOK {
				t.Errorf("answered %d, %v", code, err)
			}
		}},
		{ID: "L09", Title: "the proxy's own health, and its liveness on a node that goes", Run: func(t *testing.T, l *Lab) {
			p := l.run(t, nil)
			at := "http://" + l.N1.IP.String() + ":10256"
			body, _ := l.X.await(t, at+"/healthz", http.StatusOK)
			var a struct {
				LastUpdated, CurrentTime time.Time
				NodeEligible             *bool
			}
			if err := json.Unmarshal([]byte(body), &a); err != nil || a.LastUpdated.IsZero() || a.CurrentTime.IsZero() || a.NodeEligible == nil || !*a.NodeEligible {
				t.Errorf("body %s, %v", body, err)
			}
			n := &corev1.Node{Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler", Effect: corev1.TaintEffectNoSchedule}}}}
			n.Name = "n1"
			if _, err := p.client.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			l.X.await(t, at+"/healthz", http.StatusServiceUnavailable)
			l.X.await(t, at+"/livez", http.StatusOK)
		}},
		{ID: "L12", Title: "metrics by upstream's names", Run: func(t *testing.T, l *Lab) {
			p := l.run(t, nil)
			p.set(t, lb(), 8080, Ready(l.B2))
			body, _ := l.N1.await(t, "http://127.0.0.1:10249/metrics", http.StatusOK)
			names := []string{
				"kubeproxy_sync_proxy_rules_duration_seconds_bucket", "kubeproxy_sync_proxy_rules_last_timestamp_seconds", "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
				"kubeproxy_sync_proxy_rules_service_changes_total", "kubeproxy_sync_proxy_rules_endpoint_changes_total", "kubeproxy_sync_proxy_rules_service_changes_pending",
				"kubeproxy_sync_proxy_rules_endpoint_changes_pending", "kubeproxy_network_programming_duration_seconds_bucket", "kubeproxy_proxy_healthz_total", "kubeproxy_proxy_livez_total",
				`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="external"} 1`, "kubeproxy_conntrack_reconciler_sync_duration_seconds_bucket",
			}
			switch l.Mode {
			case "iptables":
				names = append(names, "kubeproxy_sync_proxy_rules_iptables_restore_failures_total", `kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv4",table="nat"}`, "kubeproxy_sync_full_proxy_rules_duration_seconds_bucket")
			case "nftables":
				names = append(names, "kubeproxy_sync_proxy_rules_nftables_sync_failures_total", "kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total")
			}
			for _, name := range names {
				if !strings.Contains(body, "\n"+name) {
					t.Errorf("no %s in:\n%s", name, body)
				}
			}
		}},
		{ID: "L13", Title: "/proxyMode names the mode", Run: func(t *testing.T, l *Lab) {
			l.run(t, nil)
			if body, _ := l.N1.await(t, "http://127.0.0.1:10249/proxyMode", http.StatusOK); body != l.Mode {
				t.Errorf("body %q", body)
			}
			if code, _, _, err := l.X.get(t, "http://"+l.N1.IP.String()+":10249/proxyMode"); err == nil {
				t.Errorf("a client outside is answered %d", code)
			}
		}},
		{ID: "M08", Title: "clean-up leaves nothing of the mode and everything of others", Run: func(t *testing.T, l *Lab) {
			l.N1.tool(t, "nft", "add table ip foreign; add chain ip foreign c { type filter hook forward priority 7 ; }; add rule ip foreign c ip saddr 192.0.2.1 drop")
			l.N1.tool(t, l.iptables(), "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "--dport", "4444", "-j", "ACCEPT")
			l.Serve(t, Service("web", LoadBalancer(LoadBalancerIP, corev1.LoadBalancerIPModeVIP, "172.18.0.0/24"), Sticky(60)), Ready(l.B1), Ready(l.B2))
			if err := l.nodes[0].mode.Cleanup(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := leftovers(t, l.N1, ""); got != "" {
				t.Error(got)
			}
			if got := l.N1.tool(t, "nft", "list", "table", "ip", "foreign"); !strings.Contains(got, "192.0.2.1") {
				t.Errorf("the foreign table is now:\n%s", got)
			}
			if got := l.N1.tool(t, l.iptables()+"-save", "-t", "nat"); !strings.Contains(got, "--dport 4444") {
				t.Errorf("the foreign rule is gone:\n%s", got)
			}
			l.N1.tool(t, "nft", "delete", "table", "ip", "foreign")
			l.N1.tool(t, l.iptables(), "-t", "nat", "-D", "PREROUTING", "-p", "tcp", "--dport", "4444", "-j", "ACCEPT")
		}},
		{ID: "O10", Title: "the proxy stops and starts again", Run: func(t *testing.T, l *Lab) {
			p := l.run(t, nil)
			p.set(t, Service("web"), 8080, Ready(l.B1))
			want(t, "while it runs", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
			p.stop()
			if l.userspace() {
				wantOutcome(t, "while it is stopped", l.C1.TCP(vip+":80"), Refused)
			} else {
				want(t, "while it is stopped", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
			}
			again := l.runWith(t, p.client, l.nodes[0].mode, nil)
			want(t, "when it runs again", l.C1.TCP(vip+":80"), l.seen(l.C1), l.B1)
			again.stop()
		}},
	}
}

// flush removes the mode's rules behind its back, as a person would.
func (l *Lab) flush(t *testing.T) {
	t.Helper()
	switch l.Mode {
	case "nftables":
		l.N1.tool(t, "nft", "flush", "ruleset")
	case "ipvs":
		l.N1.tool(t, "ip", "link", "del", "kube-ipvs0")
	default:
		l.N1.tool(t, l.iptables(), "-t", "nat", "-F")
	}
}

// leftovers names rules in a node that are not those of a mode.
func leftovers(tb testing.TB, node *Host, mode string) string {
	tb.Helper()
	marks := map[string][]string{
		"iptables": {"KUBE-SERVICES", "KUBE-SVC-", "KUBE-SEP-", "KUBE-MARK-MASQ", "KUBE-POSTROUTING", "KUBE-PROXY-"}, "userspace": {"KUBE-PORTALS-", "KUBE-NODEPORT-"}, "nftables": {"kube-proxy"},
	}
	for _, cmd := range [][]string{{"iptables-nft-save"}, {"iptables-legacy-save"}, {"nft", "list", "tables"}} {
		run, err := execx.In(node.NS).Run(context.WithoutCancel(tb.Context()), execx.Cmd{Path: cmd[0], Args: cmd[1:], Env: []string{"XTABLES_LOCKFILE=/dev/null"}})
		if err != nil {
			tb.Fatal(err)
		}
		for other, all := range marks {
			for _, mark := range all {
				if other != mode && strings.Contains(string(run.Stdout), mark) {
					return fmt.Sprintf("%s still shows %s:\n%s", cmd[0], mark, run.Stdout)
				}
			}
		}
	}
	return ""
}

// echo sends a byte each way.
func echo(a, b net.Conn) error {
	deadline := time.Now().Add(3 * time.Second)
	for _, pair := range [][2]net.Conn{{a, b}, {b, a}} {
		if err := pair[0].SetDeadline(deadline); err != nil {
			return err
		}
		if err := pair[1].SetDeadline(deadline); err != nil {
			return err
		}
		if _, err := pair[0].Write([]byte("x")); err != nil {
			return err
		}
		if _, err := pair[1].Read(make([]byte, 1)); err != nil {
			return err
		}
	}
	return nil
}
