// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// nftablesExplainer knows the table of mode nftables, in kube-proxy's layout and in
// the compact one.
type nftablesExplainer struct{}

// Mode implements Explainer.
func (nftablesExplainer) Mode() string { return "nftables" }

// Owns implements Explainer.
func (nftablesExplainer) Owns(_, table, _ string) bool { return table == "kube-proxy" }

// nftChain takes the name of a chain of one Service port apart:
// KIND-HASH-NS/NAME/PROTO/PORT, and __ADDR/PORT for one of an endpoint.
func nftChain(name string) (kind, port string, endpoint netip.AddrPort, ok bool) {
	kind, rest, found := strings.Cut(name, "-")
	_, path, hashed := strings.Cut(rest, "-")
	if !found || !hashed || !strings.Contains(path, "/") {
		return "", "", netip.AddrPort{}, false
	}
	path, addr, isEndpoint := strings.Cut(path, "__")
	f := strings.Split(path, "/")
	if len(f) != 4 {
		return "", "", netip.AddrPort{}, false
	}
	port = f[0] + "/" + f[1]
	if f[3] != "" {
		port += ":" + f[3]
	}
	if isEndpoint {
		host, number, _ := strings.Cut(addr, "/")
		a, aerr := netip.ParseAddr(host)
		n, nerr := strconv.ParseUint(number, 10, 16)
		if aerr == nil && nerr == nil {
			endpoint = netip.AddrPortFrom(a, uint16(n))
		}
	}
	return kind, port, endpoint, true
}

// nftSteps are sentences for rules that are the same whatever the Service.
var nftSteps = map[string]string{
	"firewall-check":           "load balancer addresses: may this source use them?",
	"nodeport-endpoints-check": "nodePorts without endpoints are refused here, behind nat",
	"service-endpoints-check":  "addresses of Services without endpoints are refused here, behind nat",
	"cluster-ips-check":        "other ports of cluster IPs, and cluster IPs that no Service has, end here",
	"services":                 "every new connection is looked up among the Services",
	"masquerading":             "on the way out: does it have to be masqueraded?",
}

// Explain implements Explainer.
func (m nftablesExplainer) Explain(e *RuleEvent, x *Index) (Sentence, bool) {
	if e.Table != "kube-proxy" {
		return Sentence{}, false
	}
	if e.Rule == nil {
		if e.Verdict == "return" || e.Verdict == "continue" {
			return Sentence{Text: fmt.Sprintf("no rule of %s decides: back to where it was called", e.Chain)}, true
		}
		if e.Verdict == "accept" {
			return Sentence{Text: fmt.Sprintf("nothing in %s holds it back", e.Chain)}, true
		}
		return Sentence{}, false
	}
	text := e.Rule.Text
	if set, ok := strings.CutPrefix(e.Chain, "@"); ok {
		return m.element(set, text, x)
	}
	kind, port, endpoint, ofService := nftChain(e.Chain)
	s := Sentence{Port: port}
	if ofService {
		s.Objects = serviceObject(port)
	}
	switch {
	case strings.Contains(text, " vmap @"):
		return m.mapped(e, x), true
	case e.To != "" && nftSteps[e.To] != "":
		return Sentence{Text: nftSteps[e.To]}, true
	case e.Chain == "reject-chain" || e.Chain == "cluster-ips-check" || kind == "firewall":
		return m.refuse(e, x, kind, s), true
	case strings.Contains(text, "masquerade") && e.Chain == "masquerading":
		return m.masquerade(text), true
	case strings.Contains(text, "dnat"):
		return m.dnat(e, x, s), true
	case strings.Contains(text, "mark set") || strings.Contains(text, "0x00004000"):
		return m.mark(e, text, kind, s), true
	case kind == "endpoint":
		s.Text, s.Endpoint = "session affinity: the client is remembered for "+endpoint.String(), endpoint
		return s, true
	case e.To != "":
		return m.jump(e, x, s), true
	}
	return Sentence{}, false
}

