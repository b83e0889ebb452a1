// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/nftables"
)

// mostAPIChanges is how many changes of Services and EndpointSlices are remembered.
const mostAPIChanges = 2048

// APIChange is a change of a Service or of one of its EndpointSlices.
type APIChange struct {
	Revision uint64    `json:"revision"`
	At       time.Time `json:"at"`
	// Verb is added, modified or deleted; Object is KIND/NS/NAME.
	Verb    string `json:"verb"`
	Object  string `json:"object"`
	Service string `json:"service"` // NS/NAME
	// What says in words what changed.
	What []string `json:"what,omitempty"`
}

// RuleChange is what one apply changed in a node's kernel: the text of what it
// concerns before and after, as the mode's tool has it.
type RuleChange struct {
	Node string    `json:"node"`
	At   time.Time `json:"at"`
	// Revision is the newest revision of a Service or EndpointSlice that the node had
	// applied then, From the one of the apply before the first change.
	From     uint64 `json:"from"`
	Revision uint64 `json:"revision"`
	// Was and Mode are the modes before and after, the same unless the mode changed.
	Was    string `json:"was"`
	Mode   string `json:"mode"`
	Before string `json:"before"`
	After  string `json:"after"`
}

// ServiceLog is the history of a Service: what changed in the API, and in kernels.
type ServiceLog struct {
	Service string       `json:"service"`
	API     []APIChange  `json:"api"`
	Rules   []RuleChange `json:"rules"`
	// Since is when the daemon began to remember.
	Since time.Time `json:"since"`
}

// apiHistory remembers the last changes of Services and EndpointSlices.
type apiHistory struct {
	mu      sync.Mutex
	changes []APIChange
}

func (h *apiHistory) add(c APIChange) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c.At = time.Now()
	if len(h.changes) >= mostAPIChanges {
		h.changes = slices.Delete(h.changes, 0, len(h.changes)-mostAPIChanges+1)
	}
	h.changes = append(h.changes, c)
}

func (h *apiHistory) of(service string) []APIChange {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []APIChange
	for _, c := range h.changes {
		if c.Service == service {
			out = append(out, c)
		}
	}
	return out
}

// watchHistory remembers changes from now on.
func (l *Lab) watchHistory() error {
	_, serr := l.informers.Core().V1().Services().Informer().AddEventHandler(handlers(func(verb string, old, now *corev1.Service) {
		s := now
		if s == nil {
			s = old
		}
		key := s.Namespace + "/" + s.Name
		l.history.add(APIChange{Revision: revisionOf(s.ResourceVersion), Verb: verb, Object: "service/" + key, Service: key, What: serviceChanges(old, now)})
	}))
	_, eerr := l.informers.Discovery().V1().EndpointSlices().Informer().AddEventHandler(handlers(func(verb string, old, now *discoveryv1.EndpointSlice) {
		s := now
		if s == nil {
			s = old
		}
		l.history.add(APIChange{
			Revision: revisionOf(s.ResourceVersion), Verb: verb, Object: "endpointslice/" + s.Namespace + "/" + s.Name,
			Service: s.Namespace + "/" + s.Labels[discoveryv1.LabelServiceName], What: sliceChanges(old, now),
		})
	}))
	return errors.Join(serr, eerr)
}

// handlers hears of objects of one kind; old is nil when one is new, now when it is
// gone.
func handlers[T any](fn func(verb string, old, now *T)) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { fn("added", nil, obj.(*T)) },
		UpdateFunc: func(old, now any) {
			if any(old) != any(now) { // a resync tells of what did not change
				fn("modified", old.(*T), now.(*T))
			}
		},
		DeleteFunc: func(obj any) {
			if tomb, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = tomb.Obj
			}
			fn("deleted", obj.(*T), nil)
		},
	}
}

func revisionOf(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0 // the store's are decimal
	}
	return n
}

