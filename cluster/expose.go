// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kplab/kplab/internal/forward"
)

// udpIdle is how long an exposed UDP port remembers a client that says nothing.
const udpIdle = 60 * time.Second

// ExposeRequest asks for a port on the host's loopback that leads into the lab.
type ExposeRequest struct {
	// Target is svc/NAME[:PORT], pod/NAME[:PORT] or ADDRESS:PORT.
	Target string
	// Namespace of a Service or pod that is named without one.
	Namespace string
	// Listen is the address on the host's loopback; port 0 is any that is free.
	Listen string
	// Proto is tcp or udp; empty is what the Service's port has, else tcp.
	Proto string
	// From is the node, or "outside", where connections enter the lab. Empty is
	// outside, and for a pod its node.
	From string
	// Detach keeps the port until it is stopped or the lab is.
	Detach bool
}

// Exposed is one such port.
type Exposed struct {
	ID     int    `json:"id"`
	Listen string `json:"listen"`
	Proto  string `json:"proto"`
	Target string `json:"target"`
	// Path says what a connection goes through now.
	Path string `json:"path"`
}

// exposures are the exposed ports of a lab.
type exposures struct {
	ctx  context.Context
	wg   sync.WaitGroup
	mu   sync.Mutex
	next int
	all  map[int]*exposure
}

type exposure struct {
	Exposed
	cancel context.CancelFunc
	done   chan struct{}
}

func newExposures(ctx context.Context) *exposures {
	return &exposures{ctx: ctx, all: map[int]*exposure{}}
}

// listenAddress reads where to listen: ADDRESS:PORT, :PORT or PORT, on the loopback.
func listenAddress(text string) (netip.AddrPort, error) {
	if !strings.Contains(text, ":") {
		text = ":" + text
	}
	if strings.HasPrefix(text, ":") {
		text = hostAddress.String() + text
	}
	a, err := netip.ParseAddrPort(text)
	if err != nil {
		return a, fmt.Errorf("listen address %q: want 127.0.0.1:PORT", text)
	}
	if !a.Addr().IsLoopback() {
		return a, fmt.Errorf("listen address %s: a lab opens ports on the host's loopback only, so that nobody else can come in; want 127.0.0.1:%d", a, a.Port())
	}
	return a, nil
}

// expose opens a port. report hears about connections that could not be made.
func (l *Lab) expose(x *exposures, r ExposeRequest, report func(error)) (*exposure, error) {
	at, err := listenAddress(cmp.Or(r.Listen, hostAddress.String()+":0"))
	if err != nil {
		return nil, err
	}
	way, err := l.wayTo(r)
	if err != nil {
		return nil, err
	}
	proto := way.proto
	dial := func(ctx context.Context) (net.Conn, error) {
		// Anew each time: a pod or an address may be another by now.
		way, err := l.wayTo(r)
		if err != nil {
			return nil, err
		}
		ns, err := l.runtime.NetNS(way.ns)
		if err != nil {
			return nil, err
		}
		c, err := ns.Dial(ctx, proto, way.addr.String())
		if err != nil {
			return nil, fmt.Errorf("from %s to %s: %w", way.from, way.addr, err)
		}
		return c, nil
	}
	ctx, cancel := context.WithCancel(x.ctx)
	e := &exposure{Exposed: Exposed{Proto: proto, Target: way.target, Path: way.path}, cancel: cancel, done: make(chan struct{})}
	var lc net.ListenConfig
	var serve func() error
	if proto == "udp" {
		conn, err := lc.ListenPacket(ctx, proto, at.String())
		if err != nil {
			cancel()
			return nil, listenError(at, proto, err)
		}
		e.Listen = conn.LocalAddr().String()
		serve = func() error { return forward.UDP(ctx, conn, dial, udpIdle, report) }
	} else {
		ln, err := lc.Listen(ctx, proto, at.String())
		if err != nil {
			cancel()
			return nil, listenError(at, proto, err)
		}
		e.Listen = ln.Addr().String()
		serve = func() error { return forward.TCP(ctx, ln, dial, report) }
	}
	x.mu.Lock()
	x.next++
	e.ID = x.next
	x.all[e.ID] = e
	x.mu.Unlock()
	x.wg.Go(func() {
		defer close(e.done)
		if err := serve(); err != nil {
			report(err)
			l.log.Warn("an exposed port ended", "listen", e.Listen, "target", e.Target, "error", err)
		}
		cancel()
		x.mu.Lock()
		defer x.mu.Unlock()
		delete(x.all, e.ID)
	})
	return e, nil
}

func listenError(at netip.AddrPort, proto string, err error) error {
	return fmt.Errorf("open %s port %s on the host; choose another with --listen, or port 0 for any: %w", proto, at, err)
}

