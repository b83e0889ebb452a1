// SPDX-License-Identifier: Apache-2.0

package routed

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/cni/ipam"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/rtnl"
)

// Request is one CNI call; the fields are the specification's parameters.
type Request struct {
	// Command is ADD, DEL, CHECK, GC, STATUS or VERSION.
	Command     string
	ContainerID string
	// Netns is the path of the pod's namespace. DEL accepts an empty one, and one
	// that is gone.
	Netns  string
	IfName string
	// Args is CNI_ARGS: KEY=value pairs joined by semicolons.
	Args string
	// Stdin is the network configuration.
	Stdin []byte
}

// Plugin serves one node. It keeps the node's netlink socket and the address
// ranges open between calls, and is safe for concurrent use.
type Plugin struct {
	nodeNS *netns.NS

	mu    sync.Mutex
	node  *rtnl.Conn
	pools map[rangeKey]*ipam.Pool
}

// rangeKey tells one open range from another.
type rangeKey struct {
	dir    string
	subnet netip.Prefix
}

// New returns a plugin for the node whose namespace is nodeNS, which stays the
// caller's to close. nil means the namespace of the process, as in an executable
// that a runtime starts there.
func New(nodeNS *netns.NS) *Plugin {
	return &Plugin{nodeNS: nodeNS, pools: map[rangeKey]*ipam.Pool{}}
}

// Close closes what the plugin keeps open. Attachments stay.
func (p *Plugin) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, pool := range p.pools {
		errs = append(errs, pool.Close())
	}
	p.pools = map[rangeKey]*ipam.Pool{}
	if p.node != nil {
		errs = append(errs, p.node.Close())
		p.node = nil
	}
	return errors.Join(errs...)
}

// Serve answers one call with what the executable writes to stdout; the error is
// a *types.Error with a code of the specification.
func (p *Plugin) Serve(ctx context.Context, r Request) ([]byte, error) {
	out, err := p.serve(ctx, r)
	if err == nil {
		return out, nil
	}
	var known *types.Error
	if errors.As(err, &known) {
		return nil, known
	}
	return nil, types.NewError(types.ErrInternal, err.Error(), "")
}

func (p *Plugin) serve(ctx context.Context, r Request) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if r.Command == "VERSION" {
		var out bytes.Buffer
		err := supported().Encode(&out)
		return out.Bytes(), err
	}
	conf, err := parseConf(r.Stdin)
	if err != nil {
		return nil, err
	}
	switch r.Command {
	case "ADD":
		res, err := p.Add(r, conf)
		if err != nil {
			return nil, err
		}
		versioned, err := res.GetAsVersion(conf.CNIVersion)
		if err != nil {
			return nil, fmt.Errorf("write the result as version %s: %w", conf.CNIVersion, err)
		}
		return json.Marshal(versioned)
	case "DEL":
		return nil, p.Del(r, conf)
	case "CHECK":
		return nil, p.Check(r, conf)
	case "GC":
		return nil, p.GC(conf)
	case "STATUS":
		return nil, p.Status(conf)
	}
	return nil, types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("unknown CNI_COMMAND %q", r.Command), "")
}

// open returns the node's socket and the pool of each family's range.
func (p *Plugin) open(conf *Conf) (*rtnl.Conn, pools, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.node == nil {
		dial := rtnl.Dial
		if p.nodeNS != nil {
			dial = func() (*rtnl.Conn, error) { return rtnl.DialIn(p.nodeNS) }
		}
		node, err := dial()
		if err != nil {
			return nil, nil, err
		}
		p.node = node
	}
	node := p.node
	gone := func(name string) bool {
		var l rtnl.Link
		return errors.Is(node.Do(new(rtnl.Batch).GetLink(name, &l)), unix.ENODEV)
	}
	var all pools
	for _, l := range conf.lanes() {
		key := rangeKey{l.dir, l.subnet}
		pool, ok := p.pools[key]
		if !ok {
			var err error
			if pool, err = ipam.Open(ipam.Config{Dir: l.dir, Subnet: l.subnet, Start: l.start, LinkGone: gone}); err != nil {
				return nil, nil, types.NewError(types.ErrIOFailure, "open the address range", err.Error())
			}
			p.pools[key] = pool
		}
		all = append(all, pool)
	}
	return node, all, nil
}

// pools are the ranges of an attachment, one a family, in the order of the lanes.
type pools []*ipam.Pool

// allocate takes an address of each range. When a range has none, those of the
// others go back. fresh tells whether the owner held none before.
func (ps pools) allocate(owner ipam.Owner) (ips []netip.Addr, fresh bool, err error) {
	var taken pools
	for _, pool := range ps {
		ip, isNew, err := pool.Allocate(owner)
		if err != nil {
			return nil, false, errors.Join(err, taken.release(owner, ""))
		}
		if isNew {
			taken = append(taken, pool)
		}
		ips, fresh = append(ips, ip), fresh || isNew
	}
	return ips, fresh, nil
}

