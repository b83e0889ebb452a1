// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// headerPatience bounds how long a client may take for a request's headers, as web
// servers do.
const headerPatience = 60 * time.Second

// idlePatience is how long an idle connection is kept.
const idlePatience = 65 * time.Second

// A program that this process starts has, until it begins, a copy of every socket
// here: the port of a server that has just ended may be taken for as long as that,
// by nobody. portPatience is how long one is tried that is taken.
const (
	portPatience = 250 * time.Millisecond
	portEvery    = 5 * time.Millisecond
)

// service is a socket that is open and can be served.
type service interface {
	// serve serves until ctx ends and then closes everything at once.
	serve(ctx context.Context) error
	close()
}

// runAll opens every service, or none, and serves until ctx ends or one fails.
func runAll(ctx context.Context, open ...func(context.Context) (service, error)) error {
	var services []service
	for _, f := range open {
		s, err := openPatiently(ctx, f)
		if err != nil {
			for _, s := range services {
				s.close()
			}
			return err
		}
		services = append(services, s)
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, s := range services {
		group.Go(func() error { return s.serve(ctx) })
	}
	return group.Wait()
}

// openPatiently opens a service whose port may be about to become free.
func openPatiently(ctx context.Context, open func(context.Context) (service, error)) (service, error) {
	until := time.Now().Add(portPatience)
	for {
		s, err := open(ctx)
		if !errors.Is(err, unix.EADDRINUSE) || time.Now().After(until) {
			return s, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(portEvery):
		}
	}
}

// whenEnds calls f when ctx ends. The returned function takes that back or, when it
// is too late, waits for f: a socket is closed only when its Close has returned.
func whenEnds(ctx context.Context, f func()) (settle func()) {
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		f()
	})
	return func() {
		if !stop() {
			<-done
		}
	}
}

// tracked is a listener that knows the connections it has accepted.
type tracked struct {
	net.Listener
	mu    sync.Mutex
	conns map[*trackedConn]struct{}
	ended bool
}

// trackedConn is an accepted connection.
type trackedConn struct {
	net.Conn
	of *tracked
}

// listen opens a TCP port on all addresses of the namespace.
func listen(ctx context.Context, ns *netns.NS, port int) (*tracked, error) {
	l, err := ns.Listen(ctx, "tcp", ":"+strconv.Itoa(port))
	if err != nil {
		return nil, err
	}
	return &tracked{Listener: l, conns: make(map[*trackedConn]struct{})}, nil
}

// Accept implements net.Listener.
func (t *tracked) Accept() (net.Conn, error) {
	c, err := t.Listener.Accept()
	if err != nil {
		return nil, err
	}
	tc := &trackedConn{Conn: c, of: t}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		reset(c)
		return nil, net.ErrClosed
	}
	t.conns[tc] = struct{}{}
	return tc, nil
}

// Close forgets the connection and closes it as its protocol does.
func (c *trackedConn) Close() error {
	c.of.mu.Lock()
	delete(c.of.conns, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// reset ends a connection without waiting for the peer: a socket that waits would
// keep the removed pod's namespace, and its address, for minutes.
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // fails on a closed one
	}
	_ = c.Close()
}

// end closes the listener and resets what it has accepted.
func (t *tracked) end() {
	_ = t.Close()
	t.mu.Lock()
	t.ended = true
	conns := t.conns
	t.conns = make(map[*trackedConn]struct{})
	t.mu.Unlock()
	for c := range conns {
		reset(c.Conn)
	}
}

// streams serves a protocol on TCP: one goroutine a connection.
type streams struct {
	*tracked
	handle func(net.Conn)
}

// tcpService opens a port whose connections handle serves; handle returns when the
// connection ends and need not close it.
func tcpService(ns *netns.NS, port int, handle func(net.Conn)) func(context.Context) (service, error) {
	return func(ctx context.Context) (service, error) {
		l, err := listen(ctx, ns, port)
		if err != nil {
			return nil, err
		}
		return &streams{l, handle}, nil
	}
}

func (s *streams) close() { s.end() }

func (s *streams) serve(ctx context.Context) error {
	defer whenEnds(ctx, s.end)()
	var open sync.WaitGroup
	defer open.Wait()
	for {
		c, err := s.Accept()
		if err != nil {
			s.end()
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		open.Go(func() {
			s.handle(c)
			_ = c.Close()
		})
	}
}

// web serves HTTP on one port.
type web struct {
	*tracked
	server *http.Server
	active *sync.WaitGroup // requests in handlers
}

// httpService opens a port with an HTTP handler.
func httpService(ns *netns.NS, port int, handler http.Handler, stderr io.Writer) func(context.Context) (service, error) {
	return func(ctx context.Context) (service, error) {
		l, err := listen(ctx, ns, port)
		if err != nil {
			return nil, err
		}
		active := &sync.WaitGroup{}
		return &web{l, &http.Server{
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				active.Add(1)
				defer active.Done()
				handler.ServeHTTP(w, r)
			}),
			ReadHeaderTimeout: headerPatience, IdleTimeout: idlePatience,
			ErrorLog: log.New(stderr, "", log.LstdFlags),
		}, active}, nil
	}
}

func (w *web) close() { w.end() }

func (w *web) serve(ctx context.Context) error {
	settle := whenEnds(ctx, func() {
		w.end()
		_ = w.server.Close()
	})
	err := w.server.Serve(w.tracked)
	settle()
	w.end()
	w.active.Wait() // their connections are gone, so they end
	if ctx.Err() != nil {
		return nil
	}
	return err
}
