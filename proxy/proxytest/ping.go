// SPDX-License-Identifier: Apache-2.0

package proxytest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// ICMP types.
const (
	echoReply   = 0
	unreachable = 3
	echoRequest = 8
)

// Ping sends one ICMP echo request and awaits what comes of it. Backend and the like are
// not filled in.
func (h *Host) Ping(to string) Reply {
	start := time.Now()
	r := Reply{Outcome: "error"}
	r.Err = h.NS.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		defer func() { _ = unix.Close(fd) }()
		wait := unix.NsecToTimeval(quiet().Nanoseconds())
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
		id := uint16(rand.IntN(1 << 16))
		err = unix.Sendto(fd, echoMessage(id), 0, &unix.SockaddrInet4{Addr: netip.MustParseAddr(to).As4()})
		if errors.Is(err, unix.EPERM) {
			r.Outcome = Denied
		}
		if err != nil {
			return os.NewSyscallError("sendto", err)
		}
		buf := make([]byte, 1500)
		for time.Since(start) < 2*quiet() {
			n, _, err := unix.Recvfrom(fd, buf, 0)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			if err != nil {
				return os.NewSyscallError("recvfrom", err)
			}
			switch icmpAbout(buf[:n], id) {
			case echoReply:
				r.Outcome = Answered
				return nil
			case unreachable:
				r.Outcome = Refused
				return nil
			}
		}
		r.Outcome = Silence
		return nil
	})
	r.Took = time.Since(start)
	return r
}

// echoMessage is an echo request with a checksum.
func echoMessage(id uint16) []byte {
	b := []byte{echoRequest, 0, 0, 0}
	b = binary.BigEndian.AppendUint16(b, id)
	b = append(b, 0, 1, 'k', 'p')
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(b[2:], ^uint16(sum+sum>>16))
	return b
}

// icmpAbout reads the type of an IPv4 packet with an ICMP message that is about the echo
// request of a number; -1 for any other.
func icmpAbout(packet []byte, id uint16) int {
	icmp := afterIP(packet)
	if len(icmp) < 8 {
		return -1
	}
	switch icmp[0] {
	case echoReply:
		if binary.BigEndian.Uint16(icmp[4:]) == id {
			return echoReply
		}
	case unreachable:
		if about := afterIP(icmp[8:]); len(about) >= 8 && binary.BigEndian.Uint16(about[4:]) == id {
			return unreachable
		}
	}
	return -1
}

func afterIP(packet []byte) []byte {
	if len(packet) < 20 || len(packet) < int(packet[0]&15)*4 {
		return nil
	}
	return packet[int(packet[0]&15)*4:]
}

// within is the host with more patience than the usual one, if that is asked for.
func (h *Host) within(d time.Duration, patient bool) *Host {
	if !patient {
		return h
	}
	other := *h
	other.patience = d
	return &other
}

// wait is how long the host waits before it calls a silence one.
func (h *Host) wait() time.Duration {
	if h.patience > 0 {
		return h.patience
	}
	return quiet()
}

// String names the host in messages.
func (h *Host) String() string { return fmt.Sprintf("%s (%s)", h.Name, h.IP) }
