// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// jobStatusCheck checks a new status of a Job against the old one. A rule about two
// fields counts only when one of them changes, so that a status of old, or one that a
// change of spec has overtaken, does not stand in the way of other news.
type jobStatusCheck struct {
	j, old *batchv1.Job
	path   *field.Path
	errs   field.ErrorList
}

func validateJobStatus(j, old *batchv1.Job) field.ErrorList {
	c := &jobStatusCheck{j: j, old: old, path: field.NewPath("status")}
	c.counters()
	c.conditions()
	c.times()
	c.pods()
	c.indexes()
	return c.errs
}

// refuse adds an error about a value.
func (c *jobStatusCheck) refuse(name string, value any, why string) {
	c.errs = append(c.errs, field.Invalid(c.path.Child(name), value, why))
}

// changes reports whether one of the conditions becomes true or ceases to be.
func (c *jobStatusCheck) changes(types ...batchv1.JobConditionType) bool {
	return slices.ContainsFunc(types, func(t batchv1.JobConditionType) bool { return jobCondition(c.j, t) != jobCondition(c.old, t) })
}

func (c *jobStatusCheck) counters() {
	s, was := &c.j.Status, &c.old.Status
	for _, n := range []counter{
		{"active", s.Active}, {"succeeded", s.Succeeded}, {"failed", s.Failed},
		{"ready", ptr.Deref(s.Ready, 0)}, {"terminating", ptr.Deref(s.Terminating, 0)},
	} {
		c.errs = append(c.errs, notNegative(c.path.Child(n.name), n.value)...)
	}
	if s.Failed < was.Failed {
		c.refuse("failed", s.Failed, "cannot decrease the failed counter")
	}
	// An Indexed Job may shrink together with its parallelism.
	shrinks := ptr.Deref(c.j.Spec.CompletionMode, "") == batchv1.IndexedCompletion && ptr.Equal(c.j.Spec.Completions, c.j.Spec.Parallelism)
	if s.Succeeded < was.Succeeded && !shrinks {
		c.refuse("succeeded", s.Succeeded, "cannot decrease the succeeded counter")
	}
}

func (c *jobStatusCheck) conditions() {
	const (
		complete, failed = batchv1.JobComplete, batchv1.JobFailed
		met, target      = batchv1.JobSuccessCriteriaMet, batchv1.JobFailureTarget
	)
	refuse := func(why string) { c.refuse("conditions", field.OmitValueType{}, why) }
	is := func(t batchv1.JobConditionType) bool { return jobCondition(c.j, t) }
	if c.changes(complete, failed) && is(complete) && is(failed) {
		refuse("cannot set Complete=True and Failed=true conditions")
	}
	if c.changes(complete, target) && is(complete) && is(target) {
		refuse("cannot set Complete=True and FailureTarget=true conditions")
	}
	if c.changes(failed, target) && is(failed) && !is(target) {
		refuse("cannot set Failed=True condition without the FailureTarget=true condition")
	}
	if c.changes(complete, met) && is(complete) && !is(met) {
		refuse("cannot set Complete=True condition without the SuccessCriteriaMet=true condition")
	}
	if is(met) && is(failed) {
		refuse("cannot set SuccessCriteriaMet=True and Failed=true conditions")
	}
	if is(met) && is(target) {
		refuse("cannot set SuccessCriteriaMet=True and FailureTarget=true conditions")
	}
	for _, t := range []batchv1.JobConditionType{failed, complete, target} {
		if jobCondition(c.old, t) && !is(t) {
			refuse(fmt.Sprintf("cannot disable the terminal %s=True condition", t))
		}
	}
	if jobCondition(c.old, met) && !is(met) {
		refuse("cannot disable the SuccessCriteriaMet=True condition")
	}
}

func (c *jobStatusCheck) times() {
	s, was, complete := &c.j.Status, &c.old.Status, jobCondition(c.j, batchv1.JobComplete)
	started := !equality.Semantic.DeepEqual(s.StartTime, was.StartTime)
	ended := !equality.Semantic.DeepEqual(s.CompletionTime, was.CompletionTime)
	if (c.changes(batchv1.JobComplete) || ended) && s.CompletionTime != nil && !complete {
		c.refuse("completionTime", s.CompletionTime, "cannot set completionTime when there is no Complete=True condition")
	}
	if (c.changes(batchv1.JobComplete) || ended) && s.CompletionTime == nil && complete {
		c.errs = append(c.errs, field.Required(c.path.Child("completionTime"), "completionTime is required for Complete jobs"))
	}
	if ended && s.CompletionTime != nil && was.CompletionTime != nil {
		c.refuse("completionTime", s.CompletionTime, "completionTime cannot be mutated")
	}
	if (started || ended) && s.StartTime != nil && s.CompletionTime != nil && s.CompletionTime.Before(s.StartTime) {
		c.refuse("completionTime", s.CompletionTime, "completionTime cannot be set before startTime")
	}
	if started && was.StartTime != nil && !ptr.Deref(c.j.Spec.Suspend, false) {
		c.errs = append(c.errs, field.Required(c.path.Child("startTime"), "startTime cannot be removed for unsuspended job"))
	}
}

