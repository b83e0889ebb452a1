// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"
)

// iptablesExplainer knows the chains of mode iptables, which are kube-proxy's.
type iptablesExplainer struct{}

// Mode implements Explainer.
func (iptablesExplainer) Mode() string { return "iptables" }

// Owns implements Explainer.
func (iptablesExplainer) Owns(_, _, chain string) bool { return strings.HasPrefix(chain, "KUBE-") }

// iptablesRule is a rule as iptables-save prints it, taken apart.
type iptablesRule struct {
	words   []string
	comment string
	target  string
}

func parseIPTables(text string) iptablesRule {
	r := iptablesRule{words: splitWords(text)}
	r.comment = r.option("--comment")
	if r.target = r.option("-j"); r.target == "" {
		r.target = r.option("-g")
	}
	return r
}

// splitWords cuts at spaces outside of double quotes.
func splitWords(s string) []string {
	var out []string
	var w strings.Builder
	quoted := false
	for _, c := range s {
		switch {
		case c == '"':
			quoted = !quoted
		case c == ' ' && !quoted:
			if w.Len() > 0 {
				out = append(out, w.String())
				w.Reset()
			}
		default:
			w.WriteRune(c)
		}
	}
	if w.Len() > 0 {
		out = append(out, w.String())
	}
	return out
}

// option is the word after a flag; empty when it is not there.
func (r iptablesRule) option(flag string) string {
	for i, w := range r.words {
		if w == flag && i+1 < len(r.words) {
			return r.words[i+1]
		}
	}
	return ""
}

func (r iptablesRule) has(flag string) bool {
	for _, w := range r.words {
		if w == flag {
			return true
		}
	}
	return false
}

// Explain implements Explainer.
func (m iptablesExplainer) Explain(e *RuleEvent, x *Index) (Sentence, bool) {
	if e.Rule == nil || e.Rule.Text == "" {
		if e.Rule != nil || !strings.HasPrefix(e.Chain, "KUBE-") {
			return Sentence{}, false
		}
		return Sentence{Text: fmt.Sprintf("no rule of %s matches: back to where it was called", e.Chain)}, true
	}
	r := parseIPTables(e.Rule.Text)
	kind, _, _ := strings.Cut(strings.TrimPrefix(e.Chain, "KUBE-"), "-")
	if !strings.HasPrefix(e.Chain, "KUBE-") {
		return m.builtIn(e, r)
	}
	switch e.Chain {
	case "KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL":
		return m.hub(e, r, x), true
	case "KUBE-MARK-MASQ":
		return Sentence{Text: "mark 0x4000 is set: the source will be replaced on the way out (masquerade)"}, true
	case "KUBE-POSTROUTING":
		return m.postrouting(e, r), true
	case "KUBE-FORWARD", "KUBE-FIREWALL":
		return m.filter(e, r), true
	}
	owner, known := x.IPTablesChain(e.Chain)
	port := ""
	if known {
		port = owner.Port.String()
	}
	s := Sentence{Port: port}
	if port != "" {
		s.Objects = serviceObject(port)
	}
	switch kind {
	case "SVC", "SVL":
		return m.balance(e, r, x, s), true
	case "SEP":
		return m.endpoint(r, x, owner, s), true
	case "EXT":
		return m.external(r, s), true
	case "FW":
		return m.firewall(e, r, s), true
	}
	return s, false
}

// builtIn explains the jumps into the mode's chains.
func (iptablesExplainer) builtIn(e *RuleEvent, r iptablesRule) (Sentence, bool) {
	if !strings.HasPrefix(r.target, "KUBE-") {
		return Sentence{}, false
	}
	text := map[string]string{
		"KUBE-SERVICES":          "every new connection is compared with the list of Services",
		"KUBE-POSTROUTING":       "on the way out: does it have to be masqueraded?",
		"KUBE-FORWARD":           "forwarding for pods",
		"KUBE-FIREWALL":          "guard for 127.0.0.0/8",
		"KUBE-PROXY-FIREWALL":    "load balancer addresses: may this source use them?",
		"KUBE-NODEPORTS":         "health check ports of load balancers",
		"KUBE-EXTERNAL-SERVICES": "external addresses and nodePorts that lead nowhere",
	}[r.target]
	if e.Table == "filter" && r.target == "KUBE-SERVICES" {
		text = "cluster IPs without endpoints are refused here, behind nat"
	}
	if text == "" {
		text = "to " + r.target
	}
	return Sentence{Text: text}, true
}

