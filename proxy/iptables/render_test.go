// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/proxytest"
)

// TestChainNames pins the hashes: they are upstream's, and what tutorials show.
func TestChainNames(t *testing.T) {
	svc := func(ns, name, port string, protocol corev1.Protocol) string {
		return prefixCluster + hash(portKey(proxy.ServicePortName{Namespace: ns, Name: name, Port: port, Protocol: protocol}))
	}
	for _, c := range []struct{ got, want string }{
		{svc("default", "my-nginx", "", "TCP"), "KUBE-SVC-L65ENXXZWWSAPRCR"},
		{svc("default", "my-nginx-nodeport", "", "TCP"), "KUBE-SVC-J5QV2XWG4FEBPH3Q"},
		{svc("default", "network-nginx", "http", "TCP"), "KUBE-SVC-OQ6ML3VBJRXZG3AC"},
		{svc("default", "network-nginx-nodeport", "", "TCP"), "KUBE-SVC-YGMBZPDJBUQFJV3G"},
		{svc("default", "kubernetes", "https", "TCP"), "KUBE-SVC-NPX46M4PTMTKRN6Y"},
		{svc("kube-system", "kube-dns", "dns", "UDP"), "KUBE-SVC-TCOU7JCQXEZGVUNU"},
		{svc("kube-system", "kube-dns", "dns-tcp", "TCP"), "KUBE-SVC-ERIFXISQEP7F7OF4"},
		{svc("default", "mysql", "", "TCP"), "KUBE-SVC-R2CEXK5KF4QS4EYR"},
		{svc("nginx-ns", "nginx-svc", "", "TCP"), "KUBE-SVC-OQPKPAIY3A65TWI7"},
	} {
		if c.got != c.want {
			t.Errorf("got %s, want %s", c.got, c.want)
		}
	}
}

func TestProbability(t *testing.T) {
	for n, want := range map[int]string{2: "0.50000000000", 3: "0.33333333349", 4: "0.25000000000", 5: "0.20000000019", 6: "0.16666666651", 7: "0.14285714272"} {
		if got := probability(n); got != want {
			t.Errorf("1/%d is %s, want %s", n, got, want)
		}
	}
}

// TestLargeCluster checks that comments of Service chains go above a thousand
// endpoints, and only those.
func TestLargeCluster(t *testing.T) {
	for services, comments := range map[int]bool{200: true, 201: false} {
		svcs, eps := proxytest.Synthetic(services, 5)
		p, err := New(Options{}).Render(proxy.Decide(proxytest.SyntheticFacts(), svcs, eps))
		if err != nil {
			t.Fatal(err)
		}
		text := p.String()
		if got := strings.Contains(text, "bench/svc-00001:http -> "); got != comments {
			t.Errorf("%d endpoints: comments in Service chains: %v, want %v", services*5, got, comments)
		}
		if !strings.Contains(text, `"bench/svc-00001:http cluster IP"`) {
			t.Errorf("%d endpoints: KUBE-SERVICES has lost its comments", services*5)
		}
	}
}

// TestIPv6 checks the parts that differ in the other family.
func TestIPv6(t *testing.T) {
	svcs, eps := proxytest.Synthetic(1, 1)
	svcs[0].Spec.ClusterIP, svcs[0].Spec.ClusterIPs = "fd00::10", []string{"fd00::10"}
	svcs[0].Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	eps[0].AddressType = discoveryv1.AddressTypeIPv6
	eps[0].Endpoints[0].Addresses = []string{"fd01::1"}
	f := proxytest.SyntheticFacts()
	f.NodeIPs = []netip.Addr{netip.MustParseAddr("fd02::1")}
	f.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("fd01::/64")}
	p, err := New(Options{}).Render(proxy.Decide(f, svcs, eps))
	if err != nil {
		t.Fatal(err)
	}
	text := p.String()
	for _, want := range []string{
		"-A KUBE-SERVICES -d fd00::10/128 -p tcp",
		"-j DNAT --to-destination [fd01::1]:8080",
		"--mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
		"! -s fd01::/64 -d fd00::10/128",
		"! -d ::1/128",
		"ip6tables-restore",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.Contains(text, "KUBE-FIREWALL") {
		t.Error("the guard of 127.0.0.0/8 is in the IPv6 rules")
	}
}

// TestRenderReuses checks that an unchanged Service is not rendered again.
func TestRenderReuses(t *testing.T) {
	svcs, eps := proxytest.Synthetic(3, 2)
	d := proxy.NewDecider()
	for i := range svcs {
		d.SetService(svcs[i])
		d.SetSlice(eps[i])
	}
	m := New(Options{})
	one, err := m.Render(d.Decide(proxytest.SyntheticFacts()))
	if err != nil {
		t.Fatal(err)
	}
	changed := eps[1].DeepCopy()
	changed.Endpoints = changed.Endpoints[:1]
	d.SetSlice(changed)
	two, err := m.Render(d.Decide(proxytest.SyntheticFacts()))
	if err != nil {
		t.Fatal(err)
	}
	a, b := one.(*Program), two.(*Program)
	for i, same := range []bool{true, false, true} {
		if got := a.rulesets[0].blocks[i] == b.rulesets[0].blocks[i]; got != same {
			t.Errorf("Service %d shared: %v, want %v", i, got, same)
		}
	}
	c := diff(a.rulesets[0], b.rulesets[0])
	// The endpoint that is left is unchanged; the balancing chain is not.
	if len(c.written) != 1 || len(c.stale) != 1 || len(c.nat)+len(c.before)+len(c.after) != 0 {
		t.Errorf("change is %+v", c)
	}
}
