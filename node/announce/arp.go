// SPDX-License-Identifier: Apache-2.0

package announce

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// An ARP packet for Ethernet and IPv4 (RFC 826), behind an Ethernet header.
const (
	headerLen = 14
	arpLen    = 28
	opRequest = 1
	opReply   = 2
)

// broadcast is everybody on the link.
var broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// arp is what matters of a packet.
type arp struct {
	op               uint16
	senderMAC        net.HardwareAddr
	sender, target   netip.Addr
	targetMAC        net.HardwareAddr
	ethernetReceiver net.HardwareAddr
}

// parseARP reads a frame; false for what is no ARP of IPv4 on Ethernet.
func parseARP(frame []byte) (arp, bool) {
	if len(frame) < headerLen+arpLen || binary.BigEndian.Uint16(frame[12:]) != unix.ETH_P_ARP {
		return arp{}, false
	}
	p := frame[headerLen:]
	if binary.BigEndian.Uint16(p) != 1 || binary.BigEndian.Uint16(p[2:]) != unix.ETH_P_IP || p[4] != 6 || p[5] != 4 {
		return arp{}, false
	}
	return arp{
		op: binary.BigEndian.Uint16(p[6:]), senderMAC: net.HardwareAddr(p[8:14]), sender: netip.AddrFrom4([4]byte(p[14:18])),
		targetMAC: net.HardwareAddr(p[18:24]), target: netip.AddrFrom4([4]byte(p[24:28])), ethernetReceiver: net.HardwareAddr(frame[0:6]),
	}, true
}

// frame is the packet as it goes onto the wire.
func (a arp) frame() []byte {
	b := make([]byte, 0, headerLen+arpLen)
	b = append(append(b, a.ethernetReceiver...), a.senderMAC...)
	b = binary.BigEndian.AppendUint16(b, unix.ETH_P_ARP)
	b = binary.BigEndian.AppendUint16(b, 1)
	b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IP)
	b = binary.BigEndian.AppendUint16(append(b, 6, 4), a.op)
	sender, target := a.sender.As4(), a.target.As4()
	b = append(append(b, a.senderMAC...), sender[:]...)
	return append(append(b, a.targetMAC...), target[:]...)
}

// reply answers a request with the hardware address mac.
func (a arp) reply(mac net.HardwareAddr) arp {
	return arp{op: opReply, senderMAC: mac, sender: a.target, targetMAC: a.senderMAC, target: a.sender, ethernetReceiver: a.senderMAC}
}

// link is packet sockets on a link, one for the questions of each family.
type link struct {
	name     string
	index    int
	mac      net.HardwareAddr
	arp, ndp *os.File
}

func htons(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

// openLink opens a socket on the link called name in ns.
func openLink(ns *netns.NS, name string) (*link, error) {
	l := &link{name: name}
	err := ns.Do(func() error {
		dev, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		l.index, l.mac = dev.Index, dev.HardwareAddr
		if len(l.mac) != 6 {
			return fmt.Errorf("link %s has no Ethernet address", name)
		}
		if l.arp, err = packetSocket(unix.ETH_P_ARP, dev.Index, "arp on "+name, nil); err != nil {
			return err
		}
		if l.ndp, err = packetSocket(unix.ETH_P_IPV6, dev.Index, "ndp on "+name, solicitFilter()); err != nil {
			return errors.Join(err, l.arp.Close())
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return l, nil
}

// current says whether the link of that name is still the one of the socket.
func (l *link) current(ns *netns.NS) (same bool, err error) {
	err = ns.Do(func() error {
		dev, err := net.InterfaceByName(l.name)
		if err != nil {
			return err
		}
		same = dev.Index == l.index && dev.HardwareAddr.String() == l.mac.String()
		return nil
	})
	return same, err
}

// close ends the sockets; answer returns then.
func (l *link) close() { _, _ = l.arp.Close(), l.ndp.Close() } // nothing is buffered that could be lost

// answerARP replies to requests for addresses that mine knows, until the socket fails
// or is closed.
func (l *link) answerARP(mine func(netip.Addr) bool) error {
	return serve(l.arp, func(frame []byte) []byte {
		q, ok := parseARP(frame)
		// Who asks for its own address announces it; that is no question.
		if !ok || q.op != opRequest || q.sender == q.target || !mine(q.target) {
			return nil
		}
		return q.reply(l.mac).frame()
	})
}

// answerNDP is answerARP for IPv6.
func (l *link) answerNDP(mine func(netip.Addr) bool) error {
	return serve(l.ndp, func(frame []byte) []byte {
		q, ok := parseSolicit(frame)
		switch {
		case !ok || !mine(q.target):
			return nil
		case q.sender.IsUnspecified():
			return advert(l.mac, q.target, everyone, everyoneMAC, false)
		}
		return advert(l.mac, q.target, q.sender, q.senderMAC, true)
	})
}

// serve answers frames until the socket fails or is closed.
func serve(socket *os.File, answer func(frame []byte) []byte) error {
	buf := make([]byte, 256)
	for {
		n, err := socket.Read(buf)
		if errors.Is(err, unix.ENETDOWN) {
			continue // the link was set down; the socket works again when it is up
		}
		if err != nil {
			return err
		}
		reply := answer(buf[:n])
		if reply == nil {
			continue
		}
		if _, err := socket.Write(reply); err != nil && !transient(err) {
			return err
		}
	}
}

// transient errors leave the socket usable.
func transient(err error) bool {
	return errors.Is(err, unix.ENETDOWN) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EAGAIN)
}

// gratuitous tells everybody on the link that ip is here: in ARP as a request and as
// a reply, since some listen only to one of them; in IPv6 by an advertisement that
// nobody asked for.
func (l *link) gratuitous(ip netip.Addr) error {
	if ip.Is6() {
		if _, err := l.ndp.Write(advert(l.mac, ip, everyone, everyoneMAC, false)); err != nil && !transient(err) {
			return err
		}
		return nil
	}
	for _, op := range []uint16{opRequest, opReply} {
		a := arp{op: op, senderMAC: l.mac, sender: ip, targetMAC: broadcast, target: ip, ethernetReceiver: broadcast}
		if _, err := l.arp.Write(a.frame()); err != nil && !transient(err) {
			return err
		}
	}
	return nil
}
