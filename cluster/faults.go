// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kplab/kplab/internal/pace"
	"github.com/kplab/kplab/node"
)

// FaultKind is a way in which a lab can be broken on purpose.
type FaultKind string

// The faults. Those of links are made by `kplab link`, those of whole nodes by
// `kplab node`, the others by `kplab fault add`.
const (
	// ProxyFrozen is a Service proxy that applies nothing any more; its rules stay.
	ProxyFrozen FaultKind = "proxy-frozen"
	// RulesFlushed is a node without the rules of its proxy, which is held off.
	RulesFlushed FaultKind = "rules-flushed"
	// DNSDead is a cluster DNS that does not answer.
	DNSDead FaultKind = "dns-dead"
	// APIStopped is an API server that takes no connection.
	APIStopped FaultKind = "api-stopped"
	// ConnLimit is a node that tracks no more than so many connections.
	ConnLimit FaultKind = "conn-limit"
	// LinkFault is a link, or the way between two nodes, that is down, slow or lossy.
	LinkFault FaultKind = "link"
	// NodePaused is a node whose kubelet and proxy are frozen.
	NodePaused FaultKind = "node-paused"
	// NodeStopped is a node that was shut down, NodeKilled one that lost its power.
	NodeStopped FaultKind = "node-stopped"
	NodeKilled  FaultKind = "node-killed"
)

// AddableFaults are the kinds that `kplab fault add` takes.
var AddableFaults = []FaultKind{ProxyFrozen, RulesFlushed, DNSDead, APIStopped, ConnLimit}

// Fault is one thing that is broken on purpose, until it is cleared. There is at most
// one of an ID: a second one takes its place.
type Fault struct {
	// ID is the kind and what it is on: "proxy-frozen", "link/node1".
	ID   string    `json:"id"`
	Kind FaultKind `json:"kind"`
	// Node is where; empty means every node, those too that are added later.
	Node string `json:"node,omitempty"`
	// From says for whom the API is stopped: FromAll, or FromNodes.
	From string `json:"from,omitempty"`
	// Max is the limit of ConnLimit.
	Max int `json:"max,omitempty"`
	// Link is what is wrong with a link.
	Link  *LinkFaults `json:"link,omitempty"`
	Since time.Time   `json:"since"`
	// Says is what the fault does, in words.
	Says string `json:"says"`
}

// For whom the API can be stopped.
const (
	// FromAll: nobody gets a connection, neither kubectl nor a pod, a kubelet or a
	// controller.
	FromAll = "all"
	// FromNodes: pods and nodes get none; kubectl and the controllers do.
	FromNodes = "nodes"
)

// defaultMaxConns is the connection limit when none is given.
const defaultMaxConns = 10

// LinkFaults is what is wrong with a link, each in the words of `kplab link set`. An
// empty field does nothing.
type LinkFaults struct {
	// To limits Drop and Loss to the packets from and to that node.
	To   string `json:"to,omitempty"`
	Down bool   `json:"down,omitempty"`
	// Drop is the direction in which all packets are lost: in, out or both.
	Drop string `json:"drop,omitempty"`
	// Loss is a share in per cent ("30%"), Delay a time ("50ms"), Rate bits a second
	// ("1mbit").
	Loss  string `json:"loss,omitempty"`
	Delay string `json:"delay,omitempty"`
	Rate  string `json:"rate,omitempty"`
}

// faultBook is the list of the faults of a running lab and its journal, which is
// written before what it says is done.
type faultBook struct {
	path string
	// changing is held while faults are added, cleared and put in force.
	changing sync.Mutex

	// found says that there was a journal when this process began: something may be
	// broken from before.
	found bool

	mu   sync.Mutex
	list []Fault
	// failed is why the faults could not be put in force when that was tried last.
	failed error
}

// faultJournal is the file.
type faultJournal struct {
	Faults []Fault `json:"faults"`
}

