// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// capabilityNames lists the capabilities by number, as in linux/capability.h.
func capabilityNames() []string {
	return []string{
		"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID",
		"SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
		"SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
		"SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
		"MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
		"CHECKPOINT_RESTORE",
	}
}

// DefaultCapabilities names what a container has when nobody asks for more or
// less: the set that container runtimes agree on.
func DefaultCapabilities() []string {
	return []string{
		"CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
		"NET_BIND_SERVICE", "NET_RAW", "SYS_CHROOT", "MKNOD", "AUDIT_WRITE", "SETFCAP",
	}
}

// CapabilitySet turns the default set, with add and without drop, into bits. "ALL"
// in either is every capability; drop wins, except that what add names survives
// drop's ALL, as Kubernetes has it.
func CapabilitySet(add, drop []string) (uint64, error) {
	var set uint64
	for _, name := range DefaultCapabilities() {
		bit, err := capabilityBits(name)
		if err != nil {
			return 0, err
		}
		set |= bit
	}
	var added, dropped uint64
	dropAll := false
	for _, name := range drop {
		bits, err := capabilityBits(name)
		if err != nil {
			return 0, err
		}
		if bits == allCapabilities() {
			dropAll = true
			continue
		}
		dropped |= bits
	}
	for _, name := range add {
		bits, err := capabilityBits(name)
		if err != nil {
			return 0, err
		}
		added |= bits
	}
	if dropAll {
		set = 0
	}
	return (set | added) &^ dropped, nil
}

// AllCapabilities is the bits of every capability that there is.
func AllCapabilities() uint64 { return allCapabilities() }

func allCapabilities() uint64 { return 1<<len(capabilityNames()) - 1 }

// capabilityBits returns the bit of a name, or all for "ALL".
func capabilityBits(name string) (uint64, error) {
	short := strings.TrimPrefix(strings.ToUpper(name), "CAP_")
	if short == "ALL" {
		return allCapabilities(), nil
	}
	for i, known := range capabilityNames() {
		if short == known {
			return 1 << i, nil
		}
	}
	return 0, fmt.Errorf("no capability is called %q; see capabilities(7)", name)
}

// lastCapability is the highest number that this kernel knows.
func lastCapability() int {
	data, err := os.ReadFile("/proc/sys/kernel/cap_last_cap")
	if err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(data))); err == nil {
			return n
		}
	}
	return len(capabilityNames()) - 1
}

// dropBounding removes from the thread's bounding set all but keep.
func dropBounding(keep uint64, last int) error {
	for n := 0; n <= last; n++ {
		if keep&(1<<n) != 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(n), 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d from the bounding set: %w", n, err)
		}
	}
	return nil
}

// setCapabilities makes the thread's permitted and effective sets at most keep
// and its inheritable and ambient sets empty.
func setCapabilities(keep uint64) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var now [2]unix.CapUserData
	if err := unix.Capget(&header, &now[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	for i := range now {
		now[i].Permitted &= uint32(keep >> (32 * i))
		now[i].Effective = now[i].Permitted
		now[i].Inheritable = 0
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	if err := unix.Capset(&header, &now[0]); err != nil {
		return fmt.Errorf("set capabilities: %w", err)
	}
	return nil
}
