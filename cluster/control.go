// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"time"
)

// ErrNotRunning says that no daemon runs the lab.
var ErrNotRunning = errors.New("the lab does not run")

// Answer of the control socket when something failed.
type failure struct {
	Error  string   `json:"error"`
	Behind []string `json:"behind,omitempty"`
}

// openControl opens the lab's socket, so that a command typed right after the
// start finds it: it is answered once Wait serves it.
func (l *Lab) openControl(ctx context.Context) error {
	path := l.paths.Socket()
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the old control socket: %w", err)
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return fmt.Errorf("open the control socket (a path of more than 107 bytes is too long; set KPLAB_RUN to a shorter one): %w", err)
	}
	l.control = ln
	if err := os.Chmod(path, 0o600); err != nil {
		return fmt.Errorf("protect the control socket: %w", err)
	}
	return nil
}

// serveControl answers the commands of the same user on the lab's socket until
// ctx ends.
func (l *Lab) serveControl(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, r *http.Request) {
		answer(w, l.Status(), nil)
	})
	mux.HandleFunc("POST /settle", func(w http.ResponseWriter, r *http.Request) {
		answer(w, struct{}{}, l.Settle(r.Context()))
	})
	mux.HandleFunc("GET /behind", func(w http.ResponseWriter, r *http.Request) {
		answer(w, l.behind(l.api.NewestRevisions()), nil)
	})
	mux.HandleFunc("GET /rules", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		text, err := l.Rules(q.Get("node"), q.Get("mode"), q.Get("layout"), q.Get("service"))
		answer(w, text, err)
	})
	mux.HandleFunc("POST /proxy", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		if q.Has("proof") {
			text, err := l.ProveProxy(r.Context(), q.Get("node"), proxyConfigOf(q))
			answer(w, text, err)
			return
		}
		answer(w, struct{}{}, l.SetProxy(r.Context(), q.Get("node"), proxyConfigOf(q)))
	})
	l.serveFaults(mux)
	l.serveHistory(mux)
	mux.HandleFunc("GET /lb", func(w http.ResponseWriter, r *http.Request) {
		answer(w, l.LoadBalancer(), nil)
	})
	mux.HandleFunc("POST /lb", func(w http.ResponseWriter, r *http.Request) {
		answer(w, struct{}{}, l.SetLoadBalancer(r.Context(), r.URL.Query().Get("pool")))
	})
	exposing, endExposed := context.WithCancel(ctx)
	open := newExposures(exposing)
	defer func() { endExposed(); open.wg.Wait() }()
	l.routeExpose(mux, open)
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l.control) }()
	select {
	case err := <-done:
		return fmt.Errorf("control socket: %w", err)
	case <-ctx.Done():
		// Answers under way are short, but for settle, whose client sees the end.
		shut, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if srv.Shutdown(shut) != nil {
			_ = srv.Close() // cuts off who still waits; the listener is closed already
		}
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("control socket: %w", err)
		}
		return nil
	}
}

func answer(w http.ResponseWriter, v any, err error) {
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		f := failure{Error: err.Error()}
		var u *UnsettledError
		if errors.As(err, &u) {
			f.Behind = u.Behind
		}
		w.WriteHeader(http.StatusConflict)
		v = f
	}
	// The reader may be gone; there is nobody left to tell.
	_ = json.NewEncoder(w).Encode(v)
}

// Client speaks with the daemon of a running lab.
type Client struct {
	name  string
	paths Paths
	http  http.Client
}

// Connect returns a client of the lab called name. The error is ErrNotRunning,
// wrapped, when no daemon answers.
func Connect(name string) (*Client, error) {
	if err := ValidateName(name); err != nil {
		return nil, err
	}
	paths := PathsOf(name)
	c := &Client{name: name, paths: paths}
	c.http.Transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", paths.Socket())
	}}
	if _, running := readDaemon(paths.Daemon()); !running {
		return nil, fmt.Errorf("lab %q: %w; start it with `kplab up%s`", name, ErrNotRunning, nameFlag(name))
	}
	return c, nil
}

