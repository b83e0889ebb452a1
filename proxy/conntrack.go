// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/ti-mo/conntrack"
	"github.com/ti-mo/netfilter"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nfnl"
)

// A connection tracking entry remembers where the first packet of a flow was
// sent and sends all later ones there. A UDP client that keeps its source port
// never starts a new flow, so when its endpoint goes, or when it was sending
// before there was one, its packets go nowhere until the entry is removed. TCP
// needs no help: a dead peer answers or times out, and the client reconnects.

// UDPFlow is one UDP entry of a node's connection tracking table.
type UDPFlow struct {
	// Src and Dst are the addresses of the flow's first packet, as sent.
	Src, Dst netip.AddrPort
	// Peer is who answers: the endpoint, if the packet was translated.
	Peer netip.AddrPort

	// id is the kernel's number of the entry.
	id uint32
}

// ConntrackTable is a node's connection tracking table.
type ConntrackTable interface {
	// UDPFlows lists the UDP entries of one family.
	UDPFlows(ctx context.Context, family corev1.IPFamily) ([]UDPFlow, error)
	// Delete removes entries; those that are gone already are success.
	Delete(ctx context.Context, flows []UDPFlow) error
	// LocalAddrs lists the addresses of the node's links.
	LocalAddrs(ctx context.Context) ([]netip.Addr, error)
}

// udpEntries is what the UDP Service ports of a snapshot want of the table.
type udpEntries struct {
	// serving are the endpoints that may answer for an address and port of a
	// Service. nodePorts have their own, for any address of the node.
	serving   map[netip.AddrPort][]netip.AddrPort
	nodePorts map[nodePortKey][]netip.AddrPort
}

type nodePortKey struct {
	family corev1.IPFamily
	port   uint16
}

func newUDPEntries(s *Snapshot) udpEntries {
	e := udpEntries{serving: map[netip.AddrPort][]netip.AddrPort{}, nodePorts: map[nodePortKey][]netip.AddrPort{}}
	if s == nil {
		return e
	}
	for _, p := range udpPorts(s) {
		e.serving[netip.AddrPortFrom(p.ClusterIP, p.Port)] = p.Serving
		for _, a := range p.ExternalIPs {
			e.serving[netip.AddrPortFrom(a, p.Port)] = p.Serving
		}
		for _, a := range p.LoadBalancerIPs {
			e.serving[netip.AddrPortFrom(a, p.Port)] = p.Serving
		}
		if p.NodePort != 0 {
			e.nodePorts[nodePortKey{p.Family, p.NodePort}] = p.Serving
		}
	}
	return e
}

// udpPorts are the Service ports that conntrack clean-up is about.
func udpPorts(s *Snapshot) []*ServicePort {
	if s == nil {
		return nil
	}
	var out []*ServicePort
	for _, p := range s.Services {
		if p.Protocol == corev1.ProtocolUDP {
			out = append(out, p)
		}
	}
	return out
}

// staleFlows picks the entries that hold a client back, by comparing the table
// with what is wanted; a flow towards an endpoint that serves, terminating or
// not, is never touched. now is the applied snapshot, before the one applied
// earlier, nil after a start. serviceCIDRs helps after a start: a translated
// flow to an address in there that no Service has is left over from one.
//
// A Service without any serving endpoint is left alone: there is nothing better
// to send its clients to, and the next endpoint brings this here again.
func staleFlows(flows []UDPFlow, before, now *Snapshot, local []netip.Addr, serviceCIDRs []netip.Prefix, received func(netip.AddrPort) bool) []UDPFlow {
	want, had := newUDPEntries(now), newUDPEntries(before)
	lookup := func(e udpEntries, f UDPFlow) ([]netip.AddrPort, bool) {
		if eps, ok := e.serving[f.Dst]; ok {
			return eps, true
		}
		if !f.Dst.Addr().IsLoopback() && !slices.Contains(local, f.Dst.Addr()) {
			// Somebody's packet to a like-numbered port elsewhere.
			return nil, false
		}
		eps, ok := e.nodePorts[nodePortKey{FamilyOf(f.Dst.Addr()), f.Dst.Port()}]
		return eps, ok
	}
	var out []UDPFlow
	for _, f := range flows {
		if eps, ok := lookup(want, f); ok {
			if len(eps) > 0 && !slices.Contains(eps, f.Peer) && !received(f.Peer) {
				out = append(out, f)
			}
			continue
		}
		translated := f.Peer != f.Dst
		_, ours := lookup(had, f)
		if before == nil {
			ours = slices.ContainsFunc(serviceCIDRs, func(p netip.Prefix) bool { return p.Contains(f.Dst.Addr()) })
		}
		if translated && ours {
			out = append(out, f)
		}
	}
	return out
}

