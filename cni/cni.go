// SPDX-License-Identifier: Apache-2.0

// Package cni calls network plugins the way a container runtime does: libcni reads
// a configuration list from a directory and calls its plugins in order.
//
// The plugin "routed" (package routed) is served inside this process, through the
// seam where libcni would start an executable: a process for each call costs three
// times the work itself. Every other plugin of the list is a real executable that
// runs in the node's namespace, so a lab can use ptp, bridge or anything else by
// writing another list.
package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/kplab/kplab/cni/routed"
	"github.com/kplab/kplab/internal/netns"
)

// IfName is the pod's interface when an [Attachment] names no other.
const IfName = "eth0"

// Config says where a node's network is described.
type Config struct {
	// ConfDir holds the configuration, a .conflist; of several the first by name
	// wins, as with other runtimes.
	ConfDir string
	// StateDir is where libcni keeps what it was answered, for CHECK and DEL. A
	// directory in memory that ends with the sandboxes is best.
	StateDir string
	// BinDirs are searched for plugins that are not built in.
	BinDirs []string
	// NodeNS is the node's namespace; it stays the caller's to close, after the
	// Network.
	NodeNS *netns.NS
	Log    *slog.Logger
}

// Network is a node's pod network. It is safe for concurrent use, but for calls
// about the same attachment.
type Network struct {
	list   *libcni.NetworkConfigList
	lib    *libcni.CNIConfig
	routed *routed.Plugin
}

// Attachment is one pod's place on the network.
type Attachment struct {
	// ID identifies the sandbox; NetNSPath is its namespace.
	ID, NetNSPath string
	// IfName is the pod's interface; empty means eth0.
	IfName string
	// The pod, for plugins that want to know.
	PodNamespace, PodName, PodUID string
}

// Result is what an attachment got.
type Result struct {
	// IPs are the pod's addresses, in the plugin's order.
	IPs []netip.Addr
}

// Load reads the configuration. A directory without a usable one is an error that
// names the directory.
func Load(cfg Config) (*Network, error) {
	files, err := libcni.ConfFiles(cfg.ConfDir, []string{".conflist"})
	if err != nil {
		return nil, fmt.Errorf("read the network configuration in %s: %w", cfg.ConfDir, err)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no network configuration in %s: write a .conflist there", cfg.ConfDir)
	}
	slices.Sort(files)
	list, err := libcni.NetworkConfFromFile(files[0])
	if err == nil && len(list.Plugins) == 0 {
		err = errors.New("the list names no plugin")
	}
	if err != nil {
		return nil, fmt.Errorf("network configuration %s: %w", files[0], err)
	}
	n := &Network{list: list, routed: routed.New(cfg.NodeNS)}
	n.lib = libcni.NewCNIConfigWithCacheDir(cfg.BinDirs, cfg.StateDir, newSeam(n.routed, cfg.NodeNS, cfg.Log))
	return n, nil
}

// Close closes what the network keeps open. Attachments stay.
func (n *Network) Close() error { return n.routed.Close() }

// Name returns the network's name.
func (n *Network) Name() string { return n.list.Name }

// BuiltIn reports whether the built-in plugin wires the pods.
func (n *Network) BuiltIn() bool { return n.list.Plugins[0].Network.Type == routed.Type }

// Add attaches a pod. It may be repeated: with the built-in plugin the answer is
// the same and whatever is missing is put back.
func (n *Network) Add(ctx context.Context, a Attachment) (Result, error) {
	res, err := n.lib.AddNetworkList(ctx, n.list, runtimeConf(a))
	if err != nil {
		return Result{}, describe("attach", a, err)
	}
	full, err := types100.NewResultFromResult(res)
	if err != nil {
		return Result{}, describe("read the plugin's answer for", a, err)
	}
	var r Result
	for _, ip := range full.IPs {
		addr, ok := netip.AddrFromSlice(ip.Address.IP)
		if ok {
			r.IPs = append(r.IPs, addr.Unmap())
		}
	}
	if len(r.IPs) == 0 {
		return Result{}, describe("attach", a, errors.New("the plugins gave the pod no address; the list needs one that does"))
	}
	return r, nil
}

// Del detaches a pod; one that is not attached is success, and so is one whose
// namespace is gone.
func (n *Network) Del(ctx context.Context, a Attachment) error {
	return describe("detach", a, n.lib.DelNetworkList(ctx, n.list, runtimeConf(a)))
}

// Check compares a pod's attachment with what Add answered.
func (n *Network) Check(ctx context.Context, a Attachment) error {
	return describe("check", a, n.lib.CheckNetworkList(ctx, n.list, runtimeConf(a)))
}

// GC detaches every attachment that is not among valid, also those that this
// process never made.
func (n *Network) GC(ctx context.Context, valid []Attachment) error {
	args := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{}}
	for _, a := range valid {
		rt := runtimeConf(a)
		args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: rt.ContainerID, IfName: rt.IfName})
	}
	if err := n.lib.GCNetworkList(ctx, n.list, args); err != nil {
		return fmt.Errorf("collect forgotten attachments of network %s: %w", n.list.Name, err)
	}
	return nil
}

// Status reports whether pods could be attached now.
func (n *Network) Status(ctx context.Context) error {
	if err := n.lib.GetStatusNetworkList(ctx, n.list); err != nil {
		return fmt.Errorf("network %s is not ready: %w", n.list.Name, err)
	}
	return nil
}

func runtimeConf(a Attachment) *libcni.RuntimeConf {
	rt := &libcni.RuntimeConf{ContainerID: a.ID, NetNS: a.NetNSPath, IfName: a.IfName}
	if rt.IfName == "" {
		rt.IfName = IfName
	}
	if a.PodName != "" {
		rt.Args = [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", a.PodNamespace},
			{"K8S_POD_NAME", a.PodName},
			{"K8S_POD_INFRA_CONTAINER_ID", a.ID},
			{"K8S_POD_UID", a.PodUID},
		}
	}
	return rt
}

func describe(what string, a Attachment, err error) error {
	if err == nil {
		return nil
	}
	who := a.ID
	if a.PodName != "" {
		who = "pod " + a.PodNamespace + "/" + a.PodName
	}
	return fmt.Errorf("%s %s: %w", what, who, err)
}

// Conflist describes a network of the built-in plugin.
type Conflist struct {
	// Name of the network; empty means "kplab".
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
}

// WriteConflist writes 10-kplab.conflist into dir, which is made when it is
// missing. A file that says the same already is left alone.
func WriteConflist(dir string, c Conflist) error {
	if c.Name == "" {
		c.Name = "kplab"
	}
	plugin := map[string]any{
		"type": routed.Type, "subnet": c.Subnet, "nodeIP": c.NodeIP, "dataDir": c.DataDir, "keepLinks": true,
	}
	if c.MTU != 0 {
		plugin["mtu"] = c.MTU
	}
	if c.SecondarySubnet.IsValid() {
		plugin["secondarySubnet"], plugin["secondaryNodeIP"] = c.SecondarySubnet, c.SecondaryNodeIP
	}
	if c.RangeStart.IsValid() {
		plugin["rangeStart"] = c.RangeStart
	}
	text, err := json.MarshalIndent(map[string]any{"cniVersion": "1.1.0", "name": c.Name, "plugins": []any{plugin}}, "", "  ")
	if err != nil {
		return fmt.Errorf("write the network configuration: %w", err)
	}
	text = append(text, '\n')
	file := filepath.Join(dir, "10-kplab.conflist")
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
