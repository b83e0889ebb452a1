// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// spawnInside starts a kplab-init in the process namespace of a process. Only the
// thread's children are moved there, and only for this.
func spawnInside(target ID) (*Role, error) {
	fd, err := target.Open()
	if err != nil {
		return nil, &causeError{CauseNotRunning, fmt.Errorf("the container to share processes with is not running: %w", err)}
	}
	own, err := unix.Open("/proc/thread-self/ns/pid", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the own process namespace: %w", err), unix.Close(fd))
	}
	defer func() { _ = unix.Close(own) }() // it was only open
	err = unix.Setns(fd, unix.CLONE_NEWPID)
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		err = fmt.Errorf("join the processes of the container: %w", err)
		if errors.Is(err, unix.ESRCH) {
			err = &causeError{CauseNotRunning, err}
		}
		return nil, err
	}
	init, err := spawn(RoleInit, "/proc/self/exe", false)
	if back := unix.Setns(own, unix.CLONE_NEWPID); back != nil {
		return nil, errors.Join(err, fmt.Errorf("return to the own process namespace: %w", back), init.Drop())
	}
	return init, err
}

// place is what the processes of one container have in common: mounts of their own,
// and a process namespace. kplab-exec has the first only.
func place(pid int) (string, error) {
	dir := "/proc/" + strconv.Itoa(pid) + "/ns/"
	mounts, err := os.Readlink(dir + "mnt")
	if err != nil {
		return "", err
	}
	processes, err := os.Readlink(dir + "pid")
	return mounts + " " + processes, err
}

// killInside kills every process of a place: what a container has left in a process
// namespace that outlives it. It returns when there is none.
func killInside(inside string) error {
	for {
		entries, err := os.ReadDir("/proc")
		if err != nil {
			return err
		}
		var ids []ID
		for _, e := range entries {
			pid, err := strconv.Atoi(e.Name())
			if err != nil {
				continue
			}
			if at, err := place(pid); err != nil || at != inside {
				continue // a process that ends is nowhere either
			}
			if id, err := Identify(pid); err == nil {
				ids = append(ids, id)
			}
		}
		if len(ids) == 0 {
			return nil
		}
		for _, id := range ids {
			if err := killAndAwait(id); err != nil {
				return err
			}
		}
	}
}

// killAndAwait kills a process and waits for its end.
func killAndAwait(id ID) error {
	fd, err := id.Open()
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }() // it was only watched
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", id.Pid, err)
	}
	for {
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