func (c *jobStatusCheck) pods() {
	s, was := &c.j.Status, &c.old.Status
	ends := c.changes(batchv1.JobComplete, batchv1.JobFailed)
	over := jobCondition(c.j, batchv1.JobComplete) || jobCondition(c.j, batchv1.JobFailed)
	ready, terminating := ptr.Deref(s.Ready, 0), ptr.Deref(s.Terminating, 0)
	if (ends || s.Active != was.Active) && over && s.Active > 0 {
		c.refuse("active", s.Active, "active>0 is invalid for finished job")
	}
	if (ends || !ptr.Equal(s.Terminating, was.Terminating)) && over && terminating > 0 {
		c.refuse("terminating", terminating, "terminating>0 is invalid for finished job")
	}
	if (s.Active != was.Active || !ptr.Equal(s.Ready, was.Ready)) && ready > s.Active {
		c.refuse("ready", ready, "cannot set more ready pods than active")
	}
	if ends && over && s.StartTime == nil {
		c.errs = append(c.errs, field.Required(c.path.Child("startTime"), "startTime is required for finished job"))
	}
	u := s.UncountedTerminatedPods
	if u == nil {
		return
	}
	if (ends || !equality.Semantic.DeepEqual(u, was.UncountedTerminatedPods)) && over && len(u.Succeeded)+len(u.Failed) > 0 {
		c.refuse("uncountedTerminatedPods", u, "uncountedTerminatedPods needs to be empty for finished job")
	}
	seen := map[types.UID]bool{}
	for _, list := range []struct {
		name string
		uids []types.UID
	}{{"succeeded", u.Succeeded}, {"failed", u.Failed}} {
		for i, uid := range list.uids {
			path := c.path.Child("uncountedTerminatedPods", list.name).Index(i)
			switch {
			case uid == "":
				c.errs = append(c.errs, field.Invalid(path, uid, "must not be empty"))
			case seen[uid]:
				c.errs = append(c.errs, field.Duplicate(path, uid))
			}
			seen[uid] = true
		}
	}
}

func (c *jobStatusCheck) indexes() {
	s, was := &c.j.Status, &c.old.Status
	doneChanged, lostChanged := s.CompletedIndexes != was.CompletedIndexes, !ptr.Equal(s.FailedIndexes, was.FailedIndexes)
	indexed := ptr.Deref(c.j.Spec.CompletionMode, "") == batchv1.IndexedCompletion
	if doneChanged && s.CompletedIndexes != "" && !indexed {
		c.refuse("completedIndexes", s.CompletedIndexes, "cannot set non-empty completedIndexes when non-indexed completion mode")
	}
	if lostChanged && s.FailedIndexes != nil && c.j.Spec.BackoffLimitPerIndex == nil {
		c.refuse("failedIndexes", *s.FailedIndexes, "cannot set non-null failedIndexes when backoffLimitPerIndex is null")
	}
	if c.j.Spec.Completions == nil {
		return
	}
	n := *c.j.Spec.Completions
	done, err := readIndexes(s.CompletedIndexes, n)
	if err != nil && doneChanged {
		c.refuse("completedIndexes", s.CompletedIndexes, fmt.Sprintf("error parsing completedIndexes: %s", err))
	}
	if s.FailedIndexes == nil {
		return
	}
	lost, err := readIndexes(*s.FailedIndexes, n)
	if err != nil && lostChanged && c.j.Spec.BackoffLimitPerIndex != nil {
		c.refuse("failedIndexes", *s.FailedIndexes, fmt.Sprintf("error parsing failedIndexes: %s", err))
	}
	if !doneChanged && !lostChanged {
		return
	}
	for _, d := range done {
		for _, l := range lost {
			if d.first <= l.last && l.first <= d.last {
				c.refuse("failedIndexes", *s.FailedIndexes, fmt.Sprintf("failedIndexes and completedIndexes overlap at index: %d", max(d.first, l.first)))
				return
			}
		}
	}
}
