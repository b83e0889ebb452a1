// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// runExec starts a program in a running container and reports how it ended. When
// the other end of the report socket closes, the daemon is gone or has lost
// interest: the program is killed.
func runExec(ch *channel) error {
	var cfg ExecConfig
	if err := ch.receive(&cfg); err != nil {
		return err
	}
	p := &cfg.Process
	// The child, between its start and its program, can be seen from inside the
	// container. It may not be looked into: it still is this executable.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("hide from other processes: %w", err)
	}
	last := lastCapability()
	if err := joinProcess(cfg.Target); err != nil {
		return err
	}
	attr := &syscall.ProcAttr{Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true}}
	if p.TTY {
		slave, err := openTerminal(ch, p)
		if err != nil {
			return err
		}
		attr.Files = []uintptr{uintptr(slave), uintptr(slave), uintptr(slave)}
		attr.Sys.Setctty = true // descriptor 0 of the child
	}
	hostname, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("read the host name: %w", err)
	}
	attr.Env = environment(p, hostname)
	if err := enterDir(p.WorkingDir); err != nil {
		return err
	}
	program, err := lookProgram(p.Args[0], attr.Env)
	if err != nil {
		return err
	}
	// From here on this thread has the rights of the container. It starts the
	// program, which inherits them; the others keep theirs to signal it.
	if err := confine(p, last); err != nil {
		return err
	}
	pid, err := syscall.ForkExec(program, p.Args, attr)
	if err != nil {
		return startError(p.Args[0], err)
	}
	// Only the program holds its streams now: their readers see when it is done.
	for fd := range 3 {
		if err := replaceByNull(fd); err != nil {
			return err
		}
	}
	if p.TTY {
		if err := unix.Close(int(attr.Files[0])); err != nil {
			return err
		}
	}
	ch.send(Report{Started: &InitRecord{ID: ID{Pid: pid}, StartedAt: time.Now()}}, -1)
	go killWhenAlone(ch, pid) // ends with the process
	exit, err := waitFor(pid)
	if err != nil {
		return err
	}
	ch.send(Report{Exit: &exit}, -1)
	return nil
}

// joinProcess moves the thread into the container of a running process. Children
// that the thread starts are in its process namespace.
func joinProcess(target ID) error {
	fd, err := target.Open()
	if err != nil {
		return &causeError{CauseNotRunning, fmt.Errorf("the container is not running: %w", err)}
	}
	// A thread that shares its root and directory with others cannot change its
	// mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("stop sharing the root with other threads: %w", err)
	}
	const all = unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWCGROUP
	if err := unix.Setns(fd, all); err != nil {
		err = fmt.Errorf("join the container: %w", err)
		if errors.Is(err, unix.ESRCH) {
			err = &causeError{CauseNotRunning, err}
		}
		return errors.Join(err, unix.Close(fd))
	}
	return unix.Close(fd)
}

// replaceByNull makes fd read and write nothing. /dev/null is the container's.
func replaceByNull(fd int) error {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/null: %w", err)
	}
	if err := unix.Dup3(null, fd, 0); err != nil {
		return fmt.Errorf("let go of descriptor %d: %w", fd, err)
	}
	return unix.Close(null)
}

// killWhenAlone kills pid when the other end of the report socket closes.
func killWhenAlone(ch *channel, pid int) {
	for {
		fds := []unix.PollFd{{Fd: int32(ch.fd)}}
		_, err := unix.Poll(fds, -1)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		// The process namespace may be left, but the pid is this process's child:
		// nobody else can get it before waitFor has seen its end.
		_ = unix.Kill(pid, unix.SIGKILL)
		return
	}
}

// waitFor waits for a child and tells how it ended.
func waitFor(pid int) (ExitRecord, error) {
	for {
		var ws unix.WaitStatus
		_, err := unix.Wait4(pid, &ws, 0, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return ExitRecord{}, fmt.Errorf("wait for process %d: %w", pid, err)
		}
		return ExitOf(ws), nil
	}
}

// ExitOf reads a wait status. A signal counts as exit code 128 and its number, as
// shells and container runtimes have it.
func ExitOf(ws unix.WaitStatus) ExitRecord {
	r := ExitRecord{Code: ws.ExitStatus(), At: time.Now()}
	if ws.Signaled() {
		r.Signal = int(ws.Signal())
		r.Code = 128 + r.Signal
	}
	return r
}
