// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"text/template"

	"github.com/containernetworking/cni/libcni"

	"github.com/kplab/kplab/cni/portmap"
	"github.com/kplab/kplab/cni/routed"
)

// Conflist describes a node's network: the built-in plugin's, or another one's.
type Conflist struct {
	// Name of the built-in network; empty means "kplab".
	Name string
	// Subnet is the range of pod addresses on the node, NodeIP the node's address.
	Subnet netip.Prefix
	NodeIP netip.Addr
	// SecondarySubnet and SecondaryNodeIP are those of the other IP family; the zero
	// values mean that there is one family.
	SecondarySubnet netip.Prefix
	SecondaryNodeIP netip.Addr
	// RangeStart is the address that the first pod gets; the zero address means the
	// range's first.
	RangeStart netip.Addr
	// DataDir holds the address reservations.
	DataDir string
	// MTU in bytes; 0 means 1500.
	MTU int
	// Template is the file with the network configuration list that every node gets in
	// the place of the built-in one. It may use what containerd's conf_template has:
	// {{.PodCIDR}}, and {{range .PodCIDRRanges}} and {{range .Routes}} for each IP
	// family; besides {{.NodeIP}}, {{.MTU}} and {{.DataDir}}. "" is the built-in list.
	Template string
}

// fileName is the list's, in a node's directory of configurations.
const fileName = "10-kplab.conflist"

// WriteConflist writes the node's list into dir, which is made when it is missing. A
// file that says the same already is left alone.
func WriteConflist(dir string, c Conflist) error {
	text, err := c.text()
	if err != nil {
		return err
	}
	file := filepath.Join(dir, fileName)
	if old, err := os.ReadFile(file); err == nil && string(old) == string(text) {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the network configuration directory: %w", err)
	}
	tmp := file + ".new"
	if err := os.WriteFile(tmp, text, 0o644); err != nil {
		return fmt.Errorf("write the network configuration: %w", err)
	}
	if err := os.Rename(tmp, file); err != nil {
		return fmt.Errorf("write the network configuration: %w", err)
	}
	return nil
}

// CheckTemplate says what is wrong with a file for [Conflist.Template], and with the
// directories of its plugins.
func CheckTemplate(file string, binDirs []string) error {
	text, err := Conflist{
		Subnet: netip.MustParsePrefix("10.244.1.0/24"), NodeIP: netip.MustParseAddr("10.0.0.132"), MTU: 1500, DataDir: "/", Template: file,
	}.text()
	if err != nil {
		return err
	}
	list, err := libcni.NetworkConfFromBytes(text)
	if err != nil {
		return fmt.Errorf("network configuration %s: %w", file, err)
	}
	var errs []error
	for _, dir := range binDirs {
		if st, err := os.Stat(dir); err != nil {
			errs = append(errs, fmt.Errorf("directory of network plugins: %w", err))
		} else if !st.IsDir() {
			errs = append(errs, fmt.Errorf("directory of network plugins: %s is none", dir))
		}
	}
	seam := newSeam(nil, nil, nil, nil)
	for _, p := range list.Plugins {
		names := []string{p.Network.Type}
		if p.Network.IPAM.Type != "" {
			names = append(names, p.Network.IPAM.Type)
		}
		for _, name := range names {
			if _, err := seam.FindInPath(name, binDirs); err != nil {
				errs = append(errs, fmt.Errorf("network configuration %s: %w", file, err))
			}
		}
	}
	return errors.Join(errs...)
}

// text is the list as the node gets it.
func (c Conflist) text() ([]byte, error) {
	list := map[string]any{"cniVersion": "1.1.0", "name": c.Name, "plugins": []any{
		map[string]any{"type": routed.Type},
		map[string]any{"type": portmap.Type, "capabilities": map[string]any{"portMappings": true}},
	}}
	if c.Name == "" {
		list["name"] = "kplab"
	}
	if c.Template != "" {
		var err error
		if list, err = c.fromTemplate(); err != nil {
			return nil, fmt.Errorf("network configuration %s: %w", c.Template, err)
		}
	}
	plugins, _ := list["plugins"].([]any)
	if len(plugins) == 0 {
		return nil, fmt.Errorf("network configuration %s: no list of \"plugins\"; a single plugin has to be in a list, too", c.Template)
	}
	for _, p := range plugins {
		if p, ok := p.(map[string]any); ok {
			c.complete(p)
		}
	}
	text, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write the network configuration: %w", err)
	}
	return append(text, '\n'), nil
}

// complete fills in what a plugin has to know about this node and its file does not
// say.
func (c Conflist) complete(plugin map[string]any) {
	set := func(in map[string]any, key string, value any) {
		if _, ok := in[key]; !ok {
			in[key] = value
		}
	}
	switch plugin["type"] {
	case routed.Type:
		set(plugin, "subnet", c.Subnet)
		set(plugin, "nodeIP", c.NodeIP)
		set(plugin, "dataDir", c.DataDir)
		set(plugin, "keepLinks", true)
		if c.SecondarySubnet.IsValid() {
			set(plugin, "secondarySubnet", c.SecondarySubnet)
			set(plugin, "secondaryNodeIP", c.SecondaryNodeIP)
		}
		if c.RangeStart.IsValid() {
			set(plugin, "rangeStart", c.RangeStart)
		}
		if c.MTU != 0 {
			set(plugin, "mtu", c.MTU)
		}
	case "ptp", "bridge", "macvlan", "ipvlan":
		if c.MTU != 0 {
			set(plugin, "mtu", c.MTU)
		}
	}
	if ipam, ok := plugin["ipam"].(map[string]any); ok && ipam["type"] == "host-local" {
		// Its own default is a directory of the host's, which all nodes would share.
		set(ipam, "dataDir", c.DataDir)
	}
}

// fromTemplate reads the file of Template for this node.
func (c Conflist) fromTemplate() (map[string]any, error) {
	source, err := os.ReadFile(c.Template)
	if err != nil {
		return nil, err
	}
	t, err := template.New(filepath.Base(c.Template)).Option("missingkey=error").Parse(string(source))
	if err != nil {
		return nil, err
	}
	cidrs, routes := []string{c.Subnet.String()}, []string{anywhere(c.Subnet)}
	if c.SecondarySubnet.IsValid() {
		cidrs, routes = append(cidrs, c.SecondarySubnet.String()), append(routes, anywhere(c.SecondarySubnet))
	}
	var text bytes.Buffer
	err = t.Execute(&text, map[string]any{
		"PodCIDR": cidrs[0], "PodCIDRRanges": cidrs, "Routes": routes, "NodeIP": c.NodeIP.String(), "MTU": c.MTU, "DataDir": c.DataDir,
	})
	if err != nil {
		return nil, err
	}
	var list map[string]any
	if err := json.Unmarshal(text.Bytes(), &list); err != nil {
		return nil, err
	}
	return list, nil
}

// anywhere is the destination of a default route of the prefix's family.
func anywhere(p netip.Prefix) string {
	if p.Addr().Is4() {
		return "0.0.0.0/0"
	}
	return "::/0"
}
