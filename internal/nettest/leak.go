// SPDX-License-Identifier: Apache-2.0

package nettest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// leakPatience is how long a test's leftovers may take to go: the kernel takes a
// namespace and its links apart after the last holder has let go.
const leakPatience = 10 * time.Second

// LeakCheck fails the test when it leaves something behind: a network namespace
// (held by a thread, a process, a mount, an open file or a socket), a mount, a
// link, address, route or rule in the current namespace, or a process. Call it
// before anything that registers a clean-up; it looks after all of them have run.
// Tests that run in parallel with this one would be counted too.
func LeakCheck(tb testing.TB) {
	tb.Helper()
	leakCheck(tb, leakPatience)
}

// leakCheck is LeakCheck with its patience.
func leakCheck(tb testing.TB, patience time.Duration) {
	tb.Helper()
	before, err := census()
	if err != nil {
		tb.Fatalf("leak check: %v", err)
	}
	tb.Cleanup(func() {
		if err := await(patience, func() error { return compare(before) }); err != nil {
			tb.Errorf("leak check: %v", err)
		}
	})
}

// compare counts again and says what is new or gone.
func compare(before map[string]bool) error {
	after, err := census()
	if err != nil {
		return err
	}
	var diff []string
	for k := range after {
		if !before[k] {
			diff = append(diff, "left behind: "+k)
		}
	}
	for k := range before {
		// Only what the tests share may not vanish; a process or a namespace of
		// an earlier test is free to.
		if !after[k] && strings.HasPrefix(k, "kernel ") {
			diff = append(diff, "taken away: "+k)
		}
	}
	if len(diff) == 0 {
		return nil
	}
	slices.Sort(diff)
	return fmt.Errorf("%d differences\n  %s", len(diff), strings.Join(diff, "\n  "))
}

// census names everything that LeakCheck counts, one string each.
func census() (map[string]bool, error) {
	found := make(map[string]bool)
	errs := []error{
		countProcesses(found),
		countNamespaces(found),
		countMounts(found),
		countLinks(found),
		countRoutes(found),
	}
	return found, errors.Join(errs...)
}

// root returns the process whose descendants are the test's: the outer process
// of Main, to which orphans go, else this one.
func root() int {
	if pid, err := strconv.Atoi(os.Getenv(insideEnv)); err == nil && pid == os.Getppid() {
		return pid
	}
	return os.Getpid()
}

// countProcesses adds the test's processes, zombies too: somebody forgot to wait.
func countProcesses(found map[string]bool) error {
	procs, err := descendants(root())
	if err != nil {
		return err
	}
	for _, p := range procs {
		if p.pid == os.Getpid() || p.ppid == root() && p.state == "Z" {
			continue // this process; an orphan that is about to be collected
		}
		found[fmt.Sprintf("process %d started at %s: %s", p.pid, p.start, p.line)] = true
	}
	return nil
}

// countNamespaces adds the network namespaces that this process and its children
// hold by a thread or an open file. Those held by a mount are found as mounts.
func countNamespaces(found map[string]bool) error {
	pids := []string{"self"}
	procs, err := descendants(root())
	if err != nil {
		return err
	}
	for _, p := range procs {
		pids = append(pids, strconv.Itoa(p.pid))
	}
	for _, pid := range pids {
		// What vanishes between two looks is not a leak: errors are passed over.
		threads, _ := filepath.Glob("/proc/" + pid + "/task/*/ns/net")
		files, _ := filepath.Glob("/proc/" + pid + "/fd/*")
		for _, f := range append(threads, files...) {
			if target, err := os.Readlink(f); err == nil && strings.HasPrefix(target, "net:[") {
				found["network namespace "+target] = true
			}
		}
	}
	return countSocketNamespaces(found)
}

// countSocketNamespaces adds the namespaces that hold this process's sockets: a
// forgotten listener keeps a removed pod answering.
func countSocketNamespaces(found map[string]bool) error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || !strings.HasPrefix(target, "socket:") {
			continue
		}
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// The number may mean another file by now; then the call fails, or names
		// a namespace that is held as well.
		nsfd, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
		if err != nil {
			continue
		}
		var st unix.Stat_t
		if err := unix.Fstat(nsfd, &st); err == nil {
			found[fmt.Sprintf("network namespace net:[%d]", st.Ino)] = true
		}
		if err := unix.Close(nsfd); err != nil {
			return err
		}
	}
	return nil
}

// countMounts adds the mounts that this process sees.
func countMounts(found map[string]bool) error {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.SplitSeq(strings.TrimSpace(string(info)), "\n") {
		f := strings.Fields(line)
		if len(f) < 5 {
			return fmt.Errorf("mountinfo: cannot read %q", line)
		}
		_, fs, _ := strings.Cut(line, " - ")
		kind, _, _ := strings.Cut(fs, " ")
		found[fmt.Sprintf("kernel mount %s at %s (%s, root %s)", f[0], f[4], kind, f[3])] = true
	}
	return nil
}

// countLinks adds the links and addresses of the current namespace.
func countLinks(found map[string]bool) error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	for _, l := range links {
		found[fmt.Sprintf("kernel link %d %s (%s)", l.Attrs().Index, l.Attrs().Name, l.Type())] = true
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addrs {
		found[fmt.Sprintf("kernel address %s on link %d", a.IPNet, a.LinkIndex)] = true
	}
	return nil
}

// countRoutes adds the routes of every table and the routing rules of the
// current namespace.
func countRoutes(found map[string]bool) error {
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		found["kernel route "+r.String()] = true
	}
	rules, err := netlink.RuleList(netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("list rules: %w", err)
	}
	for _, r := range rules {
		found["kernel rule "+r.String()] = true
	}
	return nil
}