// TrackedFlows lists every connection that a namespace tracks, of all protocols and both
// families, by protocol and addresses as first sent.
func TrackedFlows(ns *netns.NS) (map[string]bool, error) {
	c, err := kernelConntrack{ns}.dial()
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	all, err := c.Dump(nil)
	if err != nil {
		return nil, fmt.Errorf("list the connection tracking table: %w", err)
	}
	out := make(map[string]bool, len(all))
	for i := range all {
		o := &all[i].TupleOrig
		out[fmt.Sprintf("%d %s %s", o.Proto.Protocol, netip.AddrPortFrom(o.IP.SourceAddress, o.Proto.SourcePort), netip.AddrPortFrom(o.IP.DestinationAddress, o.Proto.DestinationPort))] = true
	}
	return out, nil
}

// NewConntrack returns the table of a network namespace, by netlink; nil means
// the current one. The namespace stays the caller's to close.
func NewConntrack(ns *netns.NS) ConntrackTable { return kernelConntrack{ns} }

type kernelConntrack struct{ netNS *netns.NS }

// inside runs fn in the table's namespace. A socket stays in the one in which it
// was opened.
func (k kernelConntrack) inside(fn func() error) error {
	if k.netNS == nil {
		return fn()
	}
	return k.netNS.Do(fn)
}

