// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

type namedMode struct {
	Mode
	name string
}

func (m *namedMode) Name() string { return m.name }

func historyPort(name string) *ServicePort {
	return &ServicePort{ServicePortName: ServicePortName{Namespace: "default", Name: name, Protocol: corev1.ProtocolTCP}, Family: corev1.IPv4Protocol}
}

func TestHistory(t *testing.T) {
	var h History
	a, b, c, b2 := historyPort("a"), historyPort("b"), historyPort("c"), historyPort("b")
	one, two := &namedMode{name: "one"}, &namedMode{name: "two"}
	step := func(m Mode, rev uint64, ports ...*ServicePort) {
		h.record(time.Unix(int64(rev), 0), m, &Snapshot{Node: "n", Services: ports}, map[string]uint64{"services": rev})
	}
	step(one, 1, a, b)
	step(one, 2, a, b) // nothing: not kept
	step(one, 3, a, b2, c)
	step(one, 4, b2)
	step(two, 5, b2)
	var got []string
	for _, e := range h.Entries() {
		var text []string
		for _, ch := range e.Changes {
			switch {
			case ch.Before == nil:
				text = append(text, "+"+ch.After.Name)
			case ch.After == nil:
				text = append(text, "-"+ch.Before.Name)
			default:
				text = append(text, "~"+ch.After.Name)
			}
		}
		got = append(got, fmt.Sprintf("%d %s whole=%t was=%t [%s] %d", e.Revision(), e.Mode, e.Whole != nil, e.Was != "", strings.Join(text, " "), len(e.Part(e.Changes, true).Services)))
	}
	want := []string{"1 one whole=true was=false [] 0", "3 one whole=false was=false [~b +c] 2", "4 one whole=false was=false [-a -c] 0", "5 two whole=true was=true [] 0"}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestHistoryIsBounded(t *testing.T) {
	var h History
	modes := []Mode{&namedMode{name: "one"}, &namedMode{name: "two"}}
	for i := range 3 * mostApplied {
		h.record(time.Unix(int64(i), 0), modes[i/100%2], &Snapshot{Services: []*ServicePort{historyPort("a")}}, nil)
	}
	entries := h.Entries()
	whole := 0
	for _, e := range entries {
		if e.Whole != nil {
			whole++
		}
	}
	if len(entries) != mostApplied || whole > mostSwitches || whole == 0 {
		t.Errorf("%d entries with %d whole snapshots, want %d with 1 to %d", len(entries), whole, mostApplied, mostSwitches)
	}
}
