// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func defaults() Config {
	var c Config
	c.SetDefaults(0)
	return c
}

func TestDefaultsAreTheTutorialsPlan(t *testing.T) {
	c := defaults()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	want := []struct {
		name, addr, pods string
		role             Role
	}{
		{"master", "10.0.0.131", "10.244.0.0/24", ControlPlane},
		{"node1", "10.0.0.132", "10.244.1.0/24", Worker},
		{"node2", "10.0.0.133", "10.244.2.0/24", Worker},
	}
	if len(c.Nodes) != len(want) {
		t.Fatalf("%d nodes, want %d", len(c.Nodes), len(want))
	}
	for i, w := range want {
		n := c.Nodes[i]
		if n.Name != w.name || n.Address.String() != w.addr || n.PodCIDR.String() != w.pods || n.Role != w.role {
			t.Errorf("node %d is %+v, want %+v", i, n, w)
		}
	}
	if c.APINode().Name != "master" || c.Networking.Outside.String() != "10.0.0.200" {
		t.Errorf("API on %s, outside %s", c.APINode().Name, c.Networking.Outside)
	}
}

func TestValidateNamesEachFault(t *testing.T) {
	for want, spoil := range map[string]func(*Config){
		"lab name":                    func(c *Config) { c.Name = "Über" },
		"want an IPv4 network":        func(c *Config) { c.Networking.PodSubnet = netip.MustParsePrefix("fd00::/64") },
		"did you mean 10.244.0.0/16":  func(c *Config) { c.Networking.PodSubnet = netip.MustParsePrefix("10.244.7.0/16") },
		"overlap: node, pod":          func(c *Config) { c.Networking.PodSubnet = netip.MustParsePrefix("10.96.0.0/16") },
		"networking.mtu 9":            func(c *Config) { c.Networking.MTU = 9 },
		"networking.outside":          func(c *Config) { c.Networking.Outside = netip.MustParseAddr("192.0.2.1") },
		`proxy.mode "quantum"`:        func(c *Config) { c.Proxy.Mode = "quantum" },
		`nodes[1].name "outside"`:     func(c *Config) { c.Nodes[1].Name = "outside" },
		"already the name of another": func(c *Config) { c.Nodes[1].Name = "master" },
		`nodes[1].role "boss"`:        func(c *Config) { c.Nodes[1].Role = "boss" },
		"did you mean 10.244.1.0/24":  func(c *Config) { c.Nodes[1].PodCIDR = netip.MustParsePrefix("10.244.1.7/24") },
		"has too few addresses":       func(c *Config) { c.Nodes[1].PodCIDR = netip.MustParsePrefix("10.244.1.0/30") },
		"firstPod 10.244.9.9":         func(c *Config) { c.Nodes[1].FirstPod = netip.MustParseAddr("10.244.9.9") },
		"label a b=c":                 func(c *Config) { c.Nodes[1].Labels = map[string]string{"a b": "c"} },
		`networking.dnsDomain "a b"`:  func(c *Config) { c.Networking.DNSDomain = "a b" },
		"is not in nodeSubnet":        func(c *Config) { c.Nodes[1].Address = netip.MustParseAddr("192.0.2.1") },
		"maxPods 300: want 0 to 254":  func(c *Config) { c.Nodes[1].MaxPods = 300 },
		"already that of master":      func(c *Config) { c.Nodes[1].Address = c.Nodes[0].Address },
		"already that of outside":     func(c *Config) { c.Nodes[1].Address = c.Networking.Outside },
		"is not inside podSubnet":     func(c *Config) { c.Nodes[1].PodCIDR = netip.MustParsePrefix("10.9.0.0/24") },
		"overlaps that of master":     func(c *Config) { c.Nodes[1].PodCIDR = c.Nodes[0].PodCIDR },
		"control-plane, found 0":      func(c *Config) { c.Nodes[0].Role = Worker },
	} {
		c := defaults()
		spoil(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want an error with %q, got %v", want, err)
		}
	}
}

func TestDifferencesNameTheField(t *testing.T) {
	a, b := defaults(), defaults()
	if d := a.Differences(&b); len(d) > 0 {
		t.Fatalf("equal settings differ: %v", d)
	}
	b.Networking.MTU = 1400
	b.Nodes[2].Name = "node9"
	b.Nodes[1].Labels = map[string]string{"zone": "a"}
	want := []string{"nodes[1].labels: map[], not map[zone:a]", "nodes[2].name: node2, not node9", "networking.mtu: 1500, not 1400"}
	if d := a.Differences(&b); strings.Join(d, "|") != strings.Join(want, "|") {
		t.Errorf("got %q, want %q", d, want)
	}
}

func TestLoadConfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lab.yaml")
	text := `apiVersion: kplab/v1alpha1
kind: Lab
name: small
nodes:
- {name: a, role: control-plane, address: 10.0.0.5, podCIDR: 10.244.36.64/26}
networking: {podSubnet: 10.244.0.0/16}
proxy: {mode: iptables}
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := LoadConfig(path)
	if err != nil {
		t.Fatal(err)
	}
	c.SetDefaults(0)
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	if len(c.Nodes) != 1 || c.Nodes[0].PodCIDR.String() != "10.244.36.64/26" || c.Name != "small" {
		t.Errorf("read %+v", c)
	}
	for name, spoiled := range map[string]string{
		"unknown field":   strings.Replace(text, "proxy:", "proxi:", 1),
		"want apiVersion": strings.Replace(text, "kind: Lab", "kind: Pod", 1),
		"10.244.36.64/99": strings.Replace(text, "/26", "/99", 1),
	} {
		if err := os.WriteFile(path, []byte(spoiled), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadConfig(path); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("want an error with %q, got %v", name, err)
		}
	}
}

// TestAuditSettings: paths are relative to the settings file, and a policy that cannot
// be used is told before anything starts.
func TestAuditSettings(t *testing.T) {
	dir := t.TempDir()
	load := func(policy string) (Config, error) {
		t.Helper()
		text := "apiVersion: kplab/v1alpha1\nkind: Lab\naudit: {log: audit.log, policy: policy.yaml}\n"
		for name, content := range map[string]string{"lab.yaml": text, "policy.yaml": policy} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		c, err := LoadConfig(filepath.Join(dir, "lab.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		c.SetDefaults(0)
		return c, c.Validate()
	}
	c, err := load("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata}]\n")
	if err != nil || c.Audit.Log != filepath.Join(dir, "audit.log") || c.Audit.Policy != filepath.Join(dir, "policy.yaml") {
		t.Errorf("%+v, %v", c.Audit, err)
	}
	if _, err = load("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: All}]\n"); err == nil || !strings.Contains(err.Error(), `audit: audit policy `) || !strings.Contains(err.Error(), `Unsupported value: "All"`) {
		t.Errorf("a bad policy: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "audit.log")); err == nil {
		t.Error("the check has made the log")
	}
}

// TestTooManyNodes are refused in a few lines, which name what there is too little of.
func TestTooManyNodes(t *testing.T) {
	c := Config{}
	c.SetDefaults(1000)
	err := c.Validate()
	if err == nil {
		t.Fatal("1,000 nodes fit a /24")
	}
	text := err.Error()
	if n := strings.Count(text, "\n"); n > 10 {
		t.Errorf("%d lines:\n%s", n, text)
	}
	for _, want := range []string{"nodes[69]", "nodeSubnet 10.0.0.0/24 has no address left for it", "more faults"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	if strings.Contains(text, "invalid IP") || strings.Contains(text, "invalid Prefix") {
		t.Errorf("zero values are shown:\n%s", text)
	}
}
