// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"
)

func TestEndpointsRefused(t *testing.T) {
	b := newBench(t, Deps{}, endpointsKind())
	for _, tc := range []struct{ id, subset, want string }{
		{"H09", "{addresses: [{ip: 127.0.0.1}]}", `Endpoints "x" is invalid: subsets[0].addresses[0].ip: Invalid value: "127.0.0.1": may not be in the loopback range (127.0.0.0/8, ::1/128)`},
		{"H09 IPv6", "{addresses: [{ip: '::1'}]}", `may not be in the loopback range (127.0.0.0/8, ::1/128)`},
		{"H09 link-local", "{notReadyAddresses: [{ip: 169.254.1.1}]}", `subsets[0].notReadyAddresses[0].ip: Invalid value: "169.254.1.1": may not be in the link-local range (169.254.0.0/16, fe80::/10)`},
		{"H09 multicast", "{addresses: [{ip: 224.0.0.1}]}", `may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)`},
		{"H09 IPv6 multicast", "{addresses: [{ip: 'ff02::1'}]}", `may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)`},
		{"H09 unspecified", "{addresses: [{ip: 0.0.0.0}]}", `may not be unspecified (0.0.0.0)`},
		{"no address", "{addresses: [{ip: name}]}", `subsets[0].addresses[0].ip: Invalid value: "name": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)`},
		{"empty subset", "{ports: [{port: 80}]}", "subsets[0]: Required value: must specify `addresses` or `notReadyAddresses`"},
		{"port names", "{addresses: [{ip: 10.0.0.9}], ports: [{port: 80}, {port: 81, name: b}]}", "subsets[0].ports[0].name: Required value"},
		{"port number", "{addresses: [{ip: 10.0.0.9}], ports: [{port: 0}]}", "subsets[0].ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive"},
		{"protocol", "{addresses: [{ip: 10.0.0.9}], ports: [{port: 80, protocol: ICMP}]}", `subsets[0].ports[0].protocol: Unsupported value: "ICMP": supported values: "SCTP", "TCP", "UDP"`},
		{"hostname", "{addresses: [{ip: 10.0.0.9, hostname: A}]}", `subsets[0].addresses[0].hostname: Invalid value: "A"`},
	} {
		t.Run(tc.id, func(t *testing.T) {
			_, err := b.create("endpoints", b.parse("endpoints", "metadata: {name: x, namespace: default}\nsubsets: ["+tc.subset+"]"), false)
			wantError(t, err, tc.want)
		})
	}
}

