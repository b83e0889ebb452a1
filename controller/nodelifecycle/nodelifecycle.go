// SPDX-License-Identifier: Apache-2.0

// Package nodelifecycle watches over the nodes' heartbeats and writes the taints that
// follow from a node's condition.
//
// A node renews its Lease. When the Lease has not changed for 40 seconds the node's
// conditions become Unknown, its pods lose their Ready condition (so that they leave
// the endpoints), and the node gets the taints "unreachable". It takes itself back by
// its next status. Package tainteviction evicts the pods that do not tolerate them.
//
// Ages are measured from the moment at which this process saw a Lease change, not
// from the time written in it: clocks and daemon pauses then cannot declare a whole
// cluster dead.
package nodelifecycle

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/podstate"
	"github.com/kplab/kplab/internal/settle"
)

// grace is how long a node may be silent.
const grace = 40 * time.Second

// Controller is the node lifecycle controller.
type Controller struct {
	loop     *loop.Loop[loop.Key]
	client   kubernetes.Interface
	clock    clock.PassiveClock
	recorder record.EventRecorder
	nodes    corelisters.NodeLister
	pods     corelisters.PodLister

	mu sync.Mutex
	// heard is when this process last saw a sign of life, by node.
	heard map[string]time.Time
	// planned is when a look at a node is planned already: a renewal must not add one
	// timer each time.
	planned map[string]time.Time
	// registered are the nodes that this process has told of, by name.
	registered map[string]types.UID
}

// New makes the controller and subscribes it to nodes, Leases and pods.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	nodes, pods := d.Informers.Core().V1().Nodes(), d.Informers.Core().V1().Pods()
	leases := d.Informers.Coordination().V1().Leases()
	c := &Controller{
		client:   d.Client,
		clock:    d.Clock,
		recorder: d.Recorder("node-controller"),
		nodes:    nodes.Lister(),
		pods:     pods.Lister(),
		heard:    map[string]time.Time{},
		planned:  map[string]time.Time{},

		registered: map[string]types.UID{},
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "nodelifecycle", Workers: 2, Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "nodes", nodes.Informer(), c.onNode)
	loop.Watch(c.loop, "leases", leases.Informer(), c.onLease)
	// Only so that the cache is there when a node falls silent.
	loop.Watch(c.loop, "pods", pods.Informer(), func(_, _ *corev1.Pod) {})
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error { return c.loop.Run(ctx) }

func (c *Controller) onNode(old, cur *corev1.Node) {
	if cur == nil {
		c.mu.Lock()
		delete(c.heard, old.Name)
		c.mu.Unlock()
		c.loop.Add(loop.Key{Name: old.Name})
		return
	}
	if old == nil {
		c.sign(cur.Name) // a new node, or a new process: the grace begins now
	}
	if old == nil || readiness(old) != readiness(cur) || old.Spec.Unschedulable != cur.Spec.Unschedulable ||
		!equality.Semantic.DeepEqual(old.Spec.Taints, cur.Spec.Taints) {
		if old != nil && readiness(old) == corev1.ConditionUnknown && readiness(cur) == corev1.ConditionTrue {
			c.sign(cur.Name) // it took itself back
		}
		c.loop.Add(loop.Key{Name: cur.Name})
	}
}

func (c *Controller) onLease(old, cur *coordinationv1.Lease) {
	if cur == nil || cur.Namespace != corev1.NamespaceNodeLease {
		return
	}
	if old == nil || !equality.Semantic.DeepEqual(old.Spec.RenewTime, cur.Spec.RenewTime) {
		c.sign(cur.Name)
	}
}

// sign takes note that the node is alive.
func (c *Controller) sign(node string) {
	c.mu.Lock()
	c.heard[node] = c.clock.Now()
	c.mu.Unlock()
}

// silentFor returns how long nothing was heard of a node.
func (c *Controller) silentFor(node string) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	at, ok := c.heard[node]
	if !ok {
		c.heard[node] = c.clock.Now()
		return 0
	}
	return c.clock.Since(at)
}

// plan looks at the node again after d, unless a look is planned already. One that
// comes earlier than needed plans the next.
func (c *Controller) plan(key loop.Key, d time.Duration) {
	now := c.clock.Now()
	c.mu.Lock()
	planned := c.planned[key.Name].After(now)
	if !planned {
		c.planned[key.Name] = now.Add(d)
	}
	c.mu.Unlock()
	if !planned {
		c.loop.After(key, d)
	}
}

// sync judges one node.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	node, err := c.nodes.Get(key.Name)
	if apierrors.IsNotFound(err) {
		c.mu.Lock()
		delete(c.planned, key.Name)
		c.mu.Unlock()
		c.register(key.Name, "")
		return nil
	}
	if err != nil {
		return err
	}
	c.register(node.Name, node.UID)
	silent := c.silentFor(node.Name)
	if silent < grace {
		c.plan(key, grace-silent)
		return c.keepTaints(ctx, node, readiness(node))
	}
	if readiness(node) != corev1.ConditionUnknown {
		if err := c.declareUnknown(ctx, node); err != nil {
			return err
		}
	}
	return errors.Join(
		c.keepTaints(ctx, node, corev1.ConditionUnknown),
		c.markPods(ctx, node.Name),
	)
}

