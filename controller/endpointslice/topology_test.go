// SPDX-License-Identifier: Apache-2.0

package endpointslice

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/loop"
)

// hints are an endpoint's as "zones/nodes".
func hints(e discoveryv1.Endpoint) string {
	if e.Hints == nil {
		return "none"
	}
	var zones, nodes []string
	for _, z := range e.Hints.ForZones {
		zones = append(zones, z.Name)
	}
	for _, n := range e.Hints.ForNodes {
		nodes = append(nodes, n.Name)
	}
	return strings.Join(zones, ",") + "/" + strings.Join(nodes, ",")
}

// hinted are the hints of a Service's endpoints, by pod.
func (b *bench) hinted() map[string]string {
	b.t.Helper()
	out := map[string]string{}
	for _, s := range b.sync() {
		for _, e := range s.Endpoints {
			out[e.TargetRef.Name] = hints(e)
		}
	}
	return out
}

// node puts a ready node into the cache and tells the controller.
func (b *bench) node(name, zone, cpu string, labels ...string) {
	b.t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	if zone != "" {
		n.Labels[corev1.LabelTopologyZone] = zone
	}
	for _, l := range labels {
		n.Labels[l] = ""
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if cpu != "" {
		n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)}
	}
	b.put(n)
	b.c.onNode(nil, n)
}

// said returns the events so far.
func (b *bench) said() string {
	var all []string
	for {
		select {
		case e := <-b.events.Events:
			all = append(all, e)
		default:
			return strings.Join(all, "\n")
		}
	}
}

func distributed(value string) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.TrafficDistribution = &value }
}

func auto(s *corev1.Service) {
	s.Annotations = map[string]string{corev1.AnnotationTopologyMode: "Auto"}
}

// TestRowsJ is about hints. Pods 0 and 1 are on n1 and n2 in zone a, pod 2 on n3 in b.
func TestRowsJ(t *testing.T) {
	three := func(b *bench) {
		for i := range 3 {
			b.put(pod(i))
		}
	}
	for _, tc := range []struct {
		row string
		run func(t *testing.T, b *bench)
	}{
		{"J01", func(t *testing.T, b *bench) {
			b.put(service(distributed(corev1.ServiceTrafficDistributionPreferSameZone)))
			three(b)
			if got := fmt.Sprint(b.hinted()); got != "map[p0000:a/ p0001:a/ p0002:b/]" {
				t.Error(got)
			}
		}},
		{"J04", func(t *testing.T, b *bench) {
			b.put(service(distributed(corev1.ServiceTrafficDistributionPreferClose)))
			three(b)
			if got := fmt.Sprint(b.hinted()); got != "map[p0000:a/ p0001:a/ p0002:b/]" {
				t.Error(got)
			}
			b.put(service())
			if got := fmt.Sprint(b.hinted()); got != "map[p0000:none p0001:none p0002:none]" {
				t.Errorf("without the field: %s", got)
			}
		}},
		{"J05", func(t *testing.T, b *bench) {
			b.put(service(distributed(corev1.ServiceTrafficDistributionPreferSameNode)))
			three(b)
			if got := fmt.Sprint(b.hinted()); got != "map[p0000:a/n1 p0001:a/n2 p0002:b/n3]" {
				t.Error(got)
			}
		}},
		{"J08", func(t *testing.T, b *bench) {
			b.node("n1", "", "2")
			b.put(service(distributed(corev1.ServiceTrafficDistributionPreferSameZone)))
			three(b)
			if got := b.hinted(); got["p0000"] != "none" || got["p0002"] != "b/" {
				t.Error(got)
			}
			if z := b.sync()[0].Endpoints[slices.IndexFunc(b.sync()[0].Endpoints, func(e discoveryv1.Endpoint) bool { return *e.NodeName == "n1" })].Zone; z != nil {
				t.Errorf("zone %s", *z)
			}
		}},
		{"J09", func(t *testing.T, b *bench) {
			b.node("n1", "a", "2")
			b.node("n2", "a", "2")
			b.node("n3", "b", "4")
			b.put(service(auto))
			for i := range 9 {
				b.put(pod(i))
			}
			count := map[string]int{}
			for _, h := range b.hinted() {
				count[h]++
			}
			if len(count) != 2 || count["a/"]+count["b/"] != 9 || count["a/"] < 4 || count["b/"] < 4 {
				t.Errorf("in proportion to the CPUs of the zones: %v", count)
			}
			if got := b.said(); !strings.HasPrefix(got, "Normal TopologyAwareHintsEnabled ") {
				t.Errorf("events %q", got)
			}
		}},
		{"J10", func(t *testing.T, b *bench) {
			b.node("n1", "a", "2")
			b.node("n2", "a", "2")
			b.node("n3", "b", "4")
			b.put(service(auto))
			b.put(pod(1))
			if got := fmt.Sprint(b.hinted()); got != "map[p0001:none]" {
				t.Error(got)
			}
			if got := b.said(); !strings.Contains(got, "Warning TopologyAwareHintsDisabled") || !strings.Contains(got, "Insufficient number of endpoints (1 endpoints, 2 zones)") || !strings.Contains(got, "IPv4") {
				t.Errorf("events %q", got)
			}
		}},
		{"J11", func(t *testing.T, b *bench) {
			b.node("n1", "a", "")
			b.node("n2", "a", "2")
			b.node("n3", "b", "4")
			b.put(service(auto))
			three(b)
			if got := fmt.Sprint(b.hinted()); got != "map[p0000:none p0001:none p0002:none]" {
				t.Error(got)
			}
			if got := b.said(); !strings.Contains(got, "Insufficient Node information: allocatable CPU or zone not specified on one or more nodes") {
				t.Errorf("events %q", got)
			}
		}},
		{"J12", func(t *testing.T, b *bench) {
			b.node("n1", "a", "2")
			b.node("n2", "a", "2")
			b.node("n3", "b", "4")
			b.put(service(auto, distributed(corev1.ServiceTrafficDistributionPreferSameNode)))
			for i := range 9 {
				b.put(pod(i))
			}
			for name, h := range b.hinted() {
				if strings.Contains(h, "n") {
					t.Errorf("%s has hints %s: the annotation does not win", name, h)
				}
			}
		}},
		{"J13", func(t *testing.T, b *bench) {
			// All CPUs of zone a but two are the control plane's, and do not count.
			b.node("n1", "a", "1")
			b.node("n2", "a", "1")
			b.node("n3", "b", "2")
			b.node("cp", "a", "64", "node-role.kubernetes.io/control-plane")
			b.put(service(auto))
			for i := range 9 {
				b.put(pod(i))
			}
			count := map[string]int{}
			for _, h := range b.hinted() {
				count[h]++
			}
			if count["a/"] > 5 || count["b/"] < 4 {
				t.Errorf("%v", count)
			}
		}},
		{"J16", func(t *testing.T, b *bench) {
			b.put(service(distributed(corev1.ServiceTrafficDistributionPreferSameZone)))
			b.put(pod(1))
			b.put(pod(2, notReady))
			if got := fmt.Sprint(b.hinted()); got != "map[p0001:a/ p0002:none]" {
				t.Error(got)
			}
		}},
	} {
		t.Run(tc.row, func(t *testing.T) { tc.run(t, newBench(t)) })
	}
}

