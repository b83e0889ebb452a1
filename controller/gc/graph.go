// SPDX-License-Identifier: Apache-2.0

package gc

import (
	"maps"
	"slices"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/controller/loop"
)

// ident names one object for good.
type ident struct {
	Kind loop.Kind
	loop.Key
	UID types.UID
}

// String returns "resource namespace/name".
func (i ident) String() string { return i.Kind.Resource + " " + i.Key.String() }

// object is what the graph knows of one object.
type object struct {
	ident
	owners     []metav1.OwnerReference
	deleting   bool
	foreground bool // deleting, and its dependants have to go first
	orphan     bool // deleting, and its dependants are to be let go
}

// graph is safe for concurrent use.
type graph struct {
	mu         sync.Mutex
	objects    map[types.UID]*object
	dependants map[types.UID]map[types.UID]bool // by the owner's UID; the owner may be unknown

	// gone are owners known not to exist any more; a UID never comes back. The oldest
	// are forgotten.
	gone      map[types.UID]bool
	goneOrder []types.UID
}

const rememberGone = 1000

func newGraph() *graph {
	return &graph{
		objects:    map[types.UID]*object{},
		dependants: map[types.UID]map[types.UID]bool{},
		gone:       map[types.UID]bool{},
	}
}

func newObject(kind loop.Kind, obj metav1.Object) *object {
	o := &object{
		ident:    ident{Kind: kind, Key: loop.KeyOf(obj), UID: obj.GetUID()},
		owners:   obj.GetOwnerReferences(),
		deleting: obj.GetDeletionTimestamp() != nil,
	}
	if o.deleting {
		o.foreground = slices.Contains(obj.GetFinalizers(), metav1.FinalizerDeleteDependents)
		o.orphan = slices.Contains(obj.GetFinalizers(), metav1.FinalizerOrphanDependents)
	}
	return o
}

// put adds or updates an object and returns the objects to look at because of it.
func (g *graph) put(o *object) []ident {
	g.mu.Lock()
	defer g.mu.Unlock()
	had := g.objects[o.UID]
	g.objects[o.UID] = o
	var look []ident
	if had != nil {
		for _, ref := range had.owners {
			if !slices.ContainsFunc(o.owners, func(r metav1.OwnerReference) bool { return r.UID == ref.UID }) {
				g.unlink(ref.UID, o.UID)
			}
			// An owner that waits for its dependants may have one less now.
			if owner := g.objects[ref.UID]; owner != nil && owner.foreground {
				look = append(look, owner.ident)
			}
		}
	}
	for _, ref := range o.owners {
		set := g.dependants[ref.UID]
		if set == nil {
			set = map[types.UID]bool{}
			g.dependants[ref.UID] = set
		}
		set[o.UID] = true
	}
	switch {
	case o.foreground || o.orphan:
		look = append(look, o.ident)
	case o.deleting || len(o.owners) == 0:
	case had == nil || !sameOwners(had.owners, o.owners):
		if !g.safe(o) {
			look = append(look, o.ident)
		}
	}
	return look
}

// safe reports whether all owners of o are known and stay. Call it under the lock.
func (g *graph) safe(o *object) bool {
	for _, ref := range o.owners {
		owner := g.objects[ref.UID]
		if owner == nil || owner.foreground || !mayOwn(owner.ident, o.ident) {
			return false
		}
	}
	return true
}

// drop takes an object out and returns the objects to look at because of it.
func (g *graph) drop(uid types.UID) []ident {
	g.mu.Lock()
	defer g.mu.Unlock()
	o := g.objects[uid]
	if o == nil {
		return nil
	}
	delete(g.objects, uid)
	g.markGoneLocked(uid)
	var look []ident
	for _, ref := range o.owners {
		g.unlink(ref.UID, uid)
		if owner := g.objects[ref.UID]; owner != nil && owner.foreground {
			look = append(look, owner.ident)
		}
	}
	for dependant := range g.dependants[uid] {
		if d := g.objects[dependant]; d != nil {
			look = append(look, d.ident)
		}
	}
	return look
}

// forget takes an object out of which nothing can be said any more. To those that
// name it as their owner it is a stranger then.
func (g *graph) forget(uid types.UID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	o := g.objects[uid]
	if o == nil {
		return
	}
	delete(g.objects, uid)
	for _, ref := range o.owners {
		g.unlink(ref.UID, uid)
	}
}

func (g *graph) unlink(owner, dependant types.UID) {
	set := g.dependants[owner]
	delete(set, dependant)
	if len(set) == 0 {
		delete(g.dependants, owner)
	}
}

// get returns a copy of what is known of an object.
func (g *graph) get(uid types.UID) (object, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	o := g.objects[uid]
	if o == nil {
		return object{}, false
	}
	return *o, true
}

// strangers returns the objects that name an owner of this kind that is not known.
func (g *graph) strangers(kind schema.GroupKind) []ident {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []ident
	for _, o := range g.objects {
		if slices.ContainsFunc(o.owners, func(r metav1.OwnerReference) bool {
			group, _, _ := strings.Cut(r.APIVersion, "/")
			return r.Kind == kind.Kind && group == kind.Group && g.objects[r.UID] == nil
		}) {
			out = append(out, o.ident)
		}
	}
	return out
}

// dependantsOf returns copies of the objects that name owner.
func (g *graph) dependantsOf(owner types.UID) []object {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []object
	for _, uid := range slices.Sorted(maps.Keys(g.dependants[owner])) {
		if o := g.objects[uid]; o != nil {
			out = append(out, *o)
		}
	}
	return out
}

func (g *graph) isGone(uid types.UID) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.gone[uid]
}

func (g *graph) markGone(uid types.UID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.markGoneLocked(uid)
}

func (g *graph) markGoneLocked(uid types.UID) {
	if g.gone[uid] {
		return
	}
	g.gone[uid] = true
	g.goneOrder = append(g.goneOrder, uid)
	if len(g.goneOrder) > rememberGone {
		delete(g.gone, g.goneOrder[0])
		g.goneOrder = slices.Delete(g.goneOrder, 0, 1)
	}
}

// mayOwn reports whether owner's place allows it to own dependant: a namespaced
// object owns only in its own namespace.
func mayOwn(owner, dependant ident) bool {
	return !owner.Kind.Namespaced || owner.Namespace == dependant.Namespace
}

func sameOwners(a, b []metav1.OwnerReference) bool {
	return slices.EqualFunc(a, b, func(x, y metav1.OwnerReference) bool {
		return x.UID == y.UID && blocks(x) == blocks(y)
	})
}

// blocks reports whether the reference keeps its owner from going first.
func blocks(ref metav1.OwnerReference) bool {
	return ref.BlockOwnerDeletion != nil && *ref.BlockOwnerDeletion
}
