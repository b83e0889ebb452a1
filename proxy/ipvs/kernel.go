// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	mobyipvs "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nfnl"
	"github.com/kplab/kplab/proxy"
)

// genlFamily is the name of IPVS among the generic netlink families.
const genlFamily = "IPVS"

// ErrNoIPVS means that the kernel has no IPVS; the message says what to do.
var ErrNoIPVS = errors.New("this kernel has no IPVS")

// kernel is the open sockets of one Apply or Cleanup in a node's namespace. A socket
// stays in the namespace in which it was opened, and keeps that alive: close it.
type kernel struct {
	ipvs *mobyipvs.Handle
	*netlink.Handle
	// ports is for sets of type bitmap:port: the library sends a protocol with each port,
	// and the kernel refuses what the type does not know.
	ports *nfnl.Conn
}

// openKernel opens the sockets in ns; nil means the current namespace. The error wraps
// ErrNoIPVS where there is none: the library would say nothing, and every call of it
// would succeed.
func openKernel(ns *netns.NS) (*kernel, error) {
	k := &kernel{}
	err := inNS(ns, func() (err error) {
		if k.Handle, err = netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER, unix.NETLINK_GENERIC); err != nil {
			return err
		}
		if _, err := k.GenlFamilyGet(genlFamily); err != nil {
			return fmt.Errorf("%w (netlink family %s: %w): load it with `modprobe ip_vs`, or use a kernel that has the module", ErrNoIPVS, genlFamily, err)
		}
		k.ipvs, err = mobyipvs.New("")
		return err
	})
	if err == nil {
		k.ports, err = nfnl.Dial(ns)
	}
	if err != nil {
		k.close()
		return nil, fmt.Errorf("open IPVS: %w", err)
	}
	return k, nil
}

// openLinks is openKernel without IPVS: links and sets, on any kernel.
func openLinks(ns *netns.NS) (*kernel, error) {
	k := &kernel{}
	err := inNS(ns, func() (err error) {
		k.Handle, err = netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
		return err
	})
	if err == nil {
		k.ports, err = nfnl.Dial(ns)
	}
	if err != nil {
		k.close()
		return nil, fmt.Errorf("open netlink sockets: %w", err)
	}
	return k, nil
}

func (k *kernel) close() {
	if k.ipvs != nil {
		k.ipvs.Close()
	}
	if k.ports != nil {
		k.ports.Close()
	}
	if k.Handle != nil {
		k.Close()
	}
}

func inNS(ns *netns.NS, fn func() error) error {
	if ns == nil {
		return fn()
	}
	return ns.Do(fn)
}

// service is a virtual server as the library has it.
func (k key) service() *mobyipvs.Service {
	s := &mobyipvs.Service{Address: k.addr.AsSlice(), Port: k.port, Protocol: uint16(k.proto), AddressFamily: unix.AF_INET, Netmask: 0xffffffff}
	if k.addr.Is6() {
		s.AddressFamily, s.Netmask = unix.AF_INET6, 128
	}
	return s
}

func (s *server) service() *mobyipvs.Service {
	out := s.key.service()
	out.SchedName, out.Flags, out.Timeout = s.scheduler, s.flags, s.timeout
	return out
}

func destination(a netip.AddrPort, weight int) *mobyipvs.Destination {
	d := &mobyipvs.Destination{Address: a.Addr().AsSlice(), Port: a.Port(), Weight: weight, ConnectionFlags: mobyipvs.ConnectionFlagMasq, AddressFamily: unix.AF_INET}
	if a.Addr().Is6() {
		d.AddressFamily = unix.AF_INET6
	}
	return d
}

// dest is a real server as the kernel has it.
type dest struct {
	weight int
	// active counts its connections, open those that open or close as well.
	active, open int
}

