// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nfnl"
)

// firstAddr is the first address of a namespace that is not its loopback's.
func firstAddr(ns *netns.NS) (out netip.Addr, err error) {
	err = ns.Do(func() error {
		all, err := net.InterfaceAddrs()
		if err != nil {
			return err
		}
		for _, a := range all {
			if n, ok := a.(*net.IPNet); ok {
				if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap().Is4() && !ip.IsLoopback() {
					out = ip.Unmap()
					return nil
				}
			}
		}
		return errors.New("no address")
	})
	return out, err
}

// route is the kernel's answer to where a packet goes.
type route struct {
	text string // as `ip route get` has it
	dev  string
	via  netip.Addr
	// local says that the destination is this namespace itself.
	local bool
	err   error
}

// routeOf asks the kernel of a namespace. iif is the device that the packet came
// by, 0 for one that was made here; then src may be invalid.
func routeOf(ns *netns.NS, dst, src netip.Addr, iif int) route {
	var r route
	err := ns.Do(func() error {
		opts := &netlink.RouteGetOptions{IifIndex: iif}
		if src.IsValid() {
			opts.SrcAddr = src.AsSlice()
		}
		all, err := netlink.RouteGetWithOptions(dst.AsSlice(), opts)
		if err != nil {
			return err
		}
		if len(all) == 0 {
			return errors.New("the kernel named no route")
		}
		k := all[0]
		link, err := netlink.LinkByIndex(k.LinkIndex)
		if err != nil {
			return err
		}
		r.dev, r.local = link.Attrs().Name, k.Type == unix.RTN_LOCAL
		r.text = dst.String()
		if r.local {
			r.text = "local " + r.text
		}
		if via, ok := netip.AddrFromSlice(k.Gw); ok {
			r.via = via.Unmap()
			r.text += " via " + r.via.String()
		}
		r.text += " dev " + r.dev
		if s, ok := netip.AddrFromSlice(k.Src); ok && iif == 0 {
			r.text += " src " + s.Unmap().String()
		}
		return nil
	})
	r.err = err
	if iif != 0 && errors.Is(err, unix.EINVAL) {
		r.err = whyInvalid(ns, dst, src, iif)
	}
	return r
}

// whyInvalid finds out why the kernel does not route a packet that came by a device:
// since 6.13 it gives one error for all reasons.
func whyInvalid(ns *netns.NS, dst, src netip.Addr, iif int) error {
	if r := routeOf(ns, dst, netip.Addr{}, 0); r.err != nil {
		return r.err
	}
	strict, dev := false, ""
	_ = ns.Do(func() error { // what cannot be read is not strict
		link, err := netlink.LinkByIndex(iif)
		if err != nil {
			return err
		}
		dev = link.Attrs().Name
		for _, name := range []string{"all", dev} {
			// The thread's own view: /proc/sys/net is that of its network namespace.
			text, err := os.ReadFile("/proc/sys/net/ipv4/conf/" + name + "/rp_filter")
			strict = strict || err == nil && strings.TrimSpace(string(text)) == "1"
		}
		return nil
	})
	if back := routeOf(ns, src, netip.Addr{}, 0); strict && back.dev != dev {
		return unix.EXDEV
	}
	return unix.EINVAL
}

// reason puts the kernel's refusal to route into words.
func (r route) reason() (reason, text string) {
	switch {
	case errors.Is(r.err, unix.EXDEV):
		return "rp_filter", "its source would not be reached by the device that it came by, and rp_filter is strict there"
	case errors.Is(r.err, unix.ENETUNREACH):
		return "no-route", "the routing table has no route to it"
	case errors.Is(r.err, unix.EHOSTUNREACH):
		return "no-route", "a route says that it is unreachable, or forwarding is off"
	case errors.Is(r.err, unix.EINVAL):
		return "martian", "the kernel takes one of its addresses for impossible on that device (a martian)"
	case errors.Is(r.err, unix.EACCES):
		return "no-route", "a route prohibits it"
	}
	return "no-route", fmt.Sprintf("the kernel refuses to route it: %v", r.err)
}

