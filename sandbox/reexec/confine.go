// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// defaultPath is PATH in a container that sets none.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// openFiles are the limits of open files: the soft one suits programs that walk
// all descriptors, the hard one those that raise it.
const (
	openFilesSoft = 1024
	openFilesHard = 524288
)

// confine gives up every right of the current thread that p does not grant. It
// is the last thing before the program starts, and after it the thread is good
// for nothing else.
func confine(p *Process, last int) error {
	if err := setLimits(); err != nil {
		return err
	}
	unix.Umask(0o022)
	if err := dropBounding(p.Capabilities, last); err != nil {
		return err
	}
	if p.NoNewPrivs {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("refuse new privileges: %w", err)
		}
	}
	if err := become(p); err != nil {
		return err
	}
	// The filter goes in while CAP_SYS_ADMIN is there: without NoNewPrivs the
	// kernel wants it.
	if p.Filtered {
		if err := installFilter(); err != nil {
			return err
		}
	}
	return setCapabilities(p.Capabilities)
}

// become changes the thread's user and groups. Go's own wrappers change every
// thread of the process, which must keep its rights until the end.
func become(p *Process) error {
	groups := make([]uint32, len(p.Groups))
	copy(groups, p.Groups)
	if err := rawSetgroups(groups); err != nil && !errors.Is(err, unix.EPERM) {
		// EPERM is the rule in a user namespace of one user, where there is no
		// group to give up either.
		return fmt.Errorf("set groups: %w", err)
	}
	if p.GID != 0 {
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(p.GID), uintptr(p.GID), uintptr(p.GID)); e != 0 {
			return fmt.Errorf("become group %d: %w", p.GID, e)
		}
	}
	if p.UID == 0 {
		return nil
	}
	// CAP_SYS_ADMIN has to survive until the filter is in; setCapabilities takes
	// it, and execve takes the rest from a process that is not root.
	if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("keep capabilities over the change of user: %w", err)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(p.UID), uintptr(p.UID), uintptr(p.UID)); e != 0 {
		return fmt.Errorf("become user %d: %w", p.UID, e)
	}
	// The change of user emptied the effective set.
	return raiseEffective()
}

// raiseEffective makes everything permitted effective.
func raiseEffective() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var now [2]unix.CapUserData
	if err := unix.Capget(&header, &now[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	now[0].Effective, now[1].Effective = now[0].Permitted, now[1].Permitted
	if err := unix.Capset(&header, &now[0]); err != nil {
		return fmt.Errorf("make capabilities effective: %w", err)
	}
	return nil
}

// setLimits sets resource limits, never above what the lab itself has.
func setLimits() error {
	for _, l := range []struct {
		name       string
		resource   int
		soft, hard uint64
	}{
		{"open files", unix.RLIMIT_NOFILE, openFilesSoft, openFilesHard},
		{"core size", unix.RLIMIT_CORE, 0, 0},
	} {
		var now unix.Rlimit
		if err := unix.Getrlimit(l.resource, &now); err != nil {
			return fmt.Errorf("read the limit of %s: %w", l.name, err)
		}
		hard := min(l.hard, now.Max)
		if err := unix.Setrlimit(l.resource, &unix.Rlimit{Cur: min(l.soft, hard), Max: hard}); err != nil {
			return fmt.Errorf("limit %s: %w", l.name, err)
		}
	}
	return nil
}

// environment returns p's environment with what a program expects to find.
func environment(p *Process, hostname string) []string {
	env := append([]string(nil), p.Env...)
	add := func(key, value string) {
		for _, kv := range p.Env {
			if strings.HasPrefix(kv, key+"=") {
				return
			}
		}
		env = append(env, key+"="+value)
	}
	add("PATH", defaultPath)
	add("HOSTNAME", hostname)
	home := "/"
	if p.UID == 0 {
		home = "/root"
	}
	add("HOME", home)
	if p.TTY {
		add("TERM", "xterm")
	}
	return env
}

// lookProgram finds the program in the current root.
func lookProgram(name string, env []string) (string, error) {
	notFound := func(err error) error {
		return &causeError{CauseNotFound, fmt.Errorf("exec: %q: %w", name, err)}
	}
	if name == "" {
		return "", notFound(errors.New("no program is named"))
	}
	if strings.Contains(name, "/") {
		switch fi, err := os.Stat(name); {
		case err != nil:
			return "", notFound(errors.Unwrap(err))
		case fi.IsDir():
			return "", &causeError{CausePermission, fmt.Errorf("exec: %q: is a directory", name)}
		case fi.Mode()&0o111 == 0:
			return "", &causeError{CausePermission, fmt.Errorf("exec: %q: permission denied", name)}
		}
		return name, nil
	}
	path := ""
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = v
		}
	}
	for _, dir := range filepath.SplitList(path) {
		candidate := filepath.Join(dir, name)
		if fi, err := os.Stat(candidate); err == nil && !fi.IsDir() && fi.Mode()&0o111 != 0 {
			return candidate, nil
		}
	}
	return "", notFound(errors.New("executable file not found in $PATH"))
}

// startError gives an error of execve its cause.
func startError(program string, err error) error {
	wrapped := fmt.Errorf("exec: %q: %w", program, err)
	switch {
	case errors.Is(err, syscall.ENOENT):
		return &causeError{CauseNotFound, wrapped}
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.ENOEXEC), errors.Is(err, syscall.EPERM):
		return &causeError{CausePermission, wrapped}
	}
	return wrapped
}
