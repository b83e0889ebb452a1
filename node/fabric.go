// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/ctkeep"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/rtnl"
)

// Names of the fabric's namespaces. A node's is [NSName].
const (
	FabricNS  = "fabric"
	OutsideNS = "outside"
	bridge    = "underlay"
	uplink    = "eth0"
)

// NSName returns the name of a node's namespace.
func NSName(node string) string { return "node-" + node }

// Namespaces makes and finds network namespaces by name; *sandbox.Runtime does.
// CreateNetNS returns the one that exists already when there is one.
type Namespaces interface {
	CreateNetNS(name string) (*netns.NS, error)
}

// Peer is a node as far as routing goes.
type Peer struct {
	Name string
	IP   netip.Addr
	// PodCIDR is masked, as the kernel keeps its routes.
	PodCIDR netip.Prefix
	// SecondaryIP and SecondaryPodCIDR are those of the other IP family; the zero
	// values mean that there is one family.
	SecondaryIP      netip.Addr
	SecondaryPodCIDR netip.Prefix
	// Off leaves the node without a link for now.
	Off bool
}

// mac is the hardware address of the node's link.
func (p Peer) mac() net.HardwareAddr { return MAC(p.IP) }

// ips are the node's addresses, one a family.
func (p Peer) ips() []netip.Addr {
	all := []netip.Addr{p.IP}
	if p.SecondaryIP.IsValid() {
		all = append(all, p.SecondaryIP)
	}
	return all
}

// routes are the ways to the node's pods over link, its uplink, one a family.
func (p Peer) routes(link int) []rtnl.Route {
	all := []rtnl.Route{{Dst: p.PodCIDR, Via: p.IP, Link: link, Protocol: RouteProtocol}}
	if p.SecondaryIP.IsValid() && p.SecondaryPodCIDR.IsValid() {
		all = append(all, rtnl.Route{Dst: p.SecondaryPodCIDR, Via: p.SecondaryIP, Link: link, Protocol: RouteProtocol})
	}
	return all
}

// FabricConfig describes the network that joins the nodes.
type FabricConfig struct {
	Runtime Namespaces
	// Subnet is the node network, for example 10.0.0.0/24. Its family is the primary
	// one.
	Subnet netip.Prefix
	// SecondarySubnet is the node network of the other IP family, for example
	// fd00:10::/64; the zero value means that there is one family.
	SecondarySubnet netip.Prefix
	// Nodes are joined at once, each with routes to the pods of the others. Bits
	// behind the length of a PodCIDR do not count.
	Nodes []Peer
	// Outside is the address of the client that is no node and no pod; the zero
	// value leaves it out.
	Outside netip.Addr
	// SecondaryOutside is the client's address in SecondarySubnet.
	SecondaryOutside netip.Addr
	// MTU of the node network in bytes; 0 means 1500.
	MTU int
	// Overlay is how packets between pods of two nodes travel; empty means
	// [OverlayRoutes].
	Overlay Overlay
}

// Fabric is the switch between nodes. It is safe for concurrent use.
type Fabric struct {
	cfg    FabricConfig
	conn   *rtnl.Conn
	bridge int

	mu      sync.Mutex // guards the fields below and cfg.Nodes
	members map[string]*Member
}

