// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox"
)

// TestMeasure: what a container's processes use is counted for it, and for no other,
// whoever their parent is and whether they have ended.
func TestMeasure(t *testing.T) {
	r := open(t)
	idle, busy := create(t, r, "idle"), create(t, r, "busy")
	start(t, idle, sandbox.ProcessSpec{Container: "app"}, "exec sleep 1000")
	// A child that has ended burns time for a second, then an orphan holds memory.
	start(t, busy, sandbox.ProcessSpec{Container: "app"},
		`timeout 1 sh -c 'while :; do :; done'; (sh -c 'x=$(head -c 20000000 /dev/zero | tr "\0" x); sleep 1000' &) ; exec sleep 1000`)
	start(t, busy, sandbox.ProcessSpec{Container: "other"}, "exec sleep 1000")
	var busyUse, otherUse, idleUse sandbox.Usage
	nettest.Eventually(t, 20*time.Second, "figures", func() error {
		all, err := sandbox.Measure(idle, busy)
		if err != nil {
			return err
		}
		for p, u := range all {
			switch {
			case p.Container() == "other":
				otherUse = u
			case slices.Contains(busy.Processes(), p):
				busyUse = u
			default:
				idleUse = u
			}
		}
		if len(all) != 3 || busyUse.CPU < 800*time.Millisecond || busyUse.Memory < 18<<20 {
			return fmt.Errorf("%+v", all)
		}
		return nil
	})
	if busyUse.Processes < 2 || busyUse.CPU > 10*time.Second || busyUse.Memory > 200<<20 {
		t.Errorf("busy: %+v", busyUse)
	}
	for name, u := range map[string]sandbox.Usage{"idle": idleUse, "other": otherUse} {
		if u.CPU > 300*time.Millisecond || u.Memory == 0 || u.Memory > 10<<20 || u.Processes != 1 {
			t.Errorf("%s: %+v", name, u)
		}
	}
	only, err := sandbox.Measure(idle)
	if err != nil || len(only) != 1 {
		t.Errorf("one sandbox: %v %v", only, err)
	}
	none, err := sandbox.Measure(create(t, r, "empty"))
	if err != nil || len(none) != 0 {
		t.Errorf("a pod without processes: %v %v", none, err)
	}
}
