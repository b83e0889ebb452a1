// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/proxy"
)

// record is what a later process has to know to clean up after this one, and cannot
// see in the kernel. Virtual servers on kube-ipvs0 speak for themselves.
type record struct {
	// Sysctls holds the old value of each that was changed, by its path below
	// /proc/sys/net.
	Sysctls map[string]string `json:"sysctls,omitempty"`
	// Servers are those on the node's own addresses.
	Servers []recordedServer `json:"servers,omitempty"`
}

type recordedServer struct {
	Address  netip.AddrPort `json:"address"`
	Protocol uint8          `json:"protocol"`
}

func (r *record) owns(k key) bool {
	return slices.Contains(r.Servers, recordedServer{k.addrPort(), k.proto})
}

// remembered reads the record once.
func (m *Mode) remembered() (*record, error) {
	if m.record != nil {
		return m.record, nil
	}
	r := &record{}
	if m.opts.Journal != "" {
		data, err := os.ReadFile(m.opts.Journal)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return nil, fmt.Errorf("read what was changed on the node: %w", err)
		default:
			if err := json.Unmarshal(data, r); err != nil {
				return nil, fmt.Errorf("read what was changed on the node: %s: %w", m.opts.Journal, err)
			}
		}
	}
	if r.Sysctls == nil {
		r.Sysctls = map[string]string{}
	}
	m.record = r
	return r, nil
}

// keep writes the record, whole or not at all.
func (m *Mode) keep() error {
	if m.opts.Journal == "" {
		return nil
	}
	data, err := json.Marshal(m.record)
	if err == nil {
		err = os.WriteFile(m.opts.Journal+".new", data, 0o600)
	}
	if err == nil {
		err = os.Rename(m.opts.Journal+".new", m.opts.Journal)
	}
	if err != nil {
		return fmt.Errorf("note what is changed on the node: %w", err)
	}
	return nil
}

// keepServers notes the virtual servers on addresses of the node before they are made.
func (m *Mode) keepServers(f corev1.IPFamily, w *want) error {
	r, err := m.remembered()
	if err != nil {
		return err
	}
	var next []recordedServer
	for _, s := range r.Servers {
		if proxy.FamilyOf(s.Address.Addr()) != f {
			next = append(next, s)
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(w.servers), compareKeys) {
		if !w.bound[k.addr] {
			next = append(next, recordedServer{k.addrPort(), k.proto})
		}
	}
	if slices.Equal(next, r.Servers) {
		return nil
	}
	r.Servers = next
	return m.keep()
}

// forget ends the record.
func (m *Mode) forget() error {
	m.record = nil
	if m.opts.Journal == "" {
		return nil
	}
	if err := os.Remove(m.opts.Journal); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget what was changed on the node: %w", err)
	}
	return nil
}

const sysctlRoot = "/proc/sys/net/"

// sysctls are the settings that the mode needs: connection tracking of what IPVS sends,
// without which nothing is masqueraded; an end to connections whose real server is gone
// and to affinity towards one that leaves; forwarding. strictARP keeps the node from
// answering for addresses that are not on the link that is asked.
func (m *Mode) sysctls() map[string]string {
	out := map[string]string{
		"ipv4/vs/conntrack":                 "1",
		"ipv4/vs/expire_nodest_conn":        "1",
		"ipv4/vs/expire_quiescent_template": "1",
		"ipv4/ip_forward":                   "1",
	}
	if m.opts.StrictARP {
		out["ipv4/conf/all/arp_ignore"], out["ipv4/conf/all/arp_announce"] = "1", "2"
	}
	return out
}

// setSysctls brings the settings about, noting old values first, and reads them back.
func (m *Mode) setSysctls() error {
	r, err := m.remembered()
	if err != nil {
		return err
	}
	want := m.sysctls()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		now, err := m.sysctl(name)
		if err != nil {
			return err
		}
		if now == want[name] {
			continue
		}
		if _, known := r.Sysctls[name]; !known {
			r.Sysctls[name] = now
			if err := m.keep(); err != nil {
				return err
			}
		}
		if err := m.setSysctl(name, want[name]); err != nil {
			return err
		}
	}
	return nil
}

// restoreSysctls puts back what setSysctls changed, in this process or an earlier one.
func (m *Mode) restoreSysctls() error {
	r, err := m.remembered()
	if err != nil {
		return err
	}
	var errs []error
	for name, old := range r.Sysctls {
		if err := m.setSysctl(name, old); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (m *Mode) sysctl(name string) (value string, err error) {
	err = inNS(m.opts.NetNS, func() error {
		b, err := os.ReadFile(sysctlRoot + name)
		value = strings.TrimSpace(string(b))
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read sysctl net/%s: %w", name, err)
	}
	return value, nil
}

func (m *Mode) setSysctl(name, value string) error {
	err := inNS(m.opts.NetNS, func() error { return os.WriteFile(sysctlRoot+name, []byte(value), 0) })
	if err != nil {
		return fmt.Errorf("set sysctl net/%s: %w", name, err)
	}
	if now, err := m.sysctl(name); err != nil || now != value {
		return errors.Join(err, fmt.Errorf("sysctl net/%s is %q after it was set to %q", name, now, value))
	}
	return nil
}
