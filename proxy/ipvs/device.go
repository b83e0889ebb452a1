// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/proxy"
)

// device finds kube-ipvs0; nil when it is not there.
func (k *kernel) device() (netlink.Link, error) {
	l, err := k.LinkByName(Device)
	var none netlink.LinkNotFoundError
	if errors.As(err, &none) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for %s: %w", Device, err)
	}
	return l, nil
}

// makeDevice makes kube-ipvs0, a link that no packet leaves by: it is there so that the
// addresses on it are the node's own. It stays down. Where the kernel has no dummy
// driver, a bridge without ports does the same.
func (k *kernel) makeDevice() (netlink.Link, error) {
	l, err := k.device()
	if err != nil || l != nil {
		return l, err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = Device
	err = k.LinkAdd(&netlink.Dummy{LinkAttrs: attrs})
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = k.LinkAdd(&netlink.Bridge{LinkAttrs: attrs})
	}
	if err != nil {
		return nil, fmt.Errorf("make %s: %w", Device, err)
	}
	if l, err = k.device(); err != nil {
		return nil, err
	}
	if l == nil {
		return nil, fmt.Errorf("%s was made and is not there", Device)
	}
	if l.Attrs().RawFlags&unix.IFF_NOARP == 0 { // a dummy has it by itself
		if err := k.LinkSetARPOff(l); err != nil {
			return nil, fmt.Errorf("turn ARP off on %s: %w", Device, err)
		}
	}
	return l, nil
}

// addresses lists the addresses of a family: those on kube-ipvs0, and those that the
// node has on other links. Loopback addresses are left out, and link-local ones of IPv6:
// nobody else can name them.
func (k *kernel) addresses(f corev1.IPFamily) (bound map[netip.Addr]bool, local []netip.Addr, err error) {
	l, err := k.device()
	if err != nil {
		return nil, nil, err
	}
	all, err := k.AddrList(nil, netlinkFamily(f))
	if err != nil {
		return nil, nil, fmt.Errorf("list the node's addresses: %w", err)
	}
	bound = map[netip.Addr]bool{}
	for _, a := range all {
		ip := toAddr(a.IP)
		switch {
		case l != nil && a.LinkIndex == l.Attrs().Index:
			if !ip.Is6() || !ip.IsLinkLocalUnicast() {
				bound[ip] = true
			}
		case ip.IsLoopback(), ip.Is6() && ip.IsLinkLocalUnicast(), slices.Contains(local, ip):
		default:
			local = append(local, ip)
		}
	}
	slices.SortFunc(local, netip.Addr.Compare)
	return bound, local, nil
}

func netlinkFamily(f corev1.IPFamily) int {
	if f == corev1.IPv6Protocol {
		return netlink.FAMILY_V6
	}
	return netlink.FAMILY_V4
}

func onDevice(a netip.Addr) *netlink.Addr {
	out := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
	if proxy.FamilyOf(a) == corev1.IPv6Protocol {
		out.Flags = unix.IFA_F_NODAD // usable at once
	}
	return out
}

// bind puts an address on kube-ipvs0; one that is there is kept.
func (k *kernel) bind(l netlink.Link, a netip.Addr) error {
	if err := k.AddrAdd(l, onDevice(a)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("put %s on %s: %w", a, Device, err)
	}
	return nil
}

// unbind takes an address off kube-ipvs0; one that is not there is success.
func (k *kernel) unbind(l netlink.Link, a netip.Addr) error {
	if err := k.AddrDel(l, onDevice(a)); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("take %s off %s: %w", a, Device, err)
	}
	return nil
}
