// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// Limits that keep the lists of indexes in a status, and the rules, short.
const (
	maxIndexedParallelism = 100_000
	maxFailedIndexes      = 100_000
	// Above manyCompletions a Job with a limit for each index has these instead.
	manyCompletions     = 100_000
	manyParallelism     = 10_000
	manyFailedIndexes   = 10_000
	maxPolicyRules      = 20
	maxConditions       = 20
	maxExitCodes        = 255
	maxManagedBy        = 63
	maxSucceededIndexes = 64 * 1024
)

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
		by := path.Child("managedBy")
		errs = append(errs, validation.IsDomainPrefixedPath(by, *s.ManagedBy)...)
		if len(*s.ManagedBy) > maxManagedBy {
			errs = append(errs, field.TooLong(by, *s.ManagedBy, maxManagedBy))
		}
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
		return append(errs, validateIndexed(s, path)...)
	}
	needsIndexes := func(name string, value any) {
		errs = append(errs, field.Invalid(path.Child(name), value, "requires indexed completion mode"))
	}
	if s.BackoffLimitPerIndex != nil {
		needsIndexes("backoffLimitPerIndex", *s.BackoffLimitPerIndex)
	}
	if s.MaxFailedIndexes != nil {
		needsIndexes("maxFailedIndexes", *s.MaxFailedIndexes)
	}
	if s.SuccessPolicy != nil {
		needsIndexes("successPolicy", *s.SuccessPolicy)
	}
	return append(errs, validateLimitPerIndex(s, path)...)
}

// validateLimitPerIndex refuses a limit of failed indexes when indexes cannot fail.
func validateLimitPerIndex(s *batchv1.JobSpec, path *field.Path) field.ErrorList {
	if s.MaxFailedIndexes != nil && s.BackoffLimitPerIndex == nil {
		return field.ErrorList{field.Required(path.Child("backoffLimitPerIndex"), "when maxFailedIndexes is specified")}
	}
	return nil
}

func validateIndexed(s *batchv1.JobSpec, path *field.Path) field.ErrorList {
	errs := validateLimitPerIndex(s, path)
	if s.Completions == nil {
		errs = append(errs, field.Required(path.Child("completions"), fmt.Sprintf("when completion mode is %s", batchv1.IndexedCompletion)))
	}
	parallelism, failed := ptr.Deref(s.Parallelism, 0), ptr.Deref(s.MaxFailedIndexes, 0)
	if parallelism > maxIndexedParallelism {
		errs = append(errs, field.Invalid(path.Child("parallelism"), parallelism, fmt.Sprintf("must be less than or equal to %d when completion mode is %s", maxIndexedParallelism, batchv1.IndexedCompletion)))
	}
	if s.Completions != nil && failed > *s.Completions {
		errs = append(errs, field.Invalid(path.Child("maxFailedIndexes"), failed, "must be less than or equal to completions"))
	}
	if failed > maxFailedIndexes {
		errs = append(errs, field.Invalid(path.Child("maxFailedIndexes"), failed, fmt.Sprintf("must be less than or equal to %d", maxFailedIndexes)))
	}
	if ptr.Deref(s.Completions, 0) > manyCompletions && s.BackoffLimitPerIndex != nil {
		if s.MaxFailedIndexes == nil {
			errs = append(errs, field.Required(path.Child("maxFailedIndexes"), fmt.Sprintf("must be specified when completions is above %d", manyCompletions)))
		}
		limit := func(name string, value, most int32) {
			if value > most {
				errs = append(errs, field.Invalid(path.Child(name), value, fmt.Sprintf("must be less than or equal to %d when completions are above %d and used with backoff limit per index", most, manyCompletions)))
			}
		}
		limit("parallelism", parallelism, manyParallelism)
		limit("maxFailedIndexes", failed, manyFailedIndexes)
	}
	if s.SuccessPolicy != nil && s.Completions != nil {
		errs = append(errs, validateSuccessPolicy(s.SuccessPolicy, *s.Completions, path.Child("successPolicy", "rules"))...)
	}
	return errs
}

