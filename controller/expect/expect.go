// SPDX-License-Identifier: Apache-2.0

// Package expect keeps a controller from acting twice on a cache that has not seen
// its own writes yet.
//
// Before it creates or deletes dependants, a controller writes down how many events
// it will see for them. Until those have come, it must not count its dependants:
// the cache would show too few, and it would create too many.
package expect

import (
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/clock"
)

// lifetime is how long an expectation holds. An event that has not come by then
// never will (the object went before anybody saw it), and waiting would be for ever.
const lifetime = 5 * time.Minute

// Expectations holds what is expected, by the UID of the owner. It is safe for
// concurrent use.
type Expectations struct {
	clock clock.PassiveClock

	mu sync.Mutex
	by map[types.UID]*expected
}

type expected struct {
	since     time.Time
	creations int
	deletions map[types.UID]bool
}

// New returns an empty set of expectations.
func New(c clock.PassiveClock) *Expectations {
	return &Expectations{clock: c, by: map[types.UID]*expected{}}
}

func (e *Expectations) get(owner types.UID) *expected {
	x := e.by[owner]
	if x == nil {
		x = &expected{deletions: map[types.UID]bool{}}
		e.by[owner] = x
	}
	x.since = e.clock.Now()
	return x
}

// Creations announces n dependants of owner that are about to be created.
func (e *Expectations) Creations(owner types.UID, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.get(owner).creations += n
}

// Deletions announces dependants of owner that are about to be deleted.
func (e *Expectations) Deletions(owner types.UID, dependants ...types.UID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.get(owner)
	for _, uid := range dependants {
		x.deletions[uid] = true
	}
}

// Created takes n creations off: their events have come, or they were not made
// after all.
func (e *Expectations) Created(owner types.UID, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if x := e.by[owner]; x != nil {
		x.creations = max(0, x.creations-n)
	}
}

// Deleted takes the deletion of dependant off: its event has come (the mark that it
// is being deleted suffices), or it was not deleted after all.
func (e *Expectations) Deleted(owner, dependant types.UID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if x := e.by[owner]; x != nil {
		delete(x.deletions, dependant)
	}
}

// Satisfied reports whether nothing is expected of owner's dependants any more, so
// that the cache may be trusted.
func (e *Expectations) Satisfied(owner types.UID) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.by[owner]
	if x == nil {
		return true
	}
	if x.creations == 0 && len(x.deletions) == 0 {
		return true
	}
	return e.clock.Since(x.since) > lifetime
}

// Forget drops what was expected for owner, which is gone.
func (e *Expectations) Forget(owner types.UID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.by, owner)
}

// Versions remembers what a controller itself last wrote to an owner, so that it does
// not decide on a cached state from before. It is safe for concurrent use.
type Versions struct {
	mu sync.Mutex
	by map[types.UID]string
}

// NewVersions returns an empty memory.
func NewVersions() *Versions { return &Versions{by: map[types.UID]string{}} }

// Wrote takes note of an owner as a write returned it.
func (v *Versions) Wrote(owner metav1.Object) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.by[owner.GetUID()] = owner.GetResourceVersion()
}

// Current reports whether a cached owner shows the last write, or something later.
func (v *Versions) Current(cached metav1.Object) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	wrote, ok := v.by[cached.GetUID()]
	if !ok {
		return true
	}
	order, err := resourceversion.CompareResourceVersion(cached.GetResourceVersion(), wrote)
	return err != nil || order >= 0
}

// Forget drops what was known of an owner, which is gone.
func (v *Versions) Forget(owner types.UID) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.by, owner)
}
