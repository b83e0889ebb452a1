// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kplab/kplab/apiserver/store"
)

// StateProblem is one thing that is wrong with a lab's state.
type StateProblem struct {
	// What is wrong, and what to Do about it.
	What string `json:"what"`
	Do   string `json:"do"`
}

// StateReport is what CheckState saw. Sizes are in bytes.
type StateReport struct {
	File string `json:"file"`
	Size int64  `json:"size"`
	// Free is what `kplab state compact` would give back.
	Free     int64  `json:"free"`
	Revision uint64 `json:"revision"`
	// Since is the oldest revision from which a watch can go on.
	Since   uint64 `json:"since"`
	Objects int    `json:"objects"`
	// Kinds counts the objects by "Kind.group".
	Kinds      map[string]int `json:"kinds"`
	ClusterIPs int            `json:"clusterIPs"`
	NodePorts  int            `json:"nodePorts"`
	Problems   []StateProblem `json:"problems"`
}

// CheckState reads the file of a stopped lab from end to end and changes nothing:
// its pages, that every object decodes and lies in its place, that the buckets agree
// with each other, that no address or port is given out twice, and that no
// revision is from the future. A lab that runs is refused: its file changes
// while one reads, and its daemon holds the lock.
func CheckState(ctx context.Context, name string) (_ *StateReport, err error) {
	paths, held, err := holdState(ctx, name)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, held.release()) }()
	decoder, err := newStateDecoder()
	if err != nil {
		return nil, err
	}
	r := &StateReport{File: paths.Database(), Kinds: map[string]int{}, Problems: []StateProblem{}}
	var claims claims
	unreadable := fmt.Sprintf("`kplab state export%s` saves the objects that can be read; then `kplab up%s --fresh` and `kplab state import%[1]s`", nameFlag(name), nameFlag(name))
	found, err := store.Inspect(r.File, func(o store.Object) error {
		u, err := decoder.decode(o)
		if err != nil {
			return err
		}
		r.Kinds[u.GroupVersionKind().GroupKind().String()]++
		claims.add(u)
		return nil
	})
	if err != nil {
		return nil, noState(name, paths, err)
	}
	for _, p := range found.Problems {
		r.Problems = append(r.Problems, StateProblem{p, unreadable})
	}
	for _, p := range claims.problems() {
		r.Problems = append(r.Problems, StateProblem{p, "start the lab, delete one of the two and make it again without the address or port"})
	}
	r.Size, r.Free = found.Size, max(0, found.Size-found.Used)
	r.Revision, r.Since, r.Objects = found.Revision, max(1, found.After), found.Objects
	r.ClusterIPs, r.NodePorts = claims.count(clusterIP), claims.count(nodePort)
	return r, nil
}

// What a Service or a Node can claim for itself alone.
const (
	clusterIP = "cluster IP"
	nodePort  = "node port"
	podCIDR   = "pod CIDR"
)

// claim is an address or port that belongs to one object.
type claim struct{ what, value string }

// claims collects who has what.
type claims struct{ owners map[claim][]string }

// add notes what an object claims. Objects of other kinds claim nothing.
func (c *claims) add(u *unstructured.Unstructured) {
	if u.GetAPIVersion() != "v1" {
		return
	}
	switch u.GetKind() {
	case "Service":
		var s corev1.Service
		// What is no Service has been or will be refused elsewhere.
		if runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &s) == nil {
			c.service(&s)
		}
	case "Node":
		cidr, _, _ := unstructured.NestedString(u.Object, "spec", "podCIDR")
		c.take(podCIDR, cidr, "node "+u.GetName())
	}
}

func (c *claims) service(s *corev1.Service) {
	owner := fmt.Sprintf("service %s/%s", s.Namespace, s.Name)
	for _, ip := range append([]string{s.Spec.ClusterIP}, s.Spec.ClusterIPs...) {
		if ip != corev1.ClusterIPNone {
			c.take(clusterIP, ip, owner)
		}
	}
	for _, p := range s.Spec.Ports {
		c.take(nodePort, number(p.NodePort), owner)
	}
	c.take(nodePort, number(s.Spec.HealthCheckNodePort), owner)
}

func number(port int32) string {
	if port == 0 {
		return ""
	}
	return fmt.Sprint(port)
}

// take notes that owner has value. It may say so twice: clusterIP is also the
// first of clusterIPs, and ports of two protocols share a number.
func (c *claims) take(what, value, owner string) {
	if value == "" {
		return
	}
	if c.owners == nil {
		c.owners = map[claim][]string{}
	}
	k := claim{what, value}
	if !slices.Contains(c.owners[k], owner) {
		c.owners[k] = append(c.owners[k], owner)
	}
}

func (c *claims) count(what string) (n int) {
	for k := range c.owners {
		if k.what == what {
			n++
		}
	}
	return n
}

// problems says of each value that two have who they are.
func (c *claims) problems() (out []string) {
	order := func(a, b claim) int { return strings.Compare(a.what+a.value, b.what+b.value) }
	for _, k := range slices.SortedFunc(maps.Keys(c.owners), order) {
		if owners := c.owners[k]; len(owners) > 1 {
			out = append(out, fmt.Sprintf("%s %s belongs to %s", k.what, k.value, strings.Join(owners, " and to ")))
		}
	}
	return out
}
