// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
)

func podColumns() []metav1.TableColumnDefinition {
	return []metav1.TableColumnDefinition{
		nameColumn,
		column("Ready", "string", "How many of the pod's containers are ready."),
		column("Status", "string", "What the pod is doing, in one word."),
		column("Restarts", "string", "How often its containers were started again, and when last."),
		ageColumn,
		wideColumn("IP", "The pod's first address."),
		wideColumn("Node", "The node that runs the pod."),
		wideColumn("Nominated Node", "The node that is being cleared for the pod."),
		wideColumn("Readiness Gates", "How many of the pod's readiness gates are true."),
	}
}

func podRow(obj runtime.Object) ([]any, []metav1.TableRowCondition) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, nil
	}
	var conditions []metav1.TableRowCondition
	switch pod.Status.Phase {
	case corev1.PodSucceeded:
		conditions = []metav1.TableRowCondition{{Type: metav1.RowCompleted, Status: metav1.ConditionTrue, Reason: string(pod.Status.Phase), Message: "The pod has completed successfully."}}
	case corev1.PodFailed:
		conditions = []metav1.TableRowCondition{{Type: metav1.RowCompleted, Status: metav1.ConditionTrue, Reason: string(pod.Status.Phase), Message: "The pod failed."}}
	}
	s := summarizePod(pod)
	ip := "<none>"
	if len(pod.Status.PodIPs) > 0 {
		ip = pod.Status.PodIPs[0].IP
	} else if pod.Status.PodIP != "" {
		ip = pod.Status.PodIP
	}
	gates := "<none>"
	if len(pod.Spec.ReadinessGates) > 0 {
		gates = fmt.Sprintf("%d/%d", trueGates(pod), len(pod.Spec.ReadinessGates))
	}
	return []any{
		pod.Name,
		fmt.Sprintf("%d/%d", s.ready, s.total),
		s.status,
		s.restartsText(),
		age(pod.CreationTimestamp),
		ip,
		orNone(pod.Spec.NodeName),
		orNone(pod.Status.NominatedNodeName),
		gates,
	}, conditions
}

func orNone(s string) string {
	if s == "" {
		return "<none>"
	}
	return s
}

func trueGates(pod *corev1.Pod) int {
	n := 0
	for _, gate := range pod.Spec.ReadinessGates {
		for _, c := range pod.Status.Conditions {
			if c.Type == gate.ConditionType && c.Status == corev1.ConditionTrue {
				n++
			}
		}
	}
	return n
}

// podSummary is what the table says about a pod's containers.
type podSummary struct {
	status          string
	ready, total    int
	restarts        int
	lastRestart     metav1.Time
	sidecarRestarts int
	lastSidecar     metav1.Time
}

func (s podSummary) restartsText() string {
	if s.restarts == 0 || s.lastRestart.IsZero() {
		return strconv.Itoa(s.restarts)
	}
	return fmt.Sprintf("%d (%s ago)", s.restarts, duration.HumanDuration(time.Since(s.lastRestart.Time)))
}

// summarizePod finds the one word that tells a person most: the furthest
// problem, as kubectl has shown it since its beginnings.
func summarizePod(pod *corev1.Pod) podSummary {
	s := podSummary{status: string(pod.Status.Phase), total: len(pod.Spec.Containers)}
	if pod.Status.Reason != "" {
		s.status = pod.Status.Reason
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonSchedulingGated {
			s.status = corev1.PodReasonSchedulingGated
		}
	}
	sidecars := map[string]bool{}
	for _, c := range pod.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			sidecars[c.Name] = true
			s.total++
		}
	}
	if !s.initContainers(pod, sidecars) || podInitialized(pod) {
		s.restarts, s.lastRestart = s.sidecarRestarts, s.lastSidecar
		s.containers(pod)
	}
	if pod.DeletionTimestamp != nil {
		switch {
		case pod.Status.Reason == "NodeLost":
			s.status = "Unknown"
		case pod.Status.Phase != corev1.PodFailed && pod.Status.Phase != corev1.PodSucceeded:
			s.status = "Terminating"
		}
	}
	return s
}

// initContainers reports whether the pod is still initializing.
func (s *podSummary) initContainers(pod *corev1.Pod, sidecars map[string]bool) bool {
	for i, c := range pod.Status.InitContainerStatuses {
		s.restarts += int(c.RestartCount)
		if t := c.LastTerminationState.Terminated; t != nil && s.lastRestart.Before(&t.FinishedAt) {
			s.lastRestart = t.FinishedAt
		}
		if sidecars[c.Name] {
			s.sidecarRestarts += int(c.RestartCount)
			if t := c.LastTerminationState.Terminated; t != nil && s.lastSidecar.Before(&t.FinishedAt) {
				s.lastSidecar = t.FinishedAt
			}
		}
		switch {
		case c.State.Terminated != nil && c.State.Terminated.ExitCode == 0:
			continue
		case sidecars[c.Name] && c.Started != nil && *c.Started:
			if c.Ready {
				s.ready++
			}
			continue
		case c.State.Terminated != nil:
			s.status = "Init:" + terminatedReason(c.State.Terminated)
		case c.State.Waiting != nil && c.State.Waiting.Reason != "" && c.State.Waiting.Reason != "PodInitializing":
			s.status = "Init:" + c.State.Waiting.Reason
		default:
			s.status = fmt.Sprintf("Init:%d/%d", i, len(pod.Spec.InitContainers))
		}
		return true
	}
	return false
}

// terminatedReason names why a container ended: its own word, or its signal or
// exit code.
func terminatedReason(t *corev1.ContainerStateTerminated) string {
	switch {
	case t.Reason != "":
		return t.Reason
	case t.Signal != 0:
		return fmt.Sprintf("Signal:%d", t.Signal)
	default:
		return fmt.Sprintf("ExitCode:%d", t.ExitCode)
	}
}

// containers goes from the last container to the first, so that the first one
// with a problem has the word.
func (s *podSummary) containers(pod *corev1.Pod) {
	running := false
	for i := len(pod.Status.ContainerStatuses) - 1; i >= 0; i-- {
		c := pod.Status.ContainerStatuses[i]
		s.restarts += int(c.RestartCount)
		if t := c.LastTerminationState.Terminated; t != nil && s.lastRestart.Before(&t.FinishedAt) {
			s.lastRestart = t.FinishedAt
		}
		switch {
		case c.State.Waiting != nil && c.State.Waiting.Reason != "":
			s.status = c.State.Waiting.Reason
		case c.State.Terminated != nil:
			s.status = terminatedReason(c.State.Terminated)
		case c.Ready && c.State.Running != nil:
			running = true
			s.ready++
		}
	}
	// A container that has completed does not make a pod completed in which
	// another one runs.
	if s.status == "Completed" && running {
		s.status = "NotReady"
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				s.status = "Running"
			}
		}
	}
}

func podInitialized(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodInitialized {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
