// SPDX-License-Identifier: Apache-2.0

package gc

import (
	"fmt"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/controller/loop"
)

var namespaced = loop.Kind{Kind: "Thing", Namespaced: true}

// thing makes an object; owners are UIDs, "!" in front means that the reference
// blocks.
func thing(uid string, owners ...string) *object {
	meta := &metav1.ObjectMeta{Name: uid, Namespace: "ns", UID: types.UID(uid)}
	for _, o := range owners {
		block := o[0] == '!'
		if block {
			o = o[1:]
		}
		meta.OwnerReferences = append(meta.OwnerReferences, metav1.OwnerReference{Kind: "Thing", Name: o, UID: types.UID(o), BlockOwnerDeletion: &block})
	}
	return newObject(namespaced, meta)
}

func foreground(o *object) *object { o.deleting, o.foreground = true, true; return o }

func names(look []ident) string {
	var out []string
	for _, i := range look {
		out = append(out, string(i.UID))
	}
	slices.Sort(out)
	return fmt.Sprint(slices.Compact(out))
}

func TestGraph(t *testing.T) {
	g := newGraph()
	check := func(what string, look []ident, want string) {
		t.Helper()
		if got := names(look); got != want {
			t.Fatalf("%s: looks at %s, want %s", what, got, want)
		}
	}
	check("an object before its owner", g.put(thing("pod", "!rs")), "[pod]")
	check("the owner", g.put(thing("rs", "!dep")), "[rs]")
	check("the owner's owner", g.put(thing("dep")), "[]")
	check("an object after its owner", g.put(thing("pod2", "!rs")), "[]")
	check("the same again", g.put(thing("pod2", "!rs")), "[]")
	check("an owner is dropped", g.drop("dep"), "[rs]")
	if !g.isGone("dep") || g.isGone("rs") {
		t.Fatal("gone is wrong")
	}
	check("an owner waits for its dependants", g.put(foreground(thing("rs"))), "[rs]")
	if d := g.dependantsOf("rs"); len(d) != 2 || d[0].UID != "pod" {
		t.Fatalf("dependants: %v", d)
	}
	check("a dependant goes", g.drop("pod"), "[rs]")
	check("a dependant no longer blocks", g.put(thing("pod2", "rs")), "[pod2 rs]")
	check("a dependant drops its reference", g.put(thing("pod2")), "[rs]")
	if d := g.dependantsOf("rs"); len(d) != 0 {
		t.Fatalf("dependants: %v", d)
	}
	check("gone twice", g.drop("pod"), "[]")
	for i := range rememberGone + 10 {
		g.markGone(types.UID(fmt.Sprint(i)))
	}
	if len(g.gone) != rememberGone || g.isGone("dep") {
		t.Fatalf("%d are remembered", len(g.gone))
	}
}

// An owner in another namespace owns nothing here, whatever its UID.
func TestOwnersOfOtherNamespaces(t *testing.T) {
	g := newGraph()
	far := thing("far")
	far.Namespace = "other"
	g.put(far)
	if got := names(g.put(thing("pod", "far"))); got != "[pod]" {
		t.Fatalf("looks at %s", got)
	}
	cluster := thing("node")
	cluster.Kind.Namespaced, cluster.Namespace = false, ""
	g.put(cluster)
	if got := names(g.put(thing("lease", "node"))); got != "[]" {
		t.Fatalf("looks at %s", got)
	}
}
