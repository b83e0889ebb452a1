// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// runInit is process 1 of a container up to the moment when the program takes its
// place. The one who started it sees its end of the report socket close then.
func runInit(ch *channel) error {
	var cfg InitConfig
	if err := ch.receive(&cfg); err != nil {
		return err
	}
	// Not readable through /proc by whoever comes into the process namespace.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("hide from other processes: %w", err)
	}
	last := lastCapability() // from the host's /proc, before it is out of sight
	if err := join(cfg.Namespaces); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := buildRoot(cfg.Scaffold, &cfg.Root, cfg.Process.UID, cfg.Process.GID); err != nil {
		return fmt.Errorf("build the container's root: %w", err)
	}
	if cfg.Process.TTY {
		slave, err := openTerminal(ch, &cfg.Process)
		if err != nil {
			return err
		}
		if err := takeTerminal(slave); err != nil {
			return err
		}
	}
	hostname, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("read the host name: %w", err)
	}
	env := environment(&cfg.Process, hostname)
	if err := enterDir(cfg.Process.WorkingDir); err != nil {
		return err
	}
	program, err := lookProgram(cfg.Process.Args[0], env)
	if err != nil {
		return err
	}
	if err := confine(&cfg.Process, last); err != nil {
		return err
	}
	if err := tieToParent(ch); err != nil {
		return err
	}
	return startError(cfg.Process.Args[0], syscall.Exec(program, cfg.Process.Args, env))
}

// join moves the thread into the pod's namespaces.
func join(ns Namespaces) error {
	for _, n := range []struct {
		path string
		kind int
	}{{ns.Net, unix.CLONE_NEWNET}, {ns.UTS, unix.CLONE_NEWUTS}, {ns.IPC, unix.CLONE_NEWIPC}} {
		if n.path == "" {
			continue
		}
		fd, err := unix.Open(n.path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", n.path, err)
		}
		if err := unix.Setns(fd, n.kind); err != nil {
			return errors.Join(fmt.Errorf("join %s: %w", n.path, err), unix.Close(fd))
		}
		if err := unix.Close(fd); err != nil {
			return err
		}
	}
	return nil
}

// tieToParent makes the kernel kill this process when the parent's thread ends,
// and fails when that has happened. A change of user takes the first away, so it
// is done after all of those.
func tieToParent(ch *channel) error {
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("tie to the parent: %w", err)
	}
	fds := []unix.PollFd{{Fd: int32(ch.fd)}}
	if _, err := unix.Poll(fds, 0); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("look after the parent: %w", err)
	}
	if fds[0].Revents&(unix.POLLHUP|unix.POLLERR) != 0 {
		return errors.New("the parent has gone")
	}
	return nil
}

// enterDir changes to the working directory and makes it when it is absent, as
// container runtimes do.
func enterDir(dir string) error {
	if dir == "" {
		dir = "/"
	}
	if err := os.MkdirAll(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make the working directory: %w", err)
	}
	if err := unix.Chdir(dir); err != nil {
		return fmt.Errorf("change to the working directory: %w", &os.PathError{Op: "chdir", Path: dir, Err: err})
	}
	return nil
}

// openTerminal makes a terminal in the current root and sends its master up. It
// returns the slave.
func openTerminal(ch *channel, p *Process) (int, error) {
	master, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("make a terminal: %w", &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err})
	}
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return -1, fmt.Errorf("unlock the terminal: %w", err)
	}
	// By number from the master itself: a path could lead elsewhere in a root that
	// the container's own processes can change.
	slave, err := ioctlPeer(master)
	if err != nil {
		return -1, fmt.Errorf("open the terminal: %w", err)
	}
	if p.UID != 0 {
		if err := unix.Fchown(slave, int(p.UID), -1); err != nil {
			return -1, fmt.Errorf("give the terminal to user %d: %w", p.UID, err)
		}
	}
	ch.send(Report{Terminal: true}, master)
	return slave, unix.Close(master)
}

// ioctlPeer opens the slave of a terminal's master.
func ioctlPeer(master int) (int, error) {
	fd, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if e != 0 {
		return -1, e
	}
	return int(fd), nil
}

// takeTerminal makes slave the terminal of this process's session and its
// standard descriptors.
func takeTerminal(slave int) error {
	if err := unix.IoctlSetInt(slave, unix.TIOCSCTTY, 0); err != nil {
		return fmt.Errorf("take the terminal: %w", err)
	}
	for fd := range 3 {
		if err := unix.Dup3(slave, fd, 0); err != nil {
			return fmt.Errorf("put the terminal on descriptor %d: %w", fd, err)
		}
	}
	return unix.Close(slave)
}
