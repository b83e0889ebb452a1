// SPDX-License-Identifier: Apache-2.0

package cronjob

import (
	"errors"
	"fmt"
	"strings"
	"time"
	_ "time/tzdata" // a machine without a time zone database must not lose a schedule

	"github.com/robfig/cron/v3"
	batchv1 "k8s.io/api/batch/v1"
)

// manyMissed is how many starts may be missed before it is worth a warning.
const manyMissed = 100

// errNever says that a schedule reads well and no day fits it, such as February 31.
var errNever = errors.New("time difference between two schedules is less than 1 second")

// parse reads the schedule of c in its time zone. The API has checked both; an error
// means that this process knows fewer zones, or that the object is an old one.
func parse(c *batchv1.CronJob) (schedule cron.Schedule, err error) {
	text := c.Spec.Schedule
	if c.Spec.TimeZone != nil && !strings.Contains(text, "TZ") {
		text = fmt.Sprintf("TZ=%s %s", *c.Spec.TimeZone, text)
	}
	// The parser panics on some texts that begin with a time zone.
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("invalid schedule format: %v", r)
		}
	}()
	return cron.ParseStandard(text)
}

// due is what a schedule says about the time from since until now.
type due struct {
	// last is the latest start that is not after now; zero for none.
	last time.Time
	// many says that more starts than manyMissed were due.
	many bool
	// next is the first start after now.
	next time.Time
}

// dueAt asks the schedule. since itself is not due: the start at that time was made, or
// the CronJob was not there before.
func dueAt(schedule cron.Schedule, since, now time.Time) (due, error) {
	if every, ok := schedule.(cron.ConstantDelaySchedule); ok {
		return dueEvery(every, since, now), nil
	}
	d := due{next: schedule.Next(now)}
	if d.next.IsZero() {
		return due{}, errNever
	}
	n := 0
	for t := schedule.Next(since); !t.After(now); t = schedule.Next(t) {
		if d.last, n = t, n+1; n > manyMissed {
			d.many = true
			d.last = latest(schedule, t, now)
			break
		}
	}
	return d, nil
}

// dueEvery counts a fixed pause, such as @every 90m, from since.
func dueEvery(every cron.ConstantDelaySchedule, since, now time.Time) due {
	since = since.Truncate(time.Second)
	n := max(0, now.Sub(since)/every.Delay)
	d := due{many: n > manyMissed, next: since.Add((n + 1) * every.Delay)}
	if n > 0 {
		d.last = since.Add(n * every.Delay)
	}
	return d
}

// latest finds the last start that is not after now, when there is one at or after
// from: it looks back twice as far each time, instead of going through years.
func latest(schedule cron.Schedule, from, now time.Time) time.Time {
	for back := time.Minute; ; back *= 2 {
		start := now.Add(-back)
		if !start.After(from) {
			start = from
		}
		last := time.Time{}
		for t := schedule.Next(start); !t.After(now); t = schedule.Next(t) {
			last = t
		}
		switch {
		case !last.IsZero():
			return last
		case start.Equal(from):
			return from
		}
	}
}
