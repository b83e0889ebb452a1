// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(daemonEnv); dir != "" {
		os.Exit(daemon(dir))
	}
	nettest.Main(m)
}

// open returns a Runtime on a new directory; at the end of the test everything of
// it is destroyed, twice.
func open(tb testing.TB) *sandbox.Runtime {
	tb.Helper()
	nettest.NeedRoot(tb)
	nettest.LeakCheck(tb)
	dir := filepath.Join(tb.TempDir(), "run")
	tb.Cleanup(func() {
		for range 2 {
			if err := sandbox.Destroy(context.Background(), dir); err != nil {
				tb.Error(err)
			}
		}
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			tb.Errorf("%s is left: %v", dir, err)
		}
	})
	return reopen(tb, dir)
}

// reopen opens a Runtime on what is in dir.
func reopen(tb testing.TB, dir string) *sandbox.Runtime {
	tb.Helper()
	r, err := sandbox.Open(sandbox.Config{Dir: dir})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := r.Close(); err != nil {
			tb.Error(err)
		}
	})
	return r
}

// create makes the sandbox of pod default/NAME.
func create(tb testing.TB, r *sandbox.Runtime, name string) *sandbox.Sandbox {
	tb.Helper()
	s, err := r.Create(tb.Context(), sandbox.Spec{ID: "uid-" + name, Node: "node1", Namespace: "default", Name: name})
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// run executes a shell script in a container without a process and returns what
// it wrote.
func run(tb testing.TB, s *sandbox.Sandbox, script string, change ...func(*sandbox.ExecSpec)) string {
	tb.Helper()
	var out bytes.Buffer
	spec := sandbox.ExecSpec{Container: "web", Args: []string{"/bin/sh", "-c", script}, Stdout: &out, Stderr: &out}
	for _, f := range change {
		f(&spec)
	}
	ctx, cancel := context.WithTimeout(tb.Context(), 20*time.Second)
	defer cancel()
	code, err := s.Exec(ctx, spec)
	if err != nil {
		tb.Fatalf("%s: %v", script, err)
	}
	if code != 0 {
		fmt.Fprintf(&out, "exit code %d\n", code)
	}
	return out.String()
}

// start starts a shell script as a container's process.
func start(tb testing.TB, s *sandbox.Sandbox, spec sandbox.ProcessSpec, script string) *sandbox.Process {
	tb.Helper()
	if spec.Container == "" {
		spec.Container = "app"
	}
	spec.Args = []string{"/bin/sh", "-c", script}
	p, err := s.Start(tb.Context(), spec)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

// await waits for the end of a process.
func await(tb testing.TB, p *sandbox.Process) sandbox.Exit {
	tb.Helper()
	select {
	case <-p.Done():
	case <-time.After(20 * time.Second):
		tb.Fatalf("container %s has not ended", p.Container())
	}
	exit, ok := p.Exit()
	if !ok {
		tb.Fatal("ended without an exit")
	}
	return exit
}

// logOf reads a log without the times.
func logOf(tb testing.TB, path string) []string {
	tb.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	var lines []string
	for line := range strings.SplitSeq(strings.TrimSuffix(string(data), "\n"), "\n") {
		at, rest, _ := strings.Cut(line, " ")
		if _, err := time.Parse(time.RFC3339Nano, at); err != nil {
			tb.Errorf("log line %q: %v", line, err)
		}
		lines = append(lines, rest)
	}
	return lines
}

func TestExecInAPodWithoutProcesses(t *testing.T) {
	r := open(t)
	s := create(t, r, "web")
	out := run(t, s, "echo hello; hostname; id -u; pwd; readlink /proc/self/ns/net; echo $HOME; ps ax | wc -l")
	want := fmt.Sprintf("hello\nweb\n0\n/\nnet:[%d]\n/root\n", s.NetNS().Inode())
	if !strings.HasPrefix(out, want) {
		t.Errorf("got:\n%s\nwant:\n%s", out, want)
	}
}

func TestProcessRunsAndEnds(t *testing.T) {
	r := open(t)
	s := create(t, r, "job")
	log := filepath.Join(t.TempDir(), "log")
	p := start(t, s, sandbox.ProcessSpec{LogPath: log, Env: []string{"A=b c"}},
		"echo \"$A\"; echo oops >&2; printf part; exit 7")
	if exit := await(t, p); exit.Code != 7 || exit.Signal != 0 || time.Since(exit.At) > time.Minute {
		t.Errorf("exit %+v", exit)
	}
	got := strings.Join(logOf(t, log), "\n")
	for _, want := range []string{"stdout F b c", "stderr F oops", "stdout P part"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in the log:\n%s", want, got)
		}
	}
}
