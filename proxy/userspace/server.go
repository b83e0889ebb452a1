// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/proxy"
)

// dialTimeouts is how long each try for a backend may take, as in kube-proxy of old: four
// tries, each with the next endpoint. A UDP socket connects at once to anybody.
var dialTimeouts = [...]time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second}

// errNoEndpoint says that a Service has nobody to serve a client.
var errNoEndpoint = errors.New("the Service has no endpoints")

// server is the listener of one Service port. Its goroutines belong to flows.
type server struct {
	id       portID
	port     uint16
	netNS    *netns.NS
	flows    *flows
	balancer balancer
	log      *slog.Logger
	idle     time.Duration
	// ctx ends when the listener closes; close ends it and returns when nothing is
	// accepted any more.
	ctx   context.Context
	close func()
	udp   *udpServer // nil for TCP
}

// held is a nodePort that is kept open, so that no process of the node takes it; packets
// to it are led to the proxy port before they could arrive here.
type held struct {
	owner  portID
	socket io.Closer
}

// open opens what a snapshot needs and is not open yet, and hands out the endpoints. It
// reports the Service ports whose nodePort somebody else holds, and whether a proxy port
// had to move for the same reason.
func (m *Mode) open(ctx context.Context, s *proxy.Snapshot) (busy map[portID]bool, moved bool, err error) {
	if m.flows == nil {
		m.flows = newFlows(m.opts.MaxFlows)
	}
	busy = map[portID]bool{}
	now := time.Now()
	wanted := map[portOwner]bool{}
	for _, p := range s.Services {
		if !served(p) {
			continue
		}
		srv := m.servers[idOf(p)]
		if srv == nil {
			asked := m.portOf(idOf(p))
			if srv, err = m.listen(ctx, idOf(p)); err != nil {
				return nil, false, fmt.Errorf("listen for Service %s: %w", p.ServicePortName, err)
			}
			moved = moved || srv.port != asked
			m.servers[srv.id] = srv
		}
		srv.balancer.set(p.Ready(), p.Affinity, now)
		if srv.udp != nil {
			srv.udp.keep(p.Serving)
		}
		if p.NodePort == 0 {
			continue
		}
		o := portOwner{p.Family, p.Protocol, p.NodePort}
		wanted[o] = true
		if err := m.hold(ctx, o, idOf(p)); err != nil {
			busy[idOf(p)] = true
			m.log.Error("nodePort is not served: somebody else has it open", "service", p.String(), "port", p.NodePort, "error", err)
		}
	}
	for o, h := range m.held {
		if !wanted[o] {
			_ = h.socket.Close() // nothing was ever written to it
			delete(m.held, o)
		}
	}
	return busy, moved, nil
}

// hold opens a nodePort for its Service.
func (m *Mode) hold(ctx context.Context, o portOwner, owner portID) error {
	if h := m.held[o]; h != nil {
		h.owner = owner
		return nil
	}
	socket, err := m.socket(ctx, o)
	if err != nil {
		return err
	}
	m.held[o] = &held{owner, socket}
	if l, ok := socket.(net.Listener); ok {
		m.flows.wg.Go(func() { refuse(l) })
	}
	return nil
}

// refuse resets what comes to a port that is only held: by an address on which the
// nodePort is not to be served.
func refuse(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		if t, ok := c.(*net.TCPConn); ok {
			_ = t.SetLinger(0)
		}
		_ = c.Close()
	}
}

// socket opens a port on all addresses of the node: a net.Listener or a *net.UDPConn.
func (m *Mode) socket(ctx context.Context, o portOwner) (io.Closer, error) {
	suffix := "4"
	if o.family == corev1.IPv6Protocol {
		suffix = "6"
	}
	at := fmt.Sprintf(":%d", o.port)
	switch {
	case o.protocol == corev1.ProtocolUDP && m.opts.NetNS == nil:
		return (&net.ListenConfig{}).ListenPacket(ctx, "udp"+suffix, at)
	case o.protocol == corev1.ProtocolUDP:
		return m.opts.NetNS.ListenPacket(ctx, "udp"+suffix, at)
	case m.opts.NetNS == nil:
		return (&net.ListenConfig{}).Listen(ctx, "tcp"+suffix, at)
	}
	return m.opts.NetNS.Listen(ctx, "tcp"+suffix, at)
}

// listen opens the proxy port of a Service port, or the next one that is free.
func (m *Mode) listen(ctx context.Context, id portID) (*server, error) {
	for {
		port := m.portOf(id)
		socket, err := m.socket(ctx, portOwner{id.family, id.Protocol, port})
		if errors.Is(err, unix.EADDRINUSE) && m.nextPort(id) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return m.serve(id, port, socket)
	}
}

// serve starts the loop that accepts on a socket.
func (m *Mode) serve(id portID, port uint16, socket io.Closer) (*server, error) {
	s := &server{id: id, port: port, netNS: m.opts.NetNS, flows: m.flows, idle: m.opts.UDPIdle, log: m.log.With("service", id.String())}
	ctx, cancel := context.WithCancel(m.flows.ctx)
	s.ctx = ctx
	loop := func() {}
	switch socket := socket.(type) {
	case net.Listener:
		loop = func() { s.acceptTCP(socket) }
	case *net.UDPConn:
		u, err := newUDPServer(s, socket)
		if err != nil {
			cancel()
			return nil, errors.Join(err, socket.Close())
		}
		s.udp = u
		loop = u.run
	default:
		cancel()
		return nil, errors.Join(fmt.Errorf("a socket of type %T", socket), socket.Close())
	}
	done := make(chan struct{})
	m.flows.wg.Go(func() {
		defer close(done)
		defer context.AfterFunc(ctx, func() { _ = socket.Close() })()
		loop()
		_ = socket.Close()
	})
	s.close = func() {
		cancel()
		<-done
	}
	return s, nil
}

// closeServers closes the listeners of Service ports that are not wanted, and with nil
// all of them. What was accepted goes on.
func (m *Mode) closeServers(wanted map[portID]bool) {
	for id, s := range m.servers {
		if !wanted[id] {
			s.close()
			delete(m.servers, id)
		}
	}
	for o, h := range m.held {
		if !wanted[h.owner] {
			_ = h.socket.Close()
			delete(m.held, o)
		}
	}
}

// dial connects to a backend for a client: up to four of them, each with more time than
// the one before.
func (s *server) dial(network string, client netip.Addr) (net.Conn, netip.AddrPort, error) {
	var errs []error
	for i, timeout := range dialTimeouts {
		to, ok := s.balancer.pick(client, i > 0, time.Now())
		if !ok {
			return nil, to, errors.Join(append(errs, errNoEndpoint)...)
		}
		// Not the listener's context: a client that was accepted is served, although
		// its Service may be gone by now.
		ctx, cancel := context.WithTimeout(s.flows.ctx, timeout)
		c, err := s.dialIn(ctx, network, to)
		cancel()
		if err == nil {
			return c, to, nil
		}
		errs = append(errs, err)
		if s.flows.ctx.Err() != nil {
			break
		}
		s.log.Debug("backend does not answer; trying the next", "endpoint", to.String(), "error", err)
	}
	return nil, netip.AddrPort{}, errors.Join(errs...)
}

func (s *server) dialIn(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	if s.netNS == nil {
		return (&net.Dialer{}).DialContext(ctx, network, to.String())
	}
	return s.netNS.Dial(ctx, network, to.String())
}

// serves says whether an endpoint is in a list.
func serves(list []netip.AddrPort, a netip.AddrPort) bool { return slices.Contains(list, a) }
