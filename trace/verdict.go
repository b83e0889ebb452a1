// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// answer tells what the application said.
func (j *journey) answer() {
	if len(j.client.answer) == 0 {
		return
	}
	text := string(j.client.answer)
	first, _, _ := strings.Cut(text, "\r\n")
	s := &Step{Leg: Back, Kind: KindAnswer, Place: j.from.Name}
	if strings.HasPrefix(text, "HTTP/") {
		s.Text = "answer: " + first
		for _, name := range []string{"X-Kplab-Pod", "X-Kplab-Node", "X-Kplab-Client"} {
			if v := httpHeader(text, name); v != "" {
				s.Text += fmt.Sprintf("; %s: %s", name, v)
			}
		}
	} else {
		s.Text = fmt.Sprintf("answer: %d bytes, %q", len(text), printable(text))
	}
	j.add(s)
}

func httpHeader(response, name string) string {
	for l := range strings.SplitSeq(response, "\r\n") {
		if k, v, ok := strings.Cut(l, ": "); ok && strings.EqualFold(k, name) {
			return v
		}
	}
	return ""
}

// printable cuts an answer that is no HTTP to a line.
func printable(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < 32 || r > 126 {
			return '.'
		}
		return r
	}, s)
	if len(s) > 60 {
		s = s[:57] + "..."
	}
	return s
}

// verdict says how it ended, and why. e is where the request was seen last.
func (j *journey) verdict(e ending) {
	v := &j.trace.Verdict
	v.Place = j.from.Name
	if e.place != nil {
		v.Place = e.place.Name
	}
	v.Endpoint = e.endpoint
	if !v.Endpoint.IsValid() && e.header != nil {
		v.Endpoint = e.header.dst
	}
	if p := j.x.Pod(v.Endpoint.Addr()); p != nil {
		v.Pod = p.Namespace + "/" + p.Name
		v.Objects = append(v.Objects, "pod/"+v.Pod)
	}
	v.Objects = append(v.Objects, e.sentence.Objects...)
	refused := errors.Is(j.client.err, unix.ECONNREFUSED)
	switch {
	case refused:
		v.Outcome = "refused"
	case j.client.err != nil:
		v.Outcome = "unreachable"
	case j.client.timedOut && !j.client.connected:
		v.Outcome = "timeout"
	}
	who := v.Endpoint.String()
	if v.Pod != "" {
		who = "pod " + v.Pod
	} else if d, _ := j.x.Describe(v.Endpoint.Addr()); d != "" {
		who = d
	}
	switch {
	case len(j.client.answer) > 0:
		v.Outcome, v.Reason = "answered", "ok"
		v.Text = fmt.Sprintf("answered by %s after %d µs", who, j.trace.Took)
	case j.client.connected:
		v.Outcome, v.Reason = "connected", "ok"
		v.Text = fmt.Sprintf("the connection to %s stands after %d µs; the program at its end says nothing to a question in HTTP", who, j.trace.Took)
	case e.dropped:
		v.Reason = e.sentence.Reason
		v.Text = e.sentence.Text
		if e.rule != "" {
			v.Text += "; the rule: " + e.rule
		}
		v.Fix = fixes[v.Reason]
	case j.unreachable(v, e):
	case e.header == nil:
		v.Reason = "not-sent"
		v.Text = fmt.Sprintf("no packet left %s: %v", j.from.Name, orTimeout(j.client.err))
	default:
		j.vanished(v, e)
	}
	if v.Outcome == "" {
		v.Outcome = "error"
	}
}

func orTimeout(err error) error {
	if err == nil {
		return errors.New("nothing happened until the time was over")
	}
	return err
}

// fixes are what can be done about a reason.
var fixes = map[string]string{
	"no-endpoints":       "see `kubectl get endpointslices` and the pods' readiness",
	"no-local-endpoints": "use a node that has an endpoint, or set the traffic policy to Cluster",
	"source-range":       "add the client's address to spec.loadBalancerSourceRanges",
	"wrong-port":         "use one of the Service's ports",
	"no-service":         "see `kubectl get svc -A`",
	"policy-drop":        "a chain's policy is to drop: see the rules named above",
	"dropped":            "somebody added this rule: remove it with the tool that it belongs to",
	"rejected":           "somebody added this rule: remove it with the tool that it belongs to",
}

