// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// toBeDeletedTaint is set by the cluster autoscaler on a node that it is about
// to remove; load balancers are to send no new connections there.
const toBeDeletedTaint = "ToBeDeletedByClusterAutoscaler"

// shutdownTime bounds how long a health server may take to end.
const shutdownTime = time.Second

// healthServers are the proxy's listeners in the node's namespace: its own health
// (:10256), metrics (127.0.0.1:10249), and one for each healthCheckNodePort.
// Their answers have the form of kube-proxy's.
type healthServers struct {
	proxy *Proxy
	wake  chan struct{} // size 1: the wanted health check ports changed

	mu       sync.Mutex
	eligible bool // the node is not about to go
	checks   map[uint16]HealthCheck
}

func newHealthServers(p *Proxy) *healthServers {
	return &healthServers{proxy: p, wake: make(chan struct{}, 1), eligible: true, checks: map[uint16]HealthCheck{}}
}

func (h *healthServers) setNode(n *corev1.Node) {
	eligible := n.DeletionTimestamp == nil
	for i := range n.Spec.Taints {
		eligible = eligible && n.Spec.Taints[i].Key != toBeDeletedTaint
	}
	h.mu.Lock()
	h.eligible = eligible
	h.mu.Unlock()
}

// update takes the health checks of an applied snapshot.
func (h *healthServers) update(s *Snapshot) {
	checks := make(map[uint16]HealthCheck, len(s.HealthChecks))
	for _, c := range s.HealthChecks {
		checks[c.NodePort] = c
	}
	h.mu.Lock()
	h.checks = checks
	h.mu.Unlock()
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// run serves until ctx ends, and returns when every listener is closed. A port
// that somebody else holds is tried again at the next change.
func (h *healthServers) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	serve := func(ctx context.Context, addr string, handler http.Handler) error {
		l, err := h.proxy.cfg.Listen(ctx, "tcp", addr)
		if err != nil {
			return err
		}
		srv := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
		wg.Go(func() {
			if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				h.proxy.log.Error("health server ended", "address", addr, "error", err)
			}
		})
		wg.Go(func() {
			<-ctx.Done()
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
			defer cancel()
			if srv.Shutdown(end) != nil {
				_ = srv.Close()
			}
		})
		return nil
	}
	for addr, handler := range map[string]http.Handler{
		orDefault(h.proxy.cfg.HealthzAddr, ":10256"):          h.healthz(),
		orDefault(h.proxy.cfg.MetricsAddr, "127.0.0.1:10249"): h.metrics(),
	} {
		if addr == "-" {
			continue
		}
		if err := serve(ctx, addr, handler); err != nil {
			h.proxy.log.Error("health server could not listen", "address", addr, "error", err)
		}
	}
	open := map[uint16]context.CancelFunc{}
	for {
		h.mu.Lock()
		want := h.checks
		h.mu.Unlock()
		for port, cancel := range open {
			if _, ok := want[port]; !ok {
				cancel()
				delete(open, port)
			}
		}
		for port, c := range want {
			if open[port] != nil {
				continue
			}
			portCtx, cancel := context.WithCancel(ctx)
			if err := serve(portCtx, ":"+strconv.Itoa(int(port)), h.check(port)); err != nil {
				h.proxy.log.Error("health check port could not be opened", "service", c.Namespace+"/"+c.Name, "port", port, "error", err)
				cancel()
				continue
			}
			open[port] = cancel
		}
		select {
		case <-ctx.Done():
			for _, cancel := range open {
				cancel()
			}
			return
		case <-h.wake:
		}
	}
}

func orDefault(s, missing string) string {
	if s == "" {
		return missing
	}
	return s
}

// healthy says whether changes reach the kernel in time: nothing has waited for
// longer than two sync periods.
func (h *healthServers) healthy() bool {
	st := h.proxy.Status()
	return !st.Applied.IsZero() && (st.Queued.IsZero() || h.proxy.clock.Since(st.Queued) < 2*h.proxy.cfg.SyncPeriod)
}

// check answers for one Service: 200 when this node has a ready endpoint of it
// and the proxy works, else 503.
func (h *healthServers) check(port uint16) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		h.mu.Lock()
		c := h.checks[port]
		h.mu.Unlock()
		ok := h.healthy()
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(c.LocalEndpoints))
		if c.LocalEndpoints == 0 || !ok {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(map[string]any{
			"service":             map[string]string{"namespace": c.Namespace, "name": c.Name},
			"localEndpoints":      c.LocalEndpoints,
			"serviceProxyHealthy": ok,
		})
	})
}

// healthz answers for the proxy: /livez whether it works, /healthz also whether
// the node is to get new connections.
func (h *healthServers) healthz() http.Handler {
	answer := func(path string, alsoEligible bool) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			h.mu.Lock()
			eligible := h.eligible
			h.mu.Unlock()
			body := map[string]any{
				"lastUpdated": h.proxy.Status().Applied.UTC().Format(time.RFC3339Nano),
				"currentTime": h.proxy.clock.Now().UTC().Format(time.RFC3339Nano),
			}
			if alsoEligible {
				body["nodeEligible"] = eligible
			}
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("X-Content-Type-Options", "nosniff")
			code := http.StatusOK
			if !h.healthy() || (alsoEligible && !eligible) {
				code = http.StatusServiceUnavailable
			}
			h.proxy.metrics.answered(path, code)
			w.WriteHeader(code)
			_ = json.NewEncoder(w).Encode(body)
		}
	}
	mux := http.NewServeMux()
	mux.Handle("/healthz", answer("healthz", true))
	mux.Handle("/livez", answer("livez", false))
	return mux
}

// metrics answers /metrics with those of kube-proxy's metrics that this proxy
// knows, by its names, and /proxyMode.
func (h *healthServers) metrics() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = fmt.Fprint(w, h.proxy.Status().Mode)
	})
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_, _ = fmt.Fprint(w, h.proxy.metrics.page(h.proxy))
	})
	return mux
}

// noLocalEndpoints counts the Service ports whose entry drops packets on this
// node since its policy is Local.
func (s *Snapshot) noLocalEndpoints() (external, internal int) {
	if s == nil {
		return 0, 0
	}
	for _, p := range s.Services {
		if p.ExternalLocal && p.External == Drop {
			external++
		}
		if p.InternalLocal && p.Internal == Drop {
			internal++
		}
	}
	return external, internal
}

// Listener is the type of Config.Listen.
type Listener = func(ctx context.Context, network, address string) (net.Listener, error)
