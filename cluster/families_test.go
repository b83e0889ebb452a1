// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// loadText reads a settings file with these lines.
func loadText(t *testing.T, lines string) (Config, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "lab.yaml")
	if err := os.WriteFile(path, []byte("apiVersion: kplab/v1alpha1\nkind: Lab\n"+lines+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := LoadConfig(path)
	if err != nil {
		return c, err
	}
	c.SetDefaults(0)
	return c, c.Validate()
}

// The families of a lab, however they are written, and its address plan.
func TestFamilies(t *testing.T) {
	const (
		four = "10.0.0.132 10.244.1.0/24 10.0.0.0/24 10.244.0.0/16 10.96.0.0/12 10.0.0.200"
		six  = "fd00:10::132 fd00:10:244:1::/64 fd00:10::/64 fd00:10:244::/56 fd00:10:96::/112 fd00:10::200"
	)
	for lines, want := range map[string][]string{
		"":                                                           {four},
		"networking: {ipFamily: ipv4}":                               {four},
		"networking: {ipFamily: dual}":                               {four, six},
		"networking: {ipFamily: ipv6}":                               {six},
		"networking: {ipFamilies: [IPv4, IPv6]}":                     {four, six},
		"networking: {ipFamilies: [IPv6, IPv4]}":                     {six, four},
		"networking: {ipFamilies: [IPv6]}":                           {six},
		"networking: {podSubnet: fd00:10:244::/56}":                  {six},
		"networking: {podSubnet: '10.244.0.0/16, fd00:10:244::/56'}": {four, six},
		"networking: {podSubnet: 'fd00:10:244::/56,10.244.0.0/16'}":  {six, four},
		"networking: {ipFamilies: [IPv6, IPv4], podSubnet: '10.244.0.0/16,fd00:10:244::/56'}":    {six, four},
		"networking: {ipFamilies: [IPv4, IPv6], podSubnet: fd00:9::/56, outside: fd00:10::1234}": {four, "fd00:10::132 fd00:9:0:1::/64 fd00:10::/64 fd00:9::/56 fd00:10:96::/112 fd00:10::1234"},
		"networking: {ipFamily: dual}\nnodes: [{name: a, role: control-plane}, {name: b, address: '10.0.0.9,fd00:10::9', podCIDR: fd00:10:244:7::/80}]": {
			"10.0.0.9 10.244.1.0/24 10.0.0.0/24 10.244.0.0/16 10.96.0.0/12 10.0.0.200",
			"fd00:10::9 fd00:10:244:7::/80 fd00:10::/64 fd00:10:244::/56 fd00:10:96::/112 fd00:10::200",
		},
	} {
		c, err := loadText(t, lines)
		if err != nil {
			t.Errorf("%s: %v", lines, err)
			continue
		}
		var got []string
		for _, p := range c.plans() {
			n := &c.Nodes[1]
			got = append(got, fmt.Sprint(*p.address(n), *p.podCIDR(n), *p.nodes, *p.pods, *p.services, *p.outside))
		}
		if strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("%s:\n%s\nwant\n%s", lines, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	c, err := loadText(t, "networking: {ipFamily: ipv6}")
	if err != nil || c.dnsAddress().String() != "fd00:10:96::a" {
		t.Errorf("cluster DNS is %s, %v", c.dnsAddress(), err)
	}
}

func TestFamilyFaults(t *testing.T) {
	for lines, want := range map[string]string{
		"networking: {ipFamilies: [IPv5]}":                                                                     `"IPv5" is none`,
		"networking: {ipFamilies: [IPv4, IPv4]}":                                                               "each once",
		"networking: {overlay: geneve}":                                                                        `overlay "geneve": want routes or vxlan`,
		"networking: {overlay: vxlan, mtu: 1300}":                                                              "networking.mtu 1300: want at least 1330 with overlay vxlan",
		"networking: {ipFamily: both}":                                                                         `"both": want ipv4, ipv6, dual`,
		"networking: {ipFamily: ipv4, ipFamilies: [IPv6]}":                                                     "not together with ipFamilies",
		"networking: {ipFamilies: [IPv4], podSubnet: '10.244.0.0/16,fd00::/56'}":                               "one family, and networks or addresses for two",
		"networking: {podSubnet: '10.244.0.0/16,fd00::/56,fd01::/56'}":                                         "at most one for each IP family",
		"networking: {ipFamilies: [IPv4], podSubnet: fd00::/56}":                                               "networking.podSubnet fd00::/56: want an IPv4 network",
		"networking: {nodeSubnet: fd00:1::/64, podSubnet: 10.244.0.0/16}":                                      "networking.podSubnet 10.244.0.0/16: want an IPv6 network",
		"networking: {ipFamily: dual, podSubnet: 'fd00:1::/56,fd00:2::/56'}":                                   "want an IPv4 network",
		"networking: {ipFamily: dual, podSubnet: fd00:10::/56}":                                                "fd00:10::/64 and fd00:10::/56 overlap",
		"networking: {ipFamily: ipv6, podSubnet: 'fd00:10:244::1/56'}":                                         "did you mean fd00:10:244::/56",
		"networking: {ipFamily: ipv6, podSubnet: fd00:10:244::/65}":                                            "has no /64 left",
		"networking: {ipFamily: ipv6, serviceSubnet: fd00:10:96::/126}":                                        "too small for cluster DNS",
		"networking: {ipFamily: dual, outside: '10.0.0.200,fd00:77::1'}":                                       "networking.outside fd00:77::1: not in nodeSubnet",
		"networking: {ipFamily: dual, outside: '10.0.0.200,fd00:10::132'}":                                     "address fd00:10::132 is already that of outside",
		"networking: {ipFamily: dual}\nnodes: [{name: a, role: control-plane, address: '10.0.0.9,fd00:1::9'}]": "address fd00:1::9 is not in nodeSubnet fd00:10::/64",
	} {
		if _, err := loadText(t, lines); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: want %q, got %v", lines, want, err)
		}
	}
}
