// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// lookAt is a look with one container of a pod.
func lookAt(at, start time.Time, used time.Duration) *look {
	c := containerSummary{Name: "c", Start: start}
	c.CPU.At, c.CPU.Used, c.Memory.WorkingSet = at, used.Nanoseconds(), 1<<20
	return &look{at: at, containers: map[types.UID][]containerSummary{"u": {c}}}
}

func TestCompareLooks(t *testing.T) {
	t0 := time.Unix(1000, 0)
	long, now := t0.Add(-time.Hour), t0.Add(10*time.Second)
	for _, tc := range []struct {
		name   string
		before *look
		now    *look
		want   int64 // in thousandths of a core
	}{
		{"a tenth of the time", lookAt(t0, long, time.Minute), lookAt(now, long, time.Minute+time.Second), 100},
		{"two cores", lookAt(t0, long, 0), lookAt(now, long, 20*time.Second), 2000},
		{"idle", lookAt(t0, long, time.Minute), lookAt(now, long, time.Minute), 0},
		{"time went with a process", lookAt(t0, long, time.Minute), lookAt(now, long, time.Second), 0},
		{"restarted in between", lookAt(t0, long, time.Minute), lookAt(now, t0.Add(8*time.Second), time.Second), 500},
	} {
		t.Run(tc.name, func(t *testing.T) {
			use := compare(tc.before, tc.now)
			got := use.pods["u"]
			if len(got) != 1 || got[0].cpu/1e6 != tc.want || got[0].memory != 1<<20 || use.window != 10*time.Second {
				t.Errorf("%+v, want %dm", use, tc.want)
			}
		})
	}
}

func TestRememberLooks(t *testing.T) {
	f := newFigures(Deps{})
	t0 := time.Unix(1000, 0)
	at := func(d time.Duration) *look { return &look{at: t0.Add(d)} }
	soon, later := at(minWindow/2), at(10*time.Second)
	for _, step := range []struct {
		now, want *look
	}{
		{at(0), nil},
		{soon, nil},   // the first is too young
		{later, soon}, // the newest that is old enough
		{at(10*time.Second + minWindow), later},
		{at(5 * time.Minute), nil}, // all are too old
	} {
		if got := f.remember("n", step.now); got != step.want {
			t.Errorf("at %v: %v, want %v", step.now.at.Sub(t0), got, step.want)
		}
	}
	if n := len(f.looks["n"]); n != 1 {
		t.Errorf("%d looks are kept", n)
	}
}
