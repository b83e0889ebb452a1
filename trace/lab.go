// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/sandbox"
)

// Options says which lab to look at.
type Options struct {
	// Runtime is the lab's runtime directory, where its namespaces are pinned.
	Runtime string
	// REST reaches the lab's API; when it is nil, Kubeconfig is read.
	REST       *rest.Config
	Kubeconfig string
	Nodes      []Node
	// XtablesLock names the lock of the legacy iptables tools in a namespace.
	XtablesLock func(ns string) string
}

// Node is a node of the lab.
type Node struct {
	Name    string
	Address netip.Addr
	PodCIDR netip.Prefix
	// Mode and Layout are what the node's proxy writes.
	Mode, Layout string
	// ProxyError says why its proxy cannot do its work, empty when it can; Synced is when
	// it last did.
	ProxyError string
	Synced     time.Time
}

// ModeName is the mode, and the layout where it is not the default.
func (n Node) ModeName() string {
	if n.Layout == "" || n.Layout == "upstream" {
		return n.Mode
	}
	return n.Mode + "/" + n.Layout
}

// Lab is an open lab. Its methods are not safe for concurrent use.
type Lab struct {
	opts   Options
	client kubernetes.Interface
	open   map[string]*netns.NS
	specs  []sandbox.Spec
	// queryTime replaces the time that a name server has to answer.
	queryTime time.Duration
}

// Open prepares to look at a lab. Close it afterwards.
func Open(o Options) (*Lab, error) {
	cfg := o.REST
	if cfg == nil {
		var err error
		if cfg, err = clientcmd.BuildConfigFromFlags("", o.Kubeconfig); err != nil {
			return nil, fmt.Errorf("read the lab's kubeconfig: %w", err)
		}
	}
	cfg = rest.CopyConfig(cfg)
	cfg.QPS = -1
	cfg.ContentType, cfg.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client of the lab's API: %w", err)
	}
	specs, err := sandbox.Specs(o.Runtime)
	if errors.Is(err, os.ErrPermission) {
		return nil, fmt.Errorf("look into the lab's namespaces: call kplab with sudo: %w", err)
	} else if err != nil {
		return nil, err
	}
	return &Lab{opts: o, client: client, open: map[string]*netns.NS{}, specs: specs}, nil
}

// Close lets go of the lab's namespaces.
func (l *Lab) Close() {
	for _, ns := range l.open {
		_ = ns.Close() // a handle opened for reading
	}
	clear(l.open)
}

// Place is a namespace of the lab.
type Place struct {
	// Kind is node, pod, outside or fabric.
	Kind string
	// Name is as in `kplab exec`: a node's name, "outside", "pod/NS/NAME"; or "fabric".
	Name string
	// Node is where a pod runs, or the node itself.
	Node string
	// Pin is the name under which the namespace is pinned.
	Pin string
	// ResolvConf is a pod's /etc/resolv.conf.
	ResolvConf string

	ns *netns.NS
}

// Short is the name for drawings: a pod's without its namespace.
func (p *Place) Short() string { return shortName(p.Name) }

func shortName(place string) string {
	if rest, isPod := strings.CutPrefix(place, "pod/"); isPod {
		if ns, name, ok := strings.Cut(rest, "/"); ok && ns == "default" {
			return name
		}
		return rest
	}
	return place
}

func (l *Lab) netns(pin string) (*netns.NS, error) {
	if ns := l.open[pin]; ns != nil {
		return ns, nil
	}
	ns, err := netns.Open(sandbox.NetNSPath(l.opts.Runtime, pin))
	if err != nil {
		return nil, err
	}
	l.open[pin] = ns
	return ns, nil
}

// Place finds a namespace by the name that `kplab exec` takes; namespace is for
// pods without one.
func (l *Lab) Place(where, namespace string) (*Place, error) {
	p := &Place{Name: where}
	pod, isPod := strings.CutPrefix(where, "pod/")
	switch {
	case isPod:
		spec, err := l.podSpec(pod, namespace)
		if err != nil {
			return nil, err
		}
		p.Kind, p.Node, p.ResolvConf = "pod", spec.Node, spec.ResolvConf
		p.Name = "pod/" + spec.Namespace + "/" + spec.Name
		p.Pin = podPin(spec)
		if spec.Network != "" {
			p.Kind = "node" // hostNetwork: the node's own network
		}
	case where == node.OutsideNS || where == node.FabricNS:
		p.Kind, p.Pin = where, where
	case l.node(where) != nil:
		p.Kind, p.Node, p.Pin = "node", where, node.NSName(where)
	default:
		return nil, fmt.Errorf("no node is called %q; want one of %s, outside, or pod/[NAMESPACE/]NAME", where, strings.Join(l.nodeNames(), ", "))
	}
	var err error
	p.ns, err = l.netns(p.Pin)
	return p, err
}

func podPin(s *sandbox.Spec) string {
	if s.Network != "" {
		return s.Network
	}
	return "pod-" + s.ID
}

func (l *Lab) podSpec(name, namespace string) (*sandbox.Spec, error) {
	if ns, n, ok := strings.Cut(name, "/"); ok {
		namespace, name = ns, n
	}
	for i := range l.specs {
		if s := &l.specs[i]; s.Namespace == namespace && s.Name == name {
			return s, nil
		}
	}
	return nil, fmt.Errorf("pod %s/%s has no network here; see `kubectl get pods -n %s`", namespace, name, namespace)
}

// Node returns a node by its name; nil when there is none.
func (l *Lab) node(name string) *Node {
	for i := range l.opts.Nodes {
		if l.opts.Nodes[i].Name == name {
			return &l.opts.Nodes[i]
		}
	}
	return nil
}

func (l *Lab) nodeNames() (names []string) {
	for _, n := range l.opts.Nodes {
		names = append(names, n.Name)
	}
	return names
}

// mostPods limits the pods whose namespaces are listened in: each costs a socket.
const mostPods = 64

// watched lists the places to look at: the client's, every node, the wire between
// them, and the pods that may answer.
func (l *Lab) watched(from *Place, x *Index, to Target) ([]*Place, error) {
	out := []*Place{from}
	add := func(where string) error {
		if where == from.Name || slices.ContainsFunc(out, func(p *Place) bool { return p.Name == where }) {
			return nil
		}
		p, err := l.Place(where, "")
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(out, func(o *Place) bool { return o.Pin == p.Pin }) {
			out = append(out, p)
		}
		return nil
	}
	for _, n := range l.opts.Nodes {
		if err := add(n.Name); err != nil {
			return nil, err
		}
	}
	if err := add(node.FabricNS); err != nil {
		return nil, err
	}
	if _, err := os.Stat(sandbox.NetNSPath(l.opts.Runtime, node.OutsideNS)); err == nil {
		if err := add(node.OutsideNS); err != nil {
			return nil, err
		}
	}
	pods := 0
	for _, a := range x.candidates(to) {
		pod := x.Pod(a)
		if pod == nil || pods == mostPods {
			continue
		}
		// A pod that is on its way out has no namespace; then the trace ends before it.
		if add("pod/"+pod.Namespace+"/"+pod.Name) == nil {
			pods++
		}
	}
	return out, nil
}

// Index reads what the API has of Services, endpoints, pods and nodes.
func (l *Lab) Index(ctx context.Context) (*Index, error) { return loadIndex(ctx, l.client) }
