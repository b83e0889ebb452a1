// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/cni"
	"github.com/kplab/kplab/sandbox"
)

// adopt looks at what an earlier process left on the node: the sandboxes of pods
// that still exist are kept for the pods' first sync, all others are taken away.
func (k *Kubelet) adopt(ctx context.Context) error {
	var valid []cni.Attachment
	var errs []error
	for _, sb := range k.cfg.Runtime.List() {
		if sb.Spec().Node != k.cfg.NodeName {
			continue
		}
		uid := types.UID(sb.Spec().ID)
		p := k.pod(uid)
		if p == nil {
			k.log.Info("removing the sandbox of a pod that is gone", "pod", sb.Spec().Namespace+"/"+sb.Spec().Name)
			errs = append(errs, k.cfg.Runtime.Remove(ctx, sb.Spec().ID), k.removeFiles(uid))
			continue
		}
		p.mu.Lock()
		p.sandbox = sb
		p.mu.Unlock()
		valid = append(valid, k.attachment(p))
	}
	errs = append(errs, k.cfg.Network.GC(ctx, valid))
	for _, p := range k.allPods() {
		k.restore(p)
	}
	if err := errors.Join(errs...); err != nil {
		// What could not be removed does no harm to the pods that stay.
		k.log.Warn("some remains of earlier pods could not be removed", "error", err)
	}
	return nil
}

// restore takes over what the API knows about a pod's containers from the process
// before this one.
func (k *Kubelet) restore(p *pod) {
	o := p.object()
	resumed := p.box() != nil
	if o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed {
		p.mu.Lock()
		p.phase, p.reason, p.message = o.Status.Phase, o.Status.Reason, o.Status.Message
		p.mu.Unlock()
	}
	if o.Status.StartTime != nil {
		p.mu.Lock()
		p.started = o.Status.StartTime.Time
		p.mu.Unlock()
	}
	lost := false
	for _, list := range [][]corev1.ContainerStatus{o.Status.InitContainerStatuses, o.Status.ContainerStatuses, o.Status.EphemeralContainerStatuses} {
		for _, st := range list {
			c := p.container(st.Name)
			p.mu.Lock()
			c.attempt, c.id = int(st.RestartCount), st.ContainerID
			c.last = st.LastTerminationState.Terminated
			c.exit = st.State.Terminated
			if st.State.Waiting != nil && c.last != nil && c.last.ContainerID == c.id {
				c.exit, c.last = c.last, nil // it waits for its next attempt
			}
			c.backoff = backoffOf(c.attempt)
			if st.State.Running != nil {
				c.startedAt = st.State.Running.StartedAt.Time
			}
			if st.ContainerID != "" && !resumed && p.phase == "" {
				lost = true
				if c.exit == nil {
					c.exit = &corev1.ContainerStateTerminated{ExitCode: 255, Reason: "Unknown", ContainerID: c.id, StartedAt: seconds(c.startedAt), FinishedAt: seconds(time.Now())}
				}
				if ephemeral(o, st.Name) != nil {
					p.mu.Unlock()
					continue // one of these never begins again
				}
				// With a new sandbox everything begins again, init containers too.
				c.last, c.exit, c.backoff, c.id = c.exit, nil, 0, ""
				c.attempt++
			}
			p.mu.Unlock()
		}
	}
	if lost && o.DeletionTimestamp == nil {
		k.event(o, corev1.EventTypeNormal, "SandboxChanged", "Pod sandbox changed, it will be killed and re-created.")
	}
}

// backoffOf is the wait that a container has reached with its nth restart.
func backoffOf(attempt int) time.Duration {
	if attempt == 0 {
		return 0
	}
	return backoffAfter(attempt, crashBackoff, maxBackoff)
}

// sync does for a pod what can be done now.
func (k *Kubelet) sync(ctx context.Context, p *pod) {
	p.mu.Lock()
	o, gone, removed := p.latest, p.gone, p.removed
	p.mu.Unlock()
	if removed {
		k.forget(p, o, gone)
		return
	}
	k.observeExits(p)
	switch {
	case gone || o.DeletionTimestamp != nil:
		k.finish(ctx, p, o, gone)
	case p.over():
		k.release(ctx, p)
	case k.overLimits(p, o):
	default:
		k.start(ctx, p, o)
	}
	k.updateStatus(p)
}

// over reports whether the pod has ended by itself.
func (p *pod) over() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.phase == corev1.PodSucceeded || p.phase == corev1.PodFailed
}