// hub explains the chains that hold rules of all Services.
func (m iptablesExplainer) hub(e *RuleEvent, r iptablesRule, x *Index) Sentence {
	if r.target == "KUBE-NODEPORTS" {
		return Sentence{Text: "no Service has this address, and it is one of the node's own: the port may be a nodePort"}
	}
	port, what := commentPort(r.comment)
	s := Sentence{Port: port, Objects: serviceObject(port)}
	dst := strings.TrimSuffix(r.option("-d"), "/32")
	if dport := r.option("--dport"); dport != "" && dst != "" {
		dst += ":" + dport
	} else if dport != "" {
		dst = "port " + dport
	}
	proto := r.option("-p")
	switch r.target {
	case "REJECT", "DROP":
		return m.refuse(e, r, x, s, dst)
	case "ACCEPT":
		s.Text = fmt.Sprintf("%s/%s is the health check port of %s", dst, proto, serviceText(port))
		return s
	}
	kind := what
	if e.Chain == "KUBE-NODEPORTS" {
		kind = "nodePort"
	}
	switch kind {
	case "loadbalancer IP":
		kind = "load balancer address"
	case "external IP":
		kind = "external IP"
	case "":
		kind = "address"
	}
	s.Text = fmt.Sprintf("%s/%s is the %s of %s", dst, proto, kind, serviceText(port))
	return s
}

func (iptablesExplainer) refuse(e *RuleEvent, r iptablesRule, x *Index, s Sentence, dst string) Sentence {
	proto := r.option("-p")
	why, objects := noEndpoints(s.Port, proto, x)
	if why != "" {
		why = " (" + why + ")"
	}
	s.Objects = objects
	switch {
	case e.Chain == "KUBE-PROXY-FIREWALL":
		s.Text = fmt.Sprintf("the client is in none of the loadBalancerSourceRanges of %s: dropped without a word", serviceText(s.Port))
		s.Reason = "source-range"
	case r.target == "DROP":
		s.Text = fmt.Sprintf("%s has endpoints, but none on this node, and its traffic policy is Local: dropped without a word%s", serviceText(s.Port), why)
		s.Reason = "no-local-endpoints"
	default:
		s.Text = fmt.Sprintf("%s/%s: %s has no endpoint that is ready: refused%s", dst, proto, serviceText(s.Port), why)
		s.Reason = "no-endpoints"
	}
	return s
}

// commentPort takes "ns/name:port what" apart.
func commentPort(comment string) (port, what string) {
	port, what, _ = strings.Cut(comment, " ")
	return port, what
}

// balance explains a rule of a chain that spreads over endpoints.
func (iptablesExplainer) balance(e *RuleEvent, r iptablesRule, x *Index, s Sentence) Sentence {
	if r.target == "KUBE-MARK-MASQ" {
		s.Text = "the client is no pod, so the answer would not come back by itself"
		if cidr := r.option("-s"); cidr != "" {
			s.Text = fmt.Sprintf("the client is not in the pods' range %s: its source will be replaced, so that the answer comes back through this node", cidr)
		}
		return s
	}
	// The rules of endpoints, without those that mark or that remember clients.
	n, of := 0, 0
	for _, a := range e.All {
		q := parseIPTables(a.Text)
		if !strings.HasPrefix(q.target, "KUBE-SEP-") || q.has("--rcheck") != r.has("--rcheck") {
			continue
		}
		of++
		if a.Number == e.Rule.Number {
			n = of
		}
	}
	to := ""
	if o, ok := x.IPTablesChain(r.target); ok {
		var objects []string
		to, objects = x.DescribeEndpoint(o.Port, o.Endpoint)
		s.Objects = append(s.Objects, objects...)
		s.Endpoint = o.Endpoint
	} else if _, after, ok := strings.Cut(r.comment, " -> "); ok {
		to = after
	} else {
		to = r.target
	}
	taken := ": taken"
	if e.Packet == nil {
		taken = ""
	}
	switch {
	case r.has("--rcheck"):
		if e.Packet == nil {
			s.Text = fmt.Sprintf("session affinity: a client that this node sent to %s within the last %s s goes there again", to, r.option("--seconds"))
			break
		}
		s.Text = fmt.Sprintf("session affinity: this client was sent to %s by this node within the last %s s, and goes there again", to, r.option("--seconds"))
	case r.has("--probability"):
		s.Text = fmt.Sprintf("endpoint rule %d of %d, chance %s%s → %s", n, of, chance(r.option("--probability")), taken, to)
	case of == 1:
		s.Text = "the only endpoint → " + to
	default:
		s.Text = fmt.Sprintf("endpoint rule %d of %d, for whoever is left%s → %s", n, of, taken, to)
	}
	return s
}

