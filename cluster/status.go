// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/nftables"
)

// Status is what `kplab status -o json` prints. Fields are only ever added.
type Status struct {
	Name       string            `json:"name"`
	PID        int               `json:"pid"`
	API        string            `json:"api"`
	Kubeconfig string            `json:"kubeconfig"`
	State      string            `json:"state"`
	Runtime    string            `json:"runtime"`
	Since      time.Time         `json:"since"`
	Revision   uint64            `json:"revision"`
	Nodes      []NodeStatus      `json:"nodes"`
	ProxyModes map[string]string `json:"proxyModes"`
	Pods       int               `json:"pods"`
	Outside    string            `json:"outside"`
	// Faults are what is broken on purpose. FaultsError says why they are not, or not
	// all, in force; it is tried again.
	Faults      []Fault `json:"faults,omitempty"`
	FaultsError string  `json:"faultsError,omitempty"`
	// OutsideAddresses are the client's of each IP family, Outside the primary one.
	OutsideAddresses []string `json:"outsideAddresses"`
}

// NodeStatus is one node's line of Status.
type NodeStatus struct {
	Name string `json:"name"`
	Role Role   `json:"role"`
	// State is running, paused, stopped or killed.
	State   string `json:"state"`
	Address string `json:"address"`
	PodCIDR string `json:"podCIDR"`
	// Addresses and PodCIDRs are those of each IP family, Address and PodCIDR the
	// primary ones.
	Addresses []string    `json:"addresses"`
	PodCIDRs  []string    `json:"podCIDRs"`
	Ready     bool        `json:"ready"`
	Pods      int         `json:"pods"`
	Proxy     ProxyStatus `json:"proxy"`
}

// ProxyStatus says how far the Service proxy of one node is.
type ProxyStatus struct {
	Mode string `json:"mode"`
	// Layout is the layout of mode nftables; empty in others.
	Layout string `json:"layout,omitempty"`
	// Synced is when the kernel was last read back and found right.
	Synced    time.Time `json:"synced"`
	Services  int       `json:"services"`
	Endpoints int       `json:"endpoints"`
	// Error is why the last attempt failed, empty when it did not.
	Error string `json:"error,omitempty"`
	// Held is the ID of the fault that keeps the proxy from its work.
	Held string `json:"held,omitempty"`
}

// ControlPlane is the name of the node that runs the API; empty when there is none.
func (s *Status) ControlPlane() string {
	for _, n := range s.Nodes {
		if n.Role == ControlPlane {
			return n.Name
		}
	}
	return ""
}

// Status returns how the lab is now.
func (l *Lab) Status() Status {
	d, _ := readDaemon(l.paths.Daemon())
	s := Status{
		Name: l.cfg.Name, PID: d.PID, API: l.serverURL(), Kubeconfig: l.paths.Kubeconfig(),
		State: l.paths.State, Runtime: l.paths.Runtime, Since: l.since, Revision: l.api.Revision(),
		ProxyModes: map[string]string{}, Outside: l.cfg.Networking.Outside.String(),
	}
	for _, p := range l.cfg.plans() {
		s.OutsideAddresses = append(s.OutsideAddresses, p.outside.String())
	}
	pods := map[string]int{}
	// The lister reads memory; it has no error to give.
	all, _ := l.informers.Core().V1().Pods().Lister().List(labels.Everything())
	for _, p := range all {
		pods[p.Spec.NodeName]++
	}
	s.Pods = len(all)
	s.Faults = l.Faults()
	if err := l.faults.err(); err != nil {
		s.FaultsError = err.Error()
	}
	for _, n := range l.nodeConfigs() {
		st := NodeStatus{
			Name: n.Name, Role: n.Role, State: l.nodeState(n.Name), Address: n.Address.String(), PodCIDR: n.PodCIDR.String(),
			Addresses: texts(l.cfg.addressesOf(n)), PodCIDRs: texts(l.cfg.podCIDRsOf(n)),
			Ready: l.nodeReady(n.Name), Pods: pods[n.Name], Proxy: l.proxyStatus(n),
		}
		s.ProxyModes[n.Name] = st.Proxy.Mode
		s.Nodes = append(s.Nodes, st)
	}
	return s
}

