// SPDX-License-Identifier: Apache-2.0

// Package forward passes what arrives at a socket on to another place: TCP
// connections one by one with both their directions, UDP datagrams by the client that
// sends them. Where to is asked anew for each connection or client.
package forward

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

const (
	// dialTimeout is how long a client waits for the other side.
	dialTimeout = 10 * time.Second
	// maxClients bounds the UDP clients that are remembered at a time.
	maxClients = 1024
)

// Dial connects to the place that is forwarded to.
type Dial func(ctx context.Context) (net.Conn, error)

// Report hears why something was not forwarded. It may be called from several
// goroutines.
type Report func(error)

// TCP serves ln until ctx ends, and then cuts what is open; it closes ln. The end of
// one direction (half-close) is passed on and leaves the other open. A client whose
// connection cannot be made sees a reset.
func TCP(ctx context.Context, ln net.Listener, dial Dial, report Report) error {
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() }) // ends Accept
	defer stop()
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		client, err := ln.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed) {
				return err
			}
			return fmt.Errorf("accept on %s: %w", ln.Addr(), errors.Join(err, ln.Close()))
		}
		conns.Go(func() { one(ctx, client, dial, report) })
	}
}

// one forwards a connection.
func one(ctx context.Context, client net.Conn, dial Dial, report Report) {
	dialing, cancel := context.WithTimeout(ctx, dialTimeout)
	server, err := dial(dialing)
	cancel()
	if err != nil {
		reset(client)
		if ctx.Err() == nil {
			report(err)
		}
		return
	}
	stop := context.AfterFunc(ctx, func() { reset(client); reset(server) })
	defer stop()
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{server, client}, {client, server}} {
		both.Go(func() {
			if _, err := io.Copy(way[0], way[1]); err != nil {
				// One side broke off: so does the other.
				reset(client)
				reset(server)
				return
			}
			if half, ok := way[0].(interface{ CloseWrite() error }); ok {
				_ = half.CloseWrite() // the side may be gone, which its own copy finds
			}
		})
	}
	both.Wait()
	_, _ = client.Close(), server.Close() // both ends are through
}

// reset closes a connection so that its peer sees a break, not an orderly end.
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // closed already: nothing to break
	}
	_ = c.Close()
}

// UDP serves conn until ctx ends; it closes conn. Each client gets a socket of its
// own, so that answers find their way, until nothing passed for idle.
func UDP(ctx context.Context, conn net.PacketConn, dial Dial, idle time.Duration, report Report) error {
	u := &udp{conn: conn, idle: idle, clients: map[string]net.Conn{}}
	stop := context.AfterFunc(ctx, u.close)
	defer stop()
	defer u.answers.Wait()
	defer u.close()
	buf := make([]byte, 64<<10)
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("read from %s: %w", conn.LocalAddr(), err)
		}
		server, err := u.server(ctx, from, dial)
		if err == nil {
			_ = server.SetReadDeadline(time.Now().Add(idle)) // a closed one fails in Write
			_, err = server.Write(buf[:n])
		}
		// A refusal is about a datagram of before; the next one is a new try.
		if err != nil && ctx.Err() == nil {
			report(err)
		}
	}
}

type udp struct {
	conn    net.PacketConn
	idle    time.Duration
	answers sync.WaitGroup

	mu      sync.Mutex
	clients map[string]net.Conn
	closed  bool
}

// server returns the socket of a client, a new one for a client not seen before.
func (u *udp) server(ctx context.Context, from net.Addr, dial Dial) (net.Conn, error) {
	key := from.String()
	u.mu.Lock()
	server, known, count := u.clients[key], u.clients[key] != nil, len(u.clients)
	u.mu.Unlock()
	if known {
		return server, nil
	}
	if count >= maxClients {
		return nil, fmt.Errorf("more than %d clients at a time; %s is not served", maxClients, from)
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	server, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed {
		return nil, errors.Join(net.ErrClosed, server.Close())
	}
	u.clients[key] = server
	u.answers.Go(func() { u.answer(key, from, server) })
	return server, nil
}

// answer passes back what the server says, until it is silent for too long.
func (u *udp) answer(key string, to net.Addr, server net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := server.Read(buf)
		if err != nil {
			break // idle, refused, or closed: a next datagram begins anew
		}
		_ = server.SetReadDeadline(time.Now().Add(u.idle))
		if _, err := u.conn.WriteTo(buf[:n], to); err != nil {
			break
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.clients, key)
	_ = server.Close()
}

func (u *udp) close() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closed = true
	_ = u.conn.Close()
	for _, c := range u.clients {
		_ = c.Close() // its answer loop ends and forgets it
	}
}
