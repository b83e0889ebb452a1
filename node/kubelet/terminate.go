// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"errors"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ending is a pod on its way out.
type ending struct {
	// deadline is when what still runs is killed.
	deadline time.Time
	// hooks counts preStop hooks under way.
	hooks int
	// told is set once the hooks were started.
	told bool
}

// finish ends a pod that is to be deleted:
//
//  1. preStop hooks run, while the containers serve on: the pod has left the
//     Services' slices with the deletion timestamp, but proxies need a moment.
//  2. Each container is asked to end. Servers of built-in images serve on for a
//     short drain first.
//  3. At the end of the grace period the rest is killed.
//  4. Network, namespaces and volumes go, then the object, if it is still this pod.
func (k *Kubelet) finish(ctx context.Context, p *pod, o *corev1.Pod, gone bool) {
	grace := time.Duration(gracePeriod(o)) * time.Second
	if gone {
		grace = 0 // the API let go of it: nobody waits for a friendly end
	}
	if !k.stopAll(p, grace, "") {
		return
	}
	if err := k.dismantle(ctx, p); err != nil {
		k.log.Warn("pod cannot be taken down yet", "pod", o.Namespace+"/"+o.Name, "error", err)
		k.again(p, time.Second)
		return
	}
	if err := k.removeFiles(p.uid); err != nil {
		k.log.Warn("a pod's files stay behind", "pod", o.Namespace+"/"+o.Name, "error", err)
	}
	p.mu.Lock()
	p.removed = true
	p.end = nil
	p.mu.Unlock()
	if len(o.Finalizers) > 0 && !gone {
		// The object stays for others to read: it has to say how the pod ended.
		p.mu.Lock()
		if p.phase == "" {
			p.phase = endPhase(p, o)
		}
		p.mu.Unlock()
	}
	k.kick(p)
}

// removeFiles removes a pod's volumes and logs.
func (k *Kubelet) removeFiles(uid types.UID) error {
	return errors.Join(os.RemoveAll(k.podDir(uid)), os.RemoveAll(k.memoryDir(uid)))
}

// endPhase is the phase of a pod whose containers were all ended; p.mu is held.
func endPhase(p *pod, o *corev1.Pod) corev1.PodPhase {
	for i := range o.Spec.Containers {
		c := p.containers[o.Spec.Containers[i].Name]
		if c == nil || c.exit == nil || c.exit.ExitCode != 0 {
			return corev1.PodFailed
		}
	}
	return corev1.PodSucceeded
}

// forget deletes the object of a pod of which nothing is left, and drops it once
// the API has none.
func (k *Kubelet) forget(p *pod, o *corev1.Pod, gone bool) {
	if gone {
		k.mu.Lock()
		delete(k.pods, p.uid)
		k.mu.Unlock()
		p.mu.Lock()
		p.dirty = false
		p.mu.Unlock()
		return
	}
	if o.DeletionTimestamp == nil {
		return
	}
	if len(o.Finalizers) > 0 {
		k.updateStatus(p)
	}
	k.statusQueue.Add(p.uid)
}

// deleteObject removes the pod's object for good.
func (k *Kubelet) deleteObject(ctx context.Context, o *corev1.Pod) error {
	now := int64(0)
	err := k.cfg.Client.CoreV1().Pods(o.Namespace).Delete(ctx, o.Name, metav1.DeleteOptions{
		GracePeriodSeconds: &now, Preconditions: &metav1.Preconditions{UID: &o.UID},
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // gone, or another pod has taken the name
	}
	return err
}

// stopAll works on ending all containers and reports whether all have ended. It is
// called again at each event until then.
func (k *Kubelet) stopAll(p *pod, grace time.Duration, why string) bool {
	o := p.object()
	p.mu.Lock()
	if p.end == nil {
		p.end = &ending{deadline: time.Now().Add(grace)}
	}
	end := p.end
	// A second, shorter deletion brings the end forward.
	if d := time.Now().Add(grace); d.Before(end.deadline) {
		end.deadline = d
	}
	var left, sidecars []*container
	for _, c := range p.containers {
		if !c.running() {
			continue
		}
		if spec := containerSpec(o, c.name); spec != nil && isSidecar(spec) {
			sidecars = append(sidecars, c)
		} else {
			left = append(left, c)
		}
	}
	if len(left)+len(sidecars) == 0 {
		over := end.hooks == 0
		if over && o.DeletionTimestamp == nil && !p.gone {
			p.end = nil
		}
		p.mu.Unlock()
		return over
	}
	told := end.told
	end.told = true
	deadline := end.deadline
	p.mu.Unlock()

	if !told {
		for _, c := range append(left, sidecars...) {
			k.containerEvent(o, c.name, corev1.EventTypeNormal, "Killing", "Stopping container %s", c.name)
			k.preStop(p, o, c, end, grace)
		}
	}
	if !time.Now().Before(deadline) {
		for _, c := range append(left, sidecars...) {
			p.mu.Lock()
			run := c.run
			c.killing = true
			p.mu.Unlock()
			run.kill()
		}
		return false
	}
	k.again(p, time.Until(deadline)+time.Millisecond)
	p.mu.Lock()
	waiting := end.hooks > 0
	p.mu.Unlock()
	if waiting {
		return false
	}
	// Sidecars go when the containers that need them are gone.
	if len(left) == 0 {
		left = sidecars
	}
	for _, c := range left {
		k.askToEnd(p, c, why)
	}
	return false
}

// askToEnd asks a running container to end, once.
func (k *Kubelet) askToEnd(p *pod, c *container, why string) {
	p.mu.Lock()
	run, first := c.run, !c.killing
	c.killing, c.why = true, why
	stop := c.stopProbes
	c.stopProbes = nil
	p.mu.Unlock()
	if stop != nil {
		stop()
	}
	if first && run != nil {
		run.terminate()
	}
}

// preStop starts a container's hook; the pod is synced again when it has ended.
func (k *Kubelet) preStop(p *pod, o *corev1.Pod, c *container, end *ending, grace time.Duration) {
	spec := containerSpec(o, c.name)
	if spec == nil || spec.Lifecycle == nil || spec.Lifecycle.PreStop == nil || grace <= 0 {
		return
	}
	p.mu.Lock()
	end.hooks++
	p.mu.Unlock()
	k.background(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, grace)
		defer cancel()
		if err := k.runHook(ctx, p, o, spec, spec.Lifecycle.PreStop); err != nil {
			k.log.Warn("a preStop hook failed", "pod", o.Namespace+"/"+o.Name, "container", c.name, "error", err)
			k.containerEvent(o, c.name, corev1.EventTypeWarning, "FailedPreStopHook", "PreStopHook failed")
		}
		p.mu.Lock()
		end.hooks--
		p.mu.Unlock()
		k.kick(p)
	})
}

// gracePeriod is how long the pod may take to end, in seconds.
func gracePeriod(o *corev1.Pod) int64 {
	if o.DeletionGracePeriodSeconds != nil {
		return *o.DeletionGracePeriodSeconds
	}
	if o.Spec.TerminationGracePeriodSeconds != nil {
		return *o.Spec.TerminationGracePeriodSeconds
	}
	return corev1.DefaultTerminationGracePeriodSeconds
}
