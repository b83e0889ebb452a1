// SPDX-License-Identifier: Apache-2.0

package gc

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"

	"github.com/kplab/kplab/controller/loop"
)

// kinds are the kinds whose objects are in the graph. It is safe for concurrent use.
type kinds struct {
	mu  sync.Mutex
	all map[schema.GroupKind]loop.Kind
}

func newKinds() *kinds { return &kinds{all: map[schema.GroupKind]loop.Kind{}} }

func (k *kinds) get(gk schema.GroupKind) (loop.Kind, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	kind, ok := k.all[gk]
	return kind, ok
}

func (k *kinds) set(kind loop.Kind) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.all[groupKind(kind)] = kind
}

func (k *kinds) drop(kind loop.Kind) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.all, groupKind(kind))
}

func groupKind(k loop.Kind) schema.GroupKind { return schema.GroupKind{Group: k.Group, Kind: k.Kind} }

// definitionKind is the kind that defines others.
func definitionKind() loop.Kind {
	return loop.Kind{
		GroupVersionResource: schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"},
		Kind:                 "CustomResourceDefinition",
	}
}

// isDefinition tells a request to look at a definition from those to look at an
// object of the graph, which have a UID.
func (i ident) isDefinition() bool { return i.UID == "" && i.Kind == definitionKind() }

// syncWait is how long the first list of a custom kind may take.
const syncWait = 10 * time.Second

// custom follows the definitions of custom resources: each kind that is established
// has an informer of its own, of metadata, while it is.
type custom struct {
	c           *Controller
	client      kubernetes.Interface
	definitions cache.SharedIndexInformer

	// ctx is Run's, and running counts the informers that it ends.
	ctx     context.Context
	running sync.WaitGroup

	mu       sync.Mutex
	followed map[string]*followed // by the definition's name
}

// followed is one custom kind.
type followed struct {
	kind     loop.Kind
	informer cache.SharedIndexInformer
	stop     context.CancelFunc
	stopped  atomic.Bool
}

// objects are those that the kind's watch knew last.
func (w *followed) objects() map[types.UID]metav1.Object {
	out := map[types.UID]metav1.Object{}
	for _, obj := range w.informer.GetStore().List() {
		if m, ok := obj.(metav1.Object); ok {
			out[m.GetUID()] = m
		}
	}
	return out
}

func newCustom(c *Controller, d loop.Deps) *custom {
	f := &custom{c: c, client: d.Client, followed: map[string]*followed{}}
	kind := definitionKind()
	c.kinds.set(kind)
	f.definitions = metadatainformer.NewFilteredMetadataInformer(d.Metadata, kind.GroupVersionResource, "", 0, cache.Indexers{}, nil).Informer()
	c.setupErr = orFirst(c.setupErr, f.definitions.SetTransform(slim))
	loop.Watch(c.loop, kind.Resource, f.definitions, func(old, cur metav1.Object) {
		c.onObject(kind, old, cur)
		if cur == nil {
			cur = old
		}
		c.loop.Add(ident{Kind: kind, Key: loop.KeyOf(cur)})
	})
	return f
}

func orFirst(first, then error) error {
	if first != nil {
		return first
	}
	return then
}

// slim drops what is large in metadata and of no use here.
func slim(obj any) (any, error) {
	if m, ok := obj.(metav1.Object); ok {
		m.SetManagedFields(nil)
		m.SetAnnotations(nil)
		m.SetLabels(nil)
	}
	return obj, nil
}

// run starts to watch the definitions; the function that it returns waits for the end
// of all informers, which comes with ctx.
func (f *custom) run(ctx context.Context) (wait func()) {
	f.ctx = ctx
	f.running.Go(func() { f.definitions.RunWithContext(ctx) })
	return f.running.Wait
}

// definition is what matters here of a CustomResourceDefinition.
type definition struct {
	Spec struct {
		Group    string
		Scope    string
		Versions []struct {
			Name            string
			Served, Storage bool
		}
	}
	Status struct {
		AcceptedNames struct{ Plural, Kind string }
		Conditions    []struct{ Type, Status string }
	}
}

// kind is the kind that d defines; false when it is not served.
func (d definition) kind() (loop.Kind, bool) {
	established := false
	for _, c := range d.Status.Conditions {
		established = established || (c.Type == "Established" && c.Status == "True")
	}
	version := ""
	for _, v := range d.Spec.Versions {
		if v.Served && (version == "" || v.Storage) {
			version = v.Name
		}
	}
	names := d.Status.AcceptedNames
	gvr := schema.GroupVersionResource{Group: d.Spec.Group, Version: version, Resource: names.Plural}
	return loop.Kind{GroupVersionResource: gvr, Kind: names.Kind, Namespaced: d.Spec.Scope == "Namespaced"}, established && version != ""
}

