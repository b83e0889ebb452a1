// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"os/exec"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// BecomeTool replaces this process by a program of the host that runs in the
// network namespace pinned at path, with /sys of that namespace, as "ip netns
// exec" does. All else is the host's: it is for looking at a node or a pod's
// network with the machine's own tools. It returns only when that failed.
func BecomeTool(path string, argv, env []string) error {
	program, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	ns, err := netns.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(ns.Replace(toolMounts, program, argv, env), ns.Close())
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