// mapped explains a look-up in one of the maps that all Services share. What the
// packet asked for and where it led name the element.
func (nftablesExplainer) mapped(e *RuleEvent, x *Index) Sentence {
	_, rest, _ := strings.Cut(e.Rule.Text, " vmap @")
	set, _, _ := strings.Cut(rest, " ")
	if e.Packet == nil {
		return Sentence{Text: map[string]string{
			"service-ips": "the address, protocol and port are looked up among the Services", "service-nodeports": "the protocol and port are looked up among the nodePorts",
			"no-endpoint-services": "is it a Service without endpoints?", "no-endpoint-nodeports": "is it a nodePort without endpoints?",
			"firewall-ips": "is it a load balancer address with source ranges?",
		}[set]}
	}
	dst, proto := e.Packet.Dst, e.Packet.Proto
	nodePort := strings.Contains(set, "nodeport")
	key := fmt.Sprintf("%s . %s . %d", dst.Addr(), proto, dst.Port())
	if nodePort {
		key = fmt.Sprintf("%s . %d", proto, dst.Port())
	}
	verdict := e.Verdict
	element := fmt.Sprintf("element %s { %s : %s }", set, key, verdict)
	name, kind, _ := x.Owner(dst, proto)
	port := name.String()
	if _, p, _, ok := nftChain(e.To); ok {
		port = p
	}
	s := Sentence{Port: port, Objects: serviceObject(port)}
	if port == "/" {
		s = Sentence{Text: element}
		return s
	}
	what := fmt.Sprintf("%s/%s", dst, proto)
	if nodePort {
		what, kind = fmt.Sprintf("port %d/%s", dst.Port(), proto), "nodePort"
	}
	switch {
	case set == "firewall-ips":
		s.Text = fmt.Sprintf("%s is the load balancer address of %s, which limits who may use it: %s", what, serviceText(port), element)
	case strings.HasPrefix(set, "no-endpoint") && verdict == "drop":
		why, objects := noEndpoints(port, proto, x)
		s.Text = fmt.Sprintf("%s has endpoints, but none on this node, and its traffic policy is Local: dropped without a word (%s): %s", serviceText(port), why, element)
		s.Objects, s.Reason = objects, "no-local-endpoints"
	case strings.HasPrefix(set, "no-endpoint"):
		why, objects := noEndpoints(port, proto, x)
		s.Text = fmt.Sprintf("%s: %s has no endpoint that is ready (%s): %s", what, serviceText(port), why, element)
		s.Objects, s.Reason = objects, "no-endpoints"
	default:
		s.Text = fmt.Sprintf("%s is the %s of %s: %s", what, kind, serviceText(port), element)
	}
	return s
}

func (nftablesExplainer) refuse(e *RuleEvent, x *Index, kind string, s Sentence) Sentence {
	text := e.Rule.Text
	switch {
	case kind == "firewall":
		s.Text, s.Reason = fmt.Sprintf("the client is in none of the loadBalancerSourceRanges of %s: dropped without a word", serviceText(s.Port)), "source-range"
		if e.Packet == nil {
			s.Text = "clients in none of the loadBalancerSourceRanges are dropped without a word"
		}
	case strings.Contains(text, "invalid ports") || (e.Chain == "cluster-ips-check" && strings.Contains(text, "reject")):
		s.Text, s.Reason = "a cluster IP, but no port that its Service has: refused", "wrong-port"
		if e.Packet != nil {
			if n := x.serviceAt(e.Packet.Dst.Addr()); n != "" {
				var have []string
				for _, p := range x.Service(n).Spec.Ports {
					have = append(have, fmt.Sprintf("%d/%s", p.Port, protoName(p.Protocol)))
				}
				s.Text = fmt.Sprintf("%s is the cluster IP of Service %s, which has no port %d/%s, only %s: refused", e.Packet.Dst.Addr(), n, e.Packet.Dst.Port(), e.Packet.Proto, strings.Join(have, ", "))
				s.Objects = []string{"service/" + n}
			}
		}
	case e.Chain == "cluster-ips-check":
		s.Text, s.Reason = "an address of the Services' range that no Service has: dropped without a word", "no-service"
	default:
		s.Text, s.Reason = "refused: the sender is told that nobody is there", "no-endpoints"
		if e.Packet != nil {
			if n, _, ok := x.Owner(e.Packet.Dst, e.Packet.Proto); ok {
				s.Port = n.String()
				why, objects := noEndpoints(s.Port, e.Packet.Proto, x)
				s.Objects = objects
				s.Text = fmt.Sprintf("refused: %s has no endpoint that is ready (%s)", serviceText(s.Port), why)
			}
		}
	}
	return s
}