// serviceChanges says what differs in the fields that rules come from.
func serviceChanges(old, now *corev1.Service) []string {
	facts := func(s *corev1.Service) []string {
		if s == nil {
			return make([]string, 6)
		}
		var ports, selector, lb []string
		for _, p := range s.Spec.Ports {
			text := fmt.Sprintf("%d→%s/%s", p.Port, p.TargetPort.String(), p.Protocol)
			if p.NodePort != 0 {
				text += fmt.Sprintf(" nodePort %d", p.NodePort)
			}
			ports = append(ports, strings.TrimPrefix(p.Name+" "+text, " "))
		}
		for k, v := range s.Spec.Selector {
			selector = append(selector, k+"="+v)
		}
		slices.Sort(selector)
		for _, in := range s.Status.LoadBalancer.Ingress {
			lb = append(lb, in.IP)
		}
		policy := ""
		if s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal {
			policy = "internal Local"
		}
		if s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
			policy = strings.TrimPrefix(policy+", external Local", ", ")
		}
		return []string{string(s.Spec.Type) + " " + strings.Join(s.Spec.ClusterIPs, ","), strings.Join(ports, ", "), strings.Join(selector, ","), policy, string(s.Spec.SessionAffinity), strings.Join(lb, ",")}
	}
	names := []string{"type and address", "ports", "selector", "traffic policy", "session affinity", "load balancer"}
	a, b := facts(old), facts(now)
	var out []string
	for i := range names {
		switch {
		case a[i] == b[i] || now == nil:
		case old == nil:
			if b[i] != "None" {
				out = append(out, names[i]+": "+b[i])
			}
		default:
			out = append(out, fmt.Sprintf("%s: %s → %s", names[i], orNothing(a[i]), orNothing(b[i])))
		}
	}
	return out
}

