// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/node"
)

// way is how an exposed port gets to its target.
type way struct {
	// ns is the namespace that is entered, from its name for people.
	ns, from string
	addr     netip.AddrPort
	proto    string
	target   string
	path     string
}

// wayTo finds the way to a target, from what the API has now.
func (l *Lab) wayTo(r ExposeRequest) (way, error) {
	switch r.Proto {
	case "", "tcp", "udp":
	default:
		return way{}, fmt.Errorf("protocol %q: want tcp or udp", r.Proto)
	}
	w := way{ns: node.OutsideNS, from: node.OutsideNS, proto: cmp.Or(r.Proto, "tcp")}
	if r.From != "" && r.From != node.OutsideNS {
		if !slices.ContainsFunc(l.nodeConfigs(), func(n NodeConfig) bool { return n.Name == r.From }) {
			return way{}, fmt.Errorf("enter at %q: want outside or the name of a node", r.From)
		}
		w.ns, w.from = node.NSName(r.From), r.From
	}
	kind, name, isObject := strings.Cut(r.Target, "/")
	if !isObject {
		return l.wayToAddress(w, r.Target)
	}
	name, port, _ := strings.Cut(name, ":")
	namespace, name, _ := strings.Cut(Qualify(r.Namespace, name), "/")
	switch kind {
	case "svc", "service", "services":
		return l.wayToService(w, r, namespace, name, port)
	case "pod", "pods", "po":
		return l.wayToPod(w, r, namespace, name, port)
	}
	return way{}, fmt.Errorf("target %q: want svc/NAME[:PORT], pod/NAME[:PORT] or ADDRESS:PORT", r.Target)
}

// wayToAddress goes to an address, or to a node by its name.
func (l *Lab) wayToAddress(w way, target string) (way, error) {
	host, port, _ := strings.Cut(target, ":")
	for _, n := range l.nodeConfigs() {
		if n.Name == host {
			target = n.Address.String() + ":" + port
		}
	}
	addr, err := netip.ParseAddrPort(target)
	if err != nil {
		return way{}, fmt.Errorf("target %q: want svc/NAME[:PORT], pod/NAME[:PORT], or ADDRESS:PORT with an address or a node's name", target)
	}
	w.addr, w.target = addr, addr.String()
	w.path = fmt.Sprintf("%s -> %s", w.place(l), addr)
	return w, nil
}

// place names where the way enters the lab.
func (w *way) place(l *Lab) string {
	if w.from == node.OutsideNS {
		return fmt.Sprintf("outside (%s)", l.cfg.Networking.Outside)
	}
	for _, n := range l.nodeConfigs() {
		if n.Name == w.from {
			return fmt.Sprintf("node %s (%s)", n.Name, n.Address)
		}
	}
	return w.from
}

func (l *Lab) wayToService(w way, r ExposeRequest, namespace, name, port string) (way, error) {
	svc, err := l.informers.Core().V1().Services().Lister().Services(namespace).Get(name)
	if err != nil {
		return way{}, err
	}
	what := "Service " + namespace + "/" + name
	p, err := servicePort(svc, port, r.Proto)
	if err != nil {
		return way{}, fmt.Errorf("%s: %w", what, err)
	}
	if p.Protocol == corev1.ProtocolSCTP {
		return way{}, fmt.Errorf("%s: port %d is SCTP, which cannot be forwarded", what, p.Port)
	}
	w.proto = strings.ToLower(string(p.Protocol))
	w.target = fmt.Sprintf("svc/%s in %s, port %d", name, namespace, p.Port)
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		return way{}, fmt.Errorf("%s is only another name for %s; expose where that leads", what, svc.Spec.ExternalName)
	}
	if w.from != node.OutsideNS {
		ip, err := netip.ParseAddr(svc.Spec.ClusterIP)
		if err != nil {
			return way{}, fmt.Errorf("%s is headless: there is no rule to go through; expose one of its pods", what)
		}
		w.addr = netip.AddrPortFrom(ip, uint16(p.Port))
		w.path = fmt.Sprintf("%s -> ClusterIP %s, Service rules of %s -> a pod of %s", w.place(l), w.addr, w.from, name)
		return w, nil
	}
	for _, in := range svc.Status.LoadBalancer.Ingress {
		ip, err := netip.ParseAddr(in.IP)
		if err != nil {
			continue
		}
		w.addr = netip.AddrPortFrom(ip, uint16(p.Port))
		by := cmp.Or(svc.Annotations["kplab/announced-by"], "the node that answers ARP for it")
		w.path = fmt.Sprintf("%s -> load balancer address %s, announced by %s, Service rules there -> a pod of %s", w.place(l), w.addr, by, name)
		return w, nil
	}
	if p.NodePort == 0 {
		return way{}, fmt.Errorf("%s is of type %s: nothing leads to it from outside of the cluster; make it a NodePort or LoadBalancer, expose one of its pods (pod/NAME), or enter at a node with --from %s", what, svc.Spec.Type, l.entry(svc).Name)
	}
	n := l.entry(svc)
	w.addr = netip.AddrPortFrom(n.Address, uint16(p.NodePort))
	w.path = fmt.Sprintf("%s -> nodePort %s of %s, Service rules there -> a pod of %s", w.place(l), w.addr, n.Name, name)
	return w, nil
}

