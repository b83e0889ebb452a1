// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"github.com/kplab/kplab/apiserver"
	"github.com/kplab/kplab/cni"
	"github.com/kplab/kplab/dns"
	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/proxy/ipvs"
	"github.com/kplab/kplab/proxy/nftables"
)

// DefaultName is the lab that a command means when no name is given.
const DefaultName = "kplab"

// The only version and kind of a settings file.
const (
	configAPIVersion = "kplab/v1alpha1"
	configKind       = "Lab"
)

// maxPodCIDRBits leaves a node the addresses of a few pods; the smallest range that
// package cni/ipam takes.
const maxPodCIDRBits = 29

// Role says what a node is for.
type Role string

// The two roles. A control-plane node carries upstream's NoSchedule taint and
// the address at which the API is reached inside the lab.
const (
	ControlPlane Role = "control-plane"
	Worker       Role = "worker"
)

// Config holds the settings of a lab: what a `Lab` file may say. The zero value
// of a field means its default (see [Config.SetDefaults]).
type Config struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// Name of the lab; two labs with different names never meet.
	Name string `json:"name,omitempty"`
	// Nodes in order; the first control-plane node serves the API.
	Nodes      []NodeConfig `json:"nodes,omitempty"`
	Networking Networking   `json:"networking,omitempty"`
	Proxy      ProxyConfig  `json:"proxy,omitempty"`
	DNS        DNSConfig    `json:"dns,omitempty"`
	// LoadBalancer gives Services of type LoadBalancer addresses.
	LoadBalancer LoadBalancerConfig `json:"loadBalancer,omitempty"`
	// SystemPods makes kube-system show the lab's parts as pods, as a stock cluster
	// does: kube-proxy and the CNI on each node, the control plane's components. They
	// carry the parts' logs.
	SystemPods bool `json:"systemPods,omitempty"`
	// Disposable leaves out the fsync of each write: faster, and a power cut
	// may cost the last writes. For labs that are thrown away.
	Disposable bool `json:"disposable,omitempty"`
	// CNI has other network plugins wire the pods.
	CNI CNIConfig `json:"cni,omitzero"`
	// Audit has requests recorded.
	Audit AuditConfig `json:"audit,omitempty"`
}

// CNIConfig names the plugins that wire the pods. Paths are absolute; those of a
// settings file may be relative to it.
type CNIConfig struct {
	// Conf is a file with a network configuration list (cni.Conflist.Template says what
	// it may use of each node); "" for the built-in plugin.
	Conf string `json:"conf,omitempty"`
	// Bin are the directories of the list's plugins.
	Bin []string `json:"bin,omitempty"`
}

// absolute makes the paths absolute; those that are relative begin at dir.
func (c *CNIConfig) absolute(dir string) {
	paths := []*string{&c.Conf}
	for i := range c.Bin {
		paths = append(paths, &c.Bin[i])
	}
	for _, path := range paths {
		if *path != "" && !filepath.IsAbs(*path) {
			*path = filepath.Join(dir, *path)
		}
	}
}

// validate says what is wrong with the list, or its plugins.
func (c CNIConfig) validate() error {
	if c.Conf == "" {
		if len(c.Bin) > 0 {
			return errors.New("cni.bin: without a network configuration (cni.conf) no plugin is called")
		}
		return nil
	}
	if err := cni.CheckTemplate(c.Conf, c.Bin); err != nil {
		return fmt.Errorf("cni: %w", err)
	}
	return nil
}

// AuditConfig says where requests to the API are recorded, and which. Paths are
// absolute; those of a settings file may be relative to it.
type AuditConfig struct {
	// Log is the file that gets one event as JSON a line; "" for no record.
	Log string `json:"log,omitempty"`
	// Policy is a file with a Policy of audit.k8s.io/v1. Without it, the metadata of all
	// requests is recorded but for events, leases and looks at the API's health.
	Policy string `json:"policy,omitempty"`
}

// absolute makes the paths absolute; those that are relative begin at dir.
func (a *AuditConfig) absolute(dir string) {
	for _, path := range []*string{&a.Log, &a.Policy} {
		if *path != "" && !filepath.IsAbs(*path) {
			*path = filepath.Join(dir, *path)
		}
	}
}

