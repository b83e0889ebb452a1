// SPDX-License-Identifier: Apache-2.0

// Package execx runs the system's commands (iptables-restore, sysctl, …), on the
// host or inside a network namespace, behind one small interface. [Fake] answers
// from a script, so that a package that drives a command is tested without root.
package execx

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/kplab/kplab/internal/netns"
)

// minimalPath is the PATH of every command, so that what runs depends on the
// machine and not on who called. /usr/sbin is where iptables, nft and ip are;
// Debian leaves it out of an ordinary user's PATH.
const minimalPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// killDelay is how long a command has, after its context ended and it was
// killed, before its pipes are closed: a child that it left behind may hold them.
const killDelay = 2 * time.Second

// Cmd is one command to run.
type Cmd struct {
	// Path is a file, or a name that is looked up in the system's directories
	// (not in the caller's PATH).
	Path string
	// Args are the arguments after the program's name.
	Args []string
	// Env is added to a minimal environment (PATH, HOME=/, LC_ALL=C) as KEY=value.
	// LC_ALL=C keeps messages in the words that callers look for.
	Env []string
	// Stdin is what the command reads; nil means an empty input.
	Stdin []byte
}

// String returns the command as a line to paste into a shell, with its
// environment in front and without its standard input.
func (c Cmd) String() string {
	var b strings.Builder
	for _, kv := range c.Env {
		k, v, _ := strings.Cut(kv, "=")
		b.WriteString(k + "=" + quote(v) + " ")
	}
	b.WriteString(quote(c.Path))
	for _, a := range c.Args {
		b.WriteString(" " + quote(a))
	}
	return b.String()
}

// quote writes s as one shell word.
func quote(s string) string {
	plain := s != "" && strings.IndexFunc(s, func(r rune) bool {
		return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:=,+@%", r)
	}) < 0
	if plain {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// Result is what a command wrote.
type Result struct{ Stdout, Stderr []byte }

// Runner runs commands. Run waits for the end of the command; when ctx ends first
// the command is killed. A command that cannot be started or that exits with
// anything but 0 is an [*Error]; the Result is filled in all the same.
type Runner interface {
	Run(ctx context.Context, c Cmd) (Result, error)
}

// Error is a command that failed.
type Error struct {
	// Line is the command as a line to paste into a shell.
	Line string
	// ExitCode is the command's exit code; -1 when it did not start or was killed.
	ExitCode int
	// Stderr is all that the command wrote to standard error.
	Stderr string
	// Err is the cause, an *exec.ExitError for an exit code.
	Err error
}

// Error names the command, why it failed and what it wrote to standard error.
func (e *Error) Error() string {
	msg := fmt.Sprintf("%s: %v", e.Line, e.Err)
	if s := strings.TrimSpace(e.Stderr); s != "" {
		msg += ": " + s
	}
	return msg
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Host returns a Runner whose commands run in the network namespace of the
// process.
func Host() Runner { return runner{} }

// In returns a Runner whose commands run in ns, which stays the caller's to
// close.
func In(ns *netns.NS) Runner { return runner{ns: ns} }

// runner is the real Runner; a nil ns is the process's own namespace.
type runner struct{ ns *netns.NS }

// Run implements Runner.
func (r runner) Run(ctx context.Context, c Cmd) (Result, error) {
	path, err := lookPath(c.Path)
	if err != nil {
		return Result{}, &Error{Line: c.String(), ExitCode: -1, Err: err}
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path, c.Args...)
	cmd.Args[0] = c.Path // tools that are one file under many names look at it
	cmd.Dir = "/"
	cmd.Env = append([]string{"PATH=" + minimalPath, "HOME=/", "LC_ALL=C"}, c.Env...)
	cmd.Stdin = bytes.NewReader(c.Stdin)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = killDelay
	if r.ns != nil {
		err = r.ns.Start(cmd)
	} else {
		err = cmd.Start()
	}
	if err == nil {
		err = cmd.Wait()
	}
	res := Result{Stdout: stdout.Bytes(), Stderr: stderr.Bytes()}
	if err == nil {
		return res, nil
	}
	fail := &Error{Line: c.String(), ExitCode: -1, Stderr: stderr.String(), Err: err}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		fail.ExitCode = exit.ExitCode()
	}
	if ctxErr := ctx.Err(); ctxErr != nil {
		fail.Err = fmt.Errorf("%w (%w)", ctxErr, err)
	}
	return res, fail
}

// lookPath finds name in the directories of minimalPath.
func lookPath(name string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for dir := range strings.SplitSeq(minimalPath, ":") {
		if p, err := exec.LookPath(dir + "/" + name); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("%w: no %s in %s", exec.ErrNotFound, name, minimalPath)
}
