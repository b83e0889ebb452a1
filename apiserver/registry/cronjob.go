// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"strings"
	"time"
	_ "time/tzdata" // a machine without a time zone database must not refuse a zone

	"github.com/robfig/cron/v3"
	batchv1 "k8s.io/api/batch/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

func cronJobKind() Kind {
	return Kind{
		Resource: "cronjobs", Singular: "cronjob", Kind: "CronJob",
		GroupVersion: batchv1.SchemeGroupVersion, Namespaced: true,
		ShortNames: []string{"cj"}, Categories: []string{"all"},
		New: newObject[batchv1.CronJob], NewList: newObject[batchv1.CronJobList],
		Default: forObject(func(c *batchv1.CronJob) {
			setIfZero(&c.Spec.ConcurrencyPolicy, batchv1.AllowConcurrent)
			setDefault(&c.Spec.Suspend, false)
			setDefault(&c.Spec.SuccessfulJobsHistoryLimit, 3)
			setDefault(&c.Spec.FailedJobsHistoryLimit, 1)
			// The rest of the job is defaulted when one is made from it.
			defaultPodSpec(&c.Spec.JobTemplate.Spec.Template.Spec)
		}),
		TracksGeneration: true,
		PrepareForCreate: onCreate(func(_ context.Context, c *batchv1.CronJob) { c.Spec.JobTemplate.Spec.Scheduling = nil }),
		Validate:         validates(validateCronJob),
		ValidateCreate:   validates(validateCronJobCreate),
		ValidateUpdate:   validatesUpdate(validateCronJobUpdate),
		Warnings:         warns(cronJobWarnings),
		Status:           &StatusStrategy{},
		Columns: append([]metav1.TableColumnDefinition{
			nameColumn,
			column("Schedule", "string", "When jobs start, in the format of cron."),
			column("Timezone", "string", "The time zone of the schedule."),
			column("Suspend", "boolean", "Whether no more jobs are started."),
			column("Active", "integer", "How many jobs run."),
			column("Last Schedule", "string", "Time since the last job was started."),
			ageColumn,
		}, templateColumns()...),
		Row: row(func(c *batchv1.CronJob) []any {
			last := "<none>"
			if t := c.Status.LastScheduleTime; t != nil {
				last = duration.HumanDuration(time.Since(t.Time))
			}
			cells := []any{
				c.Name, c.Spec.Schedule, ptr.Deref(c.Spec.TimeZone, "<none>"), boolText(c.Spec.Suspend),
				int64(len(c.Status.Active)), last, age(c.CreationTimestamp),
			}
			return append(cells, templateCells(&c.Spec.JobTemplate.Spec.Template, c.Spec.JobTemplate.Spec.Selector)...)
		}),
	}
}

// boolText is how kubectl shows a boolean that may be missing.
func boolText(b *bool) string {
	switch {
	case b == nil:
		return "<unset>"
	case *b:
		return "True"
	}
	return "False"
}

// maxCronJobName leaves room for the 11 characters that the name of a job adds.
const maxCronJobName = validation.DNS1035LabelMaxLength - 11

func validateCronJob(c *batchv1.CronJob) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	if c.Spec.Schedule == "" {
		errs = append(errs, field.Required(spec.Child("schedule"), ""))
	} else if err := parseSchedule(c.Spec.Schedule); err != nil {
		errs = append(errs, field.Invalid(spec.Child("schedule"), c.Spec.Schedule, err.Error()))
	}
	if n := c.Spec.StartingDeadlineSeconds; n != nil {
		errs = append(errs, apivalidation.ValidateNonnegativeField(*n, spec.Child("startingDeadlineSeconds"))...)
	}
	errs = append(errs, oneOf(c.Spec.ConcurrencyPolicy, spec.Child("concurrencyPolicy"), batchv1.AllowConcurrent, batchv1.ForbidConcurrent, batchv1.ReplaceConcurrent)...)
	job, path := &c.Spec.JobTemplate.Spec, spec.Child("jobTemplate", "spec")
	errs = append(errs, validateJobSpec(job, path)...)
	if job.Selector != nil {
		errs = append(errs, field.Invalid(path.Child("selector"), job.Selector, "`selector` will be auto-generated"))
	}
	if ptr.Deref(job.ManualSelector, false) {
		errs = append(errs, field.NotSupported(path.Child("manualSelector"), *job.ManualSelector, []string{"nil", "false"}))
	}
	for name, n := range map[string]*int32{
		"successfulJobsHistoryLimit": c.Spec.SuccessfulJobsHistoryLimit, "failedJobsHistoryLimit": c.Spec.FailedJobsHistoryLimit,
	} {
		if n != nil {
			errs = append(errs, notNegative(spec.Child(name), *n)...)
		}
	}
	return errs
}

