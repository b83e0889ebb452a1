// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// newPodNetNS makes a namespace as a pod finds it, before any link is put in.
func newPodNetNS() (*netns.NS, error) {
	ns, err := netns.New()
	if err != nil {
		return nil, err
	}
	if err := ns.Do(preparePod); err != nil {
		return nil, errors.Join(fmt.Errorf("prepare a pod's network namespace: %w", err), ns.Close())
	}
	return ns, nil
}

// podSetting is a file below /proc/sys/net. Without a fallback the value has to be
// accepted.
type podSetting struct{ file, value, fallback string }

// podSettings says what a new namespace must not take from the host, which may be
// a router, run Docker, or be hardened; and the two that containerd relaxes: any
// user may ping and bind low ports. Files that the kernel does not have (IPv6) are
// passed over.
func podSettings() []podSetting {
	s := []podSetting{
		// First: the kernel changes accept_redirects along with it.
		{file: "ipv4/ip_forward", value: "0"},
		// In a user namespace of one group no more than that group can be named.
		{file: "ipv4/ping_group_range", value: "0 2147483647", fallback: "0 0"},
		{file: "ipv4/ip_unprivileged_port_start", value: "0"},
	}
	for _, of := range []string{"all", "default"} {
		// "all" counts for every link together with the link's own value, which
		// begins as a copy of "default".
		for _, off := range []string{
			"rp_filter", "accept_redirects", "send_redirects", "secure_redirects", "accept_source_route",
			"route_localnet", "accept_local", "arp_ignore", "arp_announce", "arp_filter", "proxy_arp", "log_martians",
		} {
			s = append(s, podSetting{file: "ipv4/conf/" + of + "/" + off, value: "0"})
		}
		for _, off := range []string{"accept_ra", "accept_redirects", "forwarding", "disable_ipv6"} {
			s = append(s, podSetting{file: "ipv6/conf/" + of + "/" + off, value: "0"})
		}
	}
	return s
}

// preparePod writes the settings of the current namespace and sets lo up.
func preparePod() error {
	for _, s := range podSettings() {
		err := writeSetting(s.file, s.value)
		if err != nil && s.fallback != "" {
			err = writeSetting(s.file, s.fallback)
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return loUp()
}

// writeSetting writes one file of the current namespace, unless it holds the value
// already: a write can take locks that a read does not.
func writeSetting(file, value string) error {
	path := "/proc/sys/net/" + file
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer func() { _ = unix.Close(fd) }() // nothing is buffered
	var buf [64]byte
	n, err := unix.Pread(fd, buf[:], 0)
	if err == nil && n == len(value)+1 && string(buf[:n-1]) == value {
		return nil
	}
	if _, err := unix.Pwrite(fd, []byte(value), 0); err != nil {
		return fmt.Errorf("set %s to %q: %w", path, value, err)
	}
	return nil
}

// loUp sets the loopback link of the current namespace up. The old ioctl is the
// cheapest way: no netlink socket, one call.
func loUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open a socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}
