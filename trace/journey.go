// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
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
	r := routeOf(j.from.ns, to.Addr(), netip.Addr{}, 0, 0)
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
			return j.mark.forward(h) && !(j.mark.udp && j.seen[pair{h.dst, h.src}] && !j.seen[pair{h.src, h.dst}])
		}
		return j.mark.back(h, j.seen) && !(j.mark.udp && j.seen[pair{h.src, h.dst}])
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

// home tells what happens to an answer on the client's own node, between the device
// and the socket: no hook of ours sees it.
func (v *visit) home() {
	h, to := v.end.header, v.trace.Target.Addr
	if v.place != v.from || v.from.Kind != "node" || h == nil || h.proto == unix.IPPROTO_ICMP || v.end.left {
		return
	}
	if h.src == to && h.dst == v.client.local {
		return
	}
	v.add(&Step{Leg: Back, Kind: KindNAT, Place: v.place.Name, NAT: &NAT{Kind: "undo", From: h.src, To: to},
		Text:     fmt.Sprintf("connection tracking undoes the translation: source %s → %s, destination %s → %s", h.src, to, h.dst, v.client.local),
		Inferred: "from the addresses of the socket that got the answer"})
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
				return !arrived[c.links[f.ifindex].name] && j.watching(c.links[f.ifindex].name)
			}
		}
		return false
	})
}

// watching says whether a place is looked at.
func (j *journey) watching(name string) bool {
	return slices.ContainsFunc(j.watch.places, func(p *Place) bool { return p.Name == name })
}

// visit is a packet's stay in one place.
type visit struct {
	*journey
	leg   Leg
	place *Place
	// first is the packet as it came, last as it was seen last.
	first, last *header
	iif         int
	hop         *Hop
	dnatTold    bool
	entry       *ctEntry
	after       netip.AddrPort
	end         ending
}

func (v *visit) enter(p *Place) {
	v.place, v.first, v.last, v.iif, v.dnatTold, v.entry, v.after = p, nil, nil, 0, false, nil, netip.AddrPort{}
	v.end.place, v.end.left, v.end.hook, v.end.dev, v.end.iif, v.end.forward, v.end.input = p, false, "", "", 0, false, false
	if v.leg == Forward {
		v.trace.Path = append(v.trace.Path, Hop{Place: p.Name})
		v.hop = &v.trace.Path[len(v.trace.Path)-1]
	}
}

// leave tells what is left of the events of this place.
func (v *visit) leave() {
	if v.place != nil {
		v.upTo(func(string) bool { return true })
	}
}

// in tells that the packet came by a device.
func (v *visit) in(f *frame) {
	if v.first == nil {
		v.first = f.header
	}
	v.last, v.iif = f.header, f.ifindex
	name, peer := v.device(f)
	v.end.header, v.end.iif, v.end.dev, v.end.left = f.header, f.ifindex, name, false
	if v.leg == Forward && v.hop.In == "" {
		v.hop.In = name
	}
	v.deviceStep(f, name, peer, "in")
}

// out tells that the packet went by a device, and how it had been translated.
func (v *visit) out(f *frame) {
	v.translated(f.header, true)
	name, peer := v.device(f)
	v.end.header, v.end.dev, v.end.left = f.header, name, true
	v.last = f.header
	if v.leg == Forward {
		v.hop.Out = name
	}
	v.deviceStep(f, name, peer, "out")
}

func (v *visit) deviceStep(f *frame, name, peer, direction string) {
	s := &Step{Leg: v.leg, Kind: KindDevice, Place: v.place.Name, Device: name, Direction: direction, Peer: peer, Packet: f.packet(), At: f.at.Sub(v.trace.Started).Microseconds()}
	word := map[string]string{"in": "in by", "out": "out by"}[direction]
	s.Text = fmt.Sprintf("%s %s", word, name)
	if peer != "" {
		prep := map[string]string{"in": "from", "out": "to"}[direction]
		s.Text += fmt.Sprintf(" (%s %s)", prep, peer)
	}
	s.Text += ": " + s.Packet.String()
	v.add(s)
}

