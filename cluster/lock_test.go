// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
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
	again.release()
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
	if err := writeJSON(path, d); err != nil {
		t.Fatal(err)
	}
	if _, running := readDaemon(path); running {
		t.Error("a reused pid passes for the daemon")
	}
}
