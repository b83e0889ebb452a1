// SPDX-License-Identifier: Apache-2.0

package rtnl

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Batch collects messages for one [Conn.Do]. The zero value is empty.
type Batch struct {
	buf []byte
	ops []op
}

// op is one message and what its answer means.
type op struct {
	start    int
	what     string
	on       func() string
	tolerate []unix.Errno
	answer   func(body []byte)
}

// Tolerate makes the message added last succeed when the kernel answers it with
// one of these.
func (b *Batch) Tolerate(errs ...unix.Errno) *Batch {
	b.ops[len(b.ops)-1].tolerate = errs
	return b
}

// Veth describes a pair of links to add.
type Veth struct {
	Name string
	// Index is the interface number to take; 0 lets the kernel choose.
	Index int
	MTU   int
	MAC   net.HardwareAddr
	// Master is the index of a bridge to join at once; 0 for none.
	Master int
	// Up sets this end up at once. The peer cannot be set up in the same message.
	Up   bool
	Peer VethPeer
}

// VethPeer is the other end of a [Veth].
type VethPeer struct {
	Name string
	MTU  int
	MAC  net.HardwareAddr
	// NSFd is an open handle of the namespace in which the peer is made; 0 makes
	// it in the connection's own.
	NSFd int
}

// AddVeth adds a pair of links, each with one queue: with more, the kernel waits
// for every CPU at each pair, which doubles the cost of a pod.
func (b *Batch) AddVeth(v Veth) *Batch {
	b.begin(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, "add veth", func() string { return v.Name + "-" + v.Peer.Name })
	flags := uint32(0)
	if v.Up {
		flags = unix.IFF_UP
	}
	b.ifinfo(v.Index, flags, flags)
	b.linkAttrs(v.Name, v.MTU, v.MAC)
	if v.Master != 0 {
		b.u32(unix.IFLA_MASTER, uint32(v.Master))
	}
	info := b.nest(unix.IFLA_LINKINFO)
	b.str(unix.IFLA_INFO_KIND, "veth")
	data := b.nest(unix.IFLA_INFO_DATA)
	peer := b.nest(vethInfoPeer)
	b.ifinfo(0, 0, 0)
	b.linkAttrs(v.Peer.Name, v.Peer.MTU, v.Peer.MAC)
	if v.Peer.NSFd != 0 {
		b.u32(unix.IFLA_NET_NS_FD, uint32(v.Peer.NSFd))
	}
	b.unnest(peer)
	b.unnest(data)
	b.unnest(info)
	return b.end()
}

// linkAttrs are what both ends of a veth get.
func (b *Batch) linkAttrs(name string, mtu int, mac net.HardwareAddr) {
	b.str(unix.IFLA_IFNAME, name)
	b.u32(unix.IFLA_NUM_TX_QUEUES, 1)
	b.u32(unix.IFLA_NUM_RX_QUEUES, 1)
	if mtu != 0 {
		b.u32(unix.IFLA_MTU, uint32(mtu))
	}
	if mac != nil {
		b.attr(unix.IFLA_ADDRESS, mac)
	}
}

// AddBridge adds a bridge, up, that does not watch multicast membership: it
// floods, as a plain switch does, and no packet waits for a query.
func (b *Batch) AddBridge(name string, index, mtu int, mac net.HardwareAddr) *Batch {
	b.begin(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, "add bridge", func() string { return name })
	b.ifinfo(index, unix.IFF_UP, unix.IFF_UP)
	b.str(unix.IFLA_IFNAME, name)
	if mtu != 0 {
		b.u32(unix.IFLA_MTU, uint32(mtu))
	}
	if mac != nil {
		b.attr(unix.IFLA_ADDRESS, mac)
	}
	info := b.nest(unix.IFLA_LINKINFO)
	b.str(unix.IFLA_INFO_KIND, "bridge")
	data := b.nest(unix.IFLA_INFO_DATA)
	b.attr(unix.IFLA_BR_MCAST_SNOOPING, []byte{0})
	b.unnest(data)
	b.unnest(info)
	return b.end()
}

// VXLAN describes an end of an overlay that is told where everything is: it learns
// nothing and floods nothing.
type VXLAN struct {
	Name string
	// VNI is the network's number, Port the UDP port of both ends.
	VNI  uint32
	Port uint16
	// Local is the address from which packets are sent.
	Local netip.Addr
	MTU   int
	MAC   net.HardwareAddr
}

