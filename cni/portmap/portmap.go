// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// Type is the plugin's name in a network configuration.
const Type = "portmap"

// Request is one CNI call; the fields are the specification's parameters.
type Request struct {
	// Command is ADD, DEL, CHECK, GC, STATUS or VERSION.
	Command             string
	ContainerID, IfName string
	// Stdin is the network configuration, with the result of the plugin before.
	Stdin []byte
}

// id names the attachment in the comments of its rules.
func (r Request) id() string { return r.ContainerID + "/" + r.IfName }

// Plugin serves one node. It is safe for concurrent use.
type Plugin struct {
	nodeNS *netns.NS
	mu     sync.Mutex // one change of the tables at a time
}

// New returns a plugin for the node whose namespace is nodeNS, which stays the
// caller's to close.
func New(nodeNS *netns.NS) *Plugin { return &Plugin{nodeNS: nodeNS} }

// mapping leads a port of the node to one of the pod.
type mapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP"`
}

// conf is the plugin's part of a network configuration list.
type conf struct {
	types.PluginConf
	RuntimeConfig struct {
		PortMaps []mapping `json:"portMappings"`
	} `json:"runtimeConfig"`
}

// Serve answers one call with what an executable would write to stdout; the error is
// a *types.Error with a code of the specification.
func (p *Plugin) Serve(ctx context.Context, r Request) ([]byte, error) {
	out, err := p.serve(ctx, r)
	var known *types.Error
	switch {
	case err == nil:
		return out, nil
	case errors.As(err, &known):
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
	c := &conf{}
	if err := json.Unmarshal(r.Stdin, c); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "network configuration cannot be read", err.Error())
	}
	if c.RawPrevResult != nil {
		if err := version.ParsePrevResult(&c.PluginConf); err != nil {
			return nil, types.NewError(types.ErrDecodingFailure, "prevResult cannot be read", err.Error())
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch r.Command {
	case "ADD":
		return p.add(r, c)
	case "DEL":
		return nil, p.remove(func(comment string) bool { return comment == r.id() })
	case "CHECK":
		return nil, p.check(r, c)
	case "GC":
		valid := map[string]bool{}
		for _, a := range c.ValidAttachments {
			valid[Request{ContainerID: a.ContainerID, IfName: a.IfName}.id()] = true
		}
		return nil, p.remove(func(comment string) bool { return !valid[comment] })
	case "STATUS":
		return nil, nil
	}
	return nil, types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("unknown CNI_COMMAND %q", r.Command), "")
}

// supported lists the versions of the specification that the plugin serves.
func supported() version.PluginInfo {
	return version.PluginSupports("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
}

// add writes the rules of an attachment, over those that it has, and passes the result
// of the plugin before on.
func (p *Plugin) add(r Request, c *conf) ([]byte, error) {
	if c.PrevResult == nil {
		return nil, types.NewError(types.ErrInvalidNetworkConfig, "portmap stands behind the plugin that wires the pod, and got no prevResult", "")
	}
	if len(c.RuntimeConfig.PortMaps) > 0 {
		pod, err := podOf(c)
		if err != nil {
			return nil, err
		}
		ports, err := decide(c.RuntimeConfig.PortMaps, pod.ips)
		if err != nil {
			return nil, err
		}
		if err := p.inNode(func() error { return allowLocalhost(pod.hostLink) }); err != nil {
			return nil, err
		}
		if err := p.write(r.id(), ports, pod.ips); err != nil {
			return nil, fmt.Errorf("lead ports of the node to container %s: %w", r.ContainerID, err)
		}
	}
	versioned, err := c.PrevResult.GetAsVersion(c.CNIVersion)
	if err != nil {
		return nil, fmt.Errorf("write the result as version %s: %w", c.CNIVersion, err)
	}
	return json.Marshal(versioned)
}

// check reads the rules of an attachment back.
func (p *Plugin) check(r Request, c *conf) error {
	if len(c.RuntimeConfig.PortMaps) == 0 || c.PrevResult == nil {
		return nil
	}
	pod, err := podOf(c)
	if err != nil {
		return err
	}
	ports, err := decide(c.RuntimeConfig.PortMaps, pod.ips)
	if err != nil {
		return err
	}
	have, err := p.count(r.id())
	if err != nil {
		return err
	}
	if have != len(ports) {
		return fmt.Errorf("container %s has %d rules for its ports on the node, want %d", r.ContainerID, have, len(ports))
	}
	return nil
}

// pod is what the plugin before has made.
type pod struct {
	ips []netip.Addr // one a family
	// hostLink is the node's end of the pod's link; "" when it was not told.
	hostLink string
}

func podOf(c *conf) (pod, error) {
	var p pod
	prev, err := types100.NewResultFromResult(c.PrevResult)
	if err != nil {
		return p, types.NewError(types.ErrDecodingFailure, "prevResult cannot be read", err.Error())
	}
	families := map[bool]bool{}
	for _, c := range prev.IPs {
		ip, ok := netip.AddrFromSlice(c.Address.IP)
		if ip = ip.Unmap(); ok && !families[ip.Is4()] {
			families[ip.Is4()] = true
			p.ips = append(p.ips, ip)
		}
	}
	for _, i := range prev.Interfaces {
		if i.Sandbox == "" {
			p.hostLink = i.Name
		}
	}
	return p, nil
}

// port is a mapping for one family, decided.
type port struct {
	pod      netip.AddrPort
	protocol byte // unix.IPPROTO_*
	host     uint16
	hostIP   netip.Addr // the zero value: every address of the node
}

// decide says which port of which family leads where. A host address limits a mapping
// to its family; one that says "any" means any of its family, and none any at all.
func decide(all []mapping, ips []netip.Addr) ([]port, error) {
	var out []port
	invalid := func(m mapping, what string) error {
		return types.NewError(types.ErrInvalidNetworkConfig, fmt.Sprintf("port mapping %d to %d/%s: %s", m.HostPort, m.ContainerPort, m.Protocol, what), "")
	}
	for _, m := range all {
		if m.HostPort <= 0 || m.HostPort > 65535 || m.ContainerPort <= 0 || m.ContainerPort > 65535 {
			return nil, invalid(m, "ports are 1 to 65535")
		}
		protocol, ok := map[string]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP}[strings.ToLower(m.Protocol)]
		if !ok {
			return nil, invalid(m, "want protocol tcp, udp or sctp")
		}
		var hostIP netip.Addr
		if m.HostIP != "" {
			var err error
			if hostIP, err = netip.ParseAddr(m.HostIP); err != nil {
				return nil, invalid(m, fmt.Sprintf("host address %q: %v", m.HostIP, err))
			}
		}
		for _, ip := range ips {
			if hostIP.IsValid() && hostIP.Is4() != ip.Is4() {
				continue
			}
			p := port{pod: netip.AddrPortFrom(ip, uint16(m.ContainerPort)), protocol: protocol, host: uint16(m.HostPort)}
			if hostIP.IsValid() && !hostIP.IsUnspecified() {
				p.hostIP = hostIP
			}
			out = append(out, p)
		}
	}
	return out, nil
}

// allowLocalhost lets the node reach the pod by 127.0.0.1: the kernel sends nothing
// from there over a link that does not allow it.
func allowLocalhost(link string) error {
	if link == "" || strings.ContainsAny(link, "/.") {
		return nil
	}
	err := os.WriteFile("/proc/sys/net/ipv4/conf/"+link+"/route_localnet", []byte("1"), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("lead the ports of 127.0.0.1 over %s: %w", link, err)
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
