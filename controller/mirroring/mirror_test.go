// SPDX-License-Identifier: Apache-2.0

package mirroring

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func mysql(subsets ...corev1.EndpointSubset) *corev1.Endpoints {
	return &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Name: "mysql", Namespace: "default", UID: "e", Labels: map[string]string{"tier": "db"}},
		Subsets:    subsets,
	}
}

func subset(port int32, ips ...string) corev1.EndpointSubset {
	s := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Port: port, Protocol: corev1.ProtocolTCP}}}
	for _, ip := range ips {
		s.Addresses = append(s.Addresses, corev1.EndpointAddress{IP: ip})
	}
	return s
}

func TestMirror(t *testing.T) {
	both := subset(3306, "10.0.0.132", "fd00::1", "nonsense")
	both.NotReadyAddresses = []corev1.EndpointAddress{{IP: "10.0.0.133"}}
	got, skipped := mirror(mysql(both, subset(3307, "10.0.0.134")))
	if len(got) != 3 || skipped != (skips{invalid: 1}) {
		t.Fatalf("%d slices, skipped %+v", len(got), skipped)
	}
	four := got[0]
	if four.AddressType != discoveryv1.AddressTypeIPv4 || len(four.Endpoints) != 2 || !*four.Endpoints[0].Conditions.Ready || *four.Endpoints[1].Conditions.Ready {
		t.Fatalf("got %+v", four)
	}
	if four.GenerateName != "mysql-" || four.Labels["tier"] != "db" || four.Labels[discoveryv1.LabelManagedBy] != ManagedBy ||
		four.Labels[discoveryv1.LabelServiceName] != "mysql" || four.OwnerReferences[0].Kind != "Endpoints" || four.Endpoints[0].NodeName != nil {
		t.Fatalf("got %+v", four.ObjectMeta)
	}
	if got[1].AddressType != discoveryv1.AddressTypeIPv6 || *got[2].Ports[0].Port != 3307 {
		t.Fatalf("got %+v", got)
	}
	var many []string
	for i := range 1002 {
		many = append(many, fmt.Sprintf("10.1.%d.%d", i/250, i%250+1))
	}
	if got, skipped := mirror(mysql(subset(1, many...))); len(got[0].Endpoints) != 1000 || skipped.tooMany != 2 {
		t.Fatalf("%d endpoints, skipped %+v", len(got[0].Endpoints), skipped)
	}
}

// TestMerged writes one set of ports in two subsets, in another order, and an
// address twice.
func TestMerged(t *testing.T) {
	web, db := corev1.EndpointPort{Name: "web", Port: 80}, corev1.EndpointPort{Name: "db", Port: 3306}
	e := mysql(
		corev1.EndpointSubset{Ports: []corev1.EndpointPort{web, db}, Addresses: []corev1.EndpointAddress{{IP: "10.0.0.1"}, {IP: "10.0.0.1"}}},
		corev1.EndpointSubset{Ports: []corev1.EndpointPort{db, web}, NotReadyAddresses: []corev1.EndpointAddress{{IP: "10.0.0.2"}, {IP: "10.0.0.1"}}},
		corev1.EndpointSubset{Ports: []corev1.EndpointPort{db}, Addresses: []corev1.EndpointAddress{{IP: "010.0.0.3"}}},
	)
	e.Annotations = map[string]string{"note": "x", corev1.EndpointsLastChangeTriggerTime: "now", corev1.LastAppliedConfigAnnotation: "{}"}
	got, skipped := mirror(e)
	if len(got) != 2 || skipped != (skips{}) {
		t.Fatalf("%d slices, skipped %+v", len(got), skipped)
	}
	text := ""
	for _, s := range got {
		for _, e := range s.Endpoints {
			text += fmt.Sprint(e.Addresses[0], " ", *e.Conditions.Ready, " ")
		}
		text += fmt.Sprint(len(s.Ports), " ", s.Annotations, "; ")
	}
	if want := "10.0.0.1 true 10.0.0.2 false 2 map[note:x]; 10.0.0.3 true 1 map[note:x]; "; text != want {
		t.Fatalf("got %q\nwant %q", text, want)
	}
}

func TestPlan(t *testing.T) {
	wanted, _ := mirror(mysql(subset(3306, "10.0.0.132"), subset(3307, "10.0.0.134")))
	p := plan(wanted, nil)
	if len(p.create) != 2 || len(p.update)+len(p.remove) != 0 {
		t.Fatalf("from nothing: %+v", p)
	}
	stored := func(name string, s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
		s = s.DeepCopy()
		s.Name = name
		return s
	}
	existing := []*discoveryv1.EndpointSlice{stored("mysql-a", wanted[0]), stored("mysql-b", wanted[1]), stored("mysql-c", wanted[1])}
	if p = plan(wanted, existing[:2]); len(p.create)+len(p.update)+len(p.remove) != 0 {
		t.Fatalf("nothing changed: %+v", p)
	}
	changed, _ := mirror(mysql(subset(3306, "10.0.0.199"), subset(3308, "10.0.0.134")))
	p = plan(changed, existing)
	if len(p.create) != 1 || len(p.update) != 1 || p.update[0].Name != "mysql-a" || p.update[0].Endpoints[0].Addresses[0] != "10.0.0.199" || len(p.remove) != 2 {
		t.Fatalf("got %d, %d, %d", len(p.create), len(p.update), len(p.remove))
	}
}

func TestMirrored(t *testing.T) {
	e := mysql()
	if !mirrored(e) || mirrored(nil) {
		t.Fatal("plain Endpoints are mirrored")
	}
	e.Annotations = map[string]string{"control-plane.alpha.kubernetes.io/leader": "{}"}
	if mirrored(e) {
		t.Fatal("leader election is mirrored")
	}
	e.Annotations, e.Labels = nil, map[string]string{discoveryv1.LabelSkipMirror: "true"}
	if mirrored(e) {
		t.Fatal("skip-mirror is overlooked")
	}
}
