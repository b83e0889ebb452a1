// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/node"
)

// pass is a packet's way through one base chain and what that calls.
type pass struct {
	hook         string
	family       uint8
	table, chain string
	header       *header
	iif, oif     uint32
	id           uint32
	events       []*event
}

// journey puts what was seen in order.
//
// Packets are told apart by the mark. Frames have the kernel's time; events have
// none, but come in order in each namespace, and each base chain's first one holds
// the packet's headers. So a place's frames and events are merged by what must be:
// a packet comes by a device, passes prerouting, then input or forward, then
// postrouting, and goes by a device.
type journey struct {
	lab   *Lab
	x     *Index
	watch *watch
	mark  mark
	from  *Place
	trace *Trace

	frames []*frame
	passes map[*Place][]*pass
	client outcome
	lost   bool
	dead   bool // an event ended the packet

	seen  map[pair]bool // the addresses that the request had
	queue map[*Place][]*pass
	peers map[*Place]map[string]netip.Addr // devices of a node → the pod behind
	end   ending
}

// ending is where a packet was seen last.
type ending struct {
	place    *Place
	header   *header
	iif      int
	hook     string // the last hook with an event
	left     bool   // it went out by a device
	dev      string // the device that it came or went by
	sentence Sentence
	dropped  bool
	rule     string
	endpoint netip.AddrPort
	forward  bool // it passed forward
	input    bool
	snat     bool
}

func (j *journey) addFrame(f *frame) { j.frames = append(j.frames, f) }

// collect reads the events that have come, and says whether the packet's end is
// among them.
func (j *journey) collect() bool {
	for p, l := range j.watch.events {
		prog := j.watch.programs[p]
		// A socket that fails gives no more events: the story then has holes, and says so.
		if err := l.drain(func(e *event) {
			if isTraceTable(e.table) {
				return
			}
			if e.header != nil {
				hook, known := prog.hooks[chainKey{e.family, e.table, e.chain}]
				if !known && prog.readHooks() == nil {
					hook = prog.hooks[chainKey{e.family, e.table, e.chain}]
				}
				j.passes[p] = append(j.passes[p], &pass{hook: hook, family: e.family, table: e.table, chain: e.chain, header: e.header, iif: e.iif, oif: e.oif, id: e.id})
			}
			// A rule that refuses sends its error from within, and the error passes hooks
			// before the rule drops: the id tells the two packets apart.
			for _, last := range slices.Backward(j.passes[p]) {
				if last.id == e.id {
					last.events = append(last.events, e)
					j.dead = j.dead || (e.drops() && j.mark.forward(last.header))
					break
				}
			}
		}); err != nil {
			j.lost = true
		}
	}
	return j.dead
}

// dropTime is how long the event of a drop may lag behind the error that its rule
// sent: the time in which a processor comes back to it.
const dropTime = 500 * time.Millisecond

// awaitDrop waits for the drop that belongs to an ICMP error from a node.
func (j *journey) awaitDrop(fds []int) error {
	refused := slices.ContainsFunc(j.frames, func(f *frame) bool {
		return f.proto == unix.IPPROTO_ICMP && f.icmpType == 3 && f.icmpCode != 4 && j.mark.back(f.header, nil)
	})
	if !refused {
		return nil
	}
	for deadline := time.Now().Add(dropTime); !j.dead && time.Now().Before(deadline); j.collect() {
		var poll []unix.PollFd
		for _, fd := range fds {
			poll = append(poll, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
		}
		if _, err := unix.Poll(poll, int(time.Until(deadline).Milliseconds())+1); err != nil && !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("poll", err)
		}
	}
	return nil
}

// moved says whether anybody changed rules while the packet was under way.
func (j *journey) moved() bool {
	for p, before := range j.watch.gens {
		if now, err := j.watch.programs[p].generation(); err != nil || now != before {
			return true
		}
	}
	return false
}

// tell makes the steps.
func (j *journey) tell(ctx context.Context) error {
	slices.SortStableFunc(j.frames, func(a, b *frame) int { return a.at.Compare(b.at) })
	j.seen, j.peers = map[pair]bool{}, map[*Place]map[string]netip.Addr{}
	for _, f := range j.frames {
		if j.mark.forward(f.header) && !j.seen[pair{f.dst, f.src}] {
			j.seen[pair{f.src, f.dst}] = true
		}
	}
	for _, p := range j.watch.places {
		if p.Kind == "node" {
			// Without them devices are named without what they lead to.
			j.peers[p], _ = hostRoutes(p.ns)
		}
	}
	if err := j.readRules(ctx); err != nil {
		return err
	}
	j.socket()
	j.leg(Forward)
	forwardEnd := j.end
	j.hop(&forwardEnd)
	j.leg(Back)
	j.answer()
	j.verdict(forwardEnd)
	return nil
}

