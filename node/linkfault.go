// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/rtnl"
)

// Drop says in which direction a link loses every packet, as its node sees it.
type Drop string

// The directions: to the node, from it, both; "" is none.
const (
	DropIn   Drop = "in"
	DropOut  Drop = "out"
	DropBoth Drop = "both"
)

// LinkFault is what is wrong with the link between a member of the fabric and its
// bridge. Faults add up; the zero value of a field does nothing.
type LinkFault struct {
	// Name of the fault, which the rules carry as their comment.
	Name string
	// Node is a node's name, or "outside".
	Node string
	// To limits the fault to the packets between the two; "" means all packets of
	// Node's link. Down, Delay and Rate are the whole link's.
	To string
	// Down takes the fabric's end of the link down, so that the node's has no carrier.
	Down bool
	Drop Drop
	// Loss is the share of packets that get lost in each direction, in ten-thousandths.
	Loss int
	// Delay holds up each packet on its way to the node.
	Delay time.Duration
	// Rate is the most that passes in each direction, in bits a second.
	Rate uint64
}

// Sizes of the shaper towards a node: a burst that takes the largest packet that a
// link carries in one piece, and how long a packet may wait.
const (
	shapeBurst = 64 << 10
	shapeWait  = 400 * time.Millisecond
)

// faultQdisc marks our queues: `tc qdisc show` prints 6b70:.
var (
	faultQdisc      = netlink.MakeHandle(0x6b70, 0)
	faultQdiscInner = netlink.MakeHandle(0x6b71, 0)
)

// SetLinkFaults makes the fabric's links faulty as given, and all others right: with
// none, nothing of an earlier call is left. It is done on the fabric's end, where it
// takes no route or address from the node: loss and drops are rules of the bridge, delay
// and rate are queues of the node's port. Only the rate of what a node sends is a queue
// of its own eth0. What was written is read back.
func (f *Fabric) SetLinkFaults(faults []LinkFault) error {
	ns, err := f.cfg.Runtime.CreateNetNS(FabricNS)
	if err != nil {
		return err
	}
	// What can be refused comes first: a kernel without netem must not leave half.
	if err := f.shape(ns, faults); err != nil {
		return fmt.Errorf("fabric: %w", err)
	}
	if err := writeFaultTable(ns, nftables.TableFamilyBridge, linkChains(faults)); err != nil {
		return fmt.Errorf("fabric: %w", err)
	}
	for _, member := range f.memberNames() {
		down := slices.ContainsFunc(faults, func(x LinkFault) bool { return x.Down && memberOf(x.Node) == member })
		if err := f.setPort(portName(member), !down); err != nil {
			return fmt.Errorf("fabric: link of %s: %w", member, err)
		}
	}
	return nil
}

// memberOf returns the name of a namespace on the fabric.
func memberOf(node string) string {
	if node == OutsideNS {
		return OutsideNS
	}
	return NSName(node)
}

// LinkState is one link as the kernel has it.
type LinkState struct {
	// Node is a node's name, or "outside"; Port the fabric's end of its link.
	Node, Port string
	// Up says that the port is set up, Carrier that both ends are.
	Up, Carrier bool
}

// Links reads the state of the link of each node and of the client outside.
func (f *Fabric) Links() ([]LinkState, error) {
	var out []LinkState
	for _, member := range f.memberNames() {
		s := LinkState{Node: nodeOf(member), Port: portName(member)}
		var l rtnl.Link
		if err := f.conn.Do(new(rtnl.Batch).GetLink(s.Port, &l).Tolerate(unix.ENODEV)); err != nil {
			return nil, fmt.Errorf("fabric: link of %s: %w", s.Node, err)
		}
		s.Up, s.Carrier = l.Up, l.Oper == operUp
		out = append(out, s)
	}
	return out, nil
}

// operUp is IF_OPER_UP.
const operUp = 6

