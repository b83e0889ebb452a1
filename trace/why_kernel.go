// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/kplab/kplab/internal/netns"
)

// What the kernel makes of a Service: the second half of the way.

// programListens looks at the sockets of the pods behind a Service.
func programListens(p *patient) []Cause {
	var dead []string
	var c Cause
	looked := 0
	for _, e := range p.ready() {
		if e.Pod == "" {
			continue
		}
		place, err := p.lab.Place("pod/"+e.Pod, "")
		if err != nil {
			continue // it has just gone, or is not of this lab
		}
		open, err := Listening(place.ns, p.proto())
		if err != nil {
			continue
		}
		looked++
		found, loopback := false, false
		var have []string
		for _, s := range open {
			if s.Addr.Port() == e.Addr.Port() {
				loopback = loopback || s.Addr.Addr().IsLoopback()
				found = found || !s.Addr.Addr().IsLoopback()
			}
			if text := s.Addr.String(); !slices.Contains(have, text) {
				have = append(have, text)
			}
		}
		if found {
			continue
		}
		dead = append(dead, afterSlash(e.Pod))
		c = Cause{
			Reason: "no-listener", Text: fmt.Sprintf("nobody listens on port %d/%s in pod %s, to which port %s of Service %s leads; open there: %s", e.Addr.Port(), p.proto(), e.Pod, portText(p.spec), p.key, orWord(strings.Join(have, ", "), "nothing")),
			Fix:      "set the Service's targetPort to a port that is open, or let the program listen there",
			Evidence: []string{fmt.Sprintf("/proc/net/%s of pod %s: %s", p.proto(), e.Pod, orWord(strings.Join(have, ", "), "no socket"))},
		}
		if loopback {
			c.Reason, c.Text = "listens-on-loopback", fmt.Sprintf("the program in pod %s listens on port %d of 127.0.0.1 only, where nobody outside of the pod can reach it", e.Pod, e.Addr.Port())
			c.Fix = "let the program listen on all addresses (0.0.0.0)"
		}
	}
	if len(dead) == 0 {
		return nil
	}
	if len(dead) < looked {
		c.Text += fmt.Sprintf("; so it is in %d of %d pods, and requests to the others are answered", len(dead), looked)
	}
	return []Cause{c}
}

// nameResolves asks the cluster's DNS for the Service, from where the request comes,
// else from a pod.
func nameResolves(p *patient) []Cause {
	from := p.resolver()
	if from == nil || p.clusterIP() == (netip.Addr{}) && !p.headless() {
		return nil
	}
	name := p.name() + "." + p.namespace() + "."
	for _, line := range strings.Split(from.ResolvConf, "\n") {
		for _, word := range strings.Fields(line) {
			if strings.HasPrefix(word, "svc.") {
				name = p.name() + "." + p.namespace() + "." + word + "."
			}
		}
	}
	if strings.HasSuffix(name, p.namespace()+".") && from == p.from {
		return []Cause{{
			Reason: "dns-search", Text: fmt.Sprintf("%s has no search path of the cluster in its /etc/resolv.conf, so that short names of Services do not resolve there", from.Name),
			Fix: "set the pod's dnsPolicy to ClusterFirst, or use the full name " + p.name() + "." + p.namespace() + ".svc.cluster.local", Evidence: []string{"resolv.conf: " + strings.Join(strings.Fields(from.ResolvConf), " ")},
		}}
	}
	found, steps, dead := p.lab.lookup(p.ctx, from, name, p.x)
	if dead != nil {
		c := Cause{Reason: "dns-name", Text: fmt.Sprintf("the name %s does not resolve in %s: %s", name, from.Name, dead.Text), Fix: dead.Fix}
		if dead.Reason == "dns-failed" {
			c = p.dnsDead(from, dead)
		}
		for _, s := range steps {
			c.Evidence = append(c.Evidence, from.Name+": "+s.Text)
		}
		return []Cause{c}
	}
	if ip := p.clusterIP(); ip.IsValid() && ip.Is4() && found != ip {
		return []Cause{{Reason: "dns-stale", Text: fmt.Sprintf("the name %s gives %s and not the Service's address %s", name, found, ip), Fix: "wait until answers that are cached have expired (30 s), and see the log of coredns"}}
	}
	return nil
}

