// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// isRefused says whether a connection was refused.
func isRefused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// netexec answers, over HTTP and UDP, who it is and who asks.
type netexec struct {
	ctx      Context
	httpPort int
	udpPorts []int
	exit     chan int
	once     sync.Once
}

func newNetexec(c Context, args []string) (Server, error) {
	flags := flag.NewFlagSet("netexec", flag.ContinueOnError)
	httpPort := flags.Int("http-port", 8080, "")
	udpPort := flags.String("udp-port", "8081", "one or more, by commas; -1 is none")
	flags.Int("sctp-port", -1, "not served")
	flags.String("tls-cert-file", "", "not served")
	flags.String("tls-private-key-file", "", "not served")
	flags.Duration("delay-shutdown", 0, "not used")
	flags.String("http-override", "", "not used")
	flags.String("udp-listen-addresses", "", "not used")
	if _, err := parse(&c, flags, args); err != nil {
		return nil, err
	}
	n := &netexec{ctx: c, httpPort: *httpPort, exit: make(chan int, 1)}
	for p := range strings.SplitSeq(*udpPort, ",") {
		port, err := strconv.Atoi(p)
		if err != nil {
			return nil, fmt.Errorf("agnhost netexec: --udp-port=%s: %w", *udpPort, err)
		}
		if port > 0 {
			n.udpPorts = append(n.udpPorts, port)
		}
	}
	return n, nil
}

// Run implements Server.
func (n *netexec) Run(ctx context.Context) error {
	var open []func(context.Context) (service, error)
	if n.httpPort > 0 {
		open = append(open, httpService(n.ctx.NetNS, n.httpPort, n.mux(), n.ctx.Stderr))
	}
	for _, port := range n.udpPorts {
		open = append(open, udpService(n.ctx.NetNS, port, n.packet))
	}
	_, _ = fmt.Fprintf(n.ctx.Stdout, "Started HTTP server on port %d\n", n.httpPort)
	// A request to /exit ends the program with a code of its own.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case code := <-n.exit:
			cancel(&ExitError{Code: code})
		case <-ctx.Done():
		}
	})
	err := runAll(ctx, open...)
	var exit *ExitError
	if errors.As(context.Cause(ctx), &exit) {
		err = exit
		if exit.Code == 0 {
			err = nil
		}
	}
	cancel(nil)
	watch.Wait()
	return err
}

// packet answers a UDP request: "echo TEXT", "hostname" or "clientip".
func (n *netexec) packet(data []byte, from netip.AddrPort) []byte {
	word, rest, _ := strings.Cut(strings.TrimRight(string(data), "\n"), " ")
	switch strings.ToLower(word) {
	case "echo":
		return []byte(rest)
	case "hostname":
		return []byte(n.ctx.hostname())
	case "clientip":
		return []byte(from.String())
	}
	return nil
}

// mux is what the HTTP port knows.
func (n *netexec) mux() http.Handler {
	say := func(f func(r *http.Request) string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, f(r)) }
	}
	m := http.NewServeMux()
	m.HandleFunc("/", say(func(*http.Request) string { return "NOW: " + time.Now().String() }))
	m.HandleFunc("/echo", func(w http.ResponseWriter, r *http.Request) {
		if code, err := strconv.Atoi(r.FormValue("code")); err == nil && code >= 200 && code < 600 {
			w.WriteHeader(code)
		}
		_, _ = io.WriteString(w, r.FormValue("msg"))
	})
	m.HandleFunc("/clientip", say(func(r *http.Request) string { return r.RemoteAddr }))
	m.HandleFunc("/header", say(func(r *http.Request) string { return r.Header.Get(r.FormValue("key")) }))
	for _, path := range []string{"/hostname", "/hostName"} {
		m.HandleFunc(path, say(func(*http.Request) string { return n.ctx.hostname() }))
	}
	for _, path := range []string{"/healthz", "/healthCheck"} {
		m.HandleFunc(path, say(func(*http.Request) string { return "" }))
	}
	m.HandleFunc("/exit", n.serveExit)
	m.HandleFunc("/redirect", func(w http.ResponseWriter, r *http.Request) {
		code, err := strconv.Atoi(r.FormValue("code"))
		if err != nil || code < 300 || code > 399 {
			code = http.StatusFound
		}
		http.Redirect(w, r, r.FormValue("location"), code)
	})
	m.HandleFunc("/dial", n.serveDial)
	m.HandleFunc("/shell", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "kplab's netexec runs no commands; use kubectl exec", http.StatusNotImplemented)
	})
	return n.headers(m)
}

