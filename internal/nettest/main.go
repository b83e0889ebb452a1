// SPDX-License-Identifier: Apache-2.0

package nettest

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// insideEnv is set in the second process of Main. Its value is the pid of the
// first, which adopts what tests leave behind.
const insideEnv = "KPLAB_NETTEST_PARENT"

// Main runs a package's tests in a fresh network namespace with only lo, which is
// up, and in a private mount namespace, so that no packet and no mount of a test
// can reach the machine. It does so by executing the test binary a second time.
// A process that is still there after the tests is killed and fails the run.
// Without root the tests run where they are, and those that call NeedRoot skip.
//
// Main does not return.
func Main(m *testing.M) {
	if os.Getenv(insideEnv) != "" || os.Geteuid() != 0 {
		if os.Geteuid() == 0 {
			if err := loUp(); err != nil {
				fmt.Fprintln(os.Stderr, "nettest:", err)
				os.Exit(1)
			}
		}
		os.Exit(m.Run())
	}
	code, err := runInside()
	if err != nil {
		fmt.Fprintln(os.Stderr, "nettest:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// runInside executes this binary again in new namespaces and returns its exit
// code. An error means that it could not start or left processes behind.
func runInside() (int, error) {
	// Orphans come to this process and not to the machine's init, so they can be
	// found however often they have forked.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 1, fmt.Errorf("become the reaper of orphans: %w", err)
	}
	// The death signal below is tied to the thread that starts the child.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	child, err := os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{
		Env:   append(os.Environ(), insideEnv+"="+strconv.Itoa(os.Getpid())),
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
		Sys: &syscall.SysProcAttr{
			// Go makes the mounts private in the child when it asks for NEWNS so.
			Unshareflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
			Pdeathsig:    syscall.SIGKILL,
		},
	})
	if err != nil {
		return 1, fmt.Errorf("start the tests in a network namespace of their own: %w", err)
	}
	// go test stops a stuck binary with SIGQUIT: the child should print its
	// goroutines then. The terminal sends SIGINT to both by itself.
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGINT)
	ended := make(chan struct{})
	forwarded := make(chan struct{})
	go func() {
		defer close(forwarded)
		for {
			select {
			case s := <-signals:
				if s != syscall.SIGINT {
					_ = child.Signal(s) // it may have ended just now
				}
			case <-ended:
				return
			}
		}
	}()
	code, err := reap(child.Pid)
	signal.Stop(signals)
	close(ended)
	<-forwarded
	return code, errors.Join(err, killOrphans())
}

// reap collects every child that ends until pid has, and returns pid's exit code.
func reap(pid int) (int, error) {
	for {
		var ws unix.WaitStatus
		got, err := unix.Wait4(-1, &ws, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 1, fmt.Errorf("wait for the tests: %w", err)
		case got != pid:
		case ws.Signaled():
			return 128 + int(ws.Signal()), fmt.Errorf("tests ended by %v", ws.Signal())
		case ws.Exited():
			return ws.ExitStatus(), nil
		}
	}
}

// killOrphans kills the children that this process still has, which are what the
// tests left behind, until there is none, and names them in its error.
func killOrphans() error {
	var left []string
	for {
		procs, err := descendants(os.Getpid())
		if err != nil {
			return err
		}
		if len(procs) == 0 {
			break
		}
		for _, p := range procs {
			if p.state != "Z" {
				left = append(left, p.String())
				_ = unix.Kill(p.pid, unix.SIGKILL) // it may have ended just now
			}
		}
		for {
			var ws unix.WaitStatus
			_, err := unix.Wait4(-1, &ws, 0, nil)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				break // no child left
			}
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("the tests left %d processes behind (killed now):\n  %s", len(left), strings.Join(left, "\n  "))
	}
	return nil
}