// FaultJournal is the file with the faults that are in force.
func (p Paths) FaultJournal() string { return filepath.Join(p.Runtime, "faults.json") }

// readFaults reads the journal; no file is an error that wraps os.ErrNotExist.
func readFaults(path string) ([]Fault, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var j faultJournal
	if err := json.Unmarshal(data, &j); err != nil {
		return nil, err
	}
	for _, f := range j.Faults {
		if err := f.check(); err != nil {
			return nil, err
		}
	}
	return j.Faults, nil
}

// loadFaults reads the journal for a lab that begins. A damaged one is put aside: what it
// said is not known any more, and the lab begins without faults.
func loadFaults(path string) (list []Fault, found bool, damaged error) {
	list, err := readFaults(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, false, nil
	}
	if err == nil {
		return list, true, nil
	}
	err = fmt.Errorf("the journal of faults %s is damaged and was put aside: %w", path, err)
	return nil, true, errors.Join(err, os.Rename(path, path+".damaged"))
}

// done removes a journal of no faults. Until then its file says that something may be
// broken still.
func (b *faultBook) done(list []Fault) error {
	if len(list) > 0 {
		return nil
	}
	if err := os.Remove(b.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the journal of faults: %w", err)
	}
	return nil
}

func (b *faultBook) save(list []Fault) error {
	if err := writeJSON(b.path, faultJournal{Faults: list}, 0o644); err != nil {
		return fmt.Errorf("write the journal of faults: %w", err)
	}
	return nil
}

func (b *faultBook) all() []Fault {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.list)
}

// err is why not all of the faults are in force.
func (b *faultBook) err() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failed
}

func (b *faultBook) set(list []Fault) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.list = list
}

// on returns the first fault of one of the kinds that is on a node.
func (b *faultBook) on(node string, kinds ...FaultKind) (Fault, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, kind := range kinds {
		for _, f := range b.list {
			if f.Kind == kind && (f.Node == "" || f.Node == node) {
				return f, true
			}
		}
	}
	return Fault{}, false
}

// Faults returns what is broken on purpose, in the order of the IDs.
func (l *Lab) Faults() []Fault { return l.faults.all() }

// AddFault breaks something and returns when it is broken. A fault with the same ID
// gives way to it. When that cannot be done, everything is as it was.
func (l *Lab) AddFault(ctx context.Context, f Fault) (Fault, error) {
	if !slices.Contains(AddableFaults, f.Kind) {
		return f, fmt.Errorf("fault %q: want one of %s", f.Kind, joinKinds(AddableFaults))
	}
	f.setDefaults()
	if err := f.check(); err != nil {
		return f, err
	}
	if f.Node != "" && !l.hasNode(f.Node) {
		return f, fmt.Errorf("no node is called %q", f.Node)
	}
	if f.Kind == DNSDead && l.cfg.DNS.Provider == dnsNone {
		return f, errors.New("fault dns-dead: this lab has no cluster DNS (dns.provider none)")
	}
	return f, l.changeFaults(ctx, func(list []Fault) ([]Fault, error) { return withFault(list, f), nil })
}

// SetLink makes a link faulty. What is said adds to the faults that the link has
// already; a value of "0" or "none" takes that one back.
func (l *Lab) SetLink(ctx context.Context, nodeName string, with LinkFaults) (Fault, error) {
	var made Fault
	for _, end := range []string{nodeName, with.To} {
		if end != "" && end != node.OutsideNS && !l.hasNode(end) {
			return made, fmt.Errorf("no node is called %q", end)
		}
	}
	if nodeName == with.To {
		return made, fmt.Errorf("--to %s: want another node than the one whose link it is", with.To)
	}
	err := l.changeFaults(ctx, func(list []Fault) ([]Fault, error) {
		made = Fault{Kind: LinkFault, Node: nodeName, Link: &LinkFaults{To: with.To}}
		made.setDefaults()
		if i := slices.IndexFunc(list, func(f Fault) bool { return f.ID == made.ID }); i >= 0 {
			had := *list[i].Link
			if list[i].Node != nodeName {
				had.Drop = turned(had.Drop) // the same way, seen from its other end
			}
			had.To = with.To
			made.Link, made.Since = &had, list[i].Since
		}
		made.Link.add(with)
		if made.Link.empty() {
			return slices.DeleteFunc(slices.Clone(list), func(f Fault) bool { return f.ID == made.ID }), nil
		}
		made.setDefaults()
		if err := made.check(); err != nil {
			return nil, err
		}
		return withFault(list, made), nil
	})
	return made, err
}

