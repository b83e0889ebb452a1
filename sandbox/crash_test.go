// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox"
)

// daemonEnv makes the test binary a daemon on the directory that it names.
const daemonEnv = "KPLAB_TEST_DAEMON"

// daemon makes two pods, three processes and a node's namespace, says so, and
// waits to be killed.
func daemon(dir string) int {
	ctx := context.Background()
	r, err := sandbox.Open(sandbox.Config{Dir: dir})
	if err == nil {
		_, err = r.CreateNetNS("node-a")
	}
	for _, pod := range []string{"one", "two"} {
		var s *sandbox.Sandbox
		if err == nil {
			s, err = r.Create(ctx, sandbox.Spec{ID: "uid-" + pod, Node: "a", Namespace: "default", Name: pod})
		}
		scripts := map[string]string{"stays": "echo begin; read line; echo got $line; sleep 1000", "ends": "read line; exit 5"}
		if pod == "two" {
			scripts = map[string]string{"killed": "exec sleep 1000"}
		}
		for name, script := range scripts {
			if err == nil {
				_, err = s.Start(ctx, sandbox.ProcessSpec{
					Container: name, Attempt: 3, Args: []string{"/bin/sh", "-c", script}, Stdin: true,
					LogPath: filepath.Join(dir, "log-"+name),
				})
			}
		}
	}
	if err != nil {
		fmt.Println("failed:", err)
		return 1
	}
	fmt.Println("ready")
	select {}
}

// startDaemon runs daemon in a process of its own and returns when it is ready.
func startDaemon(t *testing.T, dir string) (kill func()) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), daemonEnv+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("daemon: %q, %v", line, err)
	}
	return func() {
		_ = cmd.Process.Signal(syscall.SIGKILL)
		_ = cmd.Wait()
	}
}

