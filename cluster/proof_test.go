// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"strings"
	"testing"
)

// TestProof reads what the tools print and compares two states.
func TestProof(t *testing.T) {
	save := "# made\n*nat\n:PREROUTING ACCEPT [5:300]\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\nCOMMIT\n"
	ruleset := `table ip nat {
	chain PREROUTING {
		type nat hook prerouting priority dstnat; policy accept;
	}
}
table ip kube-proxy {
	comment "rules"
	set affinity {
		elements = { 10.0.0.1 timeout 3h expires 2h59m }
	}
	map service-ips {
		elements = { 10.96.0.1 . tcp . 443 : goto a,
			     10.96.0.2 . tcp . 80 : goto b }
	}
	chain services {
		ip daddr 10.96.0.1 counter packets 7 bytes 420 drop
	}
}
`
	before := kernelState{sections: []stateSection{{"iptables", saveLines(save)}}, flows: map[string]bool{"a": true, "b": true}}
	after := kernelState{sections: []stateSection{{"iptables", saveLines(strings.NewReplacer("[5:300]", "[9:999]", "-A PREROUTING -j KUBE-SERVICES\n", "").Replace(save))}, {"nftables", nftLines(ruleset)}}, flows: map[string]bool{"b": true, "c": true}}
	got := proof("n1", ProxyConfig{Mode: "iptables"}, ProxyConfig{Mode: "nftables", NFTLayout: "compact"}, before, after)
	want := `node n1: iptables -> nftables/compact
  iptables
  - nat -A PREROUTING -j KUBE-SERVICES
  nftables
  + ip kube-proxy
  + ip kube-proxy: comment "rules"
  + ip kube-proxy set affinity
  + ip kube-proxy map service-ips
  + ip kube-proxy map service-ips: elements = { 10.96.0.1 . tcp . 443 : goto a,
  + ip kube-proxy map service-ips: 10.96.0.2 . tcp . 80 : goto b }
  + ip kube-proxy chain services
  + ip kube-proxy chain services: ip daddr 10.96.0.1 counter drop
  1 lines gone, 8 new, 2 as before; of 2 tracked connections 1 are kept
`
	if got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}
