// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

const (
	// Port is where the API server reaches the kubelet on the node's IP.
	Port = 10250

	streamIdle     = 4 * time.Hour
	streamCreation = remotecommand.DefaultStreamCreationTimeout
)

// Serve answers the API server on port 10250 of the node until ctx ends: logs,
// exec, attach, port-forward and figures. cfg holds the certificate and the
// authority that clients must come from.
func (k *Kubelet) Serve(ctx context.Context, cfg *tls.Config) error {
	l, err := k.cfg.NodeNS.Listen(ctx, "tcp", net.JoinHostPort(k.cfg.NodeIP.String(), strconv.Itoa(Port)))
	if err != nil {
		return fmt.Errorf("open the kubelet's port %d: %w", Port, err)
	}
	srv := &http.Server{
		Handler: k.whileAtWork(k.Handler()), TLSConfig: cfg, ReadHeaderTimeout: 30 * time.Second,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    log.New(io.Discard, "", 0), // a client that breaks off is no news
	}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	// HTTP/1.1 only: SPDY and WebSocket take over the connection.
	cfg = cfg.Clone()
	cfg.NextProtos = []string{"http/1.1"}
	err = srv.Serve(tls.NewListener(l, cfg))
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// whileAtWork lets requests wait while the kubelet is frozen: it takes connections and
// does not answer.
func (k *Kubelet) whileAtWork(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if k.cfg.Work.Wait(r.Context()) == nil {
			next.ServeHTTP(w, r)
		}
	})
}

// Handler returns the kubelet's HTTP interface.
func (k *Kubelet) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	mux.HandleFunc("GET /stats/summary", k.serveSummary)
	mux.HandleFunc("GET /metrics/resource", k.serveResourceMetrics)
	mux.HandleFunc("GET /containerLogs/{ns}/{pod}/{container}", k.forContainer(k.serveLogs))
	for _, method := range []string{"GET", "POST"} {
		mux.HandleFunc(method+" /exec/{ns}/{pod}/{container}", k.forContainer(k.serveExec))
		mux.HandleFunc(method+" /attach/{ns}/{pod}/{container}", k.forContainer(k.serveAttach))
		mux.HandleFunc(method+" /portForward/{ns}/{pod}", k.forContainer(k.servePortForward))
	}
	return mux
}

// target is what a request is about.
type target struct {
	k *Kubelet
	p *pod
	o *corev1.Pod
	// spec is the container; nil when the path names none.
	spec *corev1.Container
}

// forContainer finds the pod and the container that the path of a request names.
func (k *Kubelet) forContainer(serve func(http.ResponseWriter, *http.Request, target)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		p := k.find(r.PathValue("ns"), r.PathValue("pod"))
		if p == nil {
			http.Error(w, fmt.Sprintf("pod %q does not run on node %s", r.PathValue("pod"), k.cfg.NodeName), http.StatusNotFound)
			return
		}
		t := target{k: k, p: p, o: p.object()}
		if name := r.PathValue("container"); name != "" {
			if t.spec = containerSpec(t.o, name); t.spec == nil {
				http.Error(w, fmt.Sprintf("container %s is not valid for pod %s", name, t.o.Name), http.StatusNotFound)
				return
			}
		}
		serve(w, r, t)
	}
}

func (k *Kubelet) serveLogs(w http.ResponseWriter, r *http.Request, t target) {
	opts, err := logOptions(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	path, done, err := k.logLocation(t.p, t.o, t.spec.Name, opts.Previous)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	// Of one that has ended, all there will be is there.
	opts.Follow = opts.Follow && done != nil
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if opts.Follow {
		_ = http.NewResponseController(w).Flush()
	}
	if err := readLog(r.Context(), path, opts, done, flushing{w, http.NewResponseController(w)}); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}

// flushing lets the log reader push out what it has when it waits for more.
type flushing struct {
	http.ResponseWriter
	c *http.ResponseController
}

func (f flushing) FlushError() error { return f.c.Flush() }

// logOptions reads the query that the API server makes of PodLogOptions.
func logOptions(q url.Values) (*corev1.PodLogOptions, error) {
	o := &corev1.PodLogOptions{
		Follow: q.Get("follow") == "true", Previous: q.Get("previous") == "true", Timestamps: q.Get("timestamps") == "true",
	}
	for name, into := range map[string]**int64{"tailLines": &o.TailLines, "sinceSeconds": &o.SinceSeconds, "limitBytes": &o.LimitBytes} {
		text := q.Get(name)
		if text == "" {
			continue
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("%s=%q: want a number from 0", name, text)
		}
		*into = &n
	}
	if text := q.Get("sinceTime"); text != "" {
		at, err := time.Parse(time.RFC3339, text)
		if err != nil {
			return nil, fmt.Errorf("sinceTime=%q: %w", text, err)
		}
		since := metav1.NewTime(at)
		o.SinceTime = &since
	}
	if s := q.Get("stream"); s != "" {
		o.Stream = &s
	}
	return o, nil
}

func (k *Kubelet) serveExec(w http.ResponseWriter, r *http.Request, t target) {
	cmd := r.URL.Query()["command"]
	if len(cmd) == 0 {
		http.Error(w, "no command to execute", http.StatusBadRequest)
		return
	}
	t.serveStreams(w, r, fmt.Sprintf("container not found (%q)", t.spec.Name),
		func(ctx context.Context, c *remote) error { return t.exec(ctx, c, cmd) })
}

func (k *Kubelet) serveAttach(w http.ResponseWriter, r *http.Request, t target) {
	t.serveStreams(w, r, fmt.Sprintf("container %s not found in pod %s_%s", t.spec.Name, t.o.Name, t.o.Namespace), t.attach)
}

// serveStreams opens a client's streams to a container that runs; idle is said of
// one that does not.
func (t target) serveStreams(w http.ResponseWriter, r *http.Request, idle string, run func(ctx context.Context, c *remote) error) {
	if t.running() == nil {
		// Before the upgrade: after it, clients show errors less well.
		http.Error(w, idle, http.StatusInternalServerError)
		return
	}
	serveRemote(w, r, run)
}

// servePortForward lasts as long as the pod: kubectl says "lost connection to pod"
// when the connection ends, and would wait for nothing if it did not.
func (k *Kubelet) servePortForward(w http.ResponseWriter, r *http.Request, t target) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(t.p.down, cancel)()
	serveForward(ctx, w, r, t.o.Name, string(t.o.UID), forwarder{t, ctx})
}