// AddVXLAN adds a VXLAN link, down.
func (b *Batch) AddVXLAN(v VXLAN) *Batch {
	b.begin(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, "add vxlan", func() string { return v.Name })
	b.ifinfo(0, 0, 0)
	b.linkAttrs(v.Name, v.MTU, v.MAC)
	info := b.nest(unix.IFLA_LINKINFO)
	b.str(unix.IFLA_INFO_KIND, "vxlan")
	data := b.nest(unix.IFLA_INFO_DATA)
	b.u32(vxlanID, v.VNI)
	local := uint16(vxlanLocal)
	if v.Local.Is6() {
		local = vxlanLocal6
	}
	b.attr(local, v.Local.AsSlice())
	b.attr(vxlanLearning, []byte{0})
	b.attr(vxlanPort, binary.BigEndian.AppendUint16(nil, v.Port))
	b.unnest(data)
	b.unnest(info)
	return b.end()
}

// ReplaceFDB tells a VXLAN link at which underlay address a hardware address is.
func (b *Batch) ReplaceFDB(index int, mac net.HardwareAddr, dst netip.Addr) *Batch {
	b.begin(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, "add forwarding entry", func() string { return fmt.Sprintf("%s to link %d", mac, index) })
	b.fdb(index, unix.NUD_PERMANENT|unix.NUD_NOARP)
	b.attr(unix.NDA_DST, dst.AsSlice())
	b.attr(unix.NDA_LLADDR, mac)
	return b.end()
}

// DelFDB removes what [Batch.ReplaceFDB] wrote; what is not there is success.
func (b *Batch) DelFDB(index int, mac net.HardwareAddr) *Batch {
	b.begin(unix.RTM_DELNEIGH, 0, "remove forwarding entry", func() string { return fmt.Sprintf("%s from link %d", mac, index) })
	b.fdb(index, 0)
	b.attr(unix.NDA_LLADDR, mac)
	return b.end().Tolerate(unix.ENOENT, unix.ENODEV)
}

func (b *Batch) fdb(index int, state uint16) {
	b.buf = append(b.buf, unix.AF_BRIDGE, 0, 0, 0)
	b.buf = binary.NativeEndian.AppendUint32(b.buf, uint32(index))
	b.buf = binary.NativeEndian.AppendUint16(b.buf, state)
	b.buf = append(b.buf, unix.NTF_SELF, 0)
}

// SetUp sets a link up.
func (b *Batch) SetUp(index int) *Batch {
	b.begin(unix.RTM_NEWLINK, 0, "set up link", func() string { return fmt.Sprint(index) })
	b.ifinfo(index, unix.IFF_UP, unix.IFF_UP)
	return b.end()
}

// NoLinkLocal keeps the kernel from giving a link that comes up an IPv6 link-local
// address of its own, which it would try out for a second first. A kernel or a
// namespace without IPv6 is success.
func (b *Batch) NoLinkLocal(index int) *Batch {
	b.begin(unix.RTM_NEWLINK, 0, "stop automatic addresses of link", func() string { return fmt.Sprint(index) })
	b.ifinfo(index, 0, 0)
	all := b.nest(unix.IFLA_AF_SPEC)
	inet6 := b.nest(unix.AF_INET6)
	b.attr(inet6AddrGenMode, []byte{addrGenNone})
	b.unnest(inet6)
	b.unnest(all)
	return b.end().Tolerate(unix.EAFNOSUPPORT, unix.EINVAL)
}

// SetDown sets a link down.
func (b *Batch) SetDown(index int) *Batch {
	b.begin(unix.RTM_NEWLINK, 0, "set down link", func() string { return fmt.Sprint(index) })
	b.ifinfo(index, 0, unix.IFF_UP)
	return b.end()
}

// SetLink changes an existing link: its alias (what `ip link` shows), its MTU
// and its master; zero values stay as they are.
func (b *Batch) SetLink(index int, alias string, mtu, master int) *Batch {
	b.begin(unix.RTM_NEWLINK, 0, "change link", func() string { return fmt.Sprint(index) })
	b.ifinfo(index, 0, 0)
	if alias != "" {
		b.attr(unix.IFLA_IFALIAS, []byte(alias))
	}
	if mtu != 0 {
		b.u32(unix.IFLA_MTU, uint32(mtu))
	}
	if master != 0 {
		b.u32(unix.IFLA_MASTER, uint32(master))
	}
	return b.end()
}