// TestEndpointsAccepted writes addresses that are odd, and not refused.
func TestEndpointsAccepted(t *testing.T) {
	b := newBench(t, Deps{}, endpointsKind())
	for _, tc := range []struct{ id, subset string }{
		{"H09 wide multicast", "{addresses: [{ip: 239.1.2.3}]}"},
		{"H09 private", "{addresses: [{ip: 10.96.0.1}], ports: [{port: 443}]}"},
		{"H09 no ports", "{addresses: [{ip: 172.18.0.3}]}"},
	} {
		t.Run(tc.id, func(t *testing.T) {
			obj := b.parse("endpoints", "metadata: {generateName: x-, namespace: default}\nsubsets: ["+tc.subset+"]")
			if _, err := b.create("endpoints", obj, false); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestEndpointsDeprecated looks for the warning with every verb (H04).
func TestEndpointsDeprecated(t *testing.T) {
	b := newBench(t, Deps{}, endpointsKind())
	s := b.storages["endpoints"].(rest.StandardStorage)
	const manifest = "metadata: {name: mysql, namespace: default}\nsubsets: [{addresses: [{ip: 172.18.0.3}], ports: [{port: 3306}]}]"
	obj := b.parse("endpoints", manifest)
	if p := obj.(*corev1.Endpoints).Subsets[0].Ports[0].Protocol; p != corev1.ProtocolTCP {
		t.Errorf("protocol %q", p)
	}
	for _, step := range []struct {
		verb string
		do   func() error
	}{
		{"create", func() error { _, err := b.create("endpoints", obj, false); return err }},
		{"get", func() error { _, err := s.Get(b.ctx(), "mysql", &metav1.GetOptions{}); return err }},
		{"list", func() error { _, err := s.List(b.ctx(), &internalversion.ListOptions{}); return err }},
		{"watch", func() error {
			w, err := s.Watch(b.ctx(), &internalversion.ListOptions{})
			if err == nil {
				w.Stop()
			}
			return err
		}},
		{"update", func() error { _, err := b.put("endpoints", b.parse("endpoints", manifest)); return err }},
		{"delete", func() error {
			_, _, err := s.Delete(b.ctx(), "mysql", rest.ValidateAllObjectFunc, &metav1.DeleteOptions{})
			return err
		}},
		{"deletecollection", func() error {
			_, err := s.DeleteCollection(b.ctx(), rest.ValidateAllObjectFunc, &metav1.DeleteOptions{}, &internalversion.ListOptions{})
			return err
		}},
	} {
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.verb, err)
		}
		want := "v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice"
		if got := b.warnings.take(); !slices.Contains(got, want) {
			t.Errorf("%s: warnings %q", step.verb, got)
		}
	}
}

func TestEndpointsColumn(t *testing.T) {
	b := newBench(t, Deps{}, endpointsKind())
	for _, tc := range []struct{ id, subsets, want string }{
		{"I08", "{addresses: [{ip: 10.244.1.2}, {ip: 10.244.2.2}], ports: [{port: 80}]}", "10.244.1.2:80,10.244.2.2:80"},
		{"I08 more", "{addresses: [{ip: 10.244.1.2}, {ip: 10.244.2.2}], ports: [{port: 80, name: a}, {port: 81, name: b}]}, {addresses: [{ip: 'fd00::1'}], ports: [{port: 9}]}", "10.244.1.2:80,10.244.2.2:80,10.244.1.2:81 + 2 more..."},
		{"I08 none", "", "<none>"},
		{"I08 not ready", "{notReadyAddresses: [{ip: 10.244.1.2}], ports: [{port: 80}]}", "<none>"},
		{"no ports", "{addresses: [{ip: 10.244.1.2}]}", "10.244.1.2"},
	} {
		t.Run(tc.id, func(t *testing.T) {
			obj := b.parse("endpoints", "metadata: {name: x}\nsubsets: ["+tc.subsets+"]")
			if got := b.table("endpoints", obj)["Endpoints"]; got != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}

func TestEndpointSlice(t *testing.T) {
	b := newBench(t, Deps{}, endpointSliceKind())
	manifest := func(body string) string { return "metadata: {name: x, namespace: default}\n" + body }
	many := func(n int, item func(i int) string) string {
		text := "["
		for i := range n {
			text += item(i) + ","
		}
		return text + "]"
	}
	for _, tc := range []struct{ id, body, want string }{
		{"no address type", "endpoints: []", "addressType: Required value"},
		{"address type", "addressType: IP\nendpoints: []", `addressType: Unsupported value: "IP": supported values: "FQDN", "IPv4", "IPv6"`},
		{"H16 endpoints", "addressType: IPv4\nendpoints: " + many(1001, func(i int) string { return fmt.Sprintf("{addresses: [10.1.%d.%d]}", i/250, 1+i%250) }), "endpoints: Too many: 1001: must have at most 1000 items"},
		{"H16 ports", "addressType: IPv4\nendpoints: []\nports: " + many(101, func(i int) string { return fmt.Sprintf("{name: p%d, port: 80}", i) }), "ports: Too many: 101: must have at most 100 items"},
		{"no addresses", "addressType: IPv4\nendpoints: [{addresses: []}]", "endpoints[0].addresses: Required value: must contain at least 1 address"},
		{"wrong family", "addressType: IPv4\nendpoints: [{addresses: ['fd00::1']}]", `endpoints[0].addresses[0]: Invalid value: "fd00::1": must be an IPv4 address`},
		{"H09 loopback", "addressType: IPv4\nendpoints: [{addresses: [127.0.0.1]}]", "endpoints[0].addresses[0]: Invalid value: \"127.0.0.1\": may not be in the loopback range (127.0.0.0/8, ::1/128)"},
		{"no name", "addressType: FQDN\nendpoints: [{addresses: [a]}]", `endpoints[0].addresses[0]: Invalid value: "a": should be a domain with at least two segments separated by dots`},
		{"same port names", "addressType: IPv4\nendpoints: []\nports: [{port: 80}, {port: 81}]", `ports[1].name: Duplicate value: ""`},
		{"protocol", "addressType: IPv4\nendpoints: []\nports: [{port: 80, protocol: ICMP}]", `ports[0].protocol: Unsupported value: "ICMP"`},
		{"hints", "addressType: IPv4\nendpoints: [{addresses: [10.1.1.1], hints: {forZones: [{name: a}, {name: a}]}}]", `endpoints[0].hints.forZones[1].name: Duplicate value: "a"`},
		{"too many hints", "addressType: IPv4\nendpoints: [{addresses: [10.1.1.1], hints: {forNodes: " + many(9, func(i int) string { return fmt.Sprintf("{name: n%d}", i) }) + "}}]", "endpoints[0].hints.forNodes: Too many: 9: must have at most 8 items"},
	} {
		t.Run(tc.id, func(t *testing.T) {
			_, err := b.create("endpointslices", b.parse("endpointslices", manifest(tc.body)), false)
			wantError(t, err, `EndpointSlice.discovery.k8s.io "x" is invalid`, tc.want)
		})
	}

	out, err := b.create("endpointslices", b.parse("endpointslices", manifest("addressType: IPv4\nports: [{port: 80}]\nendpoints: [{addresses: [10.1.1.1]}]")), false)
	if err != nil {
		t.Fatal(err)
	}
	s := out.(*discoveryv1.EndpointSlice)
	t.Run("I19", func(t *testing.T) {
		if p := s.Ports[0]; p.Name == nil || *p.Name != "" || p.Protocol == nil || *p.Protocol != corev1.ProtocolTCP {
			t.Errorf("%+v", p)
		}
	})
	if c := s.Endpoints[0].Conditions; c.Ready != nil || c.Serving != nil || c.Terminating != nil || s.Generation != 1 {
		t.Errorf("H17: conditions %+v, generation %d", c, s.Generation)
	}
	t.Run("H15", func(t *testing.T) {
		_, err := b.patch("endpointslices", "x", func(obj runtime.Object) {
			obj.(*discoveryv1.EndpointSlice).AddressType = discoveryv1.AddressTypeIPv6
			obj.(*discoveryv1.EndpointSlice).Endpoints = nil
		})
		wantError(t, err, `addressType: Invalid value: "IPv6": field is immutable`)
	})
	for i, change := range []func(*discoveryv1.EndpointSlice){
		func(s *discoveryv1.EndpointSlice) { s.Annotations = map[string]string{"a": "b"} },
		func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses[0] = "10.1.1.2" },
	} {
		out, err := b.patch("endpointslices", "x", func(obj runtime.Object) { change(obj.(*discoveryv1.EndpointSlice)) })
		if err != nil {
			t.Fatal(err)
		}
		if got := out.(*discoveryv1.EndpointSlice).Generation; got != int64(1+i) {
			t.Errorf("change %d: generation %d", i, got)
		}
	}

	t.Run("H14", func(t *testing.T) {
		b.warnings.take()
		if _, err := b.create("endpointslices", b.parse("endpointslices", "metadata: {name: names, namespace: default}\naddressType: FQDN\nendpoints: [{addresses: [a.example]}]"), false); err != nil {
			t.Error(err)
		}
		if got := b.warnings.take(); !slices.Equal(got, []string{"addressType: FQDN endpoints are deprecated"}) {
			t.Errorf("warnings %q", got)
		}
	})

	for _, tc := range []struct{ id, body, ports, endpoints string }{
		{"I07", "endpoints: [{addresses: [10.1.1.1]}, {addresses: [10.1.1.2]}, {addresses: [10.1.1.3]}, {addresses: [10.1.1.4]}]\nports: [{port: 80}]", "80", "10.1.1.1,10.1.1.2,10.1.1.3 + 1 more..."},
		{"I06", "endpoints: []", "<unset>", "<unset>"},
		{"every port", "endpoints: []\nports: [{}, {name: db}]", "*,db", "<unset>"},
	} {
		t.Run(tc.id, func(t *testing.T) {
			c := b.table("endpointslices", b.parse("endpointslices", manifest("addressType: IPv4\n"+tc.body)))
			if c["AddressType"] != "IPv4" || c["Ports"] != tc.ports || c["Endpoints"] != tc.endpoints {
				t.Errorf("%v", c)
			}
		})
	}
}
