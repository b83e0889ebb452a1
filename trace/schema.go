// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"net/netip"
	"time"
)

// Schema names the form of a Report in JSON. Fields are only ever added.
const Schema = "kplab.trace/v1"

// Report is everything that one call of trace saw. It is the same in all proxy
// modes.
type Report struct {
	Schema string `json:"schema"`
	// From and To are as they were asked for.
	From     string `json:"from"`
	To       string `json:"to"`
	Protocol string `json:"protocol"`
	// Modes is the proxy mode of each node, "nftables/compact" for a layout that is
	// not the mode's default.
	Modes  map[string]string `json:"modes"`
	Traces []*Trace          `json:"traces"`
	// Endpoints counts who answered, by the endpoint's address.
	Endpoints map[string]int `json:"endpoints"`
}

// Trace is one request.
type Trace struct {
	// Mark is the number by which the flow was known: the first sequence number of
	// a TCP connection, the first bytes of a UDP payload.
	Mark    string    `json:"mark"`
	Started time.Time `json:"started"`
	// Took is the time from the first packet to the end of the answer, in
	// microseconds.
	Took   int64  `json:"tookMicroseconds"`
	Target Target `json:"target"`
	// Client is the client's own address and port.
	Client netip.AddrPort `json:"client"`
	Steps  []*Step        `json:"steps"`
	// Path is the places that the request passed, in order, for drawing.
	Path    []Hop    `json:"path"`
	Verdict Verdict  `json:"verdict"`
	Notes   []string `json:"notes,omitempty"`
}

// Target is what TO stands for.
type Target struct {
	// Kind is service, name, address, nodeport, pod, node or outside.
	Kind string         `json:"kind"`
	Name string         `json:"name,omitempty"`
	Addr netip.AddrPort `json:"addr"`
	// Service is the Service port that the address belongs to, "NS/NAME:PORT".
	Service string `json:"service,omitempty"`
}

// Leg is the part of the story to which a step belongs.
type Leg string

// The legs, in order.
const (
	Lookup  Leg = "lookup"
	Forward Leg = "request"
	Back    Leg = "reply"
)

// Kind says what a step is.
type Kind string

// The kinds of steps.
const (
	KindQuery   Kind = "query"   // a name was asked for
	KindSocket  Kind = "socket"  // the client opened a socket
	KindDevice  Kind = "device"  // the packet crossed a device
	KindRule    Kind = "rule"    // a rule matched, or a chain's policy decided
	KindNAT     Kind = "nat"     // addresses were translated
	KindRoute   Kind = "route"   // the kernel chose where to send it
	KindDeliver Kind = "deliver" // the packet reached a socket, or nobody
	KindHop     Kind = "hop"     // a userspace program took the connection and made another
	KindAnswer  Kind = "answer"  // the application's answer
)

// Step is one thing that happened.
type Step struct {
	Leg  Leg  `json:"leg"`
	Kind Kind `json:"kind"`
	// Place is where: a node's name, "outside", "fabric" (the wire between the
	// nodes), or "pod/NAMESPACE/NAME".
	Place string `json:"place"`
	// Text says it in a sentence.
	Text string `json:"text"`
	// Inferred says what the step was concluded from. It is empty for what was
	// seen.
	Inferred string `json:"inferred,omitempty"`
	// Objects are the API objects that the sentence is about, as KIND/NS/NAME.
	Objects []string `json:"objects,omitempty"`

	Device    string `json:"device,omitempty"`
	Direction string `json:"direction,omitempty"` // in, out
	// Peer is what the device leads to.
	Peer   string  `json:"peer,omitempty"`
	Packet *Packet `json:"packet,omitempty"`

	Hook   string `json:"hook,omitempty"` // prerouting, input, forward, output, postrouting
	Family string `json:"family,omitempty"`
	Table  string `json:"table,omitempty"`
	Chain  string `json:"chain,omitempty"`
	Rule   *Rule  `json:"rule,omitempty"`
	// Verdict is the kernel's: accept, drop, continue, return, jump CHAIN, goto CHAIN.
	Verdict string `json:"verdict,omitempty"`

	NAT   *NAT   `json:"nat,omitempty"`
	Route string `json:"route,omitempty"`
	Query *Query `json:"query,omitempty"`
	// AtMicroseconds is the time since the trace began, where the kernel tells.
	At int64 `json:"atMicroseconds,omitempty"`
}

// Rule is a rule of the kernel, in the words of its tool.
type Rule struct {
	Handle uint64 `json:"handle,omitempty"`
	// Number counts from 1 in the chain; Of is how many rules the chain has.
	Number int    `json:"number,omitempty"`
	Of     int    `json:"of,omitempty"`
	Text   string `json:"text"`
}

// NAT is a translation, as connection tracking holds it.
type NAT struct {
	Kind string         `json:"kind"` // dnat, snat
	From netip.AddrPort `json:"from"`
	To   netip.AddrPort `json:"to"`
	// Conntrack is the entry in the words of conntrack(8).
	Conntrack string `json:"conntrack"`
}

// Packet is what was seen of a packet.
type Packet struct {
	Src   netip.AddrPort `json:"src"`
	Dst   netip.AddrPort `json:"dst"`
	Proto string         `json:"proto"`
	Flags string         `json:"flags,omitempty"` // S, S., R, R., …, as tcpdump writes them
	TTL   uint8          `json:"ttl,omitempty"`
	// ICMP is what an ICMP error says.
	ICMP string `json:"icmp,omitempty"`
}

// String writes the packet in one line.
func (p *Packet) String() string {
	if p.ICMP != "" {
		return fmt.Sprintf("icmp %s > %s: %s", p.Src.Addr(), p.Dst.Addr(), p.ICMP)
	}
	s := fmt.Sprintf("%s %s > %s", p.Proto, p.Src, p.Dst)
	if p.Flags != "" {
		s += " [" + p.Flags + "]"
	}
	return s
}

// Query is one question to a name server.
type Query struct {
	Name   string   `json:"name"`
	Type   string   `json:"type"`
	Server string   `json:"server"`
	Answer string   `json:"answer"` // NOERROR, NXDOMAIN, …, or what went wrong
	Values []string `json:"values,omitempty"`
}

// Hop is a place on the path.
type Hop struct {
	Place string `json:"place"`
	// In and Out are the devices by which the packet came and went.
	In  string `json:"in,omitempty"`
	Out string `json:"out,omitempty"`
}

// Verdict is how the request ended.
type Verdict struct {
	// Outcome is answered, connected, refused, timeout, unreachable, unresolved or
	// error: what the client saw.
	Outcome string `json:"outcome"`
	// Reason is a word for scripts; see the list in docs/trace.md. It is "ok" when
	// the request was answered.
	Reason string `json:"reason"`
	// Place is where the request ended.
	Place string `json:"place,omitempty"`
	// Text says it in a sentence, Fix what can be done.
	Text string `json:"text"`
	Fix  string `json:"fix,omitempty"`
	// Endpoint is who answered, or would have.
	Endpoint netip.AddrPort `json:"endpoint,omitzero"`
	Pod      string         `json:"pod,omitempty"`
	Objects  []string       `json:"objects,omitempty"`
}

// OK says that the request was answered.
func (v Verdict) OK() bool { return v.Reason == "ok" }

// OK says that every request was answered.
func (r *Report) OK() bool {
	for _, t := range r.Traces {
		if !t.Verdict.OK() {
			return false
		}
	}
	return true
}
