// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A container has no user namespace of its own, so its root is the machine's with
// fewer capabilities. What those do not guard is refused here: making a user
// namespace, which gives all capabilities back in a new place; kernel keyrings,
// which are one for the whole machine; and the wide interfaces to the kernel that
// no lab needs. It is a short list of refusals, not of permissions: everything
// that a person would try in a pod works.

// refused lists the system calls that fail with EPERM.
func refused() []uint32 {
	return []uint32{
		unix.SYS_KEYCTL, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY,
		unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_IO_URING_SETUP,
		unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD, unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE,
		unix.SYS_OPEN_BY_HANDLE_AT, unix.SYS_NAME_TO_HANDLE_AT,
		unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE,
		unix.SYS_FSOPEN, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_MOUNT_SETATTR,
		unix.SYS_SETNS, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_REBOOT, unix.SYS_ACCT, unix.SYS_QUOTACTL,
	}
}

// auditArch returns what seccomp calls this machine, and false where the filter
// is not known to be right.
func auditArch() (uint32, bool) {
	switch runtime.GOARCH {
	case "amd64":
		return unix.AUDIT_ARCH_X86_64, true
	case "arm64":
		return unix.AUDIT_ARCH_AARCH64, true
	}
	return 0, false
}

// Offsets in struct seccomp_data, little endian.
const (
	dataNumber = 0
	dataArch   = 4
	dataArg0   = 16 // low half of the first argument
)

// x32 is set in the numbers of amd64's second, 32-bit-pointer table of calls,
// which would go around the list.
const x32 = 0x40000000

// namespaceFlags are the flags of clone and unshare that make namespaces.
const namespaceFlags = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET |
	unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWCGROUP

// program builds the filter.
func program(arch uint32) []unix.SockFilter {
	var p []unix.SockFilter
	stmt := func(code uint16, k uint32) { p = append(p, unix.SockFilter{Code: code, K: k}) }
	jump := func(code uint16, k uint32, yes, no uint8) {
		p = append(p, unix.SockFilter{Code: code, Jt: yes, Jf: no, K: k})
	}
	const (
		load   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		above  = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
		anyBit = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		ret    = unix.BPF_RET | unix.BPF_K
	)
	refuse := uint32(unix.SECCOMP_RET_ERRNO) | uint32(unix.EPERM)
	absent := uint32(unix.SECCOMP_RET_ERRNO) | uint32(unix.ENOSYS)

	// Calls of another architecture's table have other numbers.
	stmt(load, dataArch)
	jump(equal, arch, 1, 0)
	stmt(ret, absent)
	stmt(load, dataNumber)
	if arch == unix.AUDIT_ARCH_X86_64 {
		jump(above, x32, 0, 1)
		stmt(ret, absent)
	}
	for _, nr := range refused() {
		jump(equal, nr, 0, 1)
		stmt(ret, refuse)
	}
	// The flags of clone3 lie in memory, where a filter cannot look. The C library
	// falls back to clone when the kernel does not have it.
	jump(equal, unix.SYS_CLONE3, 0, 1)
	stmt(ret, absent)
	for _, nr := range []uint32{unix.SYS_CLONE, unix.SYS_UNSHARE} {
		jump(equal, nr, 0, 3)
		stmt(load, dataArg0)
		jump(anyBit, namespaceFlags, 0, 1)
		stmt(ret, refuse)
		// After the argument was loaded the number has to be loaded again.
		stmt(load, dataNumber)
	}
	stmt(ret, unix.SECCOMP_RET_ALLOW)
	return p
}

// installFilter puts the filter on the current thread, for good and for all that
// it starts.
func installFilter() error {
	arch, ok := auditArch()
	if !ok {
		return nil
	}
	filter := program(arch)
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	if e != 0 {
		return fmt.Errorf("install the system call filter: %w", e)
	}
	return nil
}