// crashDir returns a runtime directory that is destroyed at the end.
func crashDir(t *testing.T) string {
	t.Helper()
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	dir := filepath.Join(t.TempDir(), "run")
	t.Cleanup(func() {
		if err := sandbox.Destroy(context.Background(), dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestAdoptAfterKill(t *testing.T) {
	dir := crashDir(t)
	kill := startDaemon(t, dir)
	inode := func(name string) uint64 {
		ns, err := netns.Open(sandbox.NetNSPath(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		ino := ns.Inode()
		if err := ns.Close(); err != nil {
			t.Error(err)
		}
		return ino
	}
	before := map[string]uint64{"node-a": inode("node-a"), "pod-uid-one": inode("pod-uid-one")}
	kill()

	r := reopen(t, dir)
	names, err := sandbox.PinnedNames(r.Dir())
	if err != nil || !slices.Equal(names, []string{"node-a", "pod-uid-one", "pod-uid-two"}) {
		t.Fatalf("namespaces %v, %v", names, err)
	}
	ns, err := r.CreateNetNS("node-a")
	if err != nil || ns.Inode() != before["node-a"] {
		t.Errorf("the node's namespace is another: %v", err)
	}
	list := r.List()
	if len(list) != 2 || list[0].Spec().Name != "one" || list[0].Spec().Node != "a" || list[0].Spec().Hostname != "one" {
		t.Fatalf("sandboxes %v", list)
	}
	one := list[0]
	if one.NetNS().Inode() != before["pod-uid-one"] {
		t.Error("the pod's namespace is another")
	}
	again, err := r.Create(t.Context(), one.Spec())
	if err != nil || again != one {
		t.Errorf("Create of an adopted pod made %p, %v; want %p", again, err, one)
	}
	procs := one.Processes()
	if len(procs) != 2 || procs[0].Container() != "ends" || procs[1].Container() != "stays" || procs[1].Attempt() != 3 {
		t.Fatalf("processes %v", procs)
	}
	ends, stays := procs[0], procs[1]
	for _, p := range procs {
		if _, ended := p.Exit(); ended || p.Pid() == 0 || time.Since(p.StartedAt()) > time.Minute {
			t.Fatalf("%s: ended %v, pid %d, started %v", p.Container(), ended, p.Pid(), p.StartedAt())
		}
	}
	// The shims still feed and log their processes.
	var out bytes.Buffer
	ctx, cancel := context.WithCancel(t.Context())
	attached := make(chan error, 1)
	go func() {
		attached <- stays.Attach(ctx, sandbox.AttachSpec{Stdin: strings.NewReader("hello\n"), Stdout: &out})
	}()
	nettest.Eventually(t, 10*time.Second, "output after adoption", func() error {
		if log := logOf(t, filepath.Join(dir, "log-stays")); !slices.Contains(log, "stdout F got hello") {
			return fmt.Errorf("log %q", log)
		}
		return nil
	})
	cancel()
	if err := <-attached; !errors.Is(err, context.Canceled) {
		t.Errorf("attach: %v", err)
	}
	if err := ends.Attach(t.Context(), sandbox.AttachSpec{Stdin: strings.NewReader("x\n")}); err != nil {
		t.Errorf("attach: %v", err)
	}
	if exit := await(t, ends); exit.Code != 5 || exit.Signal != 0 {
		t.Errorf("exit %+v", exit)
	}
	if got := run(t, one, "hostname; ps axo comm | grep -c '^sleep'", func(s *sandbox.ExecSpec) { s.Container = "stays" }); got != "one\n1\n" {
		t.Errorf("exec in an adopted container: %q", got)
	}
	if err := r.Remove(t.Context(), "uid-one"); err != nil {
		t.Error(err)
	}
	if err := stays.Signal(syscall.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("signal after Remove: %v", err)
	}
}

func TestExitFoundAfterKill(t *testing.T) {
	dir := crashDir(t)
	startDaemon(t, dir)()
	// While no daemon runs, one process ends, and another one's shim is killed.
	r := reopen(t, dir)
	for _, p := range r.List()[0].Processes() {
		if p.Container() == "ends" {
			if err := p.Attach(t.Context(), sandbox.AttachSpec{Stdin: strings.NewReader("x\n")}); err != nil {
				t.Fatal(err)
			}
			await(t, p)
		}
	}
	killed := r.List()[1].Processes()[0]
	shim := parentOf(t, killed.Pid())
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(shim, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, 10*time.Second, "a process ends with its shim", func() error {
		if unix.Kill(killed.Pid(), 0) == nil {
			return errors.New("it is there")
		}
		return nil
	})
	r = reopen(t, dir)
	if exit, ok := r.List()[0].Processes()[0].Exit(); !ok || exit.Code != 5 {
		t.Errorf("exit %+v, %v", exit, ok)
	}
	if exit, ok := r.List()[1].Processes()[0].Exit(); !ok || exit.Code != 137 || exit.Signal != 9 {
		t.Errorf("exit %+v, %v", exit, ok)
	}
}

// parentOf returns the parent of a process.
func parentOf(t *testing.T, pid int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.SplitSeq(string(status), "\n") {
		var ppid int
		if n, _ := fmt.Sscanf(line, "PPid: %d", &ppid); n == 1 {
			return ppid
		}
	}
	t.Fatal("no parent")
	return 0
}

func TestDestroyAfterKill(t *testing.T) {
	dir := crashDir(t)
	startDaemon(t, dir)()
	// Somebody has a shell open on a node.
	ns, err := netns.Open(sandbox.NetNSPath(dir, "node-a"))
	if err != nil {
		t.Fatal(err)
	}
	shell := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := errors.Join(ns.Start(shell), ns.Close()); err != nil {
		t.Fatal(err)
	}
	// A file of somebody else's stays.
	for range 2 {
		if err := sandbox.Destroy(t.Context(), dir); err != nil {
			t.Fatal(err)
		}
	}
	if err := shell.Wait(); err == nil {
		t.Error("the shell on the node was left")
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(left) != 3 { // the daemon's own log files
		t.Errorf("left: %v, %v", left, err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
}

// A daemon killed at any moment leaves something that Open and Destroy can cope
// with.
func TestKilledAtAnyMoment(t *testing.T) {
	dir := crashDir(t)
	for i := range 10 {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
		cmd.Env = append(os.Environ(), daemonEnv+"="+dir)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		nettest.Eventually(t, 10*time.Second, "the moment", func() error {
			if d := time.Since(begin); d < time.Duration(20+i*15)*time.Millisecond {
				return fmt.Errorf("only %v", d)
			}
			return nil
		})
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if i%2 == 0 {
			r := reopen(t, dir)
			for _, s := range r.List() {
				if out := run(t, s, "echo ok"); out != "ok\n" {
					t.Errorf("pod %s: %q", s.Spec().Name, out)
				}
			}
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}
		if err := sandbox.Destroy(t.Context(), dir); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
}

// Records of an earlier boot name pids that are somebody else's by now.
func TestOtherBoot(t *testing.T) {
	dir := crashDir(t)
	nettest.NeedRoot(t)
	bystander := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := bystander.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bystander.Process.Kill(); _ = bystander.Wait() })
	r := reopen(t, dir)
	s := create(t, r, "old")
	p := start(t, s, sandbox.ProcessSpec{}, "exec sleep 1000")
	if err := errors.Join(r.Remove(t.Context(), "uid-old"), r.Close()); err != nil {
		t.Fatal(err)
	}
	_ = p
	pdir := filepath.Join(dir, "sandboxes", "uid-old", "p", "app.0")
	if err := os.MkdirAll(pdir, 0o700); err != nil {
		t.Fatal(err)
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", bystander.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	startTime := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))[19]
	rec := fmt.Sprintf(`{"shim":{"pid":%d,"start":%s},"container":"app"}`, bystander.Process.Pid, startTime)
	for path, content := range map[string]string{filepath.Join(pdir, "process.json"): rec, filepath.Join(dir, "boot"): "another"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := sandbox.Destroy(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(bystander.Process.Pid, 0); err != nil || state(t, bystander.Process.Pid) == "Z" {
		t.Errorf("a process of this boot was killed for a record of another: %v", err)
	}
}

func state(t *testing.T, pid int) string {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))[0]
}
