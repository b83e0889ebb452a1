// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/sandbox"
)

// updateStatus computes the pod's status and has it written when the API's is
// another one.
func (k *Kubelet) updateStatus(p *pod) {
	p.mu.Lock()
	o := p.latest
	base := p.want
	if base == nil || newer(o.ResourceVersion, p.written) && !p.dirty {
		// The API's own: the first time, or when somebody else wrote after us.
		base = &o.Status
	}
	want := k.statusOf(p, o, base)
	write := !p.gone && (!p.removed || len(o.Finalizers) > 0) && !apiequality.Semantic.DeepEqual(want, base)
	if p.want == nil || !apiequality.Semantic.DeepEqual(want, p.want) {
		// The same pointer for the same content: it tells a write under way that
		// nothing has changed since.
		p.want = want
	}
	if write {
		p.dirty = true
	}
	p.mu.Unlock()
	if write {
		k.statusQueue.Add(p.uid)
	}
}

// newer compares two resource versions; ours are decimal counters.
func newer(a, b string) bool {
	x, errX := strconv.ParseUint(a, 10, 64)
	y, errY := strconv.ParseUint(b, 10, 64)
	if errX != nil || errY != nil {
		return a != b
	}
	return x > y
}

// statusOf is the pod's status as it is now. Times that did not change are taken
// from before. The pod's mu is held.
func (k *Kubelet) statusOf(p *pod, o *corev1.Pod, before *corev1.PodStatus) *corev1.PodStatus {
	s := before.DeepCopy()
	started := seconds(p.started)
	if s.StartTime == nil {
		s.StartTime = &started
	}
	s.HostIP, s.HostIPs = k.cfg.NodeIP.String(), nil
	for _, ip := range k.cfg.nodeIPs() {
		s.HostIPs = append(s.HostIPs, corev1.HostIP{IP: ip.String()})
	}
	if len(p.ips) > 0 {
		s.PodIP, s.PodIPs = p.ips[0].String(), nil
		for _, ip := range p.ips {
			s.PodIPs = append(s.PodIPs, corev1.PodIP{IP: ip.String()})
		}
	}
	initialized := true
	reason := "ContainerCreating"
	if len(o.Spec.InitContainers) > 0 {
		reason = "PodInitializing"
	}
	s.InitContainerStatuses = nil
	for i := range o.Spec.InitContainers {
		spec := &o.Spec.InitContainers[i]
		c := p.containers[spec.Name]
		st := containerStatus(o, spec, c, reason)
		done := c != nil && c.exit != nil && c.exit.ExitCode == 0
		if isSidecar(spec) {
			done = st.Started != nil && *st.Started
		} else {
			st.Ready = done
		}
		initialized = initialized && done
		s.InitContainerStatuses = append(s.InitContainerStatuses, st)
	}
	if initialized {
		reason = "ContainerCreating"
	}
	s.ContainerStatuses = nil
	var notReady []string
	anyRunning, anyWaiting := false, false
	for i := range o.Spec.Containers {
		spec := &o.Spec.Containers[i]
		st := containerStatus(o, spec, p.containers[spec.Name], reason)
		s.ContainerStatuses = append(s.ContainerStatuses, st)
		if !st.Ready {
			notReady = append(notReady, spec.Name)
		}
		anyRunning = anyRunning || st.State.Running != nil || st.State.Waiting != nil && st.LastTerminationState.Terminated != nil || st.State.Terminated != nil
		anyWaiting = anyWaiting || st.State.Waiting != nil && st.LastTerminationState.Terminated == nil
	}
	s.EphemeralContainerStatuses = nil
	for i := range o.Spec.EphemeralContainers {
		spec := corev1.Container(o.Spec.EphemeralContainers[i].EphemeralContainerCommon)
		st := containerStatus(o, &spec, p.containers[spec.Name], "ContainerCreating")
		st.Ready, st.Started = false, nil // it has no part in the pod's readiness
		s.EphemeralContainerStatuses = append(s.EphemeralContainerStatuses, st)
	}
	s.Phase, s.Reason, s.Message = p.phase, p.reason, p.message
	if s.Phase == "" {
		s.Phase = corev1.PodPending
		if initialized && anyRunning && !anyWaiting {
			s.Phase = corev1.PodRunning
		}
	}
	ended := s.Phase == corev1.PodSucceeded || s.Phase == corev1.PodFailed
	k.conditions(s, p, o, initialized || ended, notReady, ended)
	if o.Generation != 0 {
		s.ObservedGeneration = o.Generation
	}
	return s
}

