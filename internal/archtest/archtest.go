// SPDX-License-Identifier: Apache-2.0

// Package archtest keeps the architecture: which room may import which, who
// owns a library, and the few rules that every file follows. It holds tests and
// the two tables they read; the product does not import it.
package archtest

import "strings"

// leaves are the packages below internal/ that import nothing of ours but
// each other.
const leaves = "internal"

// rooms lists, for each room, the other rooms that it may import.
//
// The order is the order of the tree, top first: a command knows the cluster,
// the cluster knows every part, a part knows the seams below it, and nothing
// looks up.
var rooms = map[string][]string{
	"cmd":             {"cluster", "labs", "trace", "sandbox", "proxy", "proxy/mode", "cni", leaves},
	"labs":            {"cluster", "trace", leaves},
	"cluster":         {"apiserver", "apiserver/store", "controller", "node", "proxy", "proxy/mode", "dns", "cni", "sandbox", leaves},
	"trace":           {"proxy", "sandbox", leaves},
	"apiserver":       {"apiserver/store", leaves},
	"apiserver/store": {leaves},
	"controller":      {leaves},
	"node":            {"cni", "sandbox", leaves},
	"dns":             {leaves},
	"cni":             {leaves},
	"sandbox":         {leaves},
	"proxy/mode":      {"proxy", leaves},
	"proxy":           {leaves},
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
	"k8s.io/endpointslice":               {"controller"},
	"k8s.io/cri-streaming":               {"node", "apiserver"},
}

// roomOf names the room of a package path below the module's root, or "" when
// it is in none.
func roomOf(path string) string {
	switch {
	case strings.HasPrefix(path, "apiserver/store"):
		return "apiserver/store"
	case strings.HasPrefix(path, "proxy/proxytest"):
		return "proxy/mode"
	case strings.HasPrefix(path, "proxy/"):
		return "proxy/mode"
	}
	first, _, _ := strings.Cut(path, "/")
	if _, ok := rooms[first]; ok {
		return first
	}
	return ""
}
