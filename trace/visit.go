// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"
)

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
			name = c.links[f.ifindex]
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
	r := routeOf(v.place.ns, h.dst.Addr(), src, iif)
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
