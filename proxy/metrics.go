// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Metric is one metric of a mode, by the name that kube-proxy has for it.
type Metric struct {
	Name, Kind, Help string
	// Labels is the part in braces, without them; "" for none.
	Labels string
	Value  float64
}

// Meter is implemented by modes that have metrics of their own.
type Meter interface {
	// Metrics gives what there is after an Apply; samples of one name stand together.
	Metrics() []Metric
}

// Partial is implemented by modes that tell a sync of all rules from one of the rules
// that changed.
type Partial interface {
	// AppliedFully says that the last Apply looked at every rule.
	AppliedFully() bool
}

// Counters is implemented by modes whose rules count packets in the kernel.
type Counters interface {
	// Counters reads them. It may run at the same time as any other method.
	Counters() []Metric
}

// histogram counts durations by kube-proxy's buckets of the same metric.
type histogram struct {
	bounds []float64
	counts []uint64 // one more than bounds
	sum    float64
}

func newHistogram(bounds []float64) *histogram {
	return &histogram{bounds: bounds, counts: make([]uint64, len(bounds)+1)}
}

func (h *histogram) observe(d time.Duration) {
	i, _ := slices.BinarySearch(h.bounds, d.Seconds())
	h.counts[i]++
	h.sum += d.Seconds()
}

// write adds the samples; labels are those of every sample.
func (h *histogram) write(b *strings.Builder, name, labels string) {
	n := uint64(0)
	for i, bound := range append(slices.Clone(h.bounds), math.Inf(1)) {
		n += h.counts[i]
		fmt.Fprintf(b, "%s_bucket{%s,le=\"%s\"} %d\n", name, labels, number(bound), n)
	}
	fmt.Fprintf(b, "%s_sum{%s} %s\n%s_count{%s} %d\n", name, labels, number(h.sum), name, labels, n)
}

func number(f float64) string {
	if math.IsInf(f, 1) {
		return "+Inf"
	}
	return strconv.FormatFloat(f, 'g', -1, 64)
}

// syncBuckets are 1 ms, doubled 14 times.
func syncBuckets() []float64 {
	out := make([]float64, 15)
	for i := range out {
		out[i] = 0.001 * float64(uint(1)<<i)
	}
	return out
}

// programmingBuckets are finer where the time matters.
func programmingBuckets() []float64 {
	out := []float64{0.25, 0.5}
	for s := 1; s < 60; s++ {
		out = append(out, float64(s))
	}
	for s := 60; s < 120; s += 5 {
		out = append(out, float64(s))
	}
	for s := 120; s <= 300; s += 30 {
		out = append(out, float64(s))
	}
	return out
}

// metrics is what a proxy counts. It is safe for concurrent use.
type metrics struct {
	mu sync.Mutex
	// Durations of syncs, of those that looked at everything and those that did not
	// (of modes that tell), of the time from the change of an endpoint to the rule,
	// and of the clean-up of connection tracking.
	sync, full, partial, programming, conntrack *histogram
	// Changes of Services and slices, since the start and since the last sync.
	serviceChanges, endpointChanges, servicesPending, endpointsPending int
	deleted, failures                                                  int
	// triggered is when the changes that wait for a sync were caused.
	triggered []time.Time
	// answers of /healthz and /livez by path and code.
	answers map[[2]string]int
	mode    []Metric
}

func newMetrics() *metrics {
	return &metrics{
		sync: newHistogram(syncBuckets()), full: newHistogram(syncBuckets()), partial: newHistogram(syncBuckets()),
		programming: newHistogram(programmingBuckets()), conntrack: newHistogram(syncBuckets()), answers: map[[2]string]int{},
	}
}

// changed counts an event; at is when the change of an endpoint was caused, by the
// slice's annotation, zero when it does not say.
func (m *metrics) changed(resource string, at time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch resource {
	case "services":
		m.serviceChanges++
		m.servicesPending++
	case "endpointslices":
		m.endpointChanges++
		m.endpointsPending++
		if !at.IsZero() {
			m.triggered = append(m.triggered, at)
		}
	}
}

// begin takes the changes that a sync is about to apply.
func (m *metrics) begin() (services, endpoints int, triggered []time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	triggered = m.triggered
	m.triggered = nil
	return m.servicesPending, m.endpointsPending, triggered
}

// applied counts a good sync.
func (m *metrics) applied(took time.Duration, services, endpoints int, triggered []time.Time, now time.Time, mode Mode) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sync.observe(took)
	if p, ok := mode.(Partial); ok {
		if p.AppliedFully() {
			m.full.observe(took)
		} else {
			m.partial.observe(took)
		}
	}
	m.servicesPending -= services
	m.endpointsPending -= endpoints
	for _, at := range triggered {
		// What was there before the proxy began says nothing about it.
		if d := now.Sub(at); d >= 0 && d < 5*time.Minute {
			m.programming.observe(d)
		}
	}
	m.mode = nil
	if mm, ok := mode.(Meter); ok {
		m.mode = mm.Metrics()
	}
}

func (m *metrics) failed(triggered []time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failures++
	m.triggered = append(triggered, m.triggered...)
}

