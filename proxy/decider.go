// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// objectName is a namespaced name.
type objectName struct{ namespace, name string }

func (n objectName) compare(o objectName) int {
	return cmp.Or(strings.Compare(n.namespace, o.namespace), strings.Compare(n.name, o.name))
}

// entry is what a Decider knows of one Service name.
type entry struct {
	name    objectName
	service *corev1.Service
	// slices is keyed by the slice's name; each belongs to this Service.
	slices   map[string]*discoveryv1.EndpointSlice
	decision *serviceDecision // nil when it has to be decided again
}

// Decider holds the Services and slices of a cluster and decides snapshots. It
// remembers what it decided for each Service, so that a change costs the
// Services it touches; unchanged ones keep their *ServicePort values from one
// snapshot to the next. It is not safe for concurrent use, and it keeps the
// objects it is given, which must not change afterwards.
type Decider struct {
	facts   Facts
	entries map[objectName]*entry
	// owner remembers to which Service a slice belonged, for slices whose label
	// changes and for deletions that carry a stale object.
	owner map[objectName]string
	// order is the entries sorted by name, nil when it has to be made again.
	order []*entry
}

// NewDecider returns a Decider that knows nothing.
func NewDecider() *Decider {
	return &Decider{entries: map[objectName]*entry{}, owner: map[objectName]string{}}
}

func (d *Decider) entry(n objectName) *entry {
	e := d.entries[n]
	if e == nil {
		e = &entry{name: n, slices: map[string]*discoveryv1.EndpointSlice{}}
		d.entries[n] = e
		d.order = nil
	}
	return e
}

// drop forgets an entry that holds nothing any more.
func (d *Decider) drop(n objectName) {
	if e := d.entries[n]; e != nil && e.service == nil && len(e.slices) == 0 {
		delete(d.entries, n)
		d.order = nil
	}
}

// SetService adds a Service or replaces the one of the same name.
func (d *Decider) SetService(svc *corev1.Service) {
	e := d.entry(objectName{svc.Namespace, svc.Name})
	e.service, e.decision = svc, nil
}

// DeleteService forgets a Service; its slices are kept until they are deleted.
func (d *Decider) DeleteService(namespace, name string) {
	n := objectName{namespace, name}
	if e := d.entries[n]; e != nil {
		e.service, e.decision = nil, nil
		d.drop(n)
	}
}

// SetSlice adds a slice or replaces the one of the same name. A slice without
// the label kubernetes.io/service-name belongs to no Service.
func (d *Decider) SetSlice(slice *discoveryv1.EndpointSlice) {
	key := objectName{slice.Namespace, slice.Name}
	owner := slice.Labels[discoveryv1.LabelServiceName]
	if old, known := d.owner[key]; known && old != owner {
		d.DeleteSlice(slice.Namespace, slice.Name)
	}
	if owner == "" {
		return
	}
	d.owner[key] = owner
	e := d.entry(objectName{slice.Namespace, owner})
	e.slices[slice.Name], e.decision = slice, nil
}

// DeleteSlice forgets a slice.
func (d *Decider) DeleteSlice(namespace, name string) {
	key := objectName{namespace, name}
	owner, known := d.owner[key]
	if !known {
		return
	}
	delete(d.owner, key)
	n := objectName{namespace, owner}
	if e := d.entries[n]; e != nil {
		delete(e.slices, name)
		e.decision = nil
		d.drop(n)
	}
}

// Decide makes the snapshot for the objects held now.
func (d *Decider) Decide(facts Facts) *Snapshot {
	if !facts.equal(&d.facts) {
		for _, e := range d.entries {
			e.decision = nil
		}
		d.facts = facts
	}
	if d.order == nil {
		d.order = make([]*entry, 0, len(d.entries))
		for _, e := range d.entries {
			d.order = append(d.order, e)
		}
		slices.SortFunc(d.order, func(a, b *entry) int { return a.name.compare(b.name) })
	}
	decisions := make([]*serviceDecision, 0, len(d.order))
	for _, e := range d.order {
		if e.service == nil {
			continue
		}
		if e.decision == nil {
			dec := decideService(&d.facts, e.service, e.sortedSlices())
			e.decision = &dec
		}
		decisions = append(decisions, e.decision)
	}
	return assemble(&d.facts, decisions)
}

// sortedSlices gives the slices in the order of their names, so that the
// decision does not depend on the order of events.
func (e *entry) sortedSlices() []*discoveryv1.EndpointSlice {
	out := make([]*discoveryv1.EndpointSlice, 0, len(e.slices))
	for _, s := range e.slices {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	return out
}
