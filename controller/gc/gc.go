// SPDX-License-Identifier: Apache-2.0

package gc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/internal/settle"
)

const workers = 16

// Controller is the garbage collector.
type Controller struct {
	loop     *loop.Loop[ident]
	metadata metadata.Interface
	graph    *graph
	kinds    *kinds
	custom   *custom
	setupErr error
}

// New makes the collector and subscribes it to every kind.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	c := &Controller{metadata: d.Metadata, graph: newGraph(), kinds: newKinds()}
	c.loop = loop.New(loop.Options[ident]{Name: "gc", Workers: workers, Sync: c.sync, Deps: d})
	for _, kind := range loop.Kinds() {
		c.kinds.set(kind)
		informer, err := d.Informers.ForResource(kind.GroupVersionResource)
		if err != nil {
			c.setupErr = errors.Join(c.setupErr, fmt.Errorf("watch %s: %w", kind.Resource, err))
			continue
		}
		loop.Watch(c.loop, kind.Resource, informer.Informer(), func(old, cur metav1.Object) { c.onObject(kind, old, cur) })
	}
	c.custom = newCustom(c, d)
	return c
}

// Name returns the collector's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the collector has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	if c.setupErr != nil {
		return c.setupErr
	}
	defer c.custom.run(ctx)()
	return c.loop.Run(ctx)
}

func (c *Controller) onObject(kind loop.Kind, old, cur metav1.Object) {
	var look []ident
	// Under one name, one object may have followed another between two events.
	if old != nil && (cur == nil || old.GetUID() != cur.GetUID()) {
		look = append(look, c.graph.drop(old.GetUID())...)
	}
	if cur != nil && (old == nil || old.GetUID() != cur.GetUID() || differs(old, cur)) {
		look = append(look, c.graph.put(newObject(kind, cur))...)
	}
	for _, i := range look {
		c.loop.Add(i)
	}
}

// differs reports whether an update touched what the graph holds; most do not.
func differs(old, cur metav1.Object) bool {
	return (old.GetDeletionTimestamp() == nil) != (cur.GetDeletionTimestamp() == nil) ||
		!slices.Equal(old.GetFinalizers(), cur.GetFinalizers()) ||
		!sameOwners(old.GetOwnerReferences(), cur.GetOwnerReferences())
}

// sync looks at one object: is it garbage, or does its deletion wait for others?
func (c *Controller) sync(ctx context.Context, i ident) error {
	if i.isDefinition() {
		return c.custom.follow(ctx, i.Name)
	}
	o, known := c.graph.get(i.UID)
	switch {
	case !known:
		return nil
	case o.orphan:
		return c.letGo(ctx, o)
	case o.foreground:
		return c.dependantsFirst(ctx, o)
	case o.deleting || len(o.owners) == 0:
		return nil
	}
	return c.collect(ctx, o)
}

// collect deletes o when its owners are gone, or going and waiting for it.
func (c *Controller) collect(ctx context.Context, o object) error {
	// Decide on what the API has now: a reference may have been added just before.
	live, err := c.read(ctx, o.ident)
	if err != nil || live == nil || live.DeletionTimestamp != nil {
		return err
	}
	var stay, waiting, gone []metav1.OwnerReference
	for _, ref := range live.OwnerReferences {
		state, err := c.ownerState(ctx, o.ident, ref)
		if err != nil {
			return err
		}
		switch state {
		case ownerStays:
			stay = append(stay, ref)
		case ownerWaits:
			waiting = append(waiting, ref)
		case ownerGone:
			gone = append(gone, ref)
		}
	}
	switch {
	case len(stay) > 0 && len(waiting)+len(gone) == 0, len(live.OwnerReferences) == 0:
		return nil
	case len(stay) > 0:
		return c.patch(ctx, live, o.ident, map[string]any{"ownerReferences": stay})
	case len(waiting) > 0 && len(c.graph.dependantsOf(o.UID)) > 0:
		return c.delete(ctx, live, o.ident, metav1.DeletePropagationForeground)
	}
	policy := metav1.DeletePropagationBackground
	switch {
	case slices.Contains(live.Finalizers, metav1.FinalizerOrphanDependents):
		policy = metav1.DeletePropagationOrphan // somebody asked for it before
	case slices.Contains(live.Finalizers, metav1.FinalizerDeleteDependents):
		policy = metav1.DeletePropagationForeground
	}
	return c.delete(ctx, live, o.ident, policy)
}

type ownerState int

const (
	ownerStays ownerState = iota
	ownerWaits            // it is being deleted, and its dependants go first
	ownerGone
)