// headers adds who answered and logs the request.
func (n *netexec) headers(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(HeaderPod, n.ctx.Pod.Name)
		w.Header().Set(HeaderNode, n.ctx.Pod.Node)
		w.Header().Set(HeaderClient, addressOf(r.RemoteAddr))
		_, _ = fmt.Fprintf(n.ctx.Stdout, "%s %s %s from %s\n", time.Now().Format(time.RFC3339), r.Method, r.RequestURI, r.RemoteAddr)
		next.ServeHTTP(w, r)
	})
}

// serveExit ends the program: ?code=N, and ?wait=DURATION before that.
func (n *netexec) serveExit(w http.ResponseWriter, r *http.Request) {
	code, err := strconv.Atoi(r.FormValue("code"))
	if r.FormValue("code") == "" {
		code, err = 0, nil
	}
	wait := time.Duration(0)
	if v := r.FormValue("wait"); v != "" && err == nil {
		wait, err = time.ParseDuration(v)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-r.Context().Done():
			return
		}
	}
	n.once.Do(func() { n.exit <- code })
}

// dialTimeout bounds each request of /dial, and maxTries how many there may be.
const (
	dialTimeout = 5 * time.Second
	maxTries    = 100
)

// serveDial sends requests on from this pod: ?request=hostname&protocol=http&
// host=H&port=P&tries=N, and answers with what came back.
func (n *netexec) serveDial(w http.ResponseWriter, r *http.Request) {
	tries, err := strconv.Atoi(r.FormValue("tries"))
	if err != nil || tries < 1 {
		tries = 1
	}
	address := net.JoinHostPort(r.FormValue("host"), r.FormValue("port"))
	protocol := strings.ToLower(r.FormValue("protocol"))
	if protocol == "" {
		protocol = "http"
	}
	if protocol != "http" && protocol != "udp" {
		http.Error(w, "protocol: want http or udp", http.StatusBadRequest)
		return
	}
	out := struct {
		Responses []string `json:"responses,omitempty"`
		Errors    []string `json:"errors,omitempty"`
	}{}
	for range min(tries, maxTries) {
		answer, err := n.ask(r.Context(), protocol, address, r.FormValue("request"))
		if err != nil {
			out.Errors = append(out.Errors, err.Error())
			continue
		}
		out.Responses = append(out.Responses, answer)
	}
	data, err := json.Marshal(out)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(data)
}

// ask sends one request from the pod's namespace.
func (n *netexec) ask(ctx context.Context, protocol, address, request string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	if protocol == "http" {
		client := &http.Client{Transport: &http.Transport{DialContext: n.ctx.NetNS.Dial, DisableKeepAlives: true}}
		target := url.URL{Scheme: "http", Host: address, Path: "/"}
		if p, err := url.Parse("/" + strings.TrimPrefix(request, "/")); err == nil {
			target.Path, target.RawQuery = p.Path, p.RawQuery
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
		if err != nil {
			return "", err
		}
		resp, err := client.Do(req)
		if err != nil {
			return "", err
		}
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxDatagram))
		return string(body), errors.Join(err, resp.Body.Close())
	}
	conn, err := n.ctx.NetNS.Dial(ctx, "udp", address)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	if d, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(d); err != nil {
			return "", err
		}
	}
	if _, err := io.WriteString(conn, request); err != nil {
		return "", err
	}
	buf := make([]byte, maxDatagram)
	got, err := conn.Read(buf)
	return string(buf[:got]), err
}
