// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/kplab/kplab/internal/pktinfo"
)

// maxDatagram is the largest UDP payload.
const maxDatagram = 64 << 10

// udpServer serves the UDP clients of one Service port. UDP has no connections, so a
// client is whoever sends from one address and port, and it ends when it was silent for
// a while. Each has a socket of its own towards its backend, whose answers can only be
// for it.
type udpServer struct {
	*server
	conn *net.UDPConn

	mu      sync.Mutex
	clients map[udpKey]*udpClient
}

// udpKey is a client, and the address that it sent to: answers come from there.
type udpKey struct {
	client netip.AddrPort
	source string // the message that makes them
}

type udpClient struct {
	conn    net.Conn
	backend netip.AddrPort
}

func newUDPServer(s *server, conn *net.UDPConn) (*udpServer, error) {
	if err := pktinfo.Ask(conn); err != nil {
		return nil, err
	}
	return &udpServer{server: s, conn: conn, clients: map[udpKey]*udpClient{}}, nil
}

// run passes datagrams on until the socket closes; the clients end with it.
func (u *udpServer) run() {
	buf, oob := make([]byte, maxDatagram), make([]byte, 128)
	for {
		n, oobn, _, from, err := u.conn.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) || u.ctx.Err() != nil {
			break
		}
		if err != nil {
			continue // an earlier answer found nobody
		}
		key := udpKey{from, string(pktinfo.Source(oob[:oobn]))}
		c := u.client(key)
		if c == nil {
			continue // nobody to serve it: datagrams get lost
		}
		if _, err := c.conn.Write(buf[:n]); err != nil {
			u.drop(key, c)
			continue
		}
		_ = c.conn.SetReadDeadline(time.Now().Add(u.idle))
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, c := range u.clients {
		_ = c.conn.Close()
	}
}

// client is who serves a sender, chosen now if nobody does.
func (u *udpServer) client(key udpKey) *udpClient {
	u.mu.Lock()
	defer u.mu.Unlock()
	if c := u.clients[key]; c != nil {
		return c
	}
	if !u.flows.tryTake() {
		u.log.Warn("a UDP client is not served: too many are", "client", key.client.String(), "limit", cap(u.flows.slots))
		return nil
	}
	conn, backend, err := u.dial("udp", key.client.Addr().Unmap())
	if err != nil {
		u.flows.release()
		u.log.Debug("a UDP client is not served", "client", key.client.String(), "error", err)
		return nil
	}
	c := &udpClient{conn, backend}
	u.clients[key] = c
	_ = conn.SetReadDeadline(time.Now().Add(u.idle))
	u.flows.wg.Go(func() {
		defer u.flows.release()
		u.answer(key, c)
	})
	return c
}

// answer passes a backend's datagrams to its client until the client has been silent, or
// the backend's port is closed.
func (u *udpServer) answer(key udpKey, c *udpClient) {
	defer u.drop(key, c)
	defer context.AfterFunc(u.ctx, func() { _ = c.conn.Close() })()
	buf := make([]byte, maxDatagram)
	for {
		n, err := c.conn.Read(buf)
		if err != nil {
			return
		}
		_ = c.conn.SetReadDeadline(time.Now().Add(u.idle))
		// An answer that cannot be sent is lost, as packets are.
		_, _, _ = u.conn.WriteMsgUDPAddrPort(buf[:n], []byte(key.source), key.client)
	}
}

// drop forgets a client.
func (u *udpServer) drop(key udpKey, c *udpClient) {
	u.mu.Lock()
	defer u.mu.Unlock()
	_ = c.conn.Close()
	if u.clients[key] == c {
		delete(u.clients, key)
	}
}

// keep lets go of the clients whose backend does not serve any more: a client that sends
// without a pause would never leave it.
func (u *udpServer) keep(serving []netip.AddrPort) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for key, c := range u.clients {
		if !serves(serving, c.backend) {
			_ = c.conn.Close()
			delete(u.clients, key)
		}
	}
}

// addrPort reads the address of a socket.
func addrPort(a net.Addr) (netip.AddrPort, bool) {
	p, err := netip.ParseAddrPort(a.String())
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port()), err == nil
}
