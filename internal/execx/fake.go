// SPDX-License-Identifier: Apache-2.0

package execx

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Step is one expected command of a [Fake] and its answer.
type Step struct {
	// Line is the expected command as Cmd.String prints it; arguments that need
	// quotes have them.
	Line string
	// Stdin, when not nil, says what is wrong with the command's input, or nil.
	Stdin func(stdin string) error
	// Stdout and Stderr are what the command writes.
	Stdout, Stderr string
	// ExitCode, when not 0, makes the command fail with an *Error.
	ExitCode int
	// Err, when not nil, makes the command fail as one that could not be started.
	Err error
}

// Fake is a Runner that plays a script: each command must be the next Step. It
// is safe for concurrent use, though the order of concurrent commands is not
// defined.
type Fake struct {
	mu    sync.Mutex
	steps []Step
	ran   []Cmd
	wrong []error
}

// NewFake returns a Fake that expects steps in that order.
func NewFake(steps ...Step) *Fake { return &Fake{steps: slices.Clone(steps)} }

// Run implements Runner. A command that is not the expected one is an error,
// which Done reports too.
func (f *Fake) Run(ctx context.Context, c Cmd) (Result, error) {
	if err := ctx.Err(); err != nil {
		return Result{}, &Error{Line: c.String(), ExitCode: -1, Err: err}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ran = append(f.ran, c)
	if len(f.steps) == 0 {
		return Result{}, f.surprise(fmt.Errorf("unexpected command: %s", c))
	}
	s := f.steps[0]
	f.steps = f.steps[1:]
	if got := c.String(); got != s.Line {
		return Result{}, f.surprise(fmt.Errorf("unexpected command:\n got %s\nwant %s", got, s.Line))
	}
	if s.Stdin != nil {
		if err := s.Stdin(string(c.Stdin)); err != nil {
			return Result{}, f.surprise(fmt.Errorf("standard input of %s: %w", c, err))
		}
	}
	res := Result{Stdout: []byte(s.Stdout), Stderr: []byte(s.Stderr)}
	switch {
	case s.Err != nil:
		return res, &Error{Line: s.Line, ExitCode: -1, Stderr: s.Stderr, Err: s.Err}
	case s.ExitCode != 0:
		return res, &Error{Line: s.Line, ExitCode: s.ExitCode, Stderr: s.Stderr, Err: fmt.Errorf("exit status %d", s.ExitCode)}
	}
	return res, nil
}

// surprise keeps err for Done.
func (f *Fake) surprise(err error) error {
	f.wrong = append(f.wrong, err)
	return err
}

// Ran returns the commands seen so far, oldest first.
func (f *Fake) Ran() []Cmd {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.ran)
}

// Done returns an error when a command was not the expected one or an expected
// one has not come.
func (f *Fake) Done() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	errs := slices.Clone(f.wrong)
	for _, s := range f.steps {
		errs = append(errs, fmt.Errorf("command did not come: %s", s.Line))
	}
	return errors.Join(errs...)
}

// StdinIs returns a matcher for Step.Stdin that wants exactly want.
func StdinIs(want string) func(string) error {
	return func(got string) error {
		if got != want {
			return fmt.Errorf("got:\n%s\nwant:\n%s", got, want)
		}
		return nil
	}
}

// StdinHas returns a matcher for Step.Stdin that wants each of parts somewhere.
func StdinHas(parts ...string) func(string) error {
	return func(got string) error {
		for _, p := range parts {
			if !strings.Contains(got, p) {
				return fmt.Errorf("no %q in:\n%s", p, got)
			}
		}
		return nil
	}
}
