// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// WhySchema names the form of a Diagnosis; it changes when a field loses its meaning.
const WhySchema = "kplab/why/v1"

// WhyRequest is what to look into.
type WhyRequest struct {
	// Service is [NS/]NAME[:PORT], with or without "svc/" before it.
	Service string
	// From is where the Service is asked from, as `kplab trace` takes it; empty is a
	// worker node.
	From string
	// Namespace is for names without one.
	Namespace string
	// Timeout is how long the probe may take; 0 means one second.
	Timeout time.Duration
	// Known are the faults that the lab has made on purpose.
	Known []KnownFault
}

// KnownFault is a fault that the lab's daemon knows of.
type KnownFault struct {
	ID, Kind string
	// Node is where it is; empty is everywhere.
	Node string
	// Says is the fault in a sentence.
	Says string
}

// Diagnosis is what was found out about a Service.
type Diagnosis struct {
	Schema  string `json:"schema"`
	Service string `json:"service"`
	From    string `json:"from"`
	Healthy bool   `json:"healthy"`
	// Causes are in the order of the path from the API to the endpoint. The first is the
	// one to mend first.
	Causes []Cause `json:"causes,omitempty"`
	// Probe is what one real request met; nil when there was no address to send one to.
	Probe *Verdict `json:"probe,omitempty"`
	// Checked are the names of what was looked at, in order.
	Checked []string `json:"checked"`
	// Notes are what is worth knowing and breaks nothing.
	Notes []string `json:"notes,omitempty"`
	Took  int64    `json:"tookMicroseconds"`
}

// Cause is one thing that is wrong.
type Cause struct {
	// Reason is a word for scripts; docs/why.md lists them.
	Reason string `json:"reason"`
	// Text says it in a sentence, Fix what to do about it.
	Text string `json:"text"`
	Fix  string `json:"fix,omitempty"`
	// Evidence is what was read, and where.
	Evidence []string `json:"evidence,omitempty"`
	// stops says that what is checked behind it has nothing to look at.
	stops bool
}

// patient is the Service under examination and what the checks share.
type patient struct {
	lab *Lab
	req WhyRequest
	ctx context.Context
	x   *Index

	key, port string // NS/NAME and what stood behind the colon
	svc       *corev1.Service
	spec      *corev1.ServicePort
	selected  []*corev1.Pod // by the selector
	from      *Place

	probe  *Verdict
	target Target
	events map[string][]corev1.Event // by pod, read when asked for
	notes  []string
}

// check is one thing to look at. It returns what is wrong; a cause that stops ends the
// examination, because what follows it has nothing to look at.
type check struct {
	name string
	look func(*patient) []Cause
}

// whyChecks is the path of a Service from the API to the program that answers, in the
// order in which one thing needs another.
func whyChecks() []check {
	return []check{
		{"the Service exists", serviceExists},
		{"it is not being deleted", serviceStays},
		{"it has the port", portExists},
		{"its outside name resolves", externalName},
		{"its selector finds pods", selectorMatches},
		{"its pods run", podsRun},
		{"its pods are ready", podsReady},
		{"its named port is known to the pods", namedPort},
		{"EndpointSlices name the pods", slicesComplete},
		{"a program listens on the target port", programListens},
		{"it can be reached from there", reachable},
		{"a request is answered", requestAnswered},
		{"every endpoint can be reached", endpointsReached},
		{"the rules name every endpoint", rulesComplete},
		// Behind those: names come through the same rules and links.
		{"the name resolves", nameResolves},
		{"no flow is stuck to an endpoint that has gone", flowsFresh},
		{"every packet fits on the way", packetsFit},
	}
}

