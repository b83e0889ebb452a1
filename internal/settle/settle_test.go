// SPDX-License-Identifier: Apache-2.0

package settle

import (
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
)

func TestObserveKeepsTheHighestRevision(t *testing.T) {
	w := NewWitness("loop", nil)
	w.Observe("pods", "")
	w.Observe("services", "0")
	p := w.Snapshot()
	if rev, ok := p.Revs["pods"]; !ok || rev != 0 {
		t.Fatalf("subscribed resource is missing: %v", p)
	}
	for _, rev := range []string{"7", "12", "9", "nonsense", ""} {
		w.Observe("pods", rev)
	}
	w.Observe("services", "18446744073709551615")
	p = w.Snapshot()
	if p.Name != "loop" || p.Revs["pods"] != 12 || p.Revs["services"] != 1<<64-1 || p.Pending != 0 {
		t.Fatalf("got %+v", p)
	}
}

func TestSnapshotIsTheCallersOwn(t *testing.T) {
	w := NewWitness("loop", func() int { return 3 })
	w.Observe("pods", "1")
	p := w.Snapshot()
	p.Revs["pods"] = 99
	if got := w.Snapshot(); got.Revs["pods"] != 1 || got.Pending != 3 {
		t.Fatalf("got %+v", got)
	}
}

// A reader never sees a revision whose event is neither pending nor done.
func TestQueueBeforeObserve(t *testing.T) {
	var queued, done atomic.Int64
	w := NewWitness("loop", func() int { return int(queued.Load() - done.Load()) })
	const events = 2000
	var wg sync.WaitGroup
	work := make(chan int, events)
	wg.Go(func() {
		defer close(work)
		for i := 1; i <= events; i++ {
			queued.Add(1)
			work <- i
			w.Observe("pods", strconv.Itoa(i))
		}
	})
	wg.Go(func() {
		for range work {
			done.Add(1)
		}
	})
	for {
		p := w.Snapshot()
		if p.Pending == 0 && int64(p.Revs["pods"]) > done.Load() {
			t.Fatalf("revision %d seen with nothing pending and %d done", p.Revs["pods"], done.Load())
		}
		if p.Revs["pods"] == events {
			break
		}
	}
	wg.Wait()
}