// list returns the ports in the order of their numbers.
func (x *exposures) list() []Exposed {
	x.mu.Lock()
	defer x.mu.Unlock()
	out := []Exposed{}
	for _, id := range slices.Sorted(maps.Keys(x.all)) {
		out = append(out, x.all[id].Exposed)
	}
	return out
}

// stop closes one port, or all with id 0, and returns which.
func (x *exposures) stop(id int) ([]Exposed, error) {
	x.mu.Lock()
	var ending []*exposure
	for _, i := range slices.Sorted(maps.Keys(x.all)) {
		if id == 0 || i == id {
			ending = append(ending, x.all[i])
		}
	}
	x.mu.Unlock()
	if id != 0 && len(ending) == 0 {
		return nil, fmt.Errorf("no exposed port has number %d; `kplab expose list` shows them", id)
	}
	out := []Exposed{}
	for _, e := range ending {
		e.cancel()
		<-e.done
		out = append(out, e.Exposed)
	}
	return out, nil
}

// routeExpose adds the ways of the control socket.
func (l *Lab) routeExpose(mux *http.ServeMux, x *exposures) {
	mux.HandleFunc("GET /expose", func(w http.ResponseWriter, _ *http.Request) { answer(w, x.list(), nil) })
	mux.HandleFunc("DELETE /expose", func(w http.ResponseWriter, r *http.Request) {
		id, err := strconv.Atoi(r.URL.Query().Get("id"))
		if err != nil {
			answer(w, nil, fmt.Errorf("number of an exposed port: %w", err))
			return
		}
		stopped, err := x.stop(id)
		answer(w, stopped, err)
	})
	mux.HandleFunc("POST /expose", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		req := ExposeRequest{
			Target: q.Get("target"), Namespace: q.Get("namespace"), Listen: q.Get("listen"),
			Proto: q.Get("proto"), From: q.Get("from"), Detach: q.Get("detach") != "",
		}
		failures := make(chan error, 16)
		e, err := l.expose(x, req, func(err error) {
			l.log.Debug("not forwarded", "target", req.Target, "error", err)
			select {
			case failures <- err:
			default: // the reader is slow; one failure is like another
			}
		})
		if err != nil || req.Detach {
			var out any
			if err == nil {
				out = e.Exposed
			}
			answer(w, out, err)
			return
		}
		// The port lives as long as the question does. One line of JSON for the
		// port, then one for each failure.
		answer(w, e.Exposed, nil)
		flush := http.NewResponseController(w)
		defer func() { e.cancel(); <-e.done }()
		for flush.Flush() == nil {
			select {
			case <-r.Context().Done():
				return
			case <-e.done:
				return
			case err := <-failures:
				_ = json.NewEncoder(w).Encode(failure{Error: err.Error()}) // Flush finds a reader gone
			}
		}
	})
}

// Expose opens a port on the host's loopback that leads into the lab. With Detach it
// returns at once; else opened is called with the port, failed with what could not be
// forwarded, and Expose returns when ctx ends, which closes the port.
func (c *Client) Expose(ctx context.Context, r ExposeRequest, opened func(Exposed), failed func(string)) error {
	q := url.Values{"target": {r.Target}, "namespace": {r.Namespace}, "listen": {r.Listen}, "proto": {r.Proto}, "from": {r.From}}
	if r.Detach {
		q.Set("detach", "yes")
		var e Exposed
		if err := c.call(ctx, http.MethodPost, "/expose?"+q.Encode(), &e); err != nil {
			return err
		}
		opened(e)
		return nil
	}
	resp, err := c.send(ctx, http.MethodPost, "/expose?"+q.Encode())
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := json.NewDecoder(resp.Body)
	if resp.StatusCode != http.StatusOK {
		var f failure
		if err := lines.Decode(&f); err != nil {
			return fmt.Errorf("read the daemon's answer: %w", err)
		}
		return errors.New(f.Error)
	}
	var e Exposed
	if err := lines.Decode(&e); err != nil {
		return fmt.Errorf("read the daemon's answer: %w", err)
	}
	opened(e)
	for {
		var f failure
		if err := lines.Decode(&f); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return errors.New("the lab has ended, and the port with it")
		}
		failed(f.Error)
	}
}

// Exposed lists the open ports.
func (c *Client) Exposed(ctx context.Context) ([]Exposed, error) {
	var out []Exposed
	return out, c.call(ctx, http.MethodGet, "/expose", &out)
}

// Unexpose closes one port, or with id 0 all, and returns which it closed.
func (c *Client) Unexpose(ctx context.Context, id int) ([]Exposed, error) {
	var out []Exposed
	return out, c.call(ctx, http.MethodDelete, "/expose?id="+strconv.Itoa(id), &out)
}