func (f *Fabric) memberNames() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := make([]string, 0, len(f.members))
	for name := range f.members {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// setPort sets a port up or down and reads that back.
func (f *Fabric) setPort(port string, up bool) error {
	var l rtnl.Link
	if err := f.conn.Do(new(rtnl.Batch).GetLink(port, &l).Tolerate(unix.ENODEV)); err != nil || l.Index == 0 || l.Up == up {
		return err // a port that is not there belongs to a node that is off
	}
	b := new(rtnl.Batch)
	if up {
		b.SetUp(l.Index)
	} else {
		b.SetDown(l.Index)
	}
	if err := f.conn.Do(b.GetLinkAt(l.Index, &l)); err != nil {
		return err
	}
	if l.Up != up {
		return fmt.Errorf("port %s: asked the kernel to set it up: %t, and it did not", port, up)
	}
	return nil
}

// linkChains encodes the faults as rules of the bridge.
func linkChains(faults []LinkFault) []faultChain {
	c := faultChain{name: "forward", hook: nftables.ChainHookForward, priority: 0}
	for _, x := range faults {
		// from and to are the two directions of the link, by where a packet enters
		// and leaves the bridge.
		in := ports("", portName(memberOf(x.Node)))
		out := ports(portName(memberOf(x.Node)), "")
		if x.To != "" {
			in = ports(portName(memberOf(x.To)), portName(memberOf(x.Node)))
			out = ports(portName(memberOf(x.Node)), portName(memberOf(x.To)))
		}
		rule := func(match []expr.Any, more ...expr.Any) {
			all := append(slices.Clone(match), more...)
			c.rules = append(c.rules, faultRule{x.Name, append(all, &expr.Verdict{Kind: expr.VerdictDrop})})
		}
		if x.Down || x.Drop == DropIn || x.Drop == DropBoth {
			rule(in)
		}
		if x.Down || x.Drop == DropOut || x.Drop == DropBoth {
			rule(out)
		}
		if x.Loss > 0 {
			rule(in, lose(x.Loss)...)
			rule(out, lose(x.Loss)...)
		}
	}
	if len(c.rules) == 0 {
		return nil
	}
	return []faultChain{c}
}

// lose matches a share of packets, in ten-thousandths.
func lose(share int) []expr.Any {
	return []expr.Any{
		&expr.Numgen{Register: 1, Type: unix.NFT_NG_RANDOM, Modulus: 10000},
		// Numbers are compared byte by byte.
		&expr.Byteorder{SourceRegister: 1, DestRegister: 1, Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpLt, Register: 1, Data: bigEndian32(uint32(share))},
	}
}

// ports matches where a packet came in and where it goes out; "" is anywhere.
func ports(in, out string) []expr.Any {
	var match []expr.Any
	for _, p := range []struct {
		key  expr.MetaKey
		name string
	}{{expr.MetaKeyIIFNAME, in}, {expr.MetaKeyOIFNAME, out}} {
		if p.name == "" {
			continue
		}
		name := make([]byte, unix.IFNAMSIZ)
		copy(name, p.name)
		match = append(match, &expr.Meta{Key: p.key, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: name})
	}
	return match
}

// shape gives both ends of each link the queues that they need, and takes those that
// they do not. (A rule of the bridge could limit the rate as well, but would let a whole
// second's worth pass at once.)
func (f *Fabric) shape(fabric *netns.NS, faults []LinkFault) error {
	for _, member := range f.memberNames() {
		var delay time.Duration
		var rate uint64
		for _, x := range faults {
			if memberOf(x.Node) == member && x.To == "" {
				delay += x.Delay
				if rate == 0 || x.Rate > 0 && x.Rate < rate {
					rate = x.Rate
				}
			}
		}
		err := fabric.Do(func() error { return shapePort(portName(member), delay, rate) })
		if m := f.Member(member); err == nil && m != nil {
			err = m.NS.Do(func() error { return shapePort(uplink, 0, rate) })
		}
		if err != nil {
			return fmt.Errorf("link of %s: %w", nodeOf(member), err)
		}
	}
	return nil
}

// ErrNoDelay says that the kernel cannot hold up packets.
var ErrNoDelay = errors.New("this kernel has no netem (sch_netem), which delay needs; loss, drop and rate work without it")

// ErrNoRate says that the kernel cannot pace packets.
var ErrNoRate = errors.New("this kernel has no tbf (sch_tbf), which rate needs; loss and drop work without it")

func shapePort(port string, delay time.Duration, rate uint64) error {
	link, err := netlink.LinkByName(port)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil // of a node that is off
	} else if err != nil {
		return fmt.Errorf("find port %s: %w", port, err)
	}
	at := netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: faultQdisc, Parent: netlink.HANDLE_ROOT}
	had, err := faultQueues(link)
	if err != nil {
		return err
	}
	if len(had) > 0 {
		// The root takes the inner one along. Another one in its place may need
		// other options, which the kernel does not always change.
		if err := netlink.QdiscDel(&netlink.GenericQdisc{QdiscAttrs: at, QdiscType: had[0]}); err != nil {
			return fmt.Errorf("remove the queue of port %s: %w", port, err)
		}
	}
	var want []string
	if delay > 0 {
		q := netlink.NewNetem(at, netlink.NetemQdiscAttrs{Latency: uint32(delay.Microseconds()), Limit: 10000})
		if err := netlink.QdiscAdd(q); errors.Is(err, unix.ENOENT) {
			return ErrNoDelay
		} else if err != nil {
			return fmt.Errorf("delay port %s: %w", port, err)
		}
		want = append(want, q.Type())
		at.Parent, at.Handle = netlink.MakeHandle(0x6b70, 1), faultQdiscInner
	}
	if rate > 0 {
		bytes := max(rate/8, 1)
		limit := uint64(shapeBurst) + bytes*uint64(shapeWait)/uint64(time.Second)
		q := &netlink.Tbf{QdiscAttrs: at, Rate: bytes, Buffer: netlink.Xmittime(bytes, shapeBurst), Limit: uint32(min(limit, 1<<31))}
		if err := netlink.QdiscAdd(q); err != nil {
			if errors.Is(err, unix.ENOENT) {
				err = ErrNoRate
			}
			if delay > 0 {
				root := netlink.QdiscAttrs{LinkIndex: at.LinkIndex, Handle: faultQdisc, Parent: netlink.HANDLE_ROOT}
				err = errors.Join(err, netlink.QdiscDel(&netlink.GenericQdisc{QdiscAttrs: root, QdiscType: "netem"}))
			}
			return fmt.Errorf("limit the rate of port %s: %w", port, err)
		}
		want = append(want, q.Type())
	}
	now, err := faultQueues(link)
	if err == nil && !slices.Equal(now, want) {
		err = fmt.Errorf("port %s: asked for queues %v, the kernel has %v", port, want, now)
	}
	return err
}