// conditions sets the kubelet's conditions and leaves those of others alone.
func (k *Kubelet) conditions(s *corev1.PodStatus, p *pod, o *corev1.Pod, initialized bool, notReady []string, ended bool) {
	gen := s.ObservedGeneration
	if o.Generation != 0 {
		gen = o.Generation
	}
	set := func(kind corev1.PodConditionType, ok bool, reason, message string) {
		c := corev1.PodCondition{Type: kind, Status: corev1.ConditionFalse, Reason: reason, Message: message, ObservedGeneration: gen}
		if ok {
			c.Status, c.Reason, c.Message = corev1.ConditionTrue, "", ""
		}
		if ended && !ok && kind != corev1.PodReadyToStartContainers {
			c.Reason, c.Message = "PodCompleted", ""
			if s.Phase == corev1.PodFailed {
				c.Reason = "PodFailed"
			}
		}
		setCondition(s, c)
	}
	network := len(p.ips) > 0 && p.sandbox != nil && !p.removed
	set(corev1.PodReadyToStartContainers, network, "", p.blocked)
	uninit := ""
	if !initialized {
		uninit = "containers with incomplete status: " + list(unfinishedInit(s))
	}
	set(corev1.PodInitialized, initialized, "ContainersNotInitialized", uninit)
	why := ""
	if len(notReady) > 0 {
		why = "containers with unready status: " + list(notReady)
	}
	ready := len(notReady) == 0 && !ended && network && len(s.ContainerStatuses) > 0
	gate := ""
	for _, g := range o.Spec.ReadinessGates {
		if c := condition(s, g.ConditionType); c == nil || c.Status != corev1.ConditionTrue {
			gate = string(g.ConditionType)
		}
	}
	if ready && gate != "" {
		set(corev1.PodReady, false, "ReadinessGatesNotReady", "corresponding condition of pod readiness gate \""+gate+"\" is not \"True\".")
	} else {
		set(corev1.PodReady, ready, "ContainersNotReady", why)
	}
	set(corev1.ContainersReady, ready, "ContainersNotReady", why)
	if condition(s, corev1.PodScheduled) == nil {
		// A pod that names its node itself was scheduled by whoever wrote it.
		setCondition(s, corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, ObservedGeneration: gen})
	}
}

func unfinishedInit(s *corev1.PodStatus) []string {
	var names []string
	for _, st := range s.InitContainerStatuses {
		if !st.Ready {
			names = append(names, st.Name)
		}
	}
	return names
}

func list(names []string) string {
	out := "["
	for i, n := range names {
		if i > 0 {
			out += " "
		}
		out += n
	}
	return out + "]"
}

func condition(s *corev1.PodStatus, kind corev1.PodConditionType) *corev1.PodCondition {
	for i := range s.Conditions {
		if s.Conditions[i].Type == kind {
			return &s.Conditions[i]
		}
	}
	return nil
}

// setCondition keeps the time of the last change when the status is the same.
func setCondition(s *corev1.PodStatus, c corev1.PodCondition) {
	old := condition(s, c.Type)
	if old == nil {
		c.LastTransitionTime = seconds(time.Now())
		s.Conditions = append(s.Conditions, c)
		return
	}
	c.LastProbeTime = old.LastProbeTime
	c.LastTransitionTime = old.LastTransitionTime
	if old.Status != c.Status || c.LastTransitionTime.IsZero() {
		c.LastTransitionTime = seconds(time.Now())
	}
	*old = c
}

// containerStatus is one container's part.
func containerStatus(o *corev1.Pod, spec *corev1.Container, c *container, waiting string) corev1.ContainerStatus {
	started := false
	st := corev1.ContainerStatus{Name: spec.Name, Image: spec.Image, ImageID: "", Started: &started, VolumeMounts: mountStatus(spec)}
	if c == nil {
		st.State.Waiting = &corev1.ContainerStateWaiting{Reason: waiting}
		return st
	}
	st.RestartCount, st.ContainerID = int32(c.attempt), c.id
	if c.id != "" {
		st.ImageID = imageID(spec.Image)
		// Nothing is limited here, so what is allocated is what was asked for.
		st.AllocatedResources = spec.Resources.Requests.DeepCopy()
		st.Resources = spec.Resources.DeepCopy()
		st.Resources.Claims = nil
		st.User = userStatus(userOf(o, spec))
	}
	if c.last != nil {
		st.LastTerminationState.Terminated = c.last.DeepCopy()
	}
	switch {
	case c.running():
		st.State.Running = &corev1.ContainerStateRunning{StartedAt: seconds(c.startedAt)}
		started = c.startupDone
		st.Ready = c.ready && c.startupDone && c.hooked
	case c.exit != nil && c.waitReason != "":
		st.State.Waiting = &corev1.ContainerStateWaiting{Reason: c.waitReason, Message: c.waitMessage}
		st.LastTerminationState.Terminated = c.exit.DeepCopy()
	case c.exit != nil:
		st.State.Terminated = c.exit.DeepCopy()
	default:
		st.State.Waiting = &corev1.ContainerStateWaiting{Reason: waiting}
		if c.waitReason != "" {
			st.State.Waiting.Reason, st.State.Waiting.Message = c.waitReason, c.waitMessage
		}
	}
	return st
}

