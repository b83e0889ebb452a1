// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/sandbox"
	"github.com/kplab/kplab/sandbox/workload"
)

const (
	// crashBackoff doubles with each restart up to maxBackoff, and is forgotten
	// when a container has run for resetBackoff: as upstream does it. The first
	// restart comes at once.
	crashBackoff = 10 * time.Second
	maxBackoff   = 5 * time.Minute
	resetBackoff = 2 * maxBackoff
	// startError is why a container ended whose program is missing or may not be run.
	startError = "StartError"
)

// ensureRunning starts a container that does not run and is to. It starts one
// attempt at most and never waits.
func (k *Kubelet) ensureRunning(ctx context.Context, p *pod, o *corev1.Pod, spec *corev1.Container, policy corev1.RestartPolicy) {
	c := p.container(spec.Name)
	p.mu.Lock()
	if c.running() {
		p.mu.Unlock()
		return
	}
	if c.exit != nil {
		if !restarts(policy, c.exit.ExitCode) {
			p.mu.Unlock()
			return
		}
		if c.startDue.IsZero() {
			c.planRestart()
		}
		if wait := time.Until(c.startDue); wait > 0 {
			first := c.waitReason != "CrashLoopBackOff"
			c.waitReason = "CrashLoopBackOff"
			c.waitMessage = fmt.Sprintf("back-off %s restarting failed container=%s pod=%s_%s(%s)", c.startDue.Sub(c.exit.FinishedAt.Time).Round(time.Second), c.name, o.Name, o.Namespace, o.UID)
			p.mu.Unlock()
			if first {
				k.containerEvent(o, c.name, corev1.EventTypeWarning, "BackOff", "Back-off restarting failed container %s in pod %s_%s(%s)", c.name, o.Name, o.Namespace, o.UID)
			}
			k.again(p, wait)
			return
		}
	} else if wait := time.Until(c.startDue); wait > 0 {
		p.mu.Unlock()
		k.again(p, wait)
		return
	}
	p.mu.Unlock()
	if err := k.startContainer(ctx, p, o, spec, c); err != nil {
		var w *waitError
		if !errors.As(err, &w) {
			w = &waitError{reason: "RunContainerError", message: err.Error(), retry: crashBackoff}
		}
		p.mu.Lock()
		c.waitReason, c.waitMessage = w.reason, w.message
		c.startDue = time.Now().Add(w.retry)
		if w.attempted {
			c.startFailed(p.uid, w.message)
			w.retry = 0
			if !restarts(policy, c.exit.ExitCode) {
				c.waitReason, c.waitMessage = "", ""
			}
		}
		p.mu.Unlock()
		k.containerEvent(o, c.name, corev1.EventTypeWarning, "Failed", "Error: %s", w.event())
		k.again(p, w.retry)
	}
}

// startFailed notes an attempt whose program could not be run: it counts as one that
// ran and failed, with the code, reason and start in 1970 that runtimes give it. The
// pod's mu is held.
func (c *container) startFailed(uid types.UID, message string) {
	if c.exit != nil {
		c.last = c.exit
		c.attempt++
	}
	c.id = containerID(uid, c.name, c.attempt)
	c.exit = &corev1.ContainerStateTerminated{
		ExitCode: 128, Reason: startError, Message: message, ContainerID: c.id,
		StartedAt: metav1.Unix(0, 0), FinishedAt: seconds(time.Now()),
	}
	c.startDue = time.Time{}
}

// planRestart decides when the next attempt begins; the pod's mu is held.
func (c *container) planRestart() {
	ended := c.exit.FinishedAt.Time
	if c.exit.Reason != startError && ended.Sub(c.exit.StartedAt.Time) >= resetBackoff {
		c.backoff = 0
	}
	c.startDue = ended.Add(c.backoff)
	c.backoff = min(max(2*c.backoff, crashBackoff), maxBackoff)
}

// waitError is why a container waits instead of running.
type waitError struct {
	reason, message string
	retry           time.Duration
	// attempted says that the attempt was made and counts.
	attempted bool
}

func (e *waitError) Error() string { return e.reason + ": " + e.message }

// event is what the event says: upstream names image errors by their reason only.
func (e *waitError) event() string {
	switch e.reason {
	case "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName":
		return e.reason
	}
	return e.message
}

