// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Namespaces are the files that pin the namespaces a pod's containers share. An
// empty one is not joined.
type Namespaces struct{ Net, UTS, IPC string }

// Mount binds Source (host) to Target (container).
type Mount struct {
	Source, Target string
	ReadOnly       bool
}

// Root says what a container sees as its file system.
type Root struct {
	// Programs is a directory to serve as /bin, /sbin, /usr/bin and /usr/sbin in
	// place of the host's, busybox's for instance. Nothing else of /usr is there
	// then.
	Programs string
	// Files are written into the root, Mounts bound into it, in this order.
	Files  map[string][]byte
	Mounts []Mount
	// ReadOnly makes the root itself read-only in the end.
	ReadOnly bool
	// Unmasked leaves /proc and /sys as the kernel gives them.
	Unmasked bool
}

// Process is a program and its rights.
type Process struct {
	Args, Env  []string
	WorkingDir string
	UID, GID   uint32
	Groups     []uint32
	// Capabilities is the bounding set, one bit a capability. The process keeps
	// no more than these through any program that it starts.
	Capabilities uint64
	// NoNewPrivs stops set-user-ID bits and file capabilities from having effect.
	NoNewPrivs bool
	// Filtered refuses the system calls that reach what no namespace separates.
	Filtered bool
	// TTY makes a terminal of the container's own; its master goes to whoever
	// started the role.
	TTY bool
}

// InitConfig is the configuration of kplab-init.
type InitConfig struct {
	// Scaffold is an empty directory of the host on which the root is built. The
	// mounts there are seen by the container only, so it serves all of them.
	Scaffold   string
	Namespaces Namespaces
	Root       Root
	Process    Process
}

// ShimConfig is the configuration of kplab-shim.
type ShimConfig struct {
	// Dir is where the process is recorded. The shim writes InitFile, ExitFile and
	// the socket AttachSocket there.
	Dir string
	// LogPath gets the output; empty drops it.
	LogPath string
	// Stdin keeps standard input open; StdinOnce closes it after the first client.
	Stdin, StdinOnce bool
	// ShareWith names the first process of another container, in whose process
	// namespace this one is to be. The zero value is a namespace of its own.
	ShareWith ID
	// Cgroups are those that the process is to be in.
	Cgroups []string
	Init    InitConfig
}

// ExecConfig is the configuration of kplab-exec.
type ExecConfig struct {
	// Target is the container's first process.
	Target  ID
	Process Process
}

// Files in a process's directory.
const (
	InitFile     = "init.json"
	ExitFile     = "exit.json"
	AttachSocket = "attach.sock"
)

// ID names a process for as long as the machine runs: a pid alone comes around
// again.
type ID struct {
	Pid int `json:"pid"`
	// Start is when it started, in clock ticks since boot.
	Start uint64 `json:"start"`
}

// InitRecord is the content of InitFile.
type InitRecord struct {
	ID
	StartedAt time.Time `json:"startedAt"`
}

// ExitRecord is the content of ExitFile.
type ExitRecord struct {
	Code   int       `json:"code"`
	Signal int       `json:"signal"`
	At     time.Time `json:"at"`
}

// Report is a message of a role. A descriptor may come with it.
type Report struct {
	// Error is why the role failed; Cause is what kind of failure that is.
	Error string `json:",omitempty"`
	Cause Cause  `json:",omitempty"`
	// Terminal says that the descriptor is a terminal's master.
	Terminal bool `json:",omitempty"`
	// Started is the program's process, once it runs.
	Started *InitRecord `json:",omitempty"`
	// Exit is how it ended.
	Exit *ExitRecord `json:",omitempty"`
}

// Cause tells failures apart that callers treat differently.
type Cause string

// Causes.
const (
	CauseNotFound   Cause = "not-found"   // no such program
	CausePermission Cause = "permission"  // the program may not be executed
	CauseNotRunning Cause = "not-running" // the container to join has ended
)

// causeError carries a Cause.
type causeError struct {
	cause Cause
	err   error
}

func (e *causeError) Error() string { return e.err.Error() }
func (e *causeError) Unwrap() error { return e.err }

// causeOf finds the Cause of err.
func causeOf(err error) Cause {
	var c *causeError
	if errors.As(err, &c) {
		return c.cause
	}
	return ""
}

// channel is the socket that a role reports on.
type channel struct{ fd int }

// send sends a report, with a descriptor when fd is not negative. Whether anybody
// still listens is of no interest to the role.
func (c *channel) send(r Report, fd int) {
	if len(r.Error) > maxError {
		r.Error = r.Error[:maxError]
	}
	data, err := json.Marshal(r)
	if err != nil {
		return // no value of the type fails
	}
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	_ = unix.Sendmsg(c.fd, data, rights, nil, unix.MSG_NOSIGNAL)
}

// maxReport is the size of the longest message, and maxError of the text in it,
// which can grow sixfold on the way.
const (
	maxReport = 8 << 10
	maxError  = 1 << 10
)

// ReceiveReport reads the next message from the other end of a role's socket and
// the descriptor that came with it, or -1. ok is false when the role has closed
// its end: that is how kplab-init says that the program has taken its place.
func ReceiveReport(fd int) (r Report, passed int, ok bool, err error) {
	buf := make([]byte, maxReport)
	oob := make([]byte, unix.CmsgSpace(4))
	for {
		n, oobn, _, _, err := unix.Recvmsg(fd, buf, oob, unix.MSG_CMSG_CLOEXEC)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ECONNRESET):
			return r, -1, false, nil // ended with something unread
		case err != nil:
			return r, -1, false, fmt.Errorf("receive a report: %w", err)
		case n == 0:
			return r, -1, false, nil
		}
		passed = -1
		if msgs, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(msgs) == 1 {
			if fds, err := unix.ParseUnixRights(&msgs[0]); err == nil && len(fds) == 1 {
				passed = fds[0]
			}
		}
		if err := json.Unmarshal(buf[:n], &r); err != nil {
			return r, passed, false, fmt.Errorf("read a report: %w", err)
		}
		return r, passed, true, nil
	}
}

// WriteFileAtomic replaces a file so that a reader sees the old or the new
// content and never a part.
func WriteFileAtomic(path string, data []byte) error {
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// writeRecord writes v as JSON.
func writeRecord(path string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return WriteFileAtomic(path, data)
}
