// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"strconv"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/warning"
	"k8s.io/utils/ptr"
)

// The labels by which a Job finds its pods: each in its present form and in the
// one of old, which scripts still use.
const (
	jobUIDLabel     = batchv1.ControllerUidLabel
	jobNameLabel    = batchv1.JobNameLabel
	oldJobUIDLabel  = "controller-uid"
	oldJobNameLabel = "job-name"
)

func jobKind() Kind {
	return Kind{
		Resource: "jobs", Singular: "job", Kind: "Job",
		GroupVersion: batchv1.SchemeGroupVersion, Namespaced: true,
		Categories: []string{"all"},
		New:        newObject[batchv1.Job], NewList: newObject[batchv1.JobList],
		Default:          forObject(defaultJob),
		TracksGeneration: true,
		PrepareForCreate: onCreate(func(_ context.Context, j *batchv1.Job) {
			j.Spec.Scheduling = nil // alpha, off unless asked for
			selectOwnPods(j)
		}),
		Validate:        validates(validateJob),
		ValidateUpdate:  validatesUpdate(validateJobUpdate),
		Warnings:        warns(jobWarnings),
		OrphanByDefault: true,
		Wrap: func(store *Store, _ Deps) rest.Storage {
			return jobREST{kindREST{store, Kind{Categories: []string{"all"}}}}
		},
		Status: &StatusStrategy{Validate: validatesUpdate(validateJobStatus)},
		Columns: append([]metav1.TableColumnDefinition{
			nameColumn,
			column("Status", "string", "What becomes of the job."),
			column("Completions", "string", "How many pods succeeded of those that must."),
			column("Duration", "string", "Time from the start to the end, or until now."),
			ageColumn,
		}, templateColumns()...),
		Row: row(func(j *batchv1.Job) []any {
			cells := []any{j.Name, jobStatus(j), jobCompletions(j), jobDuration(j), age(j.CreationTimestamp)}
			return append(cells, templateCells(&j.Spec.Template, j.Spec.Selector)...)
		}),
		FieldLabels: []string{"status.successful"},
		Fields: fieldsOf(func(j *batchv1.Job) fields.Set {
			return fields.Set{"status.successful": strconv.Itoa(int(j.Status.Succeeded))}
		}),
	}
}

// jobREST warns of pods that a deletion leaves behind.
type jobREST struct{ kindREST }

func (r jobREST) warn(ctx context.Context, options *metav1.DeleteOptions) {
	//nolint:staticcheck // old clients still say it by this field
	if options != nil && options.PropagationPolicy == nil && options.OrphanDependents == nil {
		warning.AddWarning(ctx, "", "child pods are preserved by default when jobs are deleted; "+
			"set propagationPolicy=Background to remove them or set propagationPolicy=Orphan to suppress this warning")
	}
}

// Delete implements rest.GracefulDeleter.
func (r jobREST) Delete(ctx context.Context, name string, validate rest.ValidateObjectFunc, options *metav1.DeleteOptions) (runtime.Object, bool, error) {
	r.warn(ctx, options)
	return r.kindREST.Delete(ctx, name, validate, options)
}

// DeleteCollection implements rest.CollectionDeleter.
func (r jobREST) DeleteCollection(ctx context.Context, validate rest.ValidateObjectFunc, options *metav1.DeleteOptions, list *metainternalversion.ListOptions) (runtime.Object, error) {
	r.warn(ctx, options)
	return r.kindREST.DeleteCollection(ctx, validate, options, list)
}

func defaultJob(j *batchv1.Job) {
	if len(j.Labels) == 0 && len(j.Spec.Template.Labels) > 0 {
		j.Labels = map[string]string{}
		for k, v := range j.Spec.Template.Labels {
			j.Labels[k] = v
		}
	}
	setDefault(&j.Spec.ManualSelector, false)
	defaultJobSpec(&j.Spec)
}

