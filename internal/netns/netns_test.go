// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(replaceEnv); path != "" {
		fmt.Fprintln(os.Stderr, becomeReadlink(path)) // it comes back with an error only
		os.Exit(1)
	}
	nettest.Main(m)
}

// inode returns the network namespace of the current thread, read apart from the
// package under test.
func inode() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
		return 0, err
	}
	return st.Ino, nil
}

func home(t *testing.T) uint64 {
	t.Helper()
	ino, err := inode()
	if err != nil {
		t.Fatal(err)
	}
	return ino
}

func TestDoEntersAndLeaves(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	before := home(t)
	a, b := nettest.NewNS(t), nettest.NewNS(t)
	if a.Inode() == before || a.Inode() == b.Inode() {
		t.Fatalf("namespaces are not new: %d %d %d", before, a.Inode(), b.Inode())
	}
	err := a.Do(func() error {
		if got, err := inode(); err != nil || got != a.Inode() {
			return fmt.Errorf("in a: %d, %w, want %d", got, err, a.Inode())
		}
		return b.Do(func() error {
			if got, err := inode(); err != nil || got != b.Inode() {
				return fmt.Errorf("in b: %d, %w, want %d", got, err, b.Inode())
			}
			return nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := home(t); got != before {
		t.Fatalf("thread stayed in %d, want %d", got, before)
	}
	want := errors.New("fn failed")
	if err := a.Do(func() error { return want }); !errors.Is(err, want) {
		t.Fatalf("got %v", err)
	}
}

func TestManyAtOnceAllComeHome(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	before := home(t)
	a, b := nettest.NewNS(t), nettest.NewNS(t)
	var wg sync.WaitGroup
	errs := make(chan error, 400)
	for i := range 200 {
		ns := a
		if i%2 == 0 {
			ns = b
		}
		wg.Go(func() {
			errs <- ns.Do(func() error {
				runtime.Gosched()
				if got, err := inode(); err != nil || got != ns.Inode() {
					return fmt.Errorf("inside: %d, %w", got, err)
				}
				return nil
			})
			if got, err := inode(); err != nil || got != before {
				errs <- fmt.Errorf("outside: %d, %w", got, err)
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
}

// A thread that lost the right to go back must never run another goroutine.
func TestThreadThatCannotReturnEnds(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	before := home(t)
	ns := nettest.NewNS(t)
	var stuck int
	err := ns.Do(func() error {
		stuck = unix.Gettid()
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		return unix.Capset(&hdr, &none[0])
	})
	if err != nil {
		t.Fatal(err)
	}
	if stuck == os.Getpid() {
		t.Skip("the runtime used the main thread, which it parks instead")
	}
	nettest.Eventually(t, 5*time.Second, "thread ends", func() error {
		if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", stuck)); err == nil {
			return fmt.Errorf("thread %d is still there", stuck)
		}
		return nil
	})
	for range 50 {
		if err := ns.Do(func() error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if got := home(t); got != before {
		t.Fatalf("in %d, want %d", got, before)
	}
}

func TestDoPassesPanicAndGoexit(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	func() {
		defer func() {
			if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), "boom") {
				t.Errorf("recovered %v", r)
			}
		}()
		_ = ns.Do(func() error { panic("boom") })
	}()
	ended := make(chan bool, 1)
	go func() {
		defer func() { ended <- true }()
		_ = ns.Do(func() error { runtime.Goexit(); return nil })
		ended <- false
	}()
	if !<-ended {
		t.Error("Goexit did not go on in the caller")
	}
}

func TestOpen(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	again, err := netns.Open(ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	if again.Inode() != ns.Inode() || again.Path() != ns.Path() {
		t.Errorf("opened %d %s, want %d %s", again.Inode(), again.Path(), ns.Inode(), ns.Path())
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	if err := again.Do(func() error { return nil }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Do after Close: %v", err)
	}
	if _, err := netns.Open(filepath.Join(t.TempDir(), "gone")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent file: %v", err)
	}
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := netns.Open(plain); err == nil || !strings.Contains(err.Error(), "no network namespace") {
		t.Errorf("plain file: %v", err)
	}
}

func TestSocketsLiveInside(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	a, b := nettest.NewNS(t), nettest.NewNS(t)
	// The same address in both: only the namespace tells them apart.
	for _, ns := range []*netns.NS{a, b} {
		l, err := ns.Listen(ctx, "tcp", "127.0.0.1:80")
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = fmt.Fprintf(c, "%d", ns.Inode())
				_ = c.Close()
			}
		})
		t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	}
	for _, ns := range []*netns.NS{a, b} {
		c, err := ns.Dial(ctx, "tcp", "127.0.0.1:80")
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c)
		_ = c.Close()
		if err != nil || string(got) != fmt.Sprint(ns.Inode()) {
			t.Errorf("answer %q, %v; want %d", got, err, ns.Inode())
		}
	}
	if c, err := (&net.Dialer{}).DialContext(ctx, "tcp", "127.0.0.1:80"); err == nil {
		_ = c.Close()
		t.Error("the listener is in the process's namespace")
	}
	p, err := a.ListenPacket(ctx, "udp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if _, err := a.Dial(ctx, "tcp", "localhost:80"); err == nil || !strings.Contains(err.Error(), "no literal") {
		t.Errorf("a name was accepted: %v", err)
	}
}

func TestStart(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	var out strings.Builder
	cmd := exec.CommandContext(t.Context(), "/bin/readlink", "/proc/self/ns/net")
	cmd.Stdout = &out
	if err := ns.Start(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("net:[%d]\n", ns.Inode()); out.String() != want {
		t.Errorf("child is in %q, want %q", out.String(), want)
	}
}

func BenchmarkDo(b *testing.B) {
	nettest.NeedRoot(b)
	ns := nettest.NewNS(b)
	for b.Loop() {
		if err := ns.Do(func() error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkNew(b *testing.B) {
	nettest.NeedRoot(b)
	for b.Loop() {
		ns, err := netns.New()
		if err != nil {
			b.Fatal(err)
		}
		if err := ns.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkNewRaw is what BenchmarkNew is measured against: the system calls.
func BenchmarkNewRaw(b *testing.B) {
	nettest.NeedRoot(b)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		var err error
		for b.Loop() {
			if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
				break
			}
		}
		done <- err
	}()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
}