// unreachable is for errors that the network reports.
func (j *journey) unreachable(v *Verdict, e ending) bool {
	for _, f := range j.frames {
		if f.proto != unix.IPPROTO_ICMP || f.quoted == nil || !j.mark.back(f.header, nil) {
			continue
		}
		if f.icmpType == 3 && f.icmpCode == 4 {
			v.Reason = "mtu"
			v.Text = fmt.Sprintf("a packet is too large for the way: %s says that the largest there is %d bytes", f.src.Addr(), f.mtu)
			v.Fix = "set the same MTU everywhere, or let ICMP fragmentation-needed pass"
			return true
		}
	}
	if e.header == nil && (errors.Is(j.client.err, unix.ENETUNREACH) || errors.Is(j.client.err, unix.EHOSTUNREACH)) {
		to := j.trace.Target.Addr.Addr()
		v.Reason = "no-route"
		v.Text = fmt.Sprintf("%s has no route to %s: no packet was sent", j.from.Name, to)
		if n := j.x.serviceAt(to); n != "" && j.from.Kind == "outside" {
			v.Text += "; a cluster IP exists only on nodes and in pods"
			v.Fix = "use a nodePort or a load balancer address, or `kplab expose`"
		}
		return true
	}
	return false
}

// vanished is for a packet that no rule ended: it reached its destination and
// nobody was there, or the kernel had no way to go on.
func (j *journey) vanished(v *Verdict, e ending) {
	dst := e.header.dst
	refused := errors.Is(j.client.err, unix.ECONNREFUSED)
	proto := "tcp"
	if j.mark.udp {
		proto = "udp"
	}
	arrived := e.place.Kind != "fabric" && !e.left && j.isHome(e.place, dst.Addr())
	switch {
	case arrived && (refused || j.mark.udp):
		j.nobody(v, e, proto, refused)
	case arrived:
		v.Reason = "no-answer"
		v.Text = fmt.Sprintf("the packet reached %s, and nothing came back", e.place.Name)
		if j.replied() {
			v.Text = "the packet reached its destination and was answered, but the answer did not come back to the client"
			v.Reason = "answer-lost"
			v.Fix = "the answer must come back through the node that translated the request: see its last step"
		}
	case e.left && e.place.Kind == "fabric":
		v.Reason, v.Text = "lost", fmt.Sprintf("the packet left the node network by %s and was not seen behind it", e.dev)
	case e.left:
		j.wire(v, e, dst)
	case e.place.Kind == "fabric":
		v.Reason = "nobody-there"
		v.Text = fmt.Sprintf("the packet to %s ended in the node network: no node has that address", dst.Addr())
		if n, _, ok := j.x.Owner(j.trace.Target.Addr, proto); ok && dst == j.trace.Target.Addr {
			v.Reason = "no-rule"
			v.Text = fmt.Sprintf("no rule on the way translated the address of %s, so the packet went on to the node network, where nobody has it", serviceText(n.String()))
			v.Fix = "see `kplab proxy status` and `kplab proxy rules`"
		} else if key := j.x.serviceAt(dst.Addr()); key != "" {
			v.Reason, v.Fix = "wrong-port", fixes["wrong-port"]
			v.Text = fmt.Sprintf("%s is the cluster IP of Service %s, which has no port %d/%s: no rule translated the address, and nobody has it", dst.Addr(), key, dst.Port(), proto)
		} else if p := j.x.Pod(dst.Addr()); p != nil {
			v.Reason = "link-down"
			v.Text = fmt.Sprintf("the packet to pod %s/%s came to the node network, and node %s, where the pod is, did not take it: the node is off, or its link is down", p.Namespace, p.Name, p.Spec.NodeName)
			v.Fix = "see `kplab link show` and `kplab node list`"
		} else if n := j.x.nodeOf[dst.Addr()]; n != nil {
			v.Reason = "link-down"
			v.Text = fmt.Sprintf("the packet came to the node network, and node %s did not take it: the node is off, or its link is down", n.Name)
			v.Fix = "see `kplab link show` and `kplab node list`"
		}
	default:
		j.stuck(v, e, v.Endpoint)
	}
}

// isHome says whether an address is one of a place's own.
func (j *journey) isHome(p *Place, a netip.Addr) bool {
	return routeOf(p.ns, a, netip.Addr{}, 0).local
}

// replied says whether an answer was seen anywhere.
func (j *journey) replied() bool {
	return slices.ContainsFunc(j.frames, func(f *frame) bool { return f.proto != unix.IPPROTO_ICMP && j.mark.back(f.header, j.seen) })
}