// read returns the kind that a definition defines: served is false when nobody can
// ask for it, defined when there is no such definition.
func (f *custom) read(ctx context.Context, name string) (kind loop.Kind, served, defined bool, err error) {
	gvr := definitionKind().GroupVersionResource
	body, err := f.client.Discovery().RESTClient().Get().AbsPath("/apis", gvr.Group, gvr.Version, gvr.Resource, name).
		SetHeader("Accept", "application/json").DoRaw(ctx)
	var d definition
	switch {
	case apierrors.IsNotFound(err):
		return loop.Kind{}, false, false, nil
	case err == nil:
		err = json.Unmarshal(body, &d)
	}
	if err != nil {
		return loop.Kind{}, false, false, fmt.Errorf("read custom resource definition %s: %w", name, err)
	}
	kind, served = d.kind()
	return kind, served, true, nil
}

// follow makes the watch of a custom kind what its definition says.
func (f *custom) follow(ctx context.Context, name string) error {
	kind, served, defined, err := f.read(ctx, name)
	if err != nil {
		return err
	}
	f.mu.Lock()
	had := f.followed[name]
	f.mu.Unlock()
	if had != nil && served && had.kind == kind {
		return nil
	}
	if had != nil {
		f.unfollow(name, had)
	}
	var now *followed
	if served {
		if now, err = f.start(name, kind); err != nil {
			return err
		}
	}
	if had == nil {
		return nil
	}
	known := map[types.UID]metav1.Object{}
	if now != nil {
		known = now.objects()
	}
	for uid, obj := range had.objects() {
		switch {
		case known[uid] != nil:
		case defined && !served:
			// Still stored, and nobody can ask for them. That is no end of an owner.
			f.c.graph.forget(uid)
		default:
			// The watch ended before it could tell.
			f.c.onObject(had.kind, obj, nil)
		}
	}
	return nil
}

// start watches a kind and returns when its objects are in the graph.
func (f *custom) start(name string, kind loop.Kind) (*followed, error) {
	c := f.c
	resource := kind.GroupResource().String()
	ctx, stop := context.WithCancel(f.ctx)
	now := &followed{
		kind: kind, stop: stop,
		informer: metadatainformer.NewFilteredMetadataInformer(c.metadata, kind.GroupVersionResource, "", 0, cache.Indexers{}, nil).Informer(),
	}
	failed := func(err error) (*followed, error) {
		f.unfollow(name, now)
		return nil, fmt.Errorf("watch %s: %w", resource, err)
	}
	if err := now.informer.SetTransform(slim); err != nil {
		return failed(err)
	}
	event := func(old, cur any) {
		if now.stopped.Load() {
			return
		}
		before, _ := old.(metav1.Object)
		after, _ := cur.(metav1.Object)
		c.onObject(kind, before, after)
		if after == nil {
			after = before
		}
		c.Witness().Observe(resource, after.GetResourceVersion())
	}
	c.Witness().Observe(resource, "0")
	registration, err := now.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { event(nil, obj) },
		UpdateFunc: event,
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			event(obj, nil)
		},
	})
	if err != nil {
		return failed(err)
	}
	c.kinds.set(kind)
	f.mu.Lock()
	f.followed[name] = now
	f.mu.Unlock()
	f.running.Go(func() { now.informer.RunWithContext(ctx) })
	wait := time.NewTimer(syncWait)
	defer wait.Stop()
	select {
	case <-registration.HasSyncedChecker().Done():
	case <-ctx.Done():
		return now, nil
	case <-wait.C:
		return failed(fmt.Errorf("its first list did not come within %s", syncWait))
	}
	c.Witness().Observe(resource, now.informer.LastSyncResourceVersion())
	// Whom these objects own could not be said before.
	for _, i := range c.graph.strangers(groupKind(kind)) {
		c.loop.Add(i)
	}
	return now, nil
}

// unfollow ends the watch of a kind. The graph keeps its objects.
func (f *custom) unfollow(name string, had *followed) {
	had.stopped.Store(true)
	had.stop()
	f.mu.Lock()
	delete(f.followed, name)
	f.mu.Unlock()
	f.c.kinds.drop(had.kind)
}