func (nftablesExplainer) masquerade(text string) Sentence {
	if strings.Contains(text, "hairpin") {
		return Sentence{Text: "a pod that reaches itself through a Service (hairpin): the source becomes the node's own address"}
	}
	return Sentence{Text: "marked 0x4000: the mark is taken off, and the source becomes the node's own address (masquerade)"}
}

func (nftablesExplainer) mark(e *RuleEvent, text, kind string, s Sentence) Sentence {
	switch {
	case strings.Contains(text, "fib saddr type local"):
		s.Text = "the node itself is the client: mark 0x4000, its source will be replaced"
	case e.Chain == "services":
		s.Text = "a cluster IP, and the client is not in the pods' range: mark 0x4000, its source will be replaced, so that the answer comes back through this node"
	case kind == "external" || strings.HasPrefix(e.Chain, "external-") || strings.HasPrefix(e.Chain, "nodeport-"):
		s.Text = "externalTrafficPolicy Cluster: the pod may be on another node; mark 0x4000, the source will be replaced and the answer comes back through this node"
	default:
		s.Text = "mark 0x4000: the source will be replaced on the way out (masquerade)"
	}
	return s
}

var (
	numgen  = regexp.MustCompile(`numgen random mod (\d+)(?: offset (\d+))?`)
	mapItem = regexp.MustCompile(`(\d+) : ([0-9.]+) \. (\d+)`)
)

// mapTargets are the endpoints in a rule's own map, by index.
func mapTargets(text string) map[int]netip.AddrPort {
	out := map[int]netip.AddrPort{}
	for _, m := range mapItem.FindAllStringSubmatch(text, -1) {
		i, _ := strconv.Atoi(m[1])
		a, err := netip.ParseAddr(m[2])
		n, nerr := strconv.ParseUint(m[3], 10, 16)
		if err == nil && nerr == nil {
			out[i] = netip.AddrPortFrom(a, uint16(n))
		}
	}
	return out
}

