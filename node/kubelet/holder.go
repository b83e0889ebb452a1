// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/sandbox"
	"github.com/kplab/kplab/sandbox/workload"
)

// A holder is a process of the pod that no container has: it does nothing and keeps
// something that others join. Container names have no underscore, so these are
// nobody's.
const (
	// podHolder keeps the process namespace of a pod whose containers share one.
	podHolder = "pause_"
	// viewPrefix and a container's name keep what people see who look into a
	// built-in server: a root with its files, and a process namespace. It is made when
	// somebody first does.
	viewPrefix = "view_"
	// viewTries is how many holders one attempt of a container may have had.
	viewTries = 1000
)

// holderArgs is a program that waits for its end, and for whatever is left to it.
func holderArgs(why string) []string {
	return []string{"sh", "-c", "while :; do sleep 2147483647 & wait; done # kplab: " + why}
}

// ensureView returns the name by which sandbox.Exec finds the view of a built-in
// server's attempt.
func (k *Kubelet) ensureView(ctx context.Context, p *pod, o *corev1.Pod, spec *corev1.Container, env []string, attempt int) (string, error) {
	name := viewPrefix + spec.Name
	with, err := k.shareWith(ctx, p, o, name)
	if err != nil {
		return "", err
	}
	return name, k.ensureHolder(ctx, p, name, attempt*viewTries, func() (sandbox.ProcessSpec, error) {
		root, err := k.rootOf(p, o, spec, -1)
		if err != nil {
			return sandbox.ProcessSpec{}, err
		}
		// The server's own files are the same ones from now on.
		image, _ := workload.Lookup(spec.Image)
		content, err := k.ownContent(o, spec, image, attempt)
		if err != nil {
			return sandbox.ProcessSpec{}, err
		}
		return sandbox.ProcessSpec{
			Args: holderArgs("the server of container " + spec.Name + " runs in the lab's daemon"), Env: env, WorkingDir: spec.WorkingDir,
			User: root.user, Files: root.files, Mounts: append(content, root.mounts...), Busybox: isBusybox(spec.Image), ReadOnlyRoot: root.readOnly,
			Capabilities: root.capabilities, Privileged: root.privileged, AllowPrivilegeEscalation: root.escalate, ShareWith: with,
		}, nil
	})
}

// shareWith returns the process whose namespace a container's process joins, or "":
// an ephemeral container's target, or the pod's when its containers share one.
func (k *Kubelet) shareWith(ctx context.Context, p *pod, o *corev1.Pod, name string) (string, error) {
	if o.Spec.ShareProcessNamespace != nil && *o.Spec.ShareProcessNamespace {
		return podHolder, k.ensureHolder(ctx, p, podHolder, 0, func() (sandbox.ProcessSpec, error) {
			return sandbox.ProcessSpec{Args: holderArgs("the processes of the pod are in its namespace")}, nil
		})
	}
	e := ephemeral(o, name)
	if e == nil || e.TargetContainerName == "" {
		return "", nil
	}
	target := containerSpec(o, e.TargetContainerName)
	p.mu.Lock()
	c := p.containers[e.TargetContainerName]
	if target == nil || c == nil || !c.running() {
		p.mu.Unlock()
		return "", fmt.Errorf("unable to find target container %q", e.TargetContainerName)
	}
	_, server := c.run.(*served)
	attempt := c.attempt
	p.mu.Unlock()
	if !server {
		return target.Name, nil
	}
	env, err := k.environment(o, target, p.addresses())
	if err != nil {
		return "", err
	}
	return k.ensureView(ctx, p, o, target, withDefaults(env, k.serviceLinks(o)), attempt)
}

// ensureHolder starts a holder unless one by that name runs whose attempt is not
// below first.
func (k *Kubelet) ensureHolder(ctx context.Context, p *pod, name string, first int, spec func() (sandbox.ProcessSpec, error)) error {
	sb := p.box()
	if sb == nil {
		return errors.New("the pod is not running")
	}
	p.holding.Lock()
	defer p.holding.Unlock()
	attempt := first
	for _, proc := range sb.Processes() {
		if proc.Container() != name || proc.Attempt() < first {
			continue
		}
		if _, ended := proc.Exit(); !ended {
			return nil
		}
		attempt = proc.Attempt() + 1
	}
	s, err := spec()
	if err != nil {
		return err
	}
	s.Container, s.Attempt = name, attempt
	_, err = sb.Start(ctx, s)
	return err
}

// dropView ends the view of a server that has ended; p.mu is held.
func (p *pod) dropView(container string) {
	if p.sandbox == nil {
		return
	}
	for _, proc := range p.sandbox.Processes() {
		if proc.Container() == viewPrefix+container {
			_ = proc.Signal(sigKill) // it may have ended
		}
	}
}