func validateSuccessPolicy(p *batchv1.SuccessPolicy, completions int32, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(p.Rules) == 0 {
		errs = append(errs, field.Required(path, "at least one rules must be specified when the successPolicy is specified"))
	}
	if len(p.Rules) > maxPolicyRules {
		errs = append(errs, field.TooMany(path, len(p.Rules), maxPolicyRules))
	}
	for i, rule := range p.Rules {
		p := path.Index(i)
		if rule.SucceededCount == nil && rule.SucceededIndexes == nil {
			errs = append(errs, field.Required(p, "at least one of succeededCount or succeededIndexes must be specified"))
		}
		var total int32
		if text := rule.SucceededIndexes; text != nil {
			indexes := p.Child("succeededIndexes")
			if len(*text) > maxSucceededIndexes {
				errs = append(errs, field.TooLong(indexes, *text, maxSucceededIndexes))
			}
			spans, err := readIndexes(*text, completions)
			if err != nil {
				errs = append(errs, field.Invalid(indexes, *text, fmt.Sprintf("error parsing succeededIndexes: %s", err)))
			}
			for _, s := range spans {
				total += s.last - s.first + 1
			}
		}
		if rule.SucceededCount == nil {
			continue
		}
		n, count := *rule.SucceededCount, p.Child("succeededCount")
		errs = append(errs, notNegative(count, n)...)
		if n > completions {
			errs = append(errs, field.Invalid(count, n, fmt.Sprintf("must be less than or equal to %d (the number of specified completions)", completions)))
		}
		if rule.SucceededIndexes != nil && n > total {
			errs = append(errs, field.Invalid(count, n, fmt.Sprintf("must be less than or equal to %d (the number of indexes in the specified succeededIndexes field)", total)))
		}
	}
	return errs
}

// indexSpan is the completion indexes from first to last.
type indexSpan struct{ first, last int32 }

// readIndexes reads completion indexes such as 0,2-5: in order, each below completions.
func readIndexes(text string, completions int32) ([]indexSpan, error) {
	if text == "" {
		return nil, nil
	}
	var spans []indexSpan
	for part := range strings.SplitSeq(text, ",") {
		ends := strings.Split(part, "-")
		if len(ends) > 2 {
			return nil, fmt.Errorf("the fragment %q violates the requirement that an index interval can have at most two parts separated by '-'", part)
		}
		var numbers []int32
		for _, end := range ends {
			n, err := strconv.ParseInt(end, 10, 32)
			if err != nil {
				return nil, fmt.Errorf("cannot convert string to integer for index: %q", end)
			}
			if n >= int64(completions) {
				return nil, fmt.Errorf("too large index: %q", end)
			}
			numbers = append(numbers, int32(n))
		}
		s := indexSpan{numbers[0], numbers[len(numbers)-1]}
		if len(numbers) == 2 && s.first >= s.last {
			return nil, fmt.Errorf("non-increasing order, previous: %d, current: %d", s.first, s.last)
		}
		if len(spans) > 0 && spans[len(spans)-1].last >= s.first {
			return nil, fmt.Errorf("non-increasing order, previous: %d, current: %d", spans[len(spans)-1].last, s.first)
		}
		spans = append(spans, s)
	}
	return spans, nil
}

func validatePodFailurePolicy(s *batchv1.JobSpec, path *field.Path) field.ErrorList {
	if s.PodFailurePolicy == nil {
		return nil
	}
	var errs field.ErrorList
	if n := len(s.PodFailurePolicy.Rules); n > maxPolicyRules {
		errs = append(errs, field.TooMany(path.Child("rules"), n, maxPolicyRules))
	}
	for i, rule := range s.PodFailurePolicy.Rules {
		p := path.Child("rules").Index(i)
		errs = append(errs, given(rule.Action, p.Child("action"), batchv1.PodFailurePolicyActionCount, batchv1.PodFailurePolicyActionFailIndex,
			batchv1.PodFailurePolicyActionFailJob, batchv1.PodFailurePolicyActionIgnore)...)
		if rule.Action == batchv1.PodFailurePolicyActionFailIndex && s.BackoffLimitPerIndex == nil {
			errs = append(errs, field.Invalid(p.Child("action"), rule.Action, "requires the backoffLimitPerIndex to be set"))
		}
		switch {
		case rule.OnExitCodes == nil && len(rule.OnPodConditions) == 0:
			errs = append(errs, field.Invalid(p, field.OmitValueType{}, "specifying one of OnExitCodes and OnPodConditions is required"))
		case rule.OnExitCodes != nil && len(rule.OnPodConditions) > 0:
			errs = append(errs, field.Invalid(p, field.OmitValueType{}, "specifying both OnExitCodes and OnPodConditions is not supported"))
		}
		if codes := rule.OnExitCodes; codes != nil {
			errs = append(errs, validateExitCodes(codes, &s.Template.Spec, p.Child("onExitCodes"))...)
		}
		if n := len(rule.OnPodConditions); n > maxConditions {
			errs = append(errs, field.TooMany(p.Child("onPodConditions"), n, maxConditions))
		}
		for k, c := range rule.OnPodConditions {
			cp := p.Child("onPodConditions").Index(k)
			errs = append(errs, invalidIf(cp.Child("type"), c.Type, validation.IsQualifiedName(string(c.Type)))...)
			errs = append(errs, given(c.Status, cp.Child("status"), corev1.ConditionFalse, corev1.ConditionTrue, corev1.ConditionUnknown)...)
		}
	}
	return errs
}

