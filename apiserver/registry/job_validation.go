// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// maxIndexedParallelism bounds the pods of an Indexed Job that run at once.
const maxIndexedParallelism = 100000

func validateJob(j *batchv1.Job) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateGeneratedSelector(j, spec)
	errs = append(errs, validateJobSpec(&j.Spec, spec)...)
	if j.Spec.Selector == nil {
		errs = append(errs, field.Required(spec.Child("selector"), ""))
	} else {
		errs = append(errs, validateSelector(j.Spec.Selector, spec.Child("selector"))...)
	}
	if s, err := metav1.LabelSelectorAsSelector(j.Spec.Selector); err == nil && !s.Matches(labels.Set(j.Spec.Template.Labels)) {
		errs = append(errs, field.Invalid(spec.Child("template", "metadata", "labels"), j.Spec.Template.Labels, "`selector` does not match template `labels`"))
	}
	if ptr.Deref(j.Spec.CompletionMode, "") == batchv1.IndexedCompletion && ptr.Deref(j.Spec.Completions, 0) > 0 {
		// The name of the last pod, without its random end, is a host name.
		last := fmt.Sprintf("%s-%d", j.Name, *j.Spec.Completions-1)
		if msgs := validation.IsDNS1123Label(last); len(msgs) > 0 {
			errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), j.Name,
				fmt.Sprintf("will not able to create pod with invalid DNS label: %s", last)))
		}
	}
	return errs
}

// validateGeneratedSelector makes sure that a Job whose selector is made for it
// selects its own pods.
func validateGeneratedSelector(j *batchv1.Job, spec *field.Path) field.ErrorList {
	if ptr.Deref(j.Spec.ManualSelector, false) || j.Spec.Selector == nil {
		return nil
	}
	var errs field.ErrorList
	path := spec.Child("template", "metadata").Child("labels")
	for _, label := range []string{oldJobUIDLabel, jobUIDLabel, oldJobNameLabel, jobNameLabel} {
		want := jobLabels(j)[label]
		switch have, ok := j.Spec.Template.Labels[label]; {
		case !ok:
			errs = append(errs, field.Required(path.Key(label), fmt.Sprintf("must be '%s'", want)))
		case have != want:
			errs = append(errs, field.Invalid(path.Key(label), j.Spec.Template.Labels, fmt.Sprintf("must be '%s'", want)))
		}
	}
	if s, err := metav1.LabelSelectorAsSelector(j.Spec.Selector); err == nil && !s.Matches(labels.Set(jobLabels(j))) {
		errs = append(errs, field.Invalid(spec.Child("selector"), j.Spec.Selector, "`selector` not auto-generated"))
	}
	return errs
}

// validateJobSpec checks what a Job and the template of a CronJob have in common.
func validateJobSpec(s *batchv1.JobSpec, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for name, n := range map[string]*int32{
		"parallelism": s.Parallelism, "completions": s.Completions, "backoffLimit": s.BackoffLimit,
		"ttlSecondsAfterFinished": s.TTLSecondsAfterFinished, "backoffLimitPerIndex": s.BackoffLimitPerIndex,
		"maxFailedIndexes": s.MaxFailedIndexes,
	} {
		if n != nil {
			errs = append(errs, notNegative(path.Child(name), *n)...)
		}
	}
	if s.ActiveDeadlineSeconds != nil {
		errs = append(errs, apivalidation.ValidateNonnegativeField(*s.ActiveDeadlineSeconds, path.Child("activeDeadlineSeconds"))...)
	}
	if s.ManagedBy != nil {
		errs = append(errs, invalidIf(path.Child("managedBy"), *s.ManagedBy, validation.IsQualifiedName(*s.ManagedBy))...)
	}
	errs = append(errs, validateCompletionMode(s, path)...)
	if p := s.PodReplacementPolicy; p != nil {
		allowed := []batchv1.PodReplacementPolicy{batchv1.Failed}
		if s.PodFailurePolicy == nil {
			allowed = append(allowed, batchv1.TerminatingOrFailed)
		}
		errs = append(errs, oneOf(*p, path.Child("podReplacementPolicy"), allowed...)...)
	}
	errs = append(errs, validatePodTemplate(&s.Template, path.Child("template"))...)
	restart := path.Child("template", "spec", "restartPolicy")
	switch s.Template.Spec.RestartPolicy {
	case corev1.RestartPolicyNever:
	case corev1.RestartPolicyOnFailure:
		if s.PodFailurePolicy != nil {
			errs = append(errs, field.Invalid(restart, s.Template.Spec.RestartPolicy, fmt.Sprintf("only %q is supported when podFailurePolicy is specified", corev1.RestartPolicyNever)))
		}
	case corev1.RestartPolicyAlways:
		// The default: the user has said nothing.
		errs = append(errs, field.Required(restart, fmt.Sprintf("valid values: %q, %q", corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever)))
	}
	return append(errs, validatePodFailurePolicy(s, path.Child("podFailurePolicy"))...)
}

