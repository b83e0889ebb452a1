// SPDX-License-Identifier: Apache-2.0

package endpoints

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	sliceutil "k8s.io/endpointslice/util"

	"github.com/kplab/kplab/controller/podstate"
)

// subsets groups the pods' addresses by the ports that they offer: pods with the
// same ports share a subset.
func subsets(svc *corev1.Service, pods []*corev1.Pod) []corev1.EndpointSubset {
	groups := map[string]*corev1.EndpointSubset{}
	for _, pod := range pods {
		if !sliceutil.ShouldPodBeInEndpoints(pod, svc.Spec.PublishNotReadyAddresses) {
			continue
		}
		ip := addressOf(svc, pod)
		if ip == "" {
			continue
		}
		ports := portsOf(svc, pod)
		if len(ports) == 0 && len(svc.Spec.Ports) > 0 {
			continue // no port of this pod has a name that the Service asks for
		}
		key := portsKey(ports)
		group := groups[key]
		if group == nil {
			group = &corev1.EndpointSubset{Ports: ports}
			groups[key] = group
		}
		address := endpointAddress(svc, pod, ip)
		if svc.Spec.PublishNotReadyAddresses || podstate.Ready(pod) {
			group.Addresses = append(group.Addresses, address)
		} else {
			group.NotReadyAddresses = append(group.NotReadyAddresses, address)
		}
	}
	var keys []string
	for key := range groups {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	out := make([]corev1.EndpointSubset, 0, len(keys))
	for _, key := range keys {
		slices.SortFunc(groups[key].Addresses, compareAddresses)
		slices.SortFunc(groups[key].NotReadyAddresses, compareAddresses)
		out = append(out, *groups[key])
	}
	return out
}

// portsKey is the same for equal lists of ports, and orders the subsets.
func portsKey(ports []corev1.EndpointPort) string {
	var key strings.Builder
	for _, p := range ports {
		app := ""
		if p.AppProtocol != nil {
			app = *p.AppProtocol
		}
		fmt.Fprintf(&key, "%05d/%s/%s/%s ", p.Port, p.Protocol, p.Name, app)
	}
	return key.String()
}

func endpointAddress(svc *corev1.Service, pod *corev1.Pod, ip string) corev1.EndpointAddress {
	node := pod.Spec.NodeName
	address := corev1.EndpointAddress{
		IP: ip,
		TargetRef: &corev1.ObjectReference{
			Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
		},
	}
	if node != "" {
		address.NodeName = &node
	}
	if sliceutil.ShouldSetHostname(pod, svc) {
		address.Hostname = pod.Spec.Hostname
	}
	return address
}

// addressOf returns the pod's address of the Service's first family.
func addressOf(svc *corev1.Service, pod *corev1.Pod) string {
	family := corev1.IPv4Protocol
	switch {
	case len(svc.Spec.IPFamilies) > 0:
		family = svc.Spec.IPFamilies[0]
	case strings.Contains(svc.Spec.ClusterIP, ":"):
		family = corev1.IPv6Protocol
	}
	ips := pod.Status.PodIPs
	if len(ips) == 0 && pod.Status.PodIP != "" {
		ips = []corev1.PodIP{{IP: pod.Status.PodIP}}
	}
	for _, ip := range ips {
		if strings.Contains(ip.IP, ":") == (family == corev1.IPv6Protocol) {
			return ip.IP
		}
	}
	return ""
}

// portsOf returns the Service's ports as this pod serves them, sorted. A headless
// Service without ports has none, which is not an error.
func portsOf(svc *corev1.Service, pod *corev1.Pod) []corev1.EndpointPort {
	var ports []corev1.EndpointPort
	for i := range svc.Spec.Ports {
		p := &svc.Spec.Ports[i]
		number, ok := targetPort(p, pod)
		if !ok {
			continue
		}
		ports = append(ports, corev1.EndpointPort{
			Name: p.Name, Port: number, Protocol: cmp.Or(p.Protocol, corev1.ProtocolTCP), AppProtocol: p.AppProtocol,
		})
	}
	slices.SortFunc(ports, func(a, b corev1.EndpointPort) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol), strings.Compare(a.Name, b.Name))
	})
	return ports
}

// targetPort finds the number behind a Service's target port. A name is looked up
// among the pod's containers.
func targetPort(p *corev1.ServicePort, pod *corev1.Pod) (int32, bool) {
	if p.TargetPort.Type == intstr.Int {
		return cmp.Or(p.TargetPort.IntVal, p.Port), true
	}
	containers := pod.Spec.Containers
	for i := range pod.Spec.InitContainers {
		if policy := pod.Spec.InitContainers[i].RestartPolicy; policy != nil && *policy == corev1.ContainerRestartPolicyAlways {
			containers = append(slices.Clone(containers), pod.Spec.InitContainers[i])
		}
	}
	for i := range containers {
		for _, have := range containers[i].Ports {
			if have.Name == p.TargetPort.StrVal && cmp.Or(have.Protocol, corev1.ProtocolTCP) == cmp.Or(p.Protocol, corev1.ProtocolTCP) {
				return have.ContainerPort, true
			}
		}
	}
	return 0, false
}

// compareAddresses orders by address, and pods that share one (the node's own) by
// their UID.
func compareAddresses(a, b corev1.EndpointAddress) int {
	x, errX := netip.ParseAddr(a.IP)
	y, errY := netip.ParseAddr(b.IP)
	if errX == nil && errY == nil {
		if c := x.Compare(y); c != 0 {
			return c
		}
	} else if c := bytes.Compare([]byte(a.IP), []byte(b.IP)); c != 0 {
		return c
	}
	if a.TargetRef == nil || b.TargetRef == nil {
		return 0
	}
	return cmp.Compare(a.TargetRef.UID, b.TargetRef.UID)
}

// truncate cuts the subsets down to the capacity and reports whether it had to.
// Ready addresses are kept before those that are not; subsets share what there is
// in proportion.
func truncate(all []corev1.EndpointSubset) ([]corev1.EndpointSubset, bool) {
	ready, notReady := 0, 0
	for i := range all {
		ready += len(all[i].Addresses)
		notReady += len(all[i].NotReadyAddresses)
	}
	if ready+notReady <= capacity {
		return all, false
	}
	readyQuota := min(ready, capacity)
	notReadyQuota := capacity - readyQuota
	var out []corev1.EndpointSubset
	for i := range all {
		s := all[i]
		s.Addresses = s.Addresses[:share(len(s.Addresses), &ready, &readyQuota)]
		s.NotReadyAddresses = s.NotReadyAddresses[:share(len(s.NotReadyAddresses), &notReady, &notReadyQuota)]
		if len(s.Addresses)+len(s.NotReadyAddresses) > 0 {
			out = append(out, s)
		}
	}
	return out, true
}

// share takes one subset's part of a quota: of have addresses, out of all that are
// left, so that the last subset gets exactly the rest.
func share(have int, left, quota *int) int {
	if have == 0 {
		return 0
	}
	n := min(have, (have**quota+*left-1) / *left)
	*left -= have
	*quota -= n
	return n
}