// startContainer begins the next attempt.
func (k *Kubelet) startContainer(ctx context.Context, p *pod, o *corev1.Pod, spec *corev1.Container, c *container) error {
	if err := k.ensureImage(p, o, spec, c); err != nil {
		return err
	}
	image, _ := workload.Lookup(spec.Image)
	env, err := k.environment(o, spec, p.addresses())
	if err != nil {
		return &waitError{reason: "CreateContainerConfigError", message: err.Error(), retry: 2 * time.Second}
	}
	p.mu.Lock()
	resumed := c.exit == nil && c.id != ""
	attempt := c.attempt
	if c.exit != nil {
		attempt++
	}
	p.mu.Unlock()
	if !resumed {
		k.containerEvent(o, c.name, corev1.EventTypeNormal, "Pulled", "Container image %q already present on machine and can be accessed by the pod", spec.Image)
	}
	if err := os.MkdirAll(k.podDir(o.UID), 0o755); err != nil {
		return fmt.Errorf("make the pod's directory: %w", err)
	}
	logPath := k.logFileOf(o.UID, spec.Name, attempt)
	if attempt > 1 {
		// The last attempt's log is for `kubectl logs --previous`, older ones for none.
		if err := os.Remove(k.logFileOf(o.UID, spec.Name, attempt-2)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove an old log: %w", err)
		}
	}
	isProcess := len(spec.Command) > 0 || image.Process || image.Runs(spec.Args)
	var proc *sandbox.Process
	var srv *served
	if isProcess {
		ps, err := k.processSpec(p, o, spec, image, env, attempt, logPath)
		if err == nil {
			ps.ShareWith, err = k.shareWith(ctx, p, o, spec.Name)
		}
		if err != nil {
			return &waitError{reason: "CreateContainerError", message: err.Error(), retry: crashBackoff}
		}
		if proc, err = p.box().Start(ctx, ps); err != nil {
			return &waitError{
				reason: "RunContainerError", message: err.Error(), retry: crashBackoff,
				attempted: errors.Is(err, sandbox.ErrProgramNotFound) || errors.Is(err, sandbox.ErrProgramDenied),
			}
		}
	} else if srv, err = k.serve(p, o, spec, image, env, attempt, logPath); err != nil {
		return &waitError{reason: "RunContainerError", message: err.Error(), retry: crashBackoff}
	}

	p.mu.Lock()
	if c.exit != nil {
		c.last, c.exit = c.exit, nil
	}
	c.attempt, c.id = attempt, containerID(p.uid, c.name, attempt)
	c.startDue, c.waitReason, c.waitMessage, c.pulls = time.Time{}, "", "", 0
	c.killing, c.why, c.hooked = false, "", resumed || spec.Lifecycle == nil || spec.Lifecycle.PostStart == nil
	if !resumed || isProcess || c.startedAt.IsZero() {
		c.startedAt = time.Now()
	}
	if isProcess {
		c.startedAt = proc.StartedAt()
		k.watchProcess(p, c, proc)
	} else {
		c.run = srv
	}
	p.mu.Unlock()
	if !resumed {
		k.containerEvent(o, c.name, corev1.EventTypeNormal, "Created", "Container created")
		k.containerEvent(o, c.name, corev1.EventTypeNormal, "Started", "Container started")
		if isProcess && proc.LimitError() != nil {
			k.containerEvent(o, c.name, corev1.EventTypeWarning, "LimitsNotEnforced", "CPU and memory limits have no effect: %v", proc.LimitError())
		}
	}
	if !resumed {
		k.postStart(p, o, spec, c)
	}
	k.startProbes(p, o, spec, c)
	return nil
}

