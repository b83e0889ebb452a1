// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Limits are the most that the processes of a container may use. Zero is no limit.
type Limits struct {
	// CPU is in thousandths of a processor, Memory in bytes.
	CPU, Memory int64
}

// ErrNoController says that the host lacks what a limit needs: a cgroup controller
// that may be used from here.
var ErrNoController = errors.New("the host has no such cgroup controller here")

// Both kernel interfaces take a quota of CPU time for each period.
const cpuPeriod = 100 * time.Millisecond

// cgroupsFile lists the cgroups of one container's process, in its directory.
const cgroupsFile = "cgroups.json"

// controller is one resource that the kernel can limit. dir holds the lab's cgroups
// for it; in the unified hierarchy it is the same for all.
type controller struct {
	name, dir string
	unified   bool
}

// set writes a limit and reads it back.
func (c controller) set(group string, l Limits) error {
	var file, text string
	quota := max(l.CPU*int64(cpuPeriod/time.Microsecond)/1000, 1000)
	switch {
	case c.name == "cpu" && c.unified:
		file, text = "cpu.max", fmt.Sprintf("%d %d", quota, cpuPeriod/time.Microsecond)
	case c.name == "cpu":
		file, text = "cpu.cfs_quota_us", strconv.FormatInt(quota, 10)
	case c.unified:
		file, text = "memory.max", strconv.FormatInt(l.Memory, 10)
	default:
		file, text = "memory.limit_in_bytes", strconv.FormatInt(l.Memory, 10)
	}
	path := filepath.Join(group, file)
	if err := os.WriteFile(path, []byte(text), 0); err != nil {
		return err
	}
	got, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	// The kernel keeps memory in whole pages.
	if have := strings.TrimSpace(string(got)); have != text && (c.name == "cpu" || have != strconv.FormatInt(l.Memory/int64(os.Getpagesize())*int64(os.Getpagesize()), 10)) {
		return fmt.Errorf("%s is %s after %s was written", path, have, text)
	}
	if c.name == "memory" {
		noSwap(group, c.unified, l.Memory)
	}
	return nil
}

// noSwap keeps a container from using swap instead. Kernels without swap accounting
// lack the file, and then there is nothing to keep it from.
func noSwap(group string, unified bool, memory int64) {
	if unified {
		_ = os.WriteFile(filepath.Join(group, "memory.swap.max"), []byte("0"), 0)
		return
	}
	_ = os.WriteFile(filepath.Join(group, "memory.memsw.limit_in_bytes"), []byte(strconv.FormatInt(memory, 10)), 0)
}

// labCgroup names the directories of a lab's cgroups, by its runtime directory.
func labCgroup(dir string) string {
	sum := sha256.Sum256([]byte(filepath.Clean(dir)))
	return "kplab-" + hex.EncodeToString(sum[:6])
}

// Cgroups returns the directories of cgroups that the lab with this runtime directory
// has on the host. A lab that is down has none.
func Cgroups(dir string) ([]string, error) {
	var found []string
	for _, name := range []string{"cpu", "memory"} {
		c, err := findController(name, labCgroup(dir))
		if errors.Is(err, ErrNoController) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if _, err := os.Stat(c.dir); err == nil {
			found = append(found, c.dir)
		}
	}
	return found, nil
}

// ProbeLimits finds out whether containers can be kept to limits: it makes cgroups as
// the lab with this runtime directory would, limits them, reads back and removes them.
func ProbeLimits(dir string) error {
	tmp, err := os.MkdirTemp("", "kplab-limits-")
	if err != nil {
		return err
	}
	r := Runtime{dir: filepath.Join(dir, filepath.Base(tmp))}
	_, err = r.limit(tmp, "probe", Limits{CPU: 100, Memory: 16 << 20})
	return errors.Join(err, removeCgroups(tmp), os.RemoveAll(tmp))
}

// findController looks for where the host has a controller mounted.
func findController(name, ours string) (controller, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return controller{}, err
	}
	for line := range strings.Lines(string(text)) {
		before, after, _ := strings.Cut(line, " - ")
		fields, kind := strings.Fields(before), strings.Fields(after)
		if len(fields) < 5 || len(kind) < 3 {
			continue
		}
		point := fields[4]
		switch kind[0] {
		case "cgroup":
			if strings.Contains(","+kind[2]+",", ","+name+",") {
				return controller{name: name, dir: filepath.Join(point, ours)}, nil
			}
		case "cgroup2":
			all, err := os.ReadFile(filepath.Join(point, "cgroup.controllers"))
			if err == nil && strings.Contains(" "+strings.TrimSpace(string(all))+" ", " "+name+" ") {
				return controller{name: name, dir: filepath.Join(point, ours), unified: true}, nil
			}
		}
	}
	return controller{}, fmt.Errorf("%s: %w", name, ErrNoController)
}

