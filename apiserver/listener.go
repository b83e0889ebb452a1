// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"errors"
	"net"
	"sync"
)

// manyListener accepts from several listeners as if they were one, and knows
// the connections it gave out, so that stopping can cut those that remain.
type manyListener struct {
	listeners []net.Listener
	accepted  chan net.Conn
	done      chan struct{}
	once      sync.Once
	acceptors sync.WaitGroup

	mu    sync.Mutex
	conns map[*trackedConn]struct{}
}

// newManyListener starts one goroutine for each listener; Close ends them.
func newManyListener(listeners []net.Listener) *manyListener {
	m := &manyListener{
		listeners: listeners,
		accepted:  make(chan net.Conn),
		done:      make(chan struct{}),
		conns:     map[*trackedConn]struct{}{},
	}
	for _, l := range listeners {
		m.acceptors.Add(1)
		go m.acceptFrom(l)
	}
	return m
}

func (m *manyListener) acceptFrom(l net.Listener) {
	defer m.acceptors.Done()
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of file descriptors, or the peer is gone already: neither is
			// a reason to stop serving. The select keeps a stop possible.
			select {
			case <-m.done:
				return
			default:
				continue
			}
		}
		select {
		case m.accepted <- m.track(c):
		case <-m.done:
			c.Close()
			return
		}
	}
}

// Accept implements net.Listener.
func (m *manyListener) Accept() (net.Conn, error) {
	select {
	case c := <-m.accepted:
		return c, nil
	case <-m.done:
		return nil, net.ErrClosed
	}
}

// Close closes the listeners; accepted connections live on.
func (m *manyListener) Close() error {
	var errs []error
	m.once.Do(func() {
		close(m.done)
		for _, l := range m.listeners {
			errs = append(errs, l.Close())
		}
	})
	m.acceptors.Wait()
	return errors.Join(errs...)
}

// Addr is the address of the first listener.
func (m *manyListener) Addr() net.Addr { return m.listeners[0].Addr() }

// closeConns cuts what is still connected.
func (m *manyListener) closeConns() {
	m.mu.Lock()
	conns := make([]*trackedConn, 0, len(m.conns))
	for c := range m.conns {
		conns = append(conns, c)
	}
	m.mu.Unlock()
	for _, c := range conns {
		// The peer may have closed it already, which is the same.
		_ = c.Close()
	}
}

func (m *manyListener) track(c net.Conn) net.Conn {
	t := &trackedConn{Conn: c, owner: m}
	m.mu.Lock()
	m.conns[t] = struct{}{}
	m.mu.Unlock()
	return t
}

type trackedConn struct {
	net.Conn
	owner *manyListener
}

func (c *trackedConn) Close() error {
	c.owner.mu.Lock()
	delete(c.owner.conns, c)
	c.owner.mu.Unlock()
	return c.Conn.Close()
}