// device names a device and what is behind it.
func (v *visit) device(f *frame) (name, peer string) {
	for _, c := range v.watch.captures {
		if c.place == v.place {
			name = c.links[f.ifindex].name
		}
	}
	switch {
	case name == "":
		name = fmt.Sprintf("device %d", f.ifindex)
	case name == "lo":
		peer = ""
	case v.place.Kind == "node":
		if a, ok := v.peers[v.place][name]; ok {
			if pod := v.x.Pod(a); pod != nil {
				peer = "pod/" + pod.Namespace + "/" + pod.Name
			}
		} else if name == "eth0" {
			peer = "the node network"
		}
	case v.place.Kind == "pod":
		peer = v.place.Node
	case v.place.Kind == "outside":
		peer = "the node network"
	case v.place.Kind == "fabric":
		peer = name
	}
	return name, peer
}

// upTo tells the events of this place while their hook is one of those that may
// come now.
func (v *visit) upTo(may func(hook string) bool) {
	for len(v.queue[v.place]) > 0 && may(v.queue[v.place][0].hook) {
		ps := v.queue[v.place][0]
		v.queue[v.place] = v.queue[v.place][1:]
		if v.first == nil {
			v.first = ps.header
		}
		if ps.hook != "prerouting" && ps.hook != "output" {
			v.translated(ps.header, false)
		}
		v.through(ps)
		v.last = ps.header
		v.end.header, v.end.hook = ps.header, ps.hook
		v.end.forward = v.end.forward || ps.hook == "forward"
		v.end.input = v.end.input || ps.hook == "input"
	}
}

// destination is where the packet goes behind the translation of this place: what
// the next hook, or the device, shows.
func (v *visit) destination() netip.AddrPort {
	if v.after.IsValid() {
		return v.after
	}
	before := v.first.dst
	for _, ps := range v.queue[v.place] {
		if ps.header.dst != before {
			v.after = ps.header.dst
			return v.after
		}
	}
	for _, f := range v.frames {
		if f.place == v.place && f.out && v.mark.forward(f.header) && f.dst != before {
			v.after = f.dst
			return v.after
		}
	}
	if e := v.conntrack(); e != nil && e.replySrc != e.dst {
		v.after = e.replySrc
	}
	return v.after
}

func (v *visit) conntrack() *ctEntry {
	if v.entry == nil && v.place.Kind == "node" && v.first != nil && v.leg == Forward {
		// Without the entry the translation is told from the headers alone.
		v.entry, _ = conntrackOf(v.place.ns, v.first.proto, v.first.src, v.first.dst)
	}
	return v.entry
}

// translated tells what changed in the packet's addresses since it came.
func (v *visit) translated(h *header, leaving bool) {
	if v.first == nil {
		v.first = h // it was made here, and no hook has rules
		if v.leg == Forward && v.place == v.from && v.client.local.IsValid() {
			first := *h
			first.src, first.dst = v.client.local, v.trace.Target.Addr
			v.first = &first
		}
	}
	if v.leg == Back {
		if leaving && h.proto != unix.IPPROTO_ICMP && (h.src != v.first.src || h.dst != v.first.dst) {
			what := []string{}
			if h.src != v.first.src {
				what = append(what, fmt.Sprintf("source %s → %s", v.first.src, h.src))
			}
			if h.dst != v.first.dst {
				what = append(what, fmt.Sprintf("destination %s → %s", v.first.dst, h.dst))
			}
			v.add(&Step{Leg: Back, Kind: KindNAT, Place: v.place.Name, NAT: &NAT{Kind: "undo", From: v.first.src, To: h.src},
				Text: "connection tracking undoes the translation: " + strings.Join(what, ", ")})
			v.first = h
		}
		return
	}
	if v.place.Kind != "node" {
		return
	}
	entry := ""
	if e := v.conntrack(); e != nil {
		entry = e.String()
	}
	if !v.dnatTold {
		v.dnatTold = true
		if h.dst != v.first.dst {
			v.after = h.dst
			who, objects := v.x.Describe(h.dst.Addr())
			s := &Step{Leg: Forward, Kind: KindNAT, Place: v.place.Name, Objects: objects, NAT: &NAT{Kind: "dnat", From: v.first.dst, To: h.dst, Conntrack: entry}}
			s.Text = fmt.Sprintf("DNAT: %s → %s", v.first.dst, h.dst)
			if who != "" {
				s.Text += " (" + who + ")"
			}
			v.add(s)
			v.end.endpoint = h.dst
		}
		v.route(h)
	}
	if leaving && h.src != v.first.src {
		s := &Step{Leg: Forward, Kind: KindNAT, Place: v.place.Name, NAT: &NAT{Kind: "snat", From: v.first.src, To: h.src, Conntrack: entry}}
		s.Text = fmt.Sprintf("SNAT (masquerade): %s → %s", v.first.src, h.src)
		v.add(s)
		v.end.snat = true
	}
}