// faultQueues reads the kinds of our queues on a link, the outer one first.
func faultQueues(link netlink.Link) ([]string, error) {
	all, err := netlink.QdiscList(link)
	if err != nil {
		return nil, fmt.Errorf("read the queues of port %s: %w", link.Attrs().Name, err)
	}
	found := map[uint32]string{}
	for _, q := range all {
		found[q.Attrs().Handle] = q.Type()
	}
	var kinds []string
	for _, handle := range []uint32{faultQdisc, faultQdiscInner} {
		if kind, ok := found[handle]; ok {
			kinds = append(kinds, kind)
		}
	}
	return kinds, nil
}

// ProbeShaping says whether the kernel can delay and pace packets, by doing it in the
// namespace of ns and reading it back. Each is nil when it works.
func ProbeShaping(ns *netns.NS) (delay, rate error, err error) {
	err = ns.Do(func() error {
		l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "kplab-probe"}, PeerName: "kplab-probe2"}
		if err := netlink.LinkAdd(l); err != nil {
			return fmt.Errorf("make a link to try queues on: %w", err)
		}
		delay = shapePort(l.Name, time.Millisecond, 0)
		rate = shapePort(l.Name, 0, 1<<20)
		return netlink.LinkDel(l)
	})
	return delay, rate, err
}
