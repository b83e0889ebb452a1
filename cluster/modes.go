// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"maps"
	"slices"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/iptables"
	"github.com/kplab/kplab/proxy/nftables"
	"github.com/kplab/kplab/proxy/none"
)

// ModeOptions is what a proxy mode of one node is made from.
type ModeOptions struct {
	// NetNS is the node's; nil for a mode that only renders.
	NetNS *netns.NS
	// Features of the kernel, found once for all nodes; nil when nobody has looked.
	Features *iptables.Features
	// LockFile is the lock of the legacy iptables tools in that namespace.
	LockFile string
	// Journal keeps what the mode has to restore when it is cleaned up.
	Journal string
	// NFTLayout is the layout of mode nftables; empty is the default.
	NFTLayout nftables.Layout
	// NFTProbed says that mode nftables was tried on this kernel already.
	NFTProbed bool
}

// proxyModes is the list of the proxy modes, by the name that --proxy-mode takes.
func proxyModes() map[string]func(ModeOptions) proxy.Mode {
	return map[string]func(ModeOptions) proxy.Mode{
		"iptables": func(o ModeOptions) proxy.Mode {
			return iptables.New(iptables.Options{NetNS: o.NetNS, Features: o.Features, LockFile: o.LockFile, Journal: o.Journal})
		},
		"nftables": func(o ModeOptions) proxy.Mode {
			return nftables.New(nftables.Options{NetNS: o.NetNS, Layout: o.NFTLayout, Probed: o.NFTProbed})
		},
		"none": func(ModeOptions) proxy.Mode { return none.New() },
	}
}

// nodePortAddresses is where nodePorts answer in a mode, as kube-proxy's default
// has it: every address of the node, in nftables mode the primary one.
func nodePortAddresses(mode string) []string {
	if mode == "nftables" {
		return []string{"primary"}
	}
	return nil
}

func modeNames() []string { return slices.Sorted(maps.Keys(proxyModes())) }
