// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// errUnused says that a role was never given work.
var errUnused = errors.New("never given work")

// Role is a process in a role, seen by the one who started it.
type Role struct {
	Pid int
	// Socket is this side of the role's socket. Whoever has the Role closes it.
	Socket int
}

// Spawn starts the executable exe in a role, in a session of its own. It waits for
// Give. kplab-init is the first of a new process namespace, and dies with the
// thread that starts it.
func Spawn(role, exe string) (*Role, error) { return spawn(role, exe, role == RoleInit) }

// spawn starts a role; with first it is the first of a new process namespace.
func spawn(role, exe string, first bool) (_ *Role, err error) {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/null: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(null)) }()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make a socket pair: %w", err)
	}
	attr := &syscall.SysProcAttr{Setsid: true} // signals to the daemon's terminal and group pass it by
	if first {
		attr.Cloneflags = unix.CLONE_NEWPID
		// One that joins a process namespace cannot have this from the start: Go takes
		// a parent that it cannot see for a dead one. It ties itself later.
		attr.Pdeathsig = syscall.SIGKILL
	}
	pid, err := syscall.ForkExec(exe, []string{role}, &syscall.ProcAttr{
		Dir: "/", Env: Environment(), Sys: attr,
		Files: []uintptr{uintptr(null), uintptr(null), uintptr(null), uintptr(pair[1])},
	})
	closed := unix.Close(pair[1])
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", role, err), closed, unix.Close(pair[0]))
	}
	return &Role{Pid: pid, Socket: pair[0]}, closed
}

// Give gives the role its configuration and its standard descriptors, which stay
// the caller's too; a negative one leaves /dev/null. An error that wraps
// unix.EPIPE says that the role has ended before it was given anything.
func (r *Role) Give(config any, files [3]int) error {
	data, err := json.Marshal(config)
	if err != nil {
		return err
	}
	// A file and not the message itself: files for the container may be large.
	fd, err := unix.MemfdCreate("kplab-configuration", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("make a file for the configuration: %w", err)
	}
	f := os.NewFile(uintptr(fd), "configuration")
	defer func() { _ = f.Close() }() // the role has its own
	if _, err := f.Write(data); err != nil {
		return fmt.Errorf("write the configuration: %w", err)
	}
	fds := []int{fd}
	var places []byte
	for place, fd := range files {
		if fd >= 0 {
			fds = append(fds, fd)
			places = append(places, byte(place))
		}
	}
	msg := append([]byte{'g'}, places...)
	if err := unix.Sendmsg(r.Socket, msg, unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL); err != nil {
		return fmt.Errorf("hand over the configuration: %w", err)
	}
	return nil
}

// Drop ends a role that has not been given work and waits for its end. nil is no
// role.
func (r *Role) Drop() error {
	if r == nil {
		return nil
	}
	err := unix.Close(r.Socket)
	_, waitErr := waitFor(r.Pid)
	return errors.Join(err, waitErr)
}

// receive waits for work.
func (c *channel) receive(config any) error {
	var msg [1 + 3]byte
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, oobn := 0, 0
	for {
		var err error
		n, oobn, _, _, err = unix.Recvmsg(c.fd, msg[:], oob, unix.MSG_CMSG_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return errUnused
		}
		break
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(messages) != 1 {
		return fmt.Errorf("read the configuration: %d control messages, %w", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != n {
		return fmt.Errorf("read the configuration: %d descriptors for %d, %w", len(fds), n, err)
	}
	for i, place := range msg[1:n] {
		if err := unix.Dup3(fds[1+i], int(place), 0); err != nil {
			return fmt.Errorf("take descriptor %d: %w", place, err)
		}
		if err := unix.Close(fds[1+i]); err != nil {
			return err
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fds[0], &st); err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	data := make([]byte, st.Size)
	if _, err := unix.Pread(fds[0], data, 0); err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	if err := json.Unmarshal(data, config); err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	return unix.Close(fds[0])
}