// dnsDead is a name server that does not answer.
func (p *patient) dnsDead(from *Place, dead *Verdict) Cause {
	c := Cause{Reason: "dns-dead", Text: fmt.Sprintf("cluster DNS does not answer %s: %s", from.Name, dead.Text), Fix: "kplab why svc/kube-system/kube-dns:dns"}
	p.known("", "dns-dead").blame(&c)
	return c
}

// reachable chooses what the request is sent to, and says when there is no such thing.
func reachable(p *patient) []Cause {
	switch {
	case p.headless():
		ready := p.ready()
		if len(ready) == 0 {
			return stop(Cause{Reason: "no-ready-endpoints", Text: fmt.Sprintf("headless Service %s has no endpoint that is ready", p.key), Fix: p.kubectl("get endpointslices -l kubernetes.io/service-name=%s", p.name()), Evidence: p.sliceEvidence()})
		}
		p.target = Target{Kind: "address", Name: ready[0].Addr.String()}
		p.notes = append(p.notes, fmt.Sprintf("Service %s is headless: its name gives the pods' addresses, and no proxy has a part in it", p.key))
	case p.from.Kind != "outside":
		p.target = Target{Kind: "service", Name: fmt.Sprintf("svc/%s:%d", p.key, p.spec.Port)}
	case len(p.svc.Status.LoadBalancer.Ingress) > 0 && p.svc.Status.LoadBalancer.Ingress[0].IP != "":
		p.target = Target{Kind: "address", Name: fmt.Sprintf("%s:%d", p.svc.Status.LoadBalancer.Ingress[0].IP, p.spec.Port)}
	case p.spec.NodePort != 0:
		if p.svc.Spec.Type == corev1.ServiceTypeLoadBalancer {
			p.notes = append(p.notes, "no load balancer has given the Service an address (kplab lb enable does); its nodePort was asked")
		}
		p.target = Target{Kind: "node", Name: fmt.Sprintf("node/%s:%d", p.nodeWithEndpoint(), p.spec.NodePort)}
		if without := p.nodesWithout(); len(without) > 0 && p.svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
			p.notes = append(p.notes, fmt.Sprintf("externalTrafficPolicy is Local: nodes without an endpoint (%s) drop what comes from outside", strings.Join(without, ", ")))
		}
	default:
		return stop(Cause{
			Reason: "cluster-ip-from-outside", Text: fmt.Sprintf("Service %s has a cluster IP only, %s: it is an address of rules on the nodes, and outside nobody has a route to it", p.key, p.svc.Spec.ClusterIP),
			Fix: "use type NodePort or LoadBalancer, or `kplab expose svc/" + p.key + "`",
		})
	}
	return nil
}

// nodeWithEndpoint is a node to send to: with policy Local one that has an endpoint.
func (p *patient) nodeWithEndpoint() string {
	for _, e := range p.ready() {
		if e.Node != "" && p.svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
			return e.Node
		}
	}
	nodes := p.lab.opts.Nodes
	return nodes[len(nodes)-1].Name
}

// nodesWithout are the nodes on which the Service has no endpoint that is ready.
func (p *patient) nodesWithout() (out []string) {
	for _, n := range p.lab.opts.Nodes {
		if !slices.ContainsFunc(p.ready(), func(e EndpointRef) bool { return e.Node == n.Name }) {
			out = append(out, n.Name)
		}
	}
	return out
}

// requestAnswered sends one real request.
func requestAnswered(p *patient) []Cause {
	if p.target.Name == "" {
		return nil
	}
	r, err := p.lab.Run(p.ctx, Request{From: p.from.Name, To: p.target.Name, Namespace: p.namespace(), Proto: p.proto(), Timeout: p.req.Timeout})
	var bad *TargetError
	if errors.As(err, &bad) {
		p.notes = append(p.notes, "no request was sent: "+err.Error())
		return nil
	}
	if err != nil {
		return []Cause{{Reason: "not-sent", Text: fmt.Sprintf("no request could be sent: %v", err)}}
	}
	t := r.Traces[0]
	v := t.Verdict
	p.probe = &v
	if v.OK() || p.proto() == "udp" && v.Reason == "no-answer" && strings.Contains(v.Text, "a program listens") {
		return nil
	}
	c := Cause{Reason: v.Reason, Text: fmt.Sprintf("a request from %s to %s failed: %s", p.from.Name, p.target.Name, v.Text), Fix: v.Fix}
	for _, s := range t.Steps[max(0, len(t.Steps)-3):] {
		c.Evidence = append(c.Evidence, s.Place+": "+s.Text)
	}
	p.interpret(&c, v)
	return []Cause{c}
}

