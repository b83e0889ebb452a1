// SPDX-License-Identifier: Apache-2.0

// Package netpolicy enforces NetworkPolicies on one node, as a CNI plugin with
// support for them does: for the pods of the node, in both directions, by rules in a
// table of its own (kplab-netpol, in ip and where pods have such addresses in ip6).
//
// What is enforced is decided by a pure function, [Decide], and written in one
// transaction that holds only what changed; then it is read back.
//
// All of it is in one hook, forward, where every packet from or to a pod of the node
// passes, behind the translation of Services: a policy sees pods, never a ClusterIP.
// Traffic between a pod and its own node, kubelet probes among it, does not pass there
// and is always allowed, as upstream asks for. The base chain lets pass what belongs
// to a connection that was let through before; else it asks the rules of the sender's
// pod and then those of the receiver's, and each drops what it does not name. A node
// without isolated pods has no table at all.
package netpolicy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	corelisters "k8s.io/client-go/listers/core/v1"
	networkinglisters "k8s.io/client-go/listers/networking/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nfnl"
	"github.com/kplab/kplab/internal/pace"
	"github.com/kplab/kplab/internal/settle"
)

const (
	// minInterval makes one transaction of the events of one change.
	minInterval = 5 * time.Millisecond
	// checkEvery is how often the table is compared with what it should be.
	checkEvery = 30 * time.Second
)

// Config says for which node an Enforcer works.
type Config struct {
	NodeName string
	NS       *netns.NS
	// Informers gives pods, namespaces and policies; New registers with it.
	Informers informers.SharedInformerFactory
	Log       *slog.Logger
}

// Enforcer keeps one node's table in line with the API.
type Enforcer struct {
	cfg        Config
	log        *slog.Logger
	pods       corelisters.PodLister
	namespaces corelisters.NamespaceLister
	policies   networkinglisters.NetworkPolicyLister
	listens    []subscription
	runner     *pace.Runner
	witness    *settle.Witness

	mu    sync.Mutex
	ready bool
	// conn and the rest belong to the loop.
	conn    *nfnl.Conn
	applied map[bool]*Program // by family; nil for what is not known
	checked time.Time
}

// New returns an enforcer that does nothing until Run.
func New(cfg Config) (*Enforcer, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	core, policies := cfg.Informers.Core().V1(), cfg.Informers.Networking().V1().NetworkPolicies()
	e := &Enforcer{
		cfg: cfg, log: cfg.Log.With("node", cfg.NodeName), applied: map[bool]*Program{},
		pods: core.Pods().Lister(), namespaces: core.Namespaces().Lister(), policies: policies.Lister(),
	}
	e.runner = pace.New(pace.Config{
		Name: "network policies of " + cfg.NodeName, MinInterval: minInterval, MaxInterval: checkEvery,
		OnError: func(err error) {
			e.log.Error("network policies are not enforced as they should be; trying again", "error", err)
		},
	}, e.sync)
	e.witness = settle.NewWitness("netpolicy/"+cfg.NodeName, e.pending)
	return e, errors.Join(
		watch(e, "pods", core.Pods().Informer(), matters),
		watch(e, "namespaces", core.Namespaces().Informer(), func(old, cur *corev1.Namespace) bool { return !maps.Equal(old.Labels, cur.Labels) }),
		watch(e, "networkpolicies", policies.Informer(), func(old, cur *networkingv1.NetworkPolicy) bool {
			return old.UID != cur.UID || !reflect.DeepEqual(old.Spec, cur.Spec)
		}),
	)
}

// subscription is one to an informer: what to end, and the revision at which it
// came in.
type subscription struct {
	resource, from string
	informer       cache.SharedIndexInformer
	handle         cache.ResourceEventHandlerRegistration
}

// watch kicks the loop for events of a resource that changed says are of interest.
func watch[T interface{ GetResourceVersion() string }](e *Enforcer, resource string, informer cache.SharedIndexInformer, changed func(old, cur T) bool) error {
	e.witness.Observe(resource, "0")
	handle := func(obj any) {
		if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = gone.Obj
		}
		e.runner.Kick()
		if o, ok := obj.(T); ok {
			e.witness.Observe(resource, o.GetResourceVersion())
		}
	}
	s := subscription{resource: resource, informer: informer, from: informer.LastSyncResourceVersion()}
	var err error
	s.handle, err = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: handle, DeleteFunc: handle,
		UpdateFunc: func(before, after any) {
			old, ok := before.(T)
			cur, ok2 := after.(T)
			if ok && ok2 {
				if changed(old, cur) {
					e.runner.Kick()
				}
				e.witness.Observe(resource, cur.GetResourceVersion())
			}
		},
	})
	if err != nil {
		return fmt.Errorf("network policies of node %s: watch %s: %w", e.cfg.NodeName, resource, err)
	}
	e.listens = append(e.listens, s)
	return nil
}

