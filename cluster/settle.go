// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kplab/kplab/internal/settle"
)

// settleInterval is the time between two looks at the witnesses. A look reads a
// few counters; it costs microseconds.
const settleInterval = 2 * time.Millisecond

// unsettling are the resources that move for ever, heartbeats among them, and
// so say nothing about whether the lab has come to rest.
var unsettling = []string{"leases", "events"}

// UnsettledError names who has not caught up.
type UnsettledError struct {
	Behind []string
	// Cause is why the wait ended; nil when it is not known.
	Cause error
}

func (e *UnsettledError) Error() string {
	text := "not settled: " + strings.Join(e.Behind, "; ")
	if e.Cause != nil {
		text += ": " + e.Cause.Error()
	}
	return text
}

func (e *UnsettledError) Unwrap() error { return e.Cause }

// Settle returns when every controller, node and proxy has seen the newest
// change of each kind that it watches, has nothing queued or in flight, and
// wrote nothing while we looked twice. When ctx ends first, the error is an
// *UnsettledError.
func (l *Lab) Settle(ctx context.Context) error {
	tick := time.NewTicker(settleInterval)
	defer tick.Stop()
	calm := false
	before := l.api.NewestRevisions()
	for {
		behind := l.behind(before)
		after := l.api.NewestRevisions()
		still := sameRevisions(before, after)
		if calm && still && len(behind) == 0 {
			return nil
		}
		calm = still && len(behind) == 0
		before = after
		if len(behind) > 0 && l.apiStopped() == FromAll {
			return &UnsettledError{Behind: behind, Cause: errors.New("the API is stopped by a fault; end it with `kplab fault clear api-stopped`")}
		}
		select {
		case <-ctx.Done():
			if len(behind) == 0 {
				behind = []string{"objects are still being written"}
			}
			return &UnsettledError{Behind: behind, Cause: context.Cause(ctx)}
		case <-tick.C:
		}
	}
}

// behind lists each loop that has work left, in words.
func (l *Lab) behind(newest map[string]uint64) []string {
	var out []string
	for _, w := range append(slices.Clone(l.witnesses), l.nodeWitnesses()...) {
		p := w.Snapshot()
		out = append(out, l.behindOf(p, newest)...)
	}
	slices.Sort(out)
	return out
}

func (l *Lab) behindOf(p settle.Progress, newest map[string]uint64) []string {
	out := l.unseen(p, newest)
	if p.Pending > 0 {
		out = append(out, fmt.Sprintf("%s has %d in work", p.Name, p.Pending))
	}
	return out
}

// unseen lists what a loop has not seen yet, in words.
func (l *Lab) unseen(p settle.Progress, newest map[string]uint64) (out []string) {
	for resource, seen := range p.Revs {
		// What was stored before this process began came with the first list,
		// which every handler has had before the lab is ready.
		if want := newest[resource]; seen < want && want > l.startRevision && !slices.Contains(unsettling, resource) {
			out = append(out, fmt.Sprintf("%s has seen %s up to revision %d of %d", p.Name, resource, seen, want))
		}
	}
	return out
}

// answerTime is how long a component may take to see what is stored now.
const answerTime = 2 * time.Second

// keepsUp returns a function that tells whether a component of the control plane is
// alive: it has to see, soon, what is stored at the moment of the question.
func (l *Lab) keepsUp(component string) func(context.Context) error {
	return func(ctx context.Context) error {
		all := l.components.Load()
		if all == nil {
			return errors.New("it has not started yet")
		}
		ctx, cancel := context.WithTimeout(ctx, answerTime)
		defer cancel()
		tick := time.NewTicker(settleInterval)
		defer tick.Stop()
		newest := l.api.NewestRevisions()
		for {
			var behind []string
			for _, w := range (*all)[component] {
				behind = append(behind, l.unseen(w.Snapshot(), newest)...)
			}
			if len(behind) == 0 {
				return nil
			}
			select {
			case <-ctx.Done():
				return &UnsettledError{Behind: behind}
			case <-tick.C:
			}
		}
	}
}

func sameRevisions(a, b map[string]uint64) bool {
	for resource, rev := range b {
		if a[resource] != rev && !slices.Contains(unsettling, resource) {
			return false
		}
	}
	return true
}
