// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox"
)

func TestNamespacesByName(t *testing.T) {
	r := open(t)
	a, err := r.CreateNetNS("node-a")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := r.CreateNetNS("node-a"); err != nil || b.Inode() != a.Inode() {
		t.Errorf("second create: %v", err)
	}
	if _, err := r.NetNS("absent"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent: %v", err)
	}
	if names, err := sandbox.PinnedNames(r.Dir()); err != nil || !slices.Equal(names, []string{"node-a"}) {
		t.Errorf("there are %v, %v", names, err)
	}
	for _, name := range []string{"", ".uts", "a/b", "..", "a b"} {
		if _, err := r.CreateNetNS(name); err == nil {
			t.Errorf("name %q was accepted", name)
		}
	}
	// A pin that was never mounted: the daemon died in between.
	if err := os.WriteFile(sandbox.NetNSPath(r.Dir(), "half"), nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if ns, err := r.CreateNetNS("half"); err != nil || ns.Inode() == 0 {
		t.Errorf("half-made pin: %v", err)
	}
}

func TestCreateAndRemoveAreRepeatable(t *testing.T) {
	r := open(t)
	s := create(t, r, "twice")
	if again := create(t, r, "twice"); again != s {
		t.Error("made a second one")
	}
	if got := r.Get("uid-twice"); got != s {
		t.Error("Get finds another")
	}
	specs, err := sandbox.Specs(r.Dir())
	if err != nil || len(specs) != 1 || specs[0].Name != "twice" {
		t.Errorf("specs on disk: %v, %v", specs, err)
	}
	for range 2 {
		if err := r.Remove(t.Context(), "uid-twice"); err != nil {
			t.Error(err)
		}
	}
	if len(r.List()) != 0 {
		t.Errorf("left %v", r.List())
	}
	if _, err := s.Start(t.Context(), sandbox.ProcessSpec{Container: "a", Args: []string{"true"}}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("start in a removed sandbox: %v", err)
	}
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			id := fmt.Sprintf("p%d", i%10)
			if _, err := r.Create(t.Context(), sandbox.Spec{ID: id, Name: id}); err != nil {
				t.Error(err)
			}
			if i%3 == 0 {
				if err := r.Remove(t.Context(), id); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// Whatever the host's settings are, a pod's are its own.
func TestPodSettings(t *testing.T) {
	nettest.Need(t, "users") // a group of one cannot be a range
	r := open(t)
	s := create(t, r, "net")
	read := func(file string) string {
		var data []byte
		err := s.NetNS().Do(func() (err error) {
			data, err = os.ReadFile("/proc/sys/net/" + file)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(strings.Fields(string(data)), " ")
	}
	check := func(t *testing.T) {
		t.Helper()
		for file, want := range map[string]string{
			"ipv4/ip_forward": "0", "ipv4/conf/all/rp_filter": "0", "ipv4/conf/default/rp_filter": "0",
			"ipv4/conf/all/accept_redirects": "0", "ipv4/conf/default/send_redirects": "0", "ipv4/conf/all/send_redirects": "0",
			"ipv4/conf/all/route_localnet": "0", "ipv4/conf/default/arp_ignore": "0", "ipv4/conf/all/forwarding": "0",
			"ipv6/conf/all/accept_ra": "0", "ipv6/conf/default/accept_ra": "0", "ipv6/conf/all/forwarding": "0",
			"ipv4/ping_group_range": "0 2147483647", "ipv4/ip_unprivileged_port_start": "0",
		} {
			if got := read(file); got != want {
				t.Errorf("%s = %q, want %q", file, got, want)
			}
		}
	}
	check(t)
	// As on a host that routes and is hardened.
	err := s.NetNS().Do(func() error {
		for file, value := range map[string]string{
			"ipv4/ip_forward": "1", "ipv4/conf/all/rp_filter": "1", "ipv4/conf/default/rp_filter": "2", "ipv4/conf/all/route_localnet": "1",
			"ipv4/conf/default/arp_ignore": "1", "ipv6/conf/all/forwarding": "1", "ipv6/conf/all/accept_ra": "2", "ipv4/ip_unprivileged_port_start": "1024",
			"ipv4/ping_group_range": "1 0", "ipv4/conf/all/accept_redirects": "1", "ipv4/conf/default/send_redirects": "1",
		} {
			if err := os.WriteFile("/proc/sys/net/"+file, []byte(value), 0); err != nil {
				return err
			}
		}
		return sandbox.PreparePod()
	})
	if err != nil {
		t.Fatal(err)
	}
	check(t)
}

func TestContainersOfAPodShare(t *testing.T) {
	r := open(t)
	s := create(t, r, "shared")
	a := start(t, s, sandbox.ProcessSpec{Container: "a"}, "exec sleep 1000")
	start(t, s, sandbox.ProcessSpec{Container: "b"}, "exec sleep 1000")
	namespaces := func(container string) map[string]string {
		out := run(t, s, "for n in net uts ipc pid mnt cgroup; do readlink /proc/self/ns/$n; done", func(spec *sandbox.ExecSpec) { spec.Container = container })
		m := make(map[string]string)
		for line := range strings.FieldsSeq(out) {
			kind, id, _ := strings.Cut(line, ":")
			m[kind] = id
		}
		return m
	}
	inA, inB := namespaces("a"), namespaces("b")
	for kind, same := range map[string]bool{"net": true, "uts": true, "ipc": true, "pid": false, "mnt": false} {
		if (inA[kind] == inB[kind]) != same {
			t.Errorf("%s: %s and %s", kind, inA[kind], inB[kind])
		}
	}
	if err := a.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if exit := await(t, a); exit.Code != 137 || exit.Signal != 9 {
		t.Errorf("exit %+v", exit)
	}
	if _, err := s.Exec(t.Context(), sandbox.ExecSpec{Container: "a", Args: []string{"true"}}); !errors.Is(err, sandbox.ErrNotRunning) {
		t.Errorf("exec in an ended container: %v", err)
	}
	// The next attempt is in the same shared namespaces.
	start(t, s, sandbox.ProcessSpec{Container: "a", Attempt: 1}, "exec sleep 1000")
	if again := namespaces("a"); again["uts"] != inB["uts"] || again["ipc"] != inB["ipc"] {
		t.Errorf("restarted container is in %v, want %v", again, inB)
	}
	if _, err := s.Start(t.Context(), sandbox.ProcessSpec{Container: "a", Attempt: 1, Args: []string{"true"}}); err == nil {
		t.Error("an attempt was started twice")
	}
}

func TestOldAttemptsAreForgotten(t *testing.T) {
	r := open(t)
	s := create(t, r, "loop")
	for i := range 5 {
		await(t, start(t, s, sandbox.ProcessSpec{Attempt: i}, "exit 1"))
	}
	var kept []int
	for _, p := range s.Processes() {
		kept = append(kept, p.Attempt())
	}
	if fmt.Sprint(kept) != "[2 3 4]" {
		t.Errorf("kept %v", kept)
	}
	dirs, err := filepath.Glob(filepath.Join(s.Dir(), "p", "*"))
	if err != nil || len(dirs) != 3 {
		t.Errorf("records %v, %v", dirs, err)
	}
}

func TestProgramsThatCannotStart(t *testing.T) {
	r := open(t)
	s := create(t, r, "bad")
	start(t, s, sandbox.ProcessSpec{Container: "app"}, "exec sleep 1000")
	for _, tc := range []struct {
		program string
		code    int
		want    error
	}{
		{"no-such-program", 127, sandbox.ErrProgramNotFound},
		{"/no/such/program", 127, sandbox.ErrProgramNotFound},
		{"/etc/passwd", 126, sandbox.ErrProgramDenied},
		{"/usr", 126, sandbox.ErrProgramDenied},
	} {
		_, err := s.Start(t.Context(), sandbox.ProcessSpec{Container: "new", Args: []string{tc.program}})
		if !errors.Is(err, tc.want) || !strings.Contains(fmt.Sprint(err), tc.program) {
			t.Errorf("start %s: %v", tc.program, err)
		}
		for _, container := range []string{"app", "web"} {
			code, err := s.Exec(t.Context(), sandbox.ExecSpec{Container: container, Args: []string{tc.program}})
			if code != tc.code || !errors.Is(err, tc.want) {
				t.Errorf("exec %s in %s: %d, %v", tc.program, container, code, err)
			}
		}
	}
	if n := len(s.Processes()); n != 1 {
		t.Errorf("%d processes", n)
	}
	if dirs, _ := filepath.Glob(filepath.Join(s.Dir(), "p", "*")); len(dirs) != 1 {
		t.Errorf("records of failed starts: %v", dirs)
	}
}

func TestExecStreamsAndCodes(t *testing.T) {
	r := open(t)
	s := create(t, r, "io")
	start(t, s, sandbox.ProcessSpec{Container: "app"}, "exec sleep 1000")
	big := strings.Repeat("0123456789abcdef\n", 20000)
	for _, container := range []string{"app", "web"} {
		var out, errOut bytes.Buffer
		code, err := s.Exec(t.Context(), sandbox.ExecSpec{
			Container: container, Args: []string{"/bin/sh", "-c", "cat; echo problem >&2; exit 42"},
			Stdin: strings.NewReader(big), Stdout: &out, Stderr: &errOut,
		})
		if err != nil || code != 42 || out.String() != big || errOut.String() != "problem\n" {
			t.Errorf("%s: code %d, %v, %d bytes, stderr %q", container, code, err, out.Len(), errOut.String())
		}
		if code, err := s.Exec(t.Context(), sandbox.ExecSpec{Container: container, Args: []string{"/bin/sh", "-c", "kill -TERM $$; sleep 1"}}); container == "app" && (err != nil || code != 143) {
			t.Errorf("%s: signal gave %d, %v", container, code, err)
		}
		// Input that never ends does not hold up the end.
		pr, pw := io.Pipe()
		if code, err := s.Exec(t.Context(), sandbox.ExecSpec{Container: container, Args: []string{"true"}, Stdin: pr}); err != nil || code != 0 {
			t.Errorf("%s: %d, %v", container, code, err)
		}
		_ = pw.Close()
		// A child in the background holds the pipe.
		begin := time.Now()
		out.Reset()
		if code, err := s.Exec(t.Context(), sandbox.ExecSpec{Container: container, Args: []string{"/bin/sh", "-c", "sleep 30 & echo done"}, Stdout: &out}); err != nil || code != 0 || out.String() != "done\n" {
			t.Errorf("%s: %d, %v, %q", container, code, err, out.String())
		}
		if d := time.Since(begin); d > 10*time.Second {
			t.Errorf("%s: waited %v for a background child", container, d)
		}
		// The context ends it.
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		if _, err := s.Exec(ctx, sandbox.ExecSpec{Container: container, Args: []string{"sleep", "1000"}}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", container, err)
		}
		cancel()
	}
	nettest.Eventually(t, 5*time.Second, "killed programs are gone", func() error {
		out := run(t, s, "ps ax | grep -c '[s]leep 1000'", func(s *sandbox.ExecSpec) { s.Container = "app" })
		if out != "1\n" { // the container's own
			return fmt.Errorf("%q are left", out)
		}
		return nil
	})
}

func TestTerminals(t *testing.T) {
	r := open(t)
	s := create(t, r, "tty")
	start(t, s, sandbox.ProcessSpec{Container: "app"}, "exec sleep 1000")
	for _, container := range []string{"app", "web"} {
		var out bytes.Buffer
		sizes := make(chan sandbox.Size, 1)
		sizes <- sandbox.Size{Width: 123, Height: 45}
		code, err := s.Exec(t.Context(), sandbox.ExecSpec{
			Container: container, TTY: true, Stdin: strings.NewReader("typed\n"), Stdout: &out, Resize: sizes,
			Args: []string{"/bin/sh", "-c", "tty; read x; echo got $x; until stty size | grep -q '45 123'; do :; done; stty size; echo $TERM; exit 3"},
		})
		if err != nil || code != 3 {
			t.Errorf("%s: %d, %v", container, code, err)
		}
		for _, want := range []string{"/dev/pts/0\r\n", "got typed\r\n", "45 123\r\n", "xterm\r\n"} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s: no %q in %q", container, want, out.String())
			}
		}
	}
	log := filepath.Join(t.TempDir(), "log")
	p := start(t, s, sandbox.ProcessSpec{Container: "shell", TTY: true, Stdin: true, LogPath: log}, "tty; until stty size | grep -q '30 100'; do :; done; stty size; read x; echo got $x; exit 4")
	var out bytes.Buffer
	sizes := make(chan sandbox.Size, 1)
	sizes <- sandbox.Size{Width: 100, Height: 30}
	if err := p.Attach(t.Context(), sandbox.AttachSpec{Stdin: strings.NewReader("in\n"), Stdout: &out, Resize: sizes}); err != nil {
		t.Error(err)
	}
	if exit := await(t, p); exit.Code != 4 {
		t.Errorf("exit %+v", exit)
	}
	for _, want := range []string{"30 100\r\n", "got in\r\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("attached: no %q in %q", want, out.String())
		}
	}
	if got := strings.Join(logOf(t, log), "|"); !strings.Contains(got, "stdout F got in\r") {
		t.Errorf("log %q", got)
	}
}

func TestAttachFeedsOnce(t *testing.T) {
	r := open(t)
	s := create(t, r, "once")
	log := filepath.Join(t.TempDir(), "log")
	p := start(t, s, sandbox.ProcessSpec{LogPath: log, Stdin: true, StdinOnce: true}, "cat; echo end; echo err >&2")
	var out, errOut bytes.Buffer
	if err := p.Attach(t.Context(), sandbox.AttachSpec{Stdin: strings.NewReader("a\nb\n"), Stdout: &out, Stderr: &errOut}); err != nil {
		t.Error(err)
	}
	await(t, p)
	if out.String() != "a\nb\nend\n" || errOut.String() != "err\n" {
		t.Errorf("attached %q, %q", out.String(), errOut.String())
	}
	if err := p.Attach(t.Context(), sandbox.AttachSpec{}); !errors.Is(err, sandbox.ErrNotRunning) {
		t.Errorf("attach to an ended process: %v", err)
	}
}

func TestLogCutsLongLines(t *testing.T) {
	r := open(t)
	s := create(t, r, "long")
	log := filepath.Join(t.TempDir(), "log")
	await(t, start(t, s, sandbox.ProcessSpec{LogPath: log}, "head -c 40000 /dev/zero | tr '\\0' x; echo; echo short"))
	var shape []string
	for _, line := range logOf(t, log) {
		f := strings.SplitN(line, " ", 3)
		shape = append(shape, fmt.Sprint(f[1], len(f[2])))
	}
	if got := strings.Join(shape, " "); got != "P16384 P16384 F7232 F5" {
		t.Errorf("records %s", got)
	}
}

func TestRemoveEndsEverything(t *testing.T) {
	r := open(t)
	s := create(t, r, "busy")
	path := sandbox.NetNSPath(r.Dir(), "pod-uid-busy")
	ns, err := netns.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	inode := ns.Inode()
	if err := ns.Close(); err != nil {
		t.Fatal(err)
	}
	p := start(t, s, sandbox.ProcessSpec{}, "sleep 1000 & sleep 1000 & trap '' TERM; wait")
	execs := make(chan error, 2)
	for _, container := range []string{"app", "web"} {
		go func() {
			code, err := s.Exec(t.Context(), sandbox.ExecSpec{Container: container, Args: []string{"sleep", "1000"}})
			if code == 137 { // killed with its container
				err = sandbox.ErrNotRunning
			}
			execs <- err
		}()
	}
	nettest.Eventually(t, 10*time.Second, "both run", func() error {
		n := 0
		links, _ := filepath.Glob("/proc/[0-9]*/ns/net")
		for _, l := range links {
			if to, err := os.Readlink(l); err == nil && to == fmt.Sprintf("net:[%d]", inode) {
				if cmd, _ := os.ReadFile(strings.TrimSuffix(l, "ns/net") + "cmdline"); string(cmd) == "sleep\x001000\x00" {
					n++
				}
			}
		}
		if n != 4 {
			return fmt.Errorf("%d of 4", n)
		}
		return nil
	})
	if err := r.Remove(t.Context(), "uid-busy"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-execs; err == nil {
			t.Error("an exec ended well")
		}
	}
	links, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, l := range links {
		if to, _ := os.Readlink(l); to == fmt.Sprintf("net:[%d]", inode) {
			t.Errorf("%s is still in the pod's namespace", l)
		}
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("pin: %v", err)
	}
	_ = p
}

func TestNetworkOfANode(t *testing.T) {
	r := open(t)
	node, err := r.CreateNetNS("node-a")
	if err != nil {
		t.Fatal(err)
	}
	s, err := r.Create(t.Context(), sandbox.Spec{ID: "host", Name: "host", Network: "node-a", Hostname: "a"})
	if err != nil {
		t.Fatal(err)
	}
	start(t, s, sandbox.ProcessSpec{}, "exec sleep 1000")
	for _, container := range []string{"app", "web"} {
		out := run(t, s, "readlink /proc/self/ns/net; hostname", func(spec *sandbox.ExecSpec) { spec.Container = container })
		if want := fmt.Sprintf("net:[%d]\na\n", node.Inode()); out != want {
			t.Errorf("%s: in %q, want %q", container, out, want)
		}
	}
}

// The first client of a container that was started to be talked to gets what was
// said before it came; the next one does not.
func TestFirstAttachHasTheEarlyOutput(t *testing.T) {
	r := open(t)
	s := create(t, r, "early")
	log := filepath.Join(t.TempDir(), "log")
	p := start(t, s, sandbox.ProcessSpec{LogPath: log, Stdin: true}, "seq 20000; read x; echo got $x; read y; echo got $y")
	logged(t, log, " 20000\n")
	ctx, detach := context.WithCancel(t.Context())
	defer detach()
	seen, w := io.Pipe()
	first := make(chan error, 1)
	go func() {
		first <- p.Attach(ctx, sandbox.AttachSpec{Stdin: strings.NewReader("one\n"), Stdout: w, Early: true})
	}()
	lines := bufio.NewScanner(seen)
	last := ""
	for lines.Scan() && lines.Text() != "got one" {
		last = lines.Text()
	}
	// The end of it, when there was much.
	if last != "20000" {
		t.Errorf("before the answer comes %q", last)
	}
	detach()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("first client: %v", err)
	}
	var out bytes.Buffer
	if err := p.Attach(t.Context(), sandbox.AttachSpec{Stdin: strings.NewReader("two\n"), Stdout: &out, Early: true}); err != nil || out.String() != "got two\n" {
		t.Errorf("second client: %v, %q", err, out.String())
	}
	await(t, p)
}

// Early output keeps its stream.
func TestFirstAttachHasTheEarlyErrors(t *testing.T) {
	r := open(t)
	s := create(t, r, "early")
	log := filepath.Join(t.TempDir(), "log")
	p := start(t, s, sandbox.ProcessSpec{LogPath: log, Stdin: true}, "echo early >&2; read x; echo got $x")
	logged(t, log, " early\n")
	var out, errOut bytes.Buffer
	if err := p.Attach(t.Context(), sandbox.AttachSpec{Stdin: strings.NewReader("one\n"), Stdout: &out, Stderr: &errOut, Early: true}); err != nil || out.String() != "got one\n" || errOut.String() != "early\n" {
		t.Errorf("%v, %q, %q", err, out.String(), errOut.String())
	}
	await(t, p)
}

// logged waits until a container's log holds a text.
func logged(t *testing.T, log, text string) {
	t.Helper()
	nettest.Eventually(t, 20*time.Second, "the log", func() error {
		data, err := os.ReadFile(log)
		if err == nil && !strings.Contains(string(data), text) {
			err = fmt.Errorf("%d bytes", len(data))
		}
		return err
	})
}

// A container may live in another's process namespace: it sees its processes, has a
// root of its own, and leaves nothing when it ends.
func TestSharedProcesses(t *testing.T) {
	r := open(t)
	s := create(t, r, "share")
	app := start(t, s, sandbox.ProcessSpec{}, "exec sleep 7654")
	if _, err := s.Start(t.Context(), sandbox.ProcessSpec{Container: "lost", ShareWith: "nobody", Args: []string{"true"}}); !errors.Is(err, sandbox.ErrNotRunning) {
		t.Errorf("share with nobody: %v", err)
	}
	log := filepath.Join(t.TempDir(), "log")
	p := start(t, s, sandbox.ProcessSpec{Container: "debug", ShareWith: "app", LogPath: log, Files: map[string][]byte{"/etc/mine": []byte("mine\n")}},
		"tr '\\0' ' ' < /proc/1/cmdline; echo; cat /etc/mine; ls /proc/1/root/etc/mine; setsid sleep 4567 & sleep 4567 & exit 3")
	if exit := await(t, p); exit.Code != 3 {
		t.Errorf("exit %+v", exit)
	}
	got := strings.Join(logOf(t, log), "|")
	for _, want := range []string{"stdout F sleep 7654 |", "stdout F mine|", "stderr F ls: cannot access"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in %q", want, got)
		}
	}
	var out bytes.Buffer
	if _, err := s.Exec(t.Context(), sandbox.ExecSpec{Container: "app", Args: []string{"sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"}, Stdout: &out}); err != nil {
		t.Error(err)
	}
	if !strings.Contains(out.String(), "sleep 7654") || strings.Contains(out.String(), "4567") {
		t.Errorf("what is left: %q", out.String())
	}
	// When the other one ends, so does this one.
	p = start(t, s, sandbox.ProcessSpec{Container: "debug", Attempt: 1, ShareWith: "app"}, "exec sleep 4567")
	if err := app.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if exit := await(t, p); exit.Code != 137 {
		t.Errorf("exit %+v", exit)
	}
	await(t, app)
}