// mountStatus is the status of the container's mounts, in the order of the spec.
func mountStatus(spec *corev1.Container) []corev1.VolumeMountStatus {
	var out []corev1.VolumeMountStatus
	for _, m := range spec.VolumeMounts {
		st := corev1.VolumeMountStatus{Name: m.Name, MountPath: m.MountPath, ReadOnly: m.ReadOnly}
		if m.ReadOnly {
			disabled := corev1.RecursiveReadOnlyDisabled
			st.RecursiveReadOnly = &disabled
		}
		out = append(out, st)
	}
	return out
}

// userStatus says who a container's first process is. Its group is among the
// supplemental ones, as runtimes report it.
func userStatus(u sandbox.User) *corev1.ContainerUser {
	groups := []int64{int64(u.GID)}
	for _, g := range u.Groups {
		if !slices.Contains(groups, int64(g)) {
			groups = append(groups, int64(g))
		}
	}
	return &corev1.ContainerUser{Linux: &corev1.LinuxContainerUser{UID: int64(u.UID), GID: int64(u.GID), SupplementalGroups: groups}}
}

// statusLoop writes statuses and deletes objects; it is where the kubelet waits for
// the API server.
func (k *Kubelet) statusLoop(ctx context.Context) {
	for {
		uid, quit := k.statusQueue.Get()
		if quit {
			return
		}
		err := error(nil)
		if p := k.pod(uid); p != nil && ctx.Err() == nil {
			err = k.writeStatus(ctx, p)
		}
		if err != nil && ctx.Err() == nil {
			k.log.Debug("status not written yet", "pod", uid, "error", err)
			k.statusQueue.AddRateLimited(uid)
		} else {
			k.statusQueue.Forget(uid)
		}
		k.statusQueue.Done(uid)
	}
}

func (k *Kubelet) writeStatus(ctx context.Context, p *pod) error {
	p.mu.Lock()
	o, want, dirty, removed, gone := p.latest, p.want, p.dirty, p.removed, p.gone
	p.mu.Unlock()
	if gone {
		return nil
	}
	if dirty && want != nil && (!removed || len(o.Finalizers) > 0) {
		if err := k.putStatus(ctx, p, o, want); err != nil {
			return err
		}
	}
	if removed && o.DeletionTimestamp != nil {
		return k.deleteObject(ctx, o)
	}
	return nil
}

// putStatus writes one status. The object's other parts may have changed since the
// watch told of it, so a conflict is answered with a fresh read.
func (k *Kubelet) putStatus(ctx context.Context, p *pod, o *corev1.Pod, want *corev1.PodStatus) error {
	pods := k.cfg.Client.CoreV1().Pods(o.Namespace)
	for fresh := false; ; fresh = true {
		// Conditions of others are the API's newest, not those of our last look.
		out := *o
		out.Status = *merge(want, &o.Status)
		done, err := pods.UpdateStatus(ctx, &out, metav1.UpdateOptions{})
		switch {
		case err == nil:
			p.mu.Lock()
			p.written = done.ResourceVersion
			if p.want == want {
				p.dirty = false
			}
			again := p.dirty
			p.mu.Unlock()
			if again {
				k.statusQueue.Add(p.uid)
			}
			return nil
		case apierrors.IsNotFound(err):
			p.mu.Lock()
			p.dirty = false
			p.mu.Unlock()
			return nil
		case apierrors.IsConflict(err) && !fresh:
			o, err = pods.Get(ctx, o.Name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) || err == nil && o.UID != p.uid {
				p.mu.Lock()
				p.dirty = false
				p.mu.Unlock()
				return nil
			}
			if err != nil {
				return err
			}
		default:
			return err
		}
	}
}

// own are the conditions that the kubelet writes.
var own = []corev1.PodConditionType{
	corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.PodReady, corev1.ContainersReady,
}

// merge is want with the conditions that are not the kubelet's taken from now.
func merge(want, now *corev1.PodStatus) *corev1.PodStatus {
	out := *want
	out.Conditions = nil
	for _, c := range want.Conditions {
		if slices.Contains(own, c.Type) || condition(now, c.Type) == nil {
			out.Conditions = append(out.Conditions, c)
		}
	}
	for _, c := range now.Conditions {
		if !slices.Contains(own, c.Type) {
			out.Conditions = append(out.Conditions, c)
		}
	}
	return &out
}