// start brings a pod up step by step. A step that fails leaves its reason in the
// status and is tried again later.
func (k *Kubelet) start(ctx context.Context, p *pod, o *corev1.Pod) {
	steps := []struct {
		reason string
		event  string
		do     func(context.Context, *pod, *corev1.Pod) error
	}{
		{"FailedCreatePodSandBox", "Failed to create pod sandbox: ", k.ensureSandbox},
		{"FailedCreatePodSandBox", "Failed to create pod sandbox: ", k.ensureNetwork},
		{"FailedMount", "MountVolume.SetUp failed: ", k.ensureVolumes},
	}
	for _, s := range steps {
		err := s.do(ctx, p, o)
		if err == nil {
			continue
		}
		if ctx.Err() != nil {
			return
		}
		k.log.Warn("pod cannot start yet", "pod", o.Namespace+"/"+o.Name, "error", err)
		k.event(o, corev1.EventTypeWarning, s.reason, "%s%v", s.event, err)
		k.again(p, p.block(err.Error()))
		return
	}
	p.unblock()
	k.resume(p, o)
	// Before the init containers: they may be what somebody wants to look at.
	for i := range o.Spec.EphemeralContainers {
		c := corev1.Container(o.Spec.EphemeralContainers[i].EphemeralContainerCommon)
		k.ensureRunning(ctx, p, o, &c, corev1.RestartPolicyNever)
	}
	if !k.runInit(ctx, p, o) {
		return
	}
	for i := range o.Spec.Containers {
		c := &o.Spec.Containers[i]
		k.ensureRunning(ctx, p, o, c, restartPolicy(o, c))
	}
	k.settlePhase(p, o)
}

// ensureSandbox makes the pod's namespaces.
func (k *Kubelet) ensureSandbox(ctx context.Context, p *pod, o *corev1.Pod) error {
	if p.box() != nil {
		return nil
	}
	spec := sandbox.Spec{ID: string(o.UID), Node: k.cfg.NodeName, Namespace: o.Namespace, Name: o.Name, Hostname: hostname(o), ResolvConf: k.resolvConf(o)}
	if o.Spec.HostNetwork {
		spec.Network = k.cfg.NodeNSName
	}
	sb, err := k.cfg.Runtime.Create(ctx, spec)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.sandbox = sb
	p.mu.Unlock()
	return nil
}

// ensureNetwork attaches the pod. ADD can be repeated, so a pod that an earlier
// process attached keeps its address.
func (k *Kubelet) ensureNetwork(ctx context.Context, p *pod, o *corev1.Pod) error {
	if len(p.addresses()) > 0 {
		return nil
	}
	var ips []netip.Addr
	if o.Spec.HostNetwork {
		ips = k.cfg.nodeIPs()
	} else {
		res, err := k.cfg.Network.Add(ctx, k.attachment(p))
		if err != nil {
			return err
		}
		ips = res.IPs
	}
	p.mu.Lock()
	p.ips = ips
	p.mu.Unlock()
	return nil
}

// resume takes over containers that run already: processes of an adopted sandbox.
// Servers of built-in images that ran begin again under their old ID, with the
// first ensureRunning.
func (k *Kubelet) resume(p *pod, o *corev1.Pod) {
	for _, proc := range p.box().Processes() {
		spec := containerSpec(o, proc.Container())
		if spec == nil {
			continue // a holder
		}
		c := p.container(proc.Container())
		p.mu.Lock()
		if c.run == nil && proc.Attempt() >= c.attempt && (c.exit == nil || proc.Attempt() > c.attempt) {
			if proc.Attempt() > c.attempt {
				c.last, c.exit = c.exit, nil
			}
			c.attempt, c.startedAt = proc.Attempt(), proc.StartedAt()
			c.id = containerID(p.uid, c.name, c.attempt)
			c.hooked = true // by the daemon that started it
			k.watchProcess(p, c, proc)
		}
		p.mu.Unlock()
		if c.running() {
			k.startProbes(p, o, spec, c)
		}
	}
	k.observeExits(p)
}

// runInit runs init containers in order and reports whether all are done, which
// for a sidecar means that it has started.
func (k *Kubelet) runInit(ctx context.Context, p *pod, o *corev1.Pod) bool {
	for i := range o.Spec.InitContainers {
		spec := &o.Spec.InitContainers[i]
		c := p.container(spec.Name)
		if isSidecar(spec) {
			k.ensureRunning(ctx, p, o, spec, corev1.RestartPolicyAlways)
			p.mu.Lock()
			up := c.running() && c.startupDone
			p.mu.Unlock()
			if !up {
				return false
			}
			continue
		}
		p.mu.Lock()
		exit := c.exit
		p.mu.Unlock()
		if exit != nil && exit.ExitCode == 0 {
			continue
		}
		policy := restartPolicy(o, spec)
		if exit != nil && policy == corev1.RestartPolicyNever {
			k.giveUp(p, corev1.PodFailed, "", "")
			return false
		}
		// An init container that succeeded is done, whatever the policy.
		k.ensureRunning(ctx, p, o, spec, corev1.RestartPolicyOnFailure)
		return false
	}
	return true
}