// dnat explains the rule that draws an endpoint. The kernel does not tell the number
// that it drew: the destination of the packet afterwards does.
func (nftablesExplainer) dnat(e *RuleEvent, x *Index, s Sentence) Sentence {
	if s.Port == "" && e.Packet != nil { // a chain that Services share
		if n, _, ok := x.Owner(e.Packet.Dst, e.Packet.Proto); ok {
			s.Port = n.String()
			s.Objects = serviceObject(s.Port)
		}
	}
	of := 1
	if m := numgen.FindStringSubmatch(e.Rule.Text); m != nil {
		of, _ = strconv.Atoi(m[1])
	}
	targets := mapTargets(e.Rule.Text)
	if e.Packet == nil {
		var all []string
		for i := range of {
			if t, ok := targets[i]; ok {
				all = append(all, describe(x, s.Port, t))
				for _, n := range x.portsOf(t, dnatProtocol(e.Rule.Text)) {
					if n.String() == s.Port {
						_, objects := x.DescribeEndpoint(n, t)
						s.Objects = append(s.Objects, objects...)
					}
				}
			}
		}
		s.Text = fmt.Sprintf("a number below %d is drawn, and the destination becomes the endpoint with it", of)
		if len(all) > 0 {
			s.Text += ": " + strings.Join(all, ", ")
		} else if strings.Contains(e.Chain, "endpoint") {
			s.Text = "the destination becomes the endpoint"
		}
		return s
	}
	if !e.After.IsValid() {
		s.Text = "the destination becomes one of the endpoints"
		return s
	}
	s.Endpoint = e.After
	for _, p := range x.ports(s.Port, e.Packet.Proto) {
		who, objects := x.DescribeEndpoint(p, e.After)
		s.Objects = append(s.Objects, objects...)
		s.Text = who
	}
	if s.Text == "" {
		s.Text = e.After.String()
	}
	drawn := ""
	for i, t := range targets {
		if t == e.After {
			drawn = strconv.Itoa(i)
		}
	}
	// In the compact layout the chain that draws is the one of the policy.
	if _, _, _, ofPort := nftChain(e.Chain); !ofPort && strings.Contains(e.Chain, "-local-") {
		s.Text += "; externalTrafficPolicy Local: only endpoints on this node, and the client's address is kept"
	}
	switch {
	case strings.HasPrefix(e.Chain, "endpoint-"):
		s.Text = "the destination becomes " + s.Text
	case of == 1:
		s.Text = "the only endpoint → " + s.Text
	case drawn != "":
		s.Text = fmt.Sprintf("drawn from 0…%d, chance 1/%d: %s → %s", of-1, of, drawn, s.Text)
		s.Inferred = "the number drawn: from the packet's destination behind the rule"
	default:
		s.Text = fmt.Sprintf("drawn from 0…%d, chance 1/%d → %s", of-1, of, s.Text)
		s.Inferred = "what was drawn: from the packet's destination behind the rule"
	}
	return s
}

// dnatProtocol is the protocol that a rule with a translation matches.
func dnatProtocol(text string) string {
	_, rest, _ := strings.Cut(text, "l4proto ")
	proto, _, _ := strings.Cut(rest, " ")
	return proto
}

func describe(x *Index, port string, a netip.AddrPort) string {
	for _, proto := range []string{"tcp", "udp", "sctp"} {
		for _, p := range x.ports(port, proto) {
			if _, ok := x.Endpoint(p, a); ok {
				who, _ := x.DescribeEndpoint(p, a)
				return who
			}
		}
	}
	return a.String()
}

// jump explains what leads from one chain of a Service to another.
func (nftablesExplainer) jump(e *RuleEvent, x *Index, s Sentence) Sentence {
	text := e.Rule.Text
	kind, port, endpoint, ok := nftChain(e.To)
	who := endpoint.String()
	if ok && endpoint.IsValid() {
		s.Port, s.Endpoint = port, endpoint
		who = describe(x, port, endpoint)
	}
	switch {
	case kind == "endpoint" && strings.Contains(text, "@affinity-"):
		s.Text = "session affinity: this node has sent this client to " + who + " before, and does so again"
		if e.Packet == nil {
			s.Text = "session affinity: clients that this node has sent to " + who + " go there again"
		}
	case kind == "endpoint":
		of := "1"
		if m := numgen.FindStringSubmatch(text); m != nil {
			of = m[1]
		}
		s.Text = fmt.Sprintf("drawn, chance 1/%s → %s", of, who)
	case strings.Contains(text, "fib saddr type local"):
		s.Text = "the node itself is the client: served from all endpoints, as at the cluster IP"
	case strings.Contains(text, "ip saddr "):
		s.Text = "a pod is the client: served from all endpoints, as at the cluster IP"
	case kind == "local":
		s.Text = "traffic policy Local: only endpoints on this node, and the client's address is kept"
	case kind == "service":
		s.Text = "to the endpoints"
	default:
		s.Text = "to " + e.To
	}
	return s
}