// DelLink removes a link; a veth takes its peer with it. The kernel waits for all
// CPUs at each: prefer to let a link go with its namespace.
func (b *Batch) DelLink(index int) *Batch {
	b.begin(unix.RTM_DELLINK, 0, "remove link", func() string { return fmt.Sprint(index) })
	b.ifinfo(index, 0, 0)
	return b.end()
}

// Link is what the kernel says about a link.
type Link struct {
	Index  int
	Name   string
	Alias  string
	Kind   string
	Up     bool
	Oper   uint8 // IF_OPER_*: 6 is up
	MTU    int
	MAC    net.HardwareAddr
	Master int
	// Peer is the index of a veth's other end, in that end's namespace.
	Peer int
}

// GetLink reads the link called name into l. The question makes the kernel finish
// a change of the link's carrier that is under way, so that the first packet over
// a link that just came up does not wait a second.
func (b *Batch) GetLink(name string, l *Link) *Batch {
	b.begin(unix.RTM_GETLINK, 0, "find link", func() string { return name })
	b.ifinfo(0, 0, 0)
	b.str(unix.IFLA_IFNAME, name)
	b.ops[len(b.ops)-1].answer = func(body []byte) { *l = parseLink(body) }
	return b.end()
}

// GetLinkAt is GetLink by index.
func (b *Batch) GetLinkAt(index int, l *Link) *Batch {
	b.begin(unix.RTM_GETLINK, 0, "find link", func() string { return fmt.Sprint(index) })
	b.ifinfo(index, 0, 0)
	b.ops[len(b.ops)-1].answer = func(body []byte) { *l = parseLink(body) }
	return b.end()
}

func parseLink(body []byte) Link {
	var l Link
	if len(body) < unix.SizeofIfInfomsg {
		return l
	}
	l.Index = int(int32(binary.NativeEndian.Uint32(body[4:])))
	l.Up = binary.NativeEndian.Uint32(body[8:])&unix.IFF_UP != 0
	l.Peer = l.Index
	eachAttr(body[unix.SizeofIfInfomsg:], func(kind uint16, v []byte) {
		switch kind {
		case unix.IFLA_IFNAME:
			l.Name = cstring(v)
		case unix.IFLA_IFALIAS:
			l.Alias = cstring(v)
		case unix.IFLA_OPERSTATE:
			l.Oper = v[0]
		case unix.IFLA_MTU:
			l.MTU = int(binary.NativeEndian.Uint32(v))
		case unix.IFLA_ADDRESS:
			l.MAC = append(net.HardwareAddr(nil), v...)
		case unix.IFLA_MASTER:
			l.Master = int(binary.NativeEndian.Uint32(v))
		case unix.IFLA_LINK:
			l.Peer = int(binary.NativeEndian.Uint32(v))
		case unix.IFLA_LINKINFO:
			eachAttr(v, func(kind uint16, v []byte) {
				if kind == unix.IFLA_INFO_KIND {
					l.Kind = cstring(v)
				}
			})
		}
	})
	return l
}

// AddAddr puts an address on a link, or leaves one that is there. An IPv6 address
// is usable at once (no duplicate address detection). scope is a unix.RT_SCOPE_*.
func (b *Batch) AddAddr(index int, p netip.Prefix, scope uint8) *Batch {
	b.begin(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, "add address", func() string { return fmt.Sprintf("%s to link %d", p, index) })
	var flags uint8
	if p.Addr().Is6() {
		flags = unix.IFA_F_NODAD
	}
	b.buf = append(b.buf, family(p.Addr()), uint8(p.Bits()), flags, scope)
	b.buf = binary.NativeEndian.AppendUint32(b.buf, uint32(index))
	b.attr(unix.IFA_LOCAL, p.Addr().AsSlice())
	b.attr(unix.IFA_ADDRESS, p.Addr().AsSlice())
	return b.end()
}

