// SPDX-License-Identifier: Apache-2.0

// Package tainteviction deletes pods from nodes with a NoExecute taint that they do not
// tolerate, or no longer: a pod tolerates a silent node for the 300 seconds that the API
// gives it, unless it says otherwise. The pods of a node that is dead stay, terminating,
// until their kubelet is back or somebody deletes them by force.
package tainteviction

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/internal/settle"
)

// Controller is the taint eviction controller.
type Controller struct {
	loop     *loop.Loop[loop.Key]
	client   kubernetes.Interface
	clock    clock.PassiveClock
	recorder record.EventRecorder
	nodes    corelisters.NodeLister
	pods     corelisters.PodLister
}

// New makes the controller and subscribes it to nodes and pods.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	nodes, pods := d.Informers.Core().V1().Nodes(), d.Informers.Core().V1().Pods()
	c := &Controller{
		client: d.Client, clock: d.Clock, recorder: d.Recorder("taint-eviction-controller"),
		nodes: nodes.Lister(), pods: pods.Lister(),
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "tainteviction", Workers: 4, Sync: c.sync, Deps: d})
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

// evicting are the taints of a node that evict.
func evicting(n *corev1.Node) []corev1.Taint {
	var out []corev1.Taint
	if n != nil {
		for _, t := range n.Spec.Taints {
			if t.Effect == corev1.TaintEffectNoExecute {
				out = append(out, t)
			}
		}
	}
	return out
}

// onNode looks at the pods of a node whose taints are others now.
func (c *Controller) onNode(old, cur *corev1.Node) {
	if cur == nil || equality.Semantic.DeepEqual(evicting(old), evicting(cur)) {
		return
	}
	pods, err := c.pods.List(labels.Everything())
	if err != nil {
		return // a lister of a cache does not fail
	}
	for _, p := range pods {
		if p.Spec.NodeName == cur.Name {
			c.loop.Add(loop.KeyOf(p))
		}
	}
}

// onPod looks at a pod that has come to a node with such taints.
func (c *Controller) onPod(old, cur *corev1.Pod) {
	if cur == nil || cur.Spec.NodeName == "" {
		return
	}
	if old != nil && old.Spec.NodeName == cur.Spec.NodeName && equality.Semantic.DeepEqual(old.Spec.Tolerations, cur.Spec.Tolerations) {
		return
	}
	if n, err := c.nodes.Get(cur.Spec.NodeName); err == nil && len(evicting(n)) > 0 {
		c.loop.Add(loop.KeyOf(cur))
	}
}

func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	pod, err := c.pods.Pods(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) || err == nil && (pod.DeletionTimestamp != nil || pod.Spec.NodeName == "") {
		return nil
	}
	if err != nil {
		return err
	}
	n, err := c.nodes.Get(pod.Spec.NodeName)
	if apierrors.IsNotFound(err) {
		return nil // its pods are package podgc's
	}
	if err != nil {
		return err
	}
	stays, left := tolerates(pod, evicting(n), c.clock.Now())
	switch {
	case stays:
		return nil
	case left > 0:
		c.loop.After(key, left)
		return nil
	}
	return c.evict(ctx, pod)
}

// tolerates tells whether a pod may stay on a node with these taints: for good, or for
// the time that is left.
func tolerates(pod *corev1.Pod, taints []corev1.Taint, now time.Time) (stays bool, left time.Duration) {
	stays = true
	for i := range taints {
		t := &taints[i]
		tolerated, forever, most := false, true, time.Duration(0)
		for j := range pod.Spec.Tolerations {
			tol := &pod.Spec.Tolerations[j]
			if !tol.ToleratesTaint(klog.Logger{}, t, false) {
				continue
			}
			// Of several, the one that allows the least counts.
			if tol.TolerationSeconds != nil {
				d := max(0, time.Duration(*tol.TolerationSeconds)*time.Second)
				if forever || d < most {
					most = d
				}
				forever = false
			}
			tolerated = true
		}
		if !tolerated {
			return false, 0
		}
		if forever {
			continue
		}
		since := pod.CreationTimestamp.Time
		if t.TimeAdded != nil && t.TimeAdded.After(since) {
			since = t.TimeAdded.Time
		}
		rest := since.Add(most).Sub(now)
		if rest <= 0 {
			return false, 0
		}
		if stays || rest < left {
			left = rest
		}
		stays = false
	}
	return stays, left
}

// evict says why, and deletes the pod.
func (c *Controller) evict(ctx context.Context, pod *corev1.Pod) error {
	c.recorder.Eventf(pod, corev1.EventTypeNormal, "TaintManagerEviction", "Marking for deletion Pod %s/%s", pod.Namespace, pod.Name)
	pods := c.client.CoreV1().Pods(pod.Namespace)
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status": map[string]any{"conditions": []corev1.PodCondition{{
			Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "DeletionByTaintManager",
			Message: "Taint manager: deleting due to NoExecute taint", LastTransitionTime: metav1.NewTime(c.clock.Now()),
		}}},
	})
	if err != nil {
		return err
	}
	_, err = pods.Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err == nil {
		err = pods.Delete(ctx, pod.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
	}
	// A conflict is another pod of that name.
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("evict pod %s/%s from node %s: %w", pod.Namespace, pod.Name, pod.Spec.NodeName, err)
	}
	return nil
}