// element explains an element of a set that Services share.
func (nftablesExplainer) element(set, text string, x *Index) (Sentence, bool) {
	key, value, _ := strings.Cut(text, " : ")
	key, _, _ = strings.Cut(key, " comment ") // for people; the key says for certain whose it is
	f := strings.Split(key, " . ")
	var dst netip.AddrPort
	proto, index := "", ""
	number := func(s string) uint16 {
		n, err := strconv.ParseUint(strings.TrimSpace(s), 10, 16)
		if err != nil {
			return 0
		}
		return uint16(n)
	}
	addr, _ := netip.ParseAddr(f[0])
	switch {
	case set == "hairpin-connections" && len(f) == 4:
		s := Sentence{Text: fmt.Sprintf("the endpoint %s:%s runs on this node: what it sends to itself through a Service is masqueraded", f[0], f[3])}
		dst = netip.AddrPortFrom(addr, number(f[3]))
		for _, n := range x.portsOf(dst, f[2]) {
			s.Port, s.Endpoint = n.String(), dst
			who, objects := x.DescribeEndpoint(n, dst)
			s.Text = fmt.Sprintf("the endpoint %s runs on this node: what it sends to itself through a Service is masqueraded", who)
			s.Objects = append(serviceObject(s.Port), objects...)
		}
		return s, true
	case set == "cluster-ips":
		s := Sentence{Text: "a cluster IP"}
		if n := x.serviceAt(addr); n != "" {
			s.Text, s.Port, s.Objects = "the cluster IP of Service "+n, n, []string{"service/" + n}
		}
		return s, true
	case set == "nodeport-ips":
		return Sentence{Text: "nodePorts answer on this address"}, true
	case strings.HasPrefix(set, "affinity-"):
		_, port, endpoint, _ := nftChain(set)
		return Sentence{Text: fmt.Sprintf("the client %s is sent to %s again", f[0], endpoint), Port: port, Endpoint: endpoint}, true
	case len(f) == 2: // protocol and nodePort
		proto = f[0]
		for a := range x.nodeOf {
			dst = netip.AddrPortFrom(a, number(f[1]))
		}
	case len(f) >= 3:
		proto, dst = f[1], netip.AddrPortFrom(addr, number(f[2]))
		if addr.IsUnspecified() {
			for a := range x.nodeOf {
				dst = netip.AddrPortFrom(a, dst.Port())
			}
		}
		if len(f) == 4 {
			index = f[3]
		}
	default:
		return Sentence{}, false
	}
	n, kind, ok := x.Owner(dst, proto)
	s := Sentence{}
	what := fmt.Sprintf("%s/%s", dst, proto)
	if kind == "nodePort" {
		what = fmt.Sprintf("port %d/%s", dst.Port(), proto)
	}
	if _, port, _, of := nftChain(target(value)); !ok && of {
		s.Port = port
	} else if ok {
		s.Port = n.String()
	} else {
		return Sentence{Text: "no Service has this now"}, true
	}
	s.Objects = serviceObject(s.Port)
	switch {
	case index != "":
		host, port, _ := strings.Cut(value, " . ")
		a, _ := netip.ParseAddr(strings.TrimSpace(host))
		s.Endpoint = netip.AddrPortFrom(a, number(port))
		who, objects := x.DescribeEndpoint(n, s.Endpoint)
		s.Objects = append(s.Objects, objects...)
		s.Text = fmt.Sprintf("endpoint number %s of %s (%s of %s): %s", index, serviceText(s.Port), kind, what, who)
	case strings.HasPrefix(set, "no-endpoint") && strings.Contains(value, "drop"):
		s.Text = fmt.Sprintf("%s is the %s of %s, which has no endpoint on this node and traffic policy Local: dropped", what, kind, serviceText(s.Port))
	case strings.HasPrefix(set, "no-endpoint"):
		s.Text = fmt.Sprintf("%s is the %s of %s, which has no endpoint that is ready: refused", what, kind, serviceText(s.Port))
	case set == "firewall-ips":
		s.Text = fmt.Sprintf("%s is the %s of %s, which limits who may use it", what, kind, serviceText(s.Port))
	default:
		s.Text = fmt.Sprintf("%s is the %s of %s", what, kind, serviceText(s.Port))
	}
	return s, true
}
