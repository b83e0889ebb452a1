// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"os/exec"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// BecomeTool makes this process a program of the host, inside the network
// namespace pinned at path. Files and processes stay the host's, but for /sys,
// which shows the namespace's own devices. It returns only when it failed; the
// error wraps exec.ErrNotFound when there is no such program.
func BecomeTool(path string, argv, env []string) error {
	program, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	ns, err := netns.Open(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Replace(showOwnSys, program, argv, env)
}

// showOwnSys mounts the current network namespace's view of /sys over the host's,
// in a mount namespace that nobody shares.
func showOwnSys() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("keep mounts from spreading to the host: %w", err)
	}
	if err := unix.Mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /sys of the namespace: %w", err)
	}
	return nil
}
