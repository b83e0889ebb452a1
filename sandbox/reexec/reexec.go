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
// The name of the role is argv[0]. A role reads its configuration as JSON from
// descriptor 3 until the end of the file and reports on descriptor 4, a
// SOCK_SEQPACKET socket. When the configuration never ends properly, because the
// one who started it is gone, a role exits and has done nothing.
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
	"encoding/json"
	"fmt"
	"io"
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

// Descriptors of every role besides the standard three.
const (
	configFD = 3
	reportFD = 4
)

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
	ch := &channel{fd: reportFD}
	// Also those that nobody meant to pass on.
	if err := unix.CloseRange(configFD, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		ch.send(Report{Error: "keep descriptors from the container: " + err.Error()}, -1)
		os.Exit(1)
	}
	if err := role(ch); err != nil {
		ch.send(Report{Error: err.Error(), Cause: causeOf(err)}, -1)
		os.Exit(1)
	}
	os.Exit(0)
}

// readConfig decodes the role's configuration.
func readConfig(into any) error {
	f := os.NewFile(configFD, "configuration")
	data, err := io.ReadAll(f)
	if err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	if err := f.Close(); err != nil {
		return err
	}
	if len(data) == 0 {
		// Whoever wanted the process is gone.
		return fmt.Errorf("no configuration came: %w", io.ErrUnexpectedEOF)
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	return nil
}