// ClearFaults undoes the faults with these IDs, or all of them, and returns those that
// it has undone when everything is as without them.
func (l *Lab) ClearFaults(ctx context.Context, all bool, ids ...string) ([]Fault, error) {
	var cleared []Fault
	err := l.changeFaults(ctx, func(list []Fault) (left []Fault, err error) {
		for _, id := range ids {
			if !slices.ContainsFunc(list, func(f Fault) bool { return f.ID == id }) {
				return nil, fmt.Errorf("no fault has the ID %q; see `kplab fault list%s`", id, nameFlag(l.cfg.Name))
			}
		}
		for _, f := range list {
			if all || slices.Contains(ids, f.ID) {
				cleared = append(cleared, f)
			} else {
				left = append(left, f)
			}
		}
		return left, nil
	})
	if err != nil {
		return nil, err
	}
	for _, f := range cleared {
		if f.Kind == NodeStopped || f.Kind == NodeKilled || f.Kind == NodePaused {
			err = errors.Join(err, l.awaitNode(ctx, f.Node))
		}
	}
	return cleared, err
}

// LinkUp takes back everything that is wrong with a node's link, or, with to, with the
// way between two nodes.
func (l *Lab) LinkUp(ctx context.Context, nodeName, to string) ([]Fault, error) {
	if nodeName != node.OutsideNS && !l.hasNode(nodeName) {
		return nil, fmt.Errorf("no node is called %q", nodeName)
	}
	var ids []string
	for _, f := range l.Faults() {
		if f.Kind == LinkFault && (f.Node == nodeName || f.Link.To == nodeName) && (to == "" || f.Link.To == to || f.Node == to) {
			ids = append(ids, f.ID)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	return l.ClearFaults(ctx, false, ids...)
}

// changeFaults replaces the list: journal first, then what it says. When that cannot be
// put in force, both are put back.
func (l *Lab) changeFaults(ctx context.Context, change func([]Fault) ([]Fault, error)) error {
	l.faults.changing.Lock()
	defer l.faults.changing.Unlock()
	before := l.faults.all()
	after, err := change(before)
	if err != nil {
		return err
	}
	slices.SortFunc(after, func(a, b Fault) int { return cmp.Compare(a.ID, b.ID) })
	if err := l.faults.save(after); err != nil {
		return err
	}
	l.faults.set(after)
	err = l.loops.await(ctx, l.enforce)
	if err == nil {
		return l.faults.done(after)
	}
	l.faults.set(before)
	return errors.Join(err, l.faults.save(before), l.loops.await(context.WithoutCancel(ctx), l.enforce))
}

func withFault(list []Fault, f Fault) []Fault {
	out := slices.DeleteFunc(slices.Clone(list), func(had Fault) bool { return had.ID == f.ID })
	return append(out, f)
}

func joinKinds(kinds []FaultKind) string {
	var names []string
	for _, k := range kinds {
		names = append(names, string(k))
	}
	return strings.Join(names, ", ")
}

// setDefaults fills what follows from the rest.
func (f *Fault) setDefaults() {
	if f.Kind == APIStopped && f.From == "" {
		f.From = FromAll
	}
	if f.Kind == ConnLimit && f.Max == 0 {
		f.Max = defaultMaxConns
	}
	on := []string{string(f.Kind)}
	if f.Node != "" {
		on = append(on, f.Node)
	}
	if f.Link != nil && f.Link.To != "" {
		// One way has two ends, and one ID.
		on = append(on, f.Link.To)
		slices.Sort(on[1:])
	}
	f.ID = strings.Join(on, "/")
	if f.Since.IsZero() {
		f.Since = time.Now().Truncate(time.Second)
	}
	f.Says = f.describe()
}

// check says what is wrong with a fault.
func (f *Fault) check() error {
	switch f.Kind {
	case ProxyFrozen, RulesFlushed, DNSDead, NodePaused, NodeStopped, NodeKilled:
	case APIStopped:
		if f.Node != "" {
			return errors.New("fault api-stopped: it is for the whole lab, leave --node out; cut one node off with `kplab link down`")
		}
		if f.From != FromAll && f.From != FromNodes {
			return fmt.Errorf("fault api-stopped: --from %q: want %s or %s", f.From, FromAll, FromNodes)
		}
	case ConnLimit:
		if f.Max < 1 || f.Max > math.MaxInt32 {
			return fmt.Errorf("fault conn-limit: --max %d: want at least 1", f.Max)
		}
	case LinkFault:
		if f.Link == nil || f.Node == "" {
			return errors.New("fault link: of which node?")
		}
		_, err := f.Link.parse(f.ID, f.Node)
		return err
	default:
		return fmt.Errorf("unknown kind of fault %q", f.Kind)
	}
	if f.Kind != APIStopped && f.From != "" {
		return fmt.Errorf("fault %s: --from is for %s", f.Kind, APIStopped)
	}
	if f.Kind != ConnLimit && f.Max != 0 {
		return fmt.Errorf("fault %s: --max is for %s", f.Kind, ConnLimit)
	}
	return nil
}

// describe says in words what the fault does.
func (f *Fault) describe() string {
	where := "every node"
	if f.Node != "" {
		where = "node " + f.Node
	}
	switch f.Kind {
	case ProxyFrozen:
		return "the Service proxy of " + where + " applies nothing; its rules stay as they are"
	case RulesFlushed:
		return "the rules of the Service proxy of " + where + " are gone, and it writes none"
	case DNSDead:
		return "cluster DNS answers nobody on " + where
	case APIStopped:
		if f.From == FromNodes {
			return "the API takes no connection from nodes and pods"
		}
		return "the API takes no connection"
	case ConnLimit:
		return fmt.Sprintf("%s tracks at most %d connections; a packet that begins one more is dropped", where, f.Max)
	case NodePaused:
		return "kubelet and Service proxy of " + where + " are frozen; pods and rules stay"
	case NodeStopped:
		return where + " was shut down"
	case NodeKilled:
		return where + " lost its power"
	case LinkFault:
		return f.Link.describe()
	}
	return string(f.Kind)
}

func (x *LinkFaults) describe() string {
	var parts []string
	if x.Down {
		parts = append(parts, "down")
	}
	if x.Drop != "" {
		parts = append(parts, "drop "+x.Drop)
	}
	for _, p := range []struct{ name, value string }{{"loss", x.Loss}, {"delay", x.Delay}, {"rate", x.Rate}} {
		if p.value != "" {
			parts = append(parts, p.name+" "+p.value)
		}
	}
	return strings.Join(parts, ", ")
}

// add puts what is set in more into x.
func (x *LinkFaults) add(more LinkFaults) {
	x.Down = x.Down || more.Down
	for _, p := range []struct {
		into *string
		from string
	}{{&x.Drop, more.Drop}, {&x.Loss, more.Loss}, {&x.Delay, more.Delay}, {&x.Rate, more.Rate}} {
		switch strings.TrimRight(p.from, "%") {
		case "":
		case "0", "none", "0s", "0ms":
			*p.into = ""
		default:
			*p.into = p.from
		}
	}
}

func (x *LinkFaults) empty() bool { return *x == LinkFaults{To: x.To} }

// cuts tells whether nothing gets to the other end and back.
func (x *LinkFaults) cuts() bool {
	share, _ := strconv.ParseFloat(strings.TrimSuffix(x.Loss, "%"), 64) // checked before; none is 0
	return x.Down || x.Drop != "" || share == 100
}

// turned is a direction seen from the other end.
func turned(drop string) string {
	switch node.Drop(drop) {
	case node.DropIn:
		return string(node.DropOut)
	case node.DropOut:
		return string(node.DropIn)
	}
	return drop
}

// maxDelay keeps a slip of the pen from stopping a link for days.
const maxDelay = time.Minute

// parse reads the words.
func (x *LinkFaults) parse(name, nodeName string) (node.LinkFault, error) {
	out := node.LinkFault{Name: name, Node: nodeName, To: x.To, Down: x.Down, Drop: node.Drop(x.Drop)}
	switch out.Drop {
	case "", node.DropIn, node.DropOut, node.DropBoth:
	default:
		return out, fmt.Errorf("--drop %q: want %s, %s, %s or none", x.Drop, node.DropIn, node.DropOut, node.DropBoth)
	}
	if x.Loss != "" {
		share, err := strconv.ParseFloat(strings.TrimSuffix(x.Loss, "%"), 64)
		if err != nil || !(share >= 0.01 && share <= 100) {
			return out, fmt.Errorf("--loss %q: want a share of the packets in per cent, as in 30%%", x.Loss)
		}
		out.Loss = int(math.Round(share * 100))
	}
	if x.Delay != "" {
		d, err := time.ParseDuration(x.Delay)
		if err != nil || d < time.Microsecond || d > maxDelay {
			return out, fmt.Errorf("--delay %q: want a time up to %s, as in 50ms", x.Delay, maxDelay)
		}
		out.Delay = d
	}
	if x.Rate != "" {
		rate, err := parseRate(x.Rate)
		if err != nil {
			return out, err
		}
		out.Rate = rate
	}
	if x.To != "" && (x.Down || x.Delay != "" || x.Rate != "") {
		return out, errors.New("--to takes --loss and --drop: a link is down, delayed or slow as a whole")
	}
	return out, nil
}

var rateForm = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?)(k|m|g)?bit$`)

// parseRate reads bits a second as tc writes them: 500kbit, 1mbit, 1gbit.
func parseRate(text string) (uint64, error) {
	m := rateForm.FindStringSubmatch(strings.ToLower(text))
	if m == nil {
		return 0, fmt.Errorf("--rate %q: want bits a second, as in 500kbit or 1mbit", text)
	}
	v, err := strconv.ParseFloat(m[1], 64)
	v *= map[string]float64{"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[m[2]]
	if err != nil || v < 8e3 || v > 1e11 {
		return 0, fmt.Errorf("--rate %q: want 8kbit to 100gbit", text)
	}
	return uint64(v), nil
}

// startFaults takes over the faults of a daemon before this one.
func (l *Lab) startFaults() {
	list, found, damaged := loadFaults(l.paths.FaultJournal())
	if damaged != nil {
		l.log.Error("faults of before are not known any more", "error", damaged)
	}
	l.faults = &faultBook{path: l.paths.FaultJournal(), list: list, found: found}
	l.enforcing = pace.New(pace.Config{
		Name: "faults", MinInterval: 50 * time.Millisecond, RetryInterval: time.Second,
		OnError: func(err error) { l.log.Error("faults are not in force", "error", err) },
	}, l.enforceAgain)
}

// enforceAgain puts in force what should be already.
func (l *Lab) enforceAgain(ctx context.Context) error {
	l.faults.changing.Lock()
	defer l.faults.changing.Unlock()
	if err := l.enforce(ctx); err != nil {
		return err
	}
	return l.faults.done(l.Faults())
}