// neighbour says what the kernel knows of a next hop: its state, empty when it
// knows nothing.
func neighbour(ns *netns.NS, dev string, addr netip.Addr) string {
	state := ""
	_ = ns.Do(func() error { // without an answer nothing is said
		link, err := netlink.LinkByName(dev)
		if err != nil {
			return err
		}
		all, err := netlink.NeighList(link.Attrs().Index, netlink.FAMILY_V4)
		for _, n := range all {
			if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap() == addr {
				names := map[int]string{netlink.NUD_FAILED: "FAILED", netlink.NUD_INCOMPLETE: "INCOMPLETE", netlink.NUD_PERMANENT: "PERMANENT", netlink.NUD_REACHABLE: "REACHABLE", netlink.NUD_STALE: "STALE", netlink.NUD_DELAY: "DELAY", netlink.NUD_PROBE: "PROBE", netlink.NUD_NOARP: "NOARP"}
				state = names[n.State]
			}
		}
		return err
	})
	return state
}

// linkUp says whether a device can carry packets.
func linkUp(ns *netns.NS, dev string) bool {
	up := false
	_ = ns.Do(func() error {
		link, err := netlink.LinkByName(dev)
		if err == nil {
			up = link.Attrs().Flags&net.FlagUp != 0 && link.Attrs().OperState != netlink.OperDown && link.Attrs().OperState != netlink.OperLowerLayerDown
		}
		return err
	})
	return up
}

// hostRoutes lists the /32 routes of a namespace: which device leads to which pod.
func hostRoutes(ns *netns.NS) (map[string]netip.Addr, error) {
	out := map[string]netip.Addr{}
	err := ns.Do(func() error {
		all, err := netlink.RouteList(nil, netlink.FAMILY_V4)
		if err != nil {
			return err
		}
		names := map[int]string{}
		ifs, err := net.Interfaces()
		for _, i := range ifs {
			names[i.Index] = i.Name
		}
		for _, r := range all {
			if r.Dst == nil || r.Gw != nil {
				continue
			}
			if ones, _ := r.Dst.Mask.Size(); ones != 32 {
				continue
			}
			if ip, ok := netip.AddrFromSlice(r.Dst.IP); ok {
				out[names[r.LinkIndex]] = ip.Unmap()
			}
		}
		return err
	})
	return out, err
}

// ctEntry is an entry of a connection tracking table.
type ctEntry struct {
	proto              string
	src, dst           netip.AddrPort // of the first packet, as sent
	replySrc, replyDst netip.AddrPort // of what is expected back
	state              string
	replied            bool
	id, mark           uint32
	timeout            uint32
}

// Numbers of linux/netfilter/nfnetlink_conntrack.h.
const (
	ctGet          = 1<<8 | 1
	ctTupleOrig    = 1
	ctTupleReply   = 2
	ctStatus       = 3
	ctProtoInfo    = 4
	ctTimeout      = 7
	ctMark         = 8
	ctID           = 12
	ctTupleIP      = 1
	ctTupleProto   = 2
	ctAddrSrc      = 1
	ctAddrDst      = 2
	ctProtoNum     = 1
	ctPortSrc      = 2
	ctPortDst      = 3
	ctStatusReply  = 1 << 1
	ctInfoTCP      = 1
	ctInfoTCPState = 1
)

// conntrackOf looks one entry up by the addresses of the flow's first packet; nil
// when there is none. Asking for one costs nothing; listening to all of a node's
// events would make the kernel write one for every flow of others.
func conntrackOf(ns *netns.NS, proto uint8, src, dst netip.AddrPort) (*ctEntry, error) {
	conn, err := nfnl.Dial(ns)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	var e *ctEntry
	err = conn.Request(ctGet, 0, unix.NFPROTO_IPV4, func(b []byte) []byte {
		b, tuple := nfnl.Nest(b, ctTupleOrig)
		b, at := nfnl.Nest(b, ctTupleIP)
		b = nfnl.Bytes(nfnl.Bytes(b, ctAddrSrc, src.Addr().AsSlice()), ctAddrDst, dst.Addr().AsSlice())
		b = nfnl.EndNest(b, at)
		b, at = nfnl.Nest(b, ctTupleProto)
		b = nfnl.Uint8(b, ctProtoNum, proto)
		b = nfnl.Bytes(b, ctPortSrc, binary.BigEndian.AppendUint16(nil, src.Port()))
		b = nfnl.Bytes(b, ctPortDst, binary.BigEndian.AppendUint16(nil, dst.Port()))
		return nfnl.EndNest(nfnl.EndNest(b, at), tuple)
	}, func(body []byte) { e = decodeEntry(body, proto) })
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up a connection tracking entry: %w", err)
	}
	if e != nil && (e.src != src || e.dst != dst) {
		return nil, nil // the kernel finds an entry by either direction
	}
	return e, nil
}

