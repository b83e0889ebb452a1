// SPDX-License-Identifier: Apache-2.0

// Package reexec is what this program is when the sandbox runs it a second time
// to make a container:
//
//	kplab-shim   outlives the daemon; starts a container's first process, writes
//	             its output to the log, and writes down how it ended
//	kplab-init   process 1 of a container; builds its root, gives up its rights
//	             and becomes the container's program
//	kplab-exec   joins a running container and starts one more program in it
//
// The name of the role is argv[0]. A role is started with nothing but a
// SOCK_SEQPACKET socket, on descriptor 3, and waits there until it is given work:
// its configuration and its standard descriptors. So it can be started ahead of
// time, which takes longer than everything that follows. When the one who started
// it is gone, it exits and has done nothing. On the same socket it reports.
//
// # Why there is an init function here
//
// Importing this package is enough to make a program able to be re-executed, a
// test binary too. Its init function takes over before main: Go initialises
// packages as soon as their imports are, and this one imports little, so the role
// begins before the Kubernetes libraries build their type registries, which takes
// many times as long as starting a process. For that reason nothing may be
// imported here but the standard library and golang.org/x/sys.
package reexec

import (
	"errors"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// The roles, as argv[0].
const (
	RoleShim = "kplab-shim"
	RoleInit = "kplab-init"
	RoleExec = "kplab-exec"
)

// channelFD is the descriptor of a role's socket.
const channelFD = 3

// Environment is what roles are started with: they do little, one thread at a
// time, and should stay small.
func Environment() []string { return []string{"GOMAXPROCS=1", "GOGC=40", "GOTRACEBACK=single"} }

func init() {
	if len(os.Args) == 0 {
		return
	}
	var role func(*channel) error
	switch os.Args[0] {
	case RoleShim:
		role = runShim
	case RoleInit:
		role = runInit
	case RoleExec:
		role = runExec
	default:
		return
	}
	// Namespaces, root, rights and filters belong to a thread: a role does all of
	// its work on this one, and starts its program from it.
	runtime.LockOSThread()
	ch := &channel{fd: channelFD}
	// Also the descriptors that nobody meant to pass on.
	err := unix.CloseRange(channelFD, ^uint(0), unix.CLOSE_RANGE_CLOEXEC)
	if err == nil {
		err = role(ch)
	}
	if err != nil && !errors.Is(err, errUnused) {
		ch.send(Report{Error: err.Error(), Cause: causeOf(err)}, -1)
		os.Exit(1)
	}
	os.Exit(0)
}
