// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
)

// HostState is what of the host a lab could have changed: taken before a lab
// starts and again after it ended, the two must be equal. Each fact is one line
// under one heading.
type HostState map[string][]string

// The headings of a HostState, in the order in which they are printed.
const (
	factNamespaces = "network namespaces"
	factLinks      = "links"
	factRoutes     = "routes"
	factRules      = "packet rules"
	factMounts     = "mounts"
	factProcesses  = "kplab processes"
	factSysctls    = "sysctls"
	factModules    = "kernel modules"
)

var factOrder = []string{factNamespaces, factLinks, factRoutes, factRules, factMounts, factProcesses, factSysctls, factModules}

// volatileSysctls move by themselves or are drawn anew at each read.
var volatileSysctls = []string{
	"/proc/sys/net/netfilter/nf_conntrack_count",
	"/proc/sys/net/ipv4/tcp_fastopen_key",
	"/proc/sys/net/ipv6/conf/*/stable_secret",
}

// ReadHost takes the snapshot, in the network namespace of the caller. The
// process that asks is left out of its own list, and so is the one that started
// it.
func ReadHost() (HostState, error) {
	h := HostState{}
	var errs []error
	for name, read := range map[string]func() ([]string, error){
		factNamespaces: hostNamespaces,
		factLinks:      hostLinks,
		factRoutes:     hostRoutes,
		factRules:      hostPacketRules,
		factMounts:     hostMounts,
		factProcesses:  hostProcesses,
		factSysctls:    hostSysctls,
		factModules:    hostModules,
	} {
		lines, err := read()
		if err != nil {
			errs = append(errs, fmt.Errorf("read the host's %s: %w", name, err))
		}
		slices.Sort(lines)
		h[name] = slices.Compact(lines)
	}
	return h, errors.Join(errs...)
}

// Compare returns, by heading, the lines that are new ("+ …") and those that
// are gone ("- …") in now against before.
func (before HostState) Compare(now HostState) HostState {
	out := HostState{}
	for _, name := range factOrder {
		old, cur := setOf(before[name]), setOf(now[name])
		for _, line := range slices.Sorted(maps.Keys(cur)) {
			if !old[line] {
				out[name] = append(out[name], "+ "+line)
			}
		}
		for _, line := range slices.Sorted(maps.Keys(old)) {
			if !cur[line] {
				out[name] = append(out[name], "- "+line)
			}
		}
	}
	return out
}

func setOf(lines []string) map[string]bool {
	m := make(map[string]bool, len(lines))
	for _, l := range lines {
		m[l] = true
	}
	return m
}

// Proof is the answer of `kplab down --prove`.
type Proof struct {
	// Facts is how many lines were compared, by heading.
	Facts map[string]int `json:"facts"`
	// Changed holds what differs, by heading; empty when the host is as it was.
	Changed HostState `json:"changed"`
}

// String prints the proof as a table with the differences below each heading.
func (p Proof) String() string {
	var b strings.Builder
	for _, name := range factOrder {
		verdict := "as before"
		if n := len(p.Changed[name]); n > 0 {
			verdict = fmt.Sprintf("%d differ", n)
		}
		fmt.Fprintf(&b, "%-20s %6d  %s\n", name, p.Facts[name], verdict)
		for _, line := range p.Changed[name] {
			fmt.Fprintf(&b, "    %s\n", line)
		}
	}
	return b.String()
}

func saveHost(path string) error {
	h, err := ReadHost()
	if err != nil {
		return err
	}
	return writeJSON(path, h)
}

func loadHost(path string) (HostState, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var h HostState
	return h, json.Unmarshal(data, &h)
}

// hostNamespaces finds network namespaces by those who are in them; pinned ones
// without a process are among the mounts.
func hostNamespaces() (out []string, err error) {
	links, err := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, l := range links {
		if target, e := os.Readlink(l); e == nil { // a process may end meanwhile
			out = append(out, target)
		}
	}
	return out, err
}