func (m *metrics) cleaned(took time.Duration, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.conntrack.observe(took)
	m.deleted += n
}

func (m *metrics) answered(path string, code int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.answers[[2]string{path, strconv.Itoa(code)}]++
}

// page is what /metrics says.
func (m *metrics) page(p *Proxy) string {
	st, current := p.Status(), p.Current()
	p.mu.Lock()
	mode, family := p.cfg.Mode, p.family()
	p.mu.Unlock()
	var kernel []Metric
	if c, ok := mode.(Counters); ok {
		kernel = c.Counters()
	}
	label := `ip_family="` + string(family) + `"`
	external, internal := current.noLocalEndpoints()

	m.mu.Lock()
	defer m.mu.Unlock()
	var b strings.Builder
	head := func(name, kind, help string) { fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind) }
	one := func(name, kind, help, labels string, value float64) {
		head(name, kind, help)
		fmt.Fprintf(&b, "%s%s %s\n", name, braces(labels), number(value))
	}
	dist := func(name, help string, h *histogram) {
		head(name, "histogram", help)
		h.write(&b, name, label)
	}
	const rules = "kubeproxy_sync_proxy_rules_"
	dist(rules+"duration_seconds", "How long a sync of the rules took.", m.sync)
	if m.full.total() > 0 || m.partial.total() > 0 {
		dist("kubeproxy_sync_full_proxy_rules_duration_seconds", "How long a sync of all rules took.", m.full)
		dist("kubeproxy_sync_partial_proxy_rules_duration_seconds", "How long a sync of the rules that changed took.", m.partial)
	}
	dist("kubeproxy_network_programming_duration_seconds", "Time from the cause of an endpoint's change to the rule.", m.programming)
	one(rules+"last_timestamp_seconds", "gauge", "When the rules were last synced.", label, seconds(st.Applied))
	one(rules+"last_queued_timestamp_seconds", "gauge", "Since when a change waits to be synced.", label, seconds(st.Queued))
	one(rules+"service_changes_total", "counter", "Changes of Services.", label, float64(m.serviceChanges))
	one(rules+"service_changes_pending", "gauge", "Changes of Services that wait for a sync.", label, float64(m.servicesPending))
	one(rules+"endpoint_changes_total", "counter", "Changes of EndpointSlices.", label, float64(m.endpointChanges))
	one(rules+"endpoint_changes_pending", "gauge", "Changes of EndpointSlices that wait for a sync.", label, float64(m.endpointsPending))
	head(rules+"no_local_endpoints_total", "gauge", "Services with a Local traffic policy and no local endpoint.")
	fmt.Fprintf(&b, "%sno_local_endpoints_total{%s,traffic_policy=\"external\"} %d\n", rules, label, external)
	fmt.Fprintf(&b, "%sno_local_endpoints_total{%s,traffic_policy=\"internal\"} %d\n", rules, label, internal)
	dist("kubeproxy_conntrack_reconciler_sync_duration_seconds", "How long a clean-up of connection tracking took.", m.conntrack)
	one("kubeproxy_conntrack_reconciler_deleted_entries_total", "counter", "Stale entries of connection tracking that were deleted.", label, float64(m.deleted))
	for _, path := range []string{"healthz", "livez"} {
		name := "kubeproxy_proxy_" + path + "_total"
		head(name, "counter", "Answers of /"+path+" by code.")
		for _, key := range slices.SortedFunc(maps.Keys(m.answers), func(a, b [2]string) int { return strings.Compare(a[1], b[1]) }) {
			if key[0] == path {
				fmt.Fprintf(&b, "%s{code=\"%s\"} %d\n", name, key[1], m.answers[key])
			}
		}
		if m.answers[[2]string{path, "200"}] == 0 {
			fmt.Fprintf(&b, "%s{code=\"200\"} 0\n", name)
		}
	}
	last := ""
	for _, s := range append(slices.Clone(m.mode), kernel...) {
		if s.Name != last {
			head(s.Name, s.Kind, s.Help)
			last = s.Name
		}
		fmt.Fprintf(&b, "%s%s %s\n", s.Name, braces(s.Labels), number(s.Value))
	}
	one("kplab_proxy_syncs_total", "counter", "Syncs since the proxy started.", "", float64(st.Syncs))
	one("kplab_proxy_sync_failures_total", "counter", "Failed syncs since the proxy started.", "", float64(st.Failures))
	one("kplab_proxy_repairs_total", "counter", "How often somebody else had changed or removed the rules.", "", float64(st.Repairs))
	return b.String()
}

func (h *histogram) total() uint64 {
	n := uint64(0)
	for _, c := range h.counts {
		n += c
	}
	return n
}

func braces(labels string) string {
	if labels == "" {
		return ""
	}
	return "{" + labels + "}"
}

func seconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMicro()) / 1e6
}

// family is the one that metrics are labelled with: a proxy here serves all families of
// its node in one sync, and says the first. Call it with the lock held.
func (p *Proxy) family() corev1.IPFamily { return FamilyOf(p.facts.NodeIPs[0]) }
