// SPDX-License-Identifier: Apache-2.0

package routed

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// Type is the plugin's name in a network configuration.
const Type = "routed"

// Gateway returns every pod's next hop. It is link-local, so it stands in no range
// that a lab could use.
func Gateway() netip.Addr { return netip.AddrFrom4([4]byte{169, 254, 1, 1}) }

// Gateway6 is Gateway for IPv6.
func Gateway6() netip.Addr { return netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 15: 1}) }

// gatewayOf returns the next hop of a pod with the address ip.
func gatewayOf(ip netip.Addr) netip.Addr {
	if ip.Is4() {
		return Gateway()
	}
	return Gateway6()
}

// Conf is the plugin's part of a network configuration list.
type Conf struct {
	types.PluginConf

	// Subnet is the range of the pods' addresses on this node, of either family. It
	// is the primary one: a pod's first address is of it.
	Subnet netip.Prefix `json:"subnet"`
	// SecondarySubnet is a range of the other family for pods with two addresses,
	// SecondaryNodeIP the node's own address of that family.
	SecondarySubnet netip.Prefix `json:"secondarySubnet,omitzero"`
	SecondaryNodeIP netip.Addr   `json:"secondaryNodeIP,omitzero"`
	// RangeStart is the address that the first pod gets; without it, the subnet's
	// first.
	RangeStart netip.Addr `json:"rangeStart,omitzero"`
	// DataDir holds the address reservations (package ipam).
	DataDir string `json:"dataDir"`
	// NodeIP is the source of what the node itself sends to its pods.
	NodeIP netip.Addr `json:"nodeIP"`
	// MTU of both ends in bytes; 0 means 1500.
	MTU int `json:"mtu,omitempty"`
	// KeepLinks makes DEL leave the pair to go with the pod's namespace.
	KeepLinks bool `json:"keepLinks,omitempty"`
}

// parseConf reads and checks what a runtime wrote to the plugin's stdin.
func parseConf(stdin []byte) (*Conf, error) {
	conf := &Conf{}
	if err := json.Unmarshal(stdin, conf); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "network configuration cannot be read", err.Error())
	}
	if conf.CNIVersion == "" {
		conf.CNIVersion = "0.1.0" // what the specification says a missing version means
	}
	if !slices.Contains(supported().SupportedVersions(), conf.CNIVersion) {
		return nil, types.NewError(types.ErrIncompatibleCNIVersion, "incompatible CNI version "+conf.CNIVersion,
			"supported: "+strings.Join(supported().SupportedVersions(), ", "))
	}
	invalid := func(format string, a ...any) error {
		return types.NewError(types.ErrInvalidNetworkConfig, fmt.Sprintf("network %q: ", conf.Name)+fmt.Sprintf(format, a...), "")
	}
	switch {
	case conf.Name == "":
		return nil, types.NewError(types.ErrInvalidNetworkConfig, "the network configuration has no name", "")
	case !conf.Subnet.IsValid():
		return nil, invalid("\"subnet\" must be a range such as 10.244.1.0/24 or fd00:10:244:1::/64")
	case !conf.NodeIP.IsValid() || conf.NodeIP.Is4() != conf.Subnet.Addr().Is4():
		return nil, invalid("\"nodeIP\" must be the node's address of the family of \"subnet\" %s", conf.Subnet)
	case conf.SecondarySubnet.IsValid() && conf.SecondarySubnet.Addr().Is4() == conf.Subnet.Addr().Is4():
		return nil, invalid("\"secondarySubnet\" %s must be of another family than \"subnet\" %s", conf.SecondarySubnet, conf.Subnet)
	case conf.SecondarySubnet.IsValid() != conf.SecondaryNodeIP.IsValid(),
		conf.SecondarySubnet.IsValid() && conf.SecondaryNodeIP.Is4() != conf.SecondarySubnet.Addr().Is4():
		return nil, invalid("\"secondarySubnet\" needs \"secondaryNodeIP\", the node's address of that family, and the other way round")
	case conf.RangeStart.IsValid() && !conf.Subnet.Contains(conf.RangeStart):
		return nil, invalid("\"rangeStart\" %s is not of \"subnet\" %s", conf.RangeStart, conf.Subnet)
	case conf.DataDir == "":
		return nil, invalid("\"dataDir\" must name a directory for the address reservations")
	case conf.MTU < 0 || conf.MTU > 65535 || conf.MTU > 0 && conf.MTU < 576:
		return nil, invalid("\"mtu\" is %d, want 576 to 65535", conf.MTU)
	}
	if conf.MTU == 0 {
		conf.MTU = 1500
	}
	if conf.RawPrevResult != nil {
		if err := version.ParsePrevResult(&conf.PluginConf); err != nil {
			return nil, types.NewError(types.ErrDecodingFailure, "prevResult cannot be read", err.Error())
		}
	}
	return conf, nil
}

