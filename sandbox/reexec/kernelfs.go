// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// maskedPaths and readOnlyPaths of /proc and /sys are those of container
// runtimes: the first tell about the machine or steer it, the second may be read.
func maskedPaths() []string {
	return []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
		"/sys/devices/virtual/powercap", "/sys/firmware",
	}
}

func readOnlyPaths() []string {
	return []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
}

// mountKernel mounts /proc of the process namespace that the current process is
// in, and /sys of its network namespace.
func mountKernel(unmasked bool) error {
	const strict = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("proc", "/proc", "proc", strict, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	var sysFlags uintptr = strict
	if !unmasked {
		sysFlags |= unix.MS_RDONLY
	}
	if err := unix.Mount("sysfs", "/sys", "sysfs", sysFlags, ""); err != nil {
		return fmt.Errorf("mount /sys: %w", err)
	}
	if unmasked {
		return nil
	}
	for _, path := range readOnlyPaths() {
		t, err := takeTree(path, path, true, false)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			err = t.put()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// mask covers what containers do not see. It needs /dev/null.
func mask() error {
	for _, path := range maskedPaths() {
		fi, err := os.Lstat(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if fi.IsDir() {
			err = unix.Mount("kplab", path, "tmpfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=0,nr_inodes=1")
		} else {
			err = unix.Mount("/dev/null", path, "", unix.MS_BIND, "")
		}
		if err != nil {
			return fmt.Errorf("mask %s: %w", path, err)
		}
	}
	return nil
}

// device is a character device of /dev.
type device struct {
	name         string
	major, minor uint32
}

func devices() []device {
	return []device{
		{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0},
	}
}

// hostDevices takes the host's device files where a process may not make some of
// its own: in a user namespace.
func hostDevices() ([]tree, error) {
	data, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return nil, err
	}
	var inside, outside, count uint64
	if _, err := fmt.Sscan(string(data), &inside, &outside, &count); err != nil {
		return nil, fmt.Errorf("read /proc/self/uid_map: %w", err)
	}
	if inside == 0 && outside == 0 && count == 1<<32-1 {
		return nil, nil
	}
	var trees []tree
	for _, d := range devices() {
		fd, err := unix.OpenTree(unix.AT_FDCWD, "/dev/"+d.name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return nil, fmt.Errorf("take /dev/%s: %w", d.name, err)
		}
		trees = append(trees, tree{fd: fd, target: "/dev/" + d.name})
	}
	return trees, nil
}

// makeDevices fills /dev: only what every program expects.
func makeDevices(fromHost []tree) error {
	if err := unix.Mount("kplab", "/dev", "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "size=64k,mode=755"); err != nil {
		return fmt.Errorf("mount /dev: %w", err)
	}
	for _, t := range fromHost {
		if err := t.put(); err != nil {
			return err
		}
	}
	if len(fromHost) == 0 {
		for _, d := range devices() {
			path := "/dev/" + d.name
			if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
				return fmt.Errorf("make %s: %w", path, err)
			}
			if err := os.Chmod(path, 0o666); err != nil { // whatever the umask is
				return err
			}
		}
	}
	for _, l := range [][2]string{
		{"/proc/self/fd", "/dev/fd"}, {"/proc/self/fd/0", "/dev/stdin"}, {"/proc/self/fd/1", "/dev/stdout"},
		{"/proc/self/fd/2", "/dev/stderr"}, {"pts/ptmx", "/dev/ptmx"},
	} {
		if err := os.Symlink(l[0], l[1]); err != nil {
			return err
		}
	}
	for _, d := range []string{"/dev/pts", "/dev/shm", "/dev/mqueue"} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	const quiet = unix.MS_NOSUID | unix.MS_NOEXEC
	err := unix.Mount("devpts", "/dev/pts", "devpts", quiet, "newinstance,ptmxmode=0666,mode=0620,gid=5")
	if errors.Is(err, unix.EINVAL) { // group 5 does not exist in a user namespace of one group
		err = unix.Mount("devpts", "/dev/pts", "devpts", quiet, "newinstance,ptmxmode=0666,mode=0620")
	}
	if err != nil {
		return fmt.Errorf("mount /dev/pts: %w", err)
	}
	if err := unix.Mount("shm", "/dev/shm", "tmpfs", quiet|unix.MS_NODEV, "mode=1777,size=64m"); err != nil {
		return fmt.Errorf("mount /dev/shm: %w", err)
	}
	if err := unix.Mount("mqueue", "/dev/mqueue", "mqueue", quiet|unix.MS_NODEV, ""); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("mount /dev/mqueue: %w", err)
	}
	return nil
}