// entry is the node by which outside comes in: with policy Local one that has an
// endpoint, else the first worker that is ready.
func (l *Lab) entry(svc *corev1.Service) NodeConfig {
	with := map[string]bool{}
	if svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		ofService := labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: svc.Name})
		// A lister of a cache does not fail.
		slices, _ := l.informers.Discovery().V1().EndpointSlices().Lister().EndpointSlices(svc.Namespace).List(ofService)
		for _, s := range slices {
			for _, e := range s.Endpoints {
				if ptr.Deref(e.Conditions.Ready, true) {
					with[ptr.Deref(e.NodeName, "")] = true
				}
			}
		}
	}
	rank := func(n NodeConfig) int {
		switch {
		case with[n.Name]:
			return 0
		case n.Role == Worker && l.nodeReady(n.Name):
			return 1
		case l.nodeReady(n.Name):
			return 2
		}
		return 3
	}
	return slices.MinFunc(l.nodeConfigs(), func(a, b NodeConfig) int { return cmp.Compare(rank(a), rank(b)) })
}

// servicePort finds a port by number or name; without one the Service must leave no
// choice.
func servicePort(svc *corev1.Service, port, proto string) (*corev1.ServicePort, error) {
	var found []*corev1.ServicePort
	var all []string
	for i := range svc.Spec.Ports {
		p := &svc.Spec.Ports[i]
		all = append(all, strings.Trim(fmt.Sprintf("%d/%s %s", p.Port, p.Protocol, p.Name), " "))
		if (port == "" || port == p.Name || port == strconv.Itoa(int(p.Port))) && (proto == "" || strings.EqualFold(proto, string(p.Protocol))) {
			found = append(found, p)
		}
	}
	switch {
	case len(found) == 0 && len(all) == 0:
		return nil, fmt.Errorf("it has no ports")
	case len(found) == 0:
		return nil, fmt.Errorf("it has no such port; it has %s", strings.Join(all, ", "))
	case len(found) > 1:
		return nil, fmt.Errorf("say which port, as svc/NAME:PORT and with --proto where two have one number; it has %s", strings.Join(all, ", "))
	}
	return found[0], nil
}

func (l *Lab) wayToPod(w way, r ExposeRequest, namespace, name, port string) (way, error) {
	pod, err := l.informers.Core().V1().Pods().Lister().Pods(namespace).Get(name)
	if err != nil {
		return way{}, err
	}
	what := "pod " + namespace + "/" + name
	ip, err := netip.ParseAddr(pod.Status.PodIP)
	if err != nil {
		return way{}, fmt.Errorf("%s has no address yet (phase %s)", what, pod.Status.Phase)
	}
	number, err := podPort(pod, port, w.proto)
	if err != nil {
		return way{}, fmt.Errorf("%s: %w", what, err)
	}
	w.addr = netip.AddrPortFrom(ip, number)
	w.target = fmt.Sprintf("pod/%s in %s, port %d", name, namespace, number)
	why := ""
	if r.From == "" {
		w.ns, w.from = node.NSName(pod.Spec.NodeName), pod.Spec.NodeName
		why = " (outside has no route to pods)"
	}
	w.path = fmt.Sprintf("%s%s -> pod %s; no Service rules", w.place(l), why, w.addr)
	return w, nil
}

func podPort(pod *corev1.Pod, port, proto string) (uint16, error) {
	if n, err := strconv.ParseUint(port, 10, 16); err == nil && n > 0 {
		return uint16(n), nil
	}
	var found []int32
	for _, c := range pod.Spec.Containers {
		for _, p := range c.Ports {
			if strings.EqualFold(proto, cmp.Or(string(p.Protocol), "TCP")) && (port == "" || p.Name == port) {
				found = append(found, p.ContainerPort)
			}
		}
	}
	if len(found) != 1 {
		return 0, fmt.Errorf("port %q: the pod's containers name %d such ports; say its number, as pod/NAME:PORT", port, len(found))
	}
	return uint16(found[0]), nil
}