// NodeConfig describes one simulated node.
type NodeConfig struct {
	Name string `json:"name"`
	Role Role   `json:"role,omitempty"`
	// Address in Networking.NodeSubnet.
	Address netip.Addr `json:"address,omitempty"`
	// PodCIDR is the block of pod addresses of this node.
	PodCIDR netip.Prefix `json:"podCIDR,omitempty"`
	// Secondary are those of the second IP family of the lab. In a settings file they
	// stand behind the first ones and a comma.
	Secondary SecondaryAddresses `json:"secondary,omitzero"`
	// FirstPod is the address in PodCIDR that the node's first pod gets; the next
	// ones follow. Without it, PodCIDR's first.
	FirstPod netip.Addr `json:"firstPod,omitzero"`
	// Labels are added to those that every node has.
	Labels map[string]string `json:"labels,omitempty"`
	// Proxy overrides the lab's proxy settings on this node.
	Proxy ProxyConfig `json:"proxy,omitzero"`
	// MaxPods is how many pods the scheduler may place here; 0 means 110, as on a
	// stock node.
	MaxPods int `json:"maxPods,omitempty"`
}

// Networking holds the address plan of a lab.
type Networking struct {
	// IPFamilies of the lab, the primary one first: IPv4, IPv6 or both. Without it,
	// those of the networks below, or IPv4.
	IPFamilies []corev1.IPFamily `json:"ipFamilies,omitempty"`
	// IPFamily is another way to write it: ipv4, ipv6 or dual.
	IPFamily      string       `json:"ipFamily,omitempty"`
	NodeSubnet    netip.Prefix `json:"nodeSubnet,omitempty"`
	PodSubnet     netip.Prefix `json:"podSubnet,omitempty"`
	ServiceSubnet netip.Prefix `json:"serviceSubnet,omitempty"`
	// Outside is the address of the client that is no node and no pod.
	Outside   netip.Addr `json:"outside,omitempty"`
	DNSDomain string     `json:"dnsDomain,omitempty"`
	// MTU of the node network and, without an overlay, of the pods, in bytes.
	MTU int `json:"mtu,omitempty"`
	// Overlay is how packets between pods of two nodes travel: as they are (routes),
	// or wrapped in UDP (vxlan), which makes those of the pods smaller by 50 bytes, or
	// by 70 between nodes with IPv6 addresses.
	Overlay string `json:"overlay,omitempty"`
	// Secondary is the address plan of the second IP family. In a settings file its
	// values stand behind the first ones and a comma.
	Secondary SecondaryNetworking `json:"secondary,omitzero"`
}

// ProxyConfig holds the settings of the Service proxy.
type ProxyConfig struct {
	Mode string `json:"mode,omitempty"`
	// NFTLayout is how mode nftables puts Services into its table: upstream or
	// compact.
	NFTLayout string `json:"nftLayout,omitempty"`
	// IPVS holds the settings of mode ipvs.
	IPVS IPVSConfig `json:"ipvs,omitzero"`
}

// IPVSConfig holds the settings of proxy mode ipvs.
type IPVSConfig struct {
	// Scheduler is how connections are spread, of Services that do not say it themselves
	// with the annotation kplab.io/ipvs-scheduler; rr when empty.
	Scheduler string `json:"scheduler,omitempty"`
	// StrictARP keeps nodes from answering ARP requests for addresses of Services.
	StrictARP bool `json:"strictARP,omitempty"`
	// Fallback lets nodes run mode iptables where the kernel has no IPVS, as kube-proxy
	// did in old releases; without it that is an error.
	Fallback bool `json:"fallback,omitempty"`
}

// validate says what is wrong with the settings of field.
func (p ProxyConfig) validate(field string, bad func(format string, args ...any)) {
	if _, ok := proxyModes()[p.Mode]; !ok {
		bad("%s.mode %q: want one of %s", field, p.Mode, strings.Join(ProxyModes(), ", "))
	}
	if _, err := nftables.ParseLayout(p.NFTLayout); err != nil {
		bad("%s.nftLayout: %w", field, err)
	} else if p.NFTLayout != "" && p.Mode != "nftables" {
		bad("%s.nftLayout %q: mode %s has no layouts", field, p.NFTLayout, p.Mode)
	}
	if _, err := ipvs.ParseScheduler(p.IPVS.Scheduler); err != nil {
		bad("%s.ipvs.scheduler: %w", field, err)
	} else if p.IPVS != (IPVSConfig{}) && p.Mode != "ipvs" {
		bad("%s.ipvs: these settings are for mode ipvs, and the mode is %s", field, p.Mode)
	}
}

// ProxyOf is the settings of one node's proxy: its own, or else the lab's.
func (c *Config) ProxyOf(n NodeConfig) ProxyConfig {
	if n.Proxy.Mode != "" {
		return n.Proxy
	}
	return c.Proxy
}

// DNSConfig holds the settings of the cluster's DNS.
type DNSConfig struct {
	// Provider is "coredns", or "none" for a lab without, or one that brings its own.
	Provider string `json:"provider,omitempty"`
	// Zone is a file of records (RFC 1035) for names outside of the cluster. It is read
	// when the lab is new; later the ConfigMap coredns in kube-system holds them.
	Zone string `json:"zone,omitempty"`
}

