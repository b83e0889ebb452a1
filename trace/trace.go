// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/kplab/kplab/sandbox"
)

// Request is what to trace.
type Request struct {
	// From and To are as `kplab trace` takes them; Namespace is for pods and
	// Services without one.
	From, To, Namespace string
	// Proto is tcp or udp.
	Proto string
	// Count is the number of requests, one after the other; 0 means one.
	Count int
	// Timeout is how long a request may take; 0 means three seconds.
	Timeout time.Duration
}

// tries is how often a request is repeated whose trace is not whole: because events
// were lost, or because the rules changed meanwhile.
const tries = 3

// Run sends the requests of r and reports what became of each. An error means that
// nothing can be told; a request that failed is in the report.
func (l *Lab) Run(ctx context.Context, r Request) (*Report, error) {
	if r.Proto == "" {
		r.Proto = "tcp"
	}
	if r.Timeout == 0 {
		r.Timeout = 3 * time.Second
	}
	x, err := l.Index(ctx)
	if err != nil {
		return nil, err
	}
	from, err := l.Place(r.From, r.Namespace)
	if err != nil {
		return nil, &TargetError{err.Error()}
	}
	target, err := l.parseTarget(r.To, r.Namespace, r.Proto, x)
	if err != nil {
		return nil, err
	}
	if a := target.Addr.Addr(); a.IsValid() && !a.Is4() {
		return nil, badTarget("%q is %s: only IPv4 can be traced", r.To, a)
	}
	if s := x.Service(target.Name); target.Kind == "service" && from.Kind == "outside" && s != nil && len(s.Status.LoadBalancer.Ingress) > 0 {
		// Outside the load balancer's address is the Service's.
		if a, err := netip.ParseAddr(s.Status.LoadBalancer.Ingress[0].IP); err == nil && a.Is4() {
			target.Addr = netip.AddrPortFrom(a, target.Addr.Port())
		}
	}
	rep := &Report{Schema: Schema, From: from.Name, To: r.To, Protocol: r.Proto, Modes: map[string]string{}, Endpoints: map[string]int{}}
	for _, n := range l.opts.Nodes {
		rep.Modes[n.Name] = n.ModeName()
	}
	for range max(r.Count, 1) {
		t, err := l.one(ctx, r, from, target, x)
		if err != nil {
			return nil, err
		}
		rep.Traces = append(rep.Traces, t)
		if t.Verdict.OK() && t.Verdict.Endpoint.IsValid() {
			rep.Endpoints[t.Verdict.Endpoint.String()]++
		}
	}
	return rep, nil
}

// one sends one request, with the look-up of its name.
func (l *Lab) one(ctx context.Context, r Request, from *Place, target Target, x *Index) (*Trace, error) {
	t := &Trace{Started: time.Now(), Target: target}
	if target.Kind == "name" {
		addr, steps, dead := l.lookup(ctx, from, target.Name, x)
		t.Steps = steps
		if dead != nil {
			t.Verdict = *dead
			return t, nil
		}
		t.Target.Addr = x.withPort(addr, target.Addr.Port(), r.Proto)
	}
	if n, kind, ok := x.Owner(t.Target.Addr, r.Proto); ok {
		t.Target.Service = n.String()
		if kind == "nodePort" {
			t.Target.Kind = "nodeport"
		}
	}
	for try := 1; ; try++ {
		whole, err := l.send(ctx, r, from, t, x)
		if err != nil {
			return nil, err
		}
		if whole || try == tries {
			return t, nil
		}
		t.Steps = slices.DeleteFunc(t.Steps, func(s *Step) bool { return s.Leg != Lookup })
		t.Path, t.Notes = nil, nil
	}
}

// watch is everything that is open while a request is under way.
type watch struct {
	places   []*Place
	captures []*capture
	tables   []*markTable
	events   map[*Place]*listener
	programs map[*Place]*program
	gens     map[*Place]uint32
}

func (w *watch) close() error {
	var errs []error
	for _, t := range w.tables {
		errs = append(errs, t.remove())
	}
	for _, l := range w.events {
		l.close()
	}
	for _, c := range w.captures {
		c.close()
	}
	for _, p := range w.programs {
		p.close()
	}
	return errors.Join(errs...)
}