// matters says whether a change of a pod may change what is enforced.
func matters(old, cur *corev1.Pod) bool {
	ended := func(p *corev1.Pod) bool {
		return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
	}
	return old.UID != cur.UID || old.Spec.NodeName != cur.Spec.NodeName || ended(old) != ended(cur) || old.Status.PodIP != cur.Status.PodIP ||
		!slices.Equal(old.Status.PodIPs, cur.Status.PodIPs) || !maps.Equal(old.Labels, cur.Labels)
}

// Witness tells how far the enforcer has come: pending is what the kernel does not
// hold yet.
func (e *Enforcer) Witness() *settle.Witness { return e.witness }

func (e *Enforcer) pending() int {
	e.mu.Lock()
	ready := e.ready
	e.mu.Unlock()
	if !ready {
		return 1
	}
	return e.runner.Pending()
}

// Run enforces until ctx ends. The rules stay: they go with the node's namespace. It
// runs once.
func (e *Enforcer) Run(ctx context.Context) error {
	for _, s := range e.listens {
		if cache.WaitForCacheSync(ctx.Done(), s.handle.HasSynced) {
			// A node that begins later than the informers heard of no deletion before.
			e.witness.Observe(s.resource, s.from)
		}
	}
	e.runner.Kick()
	e.mu.Lock()
	e.ready = true
	e.mu.Unlock()
	err := e.runner.Run(ctx)
	for _, s := range e.listens {
		err = errors.Join(err, s.informer.RemoveEventHandler(s.handle))
	}
	if e.conn != nil {
		e.conn.Close()
	}
	return err
}

// sync makes the tables of both families true.
func (e *Enforcer) sync(context.Context) error {
	o, err := e.objects()
	if err != nil {
		return err
	}
	if e.conn == nil {
		if e.conn, err = nfnl.Dial(e.cfg.NS); err != nil {
			return err
		}
	}
	check := time.Since(e.checked) >= checkEvery
	for _, v6 := range []bool{false, true} {
		if err := e.apply(Decide(o, e.cfg.NodeName, v6), check); err != nil {
			e.conn.Close()
			e.conn = nil
			return err
		}
	}
	if check {
		e.checked = time.Now()
	}
	return nil
}

// apply writes a program unless it is there, and reads it back.
func (e *Enforcer) apply(want *Program, check bool) error {
	have := e.applied[want.v6]
	if have != nil && !check && reflect.DeepEqual(have, want) {
		return nil
	}
	family := map[bool]string{false: "ip", true: "ip6"}[want.v6]
	if have == nil || check {
		now, err := look(e.conn, want.v6)
		if err != nil && want.Empty() {
			// A kernel that cannot say has no table, and none is wanted.
			now, err = content{}, nil
		}
		if err != nil {
			return err
		}
		base := want
		if have != nil {
			base = have
		}
		switch diff := differs(now, wanted(base)); {
		case diff == "":
			have = base
		case have != nil:
			e.log.Warn("the table of network policies was changed by somebody else; writing it again", "family", family, "difference", diff)
			have = nil
		}
	}
	if have != nil && reflect.DeepEqual(have, want) {
		e.applied[want.v6] = want
		return nil
	}
	e.applied[want.v6] = nil // until it is read back
	if err := write(e.conn, have, want); err != nil {
		return fmt.Errorf("table %s %s of node %s: %w", family, table, e.cfg.NodeName, err)
	}
	now, err := look(e.conn, want.v6)
	if err != nil {
		return err
	}
	if diff := differs(now, wanted(want)); diff != "" {
		return fmt.Errorf("table %s %s of node %s: %w: %s", family, table, e.cfg.NodeName, errDiffers, diff)
	}
	e.applied[want.v6] = want
	return nil
}

// objects reads the caches. Without a policy nothing else counts.
func (e *Enforcer) objects() (o Objects, err error) {
	if o.Policies, err = e.policies.List(labels.Everything()); err != nil || len(o.Policies) == 0 {
		return o, err
	}
	if o.Pods, err = e.pods.List(labels.Everything()); err != nil {
		return o, err
	}
	o.Namespaces, err = e.namespaces.List(labels.Everything())
	return o, err
}