// The providers of cluster DNS.
const (
	dnsCoreDNS = "coredns"
	dnsNone    = "none"
)

// dnsAddress is the cluster IP of cluster DNS, the one that installers use.
func (c *Config) dnsAddress() netip.Addr { return nth(c.Networking.ServiceSubnet, 10) }

// LoadConfig reads a `Lab` file. Fields that are not known are errors, so that
// a slip of the pen does not silently mean the default.
func LoadConfig(path string) (Config, error) {
	var c Config
	data, err := os.ReadFile(path)
	if err != nil {
		return c, fmt.Errorf("read the lab's settings: %w", err)
	}
	if c, err = parseConfig(data); err != nil {
		return c, fmt.Errorf("settings file %s: %w", path, err)
	}
	dir, err := filepath.Abs(filepath.Dir(path))
	if err != nil {
		return c, fmt.Errorf("find the settings file: %w", err)
	}
	c.Audit.absolute(dir)
	c.CNI.absolute(dir)
	return c, nil
}

// parseConfig reads the text of a `Lab` file.
func parseConfig(text []byte) (c Config, err error) {
	if text, err = splitFamilies(text); err == nil {
		err = yaml.UnmarshalStrict(text, &c)
	}
	if err != nil {
		return c, err
	}
	if c.APIVersion != configAPIVersion || c.Kind != configKind {
		return c, fmt.Errorf("want apiVersion %s and kind %s, found %q and %q", configAPIVersion, configKind, c.APIVersion, c.Kind)
	}
	return c, nil
}

// SetDefaults fills what is not set: nodes master, node1 and node2 (or as many
// workers as nodes says, which counts the master; 0 means 3), the address plan
// of the tutorials and proxy mode iptables.
func (c *Config) SetDefaults(nodes int) {
	c.APIVersion, c.Kind = configAPIVersion, configKind
	if c.Name == "" {
		c.Name = DefaultName
	}
	n := &c.Networking
	c.setFamilies()
	for _, p := range c.plans() {
		p.setNetworks()
	}
	if n.DNSDomain == "" {
		n.DNSDomain = "cluster.local"
	}
	if n.MTU == 0 {
		n.MTU = 1500
	}
	if n.Overlay == "" {
		n.Overlay = string(node.OverlayRoutes)
	}
	if c.Proxy.Mode == "" {
		c.Proxy.Mode = "iptables"
	}
	if c.DNS.Provider == "" {
		c.DNS.Provider = dnsCoreDNS
	}
	if len(c.Nodes) == 0 {
		if nodes == 0 {
			nodes = 3
		}
		c.Nodes = append(c.Nodes, NodeConfig{Name: "master", Role: ControlPlane})
		for i := 1; i < nodes; i++ {
			c.Nodes = append(c.Nodes, NodeConfig{Name: fmt.Sprintf("node%d", i), Role: Worker})
		}
	}
	for i := range c.Nodes {
		node := &c.Nodes[i]
		if node.Role == "" {
			node.Role = Worker
		}
		for _, p := range c.plans() {
			p.setNode(node, i)
		}
	}
}

var (
	labName  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)
	nodeName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)
)

// ValidateName says whether a lab can have that name.
func ValidateName(name string) error {
	if !labName.MatchString(name) {
		return fmt.Errorf("lab name %q: want 1 to 32 lower-case letters, digits and '-', beginning and ending with a letter or digit", name)
	}
	return nil
}

// Validate returns every fault of the settings at once. Call it after
// SetDefaults.
func (c *Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if err := ValidateName(c.Name); err != nil {
		errs = append(errs, err)
	}
	n := c.Networking
	families := c.validateFamilies(bad)
	if families {
		for _, p := range c.plans() {
			p.validate(bad)
		}
	}
	for _, fault := range validation.IsDNS1123Subdomain(n.DNSDomain) {
		bad("networking.dnsDomain %q: %s", n.DNSDomain, fault)
	}
	if n.MTU < 1280 || n.MTU > 65535 {
		bad("networking.mtu %d: want 1280 to 65535 bytes", n.MTU)
	}
	if o := node.Overlay(n.Overlay); o != node.OverlayRoutes && o != node.OverlayVXLAN {
		bad("networking.overlay %q: want %s or %s", n.Overlay, node.OverlayRoutes, node.OverlayVXLAN)
	} else if least := o.Overhead(n.NodeSubnet.Addr()) + 1280; families && o != node.OverlayRoutes && n.MTU < least {
		bad("networking.mtu %d: want at least %d with overlay %s, which leaves the pods 1280 bytes", n.MTU, least, n.Overlay)
	}
	c.Proxy.validate("proxy", bad)
	for i, node := range c.Nodes {
		if node.Proxy != (ProxyConfig{}) {
			node.Proxy.validate(fmt.Sprintf("nodes[%d].proxy", i), bad)
		}
	}
	switch c.DNS.Provider {
	case dnsNone:
	case dnsCoreDNS:
		if families && !c.dnsAddress().IsValid() {
			bad("networking.serviceSubnet %s: too small for cluster DNS, which has its tenth address; give it at least a /28, or set dns.provider to %s", n.ServiceSubnet, dnsNone)
		}
	default:
		bad("dns.provider %q: want %s or %s", c.DNS.Provider, dnsCoreDNS, dnsNone)
	}
	if c.DNS.Zone != "" {
		if _, err := dns.ReadZone(c.DNS.Zone); err != nil {
			errs = append(errs, fmt.Errorf("dns.zone: %w", err))
		}
	}
	if err := apiserver.Audit(c.Audit).Check(); err != nil {
		errs = append(errs, fmt.Errorf("audit: %w", err))
	}
	if err := c.CNI.validate(); err != nil {
		errs = append(errs, err)
	}
	if families {
		errs = append(errs, c.validateNodes()...)
	}
	if len(errs) == 0 { // the pool is judged by the plan
		errs = append(errs, c.LoadBalancer.validate(c.addressPlan()))
	}
	return errors.Join(errs...)
}

