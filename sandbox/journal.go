// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/kplab/kplab/sandbox/reexec"
)

// Files of the journal. Those of a process's end are reexec's.
const (
	bootFile    = "boot"
	specFile    = "spec.json"
	processFile = "process.json"
	processDirs = "p"
)

// processRecord is the content of processFile: written by the daemon when the
// shim exists and has not been told what to do.
type processRecord struct {
	Shim      reexec.ID `json:"shim"`
	Container string    `json:"container"`
	Attempt   int       `json:"attempt"`
	// Terminal says whether the process has one.
	Terminal bool `json:"terminal"`
}

// bootID returns what tells this boot of the machine from others. Pids and start
// times are counted anew with each.
func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}

// checkBoot drops the records of an earlier boot: what they name is gone, and its
// pids may be anybody's.
func checkBoot(dir string) error {
	now, err := bootID()
	if err != nil {
		return err
	}
	path := filepath.Join(dir, bootFile)
	then, err := os.ReadFile(path)
	switch {
	case err == nil && string(then) == now:
		return nil
	case err != nil && !errors.Is(err, os.ErrNotExist):
		return err
	}
	if err := os.RemoveAll(filepath.Join(dir, "sandboxes")); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, "sandboxes"), 0o700); err != nil {
		return err
	}
	return reexec.WriteFileAtomic(path, []byte(now))
}

// readRecord reads a JSON file.
func readRecord(path string, into any) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// writeRecord writes a JSON file.
func writeRecord(path string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return reexec.WriteFileAtomic(path, data)
}

// Specs returns the pods recorded in a runtime directory, from the disk alone.
func Specs(dir string) ([]Spec, error) {
	entries, err := os.ReadDir(filepath.Join(dir, "sandboxes"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	var specs []Spec
	for _, e := range entries {
		var spec Spec
		err := readRecord(filepath.Join(dir, "sandboxes", e.Name(), specFile), &spec)
		switch {
		case errors.Is(err, os.ErrNotExist):
			// Being made or being removed just now.
		case err != nil:
			return nil, err
		default:
			specs = append(specs, spec)
		}
	}
	return specs, nil
}

// processIDs returns the shims and first processes that are recorded below a
// sandbox's directory: of all its processes, or of those that are named.
func processIDs(sandboxDir string, names ...string) []reexec.ID {
	var ids []reexec.ID
	if len(names) == 0 {
		entries, err := os.ReadDir(filepath.Join(sandboxDir, processDirs))
		if err != nil {
			return nil // no process yet
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
	}
	for _, name := range names {
		dir := filepath.Join(sandboxDir, processDirs, name)
		var p processRecord
		if readRecord(filepath.Join(dir, processFile), &p) == nil {
			ids = append(ids, p.Shim)
		}
		var i reexec.InitRecord
		if readRecord(filepath.Join(dir, reexec.InitFile), &i) == nil {
			ids = append(ids, i.ID)
		}
	}
	return ids
}

// processName is the name of a process's directory.
func processName(container string, attempt int) string {
	return container + "." + strconv.Itoa(attempt)
}

// adopt finds what an earlier daemon left. A sandbox without its namespace, or
// whose record is incomplete, was being made or removed when the daemon died: it
// is removed, and whoever wants it makes it again.
func (r *Runtime) adopt() error {
	entries, err := os.ReadDir(r.sandboxesDir())
	if err != nil {
		return err
	}
	for _, e := range entries {
		s := &Sandbox{runtime: r, dir: filepath.Join(r.sandboxesDir(), e.Name())}
		err := s.load(e.Name())
		if err == nil {
			r.boxes[s.spec.ID] = s
			continue
		}
		r.log.Warn("removing an incomplete sandbox", "id", e.Name(), "reason", err)
		s.spec.ID = e.Name()
		ctx, cancel := killDeadline()
		err = r.clear(ctx, s)
		cancel()
		if err != nil {
			return fmt.Errorf("remove incomplete sandbox %s: %w", e.Name(), err)
		}
	}
	// A pin without a record: the daemon died between the two steps of Remove.
	names, err := PinnedNames(r.dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		id, isPod := strings.CutPrefix(name, podPrefix)
		if isPod && r.boxes[id] == nil {
			s := &Sandbox{runtime: r, spec: Spec{ID: id}}
			for _, pin := range s.pins() {
				if err := unpin(pin); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