// watch opens everything. The tables that ask for tracing come last: from then on
// the nodes write events.
func (l *Lab) watch(places []*Place, m mark, ports []uint16) (*watch, error) {
	w := &watch{places: places, events: map[*Place]*listener{}, programs: map[*Place]*program{}, gens: map[*Place]uint32{}}
	fail := func(err error) (*watch, error) { return nil, errors.Join(err, w.close()) }
	for _, p := range places {
		c, err := openCapture(p, m, ports)
		if err != nil {
			return fail(err)
		}
		w.captures = append(w.captures, c)
		if p.Kind != "node" {
			continue
		}
		if w.events[p], err = listen(p.ns); err != nil {
			delete(w.events, p)
			return fail(err)
		}
		if w.programs[p], err = openProgram(p.ns, l.lockOf(p)); err != nil {
			delete(w.programs, p)
			return fail(err)
		}
	}
	for p := range w.programs {
		t, err := m.install(p.ns)
		if err != nil {
			return fail(fmt.Errorf("on %s: %w", p.Name, err))
		}
		w.tables = append(w.tables, t)
		if w.gens[p], err = w.programs[p].generation(); err != nil {
			return fail(err)
		}
	}
	return w, nil
}

func (l *Lab) lockOf(p *Place) string {
	if l.opts.XtablesLock == nil {
		return sandbox.NetNSPath(l.opts.Runtime, p.Pin) + ".lock"
	}
	return l.opts.XtablesLock(p.Pin)
}

// send sends one request and tells its story into t. whole is false when something
// was missed.
func (l *Lab) send(ctx context.Context, r Request, from *Place, t *Trace, x *Index) (whole bool, err error) {
	m, payload, err := newMark(r.Proto, t.Target.Addr)
	if err != nil {
		return false, err
	}
	places, err := l.watched(from, x, t.Target)
	if err != nil {
		return false, err
	}
	ports := []uint16{t.Target.Addr.Port()}
	if n, _, ok := x.Owner(t.Target.Addr, r.Proto); ok {
		for _, e := range x.Endpoints(n) {
			if !slices.Contains(ports, e.Addr.Port()) && len(ports) < 20 {
				ports = append(ports, e.Addr.Port())
			}
		}
	}
	w, err := l.watch(places, m, ports)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if err := awaitStamps(ctx); err != nil {
		return false, err
	}
	c, err := dial(from, m, payload, t.Target.Addr)
	if err != nil {
		return false, err
	}
	defer c.close()

	j := &journey{lab: l, x: x, watch: w, mark: m, from: from, trace: t, passes: map[*Place][]*pass{}}
	t.Mark, t.Started = m.String(), time.Now()
	var fds []int
	for _, e := range w.events {
		fds = append(fds, e.fd)
	}
	out := c.run(ctx, r.Timeout, fds, j.collect)
	if err := ctx.Err(); err != nil {
		return false, err
	}
	// Everything that the packet caused was queued before its answer, but for one
	// event: a rule that refuses sends its error before it drops.
	j.collect()
	for _, cp := range w.captures {
		if err := cp.drain(j.addFrame); err != nil {
			return false, err
		}
		if cp.lost {
			j.lost = true
		}
	}
	if err := j.awaitDrop(fds); err != nil {
		return false, err
	}
	j.client, t.Client, t.Took = out, out.local, out.took.Microseconds()
	moved := j.moved()
	// The marking ends here: what follows only reads.
	for _, tb := range w.tables {
		if err := tb.remove(); err != nil {
			return false, err
		}
	}
	w.tables = nil
	if err := j.tell(ctx); err != nil {
		return false, err
	}
	for _, e := range w.events {
		j.lost = j.lost || e.lost
	}
	if j.lost {
		t.Notes = append(t.Notes, "events were lost: there was more traffic than the buffers hold, and steps may be missing")
	}
	if moved {
		t.Notes = append(t.Notes, "the rules changed while the packet was under way: numbers of rules may be those of the new ones")
	}
	return !j.lost && !moved, nil
}
