// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrRunning says that another process runs the lab.
var ErrRunning = errors.New("the lab runs already")

// dyingTimeout is how long a killed daemon may take to die: it has namespaces to
// let go of, which the kernel does on the process's own time.
const dyingTimeout = 3 * time.Second

// lock is the proof that this process, and no other, runs or removes a lab.
type lock struct {
	path string
	file *os.File
}

// acquire takes the lock file at path without waiting; ErrRunning when another
// process has it. The kernel lets go of it when the holder dies.
func acquire(path string) (*lock, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of the lab's lock: %w", err)
	}
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, fmt.Errorf("open the lab's lock: %w", err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, ErrRunning
			}
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		// The holder before us may have unlinked the file between our open and
		// our lock; then the path is free for somebody else, and ours is none.
		var mine, there unix.Stat_t
		if unix.Fstat(int(f.Fd()), &mine) == nil && unix.Stat(path, &there) == nil && mine.Ino == there.Ino {
			return &lock{path: path, file: f}, nil
		}
		f.Close()
	}
}

// acquireFromDying is acquire for a lab whose daemon does not run: a process that
// was killed a moment ago holds the lock until the kernel has closed its files.
func acquireFromDying(ctx context.Context, path string) (*lock, error) {
	ctx, cancel := context.WithTimeout(ctx, dyingTimeout)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		l, err := acquire(path)
		if !errors.Is(err, ErrRunning) {
			return l, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-tick.C:
		}
	}
}

// release gives the lock back and removes its file, and the directory when the
// lab's was the last.
func (l *lock) release() error {
	err := os.Remove(l.path)
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	_ = os.Remove(filepath.Dir(l.path)) // fails while other labs use it, as it should
	return errors.Join(err, l.file.Close())
}

// Daemon is the record of the process that runs a lab.
type Daemon struct {
	PID int `json:"pid"`
	// StartTime is field 22 of /proc/PID/stat, in clock ticks since boot. With
	// the pid it names a process for ever; a pid alone is reused.
	StartTime uint64    `json:"startTime"`
	Since     time.Time `json:"since"`
}

func writeDaemon(path string) error {
	st, err := startTime(os.Getpid())
	if err != nil {
		return err
	}
	// Readable by all: `kplab kubectl` and `kplab kubeconfig` need no root.
	return writeJSON(path, Daemon{PID: os.Getpid(), StartTime: st, Since: time.Now()}, 0o644)
}

// readDaemon returns the recorded process, with ok false when there is no
// record or that process is gone, or dying of a SIGKILL.
func readDaemon(path string) (Daemon, bool) {
	var d Daemon
	data, err := os.ReadFile(path)
	if err != nil || json.Unmarshal(data, &d) != nil {
		return d, false
	}
	state, st, err := readStat(d.PID)
	return d, err == nil && st == d.StartTime && !dead(state) && !killed(d.PID)
}

// dead tells whether a process in that state has ended: what is left of it waits
// for its parent to ask how.
func dead(state string) bool { return state == "Z" || state == "X" }

// startTime reads when a process began, in clock ticks since boot.
func startTime(pid int) (uint64, error) {
	_, st, err := readStat(pid)
	return st, err
}

// readStat reads a process's state (Z is dead and not yet waited for) and start
// time from /proc/PID/stat.
func readStat(pid int) (state string, start uint64, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0, err
	}
	// The second field is the name in parentheses and may hold anything.
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	if len(fields) < 20 {
		return "", 0, fmt.Errorf("/proc/%d/stat: too short", pid)
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	return fields[0], start, err
}

// killed tells whether a SIGKILL waits for the process: it takes a moment to
// die of it, and will not run again.
func killed(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(data)) {
		name, mask, _ := strings.Cut(line, ":")
		if name != "SigPnd" && name != "ShdPnd" {
			continue
		}
		if bits, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64); err == nil && bits&(1<<(uint(unix.SIGKILL)-1)) != 0 {
			return true
		}
	}
	return false
}

// writeJSON writes v at path so that a reader sees the old file or the new one,
// never a part.
func writeJSON(path string, v any, mode os.FileMode) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(path, append(data, '\n'), mode)
}

func writeFile(path string, data []byte, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return err
	}
	_, err = tmp.Write(data)
	err = errors.Join(err, tmp.Chmod(mode), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		_ = os.Remove(tmp.Name()) // the first error is the one to know
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
