// SPDX-License-Identifier: Apache-2.0

// Package pktinfo lets a UDP server answer from the address that was asked. A socket
// that listens on all addresses would answer from the one that routing prefers;
// clients, and NAT, drop what comes from another than they sent to.
package pktinfo

import (
	"errors"
	"net"

	"golang.org/x/sys/unix"
)

// Ask makes the kernel tell with each packet where it was sent to.
// Sent back with the reply, the same message chooses the reply's source.
func Ask(conn *net.UDPConn) error {
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

// Source turns the message about a packet's destination into one about a
// reply's source: the same, except that the link is left to routing.
func Source(oob []byte) []byte {
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