// given is oneOf for a field that has no default.
func given[T ~string](value T, path *field.Path, allowed ...T) field.ErrorList {
	if value == "" {
		return field.ErrorList{field.Required(path, fmt.Sprintf("valid values: %q", allowed))}
	}
	return oneOf(value, path, allowed...)
}

func validateExitCodes(codes *batchv1.PodFailurePolicyOnExitCodesRequirement, pod *corev1.PodSpec, path *field.Path) field.ErrorList {
	errs := given(codes.Operator, path.Child("operator"), batchv1.PodFailurePolicyOnExitCodesOpIn, batchv1.PodFailurePolicyOnExitCodesOpNotIn)
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
	switch n := len(codes.Values); {
	case n == 0:
		errs = append(errs, field.Invalid(values, codes.Values, "at least one value is required"))
	case n > maxExitCodes:
		errs = append(errs, field.TooMany(values, n, maxExitCodes))
	}
	for i, v := range codes.Values {
		if v == 0 && codes.Operator == batchv1.PodFailurePolicyOnExitCodesOpIn {
			errs = append(errs, field.Invalid(values.Index(i), v, "must not be 0 for the In operator"))
		}
		if slices.Contains(codes.Values[:i], v) {
			errs = append(errs, field.Duplicate(values.Index(i), v))
		}
	}
	if !slices.IsSorted(codes.Values) {
		errs = append(errs, field.Invalid(values, codes.Values, "must be ordered"))
	}
	return errs
}

func validateJobUpdate(j, old *batchv1.Job) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateCompletionsUpdate(j, old, spec.Child("completions"))
	errs = append(errs, apivalidation.ValidateImmutableField(j.Spec.Selector, old.Spec.Selector, spec.Child("selector"))...)
	errs = append(errs, apivalidation.ValidateImmutableField(&j.Spec.Template, pausedTemplate(j, old), spec.Child("template"))...)
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
		return field.ErrorList{field.Invalid(path, now, "can only be modified in tandem with spec.parallelism")}
	}
	return nil
}

// pausedTemplate is the old template with what the new one may change while the Job is
// suspended and has no pods: where pods go, how they are labelled (KEP-2926), and what
// they ask for (KEP-5440).
func pausedTemplate(j, old *batchv1.Job) *corev1.PodTemplateSpec {
	was, now := old.Spec.Template.DeepCopy(), &j.Spec.Template
	if !ptr.Deref(old.Spec.Suspend, false) || old.Status.Active > 0 || old.Status.StartTime != nil && !jobCondition(old, batchv1.JobSuspended) {
		return was
	}
	was.Annotations, was.Labels = now.Annotations, now.Labels
	was.Spec.NodeSelector, was.Spec.Tolerations, was.Spec.SchedulingGates = now.Spec.NodeSelector, now.Spec.Tolerations, now.Spec.SchedulingGates
	was.Spec.Affinity = sameNodeAffinity(was.Spec.Affinity, now.Spec.Affinity)
	sameResources(was.Spec.Containers, now.Spec.Containers)
	sameResources(was.Spec.InitContainers, now.Spec.InitContainers)
	return was
}

// sameNodeAffinity is was with the node affinity of now; nil when nothing is left.
func sameNodeAffinity(was, now *corev1.Affinity) *corev1.Affinity {
	if was == nil {
		was = &corev1.Affinity{}
	}
	was.NodeAffinity = nil
	if now != nil {
		was.NodeAffinity = now.NodeAffinity
	}
	if now == nil && *was == (corev1.Affinity{}) {
		return nil
	}
	return was
}

// sameResources gives each container of was the resources of its namesake in now.
func sameResources(was, now []corev1.Container) {
	for i := range was {
		for k := range now {
			if was[i].Name == now[k].Name {
				was[i].Resources = now[k].Resources
			}
		}
	}
}

// jobWarnings tells of names that make bad host names.
func jobWarnings(j, old *batchv1.Job) []string {
	if old != nil {
		return nil
	}
	var warnings []string
	if msgs := validation.IsDNS1123Label(j.Name); len(msgs) > 0 {
		warnings = append(warnings, fmt.Sprintf("metadata.name: this is used in Pod names and hostnames, which can result in surprising behavior; a DNS label is recommended: %v", msgs))
	}
	return append(warnings, jobSpecWarnings(&j.Spec, "spec")...)
}

// jobSpecWarnings tells of numbers at which the list of indexes may grow too long.
func jobSpecWarnings(s *batchv1.JobSpec, path string) []string {
	if ptr.Deref(s.CompletionMode, "") != batchv1.IndexedCompletion || ptr.Deref(s.Completions, 0) <= manyCompletions || ptr.Deref(s.Parallelism, 0) <= manyParallelism {
		return nil
	}
	return []string{path + ": In Indexed Jobs with a number of completions higher than 10^5 and a parallelism higher than 10^4, Kubernetes might not be able to track completedIndexes when a big number of indexes fail"}
}
