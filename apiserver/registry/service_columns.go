// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// none is what a table shows where there is nothing.
const none = "<none>"

func serviceColumns() []metav1.TableColumnDefinition {
	return []metav1.TableColumnDefinition{
		nameColumn,
		column("Type", "string", "How the Service is exposed: ExternalName, ClusterIP, NodePort or LoadBalancer."),
		column("Cluster-IP", "string", "The virtual address of the Service inside the cluster; None for a headless one."),
		column("External-IP", "string", "Addresses or the name by which it is known outside of the cluster's own range."),
		column("Port(s)", "string", "The ports of the Service, with their node ports and protocols."),
		ageColumn,
		wideColumn("Selector", "The labels of the pods that stand behind the Service."),
	}
}

func serviceRow(s *corev1.Service) []any {
	clusterIP := none
	if len(s.Spec.ClusterIPs) > 0 {
		clusterIP = s.Spec.ClusterIPs[0]
	}
	ports := make([]string, 0, len(s.Spec.Ports))
	for _, p := range s.Spec.Ports {
		text := fmt.Sprintf("%d/%s", p.Port, p.Protocol)
		if p.NodePort > 0 {
			text = fmt.Sprintf("%d:%d/%s", p.Port, p.NodePort, p.Protocol)
		}
		ports = append(ports, text)
	}
	return []any{
		s.Name, string(s.Spec.Type), clusterIP, serviceExternalIP(s), orNone(strings.Join(ports, ",")),
		age(s.CreationTimestamp), labels.FormatLabels(s.Spec.Selector),
	}
}

// serviceExternalIP is the External-IP cell. The server never cuts it short;
// that was done by clients that printed themselves.
func serviceExternalIP(s *corev1.Service) string {
	switch s.Spec.Type {
	case corev1.ServiceTypeExternalName:
		return s.Spec.ExternalName
	case corev1.ServiceTypeLoadBalancer:
		var all []string
		for _, ing := range s.Status.LoadBalancer.Ingress {
			all = append(all, cmp.Or(ing.IP, ing.Hostname))
		}
		slices.Sort(all)
		all = append(slices.Compact(all), s.Spec.ExternalIPs...)
		if len(all) == 0 {
			return "<pending>"
		}
		return strings.Join(all, ",")
	case corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort:
		return orNone(strings.Join(s.Spec.ExternalIPs, ","))
	}
	return "<unknown>"
}

// shortList shows at most three items and how many more there are.
func shortList(items []string, empty string) string {
	const most = 3
	if len(items) <= most {
		return cmp.Or(strings.Join(items, ","), empty)
	}
	return fmt.Sprintf("%s + %d more...", strings.Join(items[:most], ","), len(items)-most)
}
