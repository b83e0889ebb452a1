// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/kplab/kplab/cluster"
)

// Progress is how far a learner is with a lab.
type Progress struct {
	Lab string `json:"lab"`
	// Dir is where the lab lies; "" for one that is built in.
	Dir string `json:"dir,omitempty"`
	// Digest is that of the lab when it was started.
	Digest   string         `json:"digest"`
	Seed     uint64         `json:"seed"`
	Started  time.Time      `json:"started"`
	Finished *time.Time     `json:"finished,omitempty"`
	Steps    []StepProgress `json:"steps"`
	// Ready is true while what the lab made is in the cluster.
	Ready bool `json:"ready"`
}

// StepProgress is how far one step is.
type StepProgress struct {
	ID     string     `json:"id"`
	Passed *time.Time `json:"passed,omitempty"`
	// Checks is how often the learner asked, Hints how many hints were shown.
	Checks int `json:"checks"`
	Hints  int `json:"hints"`
	// Solved is true when the engine applied the solution, Skipped when the step
	// needs a node and the cluster lets nobody in.
	Solved  bool `json:"solved,omitempty"`
	Skipped bool `json:"skipped,omitempty"`
}

// Current is the index of the step to do next; len(Steps) when all are done.
func (p *Progress) Current() int {
	for i, s := range p.Steps {
		if s.Passed == nil && !s.Skipped {
			return i
		}
	}
	return len(p.Steps)
}

// stateDir is where progress is kept: among the lab's state, or for other clusters
// in a directory for each.
func stateDir(t Target, host string) string {
	state := cluster.PathsOf(t.Name).State
	if t.Kubeconfig == "" {
		return filepath.Join(state, "labs")
	}
	root := filepath.Dir(state)
	if os.Getenv("KPLAB_STATE") == "" && os.Geteuid() != 0 {
		// A person's own cluster needs no root, and /var/lib is root's.
		root = os.Getenv("XDG_STATE_HOME")
		if root == "" {
			root = filepath.Join(os.Getenv("HOME"), ".local", "state")
		}
		root = filepath.Join(root, "kplab")
	}
	h := sha256.Sum256([]byte(host))
	// No lab of kplab has an underscore in its name.
	return filepath.Join(root, "_clusters", hex.EncodeToString(h[:6]))
}

// progressFile is the file with a lab's progress.
func progressFile(dir, lab string) string { return filepath.Join(dir, lab+".json") }

// readProgress returns a lab's progress, nil when it was never started.
func readProgress(dir, lab string) (*Progress, error) {
	data, err := os.ReadFile(progressFile(dir, lab))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("read the progress of lab %s: %w", lab, err)
	}
	p := &Progress{}
	if err := json.Unmarshal(data, p); err != nil {
		return nil, fmt.Errorf("the progress of lab %s (%s) is damaged: %w; delete the file and start the lab again", lab, progressFile(dir, lab), err)
	}
	return p, nil
}

func writeProgress(dir string, p *Progress) error {
	data, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return err
	}
	return replaceFile(progressFile(dir, p.Lab), append(data, '\n'), 0o600)
}

// current names the lab that was started last.
func (w *World) current() (name, dir string, err error) {
	data, err := os.ReadFile(filepath.Join(w.dir, "current"))
	if errors.Is(err, os.ErrNotExist) {
		return "", "", nil
	} else if err != nil {
		return "", "", fmt.Errorf("read which lab is the current one: %w", err)
	}
	p, err := readProgress(w.dir, string(data))
	if err != nil || p == nil {
		return "", "", err
	}
	return p.Lab, p.Dir, nil
}

func (w *World) setCurrent(lab string) error {
	path := filepath.Join(w.dir, "current")
	if lab == "" {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("leave the lab: %w", err)
		}
		return nil
	}
	return replaceFile(path, []byte(lab), 0o600)
}

// replaceFile writes a file whole or not at all. It belongs to who called sudo.
func replaceFile(path string, data []byte, mode os.FileMode) error {
	fail := func(err error) error { return fmt.Errorf("write %s: %w", path, err) }
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fail(err)
	}
	next := path + ".new"
	if err := os.WriteFile(next, data, mode); err != nil {
		return fail(err)
	}
	uid, errUID := strconv.Atoi(os.Getenv("SUDO_UID"))
	gid, errGID := strconv.Atoi(os.Getenv("SUDO_GID"))
	if errUID == nil && errGID == nil && os.Geteuid() == 0 {
		if err := os.Chown(next, uid, gid); err != nil {
			return fail(err)
		}
	}
	if err := os.Rename(next, path); err != nil {
		return fail(err)
	}
	return nil
}