// processSpec describes a real process of a container.
func (k *Kubelet) processSpec(p *pod, o *corev1.Pod, spec *corev1.Container, image workload.Image, env []string, attempt int, logPath string) (sandbox.ProcessSpec, error) {
	vars := envMap(env)
	args := expandAll(append(append([]string{}, spec.Command...), spec.Args...), vars)
	if len(spec.Command) == 0 && len(spec.Args) == 0 {
		args = image.DefaultArgs
	}
	root, err := k.rootOf(p, o, spec, attempt)
	if err != nil {
		return sandbox.ProcessSpec{}, err
	}
	if image.Self != "" {
		self := "/" + image.Self
		root.mounts = append(root.mounts, sandbox.Mount{Source: k.cfg.Runtime.Program(), Target: self, ReadOnly: true})
		if len(spec.Command) == 0 {
			args = append([]string{self}, args...)
		}
	}
	return sandbox.ProcessSpec{
		Container: spec.Name, Attempt: attempt, Args: args, Env: withDefaults(env, k.serviceLinks(o)), WorkingDir: spec.WorkingDir,
		User: root.user, Files: root.files, Mounts: root.mounts, Busybox: isBusybox(spec.Image),
		ReadOnlyRoot: root.readOnly, Capabilities: root.capabilities, Privileged: root.privileged,
		AllowPrivilegeEscalation: root.escalate, Limits: limitsOf(spec), LogPath: logPath, TTY: spec.TTY, Stdin: spec.Stdin, StdinOnce: spec.StdinOnce,
	}, nil
}

// limitsOf is what a container may use at most.
func limitsOf(spec *corev1.Container) sandbox.Limits {
	l := spec.Resources.Limits
	return sandbox.Limits{CPU: l.Cpu().MilliValue(), Memory: l.Memory().Value()}
}

// process is a container that is a real process.
type process struct{ *sandbox.Process }

func (r process) done() <-chan struct{} { return r.Done() }
func (r process) result() sandbox.Exit {
	e, _ := r.Exit()
	return e
}
func (r process) terminate() { _ = r.Signal(sigTerm) } // one that is gone has ended
func (r process) kill()      { _ = r.Signal(sigKill) }

// watchProcess makes proc the container's attempt; the pod's mu is held.
func (k *Kubelet) watchProcess(p *pod, c *container, proc *sandbox.Process) {
	c.run = process{proc}
	k.background(func(ctx context.Context) {
		select {
		case <-proc.Done():
			k.kick(p)
		case <-ctx.Done():
		}
	})
}

// observeExits notes which attempts have ended.
func (k *Kubelet) observeExits(p *pod) {
	o := p.object()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.containers {
		if !c.running() {
			continue
		}
		select {
		case <-c.run.done():
		default:
			continue
		}
		e := c.run.result()
		if e.At.IsZero() {
			e.At = time.Now()
		}
		c.exit = &corev1.ContainerStateTerminated{
			ExitCode: int32(e.Code), Signal: int32(e.Signal), Reason: "Completed", ContainerID: c.id,
			StartedAt: seconds(c.startedAt), FinishedAt: seconds(e.At),
		}
		switch {
		case e.OutOfMemory:
			c.exit.Reason = "OOMKilled"
		case e.Code != 0:
			c.exit.Reason = "Error"
		}
		c.exit.Message = k.terminationMessage(o, c, e.Code)
		if _, ok := c.run.(*served); ok {
			p.dropView(c.name)
		}
		c.run, c.startDue = nil, time.Time{}
		c.ready, c.startupDone = false, false
		if c.stopProbes != nil {
			c.stopProbes()
			c.stopProbes = nil
		}
	}
}

// terminationMessage is what a process left for people, in the file that its spec
// names or as the end of its output.
func (k *Kubelet) terminationMessage(o *corev1.Pod, c *container, code int) string {
	spec := containerSpec(o, c.name)
	if spec == nil {
		return ""
	}
	const most = 4096
	text, err := os.ReadFile(k.messageFile(o.UID, c.name, c.attempt))
	if err == nil && len(text) > 0 {
		return strings.TrimSuffix(string(text[max(0, len(text)-most):]), "\n")
	}
	if code != 0 && spec.TerminationMessagePolicy == corev1.TerminationMessageFallbackToLogsOnError {
		return logTail(k.logFileOf(o.UID, c.name, c.attempt), 80, 2048)
	}
	return ""
}

// containerID names an attempt. It follows from the pod, the container and the
// attempt, so a later process of the daemon gives the same.
func containerID(uid types.UID, name string, attempt int) string {
	sum := sha256.Sum256([]byte(string(uid) + "/" + name + "/" + strconv.Itoa(attempt)))
	return "kplab://" + hex.EncodeToString(sum[:])
}

// seconds is a time as the API keeps it.
func seconds(t time.Time) metav1.Time { return metav1.NewTime(t.Truncate(time.Second)) }
