// SPDX-License-Identifier: Apache-2.0

package tainteviction

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestTolerates(t *testing.T) {
	start := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	added := metav1.NewTime(start)
	unreachable := corev1.Taint{Key: "node.kubernetes.io/unreachable", Effect: corev1.TaintEffectNoExecute, TimeAdded: &added}
	gone := corev1.Taint{Key: "gone", Value: "true", Effect: corev1.TaintEffectNoExecute, TimeAdded: &added}
	seconds := func(key string, s *int64) corev1.Toleration {
		return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: s}
	}
	for _, c := range []struct {
		name        string
		tolerations []corev1.Toleration
		taints      []corev1.Taint
		after       time.Duration
		created     time.Duration
		stays       bool
		left        time.Duration
	}{
		{name: "no taint", stays: true},
		{name: "not tolerated", taints: []corev1.Taint{gone}},
		{name: "tolerated for good", taints: []corev1.Taint{gone}, tolerations: []corev1.Toleration{seconds("gone", nil)}, stays: true},
		{name: "for a time", taints: []corev1.Taint{unreachable}, tolerations: []corev1.Toleration{seconds(unreachable.Key, ptr.To[int64](300))}, after: time.Minute, left: 4 * time.Minute},
		{name: "the time is over", taints: []corev1.Taint{unreachable}, tolerations: []corev1.Toleration{seconds(unreachable.Key, ptr.To[int64](300))}, after: 5 * time.Minute},
		{name: "of a pod that came later", taints: []corev1.Taint{unreachable}, tolerations: []corev1.Toleration{seconds(unreachable.Key, ptr.To[int64](300))}, created: time.Minute, after: time.Minute, left: 5 * time.Minute},
		{name: "the shortest of two", taints: []corev1.Taint{unreachable}, tolerations: []corev1.Toleration{seconds(unreachable.Key, ptr.To[int64](300)), seconds("", ptr.To[int64](30))}, left: 30 * time.Second},
		{name: "less than none", taints: []corev1.Taint{gone}, tolerations: []corev1.Toleration{seconds("gone", ptr.To[int64](-1))}},
		{name: "one taint of two", taints: []corev1.Taint{unreachable, gone}, tolerations: []corev1.Toleration{seconds(unreachable.Key, nil)}},
		{name: "two times", taints: []corev1.Taint{unreachable, gone}, tolerations: []corev1.Toleration{seconds(unreachable.Key, ptr.To[int64](300)), seconds("gone", ptr.To[int64](60))}, left: time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := &corev1.Pod{Spec: corev1.PodSpec{Tolerations: c.tolerations}}
			pod.CreationTimestamp = metav1.NewTime(start.Add(c.created - time.Second))
			if c.created != 0 {
				pod.CreationTimestamp = metav1.NewTime(start.Add(c.created))
			}
			stays, left := tolerates(pod, c.taints, start.Add(c.after))
			if stays != c.stays || left != c.left {
				t.Errorf("stays %t, left %s; want %t, %s", stays, left, c.stays, c.left)
			}
		})
	}
}
