// SPDX-License-Identifier: Apache-2.0

package job

import (
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
)

// ruling is what a podFailurePolicy says about a failed pod.
type ruling struct {
	// action is that of the first rule that matches; Count when none does, as without
	// a policy.
	action batchv1.PodFailurePolicyAction
	// why says what matched.
	why string
}

// counts reports whether the failure counts against the limits.
func (r ruling) counts() bool { return r.action != batchv1.PodFailurePolicyActionIgnore }

// judge asks the policy about a failed pod. The first rule that matches holds.
func judge(policy *batchv1.PodFailurePolicy, pod *corev1.Pod) ruling {
	if policy != nil {
		for i := range policy.Rules {
			rule := &policy.Rules[i]
			var what string
			switch {
			case rule.OnExitCodes != nil:
				if s := exitMatching(&pod.Status, rule.OnExitCodes); s != nil {
					what = fmt.Sprintf("Container %s for pod %s/%s failed with exit code %d", s.Name, pod.Namespace, pod.Name, s.State.Terminated.ExitCode)
				}
			default:
				if c := conditionMatching(&pod.Status, rule.OnPodConditions); c != nil {
					what = fmt.Sprintf("Pod %s/%s has condition %s", pod.Namespace, pod.Name, c.Type)
				}
			}
			if what != "" {
				return ruling{rule.Action, fmt.Sprintf("%s matching %s rule at index %d", what, rule.Action, i)}
			}
		}
	}
	return ruling{action: batchv1.PodFailurePolicyActionCount}
}

// exitMatching finds a container that ended with a code that the requirement means.
// Zero never counts as a failure.
func exitMatching(status *corev1.PodStatus, want *batchv1.PodFailurePolicyOnExitCodesRequirement) *corev1.ContainerStatus {
	for _, list := range [][]corev1.ContainerStatus{status.ContainerStatuses, status.InitContainerStatuses} {
		for i := range list {
			s := &list[i]
			if s.State.Terminated == nil || s.State.Terminated.ExitCode == 0 || (want.ContainerName != nil && *want.ContainerName != s.Name) {
				continue
			}
			listed := slices.Contains(want.Values, s.State.Terminated.ExitCode)
			if listed == (want.Operator == batchv1.PodFailurePolicyOnExitCodesOpIn) {
				return s
			}
		}
	}
	return nil
}

func conditionMatching(status *corev1.PodStatus, patterns []batchv1.PodFailurePolicyOnPodConditionsPattern) *corev1.PodCondition {
	for i := range status.Conditions {
		c := &status.Conditions[i]
		for _, p := range patterns {
			if p.Type == c.Type && p.Status == c.Status {
				return c
			}
		}
	}
	return nil
}

// succeedsEarly reports whether a rule of the successPolicy is met by the indexes that
// are done, and which.
func succeedsEarly(policy *batchv1.SuccessPolicy, done indexes, completions int) (string, bool) {
	if policy == nil || len(done) == 0 {
		return "", false
	}
	for i, rule := range policy.Rules {
		met := false
		switch {
		case rule.SucceededIndexes != nil:
			named := parseIndexes(*rule.SucceededIndexes, completions)
			n := common(named, done)
			met = len(named) > 0 && (n == named.count() || rule.SucceededCount != nil && n >= int(*rule.SucceededCount))
		case rule.SucceededCount != nil:
			met = done.count() >= int(*rule.SucceededCount)
		}
		if met {
			return fmt.Sprintf("Matched rules at index %d", i), true
		}
	}
	return "", false
}