// lookup returns the addresses that owner holds.
func (ps pools) lookup(owner ipam.Owner) (ips []netip.Addr, err error) {
	for _, pool := range ps {
		ip, ok, err := pool.Lookup(owner)
		if err != nil {
			return nil, err
		}
		if ok {
			ips = append(ips, ip)
		}
	}
	return ips, nil
}

// release gives owner's addresses back, each when the link has gone.
func (ps pools) release(owner ipam.Owner, link string) error {
	var errs []error
	for _, pool := range ps {
		errs = append(errs, pool.Release(owner, link))
	}
	return errors.Join(errs...)
}

// Add joins a pod to the node. A second ADD gives the same result and puts back
// whatever of the wiring is missing. When it fails nothing stays behind.
func (p *Plugin) Add(r Request, conf *Conf) (*types100.Result, error) {
	node, pools, err := p.open(conf)
	if err != nil {
		return nil, err
	}
	pod, err := netns.Open(r.Netns)
	if err != nil {
		return nil, types.NewError(types.ErrInvalidNetNS, fmt.Sprintf("open the namespace of container %s", r.ContainerID), err.Error())
	}
	defer func() { _ = pod.Close() }()

	owner := ipam.Owner{ID: r.ContainerID, IfName: r.IfName}
	ips, fresh, err := pools.allocate(owner)
	if errors.Is(err, ipam.ErrExhausted) {
		return nil, types.NewError(types.ErrTryAgainLater, err.Error(), "")
	}
	if err != nil {
		return nil, err
	}
	w := wiring{
		node: node, pod: pod, mtu: conf.MTU, ips: ips,
		host: LinkName(r.ContainerID, r.IfName), ifName: r.IfName, alias: r.alias(),
	}
	for _, l := range conf.lanes() {
		w.nodeIPs = append(w.nodeIPs, l.nodeIP)
	}
	if err := w.add(); err != nil {
		if fresh {
			err = errors.Join(err, w.remove(false), pools.release(owner, w.host))
		}
		return nil, fmt.Errorf("wire container %s: %w", r.ContainerID, err)
	}
	return conf.result(r, ips), nil
}

// Del takes a pod's wiring away; what is not there is success, a namespace that
// is gone too.
func (p *Plugin) Del(r Request, conf *Conf) error {
	node, pools, err := p.open(conf)
	if err != nil {
		return err
	}
	return detach(node, pools, ipam.Owner{ID: r.ContainerID, IfName: r.IfName}, conf.KeepLinks)
}

// detach removes the wiring of an owner and gives its addresses back.
func detach(node *rtnl.Conn, pools pools, owner ipam.Owner, keepLink bool) error {
	ips, err := pools.lookup(owner)
	if err != nil {
		return err
	}
	w := wiring{node: node, ips: ips, host: LinkName(owner.ID, owner.IfName), alias: owner.ID + "/" + owner.IfName}
	if err := w.remove(keepLink); err != nil {
		return fmt.Errorf("unwire container %s: %w", owner.ID, err)
	}
	return pools.release(owner, w.host)
}

// GC takes away every attachment that the runtime does not name as valid.
func (p *Plugin) GC(conf *Conf) error {
	node, pools, err := p.open(conf)
	if err != nil {
		return err
	}
	valid := map[ipam.Owner]bool{}
	for _, a := range conf.ValidAttachments {
		valid[ipam.Owner{ID: a.ContainerID, IfName: a.IfName}] = true
	}
	var errs []error
	for _, pool := range pools {
		all, err := pool.List()
		if err != nil {
			return err
		}
		for _, r := range all {
			if r.GoneWith == "" && !valid[r.Owner] {
				errs = append(errs, detach(node, pools, r.Owner, conf.KeepLinks))
			}
		}
	}
	return errors.Join(errs...)
}

// Status reports whether ADD could be served: the address directory can be
// written and the node's IP is on the node.
func (p *Plugin) Status(conf *Conf) error {
	if err := os.MkdirAll(conf.DataDir, 0o755); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "the address directory cannot be made", err.Error())
	}
	if _, _, err := p.open(conf); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "the node cannot be wired", err.Error())
	}
	for _, l := range conf.lanes() {
		if err := p.inNode(func() error { return hasLocalAddr(l.nodeIP) }); err != nil {
			return types.NewError(types.ErrPluginNotAvailable, fmt.Sprintf("node IP %s is not usable", l.nodeIP), err.Error())
		}
	}
	return nil
}

// inNode runs fn in the node's namespace.
func (p *Plugin) inNode(fn func() error) error {
	if p.nodeNS == nil {
		return fn()
	}
	return p.nodeNS.Do(fn)
}