func validateCronJobCreate(c *batchv1.CronJob) field.ErrorList {
	var errs field.ErrorList
	if len(c.Name) > maxCronJobName {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), c.Name, fmt.Sprintf("must be no more than %d characters", maxCronJobName)))
	}
	errs = append(errs, validateZoneInSchedule(c, false)...)
	return append(errs, validateTimeZone(c.Spec.TimeZone)...)
}

// validateCronJobUpdate leaves alone what was allowed once.
func validateCronJobUpdate(c, old *batchv1.CronJob) field.ErrorList {
	errs := validateZoneInSchedule(c, strings.Contains(old.Spec.Schedule, "TZ"))
	if !ptr.Equal(c.Spec.TimeZone, old.Spec.TimeZone) {
		errs = append(errs, validateTimeZone(c.Spec.TimeZone)...)
	}
	return errs
}

// validateZoneInSchedule refuses a time zone in the text of the schedule.
func validateZoneInSchedule(c *batchv1.CronJob, allowed bool) field.ErrorList {
	path := field.NewPath("spec", "schedule")
	switch {
	case !strings.Contains(c.Spec.Schedule, "TZ"):
	case !allowed:
		return field.ErrorList{field.Invalid(path, c.Spec.Schedule, "cannot use TZ or CRON_TZ in schedule, use timeZone field instead")}
	case c.Spec.TimeZone != nil:
		return field.ErrorList{field.Invalid(path, c.Spec.Schedule, "cannot use both timeZone field and TZ or CRON_TZ in schedule")}
	}
	return nil
}

func validateTimeZone(zone *string) field.ErrorList {
	if zone == nil {
		return nil
	}
	path := field.NewPath("spec", "timeZone")
	refuse := func(why string) *field.Error { return field.Invalid(path, zone, why) }
	if *zone == "" {
		return field.ErrorList{refuse("timeZone must be nil or non-empty string")}
	}
	for part := range strings.SplitSeq(*zone, "/") {
		if !zonePart(part) {
			return field.ErrorList{refuse("unknown time zone " + *zone)}
		}
	}
	var errs field.ErrorList
	if strings.EqualFold(*zone, "Local") {
		errs = append(errs, refuse("timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones"))
	}
	if _, err := time.LoadLocation(*zone); err != nil {
		errs = append(errs, refuse(err.Error()))
	}
	return errs
}

// zonePart reports whether a part of a time zone's name is one that the database of
// IANA may have, so that the name cannot lead to another file.
func zonePart(part string) bool {
	if part == "" || len(part) > 14 || part == "." || part == ".." || part[0] == '-' {
		return false
	}
	const letters = "abcdefghijklmnopqrstuvwxyz"
	return strings.Trim(strings.ToLower(part), letters+"0123456789._-+") == ""
}

func cronJobWarnings(c, old *batchv1.CronJob) []string {
	var warnings []string
	if msgs := validation.IsDNS1123Label(c.Name); old == nil && len(msgs) > 0 {
		warnings = append(warnings, fmt.Sprintf("metadata.name: this is used in Pod names and hostnames, which can result in surprising behavior; a DNS label is recommended: %v", msgs))
	}
	warnings = append(warnings, jobSpecWarnings(&c.Spec.JobTemplate.Spec, "spec.jobTemplate.spec")...)
	if strings.Contains(c.Spec.Schedule, "TZ") {
		warnings = append(warnings, "cannot use TZ or CRON_TZ in spec.spec.schedule, use timeZone instead, see https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/ for more details")
	}
	return warnings
}

// parseSchedule tells what is wrong with a schedule. The parser panics on some
// texts that begin with a time zone.
func parseSchedule(schedule string) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("invalid schedule format: %v", r)
		}
	}()
	_, err = cron.ParseStandard(schedule)
	return err
}