func defaultJobSpec(s *batchv1.JobSpec) {
	const retries, unlimited = 6, 1<<31 - 1
	if s.Completions == nil && s.Parallelism == nil {
		s.Completions = ptr.To[int32](1)
	}
	setDefault(&s.Parallelism, 1)
	if s.BackoffLimitPerIndex != nil {
		setDefault(&s.BackoffLimit, unlimited)
	}
	setDefault(&s.BackoffLimit, retries)
	setDefault(&s.CompletionMode, batchv1.NonIndexedCompletion)
	setDefault(&s.Suspend, false)
	if s.PodFailurePolicy == nil {
		setDefault(&s.PodReplacementPolicy, batchv1.TerminatingOrFailed)
	} else {
		setDefault(&s.PodReplacementPolicy, batchv1.Failed)
		for i := range s.PodFailurePolicy.Rules {
			for k := range s.PodFailurePolicy.Rules[i].OnPodConditions {
				setIfZero(&s.PodFailurePolicy.Rules[i].OnPodConditions[k].Status, corev1.ConditionTrue)
			}
		}
	}
	defaultPodSpec(&s.Template.Spec)
}

// selectOwnPods gives a Job the selector and its pods the labels by which they
// are its own and nobody else's, unless the user takes care of that.
func selectOwnPods(j *batchv1.Job) {
	if ptr.Deref(j.Spec.ManualSelector, false) {
		return
	}
	if j.Spec.Template.Labels == nil {
		j.Spec.Template.Labels = map[string]string{}
	}
	for label, value := range jobLabels(j) {
		// What a user wrote there is not overwritten: validation refuses it.
		if _, said := j.Spec.Template.Labels[label]; !said {
			j.Spec.Template.Labels[label] = value
		}
	}
	if j.Spec.Selector == nil {
		j.Spec.Selector = &metav1.LabelSelector{}
	}
	if j.Spec.Selector.MatchLabels == nil {
		j.Spec.Selector.MatchLabels = map[string]string{}
	}
	if _, said := j.Spec.Selector.MatchLabels[jobUIDLabel]; !said {
		j.Spec.Selector.MatchLabels[jobUIDLabel] = string(j.UID)
	}
}

func jobLabels(j *batchv1.Job) map[string]string {
	return map[string]string{
		jobUIDLabel: string(j.UID), oldJobUIDLabel: string(j.UID),
		jobNameLabel: j.Name, oldJobNameLabel: j.Name,
	}
}

func jobCondition(j *batchv1.Job, t batchv1.JobConditionType) bool {
	for _, c := range j.Status.Conditions {
		if c.Type == t && c.Status == corev1.ConditionTrue {
			return true
		}
	}
	return false
}

func jobStatus(j *batchv1.Job) string {
	switch {
	case jobCondition(j, batchv1.JobComplete):
		return "Complete"
	case jobCondition(j, batchv1.JobFailed):
		return "Failed"
	case j.DeletionTimestamp != nil:
		return "Terminating"
	case jobCondition(j, batchv1.JobSuspended):
		return "Suspended"
	case jobCondition(j, batchv1.JobFailureTarget):
		return "FailureTarget"
	case jobCondition(j, batchv1.JobSuccessCriteriaMet):
		return "SuccessCriteriaMet"
	}
	return "Running"
}

func jobCompletions(j *batchv1.Job) string {
	if j.Spec.Completions != nil {
		return fmt.Sprintf("%d/%d", j.Status.Succeeded, *j.Spec.Completions)
	}
	if parallel := ptr.Deref(j.Spec.Parallelism, 0); parallel > 1 {
		return fmt.Sprintf("%d/1 of %d", j.Status.Succeeded, parallel)
	}
	return fmt.Sprintf("%d/1", j.Status.Succeeded)
}

func jobDuration(j *batchv1.Job) string {
	switch {
	case j.Status.StartTime == nil:
		return ""
	case j.Status.CompletionTime == nil:
		return duration.HumanDuration(time.Since(j.Status.StartTime.Time))
	}
	return duration.HumanDuration(j.Status.CompletionTime.Sub(j.Status.StartTime.Time))
}
