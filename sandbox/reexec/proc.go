// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Identify returns the ID of a process that is there now.
func Identify(pid int) (ID, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return ID{}, err
	}
	// The program's name stands in brackets and may hold some itself.
	end := bytes.LastIndexByte(stat, ')')
	if end < 0 {
		return ID{}, fmt.Errorf("/proc/%d/stat: no program name", pid)
	}
	const startTime = 22 - 3 // field 22 of proc(5), counted from field 3
	f := strings.Fields(string(stat[end+1:]))
	if len(f) <= startTime {
		return ID{}, fmt.Errorf("/proc/%d/stat: %d fields", pid, len(f))
	}
	start, err := strconv.ParseUint(f[startTime], 10, 64)
	if err != nil {
		return ID{}, fmt.Errorf("/proc/%d/stat: %w", pid, err)
	}
	return ID{Pid: pid, Start: start}, nil
}

// Open returns a pidfd of the process, or an error that wraps unix.ESRCH when it
// has gone, also when another process has its pid by now. The caller closes it.
func (id ID) Open() (int, error) {
	if id.Pid <= 0 {
		return -1, fmt.Errorf("process %d: %w", id.Pid, unix.ESRCH)
	}
	fd, err := unix.PidfdOpen(id.Pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return -1, fmt.Errorf("open process %d: %w", id.Pid, err)
	}
	// Looked at after the open: the descriptor is of the process that has the pid
	// now, and stays so.
	now, err := Identify(id.Pid)
	if err == nil && now == id {
		return fd, nil
	}
	return -1, errors.Join(fmt.Errorf("process %d: %w", id.Pid, unix.ESRCH), unix.Close(fd))
}

// Signal sends sig to the process. A process that has gone is an error that
// wraps unix.ESRCH.
func (id ID) Signal(sig unix.Signal) error {
	fd, err := id.Open()
	if err != nil {
		return err
	}
	err = unix.PidfdSendSignal(fd, sig, nil, 0)
	return errors.Join(err, unix.Close(fd))
}
