// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// BecomeTool replaces this process by a program of the host that runs in the
// network namespace pinned at path, with /sys of that namespace, as "ip netns
// exec" does, and with resolvConf as its /etc/resolv.conf, since the host's name
// servers cannot be reached from there. All else is the host's: it is for looking at
// a node or a pod's network with the machine's own tools. It returns only when that
// failed.
func BecomeTool(path, resolvConf string, argv, env []string) error {
	program, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	ns, err := netns.Open(path)
	if err != nil {
		return err
	}
	mounts := func() error { return errors.Join(toolMounts(), mountFile("/etc/resolv.conf", resolvConf)) }
	return errors.Join(ns.Replace(mounts, program, argv, env), ns.Close())
}

// toolMounts gives the current mount namespace, a copy of the host's, the /sys of
// the current network namespace.
func toolMounts() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("keep mounts from the host: %w", err)
	}
	if err := unix.Mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /sys: %w", err)
	}
	return nil
}

// mountFile puts a file with this content over the one at target, if there is one, in
// the current mount namespace. The file lies in a file system of its own that has no
// other place.
func mountFile(target, content string) (err error) {
	if _, err := os.Stat(target); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("mount a file over %s: %w", target, err)
		}
	}()
	const name = "file"
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(fs)) }()
	if err := unix.FsconfigCreate(fs); err != nil {
		return err
	}
	dir, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(dir)) }()
	fd, err := unix.Openat(dir, name, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteString(content); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Close(); err != nil {
		return err
	}
	file, err := unix.OpenTree(dir, name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(file)) }()
	return unix.MoveMount(file, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_SYMLINKS)
}