// hop tells of the proxy's own program, in mode userspace: it took the connection, and
// made another to an endpoint, which no mark follows. Who answered says so.
func (j *journey) hop(e *ending) {
	taken := slices.ContainsFunc(j.trace.Steps, func(s *Step) bool {
		return s.Kind == KindRule && s.Verdict == "accept" && s.Table == "nat" && (userspaceExplainer{}).Owns(s.Family, s.Table, s.Chain)
	})
	if !taken || e.dropped {
		return
	}
	s := j.add(&Step{Leg: Forward, Kind: KindHop, Place: e.place.Name,
		Text:     "the proxy's program accepts the connection, makes one of its own to an endpoint, from this node's address, and copies bytes",
		Inferred: "from the rule that led the packet to the program's port; that other connection is not followed"})
	name := httpHeader(string(j.client.answer), "X-Kplab-Pod")
	if name == "" {
		return
	}
	for _, p := range j.x.pods {
		if a, err := netip.ParseAddr(p.Status.PodIP); err == nil && p.Name == name {
			e.endpoint = netip.AddrPortFrom(a, 0)
			for _, port := range j.x.ports(j.trace.Target.Service, j.mark.protocol()) {
				for _, ep := range j.x.Endpoints(port) {
					if ep.Addr.Addr() == a {
						e.endpoint = ep.Addr
					}
				}
			}
			s.Objects = []string{"pod/" + p.Namespace + "/" + p.Name}
			s.Text += fmt.Sprintf(": %s (pod %s/%s on %s)", e.endpoint, p.Namespace, p.Name, p.Spec.NodeName)
			s.Inferred = "from the rule that led the packet to the program's port, and the pod's name in the answer"
		}
	}
}

// readRules reads the rules of every chain that an event names.
func (j *journey) readRules(ctx context.Context) error {
	for p, passes := range j.passes {
		var keys []chainKey
		for _, ps := range passes {
			for _, e := range ps.events {
				if k := (chainKey{e.family, e.table, e.chain}); !slices.Contains(keys, k) {
					keys = append(keys, k)
				}
			}
		}
		prog := j.watch.programs[p]
		if err := prog.read(ctx, keys); err != nil {
			return fmt.Errorf("on %s: %w", p.Name, err)
		}
		if prog.note != "" && !slices.Contains(j.trace.Notes, prog.note) {
			j.trace.Notes = append(j.trace.Notes, prog.note)
		}
	}
	return nil
}

func (j *journey) add(s *Step) *Step {
	j.trace.Steps = append(j.trace.Steps, s)
	return s
}

// socket is the first step: what the client opened, and where its packets go.
func (j *journey) socket() {
	to := j.trace.Target.Addr
	proto := "tcp"
	if j.mark.udp {
		proto = "udp"
	}
	s := j.add(&Step{Leg: Forward, Kind: KindSocket, Place: j.from.Name})
	r := routeOf(j.from.ns, to.Addr(), netip.Addr{}, 0)
	s.Route = r.text
	if j.client.local.IsValid() && j.client.local.Port() != 0 {
		s.Packet = &Packet{Src: j.client.local, Dst: to, Proto: proto}
		s.Text = fmt.Sprintf("%s socket %s → %s; route: %s", proto, j.client.local, to, r.text)
	} else {
		s.Text = fmt.Sprintf("%s socket → %s", proto, to)
	}
	if r.err != nil {
		_, why := r.reason()
		s.Text = fmt.Sprintf("%s socket → %s: %s", proto, to, why)
	}
	if n, kind, ok := j.x.Owner(to, proto); ok {
		s.Text += fmt.Sprintf(" (%s of %s)", kind, serviceText(n.String()))
		s.Objects = serviceObject(n.String())
	}
}

// leg tells one direction.
func (j *journey) leg(leg Leg) {
	j.queue = map[*Place][]*pass{}
	mine := func(h *header) bool {
		if leg == Forward {
			return j.mark.forward(h) && (!j.mark.udp || !j.seen[pair{h.dst, h.src}] || j.seen[pair{h.src, h.dst}])
		}
		return j.mark.back(h, j.seen) && (!j.mark.udp || !j.seen[pair{h.src, h.dst}])
	}
	for p, passes := range j.passes {
		met := map[[3]string]bool{}
		for _, ps := range passes {
			key := [3]string{ps.hook, familyName(ps.family) + " " + ps.table, ps.chain}
			if mine(ps.header) && !met[key] { // a repetition is told once
				met[key] = true
				j.queue[p] = append(j.queue[p], ps)
			}
		}
	}
	frames := j.crossings(mine)
	v := &visit{journey: j, leg: leg}
	if leg == Forward {
		v.enter(j.from)
		v.last = nil
	}
	for _, f := range frames {
		if v.place != f.place {
			v.leave()
			v.enter(f.place)
		}
		if f.out {
			v.upTo(func(hook string) bool { return hook != "prerouting" && hook != "input" })
			v.out(f)
		} else {
			v.in(f)
			v.upTo(func(hook string) bool { return hook != "postrouting" && hook != "output" })
		}
	}
	v.leave()
	if leg == Back {
		v.home()
		for _, p := range j.watch.places {
			if len(j.queue[p]) > 0 {
				v.enter(p)
				v.leave()
			}
		}
	}
	j.end = v.end
}

// crossings are the frames of one direction, each device once.
func (j *journey) crossings(mine func(*header) bool) []*frame {
	type crossing struct {
		p   *Place
		dev int
		out bool
	}
	met := map[crossing]bool{}
	arrived := map[string]bool{}
	var all []*frame
	for _, f := range j.frames {
		if k := (crossing{f.place, f.ifindex, f.out}); mine(f.header) && !met[k] {
			met[k] = true
			all = append(all, f)
			if !f.out {
				arrived[f.place.Name] = true
			}
		}
	}
	// A switch that has not learnt yet where an address is sends to every port: what
	// nobody behind a port took is not part of the way.
	return slices.DeleteFunc(all, func(f *frame) bool {
		if f.place.Kind != node.FabricNS || !f.out {
			return false
		}
		for _, c := range j.watch.captures {
			if c.place == f.place {
				return !arrived[c.links[f.ifindex]] && j.watching(c.links[f.ifindex])
			}
		}
		return false
	})
}

// watching says whether a place is looked at.
func (j *journey) watching(name string) bool {
	return slices.ContainsFunc(j.watch.places, func(p *Place) bool { return p.Name == name })
}
