// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/pktinfo"
)

// maxDatagram is the largest UDP payload.
const maxDatagram = 64 << 10

// packets serves UDP on one port.
type packets struct {
	conn   *net.UDPConn
	answer func(data []byte, from netip.AddrPort) []byte
}

// udpService opens a port whose packets answer replies to; a nil reply is none. A
// reply comes from the address that was asked: a pod's namespace may have several,
// and clients, and NAT, drop what comes from another.
func udpService(ns *netns.NS, port int, answer func([]byte, netip.AddrPort) []byte) func(context.Context) (service, error) {
	return func(ctx context.Context) (service, error) {
		pc, err := ns.ListenPacket(ctx, "udp", ":"+strconv.Itoa(port))
		if err != nil {
			return nil, err
		}
		conn, ok := pc.(*net.UDPConn)
		if !ok {
			return nil, errors.Join(fmt.Errorf("udp port %d: got a %T", port, pc), pc.Close())
		}
		if err := pktinfo.Ask(conn); err != nil {
			return nil, errors.Join(fmt.Errorf("udp port %d: %w", port, err), conn.Close())
		}
		return &packets{conn, answer}, nil
	}
}

func (p *packets) close() { _ = p.conn.Close() } // nothing is buffered

func (p *packets) serve(ctx context.Context) error {
	defer whenEnds(ctx, p.close)()
	buf := make([]byte, maxDatagram)
	oob := make([]byte, 128)
	for {
		n, oobn, _, from, err := p.conn.ReadMsgUDPAddrPort(buf, oob)
		switch {
		case errors.Is(err, net.ErrClosed):
			return nil
		case errors.Is(err, syscall.ECONNREFUSED):
			continue // an earlier reply found nobody
		case err != nil:
			p.close()
			return err
		}
		reply := p.answer(buf[:n], netip.AddrPortFrom(from.Addr().Unmap(), from.Port()))
		if reply == nil {
			continue
		}
		// A reply that cannot be sent is lost, as packets are.
		_, _, _ = p.conn.WriteMsgUDPAddrPort(reply, pktinfo.Source(oob[:oobn]), from)
	}
}

// udpEcho sends every packet back.
type udpEcho struct{ ctx Context }

func newUDPEcho(c Context) (Server, error) { return &udpEcho{c}, nil }

// Run implements Server.
func (u *udpEcho) Run(ctx context.Context) error {
	var open []func(context.Context) (service, error)
	for _, port := range u.ctx.ports("UDP", 7) {
		open = append(open, udpService(u.ctx.NetNS, port, func(data []byte, _ netip.AddrPort) []byte { return data }))
	}
	return runAll(ctx, open...)
}
