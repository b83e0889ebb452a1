// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/iptables"
	"github.com/kplab/kplab/proxy/ipvs"
	"github.com/kplab/kplab/proxy/nftables"
	"github.com/kplab/kplab/proxy/none"
	"github.com/kplab/kplab/proxy/userspace"
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
	// NFTProbed and UserspaceProbed say that the mode was tried on this kernel already.
	NFTProbed, UserspaceProbed bool
	// Log hears what a mode has to say; nil means nobody.
	Log *slog.Logger
	// IPVS and IPVSFeatures are the settings of mode ipvs and what it found of the kernel;
	// nil when nobody has looked.
	IPVS         IPVSConfig
	IPVSFeatures *ipvs.Features
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
		"userspace": func(o ModeOptions) proxy.Mode {
			return userspace.New(userspace.Options{NetNS: o.NetNS, LockFile: o.LockFile, Probed: o.UserspaceProbed, Log: o.Log})
		},
		"ipvs": func(o ModeOptions) proxy.Mode {
			// The journal is for what this mode alone changes, beside that of another.
			journal := o.Journal
			if journal != "" {
				journal = strings.TrimSuffix(journal, ".json") + "-ipvs.json"
			}
			return ipvs.New(ipvs.Options{NetNS: o.NetNS, Features: o.IPVSFeatures, LockFile: o.LockFile, Journal: journal, Scheduler: o.IPVS.Scheduler, StrictARP: o.IPVS.StrictARP})
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

// ModeWarning is what a person should know who chooses a mode; "" when there is nothing.
func ModeWarning(mode string) string {
	switch mode {
	case "ipvs":
		return ipvsDeprecated
	case "userspace":
		return "proxy mode userspace was removed from Kubernetes in 1.26: it is here to be compared with the others; the proxy copies every byte, pods see the node's address instead of the client's, and connections end with the daemon"
	}
	return ""
}

// ProxyModes lists the names that --proxy-mode takes.
func ProxyModes() []string { return slices.Sorted(maps.Keys(proxyModes())) }
