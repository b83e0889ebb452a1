// SPDX-License-Identifier: Apache-2.0

package loop

import (
	"context"
	"log/slog"
	"net"
	"net/netip"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
)

// Deps is what a controller is made from. All controllers of a process share one
// value and with it one informer factory.
type Deps struct {
	// Client reads and writes typed objects.
	Client kubernetes.Interface
	// Metadata reads and deletes objects of any kind by their metadata alone; the
	// garbage collector and the namespace controller need it.
	Metadata metadata.Interface
	// Informers is the process's only factory, with resync 0. The controllers
	// register their handlers when they are made; start it afterwards.
	Informers informers.SharedInformerFactory
	// Recorder returns a recorder of events for the component of that name ("From"
	// in kubectl describe). nil drops all events.
	Recorder func(component string) record.EventRecorder
	// Clock is the source of time; nil is the real one.
	Clock clock.WithTicker
	// Log is the process's logger; nil drops everything.
	Log *slog.Logger
	// Config is how the cluster is laid out.
	Config Config
}

// Config is what controllers have to know about the cluster and cannot read from
// its API.
type Config struct {
	// ClusterDomain is the DNS domain of the cluster, such as cluster.local.
	ClusterDomain string
	// APIAddresses are where the API server can be reached from nodes and pods.
	// They become the endpoints of the Service default/kubernetes; all have the
	// same port.
	APIAddresses []netip.AddrPort
	// ServiceCIDR is the range of cluster IPs. The Service default/kubernetes gets
	// its first address.
	ServiceCIDR netip.Prefix
	// CACert is the certificate that signs the API server's, in PEM. It is
	// published in every namespace.
	CACert []byte
	// Addresses is the plan that a load balancer's pool has to fit in.
	Addresses AddressPlan
	// DialOutside connects from a place that is no node and no pod, as a load
	// balancer in front of the cluster does; nil when there is no such place.
	DialOutside Dialer
}

// Dialer is as net.Dialer.DialContext.
type Dialer = func(ctx context.Context, network, address string) (net.Conn, error)

// AddressPlan is the ranges of a cluster, and what is in use on the node network.
type AddressPlan struct {
	NodeSubnets, PodSubnets, ServiceSubnets []netip.Prefix
	// Taken says whose each address is.
	Taken map[netip.Addr]string
}

// WithDefaults returns d with its optional fields filled in.
func (d Deps) WithDefaults() Deps {
	if d.Clock == nil {
		d.Clock = clock.RealClock{}
	}
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	if d.Recorder == nil {
		d.Recorder = func(string) record.EventRecorder { return &record.FakeRecorder{} }
	}
	return d
}