// Route is a route to write or to remove.
type Route struct {
	Dst netip.Prefix
	// Via is the next hop; the zero value makes the route point at the link.
	Via netip.Addr
	// Link is the index of the link.
	Link int
	// Src is the source address of packets that the node itself sends by it.
	Src netip.Addr
	// Protocol marks who wrote the route; 0 is RTPROT_BOOT, what `ip route add`
	// writes.
	Protocol uint8
	// Metric ranks routes to one destination; 0 is the kernel's choice: 0 for IPv4,
	// 1024 for IPv6.
	Metric uint32
	// OnLink says that Via is reached over Link although no route says so.
	OnLink bool
}

func (r Route) scope() uint8 {
	if r.Via.IsValid() {
		return unix.RT_SCOPE_UNIVERSE
	}
	return unix.RT_SCOPE_LINK
}

// ReplaceRoute writes a route into the main table, over one to the same
// destination.
func (b *Batch) ReplaceRoute(r Route) *Batch {
	b.begin(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, "add route to", func() string { return r.Dst.String() })
	return b.route(r, r.scope())
}

// DelRoute removes a route; fields that are zero match any. One that is not there
// is success.
func (b *Batch) DelRoute(r Route) *Batch {
	b.begin(unix.RTM_DELROUTE, 0, "remove route to", func() string { return r.Dst.String() })
	return b.route(r, unix.RT_SCOPE_NOWHERE).Tolerate(unix.ESRCH, unix.ENODEV, unix.ENETUNREACH)
}

func (b *Batch) route(r Route, scope uint8) *Batch {
	proto := r.Protocol
	adding := scope != unix.RT_SCOPE_NOWHERE
	if proto == 0 && adding {
		proto = unix.RTPROT_BOOT
	}
	var kind uint8
	if adding {
		kind = unix.RTN_UNICAST
	}
	b.buf = append(b.buf, family(r.Dst.Addr()), uint8(r.Dst.Bits()), 0, 0, unix.RT_TABLE_MAIN, proto, scope, kind)
	flags := uint32(0)
	if r.OnLink {
		flags = unix.RTNH_F_ONLINK
	}
	b.buf = binary.NativeEndian.AppendUint32(b.buf, flags)
	if r.Dst.Bits() > 0 {
		b.attr(unix.RTA_DST, r.Dst.Masked().Addr().AsSlice())
	}
	if r.Via.IsValid() {
		b.attr(unix.RTA_GATEWAY, r.Via.AsSlice())
	}
	if r.Link != 0 {
		b.u32(unix.RTA_OIF, uint32(r.Link))
	}
	if r.Src.IsValid() {
		b.attr(unix.RTA_PREFSRC, r.Src.AsSlice())
	}
	if r.Metric != 0 {
		b.u32(unix.RTA_PRIORITY, r.Metric)
	}
	return b.end()
}

// ReplaceNeigh writes a permanent neighbour, so that nobody asks for it on the
// wire.
func (b *Batch) ReplaceNeigh(index int, ip netip.Addr, mac net.HardwareAddr) *Batch {
	b.begin(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, "add neighbour", func() string { return fmt.Sprintf("%s to link %d", ip, index) })
	b.neigh(index, ip, unix.NUD_PERMANENT)
	b.attr(unix.NDA_DST, ip.AsSlice())
	b.attr(unix.NDA_LLADDR, mac)
	return b.end()
}

// DelNeigh removes a neighbour; one that is not there is success.
func (b *Batch) DelNeigh(index int, ip netip.Addr) *Batch {
	b.begin(unix.RTM_DELNEIGH, 0, "remove neighbour", func() string { return fmt.Sprintf("%s from link %d", ip, index) })
	b.neigh(index, ip, 0)
	b.attr(unix.NDA_DST, ip.AsSlice())
	return b.end().Tolerate(unix.ENOENT, unix.ENODEV)
}

func (b *Batch) neigh(index int, ip netip.Addr, state uint16) {
	b.buf = append(b.buf, family(ip), 0, 0, 0)
	b.buf = binary.NativeEndian.AppendUint32(b.buf, uint32(index))
	b.buf = binary.NativeEndian.AppendUint16(b.buf, state)
	b.buf = append(b.buf, 0, 0)
}

