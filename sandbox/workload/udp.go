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

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
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
		if err := askForDestination(conn); err != nil {
			return nil, errors.Join(fmt.Errorf("udp port %d: %w", port, err), conn.Close())
		}
		return &packets{conn, answer}, nil
	}
}

// askForDestination makes the kernel tell with each packet where it was sent to.
// Sent back with the reply, the same message chooses the reply's source.
func askForDestination(conn *net.UDPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var setErr error
	err = raw.Control(func(fd uintptr) {
		domain, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DOMAIN)
		switch {
		case err != nil:
			setErr = err
		case domain == unix.AF_INET6: // IPv4 too: its addresses come mapped
			setErr = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
		default:
			setErr = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
		}
	})
	return errors.Join(err, setErr)
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
		_, _, _ = p.conn.WriteMsgUDPAddrPort(reply, sourceFrom(oob[:oobn]), from)
	}
}

// sourceFrom turns the message about a packet's destination into one about a
// reply's source: the same, except that the link is left to routing.
func sourceFrom(oob []byte) []byte {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for _, m := range msgs {
		switch {
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= 16:
			var info unix.Inet6Pktinfo
			copy(info.Addr[:], m.Data[:16])
			return unix.PktInfo6(&info)
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= 12:
			var info unix.Inet4Pktinfo
			copy(info.Spec_dst[:], m.Data[8:12]) // the address in the packet's header
			return unix.PktInfo4(&info)
		}
	}
	return nil
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
