// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

func TestLockIsHeldByOne(t *testing.T) {
	path := filepath.Join(t.TempDir(), "labs", "x.lock")
	first, err := acquire(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := acquire(path); !errors.Is(err, ErrRunning) {
		t.Fatalf("a second holder: got %v, want ErrRunning", err)
	}
	if err := first.release(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Dir(path)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory of the last lab stays: %v", err)
	}
	again, err := acquire(path)
	if err != nil {
		t.Fatalf("after a release: %v", err)
	}
	if err := again.release(); err != nil {
		t.Fatal(err)
	}
}

func TestDaemonRecordNamesOneProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "daemon.json")
	if _, running := readDaemon(path); running {
		t.Error("no record, and yet somebody runs")
	}
	if err := writeDaemon(path); err != nil {
		t.Fatal(err)
	}
	d, running := readDaemon(path)
	if !running || d.PID != os.Getpid() {
		t.Fatalf("our own record: %+v, running %t", d, running)
	}
	// The same pid, another process: the start time tells them apart.
	d.StartTime++
	if err := writeJSON(path, d, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, running := readDaemon(path); running {
		t.Error("a reused pid passes for the daemon")
	}
}

// A process that got a SIGKILL is no daemon any more, from that instant and also
// as a zombie that nobody has waited for.
func TestKilledDaemonDoesNotRun(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waited := false
	t.Cleanup(func() {
		if !waited {
			_ = cmd.Wait() // its error is the kill
		}
	})
	st, err := startTime(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "daemon.json")
	if err := writeJSON(path, Daemon{PID: cmd.Process.Pid, StartTime: st}, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, running := readDaemon(path); !running {
		t.Fatal("a living process passes for a dead one")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, running := readDaemon(path); running {
		t.Error("a killed process passes for the daemon")
	}
	_ = cmd.Wait() // its error is the kill
	waited = true
	if _, running := readDaemon(path); running {
		t.Error("a process that is gone passes for the daemon")
	}
}

// The lock of a killed daemon comes free a moment after the kill.
func TestLockIsAwaitedFromTheDying(t *testing.T) {
	path := filepath.Join(t.TempDir(), "labs", "x.lock")
	first, err := acquire(path)
	if err != nil {
		t.Fatal(err)
	}
	freed := make(chan error, 1)
	timer := time.AfterFunc(20*time.Millisecond, func() { freed <- first.release() })
	defer timer.Stop()
	second, err := acquireFromDying(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(<-freed, second.release()); err != nil {
		t.Fatal(err)
	}
}
