// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Usage is what the processes of one container use: its first one, those that this one
// has started, and those of Exec.
type Usage struct {
	// CPU is the time that they, and those of their children that have ended, have had
	// since the container started. The kernel counts it in steps of 10 ms.
	CPU time.Duration
	// Memory is their share of the memory in bytes: what is theirs alone, and of what
	// they share with others, such as a program's text, their part (PSS).
	Memory uint64
	// Processes is how many they are.
	Processes int
}

// clockTick is the unit of CPU times in /proc: the kernel's USER_HZ is 100 on every
// architecture that Go knows.
const clockTick = 10 * time.Millisecond

// Measure measures the containers of some sandboxes whose processes run, all of them
// in one walk over /proc. Which container a process belongs to is told by its mount
// namespace: each container has one, and its processes keep it whoever their parent
// becomes.
func Measure(boxes ...*Sandbox) (map[*Process]Usage, error) {
	owners := map[string]*Process{}
	out := map[*Process]Usage{}
	for _, s := range boxes {
		for _, p := range s.Processes() {
			ns, err := os.Readlink(procPath(p.Pid(), "ns/mnt"))
			if err != nil || !p.running() {
				continue // it has ended
			}
			owners[ns] = p
			out[p] = Usage{}
		}
	}
	if len(owners) == 0 {
		return out, nil
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("measure the containers: %w", err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		ns, err := os.Readlink(procPath(pid, "ns/mnt"))
		if err != nil || owners[ns] == nil {
			continue // it has ended, or is none of ours
		}
		u, err := usageOf(pid)
		if gone(err) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("measure process %d of container %s: %w", pid, owners[ns].container, err)
		}
		sum := out[owners[ns]]
		out[owners[ns]] = Usage{sum.CPU + u.CPU, sum.Memory + u.Memory, sum.Processes + 1}
	}
	return out, nil
}

// gone tells whether an error means that a process has ended.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }

func procPath(pid int, file string) string { return filepath.Join("/proc", strconv.Itoa(pid), file) }

// usageOf measures one process.
func usageOf(pid int) (Usage, error) {
	stat, err := os.ReadFile(procPath(pid, "stat"))
	if err != nil {
		return Usage{}, err
	}
	cpu, err := cpuOf(string(stat))
	if err != nil {
		return Usage{}, err
	}
	// A process that has ended and waits for its parent has no memory, and the file is
	// empty.
	rollup, err := os.ReadFile(procPath(pid, "smaps_rollup"))
	if err != nil && !gone(err) {
		return Usage{}, err
	}
	memory, err := pssOf(rollup)
	return Usage{CPU: cpu, Memory: memory, Processes: 1}, err
}

// cpuOf reads the CPU time of a process and of its children that it has waited for
// from a line of /proc/PID/stat.
func cpuOf(stat string) (time.Duration, error) {
	// The program's name is in brackets and may hold anything, brackets included.
	_, rest, ok := cutLast(stat, ") ")
	f := strings.Fields(rest)
	// utime, stime, cutime and cstime are the fields 14 to 17; the first of f is 3.
	if !ok || len(f) < 15 {
		return 0, fmt.Errorf("/proc/PID/stat has no times: %q", stat)
	}
	var ticks int64
	for _, text := range f[11:15] {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/PID/stat: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * clockTick, nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// pssOf reads the line "Pss: N kB" of a smaps_rollup, in bytes.
func pssOf(rollup []byte) (uint64, error) {
	lines := bufio.NewScanner(bytes.NewReader(rollup))
	for lines.Scan() {
		text, ok := strings.CutPrefix(lines.Text(), "Pss:")
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(text), " kB"), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("smaps_rollup: %w", err)
		}
		return n << 10, nil
	}
	return 0, lines.Err()
}