// chance writes a probability as a fraction.
func chance(p string) string {
	f, err := strconv.ParseFloat(p, 64)
	if err != nil || f <= 0 {
		return p
	}
	if n := math.Round(1 / f); math.Abs(1/n-f) < 1e-6 {
		return "1/" + strconv.Itoa(int(n))
	}
	return p
}

func (iptablesExplainer) endpoint(r iptablesRule, x *Index, owner ChainOwner, s Sentence) Sentence {
	if r.target == "KUBE-MARK-MASQ" {
		s.Text = "a pod that reaches itself through the Service (hairpin): the source will be replaced, so that the answer comes back through the node"
		return s
	}
	to := r.option("--to-destination")
	s.Text = "the destination becomes " + to
	if a, err := netip.ParseAddrPort(to); err == nil {
		who, objects := x.DescribeEndpoint(owner.Port, a)
		s.Text, s.Endpoint = "the destination becomes "+who, a
		s.Objects = append(s.Objects, objects...)
	}
	if r.has("--set") {
		s.Text += "; the client is remembered (session affinity)"
	}
	return s
}

func (iptablesExplainer) external(r iptablesRule, s Sentence) Sentence {
	switch {
	case r.target == "KUBE-MARK-MASQ" && r.has("--src-type"):
		s.Text = "the node itself is the client: its source will be replaced"
	case r.target == "KUBE-MARK-MASQ":
		s.Text = "externalTrafficPolicy Cluster: the pod may be on another node, so the source will be replaced and the answer comes back through this node"
	case r.has("--src-type"):
		s.Text = "the node itself is the client: served from all endpoints, as at the cluster IP"
	case r.option("-s") != "":
		s.Text = "a pod is the client: served from all endpoints, as at the cluster IP"
	case strings.HasPrefix(r.target, "KUBE-SVL-"):
		s.Text = "externalTrafficPolicy Local: only endpoints on this node, and the client's address is kept"
	default:
		s.Text = "to the endpoints"
	}
	return s
}

func (iptablesExplainer) firewall(e *RuleEvent, r iptablesRule, s Sentence) Sentence {
	if r.target == "" {
		s.Text = "the client is in none of the loadBalancerSourceRanges: nothing is translated, and KUBE-PROXY-FIREWALL will drop it"
		return s
	}
	src := r.option("-s")
	if src == "" {
		src = "0.0.0.0/0"
	}
	s.Text = fmt.Sprintf("the client is in %s, one of the loadBalancerSourceRanges: let in", src)
	if e.Packet == nil {
		s.Text = fmt.Sprintf("clients in %s, one of the loadBalancerSourceRanges, are let in", src)
	}
	return s
}

func (iptablesExplainer) postrouting(e *RuleEvent, r iptablesRule) Sentence {
	switch r.target {
	case "RETURN":
		if e.Packet == nil {
			return Sentence{Text: "without mark 0x4000 the source stays as it is"}
		}
		return Sentence{Text: "no mark 0x4000: the source stays as it is"}
	case "MARK":
		return Sentence{Text: "mark 0x4000 is taken off again"}
	case "MASQUERADE":
		return Sentence{Text: "the source becomes the node's own address (masquerade)"}
	}
	return Sentence{Text: r.comment}
}

func (iptablesExplainer) filter(e *RuleEvent, r iptablesRule) Sentence {
	switch {
	case r.target == "DROP" && e.Chain == "KUBE-FIREWALL":
		return Sentence{Text: "a packet from the wire for 127.0.0.0/8 that no nodePort translated: dropped", Reason: "localnet"}
	case r.target == "DROP":
		return Sentence{Text: "connection tracking cannot place this packet (INVALID): dropped", Reason: "invalid"}
	case strings.Contains(r.option("--ctstate"), "ESTABLISHED"):
		return Sentence{Text: "belongs to a connection that was let through before: accepted"}
	case r.target == "ACCEPT":
		return Sentence{Text: "marked for masquerading: accepted for forwarding"}
	}
	return Sentence{Text: r.comment}
}
