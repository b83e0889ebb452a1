// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"slices"
	"sync"
	"time"
)

// Limits of what a History keeps. Service ports are shared with the snapshots that
// they come from, so an entry costs a few hundred bytes and what changed; whole
// snapshots, a pointer for each Service port, are kept for changes of the mode only.
const (
	mostApplied  = 512
	mostChanges  = 4096
	mostSwitches = 4
)

// Change is a Service port that an apply made, altered or removed: nil Before is
// new, nil After is gone.
type Change struct{ Before, After *ServicePort }

// Applied is one sync that changed the kernel, read back.
type Applied struct {
	At time.Time
	// Mode and Form name what encoded it, see [Former].
	Mode, Form string
	// Revisions are the newest revisions, by resource, that it reflects.
	Revisions map[string]uint64
	// Frame is the snapshot without its Services: what they are rendered in.
	Frame   Snapshot
	Changes []Change
	// Whole is all of what was applied, where this was the first apply or another
	// mode's than before; Was and WasForm name the mode before, empty for the first.
	Whole        *Snapshot
	Was, WasForm string
}

// Former is implemented by modes that write one of several forms, such as a layout.
type Former interface {
	// Form names the form.
	Form() string
}

func formOf(m Mode) string {
	if f, ok := m.(Former); ok {
		return f.Form()
	}
	return ""
}

// Revision is the newest revision of a Service or EndpointSlice that the apply
// reflects.
func (a *Applied) Revision() uint64 {
	return max(a.Revisions["services"], a.Revisions["endpointslices"])
}

// Part is the Service ports of one side of the changes, as a snapshot that can be
// rendered.
func (a *Applied) Part(changes []Change, after bool) *Snapshot {
	s := a.Frame
	for _, c := range changes {
		p := c.Before
		if after {
			p = c.After
		}
		if p != nil {
			s.Services = append(s.Services, p)
		}
	}
	slices.SortFunc(s.Services, CompareServicePorts)
	return &s
}

// History is what a proxy has applied lately. Its zero value is empty.
type History struct {
	mu      sync.Mutex
	entries []*Applied
	changes int
	last    *Snapshot
	mode    string
	form    string
}

// record notes an apply. What changed is found by comparing pointers: a Service
// port that is the same value is the same pointer.
func (h *History) record(at time.Time, mode Mode, now *Snapshot, revisions map[string]uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e := &Applied{At: at, Mode: mode.Name(), Form: formOf(mode), Revisions: revisions, Frame: *now}
	e.Frame.Services = nil
	if h.last == nil || h.mode != e.Mode || h.form != e.Form {
		e.Whole, e.Was, e.WasForm = now, h.mode, h.form
	}
	if h.last != nil {
		e.Changes = changed(h.last.Services, now.Services)
	}
	h.last, h.mode, h.form = now, e.Mode, e.Form
	if len(e.Changes) == 0 && e.Whole == nil {
		return
	}
	h.entries = append(h.entries, e)
	h.changes += len(e.Changes)
	for len(h.entries) > 1 && (len(h.entries) > mostApplied || h.changes > mostChanges) {
		h.changes -= len(h.entries[0].Changes)
		h.entries = h.entries[1:]
	}
	whole := 0
	for _, old := range slices.Backward(h.entries) {
		if old.Whole != nil {
			if whole++; whole > mostSwitches {
				old.Whole = nil
			}
		}
	}
}

// changed compares two lists in the order of snapshots.
func changed(old, now []*ServicePort) []Change {
	var out []Change
	for i, j := 0, 0; i < len(old) || j < len(now); {
		order := 0
		switch {
		case i == len(old):
			order = 1
		case j == len(now):
			order = -1
		case old[i] != now[j]:
			order = CompareServicePorts(old[i], now[j])
		}
		switch {
		case order < 0:
			out = append(out, Change{Before: old[i]})
			i++
		case order > 0:
			out = append(out, Change{After: now[j]})
			j++
		default:
			if old[i] != now[j] {
				out = append(out, Change{old[i], now[j]})
			}
			i++
			j++
		}
	}
	return out
}

// Entries are what was applied, oldest first. They are not changed any more.
func (h *History) Entries() []*Applied {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.entries)
}

// History is what the proxy has applied lately.
func (p *Proxy) History() *History { return &p.history }
