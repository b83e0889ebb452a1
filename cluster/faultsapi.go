// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"

	"github.com/kplab/kplab/internal/gate"
)

// stoppable is a listener that can be stopped and started again while somebody accepts
// from it. Stopped, its port is closed, so that clients are refused, and the connections
// that it gave out are cut: what they see of a server that was ended.
type stoppable struct {
	open func(context.Context) (net.Listener, error)
	addr net.Addr
	gate gate.Gate
	end  context.Context // done once Close was called
	done context.CancelFunc

	mu      sync.Mutex
	current net.Listener // nil while stopped
	conns   map[*cuttable]struct{}
}

// newStoppable wraps first; open makes another on the same port.
func newStoppable(first net.Listener, open func(context.Context) (net.Listener, error)) *stoppable {
	s := &stoppable{open: open, addr: first.Addr(), current: first, conns: map[*cuttable]struct{}{}}
	s.end, s.done = context.WithCancel(context.Background())
	return s
}

// Accept implements net.Listener. While the listener is stopped it waits.
func (s *stoppable) Accept() (net.Conn, error) {
	for {
		if s.gate.Wait(s.end) != nil {
			return nil, net.ErrClosed
		}
		s.mu.Lock()
		current := s.current
		s.mu.Unlock()
		if current == nil {
			continue // stopped between the two
		}
		c, err := current.Accept()
		if err == nil {
			return s.keep(c), nil
		}
		if s.end.Err() != nil {
			return nil, net.ErrClosed
		}
		if !errors.Is(err, net.ErrClosed) {
			return nil, err
		}
	}
}

func (s *stoppable) keep(c net.Conn) net.Conn {
	k := &cuttable{Conn: c, owner: s}
	s.mu.Lock()
	s.conns[k] = struct{}{}
	stopped := s.current == nil
	s.mu.Unlock()
	if stopped {
		_ = k.Close() // accepted just before the stop; whoever reads from it sees the end
	}
	return k
}

// Addr implements net.Listener.
func (s *stoppable) Addr() net.Addr { return s.addr }

// Close implements net.Listener; connections live on.
func (s *stoppable) Close() error {
	s.done()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current == nil {
		return nil
	}
	return s.current.Close()
}

// set stops the listener or starts it. What is so already is success.
func (s *stoppable) set(ctx context.Context, stopped bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case stopped && s.current != nil:
		s.gate.Close()
		err := s.current.Close()
		s.current = nil
		for c := range s.conns {
			delete(s.conns, c)
			_ = c.Conn.Close() // the peer may have closed it
		}
		return err
	case !stopped && s.current == nil:
		next, err := s.open(ctx)
		if err != nil {
			return fmt.Errorf("open the API's port %s again: %w", s.addr, err)
		}
		s.current = next
		s.gate.Open()
	}
	return nil
}

// cuttable is a connection that its listener knows.
type cuttable struct {
	net.Conn
	owner *stoppable
}

func (c *cuttable) Close() error {
	c.owner.mu.Lock()
	delete(c.owner.conns, c)
	c.owner.mu.Unlock()
	return c.Conn.Close()
}

// apiGate stands between a part of the lab and the API: it can refuse the part's
// requests, as a port that is closed does, or hold them up, as a part that is frozen
// would.
type apiGate struct {
	refused atomic.Bool
	hold    gate.Gate
}

// through returns cfg for a client whose requests pass the gate.
func (g *apiGate) through(cfg *rest.Config) *rest.Config {
	c := rest.CopyConfig(cfg)
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return gated{g, next} })
	return c
}

type gated struct {
	gate *apiGate
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t gated) RoundTrip(r *http.Request) (*http.Response, error) {
	err := t.gate.hold.Wait(r.Context())
	if err == nil && t.gate.refused.Load() {
		err = &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", unix.ECONNREFUSED)}
	}
	if err == nil {
		return t.next.RoundTrip(r)
	}
	if r.Body != nil {
		_ = r.Body.Close() // what a RoundTripper owes its caller
	}
	return nil, err
}
