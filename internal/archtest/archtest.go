// SPDX-License-Identifier: Apache-2.0

// Package archtest keeps the architecture: which room may import which, who
// owns a library, and the few rules that every file follows. It holds tests and
// the two tables they read; the product does not import it.
package archtest

import (
	"slices"
	"strings"
)

// leaves are the packages below internal/ that import nothing of ours but
// each other.
const leaves = "internal"

// aMode stands in the table for every proxy mode. Each is a room of its own, so
// that none imports another.
const aMode = "proxy/MODE"

// rooms lists, for each room, the other rooms that it may import.
//
// The order is the order of the tree, top first: a command knows the cluster,
// the cluster knows every part, a part knows the seams below it, and nothing
// looks up.
var rooms = map[string][]string{
	"cmd":             {"cluster", "dns", "labs", "trace", "sandbox", "proxy", aMode, "cni", leaves},
	"labs":            {"cluster", "trace", leaves},
	"cluster":         {"apiserver", "apiserver/store", "controller", "node", "proxy", aMode, "dns", "cni", "sandbox", leaves},
	"trace":           {"node", "proxy", "sandbox", leaves},
	"apiserver":       {"apiserver/store", leaves},
	"apiserver/store": {leaves},
	"controller":      {leaves},
	"node":            {"cni", "sandbox", leaves},
	"dns":             {leaves},
	"cni":             {leaves},
	"sandbox":         {leaves},
	"proxy":           {leaves},
	aMode:             {"proxy", leaves},
	"proxy/proxytest": {"proxy", aMode, leaves},
	leaves:            {},
}

// owners says which packages may import a library that has one owner.
var owners = map[string][]string{
	"go.etcd.io/bbolt":                   {"apiserver/store"},
	"github.com/vishvananda/netns":       {"internal/netns"},
	"github.com/containernetworking/cni": {"cni", "cmd"},
	"github.com/spf13/cobra":             {"cmd"},
	"k8s.io/kubectl":                     {"cmd"},
	"k8s.io/apiserver":                   {"apiserver"},
	"k8s.io/apiextensions-apiserver":     {"apiserver"},
	"k8s.io/endpointslice":               {"controller"},
	"k8s.io/cri-streaming":               {"node", "apiserver"},
}

// roomOf names the room of a package path below the module's root, or "" when
// it is in none.
func roomOf(path string) string {
	if strings.HasPrefix(path, "apiserver/store") {
		return "apiserver/store"
	}
	first, rest, _ := strings.Cut(path, "/")
	if first == "proxy" && rest != "" {
		mode, _, _ := strings.Cut(rest, "/")
		return first + "/" + mode
	}
	if _, ok := rooms[first]; ok {
		return first
	}
	return ""
}

// row is the name by which the table lists a room.
func row(room string) string {
	if _, ok := rooms[room]; !ok && strings.HasPrefix(room, "proxy/") {
		return aMode
	}
	return room
}

// mayImport says whether a package of a room may import one of another.
func mayImport(room, other string) bool {
	return room == other || slices.Contains(rooms[row(room)], row(other))
}