// Status asks the daemon how the lab is.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var s Status
	return s, c.call(ctx, http.MethodGet, "/status", &s)
}

// Settle waits as Lab.Settle does; timeout 0 means no limit but ctx.
func (c *Client) Settle(ctx context.Context, timeout time.Duration) error {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	err := c.call(ctx, http.MethodPost, "/settle", nil)
	if errors.Is(err, context.DeadlineExceeded) {
		// The daemon saw the end of the request too; ask it who is behind.
		again, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		var behind []string
		if e := c.call(again, http.MethodGet, "/behind", &behind); e == nil && len(behind) > 0 {
			return &UnsettledError{Behind: behind}
		}
		return &UnsettledError{Behind: []string{"objects are still being written"}}
	}
	return err
}

// Rules asks for the text of one node's Service rules, as [Lab.Rules] gives it.
func (c *Client) Rules(ctx context.Context, node, mode, layout, service string) (string, error) {
	var text string
	return text, c.call(ctx, http.MethodGet, "/rules?"+url.Values{"node": {node}, "mode": {mode}, "layout": {layout}, "service": {service}}.Encode(), &text)
}

// SetProxy changes the mode of a node's proxy, of all nodes' with node "", as
// [Lab.SetProxy] does.
func (c *Client) SetProxy(ctx context.Context, node string, want ProxyConfig) error {
	return c.call(ctx, http.MethodPost, "/proxy?"+want.values(node).Encode(), nil)
}

// ProveProxy is SetProxy, and says what the change did, as [Lab.ProveProxy] does.
func (c *Client) ProveProxy(ctx context.Context, node string, want ProxyConfig) (string, error) {
	values := want.values(node)
	values.Set("proof", "true")
	var text string
	return text, c.call(ctx, http.MethodPost, "/proxy?"+values.Encode(), &text)
}

// values and proxyConfigOf carry the settings of a proxy in a request.
func (p ProxyConfig) values(node string) url.Values {
	return url.Values{
		"node": {node}, "mode": {p.Mode}, "layout": {p.NFTLayout}, "ipvs-scheduler": {p.IPVS.Scheduler},
		"ipvs-strict-arp": {strconv.FormatBool(p.IPVS.StrictARP)}, "ipvs-fallback": {strconv.FormatBool(p.IPVS.Fallback)},
	}
}

func proxyConfigOf(q url.Values) ProxyConfig {
	yes := strconv.FormatBool(true)
	return ProxyConfig{Mode: q.Get("mode"), NFTLayout: q.Get("layout"), IPVS: IPVSConfig{
		Scheduler: q.Get("ipvs-scheduler"), StrictARP: q.Get("ipvs-strict-arp") == yes, Fallback: q.Get("ipvs-fallback") == yes,
	}}
}

// send asks the daemon; the caller closes the answer's body.
func (c *Client) send(ctx context.Context, method, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://kplab"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if errors.Is(err, os.ErrPermission) {
		return nil, fmt.Errorf("lab %q: its daemon answers only root: call kplab with sudo: %w", c.name, err)
	} else if err != nil {
		return nil, fmt.Errorf("lab %q: ask its daemon: %w", c.name, err)
	}
	return resp, nil
}

func (c *Client) call(ctx context.Context, method, path string, out any) error {
	resp, err := c.send(ctx, method, path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("lab %q: read its daemon's answer: %w", c.name, err)
	}
	if resp.StatusCode != http.StatusOK {
		var f failure
		if json.Unmarshal(body, &f) == nil && len(f.Behind) > 0 {
			return &UnsettledError{Behind: f.Behind}
		}
		if f.Error == "" {
			f.Error = string(bytes.TrimSpace(body))
		}
		return errors.New(f.Error)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(body, out)
}
