// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Role is what a namespace on the fabric is.
type Role int

const (
	// RoleNode forwards for its pods.
	RoleNode Role = iota
	// RoleOutside is a client beyond the cluster.
	RoleOutside
	// roleFabric is the namespace of the bridge.
	roleFabric
)

// setting is one file below /proc/sys/net and what it must hold.
type setting struct{ file, value string }

// settings returns what a namespace of the role must not leave to the host. fresh
// is a namespace without links yet; settings that a proxy mode changes later are
// only written then, so that a restart does not undo them under running traffic.
// Files that the kernel does not have are passed over. ipv6 is a lab with IPv6
// addresses; one without leaves most of it as the kernel has it.
func settings(role Role, fresh, ipv6 bool) []setting {
	if role == roleFabric {
		return []setting{
			{"ipv4/ip_forward", "0"},
			// The fabric is a wire: no filter of its own, no address of its own.
			{"bridge/bridge-nf-call-iptables", "0"},
			{"bridge/bridge-nf-call-ip6tables", "0"},
			{"bridge/bridge-nf-call-arptables", "0"},
			{"ipv6/conf/default/disable_ipv6", "1"},
			{"ipv6/conf/all/disable_ipv6", "1"},
		}
	}
	forward := "0"
	if role == RoleNode {
		forward = "1"
	}
	s := []setting{
		{"ipv4/ip_forward", forward},
		// The kernel takes the larger of "all" and the link's own (which starts as
		// "default"): replies of a Service may come by another way than requests
		// went, and strict filtering drops them.
		{"ipv4/conf/all/rp_filter", "0"},
		{"ipv4/conf/default/rp_filter", "0"},
		// The kernel ORs "all" and the link's own. A redirect would send a client
		// around the node, and it takes the place of the ICMP that a reject sends.
		{"ipv4/conf/all/send_redirects", "0"},
		{"ipv4/conf/default/send_redirects", "0"},
		{"ipv4/conf/all/accept_redirects", "0"},
		{"ipv4/conf/default/accept_redirects", "0"},
		{"ipv6/conf/all/accept_ra", "0"},
		{"ipv6/conf/default/accept_ra", "0"},
	}
	if ipv6 {
		for _, which := range []string{"all", "default"} {
			s = append(s,
				setting{"ipv6/conf/" + which + "/disable_ipv6", "0"},
				setting{"ipv6/conf/" + which + "/forwarding", forward},
				setting{"ipv6/conf/" + which + "/accept_redirects", "0"})
		}
		// Every address is given by hand. One that the kernel makes for a link is
		// tried out on the wire for a second first, at each pod.
		s = append(s, setting{"ipv6/conf/default/addr_gen_mode", "1"})
	}
	if fresh {
		for _, which := range []string{"all", "default"} {
			s = append(s,
				setting{"ipv4/conf/" + which + "/route_localnet", "0"},
				setting{"ipv4/conf/" + which + "/arp_ignore", "0"},
				setting{"ipv4/conf/" + which + "/arp_announce", "0"})
		}
	}
	return s
}

// writeSettings writes all of them, in the namespace of the thread.
func writeSettings(all []setting) error {
	// One path walk for the directory; each file below is one open and one write.
	dir, err := unix.Open("/proc/sys/net", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /proc/sys/net: %w", err)
	}
	var errs []error
	for _, s := range all {
		errs = append(errs, s.write(dir))
	}
	return errors.Join(append(errs, unix.Close(dir))...)
}

func (s setting) write(dir int) error {
	fd, err := unix.Openat(dir, s.file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err == nil {
		_, err = unix.Write(fd, []byte(s.value))
		err = errors.Join(err, unix.Close(fd))
	}
	if err != nil {
		return fmt.Errorf("set %s to %s: %w", s.file, s.value, &os.PathError{Op: "write", Path: "/proc/sys/net/" + s.file, Err: err})
	}
	return nil
}