func orNothing(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// sliceChanges says which endpoints came, went or changed their state.
func sliceChanges(old, now *discoveryv1.EndpointSlice) []string {
	state := func(s *discoveryv1.EndpointSlice) map[string]string {
		out := map[string]string{}
		if s == nil {
			return out
		}
		for _, e := range s.Endpoints {
			text := "ready"
			if e.Conditions.Ready != nil && !*e.Conditions.Ready {
				text = "not ready"
			}
			if e.Conditions.Terminating != nil && *e.Conditions.Terminating {
				text += ", terminating"
			}
			if e.Conditions.Serving != nil && *e.Conditions.Serving && strings.HasPrefix(text, "not") {
				text += ", serving"
			}
			who := strings.Join(e.Addresses, ",")
			if e.TargetRef != nil {
				who += " (" + strings.ToLower(e.TargetRef.Kind) + " " + e.TargetRef.Name + ")"
			}
			out[who] = text
		}
		return out
	}
	a, b := state(old), state(now)
	var out []string
	for who, was := range a {
		switch is, there := b[who]; {
		case !there:
			out = append(out, "endpoint "+who+" is gone")
		case is != was:
			out = append(out, fmt.Sprintf("endpoint %s: %s → %s", who, was, is))
		}
	}
	for who, is := range b {
		if _, was := a[who]; !was {
			out = append(out, fmt.Sprintf("endpoint %s: %s", who, is))
		}
	}
	slices.Sort(out)
	return out
}

// DiffRequest chooses what [Lab.Diff] compares.
type DiffRequest struct {
	// Node is the node's name; empty is the control plane.
	Node string
	// From and To are revisions; 0 and 0 mean the last change, To 0 the present.
	From, To uint64
	// SinceSwitch compares the rules before the last change of the mode with those
	// after it.
	SinceSwitch bool
}

// ErrNoHistory says that nothing is remembered of what was asked for.
var ErrNoHistory = errors.New("nothing is remembered of that")

// Diff says what changed in a node's kernel.
func (l *Lab) Diff(r DiffRequest) (RuleChange, error) {
	if r.Node == "" {
		r.Node = l.cfg.APINode().Name
	}
	p := l.proxies[r.Node]
	if p == nil {
		return RuleChange{}, fmt.Errorf("no node is called %q", r.Node)
	}
	entries := p.History().Entries()
	if r.SinceSwitch {
		for _, e := range slices.Backward(entries) {
			if e.Whole != nil && e.Was != "" {
				return l.switchDiff(r.Node, e)
			}
		}
		return RuleChange{}, fmt.Errorf("node %s: the mode of its proxy has not changed since the daemon started: %w", r.Node, ErrNoHistory)
	}
	if r.From == 0 && r.To == 0 {
		return l.lastDiff(r.Node, entries)
	}
	var chosen []*proxy.Applied
	from := uint64(0)
	for _, e := range entries {
		rev := e.Revision()
		if rev > r.From && (r.To == 0 || rev <= r.To) {
			chosen = append(chosen, e)
		} else if len(chosen) == 0 {
			from = rev
		}
	}
	if len(chosen) == 0 {
		oldest := "nothing was applied yet"
		if len(entries) > 0 {
			oldest = fmt.Sprintf("it goes back to revision %d, and its newest is %d", entries[0].Revision(), entries[len(entries)-1].Revision())
		}
		return RuleChange{}, fmt.Errorf("node %s: no change of rules between those revisions: %w; %s", r.Node, ErrNoHistory, oldest)
	}
	if r.From > 0 && r.From < entries[0].Revision() && entries[0].Was == "" && chosen[0] == entries[0] {
		return RuleChange{}, fmt.Errorf("node %s: revision %d: %w; it goes back to revision %d", r.Node, r.From, ErrNoHistory, entries[0].Revision())
	}
	for _, e := range chosen {
		if e.Whole != nil && e.Was != "" {
			return RuleChange{}, fmt.Errorf("node %s: the mode changed at revision %d, between the two: use --since-switch, or revisions on one side of it", r.Node, e.Revision())
		}
	}
	last := chosen[len(chosen)-1]
	out := RuleChange{Node: r.Node, At: last.At, From: from, Revision: last.Revision(), Was: formName(last.Mode, last.Form), Mode: formName(last.Mode, last.Form)}
	var all []proxy.Change
	for _, e := range chosen {
		all = append(all, e.Changes...)
	}
	return out, l.renderSides(&out, last, joined(all))
}

// lastDiff is the last change that left other rules. What does not serve any more may
// change in the API without.
func (l *Lab) lastDiff(nodeName string, entries []*proxy.Applied) (RuleChange, error) {
	for i, e := range slices.Backward(entries) {
		if len(e.Changes) == 0 {
			continue
		}
		out := RuleChange{Node: nodeName, At: e.At, Revision: e.Revision(), Was: formName(e.Mode, e.Form), Mode: formName(e.Mode, e.Form)}
		if i > 0 {
			out.From = entries[i-1].Revision()
		}
		if err := l.renderSides(&out, e, e.Changes); err != nil || out.Before != out.After {
			return out, err
		}
	}
	return RuleChange{}, fmt.Errorf("node %s: no rules have changed since the daemon started: %w", nodeName, ErrNoHistory)
}

// joined makes one change of all those of a Service port, from the first state to the
// last.
func joined(all []proxy.Change) []proxy.Change {
	var out []proxy.Change
	at := map[string]int{}
	for _, c := range all {
		p := c.After
		if p == nil {
			p = c.Before
		}
		key := p.String() + string(p.Protocol) + string(p.Family)
		if i, known := at[key]; known {
			out[i].After = c.After
			continue
		}
		at[key] = len(out)
		out = append(out, c)
	}
	return out
}

func formName(mode, form string) string {
	return ProxyConfig{Mode: mode, NFTLayout: form}.String()
}

// renderer makes a mode that only renders. The running ones remember what they
// rendered last.
func (l *Lab) renderer(mode, form string) (proxy.Mode, error) {
	l.proxyMu.Lock()
	defer l.proxyMu.Unlock()
	newMode, ok := proxyModes()[mode]
	if !ok {
		return nil, fmt.Errorf("no mode is called %q", mode)
	}
	return newMode(ModeOptions{Features: l.features, NFTLayout: nftables.Layout(form)}), nil
}

// serviceText renders the parts of a program that belong to the Services of a
// snapshot.
func (l *Lab) serviceText(mode, form string, s *proxy.Snapshot) (string, error) {
	if len(s.Services) == 0 {
		return "", nil
	}
	m, err := l.renderer(mode, form)
	if err != nil {
		return "", err
	}
	program, err := m.Render(s)
	if err != nil {
		return "", err
	}
	one, ok := program.(serviceRules)
	if !ok {
		return program.String(), nil
	}
	var b strings.Builder
	done := map[string]bool{}
	for _, p := range s.Services {
		if key := p.Namespace + "/" + p.Name; !done[key] {
			done[key] = true
			b.WriteString(one.Service(p.Namespace, p.Name))
		}
	}
	return b.String(), nil
}

func (l *Lab) renderSides(out *RuleChange, e *proxy.Applied, changes []proxy.Change) (err error) {
	if out.Before, err = l.serviceText(e.Mode, e.Form, e.Part(changes, false)); err != nil {
		return err
	}
	out.After, err = l.serviceText(e.Mode, e.Form, e.Part(changes, true))
	return err
}

func (l *Lab) switchDiff(nodeName string, e *proxy.Applied) (RuleChange, error) {
	out := RuleChange{Node: nodeName, At: e.At, From: e.Revision(), Revision: e.Revision(), Was: formName(e.Was, e.WasForm), Mode: formName(e.Mode, e.Form)}
	for _, side := range []struct {
		mode, form string
		into       *string
	}{{e.Was, e.WasForm, &out.Before}, {e.Mode, e.Form, &out.After}} {
		m, err := l.renderer(side.mode, side.form)
		if err != nil {
			return out, err
		}
		program, err := m.Render(e.Whole)
		if err != nil {
			return out, err
		}
		*side.into = program.String()
	}
	return out, nil
}

// ServiceLog tells the history of a Service, "NS/NAME", on one node, or with node ""
// on all.
func (l *Lab) ServiceLog(service, nodeName string) (ServiceLog, error) {
	namespace, name, ok := cutService(service)
	if !ok {
		return ServiceLog{}, fmt.Errorf("service %q: want [NAMESPACE/]NAME", service)
	}
	if nodeName != "" && l.proxies[nodeName] == nil {
		return ServiceLog{}, fmt.Errorf("no node is called %q", nodeName)
	}
	out := ServiceLog{Service: service, API: l.history.of(service), Since: l.since}
	for _, n := range l.cfg.Nodes {
		if nodeName != "" && nodeName != n.Name {
			continue
		}
		from := uint64(0)
		for _, e := range l.proxies[n.Name].History().Entries() {
			var mine []proxy.Change
			for _, c := range e.Changes {
				p := c.After
				if p == nil {
					p = c.Before
				}
				if p.Namespace == namespace && p.Name == name {
					mine = append(mine, c)
				}
			}
			if len(mine) > 0 {
				c := RuleChange{Node: n.Name, At: e.At, From: from, Revision: e.Revision(), Was: formName(e.Mode, e.Form), Mode: formName(e.Mode, e.Form)}
				if err := l.renderSides(&c, e, mine); err != nil {
					return out, err
				}
				out.Rules = append(out.Rules, c)
			}
			from = e.Revision()
		}
	}
	slices.SortStableFunc(out.Rules, func(a, b RuleChange) int { return a.At.Compare(b.At) })
	if len(out.API) == 0 && len(out.Rules) == 0 {
		return out, fmt.Errorf("service %s: %w: it does not exist, or has not changed since %s", service, ErrNoHistory, l.since.Format(time.TimeOnly))
	}
	return out, nil
}

// serveHistory answers the commands about the past.
func (l *Lab) serveHistory(mux *http.ServeMux) {
	mux.HandleFunc("GET /diff", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		d := DiffRequest{Node: q.Get("node"), From: revisionOf(q.Get("from")), To: revisionOf(q.Get("to")), SinceSwitch: q.Get("switch") == "true"}
		c, err := l.Diff(d)
		answer(w, c, err)
	})
	mux.HandleFunc("GET /log", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		s, err := l.ServiceLog(q.Get("service"), q.Get("node"))
		answer(w, s, err)
	})
}

// Diff asks what changed in a node's kernel, as [Lab.Diff] does.
func (c *Client) Diff(ctx context.Context, r DiffRequest) (RuleChange, error) {
	var out RuleChange
	q := url.Values{"node": {r.Node}, "from": {strconv.FormatUint(r.From, 10)}, "to": {strconv.FormatUint(r.To, 10)}, "switch": {strconv.FormatBool(r.SinceSwitch)}}
	return out, c.call(ctx, http.MethodGet, "/diff?"+q.Encode(), &out)
}

// ServiceLog asks for the history of a Service, as [Lab.ServiceLog] tells it.
func (c *Client) ServiceLog(ctx context.Context, service, node string) (ServiceLog, error) {
	var out ServiceLog
	return out, c.call(ctx, http.MethodGet, "/log?"+url.Values{"service": {service}, "node": {node}}.Encode(), &out)
}
