// SPDX-License-Identifier: Apache-2.0

package cronjob

import (
	"errors"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	"k8s.io/utils/ptr"
)

func utc(text string) time.Time {
	t, err := time.Parse("2006-01-02 15:04:05", text)
	if err != nil {
		panic(err)
	}
	return t
}

func TestDueAt(t *testing.T) {
	const never = "0001-01-01 00:00:00"
	for _, c := range []struct {
		schedule, since, now string
		last, next           string
		many                 bool
	}{
		{"*/5 * * * *", "2026-01-01 10:01:00", "2026-01-01 10:04:59", never, "2026-01-01 10:05:00", false},
		{"*/5 * * * *", "2026-01-01 10:01:00", "2026-01-01 10:05:00", "2026-01-01 10:05:00", "2026-01-01 10:10:00", false},
		{"*/5 * * * *", "2026-01-01 10:05:00", "2026-01-01 10:09:00", never, "2026-01-01 10:10:00", false},
		{"*/5 * * * *", "2026-01-01 10:00:00", "2026-01-01 10:17:00", "2026-01-01 10:15:00", "2026-01-01 10:20:00", false},
		// 100 missed starts are few, 101 many.
		{"* * * * *", "2026-01-01 10:00:00", "2026-01-01 11:40:30", "2026-01-01 11:40:00", "2026-01-01 11:41:00", false},
		{"* * * * *", "2026-01-01 10:00:00", "2026-01-01 11:41:30", "2026-01-01 11:41:00", "2026-01-01 11:42:00", true},
		{"* * * * *", "1999-01-01 10:00:00", "2026-01-01 11:41:30", "2026-01-01 11:41:00", "2026-01-01 11:42:00", true},
		// Uneven: minutes of the small hours only.
		{"* 3 * * 1-5", "2020-01-01 00:00:00", "2026-01-04 12:00:00", "2026-01-02 03:59:00", "2026-01-05 03:00:00", true},
		{"@hourly", "2026-01-01 10:30:00", "2026-01-01 12:00:00", "2026-01-01 12:00:00", "2026-01-01 13:00:00", false},
		{"@every 90m", "2026-01-01 10:00:07", "2026-01-01 11:29:00", never, "2026-01-01 11:30:07", false},
		{"@every 90m", "2026-01-01 10:00:07", "2026-01-01 13:30:00", "2026-01-01 13:00:07", "2026-01-01 14:30:07", false},
		{"@every 1m", "2020-01-01 00:00:30", "2026-01-01 00:00:00", "2025-12-31 23:59:30", "2026-01-01 00:00:30", true},
	} {
		s, err := parse(&batchv1.CronJob{Spec: batchv1.CronJobSpec{Schedule: c.schedule}})
		if err != nil {
			t.Fatal(err)
		}
		d, err := dueAt(s, utc(c.since), utc(c.now))
		if err != nil || !d.last.Equal(utc(c.last)) || !d.next.Equal(utc(c.next)) || d.many != c.many {
			t.Errorf("%s from %s to %s: last %v, next %v, many %v, %v", c.schedule, c.since, c.now, d.last, d.next, d.many, err)
		}
	}
}

func TestSchedules(t *testing.T) {
	cron := func(schedule, zone string) *batchv1.CronJob {
		c := &batchv1.CronJob{Spec: batchv1.CronJobSpec{Schedule: schedule}}
		if zone != "" {
			c.Spec.TimeZone = ptr.To(zone)
		}
		return c
	}
	// The clocks of Berlin go forward on March 29: half past two does not exist there.
	s, err := parse(cron("30 2 * * *", "Europe/Berlin"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := dueAt(s, utc("2026-03-28 00:00:00"), utc("2026-03-29 12:00:00"))
	if err != nil || !d.last.Equal(utc("2026-03-28 01:30:00")) || !d.next.Equal(utc("2026-03-30 00:30:00")) {
		t.Errorf("last %v, next %v, %v", d.last, d.next, err)
	}
	if s, err = parse(cron("0 0 31 2 *", "")); err != nil {
		t.Fatal(err)
	}
	if _, err := dueAt(s, utc("2026-01-01 00:00:00"), utc("2026-01-02 00:00:00")); !errors.Is(err, errNever) {
		t.Errorf("February 31: %v", err)
	}
	for _, bad := range []*batchv1.CronJob{cron("* * * *", ""), cron("TZ=0", ""), cron("* * * * *", "Mars/Olympus")} {
		if _, err := parse(bad); err == nil {
			t.Errorf("%q in %v is taken", bad.Spec.Schedule, bad.Spec.TimeZone)
		}
	}
}