// route tells where the kernel of this node sends the packet, and why.
func (v *visit) route(h *header) {
	src := v.first.src.Addr()
	iif := v.iif
	r := routeOf(v.place.ns, h.dst.Addr(), src, iif, 0)
	if r.err != nil {
		return // told by the verdict when it is what ended the packet
	}
	s := &Step{Leg: Forward, Kind: KindRoute, Place: v.place.Name, Route: r.text}
	next := ""
	switch {
	case r.local:
		next = ": the node itself"
	case r.via.IsValid():
		if who, objects := v.x.Describe(r.via); who != "" {
			next, s.Objects = ": by way of "+who, objects
		}
	default:
		if who, objects := v.x.Describe(h.dst.Addr()); who != "" {
			next, s.Objects = ": "+who, objects
		}
	}
	s.Text = "route " + r.text + next
	v.add(s)
}

// through tells the events of one base chain.
func (v *visit) through(ps *pass) {
	prog := v.watch.programs[v.place]
	pkt := ps.header.packet()
	for _, e := range ps.events {
		s := &Step{Leg: v.leg, Kind: KindRule, Place: v.place.Name, Hook: ps.hook, Family: familyName(e.family), Table: e.table, Chain: e.chain, Verdict: e.verdictText()}
		rule, all := prog.rule(e)
		re := &RuleEvent{Node: v.place.Name, Hook: ps.hook, Family: s.Family, Table: e.table, Chain: e.chain, All: all, Verdict: s.Verdict, To: e.to, Packet: pkt}
		switch {
		case e.kind == unix.NFT_TRACETYPE_RULE && e.handle == 0:
			re.Verdict, s.Verdict = "return", "return" // the end of a chain
		case e.kind == unix.NFT_TRACETYPE_RULE && rule != nil:
			r := *rule
			s.Rule, re.Rule = &r, &r
		case e.kind == unix.NFT_TRACETYPE_RULE:
			s.Rule = &Rule{Handle: e.handle}
			re.Rule = s.Rule
		case e.kind == unix.NFT_TRACETYPE_RETURN:
			re.Verdict, s.Verdict = "return", "return"
		}
		if v.leg == Forward && (ps.hook == "prerouting" || ps.hook == "output") {
			re.After = v.destination()
		}
		sentence := explain(re, v.x)
		s.Text, s.Objects, s.Inferred = sentence.Text, sentence.Objects, sentence.Inferred
		if sentence.Endpoint.IsValid() && v.leg == Forward {
			v.end.endpoint = sentence.Endpoint
		}
		if e.kind == unix.NFT_TRACETYPE_POLICY && e.policy == nfAccept && e.table == "kplab-node" {
			continue
		}
		v.add(s)
		if e.drops() && v.leg == Forward {
			text := ""
			if s.Rule != nil {
				text = s.Rule.Text
			}
			v.end.dropped, v.end.sentence, v.end.rule = true, sentence, text
			v.end.hook, v.end.header = ps.hook, ps.header
		}
		// A reject chain says less than the element that led to it.
		if v.end.dropped && v.end.sentence.Reason == "" {
			v.end.sentence.Reason = "dropped"
		}
	}
}
