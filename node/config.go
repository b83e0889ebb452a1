// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net/netip"
	"path/filepath"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"

	"github.com/kplab/kplab/internal/gate"
	"github.com/kplab/kplab/sandbox"
)

// DNS is what goes into the pods' resolv.conf.
type DNS struct {
	// Server is the cluster DNS Service. Without one, a pod that asks for cluster
	// DNS gets no name server.
	Server netip.Addr
	// Domain is the cluster's domain; empty means cluster.local.
	Domain string
}

// Config describes one node.
type Config struct {
	// Name is the node's name and hostname.
	Name string
	// IP is the node's address on the fabric.
	IP netip.Prefix
	// PodCIDR is the range of its pods; bits behind its length do not count.
	PodCIDR netip.Prefix
	// SecondaryIP and SecondaryPodCIDR are those of the other IP family; the zero
	// values mean that the node has one family.
	SecondaryIP      netip.Prefix
	SecondaryPodCIDR netip.Prefix
	// FirstPod is the address in it that the first pod gets; the zero address means
	// its first.
	FirstPod netip.Addr
	// ControlPlane gives the node the control plane's role label and taint.
	ControlPlane bool
	// Labels are added to those that every node has.
	Labels map[string]string
	// MaxPods is how many pods the node says it takes; 0 means upstream's 110.
	MaxPods int

	DNS DNS

	// Client and Informers talk to the API as this node's kubelet, Events writes its
	// events; nil means Client.
	Client    kubernetes.Interface
	Events    kubernetes.Interface
	Informers informers.SharedInformerFactory

	// Intake and Work hold the kubelet up while they are closed: what it hears from
	// the API, and everything that it does. nil is never.
	Intake, Work *gate.Gate

	Fabric  *Fabric
	Runtime *sandbox.Runtime
	// StateDir is the node's own directory for what outlives a stop: volumes and
	// logs of its pods. RuntimeDir is for what goes with the namespaces: addresses
	// in use and what plugins answered. Empty means a folder of StateDir; a
	// directory in memory makes pods start faster.
	StateDir, RuntimeDir string
	// CNIConf is a file as cni.Conflist's Template takes it; empty means the built-in
	// plugin. What it becomes for this node is below StateDir. CNIBinDirs are searched
	// for plugins.
	CNIConf    string
	CNIBinDirs []string

	// KubeletTLS serves port 10250 on the node's IP: its certificate, and the
	// authority that clients must come from. nil leaves the port closed.
	KubeletTLS *tls.Config

	// PartLog writes what a part of the lab says, until ctx ends: see package
	// sandbox/workload.
	PartLog func(ctx context.Context, part string, w io.Writer) error

	// Version is kplab's own; KubernetesVersion is what the node reports as its
	// kubelet's, for example v1.37.2.
	Version, KubernetesVersion string

	Log *slog.Logger
}

// peer is the node as the others see it.
func (c *Config) peer() Peer {
	return Peer{Name: c.Name, IP: c.IP.Addr(), PodCIDR: c.PodCIDR, SecondaryIP: c.SecondaryIP.Addr(), SecondaryPodCIDR: c.SecondaryPodCIDR}
}

func (c *Config) setDefaults() {
	c.PodCIDR, c.SecondaryPodCIDR = c.PodCIDR.Masked(), c.SecondaryPodCIDR.Masked()
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.DNS.Domain == "" {
		c.DNS.Domain = "cluster.local"
	}
	if c.RuntimeDir == "" {
		c.RuntimeDir = filepath.Join(c.StateDir, "run")
	}
	if c.KubernetesVersion == "" {
		c.KubernetesVersion = "v1.37.2"
	}
	if c.MaxPods == 0 {
		c.MaxPods = defaultMaxPods
	}
	if c.Events == nil {
		c.Events = c.Client
	}
	if c.Version == "" {
		c.Version = "dev"
	}
}