func toAddr(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// serversOf lists the virtual servers of a family and their options.
func (k *kernel) serversOf(f corev1.IPFamily) (map[key]options, error) {
	all, err := k.ipvs.GetServices()
	if err != nil {
		return nil, fmt.Errorf("list virtual servers: %w", err)
	}
	out := make(map[key]options, len(all))
	for _, s := range all {
		a := toAddr(s.Address)
		if s.FWMark != 0 || !a.IsValid() || proxy.FamilyOf(a) != f {
			continue
		}
		o := options{scheduler: s.SchedName, flags: s.Flags & flagsOurs}
		if o.flags&flagPersistent != 0 {
			o.timeout = s.Timeout
		}
		out[key{a, s.Port, uint8(s.Protocol)}] = o
	}
	return out, nil
}

// destsOf lists the real servers of a virtual server.
func (k *kernel) destsOf(s key) (map[netip.AddrPort]dest, error) {
	all, err := k.ipvs.GetDestinations(s.service())
	if err != nil {
		return nil, fmt.Errorf("list the real servers of %s: %w", s, err)
	}
	out := make(map[netip.AddrPort]dest, len(all))
	for _, d := range all {
		out[netip.AddrPortFrom(toAddr(d.Address), d.Port)] = dest{d.Weight, d.ActiveConnections, d.ActiveConnections + d.InactiveConnections}
	}
	return out, nil
}

// maxEntries is how many entries a hash holds; kube-proxy's figure, and the tool's.
const maxEntries = 65536

// createSet makes a set; one of the same name that is there is kept.
func (k *kernel) createSet(s set, f corev1.IPFamily) error {
	o := netlink.IpsetCreateOptions{Replace: true, Family: unix.AF_INET, MaxElements: maxEntries}
	if f == corev1.IPv6Protocol {
		o.Family = unix.AF_INET6
	}
	if s.kind() == bitmapPort {
		o = netlink.IpsetCreateOptions{Replace: true, PortTo: 65535}
	}
	if err := k.IpsetCreate(s.nameIn(f), s.kind(), o); err != nil {
		return fmt.Errorf("make the set %s of type %s: %w", s.nameIn(f), s.kind(), err)
	}
	return nil
}

// entriesOf lists a set; nil when there is none of the name.
func (k *kernel) entriesOf(s set, f corev1.IPFamily) (map[entry]bool, error) {
	got, err := k.IpsetList(s.nameIn(f))
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return nil, nil // also on a kernel without sets
	case err != nil:
		return nil, fmt.Errorf("list the set %s: %w", s.nameIn(f), err)
	case got.TypeName != s.kind():
		return nil, fmt.Errorf("the set %s is of type %s and should be of type %s: somebody else made it; delete it with `ipset destroy %[1]s`", s.nameIn(f), got.TypeName, s.kind())
	}
	out := make(map[entry]bool, len(got.Entries))
	for i := range got.Entries {
		out[readEntry(s.kind(), &got.Entries[i])] = true
	}
	return out, nil
}

func readEntry(kind string, from *netlink.IPSetEntry) entry {
	var e entry
	if from.Port != nil {
		e.port = *from.Port
	}
	if kind == bitmapPort {
		return e
	}
	e.addr = toAddr(from.IP)
	if kind == hashIP {
		return e
	}
	if from.Protocol != nil {
		e.proto = *from.Protocol
	}
	if kind != hashIPPort {
		a := toAddr(from.IP2)
		bits := a.BitLen()
		if kind == hashIPPortNet && from.CIDR2 != 0 {
			bits = int(from.CIDR2)
		}
		e.other = netip.PrefixFrom(a, bits)
	}
	return e
}

func (e entry) message(kind string) *netlink.IPSetEntry {
	m := &netlink.IPSetEntry{Replace: true}
	m.IP = e.addr.AsSlice()
	if kind == hashIP {
		return m
	}
	m.Protocol, m.Port = &e.proto, &e.port
	if kind != hashIPPort {
		m.IP2 = e.other.Addr().AsSlice()
	}
	if kind == hashIPPortNet {
		m.CIDR2 = uint8(e.other.Bits())
	}
	return m
}

// has asks whether a set holds an entry.
func (k *kernel) has(s set, f corev1.IPFamily, e entry) (bool, error) {
	ok, err := true, error(nil)
	if s.kind() == bitmapPort {
		if err = k.portRequest(nl.IPSET_CMD_TEST, s.nameIn(f), e.port); errors.Is(err, unix.Errno(nl.IPSET_ERR_EXIST)) {
			ok, err = false, nil
		}
	} else {
		ok, err = k.IpsetTest(s.nameIn(f), e.message(s.kind()))
	}
	if err != nil {
		return false, fmt.Errorf("ask set %s for %s: %w", s.nameIn(f), e.text(s.kind()), err)
	}
	return ok, nil
}

func (k *kernel) addEntry(s set, f corev1.IPFamily, e entry) error {
	var err error
	if s.kind() == bitmapPort {
		err = k.portRequest(nl.IPSET_CMD_ADD, s.nameIn(f), e.port)
	} else {
		err = k.IpsetAdd(s.nameIn(f), e.message(s.kind()))
	}
	if err != nil {
		return fmt.Errorf("add %s to set %s: %w", e.text(s.kind()), s.nameIn(f), err)
	}
	return nil
}

func (k *kernel) deleteEntry(s set, f corev1.IPFamily, e entry) error {
	var err error
	if s.kind() == bitmapPort {
		err = k.portRequest(nl.IPSET_CMD_DEL, s.nameIn(f), e.port)
	} else {
		err = k.IpsetDel(s.nameIn(f), e.message(s.kind()))
	}
	if err != nil {
		return fmt.Errorf("delete %s from set %s: %w", e.text(s.kind()), s.nameIn(f), err)
	}
	return nil
}

// portRequest adds a port to a set of type bitmap:port, deletes it, or asks for it.
func (k *kernel) portRequest(cmd uint16, name string, port uint16) error {
	return k.ports.Request(unix.NFNL_SUBSYS_IPSET<<8|cmd, 0, unix.AF_UNSPEC, func(b []byte) []byte {
		b = nfnl.Uint8(b, nl.IPSET_ATTR_PROTOCOL, nl.IPSET_PROTOCOL)
		b = nfnl.String(b, nl.IPSET_ATTR_SETNAME, name)
		b, nest := nfnl.Nest(b, nl.IPSET_ATTR_DATA)
		b = nfnl.Bytes(b, nl.IPSET_ATTR_PORT|unix.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint16(nil, port))
		return nfnl.EndNest(b, nest)
	}, nil)
}
