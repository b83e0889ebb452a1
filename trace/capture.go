// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/node"
)

// header is what is looked at in a packet.
type header struct {
	src, dst netip.AddrPort
	proto    uint8
	ttl      uint8
	length   int // of the IP packet
	seq, ack uint32
	flags    uint8 // TCP's
	payload  []byte
	size     int // of the UDP payload
	// Of an ICMP error: what it says, and what it quotes.
	icmpType, icmpCode uint8
	mtu                uint16
	quoted             *header
}

const (
	tcpSYN = 0x02
	tcpRST = 0x04
	tcpACK = 0x10
)

// parseHeader reads an IPv4 packet from its network and transport headers; trans
// may be nil when net holds both.
func parseHeader(net, trans []byte) *header {
	if len(net) < 20 || net[0]>>4 != 4 {
		return nil
	}
	ihl := int(net[0]&15) * 4
	src, _ := netip.AddrFromSlice(net[12:16])
	dst, _ := netip.AddrFromSlice(net[16:20])
	h := &header{src: netip.AddrPortFrom(src, 0), dst: netip.AddrPortFrom(dst, 0), proto: net[9], ttl: net[8], length: int(binary.BigEndian.Uint16(net[2:]))}
	if trans == nil {
		trans = net[min(ihl, len(net)):]
	}
	if h.proto == unix.IPPROTO_ICMP {
		if len(trans) >= 8 {
			h.icmpType, h.icmpCode, h.mtu = trans[0], trans[1], binary.BigEndian.Uint16(trans[6:])
			if h.icmpType == 3 || h.icmpType == 11 || h.icmpType == 5 {
				h.quoted = parseHeader(trans[8:], nil)
			}
		}
		return h
	}
	if len(trans) < 4 {
		return h
	}
	h.src = netip.AddrPortFrom(src, binary.BigEndian.Uint16(trans))
	h.dst = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(trans[2:]))
	switch {
	case h.proto == unix.IPPROTO_TCP && len(trans) >= 8:
		h.seq = binary.BigEndian.Uint32(trans[4:])
		if len(trans) >= 14 {
			h.ack, h.flags = binary.BigEndian.Uint32(trans[8:]), trans[13]
		}
	case h.proto == unix.IPPROTO_UDP && len(trans) >= 8:
		h.size = int(binary.BigEndian.Uint16(trans[4:])) - 8
		h.payload = bytes.Clone(trans[8:])
	}
	return h
}

// packet is the header for people.
func (h *header) packet() *Packet {
	p := &Packet{Src: h.src, Dst: h.dst, TTL: h.ttl}
	switch h.proto {
	case unix.IPPROTO_TCP:
		p.Proto = "tcp"
		for _, f := range []struct {
			bit  uint8
			name string
		}{{tcpSYN, "S"}, {0x01, "F"}, {tcpRST, "R"}, {0x08, "P"}, {tcpACK, "."}} {
			if h.flags&f.bit != 0 {
				p.Flags += f.name
			}
		}
	case unix.IPPROTO_UDP:
		p.Proto = "udp"
	case unix.IPPROTO_ICMP:
		p.Proto, p.ICMP = "icmp", h.icmpText()
	default:
		p.Proto = fmt.Sprintf("protocol %d", h.proto)
	}
	return p
}

func (h *header) icmpText() string {
	names := map[[2]uint8]string{
		{3, 0}: "net unreachable", {3, 1}: "host unreachable", {3, 2}: "protocol unreachable", {3, 3}: "port unreachable",
		{3, 4}: "fragmentation needed", {3, 9}: "net prohibited", {3, 10}: "host prohibited", {3, 13}: "administratively prohibited",
		{11, 0}: "time to live exceeded",
	}
	text, ok := names[[2]uint8{h.icmpType, h.icmpCode}]
	if !ok {
		return fmt.Sprintf("type %d code %d", h.icmpType, h.icmpCode)
	}
	if h.icmpType == 3 && h.icmpCode == 4 {
		text += fmt.Sprintf(", mtu %d", h.mtu)
	}
	return text
}

// forward says that the packet is our request, or a repetition of it.
func (m mark) forward(h *header) bool {
	if m.udp {
		return h.proto == unix.IPPROTO_UDP && h.size == m.size && bytes.HasPrefix(h.payload, m.head[:headLen])
	}
	return h.proto == unix.IPPROTO_TCP && h.seq == m.seq && h.flags&(tcpSYN|tcpACK) == tcpSYN
}

// back says that the packet answers our request, of whose forms seen knows the
// addresses.
func (m mark) back(h *header, seen map[pair]bool) bool {
	switch {
	case h.proto == unix.IPPROTO_ICMP && h.quoted != nil:
		q := h.quoted
		if m.udp {
			return q.proto == unix.IPPROTO_UDP && bytes.HasPrefix(q.payload, m.head[:headLen])
		}
		// An error may be about later data too.
		return q.proto == unix.IPPROTO_TCP && q.seq-m.seq < 1<<20
	case m.udp:
		return h.proto == unix.IPPROTO_UDP && seen[pair{h.dst, h.src}]
	}
	return h.proto == unix.IPPROTO_TCP && h.ack == m.seq+1 && (h.flags&tcpRST != 0 || h.flags&tcpSYN != 0)
}

// pair is a packet's source and destination.
type pair struct{ src, dst netip.AddrPort }

// frame is a packet seen at a device.
type frame struct {
	*header
	place   *Place
	ifindex int
	out     bool
	at      time.Time
}

// capture is a packet socket over all devices of one namespace.
type capture struct {
	fd    int
	place *Place
	links map[int]string
	buf   []byte
	oob   []byte
	lost  bool
}

// captureBuffer holds some thousands of packets of the ports that are looked at.
const captureBuffer = 4 << 20