// ownerState finds out about one owner of an object.
func (c *Controller) ownerState(ctx context.Context, of ident, ref metav1.OwnerReference) (ownerState, error) {
	if owner, known := c.graph.get(ref.UID); known && mayOwn(owner.ident, of) {
		if owner.foreground {
			return ownerWaits, nil
		}
		return ownerStays, nil
	}
	if c.graph.isGone(ref.UID) {
		return ownerGone, nil
	}
	version, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return ownerStays, nil // nobody can say what it names; nothing is deleted for it
	}
	kind, served := c.kinds.get(schema.GroupKind{Group: version.Group, Kind: ref.Kind})
	if !served || (kind.Namespaced && !of.Kind.Namespaced) {
		return ownerStays, nil // likewise
	}
	owner := ident{Kind: kind, Key: loop.Key{Name: ref.Name}, UID: ref.UID}
	if kind.Namespaced {
		owner.Namespace = of.Namespace
	}
	live, err := c.read(ctx, owner)
	switch {
	case err != nil:
		return ownerStays, err
	case live == nil:
		if _, known := c.graph.get(ref.UID); !known { // known elsewhere: gone from here only
			c.graph.markGone(ref.UID)
		}
		return ownerGone, nil
	case live.DeletionTimestamp != nil && slices.Contains(live.Finalizers, metav1.FinalizerDeleteDependents):
		return ownerWaits, nil
	}
	return ownerStays, nil
}

// dependantsFirst has o's dependants deleted, and lets o go when none blocks it.
func (c *Controller) dependantsFirst(ctx context.Context, o object) error {
	blocked := false
	for _, d := range c.graph.dependantsOf(o.UID) {
		for _, ref := range d.owners {
			if ref.UID == o.UID && blocks(ref) {
				blocked = true
			}
		}
		if !d.deleting {
			c.loop.Add(d.ident)
		}
	}
	if blocked {
		return nil // the last one's deletion brings us back
	}
	return c.removeFinalizer(ctx, o.ident, metav1.FinalizerDeleteDependents)
}

// letGo removes the references to o from its dependants, and then lets o go.
func (c *Controller) letGo(ctx context.Context, o object) error {
	for _, d := range c.graph.dependantsOf(o.UID) {
		live, err := c.read(ctx, d.ident)
		if err != nil {
			return err
		}
		if live == nil {
			continue
		}
		left := slices.DeleteFunc(slices.Clone(live.OwnerReferences), func(r metav1.OwnerReference) bool { return r.UID == o.UID })
		if len(left) == len(live.OwnerReferences) {
			continue
		}
		if err := c.patch(ctx, live, d.ident, map[string]any{"ownerReferences": left}); err != nil {
			return err
		}
	}
	return c.removeFinalizer(ctx, o.ident, metav1.FinalizerOrphanDependents)
}

func (c *Controller) removeFinalizer(ctx context.Context, i ident, name string) error {
	live, err := c.read(ctx, i)
	if err != nil || live == nil || !slices.Contains(live.Finalizers, name) {
		return err
	}
	left := slices.DeleteFunc(slices.Clone(live.Finalizers), func(f string) bool { return f == name })
	return c.patch(ctx, live, i, map[string]any{"finalizers": left})
}

// client returns the way to the objects of i's kind and namespace.
func (c *Controller) client(i ident) metadata.ResourceInterface {
	if i.Kind.Namespaced {
		return c.metadata.Resource(i.Kind.GroupVersionResource).Namespace(i.Namespace)
	}
	return c.metadata.Resource(i.Kind.GroupVersionResource)
}

// read returns the object as the API has it now; nil when it is gone, also when
// another one has its name.
func (c *Controller) read(ctx context.Context, i ident) (*metav1.PartialObjectMetadata, error) {
	live, err := c.client(i).Get(ctx, i.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read %s: %w", i, err)
	case live.UID != i.UID:
		return nil, nil
	}
	return live, nil
}

// patch changes metadata fields of exactly the state that live shows.
func (c *Controller) patch(ctx context.Context, live *metav1.PartialObjectMetadata, i ident, fields map[string]any) error {
	fields["uid"], fields["resourceVersion"] = live.UID, live.ResourceVersion
	body, err := json.Marshal(map[string]any{"metadata": fields})
	if err != nil {
		return fmt.Errorf("encode a patch of %s: %w", i, err)
	}
	_, err = c.client(i).Patch(ctx, i.Name, types.MergePatchType, body, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("patch %s: %w", i, err)
	}
	return nil
}

func (c *Controller) delete(ctx context.Context, live *metav1.PartialObjectMetadata, i ident, policy metav1.DeletionPropagation) error {
	err := c.client(i).Delete(ctx, i.Name, metav1.DeleteOptions{
		PropagationPolicy: &policy,
		Preconditions:     &metav1.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion},
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete %s: %w", i, err)
	}
	return nil
}