// limit makes the cgroups of a container's process and returns them. They are recorded
// in dir, the process's directory, before they are made.
func (r *Runtime) limit(dir, name string, l Limits) ([]string, error) {
	var groups []string
	var used []controller
	for _, c := range []struct {
		name  string
		limit int64
	}{{"cpu", l.CPU}, {"memory", l.Memory}} {
		if c.limit <= 0 {
			continue
		}
		found, err := findController(c.name, labCgroup(r.dir))
		if err != nil {
			return nil, err
		}
		group := filepath.Join(found.dir, name)
		used = append(used, found)
		if len(groups) == 0 || groups[len(groups)-1] != group {
			groups = append(groups, group)
		}
	}
	if len(used) == 0 {
		return nil, nil
	}
	if err := writeRecord(filepath.Join(dir, cgroupsFile), groups); err != nil {
		return nil, err
	}
	for _, c := range used {
		group := filepath.Join(c.dir, name)
		for try := 0; ; try++ {
			if err := c.enable(); err != nil && (!errors.Is(err, os.ErrNotExist) || try == 3) {
				return nil, fmt.Errorf("cgroup controller %s: %w: %w", c.name, ErrNoController, err)
			}
			err := os.Mkdir(group, 0o755)
			if err == nil || errors.Is(err, os.ErrExist) {
				break
			}
			// Somebody has removed the directory above with the last container in it.
			if !errors.Is(err, os.ErrNotExist) || try == 3 {
				return nil, err
			}
		}
		if err := c.set(group, l); err != nil {
			return nil, fmt.Errorf("limit %s: %w", c.name, err)
		}
	}
	return groups, nil
}

// enable makes the lab's directory; in the unified hierarchy a controller has to be
// handed down from each level to the next.
func (c controller) enable() error {
	if err := os.Mkdir(c.dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if !c.unified {
		return nil
	}
	for _, dir := range []string{filepath.Dir(c.dir), c.dir} {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c.name), 0); err != nil {
			return err
		}
	}
	return nil
}

// enterCgroups puts a process into cgroups.
func enterCgroups(groups []string, pid int) error {
	for _, g := range groups {
		if err := os.WriteFile(filepath.Join(g, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			return fmt.Errorf("put process %d into its cgroup: %w", pid, err)
		}
	}
	return nil
}

// recordedCgroups returns the cgroups of a container's process, none for most.
func recordedCgroups(dir string) ([]string, error) {
	var groups []string
	err := readRecord(filepath.Join(dir, cgroupsFile), &groups)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return groups, err
}

// outOfMemory says whether the kernel killed a process of these cgroups because their
// memory was used up.
func outOfMemory(groups []string) bool {
	for _, g := range groups {
		for _, file := range []string{"memory.events", "memory.oom_control"} {
			text, err := os.ReadFile(filepath.Join(g, file))
			if err != nil {
				continue
			}
			for line := range bytes.Lines(text) {
				if key, n, _ := strings.Cut(strings.TrimSpace(string(line)), " "); key == "oom_kill" && n != "0" {
					return true
				}
			}
		}
	}
	return false
}

// removeCgroups removes the cgroups that are recorded in a process's directory, and the
// lab's own directory with the last of them. The processes have been killed; the kernel
// may need a moment to notice, for which it has no event in every version.
func removeCgroups(dir string) error {
	groups, err := recordedCgroups(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, g := range groups {
		errs = append(errs, removeCgroup(g), removeCgroup(filepath.Dir(g)))
	}
	return errors.Join(errs...)
}

// removeCgroup removes a cgroup without children; one that has some is left to those who
// own them. What is gone already is success.
func removeCgroup(group string) error {
	deadline := time.Now().Add(killPatience)
	for {
		err := unix.Rmdir(group)
		switch {
		case err == nil || errors.Is(err, unix.ENOENT):
			return nil
		case !errors.Is(err, unix.EBUSY):
			return fmt.Errorf("remove cgroup %s: %w", group, err)
		}
		// Busy with children is for good, busy with the last of a child passes.
		entries, err := os.ReadDir(group)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove cgroup %s: %w", group, err)
		}
		if slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.IsDir() }) {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("remove cgroup %s: it is busy for longer than %v", group, killPatience)
		}
		<-time.After(time.Millisecond)
	}
}

// removeAllCgroups removes the cgroups of every process of a sandbox.
func removeAllCgroups(sandboxDir string) error {
	entries, err := os.ReadDir(filepath.Join(sandboxDir, processDirs))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	var errs []error
	for _, e := range entries {
		errs = append(errs, removeCgroups(filepath.Join(sandboxDir, processDirs, e.Name())))
	}
	return errors.Join(errs...)
}