func validateCompletionMode(s *batchv1.JobSpec, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	mode := ptr.Deref(s.CompletionMode, batchv1.NonIndexedCompletion)
	errs = append(errs, oneOf(mode, path.Child("completionMode"), batchv1.NonIndexedCompletion, batchv1.IndexedCompletion)...)
	if mode == batchv1.IndexedCompletion {
		if s.Completions == nil {
			errs = append(errs, field.Required(path.Child("completions"), fmt.Sprintf("when completion mode is %s", batchv1.IndexedCompletion)))
		}
		if n := ptr.Deref(s.Parallelism, 0); n > maxIndexedParallelism {
			errs = append(errs, field.Invalid(path.Child("parallelism"), n, fmt.Sprintf("must be less than or equal to %d when completion mode is %s", maxIndexedParallelism, batchv1.IndexedCompletion)))
		}
	} else {
		if s.BackoffLimitPerIndex != nil {
			errs = append(errs, field.Invalid(path.Child("backoffLimitPerIndex"), *s.BackoffLimitPerIndex, "requires indexed completion mode"))
		}
		if s.SuccessPolicy != nil {
			errs = append(errs, field.Invalid(path.Child("successPolicy"), s.SuccessPolicy, "requires indexed completion mode"))
		}
	}
	if s.MaxFailedIndexes != nil {
		if s.BackoffLimitPerIndex == nil {
			errs = append(errs, field.Required(path.Child("backoffLimitPerIndex"), "when maxFailedIndexes is specified"))
		}
		if s.Completions != nil && *s.MaxFailedIndexes > *s.Completions {
			errs = append(errs, field.Invalid(path.Child("maxFailedIndexes"), *s.MaxFailedIndexes, "must be less than or equal to completions"))
		}
	}
	return errs
}

func validatePodFailurePolicy(s *batchv1.JobSpec, path *field.Path) field.ErrorList {
	if s.PodFailurePolicy == nil {
		return nil
	}
	var errs field.ErrorList
	for i, rule := range s.PodFailurePolicy.Rules {
		p := path.Child("rules").Index(i)
		errs = append(errs, oneOf(rule.Action, p.Child("action"), batchv1.PodFailurePolicyActionCount, batchv1.PodFailurePolicyActionFailIndex,
			batchv1.PodFailurePolicyActionFailJob, batchv1.PodFailurePolicyActionIgnore)...)
		if rule.Action == batchv1.PodFailurePolicyActionFailIndex && s.BackoffLimitPerIndex == nil {
			errs = append(errs, field.Invalid(p.Child("action"), rule.Action, "requires the backoffLimitPerIndex to be set"))
		}
		switch {
		case rule.OnExitCodes == nil && len(rule.OnPodConditions) == 0:
			errs = append(errs, field.Invalid(p, rule, "specifying one of OnExitCodes and OnPodConditions is required"))
		case rule.OnExitCodes != nil && len(rule.OnPodConditions) > 0:
			errs = append(errs, field.Invalid(p, field.OmitValueType{}, "specifying both OnExitCodes and OnPodConditions is not supported"))
		}
		if codes := rule.OnExitCodes; codes != nil {
			errs = append(errs, validateExitCodes(codes, &s.Template.Spec, p.Child("onExitCodes"))...)
		}
		for k, c := range rule.OnPodConditions {
			cp := p.Child("onPodConditions").Index(k)
			errs = append(errs, invalidIf(cp.Child("type"), c.Type, validation.IsQualifiedName(string(c.Type)))...)
			errs = append(errs, oneOf(c.Status, cp.Child("status"), corev1.ConditionFalse, corev1.ConditionTrue, corev1.ConditionUnknown)...)
		}
	}
	return errs
}

func validateExitCodes(codes *batchv1.PodFailurePolicyOnExitCodesRequirement, pod *corev1.PodSpec, path *field.Path) field.ErrorList {
	errs := oneOf(codes.Operator, path.Child("operator"), batchv1.PodFailurePolicyOnExitCodesOpIn, batchv1.PodFailurePolicyOnExitCodesOpNotIn)
	if name := codes.ContainerName; name != nil {
		known := false
		for _, list := range [][]corev1.Container{pod.InitContainers, pod.Containers} {
			for _, c := range list {
				known = known || c.Name == *name
			}
		}
		if !known {
			errs = append(errs, field.Invalid(path.Child("containerName"), *name, "must be one of the container or initContainer names in the pod template"))
		}
	}
	values := path.Child("values")
	if len(codes.Values) == 0 {
		errs = append(errs, field.Invalid(values, codes.Values, "at least one value is required"))
	}
	for i, v := range codes.Values {
		if v == 0 && codes.Operator == batchv1.PodFailurePolicyOnExitCodesOpIn {
			errs = append(errs, field.Invalid(values.Index(i), v, "must not be 0 for the In operator"))
		}
		if i > 0 && codes.Values[i-1] == v {
			errs = append(errs, field.Duplicate(values.Index(i), v))
		}
		if i > 0 && codes.Values[i-1] > v {
			errs = append(errs, field.Invalid(values, codes.Values, "must be ordered"))
			break
		}
	}
	return errs
}