// NewFabric makes the namespace "fabric", the bridge in it, and the namespaces and
// links of the nodes and of the client outside, or finds them: what an earlier
// process made and is right stays untouched.
func NewFabric(ctx context.Context, cfg FabricConfig) (*Fabric, error) {
	if !cfg.Subnet.IsValid() {
		return nil, errors.New("the fabric needs a node network")
	}
	if cfg.SecondarySubnet.IsValid() && cfg.SecondarySubnet.Addr().Is4() == cfg.Subnet.Addr().Is4() {
		return nil, fmt.Errorf("node networks %s and %s: want one of each IP family", cfg.Subnet, cfg.SecondarySubnet)
	}
	if cfg.MTU == 0 {
		cfg.MTU = 1500
	}
	if cfg.Overlay == "" {
		cfg.Overlay = OverlayRoutes
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	cfg.Nodes = masked(cfg.Nodes)
	ns, err := cfg.Runtime.CreateNetNS(FabricNS)
	if err != nil {
		return nil, fmt.Errorf("make the fabric's namespace: %w", err)
	}
	f := &Fabric{cfg: cfg, members: map[string]*Member{}}
	err = ns.Do(func() error {
		if err := writeSettings(settings(roleFabric, true, false)); err != nil {
			return err
		}
		f.conn, err = rtnl.Dial()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("set up the fabric's namespace: %w", err)
	}
	var br rtnl.Link
	err = f.conn.Do(new(rtnl.Batch).SetUp(1).
		AddBridge(bridge, 0, cfg.MTU, f.router().mac()).Tolerate(unix.EEXIST).
		GetLink(bridge, &br))
	if err == nil && !br.Up {
		err = f.conn.Do(new(rtnl.Batch).SetUp(br.Index))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the bridge %s: %w", bridge, err), f.conn.Close())
	}
	f.bridge = br.Index
	// Two at once: half of the time goes into settings, each in its own namespace.
	var all errgroup.Group
	all.SetLimit(2)
	for _, p := range cfg.Nodes {
		if p.Off {
			continue
		}
		all.Go(func() error { _, err := f.attachNode(ctx, p); return err })
	}
	if cfg.Outside.IsValid() {
		all.Go(func() error {
			_, err := f.Attach(ctx, OutsideNS, RoleOutside, f.outside().ips(), f.knowIPv6)
			return err
		})
	}
	if err := all.Wait(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// attachNode joins a node, with the way to all others.
func (f *Fabric) attachNode(ctx context.Context, node Peer) (*Member, error) {
	var others []Peer
	for _, p := range f.Nodes() {
		if p.Name != node.Name {
			others = append(others, p)
		}
	}
	m, err := f.Attach(ctx, NSName(node.Name), RoleNode, node.ips(), func(b *rtnl.Batch, link int) {
		toPeer(b, link, f.router())
		if f.cfg.Outside.IsValid() {
			toNode6(b, link, f.outside())
		}
		for _, p := range others {
			if f.cfg.Overlay == OverlayVXLAN {
				toNode(b, link, p)
			} else {
				toPeer(b, link, p)
			}
		}
	})
	if err == nil && f.cfg.Overlay == OverlayVXLAN {
		err = f.joinOverlay(m, node, others)
	}
	if err != nil {
		return nil, err
	}
	// Before a proxy's first rule, and for as long as the node lives.
	if err := ctkeep.Keep(m.NS); err != nil && !errors.Is(err, ctkeep.ErrNoTables) {
		return nil, fmt.Errorf("node %s: %w", node.Name, err)
	}
	return m, nil
}

// outside is the client that is no node and no pod.
func (f *Fabric) outside() Peer {
	return Peer{Name: OutsideNS, IP: f.cfg.Outside, SecondaryIP: f.cfg.SecondaryOutside}
}

// knowIPv6 tells the client outside the hardware addresses of the nodes, for IPv6. It
// finds those of IPv4 by itself, at once; but the kernel answers who looks for an IPv6
// address only when it gets round to it, and who had no answer asks a second later.
func (f *Fabric) knowIPv6(b *rtnl.Batch, link int) {
	for _, p := range f.cfg.Nodes {
		toNode6(b, link, p)
	}
}

// toNode6 adds what reaches a member at its IPv6 address.
func toNode6(b *rtnl.Batch, link int, p Peer) {
	for _, ip := range p.ips() {
		if ip.Is6() {
			b.ReplaceNeigh(link, ip, p.mac())
		}
	}
}

// router is where the nodes' default routes lead: the bridge itself, which
// forwards nothing. A node needs such a route, because the kernel looks up a way
// to a ClusterIP before the rules that translate it are asked; and a packet that
// no rule translates ends there in silence, as on a cluster's own router.
func (f *Fabric) router() Peer {
	r := Peer{Name: "router"}
	cfg := f.config()
	r.IP, r.PodCIDR = cfg.free(cfg.Subnet)
	if cfg.SecondarySubnet.IsValid() {
		r.SecondaryIP, r.SecondaryPodCIDR = cfg.free(cfg.SecondarySubnet)
	}
	return r
}

// Routers are the addresses of the fabric's router: the first of each node network
// that nobody has.
func (c *FabricConfig) Routers() []netip.Addr {
	ip, _ := c.free(c.Subnet)
	all := []netip.Addr{ip}
	if c.SecondarySubnet.IsValid() {
		ip, _ = c.free(c.SecondarySubnet)
		all = append(all, ip)
	}
	return all
}

// free returns the first address of a node network that nobody has, and the
// destination of a default route of its family.
func (c *FabricConfig) free(subnet netip.Prefix) (netip.Addr, netip.Prefix) {
	ip := subnet.Masked().Addr().Next()
	for c.taken(ip) {
		ip = ip.Next()
	}
	if ip.Is4() {
		return ip, netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return ip, netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

func (c *FabricConfig) taken(ip netip.Addr) bool {
	return ip == c.Outside || ip == c.SecondaryOutside ||
		slices.ContainsFunc(c.Nodes, func(p Peer) bool { return p.IP == ip || p.SecondaryIP == ip })
}

// hasIPv6 tells whether the lab has IPv6 addresses.
func (f *Fabric) hasIPv6() bool {
	return f.cfg.Subnet.Addr().Is6() || f.cfg.SecondarySubnet.IsValid()
}

// subnetOf returns the node network that ip is of; the zero value when it is of
// none.
func (f *Fabric) subnetOf(ip netip.Addr) netip.Prefix {
	for _, s := range []netip.Prefix{f.cfg.Subnet, f.cfg.SecondarySubnet} {
		if s.IsValid() && s.Contains(ip) {
			return s
		}
	}
	return netip.Prefix{}
}

// Close closes the handles. The bridge, its ports and all members stay.
func (f *Fabric) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	errs := []error{f.conn.Close()}
	for _, m := range f.members {
		errs = append(errs, m.Conn.Close())
	}
	f.members = map[string]*Member{}
	return errors.Join(errs...)
}

// Nodes returns the nodes that the fabric knows of: those of the configuration, or what
// SetNodes put in their place.
func (f *Fabric) Nodes() []Peer { return f.config().Nodes }

// SetNodes changes which nodes the fabric knows of. It joins and parts none.
func (f *Fabric) SetNodes(nodes []Peer) {
	nodes = masked(nodes)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cfg.Nodes = nodes
}

// config returns the configuration as it is now.
func (f *Fabric) config() FabricConfig {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.cfg
}

// masked returns the peers with their ranges as the kernel keeps them.
func masked(nodes []Peer) []Peer {
	nodes = slices.Clone(nodes)
	for i := range nodes {
		nodes[i].PodCIDR = nodes[i].PodCIDR.Masked()
		nodes[i].SecondaryPodCIDR = nodes[i].SecondaryPodCIDR.Masked()
	}
	return nodes
}

// Detach cuts the link of a node: what the node had is gone with it. A node that is
// not attached is success.
func (f *Fabric) Detach(node string) error {
	name := NSName(node)
	var port rtnl.Link
	err := f.conn.Do(new(rtnl.Batch).GetLink(portName(name), &port).Tolerate(unix.ENODEV))
	if err == nil && port.Index != 0 {
		err = f.conn.Do(new(rtnl.Batch).DelLink(port.Index).Tolerate(unix.ENODEV))
	}
	f.mu.Lock()
	m := f.members[name]
	delete(f.members, name)
	f.mu.Unlock()
	if m != nil {
		err = errors.Join(err, m.Conn.Close())
	}
	if err != nil {
		return fmt.Errorf("cut the link of node %s: %w", node, err)
	}
	return nil
}

// Member returns a namespace that this process has attached; nil when it has not.
func (f *Fabric) Member(name string) *Member {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.members[name]
}

// MTU returns the largest packet of the node network.
func (f *Fabric) MTU() int { return f.cfg.MTU }

// PodMTU returns the largest packet of the pods: what the overlay adds fits too.
func (f *Fabric) PodMTU() int {
	return f.cfg.MTU - f.cfg.Overlay.Overhead(f.cfg.Subnet.Addr())
}

// Subnet returns the node network, of the primary IP family.
func (f *Fabric) Subnet() netip.Prefix { return f.cfg.Subnet }

// Member is a namespace with a link to the fabric.
type Member struct {
	NS *netns.NS
	// Conn is a netlink socket in the namespace; the fabric closes it.
	Conn *rtnl.Conn
	// Link is the index of eth0.
	Link int
	// Addrs are its addresses, one a family, the primary one first.
	Addrs []netip.Prefix
	// overlay is the index of a node's end of the overlay; 0 without one.
	overlay int
}

// Attach joins the namespace called name to the fabric by eth0 with the addresses
// ips, one a family, the primary one first, and makes the namespace when it is missing. What is right already stays
// untouched. extra is added to the batch that sets eth0 up; it may be nil.
func (f *Fabric) Attach(ctx context.Context, name string, role Role, ips []netip.Addr, extra func(b *rtnl.Batch, link int)) (*Member, error) {
	var addrs []netip.Prefix
	for _, ip := range ips {
		subnet := f.subnetOf(ip)
		if !subnet.IsValid() {
			return nil, fmt.Errorf("attach %s: address %s is not in the node network %s", name, ip, f.cfg.Subnet)
		}
		addrs = append(addrs, netip.PrefixFrom(ip, subnet.Bits()))
	}
	if len(addrs) == 0 {
		return nil, fmt.Errorf("attach %s: no address", name)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	ns, err := f.cfg.Runtime.CreateNetNS(name)
	if err != nil {
		return nil, fmt.Errorf("make namespace %s: %w", name, err)
	}
	m := &Member{NS: ns, Addrs: addrs}
	var eth rtnl.Link
	err = ns.Do(func() error {
		var err error
		if m.Conn, err = rtnl.Dial(); err != nil {
			return err
		}
		if err = m.Conn.Do(new(rtnl.Batch).GetLink(uplink, &eth).Tolerate(unix.ENODEV)); err != nil {
			return err
		}
		return writeSettings(settings(role, eth.Index == 0, f.hasIPv6()))
	})
	if err == nil {
		err = f.plug(m, portName(name), eth, extra)
	}
	if err != nil {
		if m.Conn != nil {
			err = errors.Join(err, m.Conn.Close())
		}
		return nil, fmt.Errorf("attach %s to the fabric: %w", name, err)
	}
	f.mu.Lock()
	old := f.members[name]
	f.members[name] = m
	f.mu.Unlock()
	if old != nil {
		err = old.Conn.Close()
	}
	return m, err
}

// plug makes the link unless eth is it already, and sets both ends up.
func (f *Fabric) plug(m *Member, port string, eth rtnl.Link, extra func(*rtnl.Batch, int)) error {
	var p rtnl.Link
	if err := f.conn.Do(new(rtnl.Batch).GetLink(port, &p).Tolerate(unix.ENODEV)); err != nil {
		return err
	}
	whole := p.Index != 0 && eth.Index != 0 && p.Peer == eth.Index && eth.Peer == p.Index
	if !whole {
		// Half a link is the rest of a namespace that went away.
		clear := new(rtnl.Batch)
		if p.Index != 0 {
			clear.DelLink(p.Index).Tolerate(unix.ENODEV)
		}
		if err := f.conn.Do(clear); err != nil {
			return err
		}
		if eth.Index != 0 {
			if err := m.Conn.Do(new(rtnl.Batch).DelLink(eth.Index).Tolerate(unix.ENODEV)); err != nil {
				return err
			}
		}
		err := f.conn.Do(new(rtnl.Batch).AddVeth(rtnl.Veth{
			Name: port, MTU: f.cfg.MTU, MAC: switchMAC(m.Addrs[0].Addr()), Master: f.bridge, Up: true,
			Peer: rtnl.VethPeer{Name: uplink, MTU: f.cfg.MTU, MAC: MAC(m.Addrs[0].Addr()), NSFd: m.NS.Fd()},
		}).GetLink(port, &p))
		if err != nil {
			return err
		}
		m.Link = p.Peer
	} else {
		m.Link = eth.Index
		if !p.Up || p.Master != f.bridge {
			if err := f.conn.Do(new(rtnl.Batch).SetLink(p.Index, "", 0, f.bridge).SetUp(p.Index)); err != nil {
				return err
			}
		}
	}
	b := new(rtnl.Batch).SetUp(1).SetUp(m.Link)
	for _, a := range m.Addrs {
		b.AddAddr(m.Link, a, unix.RT_SCOPE_UNIVERSE)
	}
	if extra != nil {
		extra(b, m.Link)
	}
	if err := m.Conn.Do(b.GetLinkAt(m.Link, &eth)); err != nil {
		return err
	}
	// Asked for after both ends are up: the port forwards from here on, and not
	// when the kernel's next look at carriers is due.
	return f.conn.Do(new(rtnl.Batch).GetLinkAt(p.Index, &p))
}

// toPeer adds what reaches a node: permanent neighbours, so that nothing waits for
// ARP, and the routes to its pods.
func toPeer(b *rtnl.Batch, link int, p Peer) {
	toNode(b, link, p)
	for _, r := range p.routes(link) {
		b.ReplaceRoute(r)
	}
}

// toNode adds only what reaches the node itself.
func toNode(b *rtnl.Batch, link int, p Peer) {
	for _, ip := range p.ips() {
		b.ReplaceNeigh(link, ip, p.mac())
	}
}

// MAC returns the hardware address of the member with the primary address ip: 0a:58
// and the address, or what its hash begins with when it is of IPv6, so that everybody
// knows it without asking.
func MAC(ip netip.Addr) net.HardwareAddr {
	b := ip.AsSlice()
	if ip.Is6() {
		sum := sha256.Sum256(b)
		b = sum[:4]
	}
	return net.HardwareAddr{0x0a, 0x58, b[0], b[1], b[2], b[3]}
}

// switchMAC is the hardware address of the fabric's end.
func switchMAC(ip netip.Addr) net.HardwareAddr {
	m := MAC(ip)
	m[1] = 0x59
	return m
}

// portName names the fabric's end of a member's link: the member's name where the
// kernel takes it, so that `bridge link` can be read, and a hash otherwise.
func portName(member string) string {
	short := strings.TrimPrefix(member, "node-")
	taken := member != OutsideNS && short == OutsideNS
	if len(short) > 0 && len(short) < unix.IFNAMSIZ && !taken && short != bridge && short != "lo" && !strings.ContainsAny(short, "/: \t\n") && short != "." && short != ".." {
		return short
	}
	sum := sha256.Sum256([]byte(member))
	return "port" + hex.EncodeToString(sum[:4])
}
