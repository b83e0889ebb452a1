// SPDX-License-Identifier: Apache-2.0

// Package controller lists the loops that write derived objects: what a cluster's
// controller manager and scheduler do. Each is in a folder of its own and has the
// same shape: New subscribes it to the shared informers, Run works until its context
// ends, Witness tells how far it has come. None knows another; they meet in the API.
package controller

import (
	"context"

	"k8s.io/client-go/kubernetes"

	"github.com/kplab/kplab/controller/cronjob"
	"github.com/kplab/kplab/controller/daemonset"
	"github.com/kplab/kplab/controller/deployment"
	"github.com/kplab/kplab/controller/disruption"
	"github.com/kplab/kplab/controller/endpoints"
	"github.com/kplab/kplab/controller/endpointslice"
	"github.com/kplab/kplab/controller/gc"
	"github.com/kplab/kplab/controller/job"
	"github.com/kplab/kplab/controller/kubernetessvc"
	"github.com/kplab/kplab/controller/loadbalancer"
	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/mirroring"
	"github.com/kplab/kplab/controller/namespace"
	"github.com/kplab/kplab/controller/nodelifecycle"
	"github.com/kplab/kplab/controller/persistentvolume"
	"github.com/kplab/kplab/controller/podgc"
	"github.com/kplab/kplab/controller/replicaset"
	"github.com/kplab/kplab/controller/replicationcontroller"
	"github.com/kplab/kplab/controller/resourcequota"
	"github.com/kplab/kplab/controller/scheduler"
	"github.com/kplab/kplab/controller/servicecidr"
	"github.com/kplab/kplab/controller/statefulset"
	"github.com/kplab/kplab/controller/tainteviction"
	"github.com/kplab/kplab/controller/ttlafterfinished"
	"github.com/kplab/kplab/internal/settle"
)

// Deps is what the controllers are made from.
type Deps = loop.Deps

// Config is what they have to know about the cluster.
type Config = loop.Config

// AddressPlan is the part of Config that says which addresses are taken.
type AddressPlan = loop.AddressPlan

// Dialer is the part of Config that connects from outside of the cluster.
type Dialer = loop.Dialer

// Recorders writes events; its For fits Deps.Recorder.
type Recorders = loop.Recorders

// NewRecorders starts writing events through a client.
func NewRecorders(ctx context.Context, client kubernetes.Interface) *Recorders {
	return loop.NewRecorders(ctx, client)
}

// Controller is one loop.
type Controller interface {
	// Name is unique among the controllers.
	Name() string
	// Run waits for the caches and works until ctx ends; it returns nil then.
	Run(ctx context.Context) error
	// Witness tells how far the loop has come.
	Witness() *settle.Witness
}

// All makes every controller. Start the informer factory afterwards, then run each of
// them; they may be run in any order.
func All(d Deps) []Controller {
	return []Controller{
		namespace.New(d),
		kubernetessvc.New(d),
		scheduler.New(d),
		deployment.New(d),
		replicaset.New(d),
		replicationcontroller.New(d),
		statefulset.New(d),
		daemonset.New(d),
		disruption.New(d),
		resourcequota.New(d),
		job.New(d),
		cronjob.New(d),
		ttlafterfinished.New(d),
		persistentvolume.New(d),
		endpointslice.New(d),
		endpoints.New(d),
		mirroring.New(d),
		loadbalancer.New(d),
		gc.New(d),
		nodelifecycle.New(d),
		tainteviction.New(d),
		podgc.New(d),
		servicecidr.New(d),
	}
}