func validateJobUpdate(j, old *batchv1.Job) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateCompletionsUpdate(j, old, spec.Child("completions"))
	errs = append(errs, apivalidation.ValidateImmutableField(j.Spec.Selector, old.Spec.Selector, spec.Child("selector"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(*unstartedTemplate(j, old), old.Spec.Template, spec.Child("template"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(j.Spec.CompletionMode, old.Spec.CompletionMode, spec.Child("completionMode"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(j.Spec.PodFailurePolicy, old.Spec.PodFailurePolicy, spec.Child("podFailurePolicy"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(j.Spec.BackoffLimitPerIndex, old.Spec.BackoffLimitPerIndex, spec.Child("backoffLimitPerIndex"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(j.Spec.ManagedBy, old.Spec.ManagedBy, spec.Child("managedBy"))...)
	return append(errs, apivalidation.ValidateImmutableField(j.Spec.SuccessPolicy, old.Spec.SuccessPolicy, spec.Child("successPolicy"))...)
}

// validateCompletionsUpdate lets an Indexed Job change its completions together
// with its parallelism.
func validateCompletionsUpdate(j, old *batchv1.Job, path *field.Path) field.ErrorList {
	now, was := j.Spec.Completions, old.Spec.Completions
	if ptr.Deref(j.Spec.CompletionMode, "") != batchv1.IndexedCompletion || now == nil || was == nil || *now == *was {
		return apivalidation.ValidateImmutableField(now, was, path)
	}
	if *now != ptr.Deref(j.Spec.Parallelism, 0) {
		return field.ErrorList{field.Invalid(path, now, "can only be modified in tandem with parallelism such that completions == parallelism")}
	}
	return nil
}

// unstartedTemplate is the new template, but for what may change while no pod
// has been made from it: where pods go, and how they are labelled.
func unstartedTemplate(j, old *batchv1.Job) *corev1.PodTemplateSpec {
	t := j.Spec.Template.DeepCopy()
	if !ptr.Deref(old.Spec.Suspend, false) || old.Status.StartTime != nil {
		return t
	}
	was := old.Spec.Template.DeepCopy()
	t.Annotations, t.Labels = was.Annotations, was.Labels
	t.Spec.Affinity, t.Spec.NodeSelector = was.Spec.Affinity, was.Spec.NodeSelector
	t.Spec.Tolerations, t.Spec.SchedulingGates = was.Spec.Tolerations, was.Spec.SchedulingGates
	return t
}

func validateJobStatus(j, old *batchv1.Job) field.ErrorList {
	s, path := &j.Status, field.NewPath("status")
	var errs field.ErrorList
	for name, n := range map[string]int32{
		"active": s.Active, "succeeded": s.Succeeded, "failed": s.Failed,
		"ready": ptr.Deref(s.Ready, 0), "terminating": ptr.Deref(s.Terminating, 0),
	} {
		errs = append(errs, notNegative(path.Child(name), n)...)
	}
	complete, failed := jobCondition(j, batchv1.JobComplete), jobCondition(j, batchv1.JobFailed)
	if complete && failed {
		errs = append(errs, field.Invalid(path.Child("conditions"), field.OmitValueType{}, "cannot set Complete=True and Failed=True conditions"))
	}
	if s.CompletionTime != nil && !complete {
		errs = append(errs, field.Invalid(path.Child("completionTime"), s.CompletionTime, "cannot set completionTime when there is no Complete=True condition"))
	}
	if (complete || failed) && s.Active > 0 {
		errs = append(errs, field.Invalid(path.Child("active"), s.Active, "active>0 is invalid for finished job"))
	}
	for _, t := range []batchv1.JobConditionType{batchv1.JobComplete, batchv1.JobFailed} {
		if jobCondition(old, t) && !jobCondition(j, t) {
			errs = append(errs, field.Invalid(path.Child("conditions"), field.OmitValueType{}, fmt.Sprintf("cannot disable the terminal %s=True condition", t)))
		}
	}
	if equality.Semantic.DeepEqual(s.StartTime, old.Status.StartTime) || old.Status.StartTime == nil || ptr.Deref(j.Spec.Suspend, false) || ptr.Deref(old.Spec.Suspend, false) || jobCondition(old, batchv1.JobSuspended) {
		return errs
	}
	return append(errs, field.Required(path.Child("startTime"), "startTime cannot be removed for unsuspended job"))
}