// giveUp ends a pod for good.
func (k *Kubelet) giveUp(p *pod, phase corev1.PodPhase, reason, message string) {
	p.mu.Lock()
	p.phase, p.reason, p.message = phase, reason, message
	p.mu.Unlock()
	k.kick(p)
}

// settlePhase ends a pod whose containers have all ended and are not to run again.
func (k *Kubelet) settlePhase(p *pod, o *corev1.Pod) {
	failed := false
	for i := range o.Spec.Containers {
		spec := &o.Spec.Containers[i]
		c := p.container(spec.Name)
		p.mu.Lock()
		exit := c.exit
		p.mu.Unlock()
		if exit == nil || restarts(restartPolicy(o, spec), exit.ExitCode) {
			return
		}
		failed = failed || exit.ExitCode != 0
	}
	phase := corev1.PodSucceeded
	if failed {
		phase = corev1.PodFailed
	}
	k.giveUp(p, phase, "", "")
}

// release gives back what a pod that has ended no longer needs; its logs and its
// object stay until somebody deletes it.
func (k *Kubelet) release(ctx context.Context, p *pod) {
	p.mu.Lock()
	released := p.released
	p.mu.Unlock()
	if released || !k.stopAll(p, time.Duration(gracePeriod(p.object()))*time.Second, "") {
		return
	}
	if err := k.dismantle(ctx, p); err != nil {
		k.log.Warn("ended pod cannot be taken down yet", "pod", p.object().Name, "error", err)
		k.again(p, time.Second)
		return
	}
	p.mu.Lock()
	p.released = true
	p.mu.Unlock()
}

// dismantle takes the pod off the network and removes its namespaces. Doing it
// twice is fine.
func (k *Kubelet) dismantle(ctx context.Context, p *pod) error {
	p.takeDown()
	if !p.object().Spec.HostNetwork {
		p.wiring.Lock()
		err := k.cfg.Network.Del(ctx, k.attachment(p))
		p.wiring.Unlock()
		if err != nil {
			return err
		}
	}
	if err := k.cfg.Runtime.Remove(ctx, string(p.uid)); err != nil {
		return fmt.Errorf("remove the sandbox: %w", err)
	}
	p.mu.Lock()
	p.sandbox = nil
	p.mu.Unlock()
	return nil
}

// restartPolicy is the container's own policy, else the pod's.
func restartPolicy(o *corev1.Pod, c *corev1.Container) corev1.RestartPolicy {
	if c.RestartPolicy != nil {
		return corev1.RestartPolicy(*c.RestartPolicy)
	}
	if o.Spec.RestartPolicy == "" {
		return corev1.RestartPolicyAlways
	}
	return o.Spec.RestartPolicy
}

func restarts(policy corev1.RestartPolicy, code int32) bool {
	return policy == corev1.RestartPolicyAlways || policy == corev1.RestartPolicyOnFailure && code != 0
}

// isSidecar reports whether an init container keeps running beside the pod.
func isSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// containerSpec finds a container of any kind by name.
func containerSpec(o *corev1.Pod, name string) *corev1.Container {
	for _, list := range [][]corev1.Container{o.Spec.Containers, o.Spec.InitContainers} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	if e := ephemeral(o, name); e != nil {
		c := corev1.Container(e.EphemeralContainerCommon)
		return &c
	}
	return nil
}

// ephemeral finds an ephemeral container by name.
func ephemeral(o *corev1.Pod, name string) *corev1.EphemeralContainer {
	for i := range o.Spec.EphemeralContainers {
		if o.Spec.EphemeralContainers[i].Name == name {
			return &o.Spec.EphemeralContainers[i]
		}
	}
	return nil
}

// hostname is what the pod's processes call their host: a pod in the node's network
// has the node's name.
func hostname(o *corev1.Pod) string {
	if o.Spec.HostNetwork {
		return o.Spec.NodeName
	}
	h := o.Spec.Hostname
	if h == "" {
		h = o.Name
	}
	if len(h) > 63 {
		h = h[:63]
	}
	return h
}
