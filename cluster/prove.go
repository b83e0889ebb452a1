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

	"github.com/kplab/kplab/sandbox"
	"github.com/kplab/kplab/sandbox/reexec"
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
	factCgroups    = "cgroups"
	factProcesses  = "processes"
	factSysctls    = "sysctls"
	factModules    = "kernel modules"
)

var factOrder = []string{factNamespaces, factLinks, factRoutes, factRules, factMounts, factCgroups, factProcesses, factSysctls, factModules}

// volatileSysctls move by themselves or are drawn anew at each read.
var volatileSysctls = []string{
	"/proc/sys/net/netfilter/nf_conntrack_count",
	"/proc/sys/net/ipv4/tcp_fastopen_key",
	"/proc/sys/net/ipv6/conf/*/stable_secret",
}

// Owned is what a lab's records named as its own while they were there.
type Owned struct {
	// Processes are its daemon and those of its containers.
	Processes []reexec.ID
	// Namespaces are its network namespaces, as /proc shows them.
	Namespaces map[string]bool
}

// ownedBy reads the records of the lab at paths.
func ownedBy(paths Paths) Owned {
	recorded, _ := sandbox.Recorded(paths.Runtime) // what cannot be read, Remove complains of
	o := Owned{Processes: recorded, Namespaces: pinnedIn(paths.Runtime)}
	if d, running := readDaemon(paths.Daemon()); running {
		o.Processes = append(o.Processes, reexec.ID{Pid: d.PID, Start: d.StartTime})
	}
	return o
}

// pinnedIn returns the network namespaces that the lab below dir keeps.
func pinnedIn(dir string) map[string]bool {
	out := map[string]bool{}
	names, _ := sandbox.PinnedNames(dir) // no directory, no namespaces
	for _, name := range names {
		if info, err := os.Stat(sandbox.NetNSPath(dir, name)); err == nil {
			out[fmt.Sprintf("net:[%d]", info.Sys().(*syscall.Stat_t).Ino)] = true
		}
	}
	return out
}

// ReadHost takes the snapshot for the lab at paths, which owned mine, in the
// network namespace of the caller. What other labs have on the host is left out, by their records: they
// come and go while this one is watched.
func ReadHost(paths Paths, mine Owned) (HostState, error) {
	others := otherLabs(paths)
	others.mine = mine
	h := HostState{}
	var errs []error
	for name, read := range map[string]func() ([]string, error){
		factNamespaces: others.hostNamespaces,
		factLinks:      hostLinks,
		factRoutes:     hostRoutes,
		factRules:      hostPacketRules,
		factMounts:     others.hostMounts,
		factCgroups:    func() ([]string, error) { return sandbox.Cgroups(paths.Runtime) },
		factProcesses:  others.hostProcesses,
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
		if name == factModules {
			continue // the kernel's, see Proof
		}
		old, cur := setOf(before[name]), setOf(now[name])
		if name == factSysctls {
			// A module that the kernel loaded brings new ones along.
			keepCommon(old, cur)
		}
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

// keepCommon removes the sysctls that only one of two lists has.
func keepCommon(a, b map[string]bool) {
	names := func(lines map[string]bool) map[string]bool {
		out := map[string]bool{}
		for line := range lines {
			name, _, _ := strings.Cut(line, " = ")
			out[name] = true
		}
		return out
	}
	inA, inB := names(a), names(b)
	drop := func(line string, _ bool) bool {
		name, _, _ := strings.Cut(line, " = ")
		return !inA[name] || !inB[name]
	}
	maps.DeleteFunc(a, drop)
	maps.DeleteFunc(b, drop)
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
	// Loaded are the kernel modules that the kernel loaded while the lab was
	// there. They stay, as modules do, and are no difference.
	Loaded []string `json:"loaded,omitempty"`
}

// maxChanges is how many differences String prints below one heading.
const maxChanges = 20

// String prints the proof as a table with the differences below each heading.
func (p Proof) String() string {
	var b strings.Builder
	for _, name := range factOrder {
		verdict := "as before"
		if n := len(p.Changed[name]); n > 0 {
			verdict = fmt.Sprintf("%d differ", n)
		}
		if name == factModules && len(p.Loaded) > 0 {
			verdict = fmt.Sprintf("%d loaded by the kernel meanwhile, which stay: %s", len(p.Loaded), strings.Join(p.Loaded, " "))
		}
		fmt.Fprintf(&b, "%-20s %6d  %s\n", name, p.Facts[name], verdict)
		changed := p.Changed[name]
		for _, line := range changed[:min(len(changed), maxChanges)] {
			fmt.Fprintf(&b, "    %s\n", line)
		}
		if more := len(changed) - maxChanges; more > 0 {
			fmt.Fprintf(&b, "    … and %d more (-o json has them all)\n", more)
		}
	}
	return b.String()
}

func saveHost(paths Paths) error {
	h, err := ReadHost(paths, Owned{})
	if err != nil {
		return err
	}
	return writeJSON(paths.HostBefore(), h, 0o600)
}

func loadHost(path string) (HostState, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var h HostState
	return h, json.Unmarshal(data, &h)
}

// labs is what the records on this host say of this lab and of others.
type labs struct {
	mine Owned
	dirs []string // of other labs
}

// otherLabs reads the records beside the lab at paths.
func otherLabs(paths Paths) (l labs) {
	root := filepath.Dir(paths.Runtime)
	entries, _ := os.ReadDir(root) // no directory, no other lab
	for _, e := range entries {
		if dir := filepath.Join(root, e.Name()); e.IsDir() && dir != paths.Runtime {
			l.dirs = append(l.dirs, dir+"/")
		}
	}
	return l
}

// hostNamespaces finds those network namespaces of the lab that somebody is still
// in; pinned ones without a process are among the mounts.
func (l labs) hostNamespaces() (out []string, err error) {
	links, err := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, link := range links {
		// A process may end meanwhile.
		if target, e := os.Readlink(link); e == nil && l.mine.Namespaces[target] {
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

func (l labs) hostMounts() (out []string, err error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for scan := bufio.NewScanner(bytes.NewReader(data)); scan.Scan(); {
		fields := strings.Fields(scan.Text())
		if len(fields) < 5 || slices.ContainsFunc(l.dirs, func(dir string) bool { return strings.HasPrefix(fields[4], dir) }) {
			continue
		}
		_, rest, _ := strings.Cut(scan.Text(), " - ")
		fstype, _, _ := strings.Cut(rest, " ")
		out = append(out, fmt.Sprintf("%s type %s root %s", fields[4], fstype, fields[3]))
	}
	return out, nil
}

// hostProcesses lists those processes of the lab that still run.
func (l labs) hostProcesses() (out []string, err error) {
	for _, id := range l.mine.Processes {
		state, start, err := readStat(id.Pid)
		if err != nil || start != id.Start || dead(state) {
			continue // it has ended, or its pid is another's by now
		}
		cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", id.Pid)) // it may have ended
		out = append(out, fmt.Sprintf("%d %s", id.Pid, bytes.ReplaceAll(bytes.TrimRight(cmdline, "\x00"), []byte{0}, []byte{' '})))
	}
	return out, nil
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
