// SPDX-License-Identifier: Apache-2.0

// Package settle lets a control loop say how far it has come, so that somebody
// else can wait for "everything has caught up" without sleeping.
//
// Every loop owns one [Witness]. The loop's event handlers first put the event
// into the loop's queue and then tell the witness the object's resource version.
// A reader that takes a [Progress] therefore sees one of two things for any event
// up to the revision in Revs: it is still counted in Pending, or it was handled.
//
// A loop is settled at a moment when, for each resource it observes, its revision
// is not below that resource's newest revision in the store and nothing is
// pending. Whoever decides that has to look twice, with no write in between: a
// handler may be on its way from one queue to the next.
package settle

import (
	"maps"
	"strconv"
	"sync"
)

// Progress is how far one loop had come when it was asked.
type Progress struct {
	// Name is the loop's own name, as shown to people.
	Name string `json:"name"`
	// Revs holds, by resource ("pods", "endpointslices"), the highest resource
	// version whose event has reached the loop's queue. A resource that the loop
	// watches but has not heard of yet is present with 0.
	Revs map[string]uint64 `json:"revs"`
	// Pending counts the work known and not finished: queued, waiting for a
	// retry, or in hand.
	Pending int `json:"pending"`
}

// Witness records the progress of one loop. It is safe for concurrent use.
type Witness struct {
	name    string
	pending func() int

	mu   sync.Mutex
	revs map[string]uint64
}

// NewWitness returns a witness for the loop called name. pending is asked at each
// Snapshot; it returns the number of things queued, waiting for a retry and in
// hand right now, and must be safe to call from any goroutine. nil means that the
// loop never has anything pending.
func NewWitness(name string, pending func() int) *Witness {
	return &Witness{name: name, pending: pending, revs: map[string]uint64{}}
}

// Observe says that an event of resource at revision rev has been queued. Call it
// in every event handler, after the event was put into the loop's queue, for every
// event of a resource that the loop watches, those it then ignores included: else
// the loop never seems to reach the store's newest revision.
//
// Call it with rev "" or "0" when the loop subscribes, so that the resource counts
// before its first event. Revisions never go back: an older one changes nothing,
// and so does one that is not a decimal number.
func (w *Witness) Observe(resource, rev string) {
	n, err := strconv.ParseUint(rev, 10, 64)
	if err != nil {
		n = 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if old, known := w.revs[resource]; !known || n > old {
		w.revs[resource] = n
	}
}

// Snapshot returns the loop's progress now. The map is the caller's own.
func (w *Witness) Snapshot() Progress {
	// Revisions first: an event that is in the revisions was queued before, so
	// the count taken afterwards still holds it unless it is done.
	w.mu.Lock()
	p := Progress{Name: w.name, Revs: maps.Clone(w.revs)}
	w.mu.Unlock()
	if w.pending != nil {
		p.Pending = w.pending()
	}
	return p
}
