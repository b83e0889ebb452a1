// SPDX-License-Identifier: Apache-2.0

package job

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
)

const (
	// noIndex is the completion index of a pod that has none.
	noIndex = -1
	// indexVariable tells a container its completion index.
	indexVariable = "JOB_COMPLETION_INDEX"
	// longestPrefix is what the API leaves of generateName.
	longestPrefix = 58
)

// tracked reports whether the pod carries the finalizer that keeps it until it was
// counted.
func tracked(pod *corev1.Pod) bool {
	return slices.Contains(pod.Finalizers, batchv1.JobTrackingFinalizer)
}

// indexOf is the pod's completion index, noIndex when it has none.
func indexOf(pod *corev1.Pod) int {
	n, err := strconv.Atoi(pod.Annotations[batchv1.JobCompletionIndexAnnotation])
	if err != nil || n < 0 {
		return noIndex
	}
	return n
}

// failuresOf is how many pods of the index failed before this one: those that count,
// and those that the policy ignores.
func failuresOf(pod *corev1.Pod) (counted, ignored int) {
	return number(pod, batchv1.JobIndexFailureCountAnnotation), number(pod, batchv1.JobIndexIgnoredFailureCountAnnotation)
}

// number reads an annotation that somebody may have changed; what makes no sense is 0.
func number(pod *corev1.Pod, annotation string) int {
	n, err := strconv.Atoi(pod.Annotations[annotation])
	if err != nil || n < 0 || n > math.MaxInt32 {
		return 0
	}
	return n
}

// dress turns a pod from the Job's template into one of the Job: with the finalizer
// and, in an Indexed Job, all by which it knows its index. before is the failed pod
// whose place it takes, nil for none.
func dress(pod *corev1.Pod, job *batchv1.Job, index int, before *corev1.Pod) *corev1.Pod {
	if !tracked(pod) {
		pod.Finalizers = append(pod.Finalizers, batchv1.JobTrackingFinalizer)
	}
	if index == noIndex {
		return pod
	}
	text := strconv.Itoa(index)
	pod.Annotations = with(pod.Annotations, batchv1.JobCompletionIndexAnnotation, text)
	pod.Labels = with(pod.Labels, batchv1.JobCompletionIndexAnnotation, text)
	pod.Spec.Hostname = job.Name + "-" + text
	suffix := "-" + text + "-"
	pod.GenerateName = job.Name[:min(len(job.Name), longestPrefix-len(suffix))] + suffix
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			tellIndex(&list[i])
		}
	}
	if perIndex(job) {
		counted, ignored := 0, 0
		if before != nil {
			counted, ignored = failuresOf(before)
			if judge(job.Spec.PodFailurePolicy, before).counts() {
				counted++
			} else {
				ignored++
			}
		}
		pod.Annotations[batchv1.JobIndexFailureCountAnnotation] = strconv.Itoa(counted)
		if ignored > 0 {
			pod.Annotations[batchv1.JobIndexIgnoredFailureCountAnnotation] = strconv.Itoa(ignored)
		}
	}
	return pod
}

func with(m map[string]string, key, value string) map[string]string {
	if m == nil {
		m = map[string]string{}
	}
	m[key] = value
	return m
}

// tellIndex adds the variable unless the user has one of that name.
func tellIndex(c *corev1.Container) {
	if slices.ContainsFunc(c.Env, func(v corev1.EnvVar) bool { return v.Name == indexVariable }) {
		return
	}
	c.Env = append(c.Env, corev1.EnvVar{Name: indexVariable, ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{FieldPath: fmt.Sprintf("metadata.labels['%s']", batchv1.JobCompletionIndexAnnotation)},
	}})
}