// texts writes each value as text.
func texts[T fmt.Stringer](all []T) (out []string) {
	for _, v := range all {
		out = append(out, v.String())
	}
	return out
}

// proxyStatus returns how the proxy of a node is.
func (l *Lab) proxyStatus(n NodeConfig) ProxyStatus {
	p := l.proxyOf(n.Name)
	if p == nil {
		return ProxyStatus{Mode: l.cfg.ProxyOf(n).Mode}
	}
	st := p.Status()
	ps := ProxyStatus{Mode: st.Mode, Synced: st.Applied}
	if mode, _ := l.modeOf(n); mode != nil {
		if nft, ok := mode.(*nftables.Mode); ok {
			ps.Layout = string(nft.Layout())
		}
	}
	if st.Err != nil {
		ps.Error = st.Err.Error()
	}
	if f, held := l.holderOf(n.Name); held {
		ps.Held = f.ID
	}
	if snap := p.Current(); snap != nil {
		ps.Services = len(snap.Services)
		for _, n := range snap.Endpoints {
			ps.Endpoints += n
		}
	}
	return ps
}

// Rules renders what the proxy of a node ("" is the control plane) wants in the
// kernel, in a mode ("" is the running one) and a layout of mode nftables ("" is
// the running one, or else the default), cut to one Service ("NS/NAME") when
// service is not empty.
func (l *Lab) Rules(nodeName, mode, layout, service string) (string, error) {
	if nodeName == "" {
		nodeName = l.cfg.APINode().Name
	}
	p := l.proxyOf(nodeName)
	if p == nil {
		return "", fmt.Errorf("no node is called %q", nodeName)
	}
	// The running mode knows what this node's kernel can do.
	renders, running := l.modeOf(NodeConfig{Name: nodeName})
	// Which need not be the one that is set: mode ipvs may have fallen back.
	if renders.Name() != running.Mode {
		running = ProxyConfig{Mode: renders.Name()}
	}
	want := ProxyConfig{Mode: cmp.Or(mode, running.Mode), NFTLayout: layout}
	var fault error
	want.validate("proxy", func(format string, args ...any) { fault = fmt.Errorf(format, args...) })
	if fault != nil {
		return "", fault
	}
	if want.Mode != running.Mode || (layout != "" && layout != running.NFTLayout) {
		l.proxyMu.Lock()
		features := l.features
		l.proxyMu.Unlock()
		renders = proxyModes()[want.Mode](ModeOptions{Features: features, NFTLayout: nftables.Layout(layout)})
	}
	program, err := renders.Render(p.Wanted())
	if err != nil {
		return "", err
	}
	if service == "" {
		return program.String(), nil
	}
	return rulesOf(program, service)
}

// serviceRules is what a program offers that can show one Service alone.
type serviceRules interface {
	Service(namespace, name string) string
}

func rulesOf(program proxy.Program, service string) (string, error) {
	namespace, name, ok := cutService(service)
	if !ok {
		return "", fmt.Errorf("service %q: want [NAMESPACE/]NAME", service)
	}
	one, ok := program.(serviceRules)
	if !ok {
		return "", errors.New("this mode cannot show one Service alone")
	}
	text := one.Service(namespace, name)
	if text == "" {
		return "", fmt.Errorf("no rules for Service %s: see `kubectl get svc -n %s %s`", service, namespace, name)
	}
	return text, nil
}

// cutService takes "NAMESPACE/NAME" apart.
func cutService(qualified string) (namespace, name string, ok bool) {
	namespace, name, ok = strings.Cut(qualified, "/")
	return namespace, name, ok && namespace != "" && name != ""
}