// supported lists the versions of the specification that the plugin serves.
func supported() version.PluginInfo {
	return version.PluginSupports("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
}

// LinkName returns the name of the node's end of a pod's link. It follows from
// the container's ID and its interface; 12 characters fit the kernel's 15.
func LinkName(containerID, ifName string) string {
	sum := sha256.Sum256([]byte(containerID + "/" + ifName))
	return "veth" + hex.EncodeToString(sum[:4])
}

// MAC returns the hardware address of the link end whose first address is ip.
func MAC(ip netip.Addr) net.HardwareAddr {
	b := ip.AsSlice()
	if ip.Is6() {
		sum := sha256.Sum256(b)
		b = sum[:4]
	}
	return net.HardwareAddr{0x0a, 0x58, b[0], b[1], b[2], b[3]}
}

// lane is what a pod gets of one family: an address of the range, with a route on
// the node that names the node's own address as its source.
type lane struct {
	subnet netip.Prefix
	start  netip.Addr // of the first pod; the zero address is the range's first
	nodeIP netip.Addr
	// dir holds the reservations of the range.
	dir string
}

// lanes returns the families of the network, the primary one first.
func (c *Conf) lanes() []lane {
	all := []lane{{c.Subnet, c.RangeStart, c.NodeIP, c.DataDir}}
	if c.SecondarySubnet.IsValid() {
		all = append(all, lane{c.SecondarySubnet, netip.Addr{}, c.SecondaryNodeIP, filepath.Join(c.DataDir, secondaryDir)})
	}
	return all
}

// secondaryDir holds the reservations of the second family, below DataDir.
const secondaryDir = "secondary"

// anywhere is the destination of a default route of the family of ip.
func anywhere(ip netip.Addr) netip.Prefix {
	if ip.Is4() {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

// alone is the prefix that holds only ip.
func alone(ip netip.Addr) netip.Prefix { return netip.PrefixFrom(ip, ip.BitLen()) }

// podArgs are the variables of CNI_ARGS that a Kubernetes runtime sets.
type podArgs struct {
	types.CommonArgs
	K8S_POD_NAMESPACE types.UnmarshallableString //nolint:revive // the names are the wire format
	K8S_POD_NAME      types.UnmarshallableString //nolint:revive
}

// alias returns what `ip link` shows for the host end: whose it is. The part up to
// the first space identifies the attachment.
func (r Request) alias() string {
	own := r.ContainerID + "/" + r.IfName
	var pod podArgs
	pod.IgnoreUnknown = true
	if types.LoadArgs(r.Args, &pod) != nil || pod.K8S_POD_NAME == "" {
		return own
	}
	return fmt.Sprintf("%s %s/%s", own, pod.K8S_POD_NAMESPACE, pod.K8S_POD_NAME)
}

// result describes an attachment as the specification wants it: the node's end,
// the pod's end, and the addresses on the latter.
func (c *Conf) result(r Request, ips []netip.Addr) *types100.Result {
	podEnd := 1
	res := &types100.Result{
		CNIVersion: types100.ImplementedSpecVersion,
		Interfaces: []*types100.Interface{
			{Name: LinkName(r.ContainerID, r.IfName), Mac: MAC(Gateway()).String(), Mtu: c.MTU},
			{Name: r.IfName, Mac: MAC(ips[0]).String(), Mtu: c.MTU, Sandbox: r.Netns},
		},
		DNS: c.DNS,
	}
	for _, ip := range ips {
		gw := net.IP(gatewayOf(ip).AsSlice())
		res.IPs = append(res.IPs, &types100.IPConfig{Interface: &podEnd, Address: ipNet(alone(ip)), Gateway: gw})
		res.Routes = append(res.Routes, &types.Route{Dst: ipNet(anywhere(ip)), GW: gw})
	}
	return res
}

func ipNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
