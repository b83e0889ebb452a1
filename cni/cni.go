// SPDX-License-Identifier: Apache-2.0

// Package cni calls network plugins the way a container runtime does: libcni reads
// a configuration list from a directory and calls its plugins in order.
//
// The plugin "routed" (package routed) is served inside this process, through the
// seam where libcni would start an executable: a process for each call costs three
// times the work itself. So is "portmap" (package portmap), unless there is an
// executable of that name. Every other plugin of the list is a real executable that
// runs in the node's namespace, so a lab can use ptp, bridge or anything else by
// writing another list.
package cni

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/kplab/kplab/cni/portmap"
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
	// builtIn: no plugin of the list is an executable.
	builtIn bool
}

// Attachment is one pod's place on the network.
type Attachment struct {
	// ID identifies the sandbox; NetNSPath is its namespace.
	ID, NetNSPath string
	// IfName is the pod's interface; empty means eth0.
	IfName string
	// The pod, for plugins that want to know.
	PodNamespace, PodName, PodUID string
	// Ports are the ports of the node that lead to the pod.
	Ports []PortMapping
}

// PortMapping leads a port of the node to one of a pod: the entry of the capability
// portMappings, as the conventions of CNI write it.
type PortMapping struct {
	HostPort      int32  `json:"hostPort"`
	ContainerPort int32  `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP,omitempty"`
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
	calls := newSeam(n.routed, portmap.New(cfg.NodeNS), cfg.NodeNS, cfg.Log)
	n.lib = libcni.NewCNIConfigWithCacheDir(cfg.BinDirs, cfg.StateDir, calls)
	n.builtIn = list.Plugins[0].Network.Type == routed.Type
	for _, p := range list.Plugins {
		// A plugin that is not there says so when it is called.
		path, err := calls.FindInPath(p.Network.Type, cfg.BinDirs)
		n.builtIn = n.builtIn && err == nil && strings.HasPrefix(path, builtinPrefix)
	}
	return n, nil
}

// Close closes what the network keeps open. Attachments stay.
func (n *Network) Close() error { return n.routed.Close() }

// Name returns the network's name.
func (n *Network) Name() string { return n.list.Name }

// BuiltIn reports whether the pods are wired by built-in plugins alone, whose ADD puts
// back what is missing.
func (n *Network) BuiltIn() bool { return n.builtIn }

// Add attaches a pod. It may be repeated: with the built-in plugin the answer is
// the same and whatever is missing is put back; plugins that are executables, which
// cannot be asked twice, are asked once. What an ADD that fails has made is taken away.
func (n *Network) Add(ctx context.Context, a Attachment) (Result, error) {
	rt := runtimeConf(a)
	var res types.Result
	var err error
	if !n.BuiltIn() {
		res, err = n.lib.GetNetworkListCachedResult(n.list, rt)
	}
	if res == nil && err == nil {
		res, err = n.lib.AddNetworkList(ctx, n.list, rt)
		if err != nil && !n.BuiltIn() {
			// The specification wants it; and a daemon that was killed between a plugin's
			// work and its own note finds what it left taken away, and tries again.
			err = errors.Join(err, n.lib.DelNetworkList(context.WithoutCancel(ctx), n.list, rt))
		}
	}
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
	if len(a.Ports) > 0 {
		rt.CapabilityArgs = map[string]any{"portMappings": a.Ports}
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