func hostLinks() (out []string, err error) {
	links, err := netlink.LinkList()
	for _, l := range links {
		a := l.Attrs()
		addrs, e := netlink.AddrList(l, netlink.FAMILY_ALL)
		if e != nil {
			return nil, e
		}
		var ips []string
		for _, ip := range addrs {
			ips = append(ips, ip.IPNet.String())
		}
		slices.Sort(ips)
		out = append(out, fmt.Sprintf("%d %s %s mtu %d flags %s master %d addresses %v", a.Index, a.Name, l.Type(), a.MTU, a.Flags, a.MasterIndex, ips))
	}
	return out, err
}

func hostRoutes() (out []string, err error) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, e := netlink.RouteListFiltered(family, &netlink.Route{Table: 0}, netlink.RT_FILTER_TABLE)
		if e != nil {
			return nil, e
		}
		for _, r := range routes {
			out = append(out, fmt.Sprintf("route %v via %v dev %d src %v table %d proto %d", r.Dst, r.Gw, r.LinkIndex, r.Src, r.Table, r.Protocol))
		}
		rules, e := netlink.RuleList(family)
		if e != nil {
			return nil, e
		}
		for _, r := range rules {
			out = append(out, fmt.Sprintf("rule family %d %s", family, r.String()))
		}
	}
	return out, nil
}

// hostPacketRules lists nftables' tables and chains with their numbers of rules,
// and the tables that the legacy iptables have made.
func hostPacketRules() (out []string, err error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, err
	}
	tables, err := conn.ListTables()
	if err != nil {
		return nil, err
	}
	for _, t := range tables {
		out = append(out, fmt.Sprintf("nft table %d %s", t.Family, t.Name))
	}
	chains, err := conn.ListChains()
	if err != nil {
		return nil, err
	}
	for _, c := range chains {
		rules, err := conn.GetRules(c.Table, c)
		if err != nil {
			return nil, err
		}
		out = append(out, fmt.Sprintf("nft chain %d %s %s with %d rules", c.Table.Family, c.Table.Name, c.Name, len(rules)))
	}
	for _, f := range []string{"/proc/net/ip_tables_names", "/proc/net/ip6_tables_names"} {
		data, err := os.ReadFile(f)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, err
		}
		for _, name := range strings.Fields(string(data)) {
			out = append(out, "legacy "+filepath.Base(f)+" "+name)
		}
	}
	return out, nil
}

func hostMounts() (out []string, err error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for scan := bufio.NewScanner(bytes.NewReader(data)); scan.Scan(); {
		fields := strings.Fields(scan.Text())
		if len(fields) < 5 {
			continue
		}
		_, rest, _ := strings.Cut(scan.Text(), " - ")
		fstype, _, _ := strings.Cut(rest, " ")
		out = append(out, fmt.Sprintf("%s type %s root %s", fields[4], fstype, fields[3]))
	}
	return out, nil
}

// hostProcesses lists the processes that run this very program, but for the one
// it.
func hostProcesses() (out []string, err error) {
	self, err := os.Stat("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	inode := self.Sys().(*syscall.Stat_t).Ino
	exes, err := filepath.Glob("/proc/[0-9]*/exe")
	for _, exe := range exes {
		pid := filepath.Base(filepath.Dir(exe))
		info, e := os.Stat(exe)
		if e != nil || info.Sys().(*syscall.Stat_t).Ino != inode || pid == fmt.Sprint(os.Getpid()) || pid == fmt.Sprint(os.Getppid()) {
			continue
		}
		cmdline, _ := os.ReadFile(filepath.Join("/proc", pid, "cmdline"))
		out = append(out, pid+" "+strings.TrimSpace(strings.ReplaceAll(string(cmdline), "\x00", " ")))
	}
	return out, err
}

func hostSysctls() (out []string, err error) {
	err = filepath.WalkDir("/proc/sys/net", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // the directory of a link that just went
		}
		if d.IsDir() {
			return nil
		}
		for _, v := range volatileSysctls {
			if ok, _ := filepath.Match(v, path); ok {
				return nil
			}
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return nil // write-only, or only readable with a value set
		}
		out = append(out, strings.TrimPrefix(path, "/proc/sys/")+" = "+strings.TrimSpace(string(data)))
		return nil
	})
	return out, err
}

func hostModules() (out []string, err error) {
	data, err := os.ReadFile("/proc/modules")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // a kernel without loadable modules
	}
	for line := range strings.Lines(string(data)) {
		name, _, _ := strings.Cut(line, " ")
		out = append(out, name)
	}
	return out, err
}