// nobody is for a packet that arrived where nobody waits for it.
func (j *journey) nobody(v *Verdict, e ending, proto string, refused bool) {
	dst := e.header.dst
	open, err := Listening(e.place.ns, proto)
	var have []string
	listens := false
	for _, s := range open {
		listens = listens || s.Addr.Port() == dst.Port()
		if text := fmt.Sprintf("%d", s.Addr.Port()); !slices.Contains(have, text) && !s.Addr.Addr().IsLoopback() {
			have = append(have, text)
		}
	}
	also := "nothing at all"
	if len(have) > 0 {
		also = "only " + strings.Join(have, ", ")
	}
	who := e.place.Name
	if d, _ := j.x.Describe(dst.Addr()); d != "" {
		who = d
	}
	switch {
	case err != nil:
		v.Reason, v.Text = "no-listener", fmt.Sprintf("%s refuses port %d/%s", who, dst.Port(), proto)
	case listens && !refused:
		v.Reason, v.Text = "no-answer", fmt.Sprintf("the datagram reached %s, where a program listens on port %d/udp; it sent no answer to this payload", who, dst.Port())
	case listens:
		v.Reason, v.Text = "refused-by-program", fmt.Sprintf("the packet reached %s, where port %d/%s is open, and was refused", who, dst.Port(), proto)
	default:
		v.Reason = "no-listener"
		v.Text = fmt.Sprintf("the packet reached %s, where nobody listens on port %d/%s; %s is open there", who, dst.Port(), proto, also)
		v.Fix = "let the program listen there, or set the Service's targetPort to a port that is open"
	}
	if v.Reason == "no-listener" && e.place.Kind == "node" {
		if _, _, ok := j.x.Owner(j.trace.Target.Addr, proto); !ok {
			v.Text += "; no Service has this address and port"
			v.Fix = "see the nodePorts in `kubectl get svc -A`"
		}
	}
}

// wire is for a packet that left by a device and did not come out at its other end.
func (j *journey) wire(v *Verdict, e ending, dst netip.AddrPort) {
	v.Reason, v.Text = "lost", fmt.Sprintf("the packet left %s by %s and was not seen behind it", e.place.Name, e.dev)
	if !linkUp(e.place.ns, e.dev) {
		v.Reason, v.Text = "link-down", fmt.Sprintf("device %s of %s is down, or has no carrier", e.dev, e.place.Name)
		v.Fix = "set the link up again"
	} else if j.x.Pod(dst.Addr()) != nil && e.place.Kind == "node" {
		v.Reason, v.Text = "no-answer", fmt.Sprintf("the packet went to pod %s, and nothing came back", v.Pod)
	}
}

// stuck is for a packet that came into a node and did not go on.
func (j *journey) stuck(v *Verdict, e ending, dst netip.AddrPort) {
	r := routeOf(e.place.ns, dst.Addr(), e.header.src.Addr(), e.iif)
	switch {
	case r.err != nil:
		reason, why := r.reason()
		v.Reason = reason
		v.Text = fmt.Sprintf("%s does not route the packet from %s to %s that came by %s: %s", e.place.Name, e.header.src.Addr(), dst.Addr(), e.dev, why)
		switch reason {
		case "rp_filter":
			v.Fix = fmt.Sprintf("`kplab exec %s -- sysctl net.ipv4.conf.all.rp_filter net.ipv4.conf.%s.rp_filter`: the larger one counts; set both to 0 or 2", e.place.Name, e.dev)
		case "no-route":
			v.Fix = fmt.Sprintf("`kplab exec %s -- ip route get %s`", e.place.Name, dst.Addr())
		}
	case e.place == j.from && !r.local || e.hook == "postrouting":
		next := dst.Addr()
		if r.via.IsValid() {
			next = r.via
		}
		v.Reason, v.Text = "lost", fmt.Sprintf("the packet did not leave %s by %s", e.place.Name, r.dev)
		if st := neighbour(e.place.ns, r.dev, next); st == "FAILED" || st == "INCOMPLETE" {
			v.Reason = "no-neighbour"
			v.Text = fmt.Sprintf("nobody on %s of %s answers for %s: the neighbour entry is %s", r.dev, e.place.Name, next, st)
		} else if !linkUp(e.place.ns, r.dev) {
			v.Reason, v.Text = "link-down", fmt.Sprintf("device %s of %s is down, or has no carrier", r.dev, e.place.Name)
		}
	default:
		v.Reason = "lost"
		v.Text = fmt.Sprintf("the packet was seen last in %s, after %s, and no rule ended it", e.place.Name, orWord(e.hook, e.dev))
	}
}

func orWord(a, b string) string {
	if a != "" {
		return a
	}
	return b
}