// register tells of a node that is new to this process, or with uid "" of one that has
// gone.
func (c *Controller) register(name string, uid types.UID) {
	c.mu.Lock()
	had := c.registered[name]
	if uid == "" {
		delete(c.registered, name)
	} else {
		c.registered[name] = uid
	}
	c.mu.Unlock()
	tell := func(uid types.UID, reason, what string) {
		ref := &corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: name, UID: uid}
		c.recorder.Eventf(ref, corev1.EventTypeNormal, reason, "Node %s event: %s", name, fmt.Sprintf(what, name))
	}
	if had != "" && had != uid {
		tell(had, "RemovingNode", "Removing Node %s from Controller")
	}
	if uid != "" && had != uid {
		tell(uid, "RegisteredNode", "Registered Node %s in Controller")
	}
}

// readiness returns the node's Ready condition, "" when it has none yet.
func readiness(node *corev1.Node) corev1.ConditionStatus {
	for i := range node.Status.Conditions {
		if node.Status.Conditions[i].Type == corev1.NodeReady {
			return node.Status.Conditions[i].Status
		}
	}
	return ""
}

// declareUnknown sets the conditions that the node itself would write to Unknown.
func (c *Controller) declareUnknown(ctx context.Context, node *corev1.Node) error {
	now := metav1.NewTime(c.clock.Now())
	var next []corev1.NodeCondition
	for _, t := range []corev1.NodeConditionType{corev1.NodeReady, corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure} {
		cond := corev1.NodeCondition{
			Type: t, Status: corev1.ConditionUnknown, Reason: "NodeStatusUnknown",
			Message: "Kubelet stopped posting node status.", LastTransitionTime: now, LastHeartbeatTime: now,
		}
		i := slices.IndexFunc(node.Status.Conditions, func(had corev1.NodeCondition) bool { return had.Type == t })
		switch {
		case i >= 0:
			cond.LastHeartbeatTime = node.Status.Conditions[i].LastHeartbeatTime
		case t == corev1.NodeReady:
			cond.Reason, cond.Message = "NodeStatusNeverUpdated", "Kubelet never posted node status."
		default:
			continue // the node never spoke of it, and would not take it back
		}
		next = append(next, cond)
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": node.UID},
		"status":   map[string]any{"conditions": next},
	})
	if err != nil {
		return fmt.Errorf("encode the conditions: %w", err)
	}
	_, err = c.client.CoreV1().Nodes().Patch(ctx, node.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("declare the node silent: %w", err)
	}
	c.recorder.Eventf(node, corev1.EventTypeNormal, "NodeNotReady", "Node %s status is now: NodeNotReady", node.Name)
	return nil
}

// managed are the taints that only this controller writes.
func managed(t corev1.Taint) bool {
	switch t.Key {
	case corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable, corev1.TaintNodeUnschedulable:
		return true
	}
	return false
}

// taintsFor returns the taints that follow from a node's state.
func taintsFor(ready corev1.ConditionStatus, cordoned bool) []corev1.Taint {
	key := ""
	switch ready {
	case corev1.ConditionUnknown:
		key = corev1.TaintNodeUnreachable
	case corev1.ConditionFalse:
		key = corev1.TaintNodeNotReady
	}
	var out []corev1.Taint
	if key != "" {
		out = append(out,
			corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule},
			corev1.Taint{Key: key, Effect: corev1.TaintEffectNoExecute})
	}
	if cordoned {
		out = append(out, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule})
	}
	return out
}

// merge returns the node's taints with the managed ones replaced by wanted; those
// that are there already keep their time.
func merge(have, wanted []corev1.Taint, now metav1.Time) []corev1.Taint {
	var out []corev1.Taint
	matches := func(a corev1.Taint) func(corev1.Taint) bool {
		return func(b corev1.Taint) bool { return a.Key == b.Key && a.Effect == b.Effect }
	}
	for _, t := range have {
		if !managed(t) || slices.ContainsFunc(wanted, matches(t)) {
			out = append(out, t)
		}
	}
	for _, t := range wanted {
		if !slices.ContainsFunc(have, matches(t)) {
			t.TimeAdded = &now
			out = append(out, t)
		}
	}
	return out
}

func (c *Controller) keepTaints(ctx context.Context, node *corev1.Node, ready corev1.ConditionStatus) error {
	if ready == "" {
		return nil // it has not said anything yet; its own taints stand
	}
	taints := merge(node.Spec.Taints, taintsFor(ready, node.Spec.Unschedulable), metav1.NewTime(c.clock.Now()))
	if equality.Semantic.DeepEqual(taints, node.Spec.Taints) {
		return nil
	}
	// The whole list, against the state that it was read from.
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion},
		"spec":     map[string]any{"taints": taints},
	})
	if err != nil {
		return fmt.Errorf("encode the taints: %w", err)
	}
	_, err = c.client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write the taints: %w", err)
	}
	return nil
}

// markPods takes the Ready condition from the pods of a silent node: nobody can say
// any more that they serve. The node puts it back when it returns.
func (c *Controller) markPods(ctx context.Context, node string) error {
	all, err := c.pods.List(labels.Everything())
	if err != nil {
		return err
	}
	var errs []error
	for _, pod := range all {
		if pod.Spec.NodeName != node || !podstate.Ready(pod) {
			continue
		}
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"uid": pod.UID},
			"status": map[string]any{"conditions": []any{map[string]any{
				"type": corev1.PodReady, "status": corev1.ConditionFalse,
				"lastTransitionTime": metav1.NewTime(c.clock.Now()),
			}}},
		})
		if err != nil {
			return fmt.Errorf("encode the condition: %w", err)
		}
		_, err = c.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		if err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("mark pod %s/%s: %w", pod.Namespace, pod.Name, err))
			continue
		}
		c.recorder.Event(pod, corev1.EventTypeWarning, "NodeNotReady", "Node is not ready")
	}
	return errors.Join(errs...)
}