// reachTime is how long a connection to an endpoint may take to come about.
const reachTime = 500 * time.Millisecond

// endpointsReached connects to each endpoint of the port, without the Service: one
// request says nothing of those that it did not meet.
func endpointsReached(p *patient) []Cause {
	all := p.ready()
	if p.proto() != "tcp" || len(all) < 2 || p.probe == nil || !p.probe.OK() {
		return nil
	}
	from := p.from
	if from.Kind == "outside" { // there is no way from there to pods but through a node
		var err error
		if from, err = p.lab.Place(p.viaNode(), ""); err != nil {
			return nil
		}
	}
	all = all[:min(len(all), mostPods)]
	failed := make([]error, len(all))
	ctx, cancel := context.WithTimeout(p.ctx, reachTime)
	defer cancel()
	var wg sync.WaitGroup
	for i, e := range all {
		wg.Go(func() {
			c, err := from.ns.Dial(ctx, "tcp", e.Addr.String())
			if failed[i] = err; err == nil {
				_ = c.Close() // nothing was written
			}
		})
	}
	wg.Wait()
	var names []string
	var first *EndpointRef
	for i, e := range all {
		if failed[i] == nil || errors.Is(failed[i], unix.ECONNREFUSED) { // whoever refuses was reached
			continue
		}
		if first == nil {
			first = &all[i]
		}
		names = append(names, e.Addr.String())
	}
	if first == nil {
		return nil
	}
	c := Cause{Reason: "endpoint-unreachable", Text: fmt.Sprintf("of %d endpoints of Service %s, %s cannot be reached from %s", len(all), p.key, strings.Join(names, ", "), from.Name)}
	r, err := p.lab.Run(p.ctx, Request{From: from.Name, To: first.Addr.String(), Proto: "tcp", Timeout: reachTime})
	if err != nil || r.Traces[0].Verdict.OK() {
		return []Cause{c}
	}
	v := r.Traces[0].Verdict
	c.Reason, c.Fix = v.Reason, v.Fix
	c.Text += ": " + v.Text
	for _, s := range r.Traces[0].Steps[max(0, len(r.Traces[0].Steps)-3):] {
		c.Evidence = append(c.Evidence, s.Place+": "+s.Text)
	}
	p.interpret(&c, v)
	return []Cause{c}
}

// interpret finds what is behind a request that failed.
func (p *patient) interpret(c *Cause, v Verdict) {
	switch v.Reason {
	case "dropped", "rejected":
		// A rule that the lab wrote itself.
		for _, where := range p.stations(v) {
			if f := p.known(where, "dns-dead", "conn-limit"); f != nil && strings.Contains(v.Text, f.Kind) { // the rule names it
				c.Reason = f.Kind
				c.Text += fmt.Sprintf("; %s: %s", f.ID, f.Says)
				f.blame(c)
				return
			}
		}
	case "no-rule", "no-service", "no-endpoints", "wrong-port":
		if len(p.ready()) > 0 {
			p.proxyTrouble(c, p.viaNode())
			return
		}
	case "no-local-endpoints":
		c.Reason = "no-local-endpoints"
		c.Fix = fmt.Sprintf("ask a node that has an endpoint, or set the traffic policy to Cluster: %s", p.kubectl("patch service %s -p '{\"spec\":{\"%s\":\"Cluster\"}}'", p.name(), p.localPolicy()))
		return
	}
	if name := p.policy(v); name != "" {
		c.Reason, c.Text = "network-policy", fmt.Sprintf("a request from %s to %s is not let through: NetworkPolicy %s isolates the pods", p.from.Name, p.target.Name, name)
		c.Fix = p.kubectl("describe networkpolicy %s", afterSlash(name))
		return
	}
	if e := v.Endpoint; e.IsValid() && p.x.Pod(e.Addr()) == nil && len(p.selected) > 0 && !slices.ContainsFunc(p.endpoints(), func(r EndpointRef) bool { return r.Addr == e }) && e.Addr() != p.clusterIP() {
		c.Text = fmt.Sprintf("the rules of %s sent the request to %s, which is no endpoint of Service %s any more", p.viaNode(), e, p.key)
		p.proxyTrouble(c, p.viaNode())
		return
	}
	for _, kinds := range [][]string{{"node-killed", "node-stopped", "node-paused"}, {"link"}, {"conn-limit"}} {
		for _, where := range p.stations(v) {
			if f := p.known(where, kinds...); f != nil && (f.Node != "" || f.Kind == "conn-limit") {
				c.Reason = f.Kind
				c.Text += fmt.Sprintf("; %s: %s", f.ID, f.Says)
				f.blame(c)
				return
			}
		}
	}
}

