// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/node"
)

// TargetError says that TO cannot be understood or found.
type TargetError struct{ msg string }

func (e *TargetError) Error() string { return e.msg }

func badTarget(format string, args ...any) error { return &TargetError{fmt.Sprintf(format, args...)} }

// parseTarget reads TO. A name that has to be looked up has no address yet, and
// port 0 when none was given.
func (l *Lab) parseTarget(to, namespace, proto string, x *Index) (Target, error) {
	name, portText, hasPort := cutPort(to)
	port := uint16(0)
	if hasPort {
		n, err := strconv.ParseUint(portText, 10, 16)
		isService := strings.HasPrefix(to, "svc/") || strings.HasPrefix(to, "service/")
		if (err != nil || n == 0) && !isService {
			return Target{}, badTarget("%q: port %q is no number from 1 to 65535", to, portText)
		}
		port = uint16(n)
	}
	kind, rest, _ := strings.Cut(name, "/")
	switch {
	case kind == "svc" || kind == "service":
		return serviceTarget(qualify(rest, namespace), portText, proto, x)
	case kind == "node":
		return l.nodeTarget(rest, port, to)
	case kind == "pod":
		return podTarget(qualify(rest, namespace), port, proto, x)
	case strings.Contains(name, "/"):
		return Target{}, badTarget("%q: want svc/[NS/]NAME[:PORT], pod/[NS/]NAME[:PORT], node/NAME:PORT, ADDRESS:PORT or a DNS name[:PORT]", to)
	case l.node(name) != nil:
		return l.nodeTarget(name, port, to)
	case name == node.OutsideNS:
		p, err := l.Place(name, "")
		if err != nil {
			return Target{}, err
		}
		a, err := firstAddr(p.ns)
		if err == nil && port == 0 {
			err = badTarget("%q: say a port, as in outside:8080", to)
		}
		return Target{Kind: "outside", Name: name, Addr: netip.AddrPortFrom(a, port)}, err
	}
	if a, err := netip.ParseAddr(strings.Trim(name, "[]")); err == nil {
		if !a.Is4() {
			return Target{}, badTarget("%q: only IPv4 can be traced", to)
		}
		if port == 0 {
			return Target{}, badTarget("%q: say a port, as in %s:80", to, a)
		}
		return Target{Kind: "address", Addr: netip.AddrPortFrom(a, port)}, nil
	}
	return Target{Kind: "name", Name: name, Addr: netip.AddrPortFrom(netip.Addr{}, port)}, nil
}

// cutPort takes ":PORT" off, and leaves an IPv6 address alone.
func cutPort(s string) (name, port string, ok bool) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 || (strings.Count(s, ":") > 1 && !strings.Contains(s, "]:")) {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

func qualify(name, namespace string) string {
	if strings.Contains(name, "/") {
		return name
	}
	return namespace + "/" + name
}

func serviceTarget(key, port, proto string, x *Index) (Target, error) {
	s := x.services[key]
	ns, name, _ := strings.Cut(key, "/")
	if s == nil {
		return Target{}, badTarget("no Service %s; see `kubectl get svc -n %s`", key, ns)
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		n, _ := strconv.ParseUint(port, 10, 16)
		return Target{Kind: "name", Name: name + "." + ns, Addr: netip.AddrPortFrom(netip.Addr{}, uint16(n)), Service: key}, nil
	}
	var chosen *corev1.ServicePort
	var have []string
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		have = append(have, strings.TrimPrefix(fmt.Sprintf("%s:%d/%s", p.Name, p.Port, protoName(p.Protocol)), ":"))
		if protoName(p.Protocol) != proto || chosen != nil {
			continue
		}
		if port == "" || port == p.Name || port == strconv.Itoa(int(p.Port)) {
			chosen = p
		}
	}
	t := Target{Kind: "service", Name: key}
	if s.Spec.ClusterIP == corev1.ClusterIPNone {
		return headlessTarget(t, s, chosen, port, proto, x)
	}
	a := firstIPv4(s.Spec.ClusterIPs)
	if !a.IsValid() {
		return Target{}, badTarget("Service %s has no IPv4 cluster IP, and only IPv4 can be traced", key)
	}
	if chosen == nil {
		// A number that the Service does not have is a fault worth watching.
		if n, err := strconv.ParseUint(port, 10, 16); err == nil && n > 0 {
			t.Addr = netip.AddrPortFrom(a, uint16(n))
			return t, nil
		}
		return Target{}, badTarget("Service %s has no port %q with protocol %s; it has %s", key, port, proto, strings.Join(have, ", "))
	}
	t.Addr, t.Service = netip.AddrPortFrom(a, uint16(chosen.Port)), PortName(s, chosen).String()
	return t, nil
}

// firstIPv4 is the first IPv4 address of a list; invalid when there is none.
func firstIPv4(ips []string) netip.Addr {
	for _, ip := range ips {
		if a, err := netip.ParseAddr(ip); err == nil && a.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// headlessTarget goes to the first endpoint, since there is no address to go to.
func headlessTarget(t Target, s *corev1.Service, p *corev1.ServicePort, port, proto string, x *Index) (Target, error) {
	if p == nil {
		return Target{}, badTarget("headless Service %s/%s has no port %q with protocol %s", s.Namespace, s.Name, port, proto)
	}
	n := PortName(s, p)
	for _, e := range x.Endpoints(n) {
		if e.Ready && e.Addr.Addr().Is4() {
			t.Addr, t.Service = e.Addr, n.String()
			return t, nil
		}
	}
	return Target{}, badTarget("headless Service %s/%s has no ready endpoint to send to", s.Namespace, s.Name)
}

func (l *Lab) nodeTarget(name string, port uint16, to string) (Target, error) {
	n := l.node(name)
	if n == nil {
		return Target{}, badTarget("no node is called %q; there are %s", name, strings.Join(l.nodeNames(), ", "))
	}
	if port == 0 {
		return Target{}, badTarget("%q: say a port, as in node/%s:30080", to, name)
	}
	return Target{Kind: "node", Name: name, Addr: netip.AddrPortFrom(n.Address, port)}, nil
}

func podTarget(key string, port uint16, proto string, x *Index) (Target, error) {
	p := x.pods[key]
	if p == nil {
		return Target{}, badTarget("no pod %s", key)
	}
	var ips []string
	for _, ip := range p.Status.PodIPs {
		ips = append(ips, ip.IP)
	}
	a := firstIPv4(ips)
	if !a.IsValid() {
		return Target{}, badTarget("pod %s has no IPv4 address", key)
	}
	for _, c := range p.Spec.Containers {
		for _, cp := range c.Ports {
			if port == 0 && protoName(cp.Protocol) == proto {
				port = uint16(cp.ContainerPort)
			}
		}
	}
	if port == 0 {
		return Target{}, badTarget("pod %s names no %s port; say one, as in pod/%s:80", key, proto, key)
	}
	return Target{Kind: "pod", Name: key, Addr: netip.AddrPortFrom(a, port)}, nil
}

// withPort completes the address of a looked-up name: with the port that was asked
// for, else with the first that the Service of that address has, else with 80.
func (x *Index) withPort(a netip.Addr, port uint16, proto string) netip.AddrPort {
	if port == 0 {
		port = 80
		if s := x.Service(x.serviceAt(a)); s != nil {
			for _, p := range slices.Backward(s.Spec.Ports) {
				if protoName(p.Protocol) == proto {
					port = uint16(p.Port)
				}
			}
		}
	}
	return netip.AddrPortFrom(a, port)
}
