// SPDX-License-Identifier: Apache-2.0

package registry

import (
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
		Validate:         validates(validateCronJob),
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
				c.Name, c.Spec.Schedule, ptr.Deref(c.Spec.TimeZone, "<none>"), ptr.Deref(c.Spec.Suspend, false),
				int64(len(c.Status.Active)), last, age(c.CreationTimestamp),
			}
			return append(cells, templateCells(&c.Spec.JobTemplate.Spec.Template, c.Spec.JobTemplate.Spec.Selector)...)
		}),
	}
}

// maxCronJobName leaves room for the 11 characters that the name of a job adds.
const maxCronJobName = validation.DNS1035LabelMaxLength - 11

func validateCronJob(c *batchv1.CronJob) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	if len(c.Name) > maxCronJobName {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), c.Name, fmt.Sprintf("must be no more than %d characters", maxCronJobName)))
	}
	errs = append(errs, validateSchedule(c, spec)...)
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

func validateSchedule(c *batchv1.CronJob, spec *field.Path) field.ErrorList {
	path := spec.Child("schedule")
	var errs field.ErrorList
	if c.Spec.Schedule == "" {
		errs = append(errs, field.Required(path, ""))
	} else {
		if err := parseSchedule(c.Spec.Schedule); err != nil {
			errs = append(errs, field.Invalid(path, c.Spec.Schedule, err.Error()))
		}
		switch zoned := strings.Contains(c.Spec.Schedule, "TZ"); {
		case zoned && c.Spec.TimeZone != nil:
			errs = append(errs, field.Invalid(path, c.Spec.Schedule, "cannot use both timeZone field and TZ or CRON_TZ in schedule"))
		case zoned:
			errs = append(errs, field.Invalid(path, c.Spec.Schedule, "cannot use TZ or CRON_TZ in schedule, use timeZone field instead"))
		}
	}
	if c.Spec.TimeZone == nil {
		return errs
	}
	zone, path := *c.Spec.TimeZone, spec.Child("timeZone")
	switch {
	case zone == "":
		return append(errs, field.Invalid(path, c.Spec.TimeZone, "timeZone must be nil or non-empty string"))
	case strings.EqualFold(zone, "Local"):
		return append(errs, field.Invalid(path, c.Spec.TimeZone, "timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones"))
	}
	if _, err := time.LoadLocation(zone); err != nil {
		errs = append(errs, field.Invalid(path, c.Spec.TimeZone, err.Error()))
	}
	return errs
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
