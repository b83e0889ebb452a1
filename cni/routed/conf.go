// SPDX-License-Identifier: Apache-2.0

package routed

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
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

// Conf is the plugin's part of a network configuration list.
type Conf struct {
	types.PluginConf

	// Subnet is the range of the pods' addresses on this node.
	Subnet netip.Prefix `json:"subnet"`
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
	case !conf.Subnet.IsValid() || !conf.Subnet.Addr().Is4():
		return nil, invalid("\"subnet\" must be an IPv4 range such as 10.244.1.0/24")
	case !conf.NodeIP.Is4():
		return nil, invalid("\"nodeIP\" must be the node's IPv4 address")
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

// MAC returns the hardware address of the link end that carries ip.
func MAC(ip netip.Addr) net.HardwareAddr {
	b := ip.As4()
	return net.HardwareAddr{0x0a, 0x58, b[0], b[1], b[2], b[3]}
}

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
// the pod's end, and the address on the latter.
func (c *Conf) result(r Request, ip netip.Addr) *types100.Result {
	podEnd := 1
	gw := net.IP(Gateway().AsSlice())
	return &types100.Result{
		CNIVersion: types100.ImplementedSpecVersion,
		Interfaces: []*types100.Interface{
			{Name: LinkName(r.ContainerID, r.IfName), Mac: MAC(Gateway()).String(), Mtu: c.MTU},
			{Name: r.IfName, Mac: MAC(ip).String(), Mtu: c.MTU, Sandbox: r.Netns},
		},
		IPs: []*types100.IPConfig{{
			Interface: &podEnd,
			Address:   net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(32, 32)},
			Gateway:   gw,
		}},
		Routes: []*types.Route{{Dst: net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, GW: gw}},
		DNS:    c.DNS,
	}
}
