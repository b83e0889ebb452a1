// SPDX-License-Identifier: Apache-2.0

package job

import (
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/podstate"
)

// After a failure the next pod waits: backoffFirst after one, twice as long after each
// further one in a row, at most backoffMost.
const (
	backoffFirst = 10 * time.Second
	backoffMost  = 10 * time.Minute
)

// failures are the failed pods of a Job since its last successful one.
type failures struct {
	count int
	last  time.Time // when the latest of them ended
}

// then returns the failures after more pods have ended.
func (f failures) then(succeeded, failed []*corev1.Pod) failures {
	var success time.Time
	for _, pod := range succeeded {
		f = failures{}
		if t := endOf(pod); t.After(success) {
			success = t
		}
	}
	for _, pod := range failed {
		t := endOf(pod)
		if len(succeeded) > 0 && !t.After(success) {
			continue // before the success
		}
		f.count++
		if t.After(f.last) {
			f.last = t
		}
	}
	return f
}

// wait is how long the next pod has to wait, from now on.
func (f failures) wait(now time.Time) time.Duration {
	if f.count == 0 {
		return 0
	}
	pause := backoffFirst
	for i := 1; i < f.count && pause < backoffMost; i++ {
		pause *= 2
	}
	return max(0, min(pause, backoffMost)-now.Sub(f.last))
}

// endOf is when a pod ended: by its containers, else by its Ready condition, else by
// its deletion, as far as one of them tells.
func endOf(pod *corev1.Pod) time.Time {
	if t := lastExit(pod); !t.IsZero() {
		return t
	}
	if c := podstate.Condition(pod, corev1.PodReady); c != nil && c.Status == corev1.ConditionFalse && !c.LastTransitionTime.IsZero() {
		return c.LastTransitionTime.Time
	}
	if pod.DeletionTimestamp != nil {
		grace := ptr.Deref(pod.DeletionGracePeriodSeconds, 0)
		return pod.DeletionTimestamp.Add(-time.Duration(grace) * time.Second)
	}
	return pod.CreationTimestamp.Time
}

// lastExit is when the last container ended, sidecars included; zero when one has not.
func lastExit(pod *corev1.Pod) time.Time {
	var last time.Time
	lists := slices.Clone(pod.Status.ContainerStatuses)
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if ptr.Deref(c.RestartPolicy, "") != corev1.ContainerRestartPolicyAlways {
			continue
		}
		for _, s := range pod.Status.InitContainerStatuses {
			if s.Name == c.Name {
				lists = append(lists, s)
			}
		}
	}
	for _, s := range lists {
		if s.State.Terminated == nil || s.State.Terminated.FinishedAt.IsZero() {
			return time.Time{}
		}
		if t := s.State.Terminated.FinishedAt.Time; t.After(last) {
			last = t
		}
	}
	return last
}

// memory remembers the failures of each Job for as long as this process lives. A
// restart forgives them, as upstream's does; the counters are in the Job's status.
type memory struct {
	mu sync.Mutex
	by map[types.UID]failures
}

func newMemory() *memory { return &memory{by: map[types.UID]failures{}} }

func (m *memory) of(job types.UID) failures {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.by[job]
}

func (m *memory) set(job types.UID, f failures) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.by[job] = f
}

func (m *memory) forget(job types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.by, job)
}
