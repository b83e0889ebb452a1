// SPDX-License-Identifier: Apache-2.0

// Package podgc removes pods that nobody else will: those of nodes that are no more, and
// those that were deleted before they had a node.
package podgc

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/podstate"
	"github.com/kplab/kplab/internal/settle"
)

// quarantine is how long a node has to be missing before its pods go: it may be
// registering itself again. Upstream's is as long.
const quarantine = 40 * time.Second

// Controller is the pod garbage collector.
type Controller struct {
	loop   *loop.Loop[loop.Key]
	client kubernetes.Interface
	clock  clock.PassiveClock
	nodes  corelisters.NodeLister
	pods   corelisters.PodLister

	mu sync.Mutex
	// missing is since when a node that pods name was seen to be missing.
	missing map[string]time.Time
}

// New makes the controller and subscribes it to nodes and pods.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	nodes, pods := d.Informers.Core().V1().Nodes(), d.Informers.Core().V1().Pods()
	c := &Controller{
		client: d.Client, clock: d.Clock, nodes: nodes.Lister(), pods: pods.Lister(), missing: map[string]time.Time{},
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "podgc", Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "nodes", nodes.Informer(), c.onNode)
	loop.Watch(c.loop, "pods", pods.Informer(), c.onPod)
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error { return c.loop.Run(ctx) }

// onNode looks at the pods of a node that goes.
func (c *Controller) onNode(_, cur *corev1.Node) {
	if cur != nil {
		c.mu.Lock()
		delete(c.missing, cur.Name)
		c.mu.Unlock()
		return
	}
	pods, err := c.pods.List(labels.Everything())
	if err != nil {
		return // a lister of a cache does not fail
	}
	for _, p := range pods {
		c.onPod(nil, p)
	}
}

func (c *Controller) onPod(_, cur *corev1.Pod) {
	if cur == nil {
		return
	}
	if cur.Spec.NodeName == "" {
		if cur.DeletionTimestamp != nil {
			c.loop.Add(loop.KeyOf(cur))
		}
		return
	}
	if _, err := c.nodes.Get(cur.Spec.NodeName); apierrors.IsNotFound(err) {
		c.loop.Add(loop.KeyOf(cur))
	}
}

func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	pod, err := c.pods.Pods(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if pod.Spec.NodeName == "" {
		if pod.DeletionTimestamp == nil {
			return nil
		}
		return c.remove(ctx, pod)
	}
	left, err := c.until(ctx, pod.Spec.NodeName)
	if err != nil || left < 0 {
		return err
	}
	if left > 0 {
		c.loop.After(key, left)
		return nil
	}
	return c.remove(ctx, pod)
}

// until tells when the pods of a node may go: 0 is now, less than 0 never, as the node
// is there.
func (c *Controller) until(ctx context.Context, node string) (time.Duration, error) {
	if _, err := c.nodes.Get(node); err == nil {
		return -1, nil
	}
	now := c.clock.Now()
	c.mu.Lock()
	since, known := c.missing[node]
	if !known {
		since = now
		c.missing[node] = now
	}
	c.mu.Unlock()
	if left := quarantine - now.Sub(since); left > 0 {
		return left, nil
	}
	// The cache may be behind.
	_, err := c.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	switch {
	case err == nil:
		return -1, nil
	case apierrors.IsNotFound(err):
		return 0, nil
	}
	return 0, err
}

// remove makes a pod one that has failed, so that who counts pods counts it, and deletes
// it at once.
func (c *Controller) remove(ctx context.Context, pod *corev1.Pod) error {
	pods := c.client.CoreV1().Pods(pod.Namespace)
	if pod.Spec.NodeName != "" && !podstate.Finished(pod) {
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"uid": pod.UID},
			"status": map[string]any{
				"phase": corev1.PodFailed,
				"conditions": []corev1.PodCondition{{
					Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "DeletionByPodGC",
					Message: "PodGC: node no longer exists", LastTransitionTime: metav1.NewTime(c.clock.Now()),
				}},
			},
		})
		if err != nil {
			return err
		}
		if _, err := pods.Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil && !gone(err) {
			return fmt.Errorf("fail pod %s/%s, whose node %s is no more: %w", pod.Namespace, pod.Name, pod.Spec.NodeName, err)
		}
	}
	err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To[int64](0), Preconditions: metav1.NewUIDPreconditions(string(pod.UID)),
	})
	if err != nil && !gone(err) {
		return fmt.Errorf("remove pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}

// gone tells whether the pod is no more, or another one by now.
func gone(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsConflict(err) }
