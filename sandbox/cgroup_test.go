// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox"
)

// TestLimits: a container's processes, those of exec too, are in its cgroups, which
// hold its limits; who uses more memory than that is killed, and nothing stays.
func TestLimits(t *testing.T) {
	r := open(t)
	s := create(t, r, "limited")
	// Memory is used up once a line came in; the shell's variable doubles until then.
	p := start(t, s, sandbox.ProcessSpec{Busybox: true, Stdin: true, Limits: sandbox.Limits{CPU: 250, Memory: 32 << 20}},
		"read x; a=xxxxxxxxxxxxxxxx; while :; do a=$a$a; done")
	if errors.Is(p.LimitError(), sandbox.ErrNoController) {
		t.Skip(p.LimitError())
	}
	groups := p.Cgroups()
	if p.LimitError() != nil || len(groups) == 0 {
		t.Fatalf("cgroups %v: %v", groups, p.LimitError())
	}
	inside := func(want int) error {
		for _, g := range groups {
			text, err := os.ReadFile(filepath.Join(g, "cgroup.procs"))
			if err != nil {
				return err
			}
			procs := strings.Fields(string(text))
			if len(procs) != want || !slices.Contains(procs, strconv.Itoa(p.Pid())) {
				return fmt.Errorf("%s holds %v, want %d with %d", g, procs, want, p.Pid())
			}
		}
		return nil
	}
	if err := inside(1); err != nil {
		t.Error(err)
	}
	limits := ""
	for _, g := range groups {
		for _, file := range []string{"cpu.max", "cpu.cfs_quota_us", "memory.max", "memory.limit_in_bytes"} {
			text, err := os.ReadFile(filepath.Join(g, file))
			if err == nil {
				limits += strings.Fields(string(text))[0] + " "
			}
		}
	}
	if limits != "25000 33554432 " {
		t.Errorf("the kernel's limits are %s", limits)
	}

	// The program of exec waits for its input until it was seen there.
	input, typed := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		code, err := s.Exec(t.Context(), sandbox.ExecSpec{Container: "app", Args: []string{"/bin/sh", "-c", "read x"}, Stdin: input})
		if err == nil && code != 0 {
			err = fmt.Errorf("exit code %d", code)
		}
		ended <- err
	}()
	nettest.Eventually(t, 20*time.Second, "exec in the cgroups", func() error { return inside(2) })
	if _, err := typed.Write([]byte("\n")); err != nil {
		t.Error(err)
	}
	if err := errors.Join(<-ended, typed.Close()); err != nil {
		t.Errorf("exec: %v", err)
	}

	go func() { _ = p.Attach(t.Context(), sandbox.AttachSpec{Stdin: bytes.NewReader([]byte("\n"))}) }()
	if e := await(t, p); !e.OutOfMemory || e.Signal != int(unix.SIGKILL) || e.Code != 137 {
		t.Errorf("a process that used more memory than it may ended with %+v", e)
	}
	if err := r.Remove(t.Context(), "uid-limited"); err != nil {
		t.Fatal(err)
	}
	for _, g := range groups {
		if _, err := os.Stat(filepath.Dir(g)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", filepath.Dir(g), err)
		}
	}
}

// TestLimitsOfAKilledLab: what a daemon left is removed by record, without it.
func TestLimitsOfAKilledLab(t *testing.T) {
	r := open(t)
	p := start(t, create(t, r, "left"), sandbox.ProcessSpec{Busybox: true, Limits: sandbox.Limits{Memory: 32 << 20}}, "while :; do sleep 60; done")
	if errors.Is(p.LimitError(), sandbox.ErrNoController) {
		t.Skip(p.LimitError())
	}
	group := p.Cgroups()[0]
	dir := filepath.Dir(filepath.Dir(r.Program()))
	if err := errors.Join(r.Close(), sandbox.Destroy(t.Context(), dir)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Dir(group)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left: %v", filepath.Dir(group), err)
	}
}