// Interface numbers that mean a whole namespace (NETCONFA_IFINDEX_* of
// linux/netconf.h).
const (
	AllLinks     = -1 // what the sysctls net.ipv4.conf.all.* hold
	DefaultLinks = -2 // net.ipv4.conf.default.*, what a new link starts with
)

// GetForwarding reads whether a link, or [AllLinks] or [DefaultLinks], forwards
// IPv4. Opening a file of /proc/sys in a new namespace costs as much as a link;
// this costs a message.
func (b *Batch) GetForwarding(index int, on *bool) *Batch {
	b.begin(unix.RTM_GETNETCONF, 0, "read forwarding of link", func() string { return fmt.Sprint(index) })
	b.buf = append(b.buf, unix.AF_INET, 0, 0, 0)
	b.u32(netconfaIfindex, uint32(int32(index)))
	b.ops[len(b.ops)-1].answer = func(body []byte) {
		if len(body) < 4 {
			return
		}
		eachAttr(body[4:], func(kind uint16, v []byte) {
			if kind == netconfaForwarding && len(v) >= 4 {
				*on = binary.NativeEndian.Uint32(v) != 0
			}
		})
	}
	return b.end()
}

// NETCONFA_* of linux/netconf.h.
const (
	netconfaIfindex    = 1
	netconfaForwarding = 2
)

// vethInfoPeer is VETH_INFO_PEER of linux/veth.h.
const vethInfoPeer = 1

// IFLA_VXLAN_* of linux/if_link.h.
const (
	vxlanID       = 1
	vxlanLocal    = 4
	vxlanLearning = 7
	vxlanPort     = 15
	vxlanLocal6   = 17
)

// IFLA_INET6_ADDR_GEN_MODE and IN6_ADDR_GEN_MODE_NONE of linux/if_link.h.
const (
	inet6AddrGenMode = 8
	addrGenNone      = 1
)

func family(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// begin starts a message; end closes it.
func (b *Batch) begin(kind, flags uint16, what string, on func() string) {
	if b.buf == nil {
		b.buf = make([]byte, 0, 1024)
		b.ops = make([]op, 0, 12)
	}
	b.ops = append(b.ops, op{start: len(b.buf), what: what, on: on})
	b.buf = binary.NativeEndian.AppendUint32(b.buf, 0)
	b.buf = binary.NativeEndian.AppendUint16(b.buf, kind)
	b.buf = binary.NativeEndian.AppendUint16(b.buf, flags|unix.NLM_F_REQUEST)
	b.buf = append(b.buf, 0, 0, 0, 0, 0, 0, 0, 0)
}

func (b *Batch) end() *Batch {
	start := b.ops[len(b.ops)-1].start
	binary.NativeEndian.PutUint32(b.buf[start:], uint32(len(b.buf)-start))
	return b
}

func (b *Batch) ifinfo(index int, flags, change uint32) {
	b.buf = append(b.buf, unix.AF_UNSPEC, 0, 0, 0)
	b.buf = binary.NativeEndian.AppendUint32(b.buf, uint32(index))
	b.buf = binary.NativeEndian.AppendUint32(b.buf, flags)
	b.buf = binary.NativeEndian.AppendUint32(b.buf, change)
}

func (b *Batch) attr(kind uint16, value []byte) {
	b.buf = binary.NativeEndian.AppendUint16(b.buf, uint16(4+len(value)))
	b.buf = binary.NativeEndian.AppendUint16(b.buf, kind)
	b.buf = append(b.buf, value...)
	for len(b.buf)%4 != 0 {
		b.buf = append(b.buf, 0)
	}
}

func (b *Batch) str(kind uint16, s string) {
	b.attr(kind, append([]byte(s), 0))
}

func (b *Batch) u32(kind uint16, v uint32) {
	b.attr(kind, binary.NativeEndian.AppendUint32(nil, v))
}

// nest opens an attribute that holds attributes; unnest closes it.
func (b *Batch) nest(kind uint16) int {
	at := len(b.buf)
	b.buf = binary.NativeEndian.AppendUint16(b.buf, 0)
	b.buf = binary.NativeEndian.AppendUint16(b.buf, kind|unix.NLA_F_NESTED)
	return at
}

func (b *Batch) unnest(at int) {
	binary.NativeEndian.PutUint16(b.buf[at:], uint16(len(b.buf)-at))
}