// stations are the nodes that the request concerns.
func (p *patient) stations(v Verdict) []string {
	// Where the packet was seen last; then where it went to; then where it came from.
	out := []string{v.Place}
	if pod := p.x.Pod(v.Endpoint.Addr()); pod != nil {
		out = append(out, pod.Spec.NodeName)
	}
	if _, rest, ok := strings.Cut(p.target.Name, "node/"); ok {
		name, _, _ := cutPort(rest)
		out = append(out, name)
	}
	out = append(out, p.from.Node)
	return slices.DeleteFunc(out, func(s string) bool { return p.lab.node(s) == nil })
}

func (p *patient) localPolicy() string {
	if p.from.Kind == "outside" {
		return "externalTrafficPolicy"
	}
	return "internalTrafficPolicy"
}

// viaNode is the node whose rules the request meets first.
func (p *patient) viaNode() string {
	if _, rest, ok := strings.Cut(p.target.Name, "node/"); ok {
		name, _, _ := cutPort(rest)
		return name
	}
	if p.from.Node != "" {
		return p.from.Node
	}
	return p.nodeWithEndpoint()
}

// proxyTrouble says why a node's rules are not what they should be.
func (p *patient) proxyTrouble(c *Cause, name string) {
	n := p.lab.node(name)
	if n == nil {
		return
	}
	held := p.known(name, "rules-flushed", "proxy-frozen", "node-paused")
	switch {
	case n.Mode == "none":
		c.Reason = "no-proxy"
		c.Text += fmt.Sprintf("; node %s has no Service proxy (mode none)", name)
		c.Fix = fmt.Sprintf("kplab proxy set iptables --node %s, or run a proxy of your own there", name)
	case held != nil:
		c.Reason = held.Kind
		c.Text += fmt.Sprintf("; the proxy of %s does nothing: %s", name, held.Says)
		held.blame(c)
	case n.ProxyError != "":
		c.Reason = "proxy-fails"
		c.Text += fmt.Sprintf("; the proxy of %s fails since its last sync%s: %s", name, n.since(), n.ProxyError)
		c.Fix = "kplab proxy status"
	default:
		c.Reason = "rules-altered"
		c.Text += fmt.Sprintf("; the proxy of %s has nothing to complain about since its last sync%s: somebody else has changed its rules", name, n.since())
		c.Fix = fmt.Sprintf("kplab proxy rules %s --node %s; the proxy puts its rules back when it looks at all of them the next time, or at once with `kplab proxy set %s --node %s`", p.name(), name, n.Mode, name)
	}
}

// since says when the node's proxy did its work last, where that is known.
func (n *Node) since() string {
	if n.Synced.IsZero() {
		return ""
	}
	return " at " + n.Synced.Format(time.TimeOnly)
}

// policy returns a NetworkPolicy that isolates the pod a request was for, or comes from,
// in the direction of the request; empty when there is none.
func (p *patient) policy(v Verdict) string {
	if v.Reason == "no-listener" || v.OK() {
		return ""
	}
	list, err := p.lab.client.NetworkingV1().NetworkPolicies("").List(p.ctx, metav1.ListOptions{})
	if err != nil {
		return ""
	}
	pods := map[networkingv1.PolicyType]*corev1.Pod{networkingv1.PolicyTypeIngress: p.x.Pod(v.Endpoint.Addr())}
	if pods[networkingv1.PolicyTypeIngress] == nil && len(p.selected) > 0 {
		pods[networkingv1.PolicyTypeIngress] = p.selected[0]
	}
	if key, ok := strings.CutPrefix(p.from.Name, "pod/"); ok {
		pods[networkingv1.PolicyTypeEgress] = p.x.pods[key]
	}
	for i := range list.Items {
		n := &list.Items[i]
		selector, err := metav1.LabelSelectorAsSelector(&n.Spec.PodSelector)
		if err != nil {
			continue
		}
		for _, direction := range n.Spec.PolicyTypes {
			if pod := pods[direction]; pod != nil && pod.Namespace == n.Namespace && selector.Matches(labels.Set(pod.Labels)) {
				return n.Namespace + "/" + n.Name
			}
		}
	}
	return ""
}

