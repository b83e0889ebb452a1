// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"net/netip"
	"strings"
)

// RuleEvent is one thing that a rule or a policy did to a packet, or one line of a
// mode's program.
type RuleEvent struct {
	Node   string
	Hook   string // empty for a line of the program
	Family string // ip, ip6, inet
	Table  string
	Chain  string
	// Rule is nil for a policy.
	Rule *Rule
	// All are the rules of the chain.
	All []Rule
	// Verdict is as in Step, To the chain of a jump or goto.
	Verdict, To string
	// Packet is what the hook was entered with; nil for a line of the program.
	Packet *Packet
	// After is the packet's destination when it left the node's translation; invalid
	// when nothing shows it.
	After netip.AddrPort
}

// Sentence is an event in plain words.
type Sentence struct {
	Text    string
	Objects []string
	// Inferred says what was concluded, and from what; empty when all of it was
	// seen.
	Inferred string
	// Reason is a word for the verdict when the event is the packet's end.
	Reason string
	// Endpoint is what the event chose, if it chose.
	Endpoint netip.AddrPort
	// Port is the Service port that the event is about, "NS/NAME:PORT".
	Port string
}

// Explainer puts the rules of one proxy mode into words. It reads the program
// that was read back; it never renders one.
type Explainer interface {
	// Mode is the mode's name.
	Mode() string
	// Owns says whether a chain is the mode's.
	Owns(family, table, chain string) bool
	// Explain puts an event in one of the mode's chains, or in a built-in chain by a
	// rule that leads to one, into a sentence. ok is false when it has nothing to say.
	Explain(e *RuleEvent, x *Index) (s Sentence, ok bool)
}

// explainers are those of all modes that leave rules to read. A packet meets the
// rules of any mode that are there, whatever mode the node is in.
func explainers() []Explainer {
	return []Explainer{userspaceExplainer{}, iptablesExplainer{}, nftablesExplainer{}}
}

// explain asks every mode, and falls back on what the rule itself says.
func explain(e *RuleEvent, x *Index) Sentence {
	for _, m := range explainers() {
		if s, ok := m.Explain(e, x); ok {
			return s
		}
	}
	switch {
	case e.Table == "kplab-node":
		return Sentence{Text: "the lab's own table, which keeps connection tracking in place and decides nothing"}
	case e.Rule == nil && e.Verdict == "accept":
		return Sentence{Text: fmt.Sprintf("no rule of %s decides: its policy is to accept", e.Chain)}
	case e.Rule == nil:
		return Sentence{Text: fmt.Sprintf("no rule of %s decides: its policy is to %s", e.Chain, e.Verdict), Reason: "policy-drop"}
	case e.Verdict == "drop" && (strings.Contains(e.Rule.Text, "REJECT") || strings.Contains(e.Rule.Text, "reject")):
		return Sentence{Text: "a rule that is not the proxy's refuses it", Reason: "rejected"}
	case e.Verdict == "drop":
		return Sentence{Text: "a rule that is not the proxy's drops it", Reason: "dropped"}
	}
	return Sentence{Text: "a rule that is not the proxy's: " + e.Verdict}
}

// serviceText names a Service port in a sentence.
func serviceText(port string) string {
	name, p, ok := strings.Cut(port, ":")
	if ok {
		return fmt.Sprintf("Service %s (port %s)", name, p)
	}
	return "Service " + name
}

func serviceObject(port string) []string {
	name, _, _ := strings.Cut(port, ":")
	return []string{"service/" + name}
}

// noEndpoints says why a Service port has nobody to send to.
func noEndpoints(port string, proto string, x *Index) (string, []string) {
	name, portName, _ := strings.Cut(port, ":")
	objects := []string{"service/" + name}
	s := x.Service(name)
	if s == nil {
		return "", objects
	}
	for i := range s.Spec.Ports {
		n := PortName(s, &s.Spec.Ports[i])
		if n.Port != portName || !strings.EqualFold(string(n.Protocol), proto) {
			continue
		}
		var notReady, elsewhere []string
		for _, e := range x.Endpoints(n) {
			who := e.Addr.String()
			if e.Pod != "" {
				who = "pod " + e.Pod
				objects = append(objects, "pod/"+e.Pod)
			}
			if e.Node != "" {
				who += " on " + e.Node
			}
			if !e.Ready {
				notReady = append(notReady, who)
			} else {
				elsewhere = append(elsewhere, who)
			}
		}
		switch {
		case len(elsewhere) > 0:
			return "its ready endpoints are " + strings.Join(elsewhere, ", "), objects
		case len(notReady) > 0:
			return "not ready: " + strings.Join(notReady, ", "), objects
		}
		if len(s.Spec.Selector) == 0 {
			return "it has no selector and no EndpointSlice with an address", objects
		}
		var want []string
		for k, v := range s.Spec.Selector {
			want = append(want, k+"="+v)
		}
		return "no pod in " + s.Namespace + " with an address matches its selector " + strings.Join(want, ","), objects
	}
	return "", objects
}
