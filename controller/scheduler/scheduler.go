// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/podstate"
	"github.com/kplab/kplab/internal/settle"
)

// workers bounds the bindings in flight.
const workers = 32

// Controller is the scheduler.
type Controller struct {
	loop     *loop.Loop[loop.Key]
	client   kubernetes.Interface
	clock    clock.PassiveClock
	recorder record.EventRecorder
	pods     corelisters.PodLister
	volumes  volumes

	mu      sync.Mutex
	state   *state
	waiting map[loop.Key]bool // pods that fit nowhere
}

// New makes the scheduler and subscribes it to nodes, pods and storage.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	nodes, pods := d.Informers.Core().V1().Nodes(), d.Informers.Core().V1().Pods()
	c := &Controller{
		client:   d.Client,
		clock:    d.Clock,
		recorder: d.Recorder(corev1.DefaultSchedulerName),
		pods:     pods.Lister(),
		state:    newState(),
		waiting:  map[loop.Key]bool{},
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "scheduler", Workers: workers, Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "nodes", nodes.Informer(), c.onNode)
	loop.Watch(c.loop, "pods", pods.Informer(), c.onPod)
	c.volumes = newVolumes(d, c.loop, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.retryWaiting()
	})
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the scheduler has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error { return c.loop.Run(ctx) }

func (c *Controller) onNode(old, cur *corev1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if cur == nil {
		c.state.removeNode(old.Name)
		return
	}
	c.state.setNode(cur)
	if old == nil || roomier(old, cur) {
		c.retryWaiting()
	}
}

func (c *Controller) onPod(old, cur *corev1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if old != nil && (cur == nil || old.UID != cur.UID) {
		delete(c.waiting, loop.KeyOf(old))
		if c.state.remove(old.UID) {
			c.retryWaiting()
		}
	}
	if cur == nil {
		return
	}
	if podstate.Finished(cur) {
		if c.state.remove(cur.UID) {
			c.retryWaiting()
		}
		return
	}
	if cur.Spec.NodeName != "" {
		c.state.place(cur, cur.Spec.NodeName)
		return
	}
	if mine(cur) {
		// A waiting pod is looked at again when the user changed it, not when this
		// scheduler wrote its condition.
		if old == nil || old.UID != cur.UID || !c.waiting[loop.KeyOf(cur)] || specChanged(old, cur) {
			delete(c.waiting, loop.KeyOf(cur))
			c.loop.Add(loop.KeyOf(cur))
		}
	}
}

// retryWaiting looks again at every pod that fits nowhere. Call it under the lock.
func (c *Controller) retryWaiting() {
	for key := range c.waiting {
		delete(c.waiting, key)
		c.loop.Add(key)
	}
}

// mine reports whether the pod waits for this scheduler.
func mine(pod *corev1.Pod) bool {
	return pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && !podstate.Finished(pod) &&
		len(pod.Spec.SchedulingGates) == 0 &&
		(pod.Spec.SchedulerName == corev1.DefaultSchedulerName || pod.Spec.SchedulerName == "")
}

// sync places one pod.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	pod, err := c.pods.Pods(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if !mine(pod) {
		return nil
	}
	storage, refusal, err := c.volumes.of(ctx, pod)
	if err != nil {
		return err
	}
	if refusal != "" {
		return c.refuse(ctx, pod, c.wait(key, refusal))
	}
	node, chosen, refusal := c.decide(key, pod, storage)
	switch {
	case refusal != "":
		return c.refuse(ctx, pod, refusal)
	case len(chosen) > 0:
		return c.volumes.reserve(ctx, storage, chosen)
	case node == "":
		return nil // placed already; the cache will show it
	}
	return c.bind(ctx, pod, node)
}

// wait remembers a pod that no node whatever can take until something changes, and
// returns what is told of it.
func (c *Controller) wait(key loop.Key, why string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting[key] = true
	return fmt.Sprintf("0/%d nodes are available: %s.", len(c.state.known()), why)
}

// decide picks a node and assumes the pod there. Without one it returns why, and
// remembers the pod until something changes. A pod whose claims wait for it is not
// placed yet: chosen are the volumes for them, on the node that was picked.
func (c *Controller) decide(key loop.Key, pod *corev1.Pod, storage storage) (node string, chosen []*corev1.PersistentVolume, refusal string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state.has(pod.UID) {
		return "", nil, ""
	}
	node, refusal = c.state.pick(pod, storage)
	if refusal != "" {
		c.waiting[key] = true
		return "", nil, refusal
	}
	if len(storage.waiting) > 0 {
		c.waiting[key] = true
		chosen, _ = storage.choose(c.state.nodes[node].node)
		return node, chosen, ""
	}
	c.state.place(pod, node)
	return node, nil, ""
}

// bind writes the decision.
func (c *Controller) bind(ctx context.Context, pod *corev1.Pod, node string) error {
	err := c.client.CoreV1().Pods(pod.Namespace).Bind(ctx, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node},
	}, metav1.CreateOptions{})
	if err == nil {
		c.recorder.Eventf(pod, corev1.EventTypeNormal, "Scheduled", "Successfully assigned %s/%s to %s", pod.Namespace, pod.Name, node)
		return nil
	}
	// If the write was made after all, the pod's event puts it back.
	c.mu.Lock()
	if c.state.remove(pod.UID) {
		c.retryWaiting()
	}
	c.mu.Unlock()
	if apierrors.IsNotFound(err) {
		return nil // the pod went meanwhile
	}
	return fmt.Errorf("bind to %s: %w", node, err)
}

// refuse tells the pod's owner why it is not placed: a condition, once per reason,
// and an event.
func (c *Controller) refuse(ctx context.Context, pod *corev1.Pod, why string) error {
	c.recorder.Event(pod, corev1.EventTypeWarning, "FailedScheduling", why)
	if had := podstate.Condition(pod, corev1.PodScheduled); had != nil &&
		had.Status == corev1.ConditionFalse && had.Reason == corev1.PodReasonUnschedulable && had.Message == why {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status": map[string]any{"conditions": []any{map[string]any{
			"type": corev1.PodScheduled, "status": corev1.ConditionFalse,
			"reason": corev1.PodReasonUnschedulable, "message": why, "observedGeneration": pod.Generation,
			"lastTransitionTime": transition(pod, c.clock),
			"lastProbeTime":      nil,
		}}},
	})
	if err != nil {
		return fmt.Errorf("encode the condition: %w", err)
	}
	_, err = c.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("say that the pod cannot be placed: %w", err)
	}
	return nil
}

// transition is when the pod began to be unschedulable: an earlier moment is kept
// while only the reason changes.
func transition(pod *corev1.Pod, now clock.PassiveClock) metav1.Time {
	if had := podstate.Condition(pod, corev1.PodScheduled); had != nil && had.Status == corev1.ConditionFalse {
		return had.LastTransitionTime
	}
	return metav1.NewTime(now.Now())
}
