// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox"
	"github.com/kplab/kplab/sandbox/reexec"
)

// BenchmarkSandbox makes and removes pods one after the other. raw-us is what the
// kernel takes for a namespace alone in the same run; the ratios are to that.
func BenchmarkSandbox(b *testing.B) {
	r := open(b)
	var creating, removing time.Duration
	n := 0
	var ids []string
	for b.Loop() {
		begin := time.Now()
		id := fmt.Sprintf("bench-%d", n)
		if _, err := r.Create(b.Context(), sandbox.Spec{ID: id, Namespace: "default", Name: id}); err != nil {
			b.Fatal(err)
		}
		creating += time.Since(begin)
		ids = append(ids, id)
		n++
		if len(ids) < 100 {
			continue
		}
		removing += removeAll(b, r, ids)
		ids = nil
	}
	removing += removeAll(b, r, ids)
	raw := rawUnshare(b, 300)
	b.ReportMetric(float64(n)/creating.Seconds(), "pods/s")
	b.ReportMetric(creating.Seconds()/float64(n)/raw.Seconds(), "create/raw")
	b.ReportMetric(removing.Seconds()/float64(n)/raw.Seconds(), "remove/raw")
	b.ReportMetric(raw.Seconds()*1e6, "raw-us")
}

func removeAll(b *testing.B, r *sandbox.Runtime, ids []string) time.Duration {
	b.Helper()
	begin := time.Now()
	for _, id := range ids {
		if err := r.Remove(b.Context(), id); err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(begin)
}

// rawUnshare returns the time of one unshare(CLONE_NEWNET).
func rawUnshare(b *testing.B, n int) time.Duration {
	b.Helper()
	done := make(chan error)
	var took time.Duration
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		begin := time.Now()
		var err error
		for i := 0; i < n && err == nil; i++ {
			err = unix.Unshare(unix.CLONE_NEWNET)
		}
		took = time.Since(begin) / time.Duration(n)
		done <- err
	}()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	return took
}

// BenchmarkExec runs true in a container with a process (joined) and in one
// without (own), one after the other without a pause (row) and with time for the
// next role to be started ahead (paused), which is what a person or a script that
// also does other things sees.
func BenchmarkExec(b *testing.B) {
	r := open(b)
	s := create(b, r, "bench")
	start(b, s, sandbox.ProcessSpec{Container: "app"}, "exec sleep 1000")
	for _, container := range []string{"app", "web"} {
		for _, pause := range []bool{false, true} {
			name := map[string]string{"app": "joined", "web": "own"}[container] + map[bool]string{false: "/row", true: "/paused"}[pause]
			b.Run(name, func(b *testing.B) {
				role := map[string]string{"app": reexec.RoleExec, "web": reexec.RoleInit}[container]
				for n := 0; b.Loop(); n++ {
					if pause && n > 0 {
						b.StopTimer()
						awaitRoles(b, r, role)
						b.StartTimer()
					}
					if code, err := s.Exec(b.Context(), sandbox.ExecSpec{Container: container, Args: []string{"/bin/true"}}); err != nil || code != 0 {
						b.Fatal(code, err)
					}
				}
			})
		}
	}
}

// awaitRoles waits until the role that was started ahead waits for work.
func awaitRoles(b *testing.B, r *sandbox.Runtime, role string) {
	b.Helper()
	nettest.Eventually(b, 10*time.Second, "roles wait", func() error {
		pid := r.Waiting(role)
		in, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", pid))
		if err == nil && !strings.HasPrefix(string(in), fmt.Sprint(unix.SYS_RECVMSG, " ")) {
			err = fmt.Errorf("pid %d: %s", pid, in)
		}
		return err
	})
}

// BenchmarkStart starts a container's process and waits for its end.
func BenchmarkStart(b *testing.B) {
	r := open(b)
	s := create(b, r, "bench")
	n := 0
	for b.Loop() {
		if n > 0 {
			b.StopTimer()
			awaitRoles(b, r, reexec.RoleShim)
			b.StartTimer()
		}
		p, err := s.Start(b.Context(), sandbox.ProcessSpec{Container: "app", Attempt: n, Args: []string{"/bin/true"}})
		if err != nil {
			b.Fatal(err)
		}
		<-p.Done()
		n++
	}
}
