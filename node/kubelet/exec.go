// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/sandbox"
)

// execArgs is a command to run in a container.
type execArgs struct {
	args           []string
	stdin          io.Reader
	stdout, stderr io.Writer
	tty            bool
	resize         <-chan sandbox.Size
}

// exec runs a command in a container and returns its exit code.
func (k *Kubelet) exec(ctx context.Context, p *pod, o *corev1.Pod, spec *corev1.Container, a execArgs) (int, error) {
	sb := p.box()
	if sb == nil {
		return 0, errors.New("the pod is not running")
	}
	p.mu.Lock()
	running, attempt, server := false, 0, false
	if c := p.containers[spec.Name]; c != nil && c.running() {
		running, attempt = true, c.attempt
		_, server = c.run.(*served)
	}
	p.mu.Unlock()
	if !running {
		return 0, fmt.Errorf("container %s is not running", spec.Name)
	}
	env, err := k.environment(o, spec, p.addresses())
	if err != nil {
		return 0, err
	}
	env = withDefaults(env, k.serviceLinks(o))
	container := spec.Name
	if server {
		if container, err = k.ensureView(ctx, p, o, spec, env, attempt); err != nil {
			return 0, err
		}
	} else if err := k.ensureTokens(ctx, p, o); err != nil {
		return 0, err
	}
	var rights rootFS
	rights.secure(o, spec)
	code, err := sb.Exec(ctx, sandbox.ExecSpec{
		Container: container, Args: a.args, Env: env, WorkingDir: spec.WorkingDir, User: rights.user,
		Stdin: a.stdin, Stdout: a.stdout, Stderr: a.stderr, TTY: a.tty, Resize: a.resize,
		Capabilities: rights.capabilities, Privileged: rights.privileged, AllowPrivilegeEscalation: rights.escalate,
	})
	switch {
	case errors.Is(err, sandbox.ErrProgramNotFound):
		return 127, say(a.stderr, a.stdout, err)
	case errors.Is(err, sandbox.ErrProgramDenied):
		return 126, say(a.stderr, a.stdout, err)
	}
	return code, err
}

// cause is the innermost error, which speaks of the program alone.
func cause(err error) error {
	for {
		switch e := err.(type) { //nolint:errorlint // each layer is taken off
		case interface{ Unwrap() error }:
			if e.Unwrap() == nil {
				return err
			}
			err = e.Unwrap()
		case interface{ Unwrap() []error }:
			all := e.Unwrap()
			if len(all) == 0 {
				return err
			}
			err = all[len(all)-1]
		default:
			return err
		}
	}
}

// say tells the caller on its stream why a program did not start; its exit code
// says the rest, as a shell's would.
func say(stderr, stdout io.Writer, err error) error {
	w := stderr
	if w == nil {
		w = stdout
	}
	if w == nil {
		return nil
	}
	_, werr := fmt.Fprintln(w, cause(err))
	return werr
}