// Why walks from the API to the kernel and says what is wrong with a Service. An error
// means that nothing can be told.
func (l *Lab) Why(ctx context.Context, r WhyRequest) (*Diagnosis, error) {
	start := time.Now()
	if r.Timeout == 0 {
		r.Timeout = time.Second
	}
	name := r.Service
	for _, prefix := range []string{"svc/", "service/", "services/"} {
		name = strings.TrimPrefix(name, prefix)
	}
	name, port, _ := cutPort(name)
	if kind, _, ok := strings.Cut(name, "/"); ok && slices.Contains([]string{"pod", "pods", "node", "nodes", "deployment", "deploy"}, kind) {
		return nil, badTarget("%q is no Service: want svc/[NAMESPACE/]NAME[:PORT]", r.Service)
	}
	if name == "" || strings.Count(name, "/") > 1 {
		return nil, badTarget("%q: want svc/[NAMESPACE/]NAME[:PORT]", r.Service)
	}
	l.queryTime = r.Timeout
	defer func() { l.queryTime = 0 }()
	x, err := l.Index(ctx)
	if err != nil {
		return nil, err
	}
	p := &patient{lab: l, req: r, ctx: ctx, x: x, key: qualify(name, r.Namespace), port: port, events: map[string][]corev1.Event{}}
	if p.from, err = l.whyFrom(r); err != nil {
		return nil, &TargetError{err.Error()}
	}
	d := &Diagnosis{Schema: WhySchema, Service: p.key, From: p.from.Name}
	for _, c := range whyChecks() {
		found := c.look(p)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		d.Checked = append(d.Checked, c.name)
		d.Causes = append(d.Causes, found...)
		if slices.ContainsFunc(found, func(c Cause) bool { return c.stops }) {
			break
		}
	}
	d.Causes = p.mostTelling(d.Causes)
	d.Probe, d.Notes, d.Healthy, d.Took = p.probe, p.notes, len(d.Causes) == 0, time.Since(start).Microseconds()
	return d, nil
}

// whyFrom is where to ask from: what was said, else a worker, since its node's path is
// the one that most requests take.
func (l *Lab) whyFrom(r WhyRequest) (*Place, error) {
	if r.From != "" {
		return l.Place(r.From, r.Namespace)
	}
	var last error
	for _, n := range slices.Backward(l.opts.Nodes) {
		p, err := l.Place(n.Name, "")
		if err == nil && n.Name != l.opts.Nodes[0].Name {
			return p, nil
		}
		last = err
		if n.Name == l.opts.Nodes[0].Name {
			return p, err
		}
	}
	return nil, last
}

// mostTelling drops what only repeats: the failed request says nothing new beside the
// cause that was found before it.
func (p *patient) mostTelling(all []Cause) []Cause {
	var out []Cause
	for _, c := range all {
		if c.Reason == "" {
			continue // it only ended the examination
		}
		if slices.ContainsFunc(out, func(o Cause) bool { return o.Reason == c.Reason }) {
			continue
		}
		if echo(c.Reason) && len(out) > 0 {
			continue
		}
		out = append(out, c)
	}
	return out
}

// echo tells reasons of a failed request that any cause before it explains.
func echo(reason string) bool {
	return slices.Contains([]string{"no-endpoints", "no-answer", "no-listener", "refused", "lost", "not-sent", "timeout"}, reason)
}

// known returns the lab's own fault of one of these kinds that can be felt on a node.
func (p *patient) known(node string, kinds ...string) *KnownFault {
	for i := range p.req.Known {
		f := &p.req.Known[i]
		if slices.Contains(kinds, f.Kind) && (f.Node == "" || node == "" || f.Node == node) {
			return f
		}
	}
	return nil
}

// blame adds a fault that the lab knows of to a cause.
func (f *KnownFault) blame(c *Cause) {
	if f == nil {
		return
	}
	c.Evidence = append(c.Evidence, fmt.Sprintf("kplab fault list: %s %s: %s", f.ID, f.Kind, f.Says))
	c.Fix = "kplab fault clear " + f.ID
}

// ready returns the endpoints of the Service's port that take new connections.
func (p *patient) ready() []EndpointRef {
	var out []EndpointRef
	for _, e := range p.endpoints() {
		if e.Ready {
			out = append(out, e)
		}
	}
	return out
}

func (p *patient) endpoints() []EndpointRef {
	if p.spec == nil {
		return nil
	}
	return p.x.Endpoints(PortName(p.svc, p.spec))
}

// clusterIP is the Service's first address; invalid for a headless one.
func (p *patient) clusterIP() netip.Addr {
	a, _ := netip.ParseAddr(p.svc.Spec.ClusterIP) // "None" and "" are no addresses
	return a
}

func (p *patient) headless() bool { return p.svc.Spec.ClusterIP == corev1.ClusterIPNone }

func (p *patient) proto() string { return protoName(p.spec.Protocol) }

// kubectl is a command that a person can type.
func (p *patient) kubectl(format string, args ...any) string {
	return "kubectl -n " + p.namespace() + " " + fmt.Sprintf(format, args...)
}

func (p *patient) namespace() string {
	ns, _, _ := strings.Cut(p.key, "/")
	return ns
}

func (p *patient) name() string { return afterSlash(p.key) }
