// SPDX-License-Identifier: Apache-2.0

package announce

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// IPv6 asks by neighbour solicitations (RFC 4861), which go to a multicast address of
// the asked one, and is answered by advertisements. A packet socket sees every
// multicast frame of the link, so nothing has to be joined.
const (
	ip6Len       = 40
	solicitLen   = 24 // type, code, checksum, reserved, target
	typeSolicit  = 135
	typeAdvert   = 136
	protoICMPv6  = 58
	flagSolicit  = 1 << 30
	flagOverride = 1 << 29
)

// solicit is what matters of a solicitation.
type solicit struct {
	senderMAC net.HardwareAddr
	sender    netip.Addr
	target    netip.Addr
}

// parseSolicit reads a frame; false for what is no neighbour solicitation of somebody
// with an address: who has none yet looks whether it is taken, and the answer to that
// goes to all.
func parseSolicit(frame []byte) (solicit, bool) {
	if len(frame) < headerLen+ip6Len+solicitLen || binary.BigEndian.Uint16(frame[12:]) != unix.ETH_P_IPV6 {
		return solicit{}, false
	}
	ip, icmp := frame[headerLen:headerLen+ip6Len], frame[headerLen+ip6Len:]
	// A hop limit below 255 has come through a router.
	if ip[6] != protoICMPv6 || ip[7] != 255 || icmp[0] != typeSolicit || icmp[1] != 0 {
		return solicit{}, false
	}
	return solicit{
		senderMAC: net.HardwareAddr(frame[6:12]),
		sender:    netip.AddrFrom16([16]byte(ip[8:24])),
		target:    netip.AddrFrom16([16]byte(icmp[8:24])),
	}, true
}

// everyone is all nodes of the link.
var (
	everyone    = netip.MustParseAddr("ff02::1")
	everyoneMAC = net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}
)

// advert is the frame that says that target is at mac, to one who asked or to all.
func advert(mac net.HardwareAddr, target, to netip.Addr, toMAC net.HardwareAddr, asked bool) []byte {
	flags := uint32(flagOverride)
	if asked {
		flags |= flagSolicit
	}
	icmp := binary.BigEndian.AppendUint32([]byte{typeAdvert, 0, 0, 0}, flags)
	icmp = append(icmp, target.AsSlice()...)
	icmp = append(append(icmp, 2, 1), mac...) // option: target link-layer address
	b := append(append([]byte{}, toMAC...), mac...)
	b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IPV6)
	b = append(b, 0x60, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(len(icmp)))
	b = append(append(append(b, protoICMPv6, 255), target.AsSlice()...), to.AsSlice()...)
	binary.BigEndian.PutUint16(icmp[2:], checksum(target, to, icmp))
	return append(b, icmp...)
}

// checksum is ICMPv6's, over the addresses as well.
func checksum(from, to netip.Addr, icmp []byte) uint16 {
	all := append(from.AsSlice(), to.AsSlice()...)
	all = binary.BigEndian.AppendUint32(all, uint32(len(icmp)))
	all = append(append(all, 0, 0, 0, protoICMPv6), icmp...)
	if len(all)%2 == 1 {
		all = append(all, 0)
	}
	sum := uint32(0)
	for i := 0; i < len(all); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(all[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// solicitFilter lets only neighbour solicitations into the socket: all other IPv6 of
// the link would come as well.
func solicitFilter() []unix.SockFilter {
	const accept, refuse = 256, 0
	return []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: headerLen + 6},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: protoICMPv6, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: headerLen + ip6Len},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: typeSolicit, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: accept},
		{Code: unix.BPF_RET | unix.BPF_K, K: refuse},
	}
}

// packetSocket opens a socket for one protocol of a link, in the namespace of the
// thread.
func packetSocket(protocol uint16, index int, name string, filter []unix.SockFilter) (*os.File, error) {
	// Without a protocol nothing comes in before the filter and the link are set.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if len(filter) > 0 {
		err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
		err = os.NewSyscallError("attach a filter", err)
	}
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(protocol), Ifindex: index}))
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), name), nil
}
