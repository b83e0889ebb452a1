// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"os/exec"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// BecomeTool replaces this process by a program of the host that runs in the
// network namespace pinned at path, with /sys of that namespace, as "ip netns
// exec" does. All else is the host's: it is for looking at a node or a pod's
// network with the machine's own tools. It returns only when that failed, and then
// the process should end: one of its threads may have another view of the mounts.
func BecomeTool(path string, argv, env []string) error {
	program, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	ns, err := netns.Open(path)
	if err != nil {
		return err
	}
	// The program takes the place of the whole process from the thread inside.
	return ns.Do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("make a mount namespace: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
			return fmt.Errorf("keep mounts from the host: %w", err)
		}
		if err := unix.Mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return fmt.Errorf("mount /sys: %w", err)
		}
		return unix.Exec(program, argv, env)
	})
}