// snap is how much of a packet is kept: an ICMP error with what it quotes.
const snap = 160

// open starts to capture what the mark, or for UDP the ports, let through.
func openCapture(p *Place, m mark, ports []uint16) (*capture, error) {
	c := &capture{fd: -1, place: p, buf: make([]byte, 2048), oob: make([]byte, 128)}
	prog, err := filter(m, ports)
	if err != nil {
		return nil, err
	}
	err = p.ns.Do(func() (err error) {
		if c.links, err = links(); err != nil {
			return err
		}
		// Protocol 0 receives nothing until the filter is there.
		c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	})
	if err == nil {
		raw := make([]unix.SockFilter, len(prog))
		for i, r := range prog {
			raw[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
		}
		_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, captureBuffer) // else the default, and a loss is noticed
		err = errors.Join(
			unix.SetsockoptSockFprog(c.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(raw)), Filter: &raw[0]}),
			unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1))
	}
	if err == nil {
		err = unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL)})
	}
	if err != nil {
		c.close()
		return nil, fmt.Errorf("capture packets in %s: %w", p.Name, err)
	}
	return c, nil
}

func htons(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

func (c *capture) close() {
	if c.fd >= 0 {
		_ = unix.Close(c.fd)
	}
}

// drain hands over what has come.
func (c *capture) drain(fn func(*frame)) error {
	for {
		n, oobn, _, from, err := unix.Recvmsg(c.fd, c.buf, c.oob, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENETDOWN):
			continue // a device went down; the others go on
		case errors.Is(err, unix.EAGAIN):
			if st, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS); err == nil && st.Drops > 0 {
				c.lost = true
			}
			return nil
		case err != nil:
			return os.NewSyscallError("receive", err)
		}
		ll, ok := from.(*unix.SockaddrLinklayer)
		h := parseHeader(c.buf[:n], nil)
		if !ok || h == nil || ll.Pkttype == unix.PACKET_OTHERHOST && c.place.Kind != node.FabricNS {
			continue // also what a switch sent here although it is for somebody else
		}
		fn(&frame{header: h, place: c.place, ifindex: ll.Ifindex, out: ll.Pkttype == unix.PACKET_OUTGOING, at: stamp(c.oob[:oobn])})
	}
}

func stamp(oob []byte) time.Time {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return time.Time{}
	}
	for _, m := range msgs {
		if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SO_TIMESTAMPNS && len(m.Data) >= 16 {
			return time.Unix(int64(binary.NativeEndian.Uint64(m.Data)), int64(binary.NativeEndian.Uint64(m.Data[8:])))
		}
	}
	return time.Time{}
}

// stampTime bounds the wait for the kernel to stamp packets; it takes some milliseconds.
const stampTime = 500 * time.Millisecond

// awaitStamps returns when the kernel notes the time at which packets arrive. It begins
// to do so a moment after the first socket has asked for it; until then a packet has the
// time at which it is read, and those of several sockets could not be put in order. A
// datagram to ourselves, read late on purpose, tells the two apart.
func awaitStamps(ctx context.Context) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }()
	err = errors.Join(
		unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}))
	if err != nil {
		return fmt.Errorf("ask for the time of packets: %w", err)
	}
	self, err := unix.Getsockname(fd)
	if err != nil {
		return os.NewSyscallError("getsockname", err)
	}
	ctx, cancel := context.WithTimeout(ctx, stampTime)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	buf, oob := make([]byte, 1), make([]byte, 64)
	for {
		if err := unix.Sendto(fd, []byte{0}, 0, self); err != nil {
			return nil // no loopback here: as below
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil // the order of some packets may be told wrongly
		}
		read := time.Now()
		_, n, _, _, err := unix.Recvmsg(fd, buf, oob, 0)
		if err != nil {
			return os.NewSyscallError("recvmsg", err)
		}
		if at := stamp(oob[:n]); at.Before(read) {
			return nil
		}
	}
}

// filter lets our packets through, all ICMP over IPv4, and for UDP what has one of
// the ports, since answers carry no mark.
func filter(m mark, ports []uint16) ([]bpf.RawInstruction, error) {
	accept, drop := bpf.RetConstant{Val: snap}, bpf.RetConstant{}
	prog := []bpf.Instruction{
		bpf.LoadAbsolute{Off: 0, Size: 1},
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: 0xf0},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0x40, SkipTrue: 1},
		drop,
		bpf.LoadMemShift{Off: 0},
		bpf.LoadAbsolute{Off: 9, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_ICMP, SkipTrue: 1},
		accept,
	}
	is := func(off uint32, size int, v uint32) {
		prog = append(prog, bpf.LoadIndirect{Off: off, Size: size}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: v, SkipTrue: 1}, accept)
	}
	proto := uint32(unix.IPPROTO_TCP)
	if m.udp {
		proto = unix.IPPROTO_UDP
	}
	prog = append(prog, bpf.JumpIf{Cond: bpf.JumpEqual, Val: proto, SkipTrue: 1}, drop)
	if m.udp {
		for _, p := range ports {
			is(0, 2, uint32(p))
			is(2, 2, uint32(p))
		}
		is(8, headLen, binary.BigEndian.Uint32(m.head)) // under whatever ports
	} else {
		is(4, 4, m.seq)
		is(8, 4, m.seq+1)
	}
	raw, err := bpf.Assemble(append(prog, drop))
	if err != nil {
		return nil, fmt.Errorf("make the filter for packets: %w", err)
	}
	return raw, nil
}

// links names the devices of the thread's namespace.
func links() (map[int]string, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list the devices: %w", err)
	}
	out := map[int]string{}
	for _, i := range all {
		out[i.Index] = strings.TrimSpace(i.Name)
	}
	return out, nil
}