func (c *Config) validateNodes() (errs []error) {
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	controlPlane := 0
	names, addrs := map[string]bool{}, map[netip.Addr]string{c.Networking.Outside: "outside", c.Networking.Secondary.Outside: "outside"}
	for i, node := range c.Nodes {
		if !nodeName.MatchString(node.Name) || node.Name == "outside" || node.Name == "fabric" {
			bad("nodes[%d].name %q: want a DNS name other than outside and fabric", i, node.Name)
		}
		if names[node.Name] {
			bad("nodes[%d].name %q: already the name of another node", i, node.Name)
		}
		names[node.Name] = true
		switch node.Role {
		case ControlPlane:
			controlPlane++
		case Worker:
		default:
			bad("nodes[%d].role %q: want %s or %s", i, node.Role, ControlPlane, Worker)
		}
		for _, p := range c.plans() {
			p.validateNode(i, c.Nodes, addrs, bad)
		}
		if node.FirstPod.IsValid() && node.PodCIDR.IsValid() &&
			(!node.PodCIDR.Contains(node.FirstPod) || node.FirstPod.Less(nth(node.PodCIDR, 2)) || !node.PodCIDR.Contains(node.FirstPod.Next())) {
			bad("nodes[%d] (%s): firstPod %s: want an address of podCIDR %s other than its first two and its last", i, node.Name, node.FirstPod, node.PodCIDR)
		}
		for key, value := range node.Labels {
			for _, fault := range append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...) {
				bad("nodes[%d] (%s): label %s=%s: %s", i, node.Name, key, value, fault)
			}
		}
	}
	if controlPlane != 1 {
		bad("nodes: want exactly one node with role %s, found %d", ControlPlane, controlPlane)
	}
	// One cause may hit every node.
	const most = 8
	if more := len(errs) - most; more > 0 {
		errs = append(errs[:most], fmt.Errorf("nodes: and %d more faults", more))
	}
	return errs
}

// APINode returns the node that serves the API inside the lab.
func (c *Config) APINode() NodeConfig {
	for _, n := range c.Nodes {
		if n.Role == ControlPlane {
			return n
		}
	}
	return NodeConfig{}
}

// Differences lists the settings in which two labs differ, each as
// "field: mine, theirs"; empty when they are equal.
func (c *Config) Differences(other *Config) []string {
	var out []string
	diff("", reflect.ValueOf(*c), reflect.ValueOf(*other), &out)
	return out
}

func diff(path string, a, b reflect.Value, out *[]string) {
	_, text := a.Interface().(interface{ MarshalText() ([]byte, error) })
	switch {
	case a.Kind() == reflect.Struct && !text:
		for i := range a.NumField() {
			name, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("json"), ",")
			diff(strings.TrimPrefix(path+"."+name, "."), a.Field(i), b.Field(i), out)
		}
	case a.Kind() == reflect.Slice && a.Len() == b.Len():
		for i := range a.Len() {
			diff(fmt.Sprintf("%s[%d]", path, i), a.Index(i), b.Index(i), out)
		}
	case a.Kind() == reflect.Slice:
		*out = append(*out, fmt.Sprintf("%s: %d entries, not %d", path, a.Len(), b.Len()))
	case a.Kind() == reflect.Map && a.Len() == 0 && b.Len() == 0:
	case !reflect.DeepEqual(a.Interface(), b.Interface()):
		*out = append(*out, fmt.Sprintf("%s: %v, not %v", path, a.Interface(), b.Interface()))
	}
}
