// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/kplab/kplab/internal/netns"
)

const (
	routeLocalnet = "/proc/sys/net/ipv4/conf/all/route_localnet"
	tcpLiberal    = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"
)

// sysctlState remembers what route_localnet was before this mode set it; empty
// when it did not.
type sysctlState struct{ old string }

// inNS runs fn in a namespace; nil means the current one. /proc/sys/net shows
// the namespace of the thread that opens a file in it.
func inNS(ns *netns.NS, fn func() error) error {
	if ns == nil {
		return fn()
	}
	return ns.Do(fn)
}

func readSysctl(ns *netns.NS, path string) (string, error) {
	var out string
	err := inNS(ns, func() error {
		b, err := os.ReadFile(path)
		out = strings.TrimSpace(string(b))
		return err
	})
	return out, err
}

func writeSysctl(ns *netns.NS, path, value string) error {
	return inNS(ns, func() error { return os.WriteFile(path, []byte(value), 0) })
}

// setRouteLocalnet turns route_localnet on, noting the old value first.
func (m *Mode) setRouteLocalnet() error {
	now, err := readSysctl(m.opts.NetNS, routeLocalnet)
	if err != nil {
		return fmt.Errorf("read route_localnet: %w", err)
	}
	if now == "1" {
		return nil
	}
	if m.opts.Journal != "" {
		if err := os.WriteFile(m.opts.Journal, []byte(now+"\n"), 0o600); err != nil {
			return fmt.Errorf("note the old value of route_localnet: %w", err)
		}
	}
	m.sysctl.old = now
	if err := writeSysctl(m.opts.NetNS, routeLocalnet, "1"); err != nil {
		return fmt.Errorf("set route_localnet, which nodePorts on 127.0.0.1 need: %w", err)
	}
	return nil
}

// restoreRouteLocalnet puts back what setRouteLocalnet changed, in this process
// or in the one that wrote the journal.
func (m *Mode) restoreRouteLocalnet() error {
	old := m.sysctl.old
	if m.opts.Journal != "" {
		b, err := os.ReadFile(m.opts.Journal)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("read the old value of route_localnet: %w", err)
		}
		if s := strings.TrimSpace(string(b)); s != "" {
			old = s
		}
	}
	if old != "" {
		if err := writeSysctl(m.opts.NetNS, routeLocalnet, old); err != nil {
			return fmt.Errorf("restore route_localnet: %w", err)
		}
	}
	m.sysctl.old = ""
	if m.opts.Journal != "" {
		if err := os.Remove(m.opts.Journal); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("forget the old value of route_localnet: %w", err)
		}
	}
	return nil
}
