// SPDX-License-Identifier: Apache-2.0

// Command kplab makes a small Kubernetes on one Linux host whose Service path is
// real and can be watched. Each command is a file here: flags become options, one
// library call does the work, the answer is printed.
//
// How it speaks: stdout is the answer and nothing else; stderr is the talk, in
// lower case without a full stop; an error is printed once, here, beginning with
// "kplab:". Exit codes are 0 (done), 1 (failed), 2 (misused), 3 (a lab that is
// broken); `exec` passes on the exit code of what it ran.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/dns"
	// First of all: when this binary was started as a container's shim or init,
	// its init function does that work and does not return.
	_ "github.com/kplab/kplab/sandbox/reexec"
)

// Exit codes, a contract that scripts depend on.
const (
	exitOK = iota
	exitFailed
	exitMisused
	exitBroken
)

// usageError is a mistake in the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// exitError ends the program with a code after everything was said already.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

func main() {
	if dns.IsProgram(os.Args) {
		dns.Main()
		return
	}
	if filepath.Base(os.Args[0]) == "kubectl" {
		// The kubectl that `kplab exec` gives to nodes.
		os.Args = append([]string{"kplab", "kubectl"}, os.Args[1:]...)
	}
	os.Exit(run())
}

func run() int {
	// SIGHUP too: a lab in the foreground ends cleanly when its terminal closes.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	root := newRootCommand()
	err := root.ExecuteContext(ctx)
	var code exitError
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &code):
		return int(code)
	case errors.As(err, &usage):
		fmt.Fprintf(os.Stderr, "kplab: %v\nsee `%s --help`\n", err, root.CommandPath())
		return exitMisused
	default:
		fmt.Fprintf(os.Stderr, "kplab: %v\n", err)
		return exitFailed
	}
}

// exactArgs refuses any other number of arguments than the names given.
func exactArgs(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) > len(names):
			return usageError{fmt.Errorf("%s: unexpected argument %q", cmd.CommandPath(), args[len(names)])}
		case len(args) < len(names):
			return usageError{fmt.Errorf("%s: missing argument %s", cmd.CommandPath(), names[len(args)])}
		}
		return nil
	}
}