func decodeEntry(body []byte, proto uint8) *ctEntry {
	e := &ctEntry{proto: "udp"}
	if proto == unix.IPPROTO_TCP {
		e.proto = "tcp"
	}
	nfnl.Attrs(nfnl.Body(body), func(typ uint16, v []byte) {
		switch typ {
		case ctTupleOrig:
			e.src, e.dst = decodeTuple(v)
		case ctTupleReply:
			e.replySrc, e.replyDst = decodeTuple(v)
		case ctStatus:
			e.replied = nfnl.U32(v)&ctStatusReply != 0
		case ctTimeout:
			e.timeout = nfnl.U32(v)
		case ctMark:
			e.mark = nfnl.U32(v)
		case ctID:
			e.id = nfnl.U32(v)
		case ctProtoInfo:
			nfnl.Attrs(v, func(typ uint16, v []byte) {
				if typ != ctInfoTCP {
					return
				}
				nfnl.Attrs(v, func(typ uint16, v []byte) {
					names := []string{"NONE", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT", "CLOSE", "SYN_SENT2"}
					if typ == ctInfoTCPState && len(v) == 1 && int(v[0]) < len(names) {
						e.state = names[v[0]]
					}
				})
			})
		}
	})
	return e
}

func decodeTuple(v []byte) (src, dst netip.AddrPort) {
	var sa, da netip.Addr
	var sp, dp uint16
	nfnl.Attrs(v, func(outer uint16, v []byte) {
		nfnl.Attrs(v, func(typ uint16, v []byte) {
			switch {
			case outer == ctTupleIP && typ == ctAddrSrc:
				sa, _ = netip.AddrFromSlice(v)
			case outer == ctTupleIP && typ == ctAddrDst:
				da, _ = netip.AddrFromSlice(v)
			case outer == ctTupleProto && typ == ctPortSrc && len(v) == 2:
				sp = binary.BigEndian.Uint16(v)
			case outer == ctTupleProto && typ == ctPortDst && len(v) == 2:
				dp = binary.BigEndian.Uint16(v)
			}
		})
	})
	return netip.AddrPortFrom(sa, sp), netip.AddrPortFrom(da, dp)
}

// String writes the entry as conntrack -L does, without what changes by itself.
func (e *ctEntry) String() string {
	tuple := func(s, d netip.AddrPort) string {
		return fmt.Sprintf("src=%s dst=%s sport=%d dport=%d", s.Addr(), d.Addr(), s.Port(), d.Port())
	}
	out := e.proto
	if e.state != "" {
		out += " " + e.state
	}
	out += " " + tuple(e.src, e.dst)
	if !e.replied {
		out += " [UNREPLIED]"
	}
	return out + " " + tuple(e.replySrc, e.replyDst)
}

// Socket is a socket that waits for connections or datagrams.
type Socket struct {
	Proto string
	Addr  netip.AddrPort
}

// Listening lists the sockets of a namespace that wait for connections, or for
// datagrams from anybody.
func Listening(ns *netns.NS, proto string) ([]Socket, error) {
	var out []Socket
	err := ns.Do(func() error {
		for _, file := range []string{proto, proto + "6"} {
			// The thread's own view: /proc/net is that of the process's first thread.
			f, err := os.Open("/proc/thread-self/net/" + file)
			if errors.Is(err, os.ErrNotExist) {
				continue
			} else if err != nil {
				return err
			}
			for sc := bufio.NewScanner(f); sc.Scan(); {
				if a, ok := parseSocket(sc.Text(), proto); ok {
					out = append(out, Socket{proto, a})
				}
			}
			_ = f.Close() // it was only read
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list the sockets that listen: %w", err)
	}
	slices.SortFunc(out, func(a, b Socket) int { return a.Addr.Compare(b.Addr) })
	return out, nil
}

// parseSocket reads a line of /proc/net/tcp or udp; the state of one that waits is
// 0A for TCP and 07 for UDP without a peer.
func parseSocket(line, proto string) (netip.AddrPort, bool) {
	f := strings.Fields(line)
	if len(f) < 4 || (proto == "tcp" && f[3] != "0A") || (proto == "udp" && f[3] != "07") {
		return netip.AddrPort{}, false
	}
	addr, port, ok := strings.Cut(f[1], ":")
	raw, err := hex.DecodeString(addr)
	n, perr := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil || perr != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		binary.BigEndian.PutUint32(raw[i:], binary.NativeEndian.Uint32(raw[i:]))
	}
	a, ok := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(a.Unmap(), uint16(n)), ok
}
