// SPDX-License-Identifier: Apache-2.0

package nettest

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// process is one line of the process table.
type process struct {
	pid, ppid int
	state     string // R, S, D, Z, …
	start     string // in ticks since boot: with the pid it names a process for good
	line      string // its command line
}

// String names the process for a person.
func (p process) String() string {
	return fmt.Sprintf("pid %d (parent %d, state %s): %s", p.pid, p.ppid, p.state, p.line)
}

// processes reads the process table. A process that ends meanwhile is left out.
func processes() (map[int]process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	all := make(map[int]process, len(entries))
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		// The name in brackets may hold spaces and brackets: fields start after
		// the last one.
		end := bytes.LastIndexByte(stat, ')')
		begin := bytes.IndexByte(stat, '(')
		if end < 0 || begin < 0 {
			continue
		}
		f := strings.Fields(string(stat[end+1:]))
		if len(f) < 20 {
			continue
		}
		p := process{pid: pid, state: f[0], start: f[19], line: string(stat[begin : end+1])}
		p.ppid, _ = strconv.Atoi(f[1])
		if cmdline, err := os.ReadFile("/proc/" + e.Name() + "/cmdline"); err == nil && len(cmdline) > 0 {
			p.line = strings.TrimSpace(strings.ReplaceAll(string(cmdline), "\x00", " "))
		}
		all[pid] = p
	}
	return all, nil
}

// Started returns the process that adopts what tests leave behind (this one, without
// [Main]) and, below it, every other process that the tests started and that lives.
// A benchmark counts with it what a daemon and its children take.
func Started() (adopter int, pids []int, err error) {
	procs, err := descendants(root())
	for _, p := range procs {
		if p.pid != os.Getpid() && p.state != "Z" {
			pids = append(pids, p.pid)
		}
	}
	return root(), pids, err
}

// descendants returns the children of root, their children and so on.
func descendants(root int) ([]process, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	var out []process
	for pid, p := range all {
		for at, hops := p, 0; hops < len(all); hops++ {
			if at.ppid == root {
				out = append(out, all[pid])
				break
			}
			next, ok := all[at.ppid]
			if !ok {
				break
			}
			at = next
		}
	}
	return out, nil
}
