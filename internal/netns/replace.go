// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"fmt"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Replace makes this process the program at path, inside the namespace and in a
// mount namespace of its own, whose mounts other processes do not see. prepare
// runs in both before that; it may be nil. Replace returns only when it failed;
// then no other thread was moved.
func (n *NS) Replace(prepare func() error, path string, argv, env []string) error {
	failed := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with this goroutine. It cannot go back to
		// the others, since they share the mounts that it has left.
		runtime.LockOSThread()
		failed <- n.replace(prepare, path, argv, env)
	}()
	return <-failed
}

// replace works on the current thread. The one that calls execve becomes the whole
// process and keeps its own namespaces, so only this one has to move.
func (n *NS) replace(prepare func() error, path string, argv, env []string) error {
	if err := n.enter(); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if prepare != nil {
		if err := prepare(); err != nil {
			return err
		}
	}
	if err := syscall.Exec(path, argv, env); err != nil {
		return fmt.Errorf("execute %s: %w", path, err)
	}
	return nil
}
