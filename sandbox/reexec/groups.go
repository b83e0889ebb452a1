// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// rawSetgroups sets the supplementary groups of the current thread only.
func rawSetgroups(groups []uint32) error {
	var first unsafe.Pointer
	if len(groups) > 0 {
		first = unsafe.Pointer(&groups[0])
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(first), 0); e != 0 {
		return e
	}
	return nil
}
