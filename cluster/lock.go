// SPDX-License-Identifier: Apache-2.0

package cluster

import (
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

// release gives the lock back and removes its file, and the directory when the
// lab's was the last.
func (l *lock) release() error {
	err := os.Remove(l.path)
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
	return writeJSON(path, Daemon{PID: os.Getpid(), StartTime: st, Since: time.Now()})
}

// readDaemon returns the recorded process, with ok false when there is no
// record or that process is gone.
func readDaemon(path string) (Daemon, bool) {
	var d Daemon
	data, err := os.ReadFile(path)
	if err != nil || json.Unmarshal(data, &d) != nil {
		return d, false
	}
	st, err := startTime(d.PID)
	return d, err == nil && st == d.StartTime
}

// startTime reads when a process began, in clock ticks since boot.
func startTime(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The second field is the name in parentheses and may hold anything.
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	if len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat: too short", pid)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// writeJSON writes v at path so that a reader sees the old file or the new one,
// never a part.
func writeJSON(path string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(path, append(data, '\n'), 0o600)
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
		os.Remove(tmp.Name())
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