// TestRowsG is about which pods are in slices at all; I02 has their conditions.
func TestRowsG(t *testing.T) {
	for _, tc := range []struct {
		row     string
		publish bool
		change  func(*corev1.Pod)
		want    string
	}{
		{"G01", false, notReady, "10.244.0.2 false"},
		{"G03", true, notReady, "10.244.0.2 true"},
		{"G05", false, leaving, "10.244.0.2 false"},
		{"G12", false, func(p *corev1.Pod) {
			// The kubelet counts the gate; what is read here is Ready alone.
			p.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "example.com/gate"}}
			notReady(p)
		}, "10.244.0.2 false"},
		{"G13", true, func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }, ""},
		{"G14", false, func(p *corev1.Pod) {
			p.Spec.HostNetwork = true
			p.Status.PodIP, p.Status.PodIPs = "10.0.0.132", []corev1.PodIP{{IP: "10.0.0.132"}}
		}, "10.0.0.132 true"},
		{"G15", false, func(p *corev1.Pod) { p.Status.PodIP, p.Status.PodIPs = "", nil }, ""},
		{"G16", false, func(p *corev1.Pod) { p.Spec.NodeName = "gone" }, ""},
		{"G16 published", true, func(p *corev1.Pod) { p.Spec.NodeName = "gone" }, "10.244.0.2 true"},
	} {
		t.Run(tc.row, func(t *testing.T) {
			b := newBench(t)
			b.put(service(func(s *corev1.Service) { s.Spec.PublishNotReadyAddresses = tc.publish }))
			b.put(pod(1, tc.change))
			got := ""
			// A pod whose node is missing is an error, which brings the Service back.
			b.fail = nil
			if err := b.c.sync(t.Context(), loop.Key{Namespace: "ns", Name: "web"}); err != nil && tc.row != "G16" {
				t.Fatal(err)
			}
			list, err := b.client.DiscoveryV1().EndpointSlices("ns").List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range list.Items {
				for _, e := range s.Endpoints {
					got = fmt.Sprint(e.Addresses[0], " ", ptr.Deref(e.Conditions.Ready, true))
				}
			}
			if got != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}