// flowsFresh looks for UDP flows that connection tracking still sends to an endpoint
// that has gone, or to nobody since there was none when they began.
func flowsFresh(p *patient) []Cause {
	if p.spec == nil || p.proto() != "udp" || !p.clusterIP().Is4() || len(p.ready()) == 0 {
		return nil
	}
	n := p.lab.node(p.viaNode())
	if n == nil || n.Mode == "userspace" { // there the flows lead to the proxy itself
		return nil
	}
	place, err := p.lab.Place(n.Name, "")
	if err != nil {
		return nil
	}
	var stale []string
	err = place.ns.Do(func() error {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		for _, f := range flows {
			dst, _ := netip.AddrFromSlice(f.Forward.DstIP)
			src, _ := netip.AddrFromSlice(f.Reverse.SrcIP)
			if f.Forward.Protocol != unix.IPPROTO_UDP || dst.Unmap() != p.clusterIP() || f.Forward.DstPort != uint16(p.spec.Port) {
				continue
			}
			to := netip.AddrPortFrom(src.Unmap(), f.Reverse.SrcPort)
			if !slices.ContainsFunc(p.endpoints(), func(e EndpointRef) bool { return e.Addr == to }) {
				stale = append(stale, fmt.Sprintf("%s:%d → %s goes to %s", f.Forward.SrcIP, f.Forward.SrcPort, dst.Unmap(), to))
			}
		}
		return err
	})
	if err != nil || len(stale) == 0 {
		return nil
	}
	return []Cause{{
		Reason: "stale-conntrack", Text: fmt.Sprintf("%d UDP flows to Service %s are stuck in the connection tracking of %s to an address that is no endpoint", len(stale), p.key, n.Name),
		Fix:      fmt.Sprintf("kplab exec %s -- conntrack -D -p udp --orig-dst %s --orig-port-dst %d", n.Name, p.clusterIP(), p.spec.Port),
		Evidence: stale[:min(3, len(stale))],
	}}
}

// packetsFit compares the largest packets along the way with those that the two ends
// take for possible.
func packetsFit(p *patient) []Cause {
	if p.spec == nil {
		return nil
	}
	for _, e := range p.ready() {
		if e.Pod == "" || e.Node == "" {
			continue
		}
		pod, err := p.lab.Place("pod/"+e.Pod, "")
		if err != nil || pod.Kind != "pod" {
			continue
		}
		ends := min(deviceMTU(pod.ns, "eth0"), deviceMTU(p.from.ns, "eth0"))
		seen := map[string]bool{}
		for _, where := range []string{p.from.Node, e.Node} {
			place, err := p.lab.Place(where, "")
			if where == "" || seen[where] || err != nil {
				continue
			}
			seen[where] = true
			r := routeOf(place.ns, e.Addr.Addr(), netip.Addr{}, 0)
			if r.err != nil {
				continue
			}
			if mtu := deviceMTU(place.ns, r.dev); mtu > 0 && mtu < ends {
				return []Cause{{
					Reason: "mtu", Text: fmt.Sprintf("device %s of node %s carries packets of %d bytes at most, and both ends of the way to pod %s send up to %d: small answers pass, large ones may not", r.dev, place.Name, mtu, e.Pod, ends),
					Fix: fmt.Sprintf("kplab exec %s -- ip link set %s mtu %d", place.Name, r.dev, ends), Evidence: []string{fmt.Sprintf("ip link show %s on %s: mtu %d", r.dev, place.Name, mtu)},
				}}
			}
		}
	}
	return nil
}

// deviceMTU is the largest packet of a device, 0 when there is no such device.
func deviceMTU(ns *netns.NS, name string) (mtu int) {
	_ = ns.Do(func() error { // 0 says that it is not known
		link, err := netlink.LinkByName(name)
		if err == nil {
			mtu = link.Attrs().MTU
		}
		return err
	})
	return mtu
}