func (k kernelConntrack) dial() (*conntrack.Conn, error) {
	var c *conntrack.Conn
	err := k.inside(func() (err error) {
		c, err = conntrack.Dial(nil)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open the connection tracking table: %w", err)
	}
	return c, nil
}

// UDPFlows implements ConntrackTable.
func (k kernelConntrack) UDPFlows(_ context.Context, family corev1.IPFamily) ([]UDPFlow, error) {
	c, err := k.dial()
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	nf := netfilter.ProtoIPv4
	if family == corev1.IPv6Protocol {
		nf = netfilter.ProtoIPv6
	}
	all, err := c.DumpFilter(conntrack.NewFilter().Family(nf), nil)
	if err != nil {
		return nil, fmt.Errorf("list the connection tracking table: %w", err)
	}
	var out []UDPFlow
	for i := range all {
		f := &all[i]
		if f.TupleOrig.Proto.Protocol != unix.IPPROTO_UDP || FamilyOf(f.TupleOrig.IP.DestinationAddress) != family {
			continue
		}
		out = append(out, UDPFlow{
			Src:  netip.AddrPortFrom(f.TupleOrig.IP.SourceAddress, f.TupleOrig.Proto.SourcePort),
			Dst:  netip.AddrPortFrom(f.TupleOrig.IP.DestinationAddress, f.TupleOrig.Proto.DestinationPort),
			Peer: netip.AddrPortFrom(f.TupleReply.IP.SourceAddress, f.TupleReply.Proto.SourcePort),
			id:   f.ID,
		})
	}
	return out, nil
}

// Message and attributes of ctnetlink (linux/netfilter/nfnetlink_conntrack.h).
const (
	ctDelete   = 1<<8 | 2 // NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_DELETE
	ctaOrig    = 1
	ctaIP      = 1
	ctaProto   = 2
	ctaID      = 12
	ctaProtoNo = 1
	ctaSrcPort = 2
	ctaDstPort = 3
	ctaV4Src   = 1 // and 2 is the destination
	ctaV6Src   = 3 // and 4
)

// deleteChunk is how many entries one send deletes. The kernel answers each message that
// it refuses, and the answers have to fit into the socket's buffer.
const deleteChunk = 256

// Delete implements ConntrackTable. Thousands of clients can hang on one endpoint, so
// the messages go in lots over one socket, and only the last of a lot is acknowledged.
func (k kernelConntrack) Delete(ctx context.Context, flows []UDPFlow) error {
	if len(flows) == 0 {
		return nil
	}
	c, err := nfnl.Dial(k.netNS)
	if err != nil {
		return err
	}
	defer c.Close()
	var errs []error
	for lot := range slices.Chunk(flows, deleteChunk) {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		var buf []byte
		var first, last uint32
		for i := range lot {
			flags := uint16(0)
			if i == len(lot)-1 {
				flags = unix.NLM_F_ACK
			}
			buf, last = deleteMessage(c, buf, &lot[i], flags)
			if i == 0 {
				first = last
			}
		}
		if err := c.Send(buf); err != nil {
			return fmt.Errorf("delete connection tracking entries: %w", err)
		}
		for {
			refused, err := c.Await(last)
			if err == nil {
				break
			}
			if refused < first || refused > last {
				return fmt.Errorf("delete connection tracking entries: %w", err)
			}
			if f := &lot[refused-first]; !errors.Is(err, unix.ENOENT) { // else it is gone already
				errs = append(errs, fmt.Errorf("delete the connection tracking entry %s -> %s: %w", f.Src, f.Dst, err))
			}
			if refused == last {
				break
			}
		}
	}
	return errors.Join(errs...)
}

// deleteMessage appends the message that deletes one entry: by its addresses, and by its
// number, so that a newer one with the same addresses stays.
func deleteMessage(c *nfnl.Conn, buf []byte, f *UDPFlow, flags uint16) (out []byte, seq uint32) {
	family, source := uint8(unix.AF_INET), uint16(ctaV4Src)
	if f.Dst.Addr().Is6() {
		family, source = unix.AF_INET6, ctaV6Src
	}
	port := func(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }
	b, start, seq := c.Begin(buf, ctDelete, flags, family, 0)
	b, tuple := nfnl.Nest(b, ctaOrig)
	b, part := nfnl.Nest(b, ctaIP)
	b = nfnl.Bytes(b, source, f.Src.Addr().AsSlice())
	b = nfnl.EndNest(nfnl.Bytes(b, source+1, f.Dst.Addr().AsSlice()), part)
	b, part = nfnl.Nest(b, ctaProto)
	b = nfnl.Uint8(b, ctaProtoNo, unix.IPPROTO_UDP)
	b = nfnl.Bytes(b, ctaSrcPort, port(f.Src.Port()))
	b = nfnl.EndNest(nfnl.Bytes(b, ctaDstPort, port(f.Dst.Port())), part)
	b = nfnl.EndNest(b, tuple)
	b = nfnl.Uint32(b, ctaID, f.id)
	return nfnl.End(b, start), seq
}

// LocalAddrs implements ConntrackTable.
func (k kernelConntrack) LocalAddrs(context.Context) ([]netip.Addr, error) {
	var out []netip.Addr
	list := func() error {
		addrs, err := net.InterfaceAddrs()
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok {
				if ip, ok := netip.AddrFromSlice(n.IP); ok {
					out = append(out, ip.Unmap())
				}
			}
		}
		return err
	}
	if err := k.inside(list); err != nil {
		return nil, fmt.Errorf("list the node's addresses: %w", err)
	}
	return out, nil
}

// CleanConntrack removes the UDP entries of a table that hold clients back after
// now was applied in place of before (nil after a start), and returns how many.
// Entries towards endpoints that serve are never touched, nor those towards a port that
// mode says it receives on (nil for modes that have none). Call it after the
// rules are in the kernel: an entry removed earlier would be made again by the
// client's next packet, under the old rules.
func CleanConntrack(ctx context.Context, table ConntrackTable, before, now *Snapshot, serviceCIDRs []netip.Prefix, mode Mode) (int, error) {
	if before != nil && slices.Equal(udpPorts(before), udpPorts(now)) {
		return 0, nil
	}
	local, err := table.LocalAddrs(ctx)
	if err != nil {
		return 0, err
	}
	received := func(netip.AddrPort) bool { return false }
	if r, ok := mode.(Receiver); ok {
		received = func(at netip.AddrPort) bool {
			// Ports elsewhere, on pods say, may have the same number.
			return slices.Contains(local, at.Addr()) && r.Receives(corev1.ProtocolUDP, at)
		}
	}
	n := 0
	for _, family := range now.Families {
		flows, err := table.UDPFlows(ctx, family)
		if err != nil {
			return n, err
		}
		stale := staleFlows(flows, before, now, local, serviceCIDRs, received)
		if err := table.Delete(ctx, stale); err != nil {
			return n, err
		}
		n += len(stale)
	}
	return n, nil
}
